"""What the journal writer promises: an entry is on disk when `append` returns, and no failure loses another entry."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from chronicle.errors import JournalError
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Close, EntryKind, Note
from chronicle.paths import RunPaths


class FaultyDisk:
    """The module `os` as the writer sees it, with faults that a test switches on; everything else is real."""

    def __init__(self) -> None:
        self.short_by: int | None = None  # bytes of the next write that do not reach the file
        self.fsync_fails = self.truncate_fails = self.interrupt = False
        self.synced: list[tuple[str, bytes]] = []  # (what, content of the file at that moment)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, content: bytes) -> int:
        short_by, self.short_by = self.short_by, None
        return os.write(fd, content if short_by is None else content[:-short_by])

    def fsync(self, fd: int) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        if self.fsync_fails:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.synced.append((path, b"" if os.path.isdir(path) else Path(path).read_bytes()))
        os.fsync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        if self.truncate_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.ftruncate(fd, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """The writer's disk."""
    faulty = FaultyDisk()
    monkeypatch.setattr("chronicle.journal.writer.os", faulty)
    return faulty


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run without a journal."""
    return RunPaths(tmp_path / "logs" / "r")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel writes files up to this size, and shortens the write that would pass it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def titles(paths: RunPaths) -> list[str]:
    """Titles of all entries that can be read."""
    return [entry.title for entry in read_journal(paths).entries]


def checks(paths: RunPaths) -> list[str]:
    """What is wrong with the journal."""
    return [problem.check for problem in read_journal(paths).problems]


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked child and expect it to succeed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_entry_is_synced_before_append_returns(paths: RunPaths, disk: FaultyDisk) -> None:
    """The directory is synced once, for the file's name; the file after every line, with that line in it."""
    with JournalWriter(paths) as writer:
        for title in ("one", "two"):
            writer.append("note", title=title)
            _, content = [found for found in disk.synced if found[0] != str(paths.journal_dir)][-1]
            assert json.loads(content.splitlines()[-1])["title"] == title
    assert [path for path, _ in disk.synced if path == str(paths.journal_dir)] == [str(paths.journal_dir)]


def test_chain_links_every_line_of_a_writer(paths: RunPaths) -> None:
    """Numbers count up, `prev` is the hash of the line before: a changed line is found."""
    with JournalWriter(paths) as writer:
        for number in range(3):
            writer.append("note", title=f"note {number}")
    assert checks(paths) == []
    (path,) = paths.journal_dir.glob("*.jsonl")
    path.write_text(path.read_text().replace("note 1", "note X"))
    assert checks(paths) == ["broken-chain"]


def test_typed_event_is_written_under_its_kind(paths: RunPaths) -> None:
    """`write` stores the event's kind and fields; optional fields that say nothing are left out."""
    with JournalWriter(paths) as writer:
        first = writer.write(Note(text="seen", tags=("hardware",)), step=3, title="t")
        writer.write(Close(outcome="worked"), refs=(first.id,))
    note, close = read_journal(paths).entries
    assert (note.kind, note.step, note.data) == (EntryKind.NOTE, 3, {"text": "seen", "tags": ["hardware"]})
    assert (close.kind, close.refs, close.data) == ("close", (first.id,), {"outcome": "worked"})


def test_full_disk_loses_only_the_entry_that_was_refused(paths: RunPaths) -> None:
    """A real short write (file size limit): the piece is cut off, the error says so, later entries stand in the chain."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="before")
        (path,) = paths.journal_dir.glob("*.jsonl")
        size = path.stat().st_size
        with largest_file(size + 40), pytest.raises(JournalError, match="No space left"):
            writer.append("note", title="refused")
        assert path.stat().st_size == size
        with largest_file(size), pytest.raises(JournalError, match="File too large"):
            writer.append("note", title="refused too")
        writer.append("note", title="after")
    assert titles(paths) == ["before", "after"]
    assert checks(paths) == []


@pytest.mark.parametrize("short_by", [1, 2, 30])
def test_torn_line_that_cannot_be_cut_off_costs_no_later_entry(
    paths: RunPaths, disk: FaultyDisk, short_by: int
) -> None:
    """The next entry begins a new line: also where all but the newline had been written."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="before")
        disk.short_by, disk.truncate_fails = short_by, True
        with pytest.raises(JournalError):
            writer.append("note", title="refused")
        disk.truncate_fails = False
        writer.append("note", title="after")
        writer.append("note", title="last")
    assert [title for title in titles(paths) if title != "refused"] == ["before", "after", "last"]
    assert checks(paths)


