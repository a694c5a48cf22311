"""What NFS and its like do differently, simulated at the calls we make; no such filesystem is mounted here.

Appends of two hosts to one file overwrite each other (so nobody shares a file); a deleted open file becomes `.nfs…`; a handle
goes stale while it is read; a listing is older than its directory; no room is told by fsync, not by write; fsync of a
directory may be unknown; clocks differ; rename replaces what another host has open.
"""

import errno
import io
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from chronicle.errors import JournalError
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from chronicle.report.markup import write_page
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli


def host(paths: RunPaths, name: str, late: timedelta = timedelta()) -> JournalWriter:
    """A writer on another machine, with its own idea of the time."""
    return JournalWriter(paths, host=name, pid=1, clock=lambda: datetime(2026, 5, 18, tzinfo=UTC) + late)


def test_no_two_writers_ever_share_a_file_even_with_one_name_pid_and_second(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    writers = [host(paths, "node-1") for _ in range(20)]
    for number in range(3):
        for writer in writers:
            writer.append("note", title=f"{writer.writer} {number}")
    assert len(list(paths.journal_dir.iterdir())) == 20
    found = read_journal(paths)
    assert len(found.entries) == 60 and found.problems == ()


def test_an_append_that_lands_where_another_host_wrote_could_only_hurt_a_shared_file(tmp_path: Path) -> None:
    """The overwriting that O_APPEND suffers over NFS: the offset is the one this host knew when it opened the file."""
    shared = tmp_path / "shared"
    shared.write_bytes(b"")
    known = {name: os.open(shared, os.O_WRONLY) for name in ("a", "b")}
    for name, fd in known.items():
        os.write(fd, name.encode() * 5 + b"\n")
        os.close(fd)
    assert shared.read_bytes() == b"bbbbb\n"  # what one shared file would have lost
    paths = RunPaths(tmp_path / "r")
    for name in ("a", "b"):
        with host(paths, name) as writer:
            writer.append("note", title=name)
    assert sorted(e.title for e in read_journal(paths).entries) == ["a", "b"]


def test_silly_renamed_files_are_nobodys_business(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    before = chronicle("status", "--json").json
    run.paths.heartbeats_dir.mkdir(exist_ok=True)
    for directory in (run.paths.journal_dir, run.paths.launches_dir, run.paths.launch_dir(1), run.paths.heartbeats_dir):
        (directory / ".nfs000000000a1b2c3d00000001").write_bytes(b'{"half a li')
    assert chronicle("status", "--json").json == before
    assert chronicle("audit").code == 0
    with JournalWriter(run.paths) as writer:
        writer.append("note", title="goes on")


class _Stale(io.BytesIO):
    def __next__(self) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize(("times", "problems"), [(1, []), (2, ["unreadable"])])
def test_a_handle_that_goes_stale_is_opened_anew_once_and_then_named(
    times: int, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = toy_run(tmp_path)
    count, real = [0], Path.open

    def opening(self: Path, *words: Any, **options: Any) -> Any:
        if self.suffix == ".jsonl" and count[0] < times:
            count[0] += 1
            return _Stale()
        return real(self, *words, **options)

    monkeypatch.setattr(Path, "open", opening)
    found = read_journal(run.paths)
    assert [problem.check for problem in found.problems] == problems
    assert len(found.entries) == (11 if not problems else 0)


def test_a_listing_older_than_its_directory_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is listed and gone: its successor writes all the same; a file that is there and not listed comes later."""
    run = toy_run(tmp_path)
    real = os.scandir

    class Gone:
        name, path = "20200101T000000-gone-1-aaaa.jsonl", "/nowhere"

        def stat(self) -> os.stat_result:
            raise FileNotFoundError(errno.ENOENT, "gone", self.path)

    monkeypatch.setattr(os, "scandir", lambda directory: [*real(directory), Gone()])
    with JournalWriter(run.paths) as writer:
        late = writer.append("note", title="late")
    monkeypatch.undo()
    listed = os.listdir(run.paths.journal_dir)
    monkeypatch.setattr(os, "listdir", lambda directory: [name for name in listed if writer.writer not in name])
    assert late.id not in [e.id for e in read_journal(run.paths).entries]
    monkeypatch.undo()
    assert read_journal(run.paths).entries[-1].id == late.id


def test_no_room_that_only_fsync_tells_leaves_no_line_and_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "r")
    with host(paths, "a") as writer:
        writer.append("note", title="before")
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))))
            with pytest.raises(JournalError, match="cannot write to the journal"):
                writer.append("note", title="lost")
        writer.append("note", title="after")
    found = read_journal(paths)
    assert [e.title for e in found.entries] == ["before", "after"] and found.problems == ()


def test_a_filesystem_without_fsync_of_directories_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    paths = RunPaths(tmp_path / "r")
    with host(paths, "a") as writer:
        writer.append("note", title="x")
    assert len(read_journal(paths).entries) == 1


def test_hosts_whose_clocks_differ_by_a_day_keep_the_order_in_which_they_read_each_other(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    for number in range(6):
        late = timedelta(days=-1 if number % 2 else 1, seconds=number)
        with host(paths, f"h{number % 2}", late) as writer:
            writer.append("note", title=str(number))
    assert [e.title for e in read_journal(paths).entries] == list("012345")


def test_a_page_replaced_while_somebody_reads_it_is_old_or_new_never_half(tmp_path: Path) -> None:
    page = tmp_path / "CHRONICLE.md"
    write_page(page, "old " * 10_000)
    with page.open() as reader:
        first = reader.read(10)
        write_page(page, "new " * 20_000)
        assert first + reader.read() == "old " * 10_000
    assert page.read_text() == "new " * 20_000
    assert [p.name for p in tmp_path.iterdir()] == ["CHRONICLE.md"]


def test_a_directory_where_nothing_may_be_written_is_read_and_says_so(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not refuse root, a read-only export does: the refusal is simulated at open."""
    run: StoryRun = toy_run(tmp_path)
    real = os.open

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(run.paths.run_dir)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opening)
    for words in (("status",), ("log",), ("log", "--graph"), ("show", "00000006"), ("audit",), ("export",)):
        assert chronicle(*words).code == 0, words
    done = chronicle("note", "cannot be written")
    assert done.code == 1 and "Read-only file system" in done.err and "Traceback" not in done.err
