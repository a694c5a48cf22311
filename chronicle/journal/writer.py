"""Append entries to the journal: one file per writer, one `os.write` per line, a sha256 chain, fsync per entry.

No file lock: each process writes its own file, which works on NFS and Lustre (`docs/design.md` §5.1). A line that could
not be written whole (full disk) is cut off again. If that fails too, the next entry begins a new line and the reader
reports the torn one.

Hosts' clocks differ. `ts` is this host's clock. The *id* holds a hybrid clock: later than the last ids in the journal when
this file was created (of the `NEWEST_FILES` files written last) and later than this writer's own last id. So an entry sorts
behind the entries that its writer could have read, however wrong a clock is, and `audit` reports by how much clocks differ.

A writer's first entry records the last lines of the files written last (`heads`), so that a file that was cut, emptied or
deleted later is noticed. The file gets its name when its first entry is on disk: a crash leaves no empty journal file.
"""

import atexit
import contextlib
import errno
import hashlib
import heapq
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.credentials import redact, redact_values
from chronicle.errors import ChronicleError, JournalError
from chronicle.journal.entries import FIRST_PREV, Entry
from chronicle.journal.events import EntryKind
from chronicle.journal.place import Anchors, Place, is_same_directory, settle
from chronicle.paths import RunPaths

if TYPE_CHECKING:
    from chronicle.journal.events import JournalEvent

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford base 32, as ULIDs use it
NEWEST_FILES = 32  # files whose last lines are read for the hybrid clock
NOTED_FILES = 16  # of these, whose last lines the first entry records
HEAD_DIGITS = 16  # of a recorded digest
TAIL_BYTES = 1 << 16


