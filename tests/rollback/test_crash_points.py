"""Stopped before any operation, a change shows a loader what was before or after, and recovers to exactly one of them.

Every operation of the disk and every journal line is a point; all points are tried, in the process, without root.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollback.disk.durable import BytePatch, Disk
from rollback.errors import RollbackError, StoppedPartWay
from rollback.transaction.change import Copy
from rollback.transaction.protocol import Receipt, recover_change, remove_leftovers
from tests.rollback.disks import DyingDisk, FailingDisk, Journal, Killed, picture
from tests.rollback.test_transaction import (
    HALVED,
    NoExchange,
    age,
    apply,
    change_to,
    make_world,
    take_back,
    write_bytes,
)

Scenario = Callable[[Path, Journal, Disk], Any]


def loader_views(root: Path) -> dict[str, Any]:
    """What three kinds of loader would take: the highest number, the one the pointer names, the one asked for."""
    if not root.is_dir():
        return dict.fromkeys(("highest", "pointer", "explicit", "last", "config"), "no root")
    steps = sorted(int(m[1]) for path in root.iterdir() if (m := re.fullmatch(r"opt_step-(\d+)", path.name)))
    pointed = (root / "latest").read_text()
    return {
        "highest": contents(root / f"opt_step-{steps[-1]}") if steps else "none",
        "pointer": contents(root / pointed),
        "explicit": contents(root / "opt_step-500"),
    } | companions(root)


def seen_meanwhile(loader: str, before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    """What a loader may see on the way: before, after; who asks for this very checkpoint may also be told that it is not there.

    The root is never away, and nobody is given an older checkpoint in silence.
    """
    allowed = [before[loader], after[loader]]
    if loader == "explicit":
        allowed.append(ABSENT)
    if loader == "config":
        allowed += [(pair[0], ABSENT) for pair in (before[loader], after[loader]) if pair is not None]
    return allowed


ABSENT = "loud: not there"


def companions(root: Path) -> dict[str, Any]:
    """A copy of the newest checkpoint under a name of its own, and a config that has to fit the checkpoint."""
    config, last = root.parent / "config" / "ds.json", root / "last.ckpt"
    return {
        "last": last.read_bytes() if last.exists() else None,
        "config": (config.read_bytes(), contents(root / "opt_step-500")) if config.exists() else None,
    }


def contents(checkpoint: Path) -> Any:
    if not checkpoint.is_dir():
        return ABSENT
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in checkpoint.rglob("*.*") if path.is_file()
    }


def forward(top: Path, journal: Journal, disk: Disk) -> Receipt:
    root = top / "work" / "checkpoints"
    return apply(root, change_to(root, 500), journal, disk)


def backward(top: Path, journal: Journal, disk: Disk) -> Receipt:
    name, data = journal.last("rollback.receipt")
    return take_back(top / "work" / "checkpoints", Receipt(id=name, data=data), journal, disk)


def prepare_nothing(top: Path, journal: Journal) -> None:
    make_world(top)


def prepare_rolled_back(top: Path, journal: Journal) -> None:
    make_world(top)
    forward(top, journal, Disk())


def patching(top: Path, journal: Journal, disk: Disk) -> Receipt:
    """The optimizer is a very large file: its bytes change in place, out of sight."""
    root = top / "work" / "checkpoints"
    patch = BytePatch(offset=len(b"group lr="), old=b"1.0", new=b"0.5")
    contents = {name: content for name, content in HALVED.items() if "optimizer" not in name}
    change = change_to(root, 500, contents, patches={"accelerator_state/optimizer.bin": (patch,)})
    return apply(root, change, journal, disk)


def prepare_patched(top: Path, journal: Journal) -> None:
    make_world(top)
    patching(top, journal, Disk())


def prepare_companions(top: Path, journal: Journal) -> None:
    root = make_world(top)
    (root / "last.ckpt").write_bytes(b"all of 1000")
    config = root.parent / "config" / "ds.json"
    config.parent.mkdir()
    config.write_bytes(b'{"lr": 1.0}')
    age(top / "work")


def with_companions(top: Path, journal: Journal, disk: Disk) -> Receipt:
    """A copy of the checkpoint and a config outside the root change with it."""
    root = top / "work" / "checkpoints"
    change = change_to(
        root,
        500,
        copies={"last.ckpt": Copy(root / "last.ckpt", {"": write_bytes(b"all of 500, halved")})},
        configs={root.parent / "config" / "ds.json": b'{"lr": 0.5}'},
    )
    return apply(root, change, journal, disk)


def prepare_rolled_back_companions(top: Path, journal: Journal) -> None:
    prepare_companions(top, journal)
    with_companions(top, journal, Disk())


SCENARIOS: dict[str, tuple[Callable[[Path, Journal], None], Scenario]] = {
    "rollback": (prepare_nothing, forward),
    "undo": (prepare_rolled_back, backward),
    "patched rollback": (prepare_nothing, patching),
    "patched undo": (prepare_patched, backward),
    "rollback with companions": (prepare_companions, with_companions),
    "undo with companions": (prepare_rolled_back_companions, backward),
}


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow, *([pytest.mark.sample] if name.startswith("rollback") else [])])
    if "companions" in name
    else name
    for name in SCENARIOS
]


class DyingWithoutExchange(DyingDisk, NoExchange):
    pass


def _ends(name: str, top: Path) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Pictures and loader views before and after an undisturbed run."""
    prepare, act = SCENARIOS[name]
    journal = Journal()
    prepare(top, journal)
    before, views_before = state_of(top), loader_views(top / "work" / "checkpoints")
    act(top, journal, Disk())
    return before, state_of(top), views_before, loader_views(top / "work" / "checkpoints")


