"""The contents of files: bounded reads, checksums, and the object store that keeps files by their digest.

Files may be hostile, huge or many: a pipe or device in place of a file does not block the reader, and a huge file is
refused by its size before it is read. CRC-32s are computed in spans that all cores share; threads are enough, because
reading and `zlib.crc32` release the interpreter's lock. Pickles of many files are read by several processes, because
the pickle reader is Python.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollback.disk import RemoteFile, RemoteView, open_file, pread
from rollback.disk.durable import REAL_DISK, Disk
from rollback.errors import UnreadableFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

def expect(fd: int, ranges: Iterator[tuple[int, int]]) -> None:
    """Say which (offset, count) will be read, so that a store is asked for them at the same time; nothing on a disk."""
    if isinstance(fd, RemoteFile):
        fd.prefetch(list(ranges))


def read_part(fd: int, buffer: memoryview, offset: int, most: int | None = None) -> memoryview:
    """The next bytes at `offset`, at most `most`, read into `buffer` or fetched from a store; empty at the end of the file."""
    if isinstance(fd, RemoteFile):
        left = os.fstat(fd).st_size - offset
        count = min(left, _REMOTE_BYTES, left if most is None else most)
        return memoryview(fd.stream(offset, count) if count > 0 else b"")
    return buffer[: os.preadv(fd, [buffer if most is None else buffer[:most]], offset)]


def disk_bytes(fd: int) -> int:
    """Bytes that the file occupies on disk, without holes; its size where the filesystem does not report blocks."""
    status = os.fstat(fd)
    if isinstance(fd, RemoteFile):
        return status.st_size  # a store has no holes
    return min(status.st_size, status.st_blocks * 512) if status.st_blocks else status.st_size


@contextmanager
def open_bounded(path: Path, max_bytes: int) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a regular file of at most `max_bytes`, links followed; raises `UnreadableFile` or `OSError`."""
    fd = open_file(path)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFile(f"`{path}` is not a regular file", "put the real file there, or remove it")
        if found.st_size > max_bytes:
            raise UnreadableFile(
                f"`{path}` has {found.st_size} bytes: expected at most {max_bytes}"
            )
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; raises as `open_bounded`."""
    with open_bounded(path, max_bytes) as (fd, size_bytes):
        found = b""
        while part := pread(fd, size_bytes - len(found), len(found)):
            found += part
        return found


# --- Pointer files, such as DeepSpeed's `latest`

MAX_POINTER_BYTES = 4096  # the name of a directory has at most 255
POINTER_REMEDY = "write the name of a checkpoint into it, or remove it"


def read_pointer(path: Path) -> str | None:
    """The text of a pointer file or the target of a link, None when neither exists. Raises `UnreadableFile`."""
    return os.readlink(path) if path.is_symlink() else pointer_text(path)


def pointer_text(path: Path) -> str | None:
    """As `read_pointer`, but a link is followed."""
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableFile(f"pointer `{path}` is not text: expected the name of a checkpoint", POINTER_REMEDY) from None
    if not text.strip().isprintable():
        raise UnreadableFile(f"pointer `{path}` has unprintable characters: expected the name of a checkpoint", POINTER_REMEDY)
    return text


# --- Many files at once

T = TypeVar("T")
R = TypeVar("R")

_ENOUGH_FILES = 48


def map_files(read: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """`[read(job) for job in jobs]`, in several processes when there are many jobs; the first error is raised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if RemoteView.opened is not None and len(jobs) > 1:  # waiting for a store takes longer than reading the pickles
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max_workers=16) as threads:
            return list(threads.map(read, jobs))
    if len(jobs) < _ENOUGH_FILES or cores < 2:
        return [read(job) for job in jobs]
    from concurrent.futures import ProcessPoolExecutor

    chunk = max(1, len(jobs) // (cores * 4))
    with ProcessPoolExecutor(max_workers=min(cores, 16)) as executor:
        return list(executor.map(read, jobs, chunksize=chunk))


# --- CRC-32 of parts of files, and of a file after a few bytes changed

_SPAN_BYTES = 128 * 2**20
_REMOTE_BYTES = 8 * 2**20  # a request to a store takes some 30 ms, however little it asks for
_BUFFER_BYTES = 2**20  # stays in the processor's cache between the read and the checksum

ByteProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumTarget:
    """Names `length` bytes at `offset` of a file that should have the CRC-32 `expected`.

    `name` is the file's name in the checkpoint, `label` what these bytes are.
    """

    path: Path
    name: str
    label: str
    offset: int
    length: int
    expected: int


@dataclass(frozen=True, slots=True)
class _Span:
    path: Path
    offset: int
    length: int


def wrong_checksums(
    targets: Sequence[ChecksumTarget], executor: Executor | None = None, progress: ByteProgress | None = None
) -> list[tuple[ChecksumTarget, int]]:
    """The targets whose bytes have another CRC-32, with the one that was found. UnreadableFile when one ends early."""
    spans = [(target, span) for target in targets for span in _spans(target)]
    crcs = (executor.map if executor else map)(lambda span: _crc_of(span, progress), [span for _, span in spans])
    found = {id(target): 0 for target in targets}
    for (target, span), crc in zip(spans, crcs, strict=True):
        found[id(target)] = crc32_combine(found[id(target)], crc, span.length)
    return [(target, found[id(target)]) for target in targets if found[id(target)] != target.expected]


def _spans(target: ChecksumTarget) -> list[_Span]:
    starts = range(0, target.length, _SPAN_BYTES)
    return [_Span(target.path, target.offset + at, min(_SPAN_BYTES, target.length - at)) for at in starts]


_local = threading.local()


def _buffer() -> bytearray:
    """One buffer a thread: allocating a new one for every read costs as much as the checksum."""
    if not hasattr(_local, "buffer"):
        _local.buffer = bytearray(_BUFFER_BYTES)
    buffer: bytearray = _local.buffer
    return buffer


def _crc_of(span: _Span, progress: ByteProgress | None) -> int:
    view = memoryview(_buffer())
    fd = open_file(span.path)
    try:
        at, left, crc = span.offset, span.length, 0
        while left:
            part = read_part(fd, view, at, left)
            count = len(part)
            if not count:
                raise UnreadableFile(f"`{span.path}` ends at byte {at}: expected {left} more bytes")
            crc = zlib.crc32(part, crc)
            at, left = at + count, left - count
            if progress is not None:
                progress(count)
        return crc
    except OSError as problem:
        raise UnreadableFile(f"`{span.path}` cannot be read: {problem.strerror}") from None
    finally:
        os.close(fd)


# --- Arithmetic of CRC-32: joining two, and changing bytes

_POLYNOMIAL = 0xEDB88320  # reflected: the highest power is the lowest bit
_ONE = 0x80000000


def crc32_after(crc: int, size_bytes: int, changes: Iterable[tuple[int, bytes, bytes]]) -> int:
    """CRC-32 of a file of `size_bytes` whose CRC-32 was `crc`, after each (offset, old, new) was written."""
    for offset, old, new in changes:
        difference = bytes(x ^ y for x, y in zip(old, new, strict=True))
        bare = zlib.crc32(difference) ^ zlib.crc32(bytes(len(difference)))  # start value and final inversion cancel out
        crc ^= _times(bare, _power(8 * (size_bytes - offset - len(old))))
    return crc


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two pieces put together, from the CRC-32 of each and the length of the second."""
    return _times(first, _power(8 * second_bytes)) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(exponent: int) -> int:
    """x to that power, modulo the polynomial."""
    result, square = _ONE, _ONE >> 1  # 1 and x
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


# --- The object store `objects/<aa>/<sha256>`: originals of edited files, attachments, plans

_CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as lower-case hex, read in chunks now."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        view = memoryview(_buffer())
        while count := file.readinto(view):
            digest.update(view[:count])
    return digest.hexdigest()


_known: dict[tuple[int, ...], str] = {}
_SETTLED_SECONDS = 2.0  # a file that was touched more recently could change again within one tick of its clock
_MOST_KNOWN = 256


def sha256_unchanged(path: Path) -> str:
    """As `sha256_of`, but a file that this process has read before is not read again while its inode is the same.

    The change time of the inode tells: no program can set it. What is copied is hashed again by whoever copies it, and what
    was written now is read from the disk by `sha256_of`; both are compared.
    """
    found = path.stat()
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if key not in _known:
        settled = found.st_ctime_ns / 1e9 + _SETTLED_SECONDS < time.time()
        digest = sha256_of(path)
        if not settled or len(_known) >= _MOST_KNOWN:
            return digest
        _known[key] = digest
    return _known[key]


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Files below `directory`, named by the SHA-256 of their bytes. Each is written once, atomically and durably."""

    directory: Path
    disk: Disk = REAL_DISK

    def path(self, sha256: str) -> Path:
        """The path of the object with this digest, whether it exists or not."""
        return self.directory / sha256[:2] / sha256

    def add_file(self, source: Path, sha256: str) -> None:
        """Store the bytes of `source`, whose digest is `sha256`; `UnreadableFile` when they changed meanwhile."""
        target = self.path(sha256)
        if self._holds(target, sha256):
            return
        temporary = self._temporary(target)
        self.disk.copy_new(source, temporary)
        self._publish(temporary, target, sha256)

    def add_bytes(self, content: bytes) -> str:
        """Store `content`; returns its digest."""
        sha256 = hashlib.sha256(content).hexdigest()
        target = self.path(sha256)
        if not self._holds(target, sha256):
            temporary = self._temporary(target)
            self.disk.write_new(temporary, content)
            self._publish(temporary, target, sha256)
        return sha256

    def find(self, sha256: str) -> Path:
        """The path of an object that exists and has its digest; raises `UnreadableFile` otherwise."""
        target = self.path(sha256)
        if not target.is_file():
            raise UnreadableFile(
                f"the original file {sha256[:12]}… is not in `{self.directory}`", remedy="restore that directory"
            )
        if sha256_of(target) != sha256:
            raise UnreadableFile(
                f"`{target}` was changed: its bytes no longer have the digest in its name",
                remedy="restore it from a copy",
            )
        return target

    def _holds(self, target: Path, sha256: str) -> bool:
        return target.is_file() and sha256_of(target) == sha256

    def _temporary(self, target: Path) -> Path:
        self.disk.make_directory(target.parent)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        self.disk.remove_tree(temporary)
        return temporary

    def _publish(self, temporary: Path, target: Path, sha256: str) -> None:
        if sha256_of(temporary) != sha256:
            self.disk.unlink(temporary)
            raise UnreadableFile(
                f"the file kept as {sha256[:12]}… changed while it was read",
                remedy="stop the run that writes it, then repeat the command",
            )
        self.disk.replace(temporary, target)
        self.disk.sync_directory(target.parent)