def test_failed_sync_after_a_torn_line_costs_no_later_entry(paths: RunPaths, disk: FaultyDisk) -> None:
    """A torn line, then an entry whose fsync fails and which is cut off again: what is torn is still torn."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="before")
        disk.short_by, disk.truncate_fails = 30, True
        with pytest.raises(JournalError):
            writer.append("note", title="refused")
        disk.truncate_fails, disk.fsync_fails = False, True
        with pytest.raises(JournalError, match="quota"):
            writer.append("note", title="not synced")
        disk.fsync_fails = False
        writer.append("note", title="after")
    assert titles(paths) == ["before", "after"]
    assert checks(paths) == ["bad-line"]


def test_entry_that_is_not_synced_is_taken_back(paths: RunPaths, disk: FaultyDisk) -> None:
    """`append` raised, so the caller repeats it: the entry must not stand there twice."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="before")
        disk.fsync_fails = True
        with pytest.raises(JournalError):
            writer.append("note", title="repeated")
        disk.fsync_fails = False
        writer.append("note", title="repeated")
    assert titles(paths) == ["before", "repeated"]
    assert checks(paths) == []


def test_interrupt_between_write_and_sync_leaves_the_chain_whole(paths: RunPaths, disk: FaultyDisk) -> None:
    """Ctrl-C in the middle of an append: the line is taken back, the next entry follows the last whole one."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="before")
        disk.interrupt = True
        with pytest.raises(KeyboardInterrupt):
            writer.append("note", title="interrupted")
        disk.interrupt = False
        writer.append("note", title="after")
    assert titles(paths) == ["before", "after"]
    assert checks(paths) == []


def test_directory_that_cannot_be_synced_is_synced_by_the_next_append(paths: RunPaths, disk: FaultyDisk) -> None:
    """Without it the file's name may not survive a power cut, whatever its lines do."""
    with JournalWriter(paths) as writer:
        disk.fsync_fails = True
        with pytest.raises(JournalError):
            writer.append("note", title="refused")
        disk.fsync_fails = False
        writer.append("note", title="first")
    assert [path for path, _ in disk.synced if path == str(paths.journal_dir)] == [str(paths.journal_dir)]
    assert titles(paths) == ["first"] and checks(paths) == []


def test_torn_last_line_is_named_and_costs_no_whole_one(paths: RunPaths) -> None:
    """A killed machine may leave half a line; a new writer has a file of its own."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="whole")
    (path,) = paths.journal_dir.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"v":1,"id":"01')
    with JournalWriter(paths) as writer:
        writer.append("note", title="next")
    assert titles(paths) == ["whole", "next"]
    assert checks(paths) == ["torn-line"]


def test_forked_child_writes_a_file_of_its_own(paths: RunPaths) -> None:
    """Two processes in one file would break the chain: each continues from the same last line."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="parent 1")
        in_child(lambda: [writer.append("note", title=f"child {number}") for number in (1, 2)])
        writer.append("note", title="parent 2")
    by_writer: dict[str, list[str]] = {}
    for entry in read_journal(paths).entries:
        by_writer.setdefault(entry.writer, []).append(entry.title)
    assert sorted(by_writer.values()) == [["child 1", "child 2"], ["parent 1", "parent 2"]]
    assert checks(paths) == []