def state_of(top: Path) -> dict[str, Any]:
    """Everything below the directory that holds the checkpoints; ids of abandoned folders are as given by the journal."""
    seen = picture(top / "work", times=False)
    return {re.sub(r"abandoned/E\d+", "abandoned/ID", path): value for path, value in seen.items()}


def count_points(name: str, top: Path, disk: DyingDisk) -> int:
    prepare, act = SCENARIOS[name]
    journal = Journal()
    prepare(top, journal)
    journal.disk = disk
    act(top, journal, disk)
    return disk.count


@pytest.mark.parametrize("kind", [DyingDisk, DyingWithoutExchange])
@pytest.mark.parametrize("name", NAMES)
def test_killed_before_every_operation(name: str, kind: type[DyingDisk], tmp_path: Path) -> None:
    prepare, act = SCENARIOS[name]
    before, after, views_before, views_after = _ends(name, tmp_path / "ends")
    points = count_points(name, tmp_path / "count", kind())
    assert points > 60
    outcomes = set()
    for at in range(1, points + 1):
        top = tmp_path / f"at-{at}"
        journal = Journal()
        prepare(top, journal)
        disk = kind(at)
        journal.disk = disk
        with pytest.raises(Killed):
            act(top, journal, disk)
        seen = loader_views(top / "work" / "checkpoints")
        for loader, view in seen.items():
            allowed = seen_meanwhile(loader, views_before, views_after)
            assert view in allowed, f"{loader} at {at} ({disk.last})"
        outcomes.add(recovered_state(top, journal, before, after, f"at {at} ({disk.last})"))
    assert outcomes == {"before", "after"}


def recovered_state(top: Path, journal: Journal, before: Any, after: Any, where: str) -> str:
    journal.disk = None
    for intent, data in journal.open_intents():
        recover_change(intent, data, record=journal.record)
    closed = [entry for entry, kind, _ in journal.entries if kind.endswith(".intent")]
    remove_leftovers(top / "work" / "checkpoints", closed)
    assert journal.open_intents() == [], where
    seen = state_of(top)
    assert seen in (before, after), f"{where}: {sorted(set(map(str, seen.items())) ^ set(map(str, after.items())))}"
    return "before" if seen == before else "after"