def new_id(milliseconds: int, randomness: int) -> str:
    """A ULID: sorts by time, unique without coordination. `randomness` has 80 bits."""
    number = ((milliseconds & ((1 << 48) - 1)) << 80) | randomness
    return "".join(ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def fresh_id() -> str:
    """A new ULID of this moment."""
    return new_id(int(time.time() * 1000), _random_bits(80))


def id_milliseconds(entry_id: str) -> int | None:
    """The hybrid clock in an id, milliseconds since the epoch; None when the text is no ULID."""
    value = 0
    for letter in entry_id[:10]:
        digit = ALPHABET.find(letter)
        if digit < 0:
            return None
        value = value * 32 + digit
    return value if len(entry_id) == 26 else None


def _random_bits(count: int) -> int:
    """Random bits as `secrets` gives them, without the ten modules it imports: `note` starts here."""
    return int.from_bytes(os.urandom(count // 8))


class JournalWriter:
    """Writes one file `<journal>/<utc>-<host>-<pid>-<hex>.jsonl`, created with the first entry."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        host: str | None = None,
        pid: int | None = None,
        randomness: Callable[[int], int] = _random_bits,
        checkpoints: Path | None = None,
    ) -> None:
        self.paths = paths
        self._checkpoints = checkpoints
        self._place: Place | None = None
        self._anchors: Anchors | None = None
        self._clock = clock
        self._host = (host or os.uname().nodename).split(".")[0]
        self._pid = os.getpid() if pid is None else pid
        self._randomness = randomness
        self._fd: int | None = None
        self._owner_pid = os.getpid()
        self._seq = 0
        self._prev = FIRST_PREV
        self._last_milliseconds = 0
        self._torn = False
        self._registered = False
        self._heads: Mapping[str, str] = {}
        self._lock = threading.RLock()
        self.writer = ""

    @property
    def place(self) -> Place:
        """Who this run is and where it lies; raises as `append`."""
        if self._place is None:
            self._settle()
        assert self._place is not None
        return self._place

    def add_root(self, root: Path) -> None:
        """Remember a checkpoint root of the run; raises as `append`."""
        if not any(is_same_directory(known, root) for known in self.place.anchors(self.paths.run_dir).roots):
            self._checkpoints = root
            self._settle()

    def append(
        self,
        kind: str,
        *,
        step: int | None = None,
        launch: int | None = None,
        title: str = "",
        refs: Sequence[str] = (),
        data: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Write one entry, fsync it and return it; raises `JournalError` when that fails, `Refusal` in a copy of the run.

        For imported entries of any kind; everything else writes typed events (`write`).
        """
        self._leave_parent()
        with self._lock:
            if self._anchors is None and self._settle():
                place = {"run_id": self.place.run_id, "host": self.place.host, "path": self.place.path}
                self.append(EntryKind.RUN_PLACE, title=f"run lies at {self.place.path} now", data=place)
            assert self._anchors is not None
            moment = self._clock()
            try:
                fd = self._open(moment)
                milliseconds = max(int(moment.timestamp() * 1000), self._last_milliseconds + 1)
                entry = Entry(
                    id=new_id(milliseconds, self._randomness(80)),
                    ts=moment.isoformat(timespec="milliseconds"),
                    run=self.paths.run,
                    writer=self.writer,
                    seq=self._seq,
                    prev=self._prev,
                    kind=kind,
                    step=step,
                    launch=launch,
                    title=redact(title),
                    refs=tuple(refs),
                    data=redact_values(data or {}),
                    heads=self._heads if self._seq == 0 else {},
                )
                stored = replace(entry, data=self._anchors.store(entry.data)) if entry.data else entry
                line = stored.to_json().encode("utf-8")
                self._write(fd, line)
                if self._seq == 0:
                    self._publish()
            except OSError as problem:
                if self._seq == 0:
                    self._discard()
                raise self._cannot_write(problem) from problem
            self._seq += 1
            self._last_milliseconds = milliseconds
            self._prev = hashlib.sha256(line).hexdigest()
            return entry

    def write(
        self,
        event: "JournalEvent",
        *,
        step: int | None = None,
        launch: int | None = None,
        title: str = "",
        refs: Sequence[str] = (),
    ) -> Entry:
        """Append an event as an entry of its kind; raises as `append`."""
        return self.append(event.KIND, step=step, launch=launch, title=title, refs=refs, data=event.to_json())

    def close(self) -> None:
        """Close the file; a later append starts a new one."""
        self._leave_parent()
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                if self._seq:
                    _record_end(self.paths, self.writer, self._prev)

    def __enter__(self) -> "JournalWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _close_at_exit(self) -> None:
        """A process that ends without closing its journal, as one under guard does, notes its last line too."""
        reference = weakref.ref(self)
        atexit.register(lambda: writer.close() if (writer := reference()) is not None else None)

    def _settle(self) -> bool:
        """Find out whether this directory is the run; returns whether it has moved since it was last written to."""
        try:
            self.paths.journal_dir.mkdir(parents=True, exist_ok=True)
            self._place, moved = settle(self.paths, fresh_id(), self._checkpoints)
        except OSError as problem:
            raise self._cannot_write(problem) from problem
        self._anchors = self._place.anchors(self.paths.run_dir)
        return moved

    def _cannot_write(self, problem: OSError) -> JournalError:
        said = f"cannot write to the journal `{self.paths.journal_dir}`: {problem.strerror or problem}"
        return JournalError(said, "free space or fix the permissions, then repeat the command")

    def _open(self, moment: datetime) -> int:
        if self._fd is not None:
            return self._fd
        directory = self.paths.journal_dir
        directory.mkdir(parents=True, exist_ok=True)
        newest, self._heads = _newest(directory)
        self._last_milliseconds = max(self._last_milliseconds, newest)
        stamp = moment.astimezone(UTC).strftime("%Y%m%dT%H%M%S")
        self.writer = f"{stamp}-{self._host}-{self._pid}-{self._randomness(16):04x}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self._unnamed, flags, 0o644)
        if not self._registered:
            self._registered = True
            self._close_at_exit()
        self._seq, self._prev, self._torn = 0, FIRST_PREV, False
        self._fd = fd
        return fd

    @property
    def _unnamed(self) -> Path:
        """The file before its first entry is on disk; no reader lists it."""
        return self.paths.journal_dir / f".{self.writer}.new"

    def _publish(self) -> None:
        """Give the file its name."""
        os.rename(self._unnamed, self.paths.journal_dir / f"{self.writer}.jsonl")
        _fsync_dir(self.paths.journal_dir)

    def _discard(self) -> None:
        """Remove a file whose first entry could not be written; the next append starts another."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            for path in (self._unnamed, self.paths.journal_dir / f"{self.writer}.jsonl"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _leave_parent(self) -> None:
        """In a forked child: let go of the parent's file and lock, so that the child writes a file of its own."""
        if self._owner_pid != os.getpid():
            self._owner_pid = self._pid = os.getpid()
            self._lock = threading.RLock()  # the parent's may have been held by a thread that does not exist here
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _write(self, fd: int, line: bytes) -> None:
        size = os.fstat(fd).st_size
        record = (b"\n" if self._torn else b"") + line + b"\n"
        try:
            if os.write(fd, record) != len(record):  # a short write to a file means the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)  # a network filesystem reports a full disk only here
        except BaseException:
            self._cut(fd, size)  # back to `size`: a line that was torn before this one is still torn
            raise
        self._torn = False

    def _cut(self, fd: int, size: int) -> None:
        """Remove what a failed write left behind the first `size` bytes; if that fails, the next entry begins a new line."""
        try:
            os.ftruncate(fd, size)
        except OSError:
            self._torn = True


def _record_end(paths: RunPaths, writer: str, digest: str) -> None:
    """Note a writer's last line outside its file. Best effort: without the note a cut of the file's end stays unknown.

    One short line, appended without a lock; a line that another host's overwrites does not fit its own check sum.
    """
    with contextlib.suppress(OSError):
        fd = os.open(paths.ends_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, end_line(writer, digest[:HEAD_DIGITS]).encode())
        finally:
            os.close(fd)


def end_line(writer: str, digest: str) -> str:
    """A line of `journal-ends`: writer, first digits of the digest of its last line, and the check sum of both."""
    text = f"{writer} {digest}"
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()[:8]}\n"


def store_file(paths: RunPaths, source: Path) -> dict[str, Any]:
    """Copy a file into the run's object store; returns the record of evidence that an entry attaches."""
    from rollback.disk.content import ObjectStore, sha256_of  # most commands attach nothing
    from rollback.errors import UnreadableFile

    if not source.is_file():
        raise ChronicleError(f"cannot attach `{source}`: not a readable file")
    try:
        digest = sha256_of(source)
        ObjectStore(paths.objects_dir).add_file(source, digest)
        size = paths.object_path(digest).stat().st_size
    except UnreadableFile as problem:
        raise JournalError(problem.message, problem.remedy) from problem
    except OSError as problem:
        raise JournalError(f"cannot store `{source}` in `{paths.objects_dir}`: {problem.strerror}") from problem
    return {"kind": "file", "path": source.name, "sha256": digest, "bytes": size}


def store_bytes(paths: RunPaths, content: bytes, name: str) -> dict[str, Any]:
    """Keep bytes in the run's object store; returns their record, as `store_file` does."""
    from rollback.disk.content import ObjectStore

    try:
        digest = ObjectStore(paths.objects_dir).add_bytes(content)
    except OSError as problem:
        raise JournalError(f"cannot store `{name}` in `{paths.objects_dir}`: {problem.strerror}") from problem
    return {"kind": "file", "path": name, "sha256": digest, "bytes": len(content)}


def _newest(directory: Path) -> tuple[int, dict[str, str]]:
    """The highest hybrid clock among the last lines of the files written last, and digests of these lines by writer.

    File times only select the files: a wrong one can affect the order of entries, not their number.
    """
    highest = 0
    heads: dict[str, str] = {}
    for _, path in heapq.nlargest(NEWEST_FILES, _written(directory)):
        milliseconds, digest = _last_line(path)
        highest = max(highest, milliseconds)
        if digest and len(heads) < NOTED_FILES:
            heads[os.path.basename(path).removesuffix(".jsonl")] = digest
    return highest, heads


def _written(directory: Path) -> Iterator[tuple[int, str]]:
    for entry in os.scandir(directory):
        try:
            if entry.name.endswith(".jsonl"):
                yield entry.stat().st_mtime_ns, entry.path
        except OSError:
            continue  # gone: the listing was older than the directory (NFS)


def _last_line(path: str) -> tuple[int, str]:
    """The hybrid clock of the last readable line, and the first digits of the digest of the last complete line."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0, ""  # not readable: the order falls back to the wall clock
    whole = len(lines) > 1 or (start == 0 and bool(lines))
    digest = hashlib.sha256(lines[-1]).hexdigest()[:HEAD_DIGITS] if whole else ""
    for line in reversed(lines):
        try:
            return id_milliseconds(str(json.loads(line)["id"])) or 0, digest
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return 0, digest


def _fsync_dir(directory: os.PathLike[str]) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot sync a directory
            raise
    finally:
        os.close(fd)