def test_forked_child_closes_only_its_own_side(paths: RunPaths) -> None:
    """The parent goes on writing after the child has closed the writer it inherited; the child's name has its own pid."""
    with JournalWriter(paths) as writer:
        writer.append("note", title="parent 1")
        in_child(writer.close)

        def close_and_go_on() -> None:
            writer.append("note", title="child 1")
            writer.close()
            writer.append("note", title="child 2")
            assert f"-{os.getpid()}-" in writer.writer

        in_child(close_and_go_on)
        writer.append("note", title="parent 2")
    assert sorted(titles(paths)) == ["child 1", "child 2", "parent 1", "parent 2"]
    assert checks(paths) == []


def test_child_forked_while_a_thread_writes_does_not_wait_for_it(paths: RunPaths) -> None:
    """The lock is inherited as held, and nobody in the child would ever release it."""
    writer, inside, leave = JournalWriter(paths), threading.Event(), threading.Event()
    writer.append("note", title="parent")

    def hold() -> None:
        with writer._lock:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    try:
        in_child(writer.close)
        in_child(lambda: writer.append("note", title="child"))
    finally:
        leave.set()
        thread.join()
        writer.close()
    assert sorted(titles(paths)) == ["child", "parent"]


def test_threads_share_a_writer(paths: RunPaths) -> None:
    """Every entry of every thread stands whole in one unbroken chain."""
    with JournalWriter(paths) as writer:

        def work(name: str) -> None:
            for number in range(25):
                writer.append("note", title=f"{name} {number}")

        threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(titles(paths)) == sorted(f"thread {t} {n}" for t in range(4) for n in range(25))
    assert checks(paths) == []


def test_writers_at_once_have_a_file_each(paths: RunPaths) -> None:
    """Same second, same host, same process: the random part keeps the names apart."""
    moment = datetime(2026, 5, 18, 14, 25, tzinfo=UTC)
    writers = [JournalWriter(paths, clock=lambda: moment) for _ in range(8)]
    for number, writer in enumerate(writers):
        writer.append("note", title=str(number))
        writer.close()
    assert len(list(paths.journal_dir.glob("*.jsonl"))) == 8
    assert sorted(titles(paths)) == [str(number) for number in range(8)]


def test_ids_follow_what_was_written_before_whatever_the_clock_says(paths: RunPaths) -> None:
    """A host whose clock is an hour slow still writes ids behind the ones it could see."""
    fast = JournalWriter(paths, clock=lambda: datetime(2026, 5, 18, 15, 0, tzinfo=UTC))
    slow = JournalWriter(paths, clock=lambda: datetime(2026, 5, 18, 14, 0, tzinfo=UTC))
    first = fast.append("note", title="first")
    second = slow.append("note", title="second")
    third = slow.append("note", title="third")
    assert first.id < second.id < third.id
    assert titles(paths) == ["first", "second", "third"]
    fast.close()
    slow.close()


def test_file_whose_first_entry_was_refused_does_not_exist(paths: RunPaths, disk: FaultyDisk) -> None:
    """A file has its name when its first entry is on disk: an empty one was emptied, not begun."""
    disk.fsync_fails = True
    with JournalWriter(paths) as writer:
        with pytest.raises(JournalError):
            writer.append("note", title="refused")
        assert os.listdir(paths.journal_dir) == []
        disk.fsync_fails = False
        writer.append("note", title="written")
    assert titles(paths) == ["written"] and checks(paths) == []


def test_first_entry_records_the_last_lines_of_other_writers(paths: RunPaths) -> None:
    """Only the first: a later one of the same writer adds nothing."""
    for title in ("one", "two"):
        with JournalWriter(paths) as writer:
            writer.append("note", title=title)
            writer.append("note", title=f"{title}, later")
    first, _, second, later = read_journal(paths).entries
    line = (paths.journal_dir / f"{first.writer}.jsonl").read_bytes().splitlines()[-1]
    assert (first.heads, later.heads) == ({}, {})
    assert second.heads == {first.writer: hashlib.sha256(line).hexdigest()[:16]}
