"""What a disk may hold after a power loss, enumerated from a record of the operations that led there.

Model (after ALICE, OSDI 2014, without its filesystem-specific mercy): the bytes of a file last only once it was
fsynced, before that it may be empty, half or whole; a change of names is atomic, and lasts only once every directory
it touches was fsynced. Of the changes that do not last yet, every prefix may have reached the disk, and every
selection that leaves out a single one on which no later one depends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollback.disk.durable import Disk
from tests.rollback.disks import Journal

Names = tuple[tuple[int, str, int | None], ...]  # (directory, name, what it names from now on)


@dataclass
class Log:
    """Operations in their order: ("names", changes), ("data", inode, bytes), ("fsync", inode), ("journal", number)."""

    start_names: dict[int, dict[str, int]] = field(default_factory=dict)
    start_data: dict[int, bytes] = field(default_factory=dict)
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    top: int = 0


class RecordingDisk(Disk):
    """The real disk, writing down every operation by inode numbers."""

    def __init__(self, top: Path) -> None:
        self.log = Log(top=_inode(top))
        for path in [top, *top.rglob("*")]:
            if path.is_dir():
                self.log.start_names[_inode(path)] = {child.name: _inode(child) for child in path.iterdir()}
            else:
                self.log.start_data[_inode(path)] = path.read_bytes()
        self._gone: dict[Path, int] = {}

    def _names(self, *changes: tuple[Path, int | None]) -> None:
        self.log.operations.append(("names", tuple((_inode(p.parent), p.name, inode) for p, inode in changes)))

    def _file(self, path: Path) -> None:
        self._names((path, _inode(path)))
        self.log.operations.append(("data", _inode(path), path.read_bytes()))
        self.log.operations.append(("fsync", _inode(path)))

    def point(self, operation: str, path: Path) -> None:
        if operation in ("unlink", "rmdir"):
            self._names((path, None))
        self._pending_directory = path if operation == "mkdir" else None

    def make_directory(self, path: Path) -> None:
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir()
            self._names((directory, _inode(directory)))
            self.sync_directory(directory.parent)

    def write_new(self, path: Path, content: bytes, *, durable: bool = True) -> None:
        super().write_new(path, content)
        self._file(path)

    def copy_new(self, source: Path, target: Path) -> None:
        super().copy_new(source, target)
        self._file(target)

    def sync_file(self, path: Path) -> None:
        super().sync_file(path)
        self._file(path)

    def overwrite(self, path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
        super().overwrite(path, pieces)
        self.log.operations += [("data", _inode(path), path.read_bytes()), ("fsync", _inode(path))]

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.log.operations.append(("fsync", _inode(path)))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._names((target, _inode(target)))

    def move(self, source: Path, target: Path) -> None:
        super().move(source, target)
        self._names((source, None), (target, _inode(target)))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self._names((source, None), (target, _inode(target)))

    def exchange(self, one: Path, other: Path) -> None:
        super().exchange(one, other)
        self._names((one, _inode(one)), (other, _inode(other)))

    def can_exchange(self, directory: Path) -> bool:
        return True


class RecordingJournal(Journal):
    """Its entries last when `record` returns, as those of the real one do."""

    def __init__(self, recording: RecordingDisk) -> None:
        super().__init__()
        self.recording = recording

    def record(self, kind: str, data: dict[str, Any]) -> str:
        entry = super().record(kind, data)
        self.recording.log.operations.append(("journal", len(self.entries)))
        return entry


@dataclass(frozen=True)
class Remains:
    """One possible content of the disk after a power loss, with the number of journal entries that lasted."""

    names: dict[int, dict[str, int]]
    data: dict[int, bytes]
    num_entries: int
    after: int  # operations carried out when the power went


def possible_remains(log: Log) -> Iterator[Remains]:
    """Every state the model allows, for a power loss after each operation; equal ones only once."""
    seen: set[str] = set()
    for after in range(len(log.operations) + 1):
        for remains in _remains_after(log, after):
            key = repr((sorted((d, sorted(n.items())) for d, n in remains.names.items()), remains.num_entries))
            key += repr(sorted(remains.data.items()))
            if key not in seen:
                seen.add(key)
                yield remains


def _remains_after(log: Log, after: int) -> Iterator[Remains]:
    lasting: list[Names] = []
    pending: list[tuple[Names, set[int]]] = []  # change, directories not fsynced since
    data, safe = dict(log.start_data), dict(log.start_data)
    entries = 0
    for operation in log.operations[:after]:
        kind, subject = operation[0], operation[1]
        if kind == "names":
            pending.append((subject, {directory for directory, _, _ in subject}))
        elif kind == "data":
            data[subject] = operation[2]
            safe.setdefault(subject, b"")
        elif kind == "journal":
            entries = subject
        else:
            if subject in data:
                safe[subject] = data[subject]
            for _, directories in pending:
                directories.discard(subject)
            lasting += [change for change, directories in pending if not directories]
            pending = [(change, directories) for change, directories in pending if directories]
    for chosen in _selections([change for change, _ in pending]):
        names = {directory: dict(children) for directory, children in log.start_names.items()}
        for change in [*lasting, *chosen]:
            for directory, name, inode in change:
                children = names.setdefault(directory, {})
                if inode is None:
                    children.pop(name, None)
                else:
                    children[name] = inode
        unsafe = [inode for inode in data if data[inode] != safe[inode]]
        for choice in (0, 1, 2) if unsafe else (2,):
            content = data | {i: (safe[i], _half(safe[i], data[i]), data[i])[choice] for i in unsafe}
            yield Remains(names, content, entries, after)


def _half(safe: bytes, written: bytes) -> bytes:
    """A file that was written from nothing has its first half; one overwritten in place has new and old bytes mixed."""
    if len(safe) != len(written):
        return written[: len(written) // 2]
    differing = [i for i, (x, y) in enumerate(zip(safe, written, strict=True)) if x != y]
    middle = differing[len(differing) // 2]
    return written[:middle] + safe[middle:]


def _selections(pending: list[Names]) -> Iterator[list[Names]]:
    for length in range(len(pending) + 1):
        yield pending[:length]
    for index, dropped in enumerate(pending):
        touched = {inode for _, _, inode in dropped} | {(d, n) for d, n, _ in dropped}
        later = {x for change in pending[index + 1 :] for d, n, inode in change for x in (inode, (d, n), d)}
        if not touched & later:
            yield [*pending[:index], *pending[index + 1 :]]


def write_remains(remains: Remains, log: Log, top: Path) -> None:
    """Put a state on the real disk, at `top`; inode numbers written in `transaction.json` become the new ones."""
    numbers: dict[int, int] = {}
    first: dict[int, Path] = {}
    queue = [(log.top, top)]
    while queue:
        inode, path = queue.pop()
        path.mkdir(parents=True)
        numbers[inode] = _inode(path)
        for name, child in remains.names.get(inode, {}).items():
            target = path / name
            if child not in remains.data:
                queue.append((child, target))
            elif child in first:
                os.link(first[child], target)
            else:
                target.write_bytes(remains.data[child])
                first[child], numbers[child] = target, _inode(target)
    for ready in top.rglob("transaction.json"):
        record = json.loads(ready.read_text())
        for move in record["moves"]:
            move["inode"] = numbers.get(move["inode"], -1)
        ready.write_text(json.dumps(record))


def _inode(path: Path) -> int:
    return path.lstat().st_ino
