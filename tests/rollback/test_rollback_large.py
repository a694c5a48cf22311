"""Files too large to copy: patched in place, manifest and undo included. The threshold is lowered, the files are small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import rollback.disk.durable
import rollback.transaction.apply
from chronicle.cli.main import run
from rollback.checkpoint.listing import open_checkpoint
from rollback.checks.verify import verify_checkpoint
from rollback.disk.durable import Disk
from rollback.errors import Severity
from tests.rollback.accelerate_runs import make_run, used_lrs
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CASE = COMPUTED["cosine_with_floor"]


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHRONICLE_LAUNCH", "1")
    (tmp_path / "logs" / "r").mkdir(parents=True)
    make_run(tmp_path / "checkpoints", CASE, "registered", run_dir=tmp_path / "logs" / "r")
    monkeypatch.setattr(rollback.transaction.apply, "PATCHED_BYTES", 1200)  # optimizer.bin is larger, the scheduler is not
    monkeypatch.setattr(rollback.transaction.apply, "LARGE_BYTES", 1200)
    monkeypatch.setattr("rollback.disk.durable.Disk.can_reflink", lambda self, directory: False)
    return tmp_path


def _command(top: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")])


def test_patched_optimizer_gives_exactly_half_and_undo_gives_back_every_byte(top: Path) -> None:
    root = top / "checkpoints"
    state = root / "opt_step-10" / "accelerator_state"
    control, before = used_lrs(root / "opt_step-10", CASE, "registered"), picture(root)
    inode = (state / "optimizer.bin").stat().st_ino
    assert _command(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert (state / "optimizer.bin").stat().st_ino == inode
    used = used_lrs(root / "opt_step-10", CASE, "registered", run_dir=top / "logs" / "r")
    assert used == [tuple(x / 2 for x in row) for row in control]
    assert _command(top, "undo", "--yes") == 0
    assert picture(root) == before


def test_manifest_has_the_new_checksum_of_a_file_that_was_not_read(top: Path) -> None:
    assert _command(top, "rollback", "--to", "10", "--lr-scale", "0.3", "--yes") == 0
    checkpoint = open_checkpoint(top / "checkpoints" / "opt_step-10")
    findings = verify_checkpoint(checkpoint, full=True)
    assert [f for f in findings if f.severity is Severity.ERROR] == []
    path = checkpoint.path / "accelerator_state" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    assert any(f.path.endswith("optimizer.bin") for f in verify_checkpoint(checkpoint, full=True))


def test_hard_linked_large_file_is_refused_and_nothing_changes(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(top / "checkpoints/opt_step-10/accelerator_state/optimizer.bin", top / "snapshot.bin")
    before = picture(top / "checkpoints")
    assert _command(top, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 3
    said = capsys.readouterr().err
    assert "optimizer.bin" in said and "2 hard links" in said and "hint:" in said
    assert picture(top / "checkpoints") == before


@pytest.fixture
def middling(top: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The optimizer's file is large enough to be patched, and small enough to be copied where that will not do."""
    monkeypatch.setattr(rollback.transaction.apply, "LARGE_BYTES", 10**9)
    return top


def test_middling_file_is_patched_and_undone(middling: Path) -> None:
    root = middling / "checkpoints"
    optimizer = root / "opt_step-10/accelerator_state/optimizer.bin"
    control, before, inode = used_lrs(root / "opt_step-10", CASE, "registered"), picture(root), optimizer.stat().st_ino
    assert _command(middling, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert optimizer.stat().st_ino == inode
    used = used_lrs(root / "opt_step-10", CASE, "registered", run_dir=middling / "logs" / "r")
    assert used == [tuple(x / 2 for x in row) for row in control]
    assert _command(middling, "undo", "--yes") == 0
    assert picture(root) == before


@pytest.mark.parametrize("why", ["another name", "an LR of more bytes"])
def test_middling_file_is_copied_where_a_patch_will_not_do(middling: Path, why: str) -> None:
    root = middling / "checkpoints"
    optimizer = root / "opt_step-10/accelerator_state/optimizer.bin"
    if why == "another name":
        os.link(optimizer, middling / "snapshot.bin")
    else:
        state = torch.load(optimizer)
        state["param_groups"][0]["lr"] = state["param_groups"][0]["initial_lr"] = 1  # one byte in the pickle
        torch.save(state, optimizer)
    (root / "opt_step-10/chronicle-manifest.json").unlink(missing_ok=True)
    old, inode = optimizer.read_bytes(), optimizer.stat().st_ino
    words = ["--accept-unproved", "a test"] if why != "another name" else []
    assert _command(middling, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes", *words) == 0
    assert optimizer.stat().st_ino != inode
    assert optimizer.read_bytes() != old
    if why == "another name":
        assert (middling / "snapshot.bin").read_bytes() == old
    else:
        assert torch.load(optimizer)["param_groups"][0]["lr"] == 0.5
    assert _command(middling, "undo", "--yes") == 0
    assert optimizer.read_bytes() == old


def test_whether_files_can_share_blocks_is_tried_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that was killed while it tried left `.chronicle-probe-…` beside the checkpoints, before any intent."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except OSError:
        pytest.skip("this filesystem has no files without a name")
    os.utime(tmp_path, ns=(10**18, 10**18))
    seen: list[list[str]] = []

    def tried(source: int, target: int) -> bool:
        assert os.fstat(source).st_dev == os.fstat(target).st_dev == tmp_path.stat().st_dev
        seen.append(os.listdir(tmp_path))
        return True

    monkeypatch.setattr(rollback.disk.durable, "reflink", tried)
    assert Disk().can_reflink(tmp_path)
    assert seen == [[]] and tmp_path.stat().st_mtime_ns == 10**18
    assert not Disk().can_reflink(tmp_path / "absent")
