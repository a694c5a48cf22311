"""What a checkpoint consists of, as values: roles of files, the files, the checkpoint; and its names on disk.

Only names, kinds and sizes are looked at here, never a byte of content. Which names belong to which writer is said
in `rollback.checkpoint.formats`; `rollback.checkpoint.listing` lists and selects.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rollback.errors import CheckpointNotFound, UnreadableFile

MAX_ENTRIES = 200_000
MAX_LEVELS = 6

ACCELERATE_STATE_DIR = "accelerator_state"  # the folder inside `opt_step-<N>` that `Accelerator.save_state` wrote to


class Role(Enum):
    """What a file of a checkpoint is for."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    RNG = "rng"
    CUSTOM = "custom"
    COUNTERS = "counters"
    DATA = "data"
    POINTER = "pointer"
    MANIFEST = "manifest"
    OTHER = "other"


class EntryKind(Enum):
    """What a directory entry is, without following symbolic links."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "symbolic link"
    SPECIAL = "special file"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name below a checkpoint: its relative posix path, kind and size in bytes (of a link: of its target)."""

    path: str
    kind: EntryKind
    size_bytes: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One file of a checkpoint: relative posix path, role, the rank it belongs to (None: to all), size in bytes."""

    path: str
    role: Role
    rank: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint as its names tell it.

    `step` counts completed optimizer steps, None when it is not known yet; `step_source` says where it comes from
    ("name", "manifest", "counters", "unknown"). `strays` are paths relative to `path` ("../x" for a sibling that the
    loader would consider). `abandoned` is the id of the rollback that moved it away; `launch` the launch that saved
    it, where a manifest says so.
    """

    path: Path
    step: int | None
    step_source: str
    format: str
    files: tuple[StateFile, ...]
    strays: tuple[str, ...] = ()
    abandoned: str | None = None
    launch: int | None = None
    single_file: bool = False

    def with_role(self, role: Role) -> tuple[StateFile, ...]:
        """The files of one role, in the order of their paths."""
        return tuple(file for file in self.files if file.role is role)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def folder(self) -> Path:
        """The directory that relative paths count from: the checkpoint, or the folder of a one-file checkpoint."""
        return self.path.parent if self.single_file else self.path


def scan_entries(path: Path, *, levels: int = MAX_LEVELS) -> tuple[Entry, ...]:
    """Everything below a directory, sorted by path, links not followed; raises when there is too much to be one."""
    entries: list[Entry] = []
    todo: list[tuple[str, int]] = [("", 0)]
    while todo:
        prefix, level = todo.pop()
        try:
            children = sorted(os.scandir(path / prefix), key=lambda child: child.name)
        except FileNotFoundError:
            raise CheckpointNotFound(f"`{path / prefix}` does not exist") from None
        except OSError as problem:
            raise UnreadableFile(f"`{path / prefix}` cannot be listed: {problem.strerror}") from None
        for child in children:
            entry = _entry(prefix + child.name, child)
            entries.append(entry)
            if entry.kind is EntryKind.DIRECTORY and level + 1 < levels:
                todo.append((entry.path + "/", level + 1))
        if len(entries) > MAX_ENTRIES:
            raise UnreadableFile(f"`{path}` holds more than {MAX_ENTRIES} entries: it is no checkpoint")
    return tuple(sorted(entries, key=lambda entry: entry.path))


def _entry(path: str, child: os.DirEntry[str]) -> Entry:
    try:
        if child.is_symlink():
            return Entry(path, EntryKind.LINK, _target_size(child))
        status = child.stat(follow_symlinks=False)
    except FileNotFoundError:
        return Entry(path, EntryKind.SPECIAL, 0)  # it vanished while we looked
    except OSError as problem:  # taken for nothing, a checkpoint would be missing from the list
        raise UnreadableFile(f"`{child.path}` cannot be looked at: {problem.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, EntryKind.DIRECTORY, 0)
    return Entry(path, EntryKind.FILE if stat.S_ISREG(status.st_mode) else EntryKind.SPECIAL, status.st_size)


def _target_size(child: os.DirEntry[str]) -> int:
    try:
        return child.stat(follow_symlinks=True).st_size
    except OSError:
        return 0
