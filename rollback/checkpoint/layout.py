"""The layout of a checkpoint: its files and their roles, stray names, and a stamp that tells two states apart.

Names, kinds and sizes only; no content is read. `rollback.checkpoint.formats` says which names belong to which writer;
`rollback.checkpoint.listing` lists and selects.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rollback.disk import RemoteView
from rollback.errors import CheckpointNotFound, UnreadableFile

MAX_ENTRIES = 200_000

# what scripts call a file of `torch.save`; SlowFast writes .pyth, AllenNLP and Demucs .th
TORCH_ENDINGS = "pt|pth|ckpt|pkl|bin|tar|pyth|th|chkpt|ckp|mdl|state|checkpoint"
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


class FileType(Enum):
    """What a directory entry is, without following symbolic links."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "symbolic link"
    SPECIAL = "special file"


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One name below a checkpoint: its relative posix path, kind and size in bytes (of a link: of its target)."""

    path: str
    kind: FileType
    size_bytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One file of a checkpoint: relative posix path, role, the rank it belongs to (None: to all), size in bytes."""

    path: str
    role: Role
    rank: int | None
    size_bytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The path without its last part."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint as its names tell it.

    `step` counts completed optimizer steps, None when it is not known yet; `step_source` says where it comes from
    ("name", "manifest", "counters", "guard", "number in the name", "scheduler", "unknown"). `strays` are paths relative to
    `path` ("../x" for a sibling that the loader would consider). `abandoned` is the id of the rollback that moved it away;
    `launch` the launch that saved it, where a manifest says so. `written` are the files that its own save wrote, by the
    manifest of that save; None where no save has told. `twins` are the abandoned checkpoints of the same step, in words,
    where the step alone chose this one.
    `trains`: an optimizer or a scheduler was found in it; None where that was not looked at.
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
    written: frozenset[str] | None = None
    twins: tuple[str, ...] = ()
    trains: bool | None = None

    def with_role(self, role: Role) -> tuple[StateFile, ...]:
        """The files of one role, in the order of their paths."""
        return tuple(file for file in self.files if file.role is role)

    @property
    def names(self) -> tuple[str, ...]:
        """What lies in the directory of the checkpoints: its own name, and of a one-file checkpoint its parts beside it."""
        return (self.path.name, *(f.path for f in self.files if self.single_file and f.path != self.path.name))

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def folder(self) -> Path:
        """The directory that relative paths count from: the checkpoint, or the folder of a one-file checkpoint."""
        return self.path.parent if self.single_file else self.path


def scan_entries(path: Path, *, levels: int | None = None) -> tuple[DirectoryEntry, ...]:
    """All entries below a directory, at every level or in the first `levels`, sorted by path, links not followed.

    Raises `UnreadableFile` above MAX_ENTRIES.
    """
    entries: list[DirectoryEntry] = []
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
            if entry.kind is FileType.DIRECTORY and (levels is None or level + 1 < levels):
                todo.append((entry.path + "/", level + 1))
        if len(entries) > MAX_ENTRIES:
            raise UnreadableFile(f"`{path}` holds more than {MAX_ENTRIES} entries: that is not a plausible checkpoint")
    return tuple(sorted(entries, key=lambda entry: entry.path))


