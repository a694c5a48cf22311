"""A disk that answers a look with an error: nothing is taken for absent, nothing is decided on what could not be seen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.layout import scan_entries
from rollback.disk.durable import REAL_DISK, is_there
from rollback.errors import UnreadableFile


class Blind:
    """A directory entry whose status cannot be read."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)


def test_entry_that_cannot_be_looked_at_is_an_error_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opt_step-20").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Iterator[Any]:
        return iter([Blind(entry) for entry in real(path)])

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UnreadableFile, match="opt_step-20"):
        scan_entries(tmp_path)


def test_what_cannot_be_looked_at_is_neither_there_nor_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_there(tmp_path / "nothing") and not is_there(tmp_path / "no" / "thing")
    (tmp_path / "link").symlink_to("nowhere")
    assert is_there(tmp_path / "link")

    def blind(*_: Any, **__: Any) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "lstat", blind)
    monkeypatch.setattr(Path, "lstat", blind)
    with pytest.raises(OSError, match="Input/output"):
        is_there(tmp_path / "link")
    with pytest.raises(OSError, match="Input/output"):
        REAL_DISK.remove_tree(tmp_path / "link")


def test_journal_directory_that_cannot_be_listed_is_a_problem_not_an_empty_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "r")
    assert read_journal(paths).problems == ()  # no run at all is an empty journal
    writer = JournalWriter(paths)
    writer.append("note", title="begun")
    writer.close()

    def refused(*_: Any) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refused)
    assert [problem.check for problem in read_journal(paths).problems] == ["unreadable"]
