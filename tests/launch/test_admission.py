"""What is in the way of a launch, as values."""

import sys
from pathlib import Path

import pytest

from chronicle.errors import Refusal
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import EntryKind
from chronicle.launch.admission import LaunchRefused, ensure_startable, hold_admission
from chronicle.paths import RunPaths
from rollback.disk.lock import hold_lock
from tests.launch.driver import Driver


def test_a_journal_that_cannot_be_read_whole_could_hide_an_open_rollback(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "demo")
    writer = JournalWriter(paths)
    writer.append("note", title="before")
    writer.close()
    ensure_startable(paths, read_journal(paths), now=0.0)
    (paths.journal_dir / "20260101T000000-other-1-abcd.jsonl").mkdir()  # reading it fails, as on a sick disk
    with pytest.raises(Refusal, match=r"abcd.*cannot be read"):
        ensure_startable(paths, read_journal(paths), now=0.0)
    ensure_startable(paths, read_journal(paths), now=0.0, force="the disk is being copied")


def test_no_launch_starts_while_a_transaction_is_open(tmp_path: Path) -> None:
    """Not with a reason either: half of the checkpoints may be moved."""
    paths = RunPaths(tmp_path / "demo")
    with JournalWriter(paths) as writer:
        intent = writer.append(EntryKind.ROLLBACK_INTENT, title="begins")
        with pytest.raises(LaunchRefused, match=f"rollback {intent.id} of run `demo` was started and not finished"):
            ensure_startable(paths, read_journal(paths), now=0.0, force="never mind")
        writer.append(EntryKind.ROLLBACK_RECEIPT, refs=(intent.id,), data={"intent": intent.id})
    ensure_startable(paths, read_journal(paths), now=0.0)


def test_a_launch_waits_for_a_rollback_and_refuses_when_it_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "demo")
    held = pytest.raises(LaunchRefused, match="is changing the checkpoints")
    with hold_lock(paths.lock_path), held, hold_admission(paths, wait_seconds=0.2):
        pass
    with hold_admission(paths, wait_seconds=0.2):
        pass


def test_of_two_launches_begun_at_once_one_starts(tmp_path: Path) -> None:
    """Two runners of one study started launches 4 and 5 of a run 60 ms apart, and both trained."""
    drivers = [Driver(tmp_path), Driver(tmp_path)]
    for driver in drivers:
        driver.start([sys.executable, "-c", "import time; time.sleep(12)"])
    assert sorted(driver.wait() for driver in drivers) == [0, 125]
    assert len(drivers[0].entries("launch.start")) == 1
