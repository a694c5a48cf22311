"""Strays out of sight and back: byte for byte, inode for inode, and safe to stop anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollback.checkpoint.listing import list_checkpoints, list_root_strays
from rollback.disk.durable import Disk
from rollback.errors import Refused, RollbackError
from rollback.transaction.cleanup import apply_moves, moves_from_json, plan_quarantine, quarantine_dir, restore
from tests.attacks.hostile_files import safetensors, torch_zip
from tests.attacks.pickle_bytes import optimizer, pickled, real, scheduler


@pytest.fixture
def strayed(root: Path) -> Path:
    """Two small checkpoints in the seed's layout; strays inside one, and beside both."""
    for step in (10, 20):
        state = root / f"opt_step-{step}" / "accelerator_state"
        state.mkdir(parents=True)
        (state / "optimizer.bin").write_bytes(torch_zip(pickled(optimizer(lr=real(1e-3)))))
        (state / "custom_checkpoint_0.pkl").write_bytes(torch_zip(pickled(scheduler())))
        (state / "random_states_0.pkl").write_bytes(torch_zip(pickled(b"}")))
        (state / "model.safetensors").write_bytes(safetensors({}))
    (root / "opt_step-10" / "accelerator_state" / "custom_checkpoint_0.pkl.orig").write_bytes(b"backup")
    (root / "opt_step-10" / "accelerator_state" / "optimizer_old").mkdir()
    (root / "opt_step-10" / "accelerator_state" / "optimizer_old" / "inside.bin").write_bytes(b"x")
    (root / "opt_step-10.orig").mkdir()
    return root


def snapshot(root: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        path.relative_to(root).as_posix(): (path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
        for path in sorted(root.rglob("*"))
    }


MOVED = ["opt_step-10.orig", "opt_step-10/accelerator_state/custom_checkpoint_0.pkl.orig",
         "opt_step-10/accelerator_state/optimizer_old"]  # fmt: skip


def test_quarantine_moves_every_stray_and_restore_brings_back_every_byte(strayed: Path) -> None:
    before = snapshot(strayed)
    moves = plan_quarantine(strayed, list_checkpoints(strayed), list_root_strays(strayed))
    assert [move.path for move in moves] == MOVED
    assert apply_moves(strayed, quarantine_dir(strayed, "Q1"), moves) == 3
    assert all(not c.strays for c in list_checkpoints(strayed)) and list_root_strays(strayed) == ()
    assert (quarantine_dir(strayed, "Q1") / MOVED[1]).read_bytes() == b"backup"
    assert restore(strayed, quarantine_dir(strayed, "Q1"), moves_from_json([move.to_json() for move in moves])) == 3
    assert snapshot(strayed) == before
    assert not quarantine_dir(strayed, "Q1").exists()


class StopsAt(Disk):
    """A disk whose n-th operation fails."""

    def __init__(self, stop: int) -> None:
        self.left = stop

    def point(self, operation: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, os.strerror(5), str(path))


def test_stopping_anywhere_leaves_a_list_that_can_be_finished_or_taken_back(strayed: Path) -> None:
    """Every operation in turn fails; a second run moves what is left, and restore takes back what was moved."""
    before = snapshot(strayed)
    moves = plan_quarantine(strayed, list_checkpoints(strayed), list_root_strays(strayed))
    stops = 0
    for stop in range(1, 60):
        try:
            apply_moves(strayed, quarantine_dir(strayed, f"Q{stop}"), moves, StopsAt(stop))
            done = True
        except RollbackError as problem:
            assert "could not be moved" in problem.message
            done, stops = False, stops + 1
            apply_moves(strayed, quarantine_dir(strayed, f"Q{stop}"), moves)
        assert all(not c.strays for c in list_checkpoints(strayed))
        restore(strayed, quarantine_dir(strayed, f"Q{stop}"), moves)
        assert snapshot(strayed) == before
        if done:
            break
    assert stops > 8


def test_restore_overwrites_nothing(strayed: Path) -> None:
    moves = plan_quarantine(strayed, list_checkpoints(strayed), ())
    apply_moves(strayed, quarantine_dir(strayed, "Q1"), moves)
    (strayed / MOVED[1]).write_bytes(b"a new backup")
    with pytest.raises(Refused, match="exists: restoring"):
        restore(strayed, quarantine_dir(strayed, "Q1"), moves)
    assert (strayed / MOVED[1]).read_bytes() == b"a new backup"
    assert (quarantine_dir(strayed, "Q1") / MOVED[2]).is_dir()


def chronicle(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, env=environ, check=False
    )


def test_the_command_asks_moves_journals_and_takes_back(strayed: Path) -> None:
    before = snapshot(strayed)
    where = ["--checkpoints", str(strayed), "--run", "r", "--logs", str(strayed.parent / "logs")]
    asked = chronicle("verify", "--all", "--quarantine", *where, cwd=strayed.parent)
    assert (asked.returncode, snapshot(strayed)) == (2, before)
    done = chronicle("verify", "--all", "--quarantine", "--yes", "--json", *where, cwd=strayed.parent)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["moved"] == MOVED
    left = json.loads(chronicle("verify", "--all", "--json", *where, cwd=strayed.parent).stdout)
    assert not [f for c in left["checkpoints"] for f in c["findings"] if f["check"] == "F1"]
    back = chronicle("undo", told["id"], "--yes", *where, cwd=strayed.parent)
    assert back.returncode == 0, back.stderr
    assert snapshot(strayed) == before
