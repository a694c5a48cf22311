"""`docs/library.md` runs as it is printed, and the public functions of `rollback` keep their promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollback
from rollback.disk.durable import Disk
from rollback.errors import CheckpointNotFound, IntentOpen
from tests.rollback.accelerate_runs import make_run
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 15 and 20 of an Accelerate run."""
    top = tmp_path_factory.mktemp("library")
    make_run(top / "checkpoints", COMPUTED["cosine"], "registered", (10, 15, 20))
    return top


@pytest.fixture
def top(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(built, tmp_path / "work")
    return tmp_path / "work"


def test_every_block_of_the_page_runs_in_order(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is a program: its asserts hold on checkpoints of the real writer."""
    monkeypatch.chdir(top)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_undo_restores_every_byte_beside_its_own_records(top: Path) -> None:
    before = picture(top / "checkpoints")
    rollback.apply(rollback.plan_rollback(top / "checkpoints", 10, lr_scale=0.5))
    assert picture(top / "checkpoints") != before
    assert rollback.undo(top / "checkpoints") is not None
    assert picture(top / "checkpoints") == before
    assert rollback.undo(top / "checkpoints") is None


def test_interrupted_apply_is_refused_until_it_is_recovered(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two moves: the next call says so, `recover` ends it, and undo still restores the rest."""
    root = top / "checkpoints"
    before = picture(root)
    plan = rollback.plan_rollback(root, 10, lr_scale=0.5)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "move", killed)
        with pytest.raises(SystemExit):
            rollback.apply(plan)
    with pytest.raises(IntentOpen):
        rollback.apply(plan)
    assert rollback.recover(root) is not None
    assert [c.step for c in rollback.list_checkpoints(root, include_abandoned=False)] == [10]
    rollback.undo(root)
    assert picture(root) == before


def test_torn_record_is_passed_over_and_the_next_one_is_whole(top: Path) -> None:
    """A record that was cut short is one whose transaction never went on."""
    root = top / "checkpoints"
    records = top / "checkpoints.rollback" / "transactions.jsonl"
    records.parent.mkdir()
    records.write_bytes(b'{"v": 1, "id": "20260101T0')
    rollback.apply(rollback.plan_rollback(root, 15))
    assert rollback.undo(root) is not None


def test_missing_step_names_the_nearest(top: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="the nearest are 10 and 15"):
        rollback.plan_rollback(top / "checkpoints", 12)


def test_public_names_exist_and_importing_the_package_loads_none_of_them() -> None:
    """`import rollback.errors` stays light; each name of `__all__` is there when it is asked for."""
    code = (
        "import sys, rollback.errors, rollback\n"
        "assert 'rollback.api' not in sys.modules and 'json' not in sys.modules\n"
        "assert all(hasattr(rollback, name) for name in rollback.__all__)\n"
        "assert 'torch' not in sys.modules and 'chronicle' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
