"""The one atomic write: whole or not at all, on disk when asked, nothing left behind when it fails."""

import errno
import os
import re
from pathlib import Path

import pytest

from rollback.disk.content import sha256_of, sha256_unchanged
from rollback.disk.durable import Disk, write_atomic
from tests.rollback.disks import DyingDisk, FailingDisk, Killed

REPOSITORY = Path(__file__).resolve().parents[2]
BY_HAND = re.compile(r"os\.replace|os\.rename|NamedTemporaryFile|mkstemp|FICLONE|0x40049409")


class CountingDisk(Disk):
    """Notes every operation."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def point(self, operation: str, path: Path) -> None:
        self.operations.append(operation)


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    """Text is UTF-8, bytes stay bytes, and no temporary file stays."""
    write_atomic(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    write_atomic(tmp_path / "a", b"\x00\xff", durable=False)
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_durable_write_syncs_the_bytes_before_the_name_and_the_directory_after(tmp_path: Path) -> None:
    """Else a power loss leaves an empty file under the new name, or the old name."""
    disk = CountingDisk()
    disk.write_atomic(tmp_path / "a", b"x")
    assert disk.operations == ["open", "write", "fsync", "rename", "fsync"]
    disk.operations.clear()
    disk.write_atomic(tmp_path / "a", b"y", durable=False)
    assert disk.operations == ["open", "write", "rename"]


def test_without_may_replace_an_existing_file_stays(tmp_path: Path) -> None:
    """Exactly one of several writers wins."""
    write_atomic(tmp_path / "a", "first", may_replace=False)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "a", "second", may_replace=False)
    assert (tmp_path / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("at", range(1, 6))
def test_at_every_failure_the_old_or_the_new_content_is_there(tmp_path: Path, at: int) -> None:
    """A failed or killed write never leaves half a file; a failed one leaves no temporary file either."""
    path = tmp_path / "a"
    path.write_bytes(b"old content")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        FailingDisk(at).write_atomic(path, b"new content")
    assert path.read_bytes() == (b"new content" if at == 5 else b"old content")
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    with pytest.raises(Killed):
        DyingDisk(at).write_atomic(path, b"newer content")
    assert path.read_bytes() in (b"old content", b"new content", b"newer content")


def test_no_other_module_replaces_files_or_clones_blocks_by_hand() -> None:
    """One atomic write, one reflink.

    `launch/output.py` renames a full log out of the way, and `journal/writer.py` gives its new file a name once the first
    entry is on disk: no replacements.
    """
    found = [
        path.relative_to(REPOSITORY).as_posix()
        for package in ("rollback", "chronicle", "bit_transformer", "experiments")
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        if BY_HAND.search(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == ["chronicle/journal/writer.py", "chronicle/launch/output.py", "rollback/disk/durable.py"]


def test_a_file_is_hashed_once_while_its_inode_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    first = sha256_unchanged(path)
    path.write_bytes(b"two")  # at once, within a tick of the clock: nothing was remembered
    assert sha256_unchanged(path) == sha256_of(path) != first
    monkeypatch.setattr("rollback.disk.content._SETTLED_SECONDS", -3600.0)
    old = sha256_unchanged(path)
    with monkeypatch.context() as patch:
        patch.setattr("rollback.disk.content.sha256_of", lambda path: "read again")
        assert sha256_unchanged(path) == old
        times = path.stat()
        path.write_bytes(b"six")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the change time cannot be put back
        assert sha256_unchanged(path) == "read again"