def _entry(path: str, child: os.DirEntry[str]) -> DirectoryEntry:
    try:
        if child.is_symlink():
            return DirectoryEntry(path, FileType.LINK, _target_size(child))
        status = child.stat(follow_symlinks=False)
    except FileNotFoundError:
        return DirectoryEntry(path, FileType.SPECIAL, 0)  # it was removed meanwhile
    except OSError as problem:  # skipping it would drop a checkpoint from the list
        raise UnreadableFile(f"`{child.path}` cannot be read: {problem.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        return DirectoryEntry(path, FileType.DIRECTORY, 0)
    return DirectoryEntry(path, FileType.FILE if stat.S_ISREG(status.st_mode) else FileType.SPECIAL, status.st_size)


def _target_size(child: os.DirEntry[str]) -> int:
    try:
        return child.stat(follow_symlinks=True).st_size
    except OSError:
        return 0


# --- Stray names

_LEFTOVERS = re.compile(
    r"""
      \.DS_Store | \.nfs[0-9a-fA-F]+ | Thumbs\.db | desktop\.ini | \._.+          # desktops, NFS
    | .+~ | \.\#.+ | \#.+\# | \.?.+\.sw[a-px]                                     # editors
    | .+[._-](?:orig|bak|backup|old|save|saved|copy|keep|tmp|temp|part|partial|new|broken|bad)[._-]?\d*
    | .+[ ]\(copy\)(?:.*) | .+[ ]copy(?:[ ]\d+)?(?:\..*)? | .+[ ]-[ ][Cc]opy.* | [Cc]opy[ ]of[ ].+ | .+[ ]\(\d+\).*
    | (?:tmp|temp|backup|old|orig)(?:[._-].*)?
    """,
    re.VERBOSE,
)


def is_leftover(name: str) -> bool:
    """Whether it is the name of a leftover: a backup, a swap file, a copy."""
    return _LEFTOVERS.fullmatch(name) is not None


# --- Files of one save, side by side

_SAVED = re.compile(rf"(.+)\.(?:{TORCH_ENDINGS}|model|npz|safetensors|json)")
RANKED = re.compile(r"(?i)(?<![a-z])(?:rank|shard|part|world|proc|process|gpu|node|[dtpe]p)[-_=]?\d+|\d+[-_]of[-_]\d+")


def parts_beside(name: str, others: Iterable[str]) -> tuple[str, ...]:
    """Those of `others` that carry the last number of `name` after other letters: `model_20.pt` for `optim_20.pt`.

    Names whose letters are the same are a series (`a_10.pt`, `a_20.pt`; days) and no parts of one save, unless they differ
    in their rank alone.
    """
    own = _letters_and_number(name)
    if own is None:
        return ()
    found = {other: _letters_and_number(other) for other in others if other != name and not is_leftover(other)}
    same = [other for other, seen in found.items() if seen and seen[1] == own[1]]
    ranks = {other for other in same if RANKED.search(name) and RANKED.search(other)}
    return tuple(sorted(other for other in same if other in ranks or found[other] != own))


def saved_number(name: str) -> int | None:
    """The last number in the name of a saved file, ranks and shards left out: 20 of `model_20.pt`; None without one."""
    found = _letters_and_number(name)
    return int(found[1]) if found else None


_COUNTED = re.compile(r"(?i)(?:steps?|iter|iters|iterations?|updates?)[-_=.]?(\d{1,15})(?!\d)")


_DATE = re.compile(r"(?<!\d)20\d\d([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])"
                   r"(?:[T_ -]*(?:[01]\d|2[0-3])([-_:.]?)[0-5]\d(?:\2[0-5]\d)?)?(?!\d)")  # fmt: skip


def number_in_name(name: str) -> int | None:
    """The step that a name may mean: the number after a word for steps, else the last one; dates, ranks and shards left out."""
    counted = _COUNTED.findall(name)
    numbers = counted or [number for number in saved_numbers(_DATE.sub("", name)) if len(number) <= 15]
    return int(numbers[-1]) if numbers else None


def saved_numbers(name: str) -> tuple[str, ...]:
    """The numbers in a name, ranks, shards and the ending left out."""
    stem = _SAVED.fullmatch(name)
    return tuple(re.findall(r"\d+", RANKED.sub("", stem[1] if stem else name)))


def _letters_and_number(name: str) -> tuple[str, str] | None:
    stem = _SAVED.fullmatch(name)
    plain = RANKED.sub("", stem[1]) if stem else ""
    numbers = re.findall(r"\d+", plain)
    return (re.sub(r"\d+", "", plain), numbers[-1]) if numbers else None


# --- Stamp of a checkpoint


def stamp_of(path: Path) -> str:
    """A digest of names, sizes, modification times and inodes (in a store: ETags) of the checkpoint at `path`.

    No content is read. It changes when a file is changed or copied and stays when the checkpoint is moved on its filesystem.
    Raises `RollbackError` or `OSError` when the checkpoint does not exist.
    """
    import hashlib  # imported here: it takes 5 ms that most readers do not need

    if path.name == ACCELERATE_STATE_DIR:
        path = path.parent  # both name the same checkpoint
    if path.is_dir():
        files = {entry.path: path / entry.path for entry in scan_entries(path)}
    else:
        beside = [entry.name for entry in scan_entries(path.parent, levels=1) if entry.kind is FileType.FILE]
        files = {"": path} | {f"../{name}": path.parent / name for name in parts_beside(path.name, beside)}
    digest = hashlib.sha256()
    for name, file in files.items():
        found = os.lstat(file)
        mark = RemoteView.opened.mark(file) if RemoteView.opened is not None else None
        kept = (found.st_mtime_ns, found.st_ino) if mark is None else mark
        values = (found.st_size, *kept) if not os.path.isdir(file) else ()
        digest.update(repr((name, *values)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]
