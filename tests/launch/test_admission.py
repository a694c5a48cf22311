"""What is in the way of a launch, as values."""

from pathlib import Path

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.admission import LaunchRefused, ensure_startable
from chronicle.paths import RunPaths


def test_a_journal_that_cannot_be_read_whole_could_hide_an_open_rollback(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "demo")
    writer = JournalWriter(paths)
    writer.append("note", title="before")
    writer.close()
    ensure_startable(paths, read_journal(paths), now=0.0)
    (paths.journal_dir / "20260101T000000-other-1-abcd.jsonl").mkdir()  # reading it fails, as on a sick disk
    with pytest.raises(LaunchRefused, match=r"cannot read .*abcd"):
        ensure_startable(paths, read_journal(paths), now=0.0)
    ensure_startable(paths, read_journal(paths), now=0.0, force="the disk is being copied")