@pytest.mark.parametrize("name", NAMES)
def test_recover_killed_at_every_operation_can_be_repeated(name: str, tmp_path: Path) -> None:
    """Kill inside the moves, then kill the recovery before each of its operations, then recover in peace."""
    prepare, act = SCENARIOS[name]
    before, after, _, _ = _ends(name, tmp_path / "ends")
    points = count_points(name, tmp_path / "count", DyingDisk())
    tried = 0
    for first in range(points // 3, points, 9):
        at = 0
        while True:
            at += 1
            top = tmp_path / f"{first}-{at}"
            journal = Journal()
            prepare(top, journal)
            disk = DyingDisk(first)
            journal.disk = disk
            with pytest.raises(Killed):
                act(top, journal, disk)
            journal.disk = again = DyingDisk(at)
            try:
                for intent, data in journal.open_intents():
                    recover_change(intent, data, record=journal.record, disk=again)
            except Killed:
                recovered_state(top, journal, before, after, f"{first}, recovery at {at} ({again.last})")
            else:
                break
        tried += at
    assert tried > 60


@pytest.mark.parametrize("name", ["rollback", "patched undo"])
def test_an_error_at_every_operation_of_recover_can_be_repeated(name: str, tmp_path: Path) -> None:
    """The disk is still full: said as such, exit 4, and the next `recover` ends it."""
    prepare, act = SCENARIOS[name]
    before, after, _, _ = _ends(name, tmp_path / "ends")
    points = count_points(name, tmp_path / "count", DyingDisk())
    stopped = 0
    for first in (points // 4, points * 2 // 3):
        at = 0
        while True:
            at += 1
            top = tmp_path / f"{first}-{at}"
            journal = Journal()
            prepare(top, journal)
            journal.disk = dying = DyingDisk(first)
            with pytest.raises(Killed):
                act(top, journal, dying)
            journal.disk = None
            failing = FailingDisk(at, errno.ENOSPC)
            try:
                for intent, data in journal.open_intents():
                    recover_change(intent, data, record=journal.record, disk=failing)
            except StoppedPartWay as problem:
                stopped += 1
                assert "recover" in (problem.remedy or "")
            recovered_state(top, journal, before, after, f"{first}, recovery at {at}")
            if failing.count < at:
                break
    assert stopped > 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EXDEV])
@pytest.mark.parametrize("name", NAMES)
def test_an_error_at_every_operation(name: str, code: int, tmp_path: Path) -> None:
    """An error is named; either nothing was changed, or `recover` finishes."""
    prepare, act = SCENARIOS[name]
    before, after, views_before, views_after = _ends(name, tmp_path / "ends")
    points = count_points(name, tmp_path / "count", DyingDisk())
    for at in range(1, points + 1):
        top = tmp_path / f"at-{at}"
        journal = Journal()
        prepare(top, journal)
        disk = FailingDisk(at, code)
        where = f"at {at}"
        try:
            act(top, journal, disk)
        except StoppedPartWay as problem:
            assert "recover" in (problem.remedy or "")
        except RollbackError as problem:
            assert state_of(top) == before, f"{where}: {problem} ({disk.last})"
            assert journal.open_intents() == [], where
            continue
        seen = loader_views(top / "work" / "checkpoints")
        for loader, view in seen.items():
            assert view in seen_meanwhile(loader, views_before, views_after), f"{loader} {where}"
        recovered_state(top, journal, before, after, where)


def test_the_sweep_can_fail(tmp_path: Path) -> None:
    """Moving the latest checkpoint first shows a loader an unedited middle one: the views must catch that."""
    root = make_world(tmp_path)
    change = change_to(root, 500)
    journal = Journal(DyingDisk())
    wrong = change_to(root, 500, abandon=tuple(reversed(change.abandon)))
    before = loader_views(root)
    seen = []

    class Watching(DyingDisk):
        def point(self, operation: str, path: Path) -> None:
            seen.append(loader_views(root)["highest"])

    apply(root, wrong, journal, Watching())
    after = loader_views(root)
    assert any(view not in (before["highest"], after["highest"]) for view in seen)
    assert HALVED["accelerator_state/scheduler.bin"] in after["highest"].values()
