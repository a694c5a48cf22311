"""After a power loss at any point, in any state the persistence model allows: before or after, never between."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollback.transaction.protocol import recover_change, remove_leftovers
from tests.rollback.disks import Journal
from tests.rollback.power_loss import Log, RecordingDisk, RecordingJournal, possible_remains, write_remains
from tests.rollback.test_crash_points import NAMES, SCENARIOS, loader_views, seen_meanwhile


@pytest.fixture
def top(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On tmpfs where there is one: there inode numbers are not used again, and an fsync costs nothing."""
    fast = Path("/dev/shm")
    if fast.is_dir():
        import tempfile

        with tempfile.TemporaryDirectory(dir=fast) as name:
            yield Path(name)
    else:
        yield tmp_path_factory.mktemp("power")


def _contents(top: Path) -> dict[str, bytes | None]:
    found = {}
    for path in sorted((top / "work").rglob("*")):
        name = re.sub(r"abandoned/E\d+", "abandoned/ID", path.relative_to(top / "work").as_posix())
        found[name] = path.read_bytes() if path.is_file() else None
    return found


def _recorded(name: str, top: Path) -> tuple[Log, Journal, Any, Any, dict[str, Any], dict[str, Any]]:
    prepare, act = SCENARIOS[name]
    earlier = Journal()
    prepare(top, earlier)
    before, views_before = _contents(top), loader_views(top / "work" / "checkpoints")
    disk = RecordingDisk(top)
    journal = RecordingJournal(disk)
    journal.entries = list(earlier.entries)
    disk.log.operations.append(("journal", len(journal.entries)))
    act(top, journal, disk)
    return disk.log, journal, before, _contents(top), views_before, loader_views(top / "work" / "checkpoints")


@pytest.mark.parametrize("name", NAMES)
def test_every_state_a_power_loss_can_leave_is_before_or_after(name: str, top: Path) -> None:
    original = top / "original"
    log, journal, before, after, views_before, views_after = _recorded(name, original)
    shutil.move(original, top / "aside")
    outcomes, states = set(), 0
    for remains in possible_remains(log):
        states += 1
        write_remains(remains, log, original)  # at the original path: the transaction names paths
        where = f"after operation {remains.after}: {log.operations[max(0, remains.after - 1)][:1]}"
        views = loader_views_safely(original)
        for loader, view in views.items():
            assert view in seen_meanwhile(loader, views_before, views_after), f"{loader} {where}"
        left = Journal()
        left.entries = list(journal.entries[: remains.num_entries])
        for intent, data in left.open_intents():
            recover_change(intent, data, record=left.record)
        closed = [entry for entry, kind, _ in left.entries if kind.endswith(".intent")]
        remove_leftovers(original / "work" / "checkpoints", closed)
        seen = _contents(original)
        assert seen in (before, after), f"{where}: {set(seen.items()) ^ set(after.items())}"
        outcomes.add("before" if seen == before else "after")
        shutil.rmtree(original)
    assert states > 60 and outcomes == {"before", "after"}


def loader_views_safely(top: Path) -> dict[str, Any]:
    root = top / "work" / "checkpoints"
    return loader_views(root) if root.is_dir() else {}


def test_when_it_says_done_only_after_is_left(top: Path) -> None:
    """Durability: once the receipt is written no state of the model is `before`."""
    log, journal, _, _, _, views_after = _recorded("rollback", top / "original")
    shutil.move(top / "original", top / "aside")
    receipt = next(i for i, op in enumerate(log.operations) if op[0] == "journal" and op[1] == len(journal.entries))
    late = [remains for remains in possible_remains(log) if remains.after > receipt]
    assert late
    for remains in late:
        write_remains(remains, log, top / "original")
        assert loader_views_safely(top / "original") == views_after
        shutil.rmtree(top / "original")


def test_the_model_finds_a_missing_fsync(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break it once: without directory fsyncs the states go wrong, or this whole file proves nothing."""
    log, journal, before, after, _, _ = _recorded("rollback", top / "original")
    shutil.move(top / "original", top / "aside")
    directories = set(log.start_names) | {i for op in log.operations if op[0] == "names" for _, _, i in op[1] if i}
    files = {op[1] for op in log.operations if op[0] == "data"} | set(log.start_data)
    log.operations = [op for op in log.operations if not (op[0] == "fsync" and op[1] in directories - files)]
    bad = 0
    for number, remains in enumerate(possible_remains(log)):
        if number % 7:
            continue
        write_remains(remains, log, top / "original")
        left = Journal()
        left.entries = list(journal.entries[: remains.num_entries])
        try:
            for intent, data in left.open_intents():
                recover_change(intent, data, record=left.record)
            bad += _contents(top / "original") not in (before, after)
        except Exception:
            bad += 1
        shutil.rmtree(top / "original")
    assert bad
