"""Durable and atomic filesystem operations: the building blocks of a crash-safe change.

`write_atomic` replaces a file in one step, for every package of this project. The methods of `Disk` announce each
operation to `Disk.point` first, so that the crash tests can stop or fail before each one. Below: a new file composed
of new bytes and ranges of an old one, and mount points, which no rename or hard link crosses. Nothing here knows
checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollback.errors import UnreadableFile

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_MISSING_CALL = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF})
_CHUNK_BYTES = 1 << 20
# Namespaces of extended attributes that describe the file. Others (`trusted`, `lustre`, `ceph`, `btrfs`) describe how its
# bytes are stored, and the filesystem sets them.
_KEPT = ("user.", "security.", "system.posix_acl_", "system.nfs4_acl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What `undo` restores of a file or directory besides its bytes."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    extended: Mapping[str, bytes] | None = None  # extended attributes, ACLs among them; None: not known, left alone

    @classmethod
    def of(cls, path: Path) -> Attributes:
        """The attributes of `path` itself; a link is not followed."""
        found = path.lstat()
        return cls(
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            atime_ns=found.st_atime_ns,
            mtime_ns=found.st_mtime_ns,
            extended=None if stat.S_ISLNK(found.st_mode) else _read_extended(path),
        )

    def to_json(self) -> list[Any]:
        """A JSON list, in the order of the fields; the values of extended attributes as hex."""
        known = [self.mode, self.uid, self.gid, self.atime_ns, self.mtime_ns]
        return known if self.extended is None else [*known, {name: value.hex() for name, value in self.extended.items()}]

    @classmethod
    def from_json(cls, values: Any) -> Attributes:
        """Read what `to_json` wrote, also before extended attributes were kept."""
        mode, uid, gid, atime_ns, mtime_ns, *rest = values
        extended = {name: bytes.fromhex(value) for name, value in rest[0].items()} if rest else None
        return cls(mode=mode, uid=uid, gid=gid, atime_ns=atime_ns, mtime_ns=mtime_ns, extended=extended)


@dataclass(frozen=True, slots=True)
class BytePatch:
    """`old` bytes at absolute `offset` become `new` bytes of the same length."""

    offset: int
    old: bytes
    new: bytes

    def to_json(self) -> list[Any]:
        """A JSON list; bytes are written as hex."""
        return [self.offset, self.old.hex(), self.new.hex()]

    @classmethod
    def from_json(cls, values: Any) -> BytePatch:
        """The inverse of `to_json`."""
        offset, old, new = values
        return cls(offset, bytes.fromhex(old), bytes.fromhex(new))


def is_there(path: Path) -> bool:
    """Whether `path` exists, a dangling link included; raises `OSError` when that is unknown.

    `os.path.lexists` returns False for a disk that does not answer.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of calls that know a descriptor alone, such as a full disk, name the file."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(path)
        raise


