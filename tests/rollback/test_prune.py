"""Pruning deletes only what nothing needs any more, asks first, and is remembered."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from chronicle.cli.main import run
from chronicle.journal import JournalWriter, read_journal
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
    assert chronicle(top, "keep", "--prune", "--yes") == 0
    assert "nothing to prune" in capsys.readouterr().out
    assert abandoned(top) == ["opt_step-20"]
    assert chronicle(top, "undo", "--yes") == 0


def test_earlier_rollbacks_lose_what_they_moved_away(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "keep", "--prune", "--yes") == 0
    assert abandoned(top) == ["opt_step-15"]
    assert sorted(p.name for p in top.iterdir()) == ["abandoned", "checkpoints", "logs"]
    entry = next(read_journal(RunPaths(top / "logs" / "r")).of_kind("prune"))
    assert [Path(path).name for path in entry.data["deleted"]] == ["opt_step-20"]


def test_undo_of_a_pruned_rollback_is_refused_before_anything_changed(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "keep", "--prune", "--yes") == 0
    assert chronicle(top, "undo", "--yes") == 0
    before = picture(top / "checkpoints")
    assert chronicle(top, "undo", "--yes") == 3
    assert picture(top / "checkpoints") == before
    assert chronicle(top, "recover") == 0


def test_without_yes_nothing_is_deleted(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "15", "--yes") == 0
    assert chronicle(top, "rollback", "--to", "10", "--yes") == 0
    assert chronicle(top, "keep", "--prune") == 2
    assert abandoned(top) == ["opt_step-15", "opt_step-20"]


def test_originals_of_an_undone_rollback_are_removed_and_others_stay(top: Path) -> None:
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert chronicle(top, "undo", "--yes") == 0
    objects = top / "logs" / "r" / "objects"
    assert len(list(objects.glob("*/*"))) == 2
    assert chronicle(top, "keep", "--prune", "--yes") == 0
    assert list(objects.glob("*/*")) == []
    assert chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert chronicle(top, "keep", "--prune", "--yes") == 0
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


# ---- chronicle keep ------------------------------------------------------------------------------------------------------


def names(top: Path) -> list[str]:
    return sorted(path.name for path in (top / "checkpoints").iterdir())


def test_keep_sets_aside_within_the_budget_and_brings_back_every_byte(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top / "checkpoints")
    assert chronicle(top, "keep", "--budget", "76%", "--yes") == 0
    shown = capsys.readouterr()
    assert "keep: 3 checkpoints" in shown.out and "keep --restore" in shown.err
    assert len(names(top)) == 3 and {"opt_step-15", "opt_step-20"} < set(names(top))
    assert len(abandoned(top)) == 1
    entry = next(read_journal(RunPaths(top / "logs" / "r")).of_kind("keep"))
    assert entry.data["worst_loss"] >= 5
    assert [one["why"] for one in entry.data["kept"]][-2:] == ["one of the newest 2 verified"] * 2
    assert chronicle(top, "keep", "--restore", entry.id[-6:], "--yes") == 0
    after = picture(top / "checkpoints")
    assert after.keys() == before.keys() and abandoned(top) == []
    assert all(after[path] == before[path] for path in before if path != ".")  # the folder itself has a newer time


def test_what_was_set_aside_is_deleted_by_prune_only(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(top, "keep", "--budget", "1", "--yes") == 0
    assert "more than the budget: what stays may not go" in capsys.readouterr().out
    assert names(top) == ["opt_step-15", "opt_step-20"]
    assert chronicle(top, "keep", "--prune", "--yes") == 0
    assert abandoned(top) == [] and names(top) == ["opt_step-15", "opt_step-20"]


def test_keep_holds_two_verified_ones_before_the_last_incident(top: Path) -> None:
    writer = JournalWriter(RunPaths(top / "logs" / "r"))
    writer.append("incident", step=14, data={"id": 1, "tier": "propose", "onset_step": 12, "alarm_step": 14})
    writer.close()
    assert chronicle(top, "keep", "--budget", "1", "--yes") == 0
    assert names(top) == ["opt_step-10", "opt_step-15", "opt_step-20", "opt_step-5"]


@pytest.mark.parametrize("how", ["link", "link beside the directory", "latest", "best of the Trainer"])
def test_keep_holds_what_something_refers_to(how: str, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, extra = top / "checkpoints", []
    if how == "link":
        (root / "best").symlink_to("opt_step-5")
        extra = ["best"]
    elif how == "link beside the directory":
        (top / "best").symlink_to("checkpoints/opt_step-5")
    elif how == "latest":
        (root / "latest").write_text("opt_step-5\n")
        extra = ["latest"]
    else:
        state = {"global_step": 20, "best_model_checkpoint": "/elsewhere/out/opt_step-5", "log_history": [{"loss": 1.0}] * 9000}
        (root / "opt_step-20" / "trainer_state.json").write_text(json.dumps(state))
    assert chronicle(top, "keep", "--budget", "1", "--yes") == 0
    assert names(top) == sorted(["opt_step-15", "opt_step-20", "opt_step-5", *extra])
    assert "opt_step-5  (step 5: " in capsys.readouterr().out


def test_a_link_is_no_checkpoint_to_count_or_to_move(top: Path) -> None:
    for number in range(4):
        (top / "checkpoints" / f"opt_step-{30 + number}").symlink_to("opt_step-20")
    assert chronicle(top, "keep", "--budget", "1", "--yes") == 0
    assert [name for name in names(top) if not (top / "checkpoints" / name).is_symlink()] == ["opt_step-15", "opt_step-20"]
    assert len(names(top)) == 6


def test_keep_without_a_budget_moves_nothing_and_shows_what_each_costs(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top / "checkpoints")
    assert chronicle(top, "keep", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["budgets"]
    assert [row["share"] for row in rows] == [100, 75, 50, 40, 25, 10]
    assert rows[0]["checkpoints"] == 4 and rows[0]["expected_loss"] <= rows[2]["expected_loss"]
    assert picture(top / "checkpoints") == before


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--budget", "lots"], 2, "expected bytes such as 500GB"),
    (["--restore", "nothing"], 1, "`chronicle log` lists them"),
    (["--budget", "50%"], 2, "--yes"),
])  # fmt: skip
def test_keep_with_bad_input(words: list[str], code: int, said: str, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = picture(top / "checkpoints")
    assert chronicle(top, "keep", *words) == code
    assert said in capsys.readouterr().err
    assert picture(top / "checkpoints") == before


def test_keep_refuses_where_fewer_than_two_pass(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Perhaps the disk does not answer: then nothing is known, and nothing is moved."""
    for step in (10, 15, 20):
        (top / "checkpoints" / f"opt_step-{step}" / "accelerator_state" / "optimizer.bin").write_bytes(b"")
    assert chronicle(top, "keep", "--budget", "1", "--yes") == 3
    assert "1 checkpoints that pass verification" in capsys.readouterr().err and len(names(top)) == 4
