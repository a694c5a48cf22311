"""Checkpoints that were saved without a guard carry no identity: their stamp in the journal names run, launch and step."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from benchmarks.histories.world import RUN, World
from chronicle.checkpoints import checkpoints_left, known_states, stamp_or_none, stamps_below
from chronicle.cli.main import run
from chronicle.goback import OpenedRun
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import EntryKind
from chronicle.paths import RunPaths
from rollback.errors import RollbackError
from tests.rollback.command_line import chronicle, places

TRAIN = """
import pathlib, sys
first, last = int(sys.argv[1]), int(sys.argv[2])
for step in range(first + 1, last + 1):
    print(f"step {step} loss {2 / step:.4f} lr 0.1", flush=True)
    if step % 2 == 0:
        saved = pathlib.Path(f"templates/{step}").read_bytes()
        pathlib.Path(f"checkpoints/step_{step}.pt").write_bytes(saved)
"""


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two launches without a guard: the second re-uses step 10 of the first."""
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 12, guarded=False)
    world.launch("opt_step-5", 10, guarded=False, on_purpose=True)
    return world


def of_kind(world: World, kind: EntryKind) -> list[Entry]:
    return list(read_journal(world.paths).of_kind(kind))


def lineage(world: World) -> list[tuple[int, int, int]]:
    shown = json.loads(world.command("status", "--json")[1])["lineage"]
    return [(one["launch"], one["first"], one["last"]) for one in shown]


def test_a_rollback_to_a_re_used_step_names_the_launch_whose_bytes_lie_there(world: World) -> None:
    assert world.rollback("opt_step-10")
    (receipt,) = of_kind(world, EntryKind.ROLLBACK_RECEIPT)
    assert (receipt.data["identity"]["launch"], receipt.data["identity"]["step"]) == (2, 10)
    assert lineage(world) == [(1, 1, 5), (2, 6, 10)]
    assert json.loads(world.paths.contract_path.read_text())["identity"] is None  # the checkpoint carries none itself


def test_the_identity_stays_through_edit_undo_and_a_second_rollback(world: World) -> None:
    """Each of them gives the files other inodes."""
    assert world.rollback("opt_step-5") and world.undo() and world.rollback("opt_step-5")
    receipts = of_kind(world, EntryKind.ROLLBACK_RECEIPT)
    assert [one.data["identity"]["launch"] for one in receipts] == [1, 1]
    (undone,) = of_kind(world, EntryKind.UNDO_RECEIPT)
    assert undone.data["stamp"] not in ("", receipts[0].data["stamp"])
    assert receipts[1].data["stamp"] == stamp_or_none(world.root / "opt_step-5")


def test_the_guard_names_what_it_loaded_by_the_stamp(world: World) -> None:
    world.home.rename(world.home.with_name("elsewhere"))
    world.home = world.home.with_name("elsewhere")
    assert world.launch("opt_step-10", 4, on_purpose=True)
    loaded = of_kind(world, EntryKind.GUARD_VERDICT)[-1].data["loaded"]
    assert (loaded["launch"], loaded["step"]) == (2, 10) and loaded["id"].startswith("stamp:")
    shown = json.loads(world.command("status", "--json")[1])["lineage"]
    assert (shown[-1]["launch"], shown[-1]["first"], shown[-1]["inferred"]) == (3, 11, False)
    assert lineage(world) == [(1, 1, 5), (2, 6, 10), (3, 11, 14)]


def test_a_changed_file_has_no_such_identity(world: World) -> None:
    states = known_states(read_journal(world.paths).entries)
    path = world.root / "opt_step-10"
    assert states.identity_of(path, {})["launch"] == 2
    shutil.copytree(path, world.home / "copy")
    assert states.identity_of(world.home / "copy", {}) == {}
    next(path.rglob("optimizer.bin")).touch()
    assert states.identity_of(path, {}) == {}


def test_a_manifest_that_was_left_behind_names_nobody(tmp_path: Path) -> None:
    """The second launch writes the same bytes again, so that the digests still fit the manifest of the first."""
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 6)
    world.launch(None, 6, guarded=False, on_purpose=True)
    (saved,) = of_kind(world, EntryKind.CHECKPOINT)
    (seen,) = of_kind(world, EntryKind.CHECKPOINT_SEEN)
    assert seen.data["replaces"] == saved.data["identity"]
    world.fork()  # its files have other stamps
    assert world.rollback("opt_step-5")
    assert json.loads(world.command("status", "--json")[1])["inferred"] is True
    (receipt,) = of_kind(world, EntryKind.ROLLBACK_RECEIPT)
    assert "identity" not in receipt.data


def test_what_a_guard_saved_is_recorded_once(tmp_path: Path) -> None:
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 6)
    assert of_kind(world, EntryKind.CHECKPOINT_SEEN) == []


def test_only_what_is_new_since_the_launch_began_is_its_own(world: World) -> None:
    before = stamps_below([str(world.root)])
    assert list(checkpoints_left([str(world.root)], before, (), "R")) == []
    next((world.root / "opt_step-5").rglob("optimizer.bin")).touch()
    ((step, seen),) = checkpoints_left([str(world.root)], before, (), "R")
    assert (step, seen.path) == (5, str(world.root / "opt_step-5"))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_recovered_rollback_names_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """The receipt that `recover` writes says what the intent said."""
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 12, guarded=guarded)
    world.launch(None, 12, guarded=guarded, on_purpose=True)
    record = OpenedRun.record

    def full(self: OpenedRun, kind: str, data: dict[str, Any]) -> str:
        if kind == EntryKind.ROLLBACK_RECEIPT:
            raise RollbackError("no space left", None)
        return record(self, kind, data)

    with monkeypatch.context() as patch:
        patch.setattr(OpenedRun, "record", full)
        assert world.command("rollback", "--to", "5", "--lr-scale", "0.5", "--yes")[0] == 4
    assert world.command("recover")[0] == 0
    (receipt,) = of_kind(world, EntryKind.ROLLBACK_RECEIPT)
    assert (receipt.data["identity"]["launch"], receipt.data["identity"]["step"]) == (2, 5)
    assert lineage(world) == [(2, 1, 5)]


def test_a_run_that_begins_from_an_unguarded_checkpoint_names_its_parent(world: World, tmp_path: Path) -> None:
    child = World(tmp_path / "child")
    child.root.mkdir(parents=True)
    words = ("init", "--run", "child", "--checkpoints", "checkpoints", "--from", str(world.root / "opt_step-10"))
    code, said = child.command(*words)
    assert code == 0 and f"begins from run {RUN}, step 10 of launch 2" in said


def test_a_script_under_chronicle_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real launcher and single files: step 4 exists in both launches, its bytes are those of the second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "templates").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, 7):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, tmp_path / "templates" / str(step))
    for first, last in ((0, 6), (2, 4)):
        assert run(["run", *places(tmp_path), "--", sys.executable, "train.py", str(first), str(last)]) == 0
    entries = read_journal(RunPaths(tmp_path / "logs" / "r")).of_kind(EntryKind.CHECKPOINT_SEEN)
    assert [(one.launch, one.step) for one in entries] == [(1, 2), (1, 4), (1, 6), (2, 4)]
    assert chronicle(tmp_path, "rollback", "--to", "4", "--yes") == 0
    (receipt,) = read_journal(RunPaths(tmp_path / "logs" / "r")).of_kind(EntryKind.ROLLBACK_RECEIPT)
    assert (receipt.data["identity"]["launch"], receipt.data["identity"]["step"]) == (2, 4)