class Disk:
    """The real filesystem. Raises `OSError` as the kernel does; interrupted calls are repeated by Python (PEP 475)."""

    def point(self, operation: str, path: Path) -> None:
        """Called before each operation that changes something; tests count, fail or stop here."""

    def make_directory(self, path: Path) -> None:
        """Create `path` and its missing parents, each one durable."""
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            self.point("mkdir", directory)
            directory.mkdir(exist_ok=True)
            self.sync_directory(directory.parent)

    def write_new(self, path: Path, content: bytes, *, durable: bool = True) -> None:
        """Create `path`, which must not exist, with `content`; with `durable` on disk when this returns."""
        self.point("open", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with named(path):
                self.write_all(descriptor, content, path)
                if durable:
                    self.point("fsync", path)
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_atomic(
        self, path: Path, content: bytes | str, *, durable: bool = True, may_replace: bool = True
    ) -> None:
        """Give the file `path` this content in one step: a reader sees what was there before, or all of it.

        Text is written as UTF-8. The bytes go to a temporary file in the same directory, which is then renamed.
        With `durable` both the bytes and the new name are on disk when this returns. Without `may_replace` a file
        that is there already is left alone and `FileExistsError` is raised. Raises `OSError`; the directory must exist.
        """
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # unique across hosts too
        try:
            self.write_new(temporary, content.encode() if isinstance(content, str) else content, durable=durable)
            if may_replace:
                self.replace(temporary, path)
            else:
                self.link(temporary, path)
                self.unlink(temporary)
        except (Exception, KeyboardInterrupt):
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            self.sync_directory(path.parent)

    def write_all(self, descriptor: int, content: bytes, path: Path) -> None:
        """Write everything; a short write is continued."""
        view = memoryview(content)
        while view:
            self.point("write", path)
            view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]

    def overwrite(self, path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write each (offset, bytes) into an existing file; on disk when this returns."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for offset, content in pieces:
                self.write_at(descriptor, offset, content, path)
            self.point("fsync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_at(self, descriptor: int, offset: int, content: bytes, path: Path) -> None:
        """Write everything at `offset`; a short write is continued."""
        view = memoryview(content)
        while view:
            self.point("write", path)
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done

    def copy_new(self, source: Path, target: Path) -> None:
        """Copy the bytes of `source` into `target`, which must not exist; durable."""
        self.point("open", target)
        with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer, named(target):
            self.point("write", target)
            if not reflink(reader.fileno(), writer.fileno()):
                _copy_range(reader.fileno(), writer.fileno(), range(os.fstat(reader.fileno()).st_size), 0)
            self.point("fsync", target)
            os.fsync(writer.fileno())

    def sync_file(self, path: Path) -> None:
        """Flush the bytes of an existing file to disk."""
        self.point("fsync", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Flush the entries of a directory to disk; nothing is done where the filesystem has no such operation."""
        self.point("fsync", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as problem:
            if problem.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link `target` to `source`; a symbolic link is not followed."""
        self.point("link", target)
        os.link(source, target, follow_symlinks=False)

    def symlink(self, target: str, path: Path) -> None:
        """Create a symbolic link `path` to `target`."""
        self.point("symlink", path)
        os.symlink(target, path)

    def move(self, source: Path, target: Path) -> None:
        """Rename to a free name; raises `FileExistsError` instead of replacing anything."""
        self.point("rename", target)
        if _renameat2(source, target, _RENAME_NOREPLACE) in _MISSING_CALL:
            if is_there(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
            os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing a file that has the name; atomic."""
        self.point("rename", target)
        os.replace(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two names in one atomic operation."""
        self.point("exchange", other)
        code = _renameat2(one, other, _RENAME_EXCHANGE)
        if code:
            raise OSError(code, os.strerror(code), str(other))

    def can_exchange(self, directory: Path) -> bool:
        """Whether the filesystem of `directory` supports RENAME_EXCHANGE; tried on two empty directories."""
        one, other = directory / "probe-1", directory / "probe-2"
        for probe in (one, other):
            self.point("mkdir", probe)
            probe.mkdir(exist_ok=True)  # temporary
        try:
            self.exchange(one, other)
        except OSError as problem:
            if problem.errno not in _MISSING_CALL:
                raise
            return False
        finally:
            one.rmdir()
            other.rmdir()
        return True

    def can_link(self, directory: Path) -> bool:
        """Whether files in `directory`, which is not seen, can have two names."""
        one, other = directory / "probe", directory / "probe-2"
        try:
            one.touch()
            os.link(one, other)
        except OSError:
            return False
        finally:
            one.unlink(missing_ok=True)
            other.unlink(missing_ok=True)
        return True

    def can_reflink(self, directory: Path) -> bool:
        """Whether files in `directory` can share blocks, so that copies cost nothing.

        Tried on two files without a name: a kill leaves nothing, and the directory keeps its times. False where there are
        no such files (NFS).
        """
        flags = getattr(os, "O_TMPFILE", os.O_DIRECTORY) | os.O_RDWR | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(directory, flags, 0o600), "r+b", buffering=0) as source:
                source.write(b"\0" * 4096)
                with os.fdopen(os.open(directory, flags, 0o600), "r+b", buffering=0) as target:
                    return reflink(source.fileno(), target.fileno())
        except OSError:
            return False

    def set_attributes(self, path: Path, attributes: Attributes) -> None:
        """Set mode, times, extended attributes (ACLs among them) and, where permitted, owner."""
        self.point("attributes", path)
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            os.utime(path, ns=(attributes.atime_ns, attributes.mtime_ns), follow_symlinks=False)
            return
        if (found.st_uid, found.st_gid) != (attributes.uid, attributes.gid):
            _chown_if_permitted(path, attributes)
        if attributes.extended is not None:
            _write_extended(path, attributes.extended)
        os.chmod(path, attributes.mode)
        os.utime(path, ns=(attributes.atime_ns, attributes.mtime_ns))

    def unlink(self, path: Path) -> None:
        """Remove one name of a file."""
        self.point("unlink", path)
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """Remove a file or directory tree, if it is there; links are removed, never followed."""
        if not is_there(path):
            return
        if path.is_symlink() or not path.is_dir():
            self.unlink(path)
            return
        if not os.access(path, os.W_OK | os.X_OK):
            path.chmod(0o700)
        for entry in sorted(path.iterdir()):
            self.remove_tree(entry)
        self.point("rmdir", path)
        path.rmdir()


REAL_DISK = Disk()
write_atomic = REAL_DISK.write_atomic


@functools.cache
def _libc_renameat2() -> Callable[..., int] | None:
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function


def _renameat2(source: Path, target: Path, flags: int) -> int:
    """0 when done, the error number where the call or flag is not supported; raises `OSError` otherwise."""
    function = _libc_renameat2()
    if function is None:
        return errno.ENOSYS
    import ctypes

    while function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _MISSING_CALL:
            return code
        raise OSError(code, os.strerror(code), str(source), None, str(target))
    return 0


def _chown_if_permitted(path: Path, attributes: Attributes) -> None:
    # only root may change the owner; the bytes matter more
    with contextlib.suppress(PermissionError):
        os.chown(path, attributes.uid, attributes.gid, follow_symlinks=False)


def _read_extended(path: Path) -> Mapping[str, bytes] | None:
    """The extended attributes that a person or a program has set; None where the filesystem has none."""
    try:
        names = [name for name in os.listxattr(path) if name.startswith(_KEPT)]
        return {name: os.getxattr(path, name) for name in names}
    except (OSError, AttributeError):  # not supported here, or not readable by this user; not on this system
        return None


def _write_extended(path: Path, wanted: Mapping[str, bytes]) -> None:
    """Make the extended attributes equal to `wanted`: a new file may have inherited others from its directory."""
    found = _read_extended(path) or {}
    with contextlib.suppress(AttributeError):
        for name in found.keys() - wanted.keys():
            with contextlib.suppress(OSError):
                os.removexattr(path, name)
        for name, value in wanted.items():
            if found.get(name) != value:
                with contextlib.suppress(OSError):  # `security` may be root's alone; the bytes matter more
                    os.setxattr(path, name, value)


def reflink(source: int, target: int) -> bool:
    """Let file descriptor `target` share the blocks of `source` (btrfs, xfs); False where the filesystem cannot."""

    import fcntl

    ficlone = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
    try:
        fcntl.ioctl(target, ficlone, source)
    except OSError:
        return False
    return True


# --- A new file from new bytes and ranges of an old one

Piece = bytes | range  # new bytes, or a range of bytes copied from the old file


def write_new(destination: Path, source: Path, pieces: Sequence[Piece], source_fd: int) -> None:
    """Write `pieces` to `destination`, which must not exist, with the mode of `source`; fsynced when this returns."""
    mode = os.stat(source).st_mode & 0o7777
    fd = os.open(destination, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with named(destination):
            os.fchmod(fd, mode)
            cloned = source_fd >= 0 and reflink(source_fd, fd)
            at = 0
            for piece in pieces:
                if isinstance(piece, bytes):
                    REAL_DISK.write_at(fd, at, piece, destination)
                    at += len(piece)
                elif not cloned or piece.start != at:
                    at = _copy_range(source_fd, fd, piece, at)
                else:
                    at += len(piece)
            os.ftruncate(fd, at)
            os.fsync(fd)
    finally:
        os.close(fd)


def _copy_range(source_fd: int, fd: int, piece: range, at: int) -> int:
    """Copy inside the kernel; returns the position behind the last byte."""
    os.lseek(fd, at, os.SEEK_SET)
    offset, left = piece.start, len(piece)
    while left:
        sent = os.sendfile(fd, source_fd, offset, min(left, 2**30))
        if not sent:
            raise UnreadableFile(f"file ends at byte {offset}: it became shorter while it was copied")
        offset, left = offset + sent, left - sent
    return at + len(piece)


# --- Mount points

_MOUNTINFO = "/proc/self/mountinfo"


def is_mount_point(path: Path, known: frozenset[str] | None = None) -> bool:
    """Whether something is mounted at `path`; `known` is an earlier `mount_points()`, where many paths are asked for."""
    if os.path.ismount(path):
        return True
    return os.path.realpath(path) in (mount_points() if known is None else known)


def mount_points() -> frozenset[str]:
    """Every mount point this process sees, by the kernel's own list; empty where there is none."""
    try:
        with open(_MOUNTINFO, "rb") as lines:
            fields = [line.split(b" ", 5)[4] for line in lines if line.count(b" ") > 5]
    except OSError:
        return frozenset()
    return frozenset(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field)) for field in fields)
