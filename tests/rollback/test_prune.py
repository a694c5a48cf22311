"""Pruning deletes only what nothing needs any more, asks first, and is remembered."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chronicle.cli.main import run
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.layout import Checkpoint
from rollback.transaction.cleanup import plan_prune
from tests.rollback.accelerate_runs import make_run
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("pristine")
    make_run(top / "checkpoints", COMPUTED["cosine"], "registered", (5, 10, 15, 20))
    return top


@pytest.fixture
def top(pristine: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    return tmp_path


def chronicle(top: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")])


def abandoned(top: Path) -> list[str]:
    return sorted(path.name for path in (top / "abandoned").glob("*/*"))


def test_what_the_last_undo_needs_is_kept(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "prune", "--yes") == 0
    assert "nothing to prune" in capsys.readouterr().out
    assert abandoned(top) == ["opt_step-20"]
    assert chronicle(top, "undo", "--yes") == 0


def test_earlier_rollbacks_lose_what_they_moved_away(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "prune", "--yes") == 0
    assert abandoned(top) == ["opt_step-15"]
    assert sorted(p.name for p in top.iterdir()) == ["abandoned", "checkpoints", "logs"]
    entry = next(read_journal(RunPaths(top / "logs" / "r")).of_kind("prune"))
    assert [Path(path).name for path in entry.data["deleted"]] == ["opt_step-20"]


def test_undo_of_a_pruned_rollback_is_refused_before_anything_changed(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "prune", "--yes") == 0
    assert chronicle(top, "undo", "--yes") == 0
    before = picture(top / "checkpoints")
    assert chronicle(top, "undo", "--yes") == 3
    assert picture(top / "checkpoints") == before
    assert chronicle(top, "recover") == 0


def test_without_yes_nothing_is_deleted(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "prune") == 2
    assert abandoned(top) == ["opt_step-15", "opt_step-20"]


def test_originals_of_an_undone_rollback_are_removed_and_others_stay(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert chronicle(top, "undo", "--yes") == 0
    objects = top / "logs" / "r" / "objects"
    assert len(list(objects.glob("*/*"))) == 2
    assert chronicle(top, "prune", "--yes") == 0
    assert list(objects.glob("*/*")) == []
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert chronicle(top, "prune", "--yes") == 0
    assert len(list(objects.glob("*/*"))) == 2


def _checkpoint(step: int, abandoned: str | None = None) -> Checkpoint:
    path = Path("/a") / (abandoned or "root") / str(step)
    return Checkpoint(path=path, step=step, step_source="name", format="torch", files=(), abandoned=abandoned)


@pytest.mark.parametrize("verified_in_root, kept", [(0, {30, 40}), (1, {40}), (2, set())], ids=["none", "one", "two"])
def test_two_verified_checkpoints_always_remain(verified_in_root: int, kept: set[int]) -> None:
    root = [_checkpoint(step) for step in (1, 2, 3)]
    aside = [_checkpoint(step, "X") for step in (10, 20, 30, 40, 50)]
    verified = {c.path for c in root[:verified_in_root]} | {c.path for c in aside if c.step != 50}
    plan = plan_prune([*root, *aside], verified, pinned=set())
    assert {c.step for c, _ in plan.kept} == kept
    assert {c.step for c in plan.delete} == {10, 20, 30, 40, 50} - kept
