"""A copy of an unfinished transaction is finished or reverted in the copy, whatever had been done when it was copied.

Every operation of the transaction is a point: it is killed there, its directory is copied, and the copy is recovered.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollback.disk.durable import Disk
from rollback.errors import StoppedPartWay
from rollback.transaction.change import Prepared
from rollback.transaction.copied import in_this_copy
from rollback.transaction.protocol import Receipt, recover_change, remove_leftovers
from tests.rollback.disks import DyingDisk, Journal, Killed, picture
from tests.rollback.test_crash_points import SCENARIOS, DyingWithoutExchange, _ends, count_points, state_of
from tests.rollback.test_transaction import apply, change_to, make_world


def recover_in_copy(original: Path, copy: Path, journal: Journal) -> None:
    """Recover the open transaction of `journal` in `copy`; nothing may name the original."""
    assert original.name != copy.name

    def here(value: Any) -> Any:
        return json.loads(json.dumps(value).replace(f"/{original.name}/", f"/{copy.name}/"))

    def moved(value: Any) -> Any:
        return in_this_copy(Prepared.from_json(here(value))).to_json()

    for intent, data in journal.open_intents():
        recover_change(intent, here(data), record=journal.record, moved=moved)
    closed = [entry for entry, kind, _ in journal.entries if kind.endswith(".intent")]
    remove_leftovers(copy / "work" / "checkpoints", closed, moved=lambda _intent, value: here(value))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DyingDisk, DyingWithoutExchange])
@pytest.mark.parametrize("name", SCENARIOS)
def test_copied_at_every_operation_it_ends_as_before_or_after(name: str, kind: type[DyingDisk], tmp_path: Path) -> None:
    outcomes, undecided = copy_at_points(name, kind, tmp_path, every=1)
    assert outcomes == {"before", "after"}
    assert bool(undecided) == ("companions" in name and "undo" in name and kind is DyingDisk), undecided


@pytest.mark.parametrize("name", ["rollback", "patched undo"])
def test_copied_at_some_operations_it_ends_as_before_or_after(name: str, tmp_path: Path) -> None:
    assert copy_at_points(name, DyingDisk, tmp_path, every=7) == ({"before", "after"}, [])


def copy_at_points(name: str, kind: type[DyingDisk], tmp_path: Path, *, every: int) -> tuple[set[str], list[str]]:
    """How copies taken at every n-th operation ended, and the operations after which it could not be told."""
    prepare, act = SCENARIOS[name]
    before, after, _, _ = _ends(name, tmp_path / "ends")
    outcomes: set[str] = set()
    undecided: list[str] = []
    for at in range(1, count_points(name, tmp_path / "count", kind()) + 1, every):
        top, copy = tmp_path / f"at-{at}", tmp_path / f"copy-{at}"
        journal = Journal()
        prepare(top, journal)
        disk = kind(at)
        journal.disk = disk
        with pytest.raises(Killed):
            act(top, journal, disk)
        journal.disk = None
        shutil.copytree(top, copy, symlinks=True)  # as `cp -r` does: every file has a new inode, hard links are lost
        untouched, taken = picture(top), picture(copy)
        try:
            recover_in_copy(top, copy, journal)
        except StoppedPartWay as problem:
            assert "cannot be told" in str(problem) and picture(copy) == taken
            undecided.append(disk.last)
        else:
            assert journal.open_intents() == []
            seen = state_of(copy)
            assert seen in (before, after), f"at {at} ({disk.last})"
            outcomes.add("before" if seen == before else "after")
        assert picture(top) == untouched, f"at {at} ({disk.last})"
        shutil.rmtree(top)
        shutil.rmtree(copy)
    return outcomes, undecided


def displace(root: Path, journal: Journal, disk: Disk) -> Receipt:
    """An abandoned checkpoint comes back to a name that another one has, and no file is edited."""
    old = root.parent / "abandoned" / "E000" / "opt_step-750"
    return apply(root, change_to(root, 750, {}, source=old), journal, disk)


def test_where_no_digest_tells_two_exchanged_checkpoints_apart_nothing_is_touched(tmp_path: Path) -> None:
    top, copy, journal = tmp_path / "top", tmp_path / "copy", Journal()
    root = make_world(top)
    old = root.parent / "abandoned" / "E000"
    old.mkdir(parents=True)
    shutil.copytree(root / "opt_step-500", old / "opt_step-750")
    seen = []

    class BeforeExchange(DyingDisk):
        def point(self, operation: str, path: Path) -> None:
            seen.append(operation)
            super().point(operation, path)

    watched = BeforeExchange()
    subprocess.run(["cp", "-a", str(top), str(tmp_path / "trial")], check=True)
    displace(tmp_path / "trial" / "work" / "checkpoints", Journal(), watched)
    with pytest.raises(Killed):
        displace(root, journal, DyingDisk(len(seen) - seen[::-1].index("exchange")))
    shutil.copytree(top, copy, symlinks=True)
    before = picture(tmp_path)
    with pytest.raises(StoppedPartWay, match="cannot be told in this copy") as stopped:
        recover_in_copy(top, copy, journal)
    assert "copied from" in str(stopped.value.remedy) and picture(tmp_path) == before
