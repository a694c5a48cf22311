"""What a checkpoint format must provide, and what several formats share: missing files, pointers, random states."""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import ClassVar

from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, FileType, Role, StateFile, is_leftover
from rollback.checkpoint.state import CheckpointState
from rollback.disk.content import pointer_text
from rollback.errors import Finding, Severity, UnreadableFile
from rollback.files.pickle_values import ArrayRef, TensorRef
from rollback.files.torch_tree import TorchFile

RoleAndRank = tuple[Role, int | None]
Roles = Sequence[tuple[str | re.Pattern[str], Role]]

_MOST_DIGITS = 15  # of a step


class CheckpointFormat(ABC):
    """The layout of one writer. A new writer is a subclass in a file of its own, and a line in `FORMATS`."""

    name: ClassVar[str]  # as shown and stored, e.g. "accelerate"
    editable: ClassVar[bool] = True  # whether a rollback moves and edits it; else it is read and named alone
    single_file: ClassVar[bool] = False  # whether its checkpoints are one file each
    by_content: ClassVar[bool] = False  # its names say little: without a known step it is no checkpoint
    steps: ClassVar[str] = ""  # the names of its checkpoints; what the group holds is the optimizer step
    roles: ClassVar[Roles] = ()  # its files, the first pattern that fits; the group `rank` is the rank
    stems: ClassVar[str] = ""  # part of the name of each of its state files

    @abstractmethod
    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Whether this writer made a directory (or file) called `name` with these entries below it."""

    def is_checkpoint_name(self, name: str) -> bool:
        """Whether this writer gives checkpoints such a name."""
        return re.fullmatch(self.steps, name) is not None

    def step_in_name(self, name: str) -> int | None:
        """The optimizer step in the name, None where this writer does not put it there."""
        found = re.fullmatch(self.steps, name)
        number = found[1] if found and found.re.groups else None
        return int(number) if number and len(number) <= _MOST_DIGITS else None

    def role_of(self, path: str) -> RoleAndRank | None:
        """Role and rank of the file at this relative path, None when this writer makes no such file."""
        return role_by(self.roles, path)

    def looks_like_state(self, path: str) -> bool:
        """Whether a loader or a person could take a file of this name, which this writer did not make, for its state."""
        return bool(self.stems) and "/" not in path and is_lookalike(path, self.stems)

    def loader_lists_siblings(self, name: str) -> bool:
        """Whether the writer's own loader, resuming without a path, looks at everything beside `name`."""
        return False

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Files that the present ones call for, by their numbers or as an index (F2); told from the names alone."""
        return []

    def usual(self, files: Sequence[StateFile]) -> list[Finding]:
        """Files of the writer's usual layout that are not there (F2).

        It is an assumption: a script may save by hooks of its own. It only counts where no save told what it wrote.
        """
        return []

    @abstractmethod
    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Read counters, schedulers and optimizers; raises `UnreadableFile` or `Incomplete`."""


class FileFormat(CheckpointFormat):
    """A checkpoint that is one file; its name says little."""

    single_file = by_content = True
    role: ClassVar[Role] = Role.MODEL

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """One file of such a name."""
        one = len(entries) == 1 and entries[0].path == name and entries[0].kind is not FileType.DIRECTORY
        return one and self.is_checkpoint_name(name)

    def role_of(self, path: str) -> RoleAndRank | None:
        """The one file holds everything."""
        return (self.role, None) if self.is_checkpoint_name(path) else None


def role_by(roles: Roles, path: str) -> RoleAndRank | None:
    """Role and rank by the first pattern that fits; random states without a rank are those of rank 0."""
    for pattern, role in roles:
        found = re.fullmatch(pattern, path)
        if found:
            rank = found.groupdict().get("rank")
            if rank is not None:
                return role, int(rank)
            return role, 0 if role is Role.RNG else None
    return None


def is_lookalike(name: str, stems: str) -> bool:
    """Whether `name`, which is no state file, is a leftover or contains the stem of a state file."""
    return is_leftover(name) or re.search(stems, name) is not None


# --- Missing files (F2)

_MAX_NAMED = 32


def missing_file(name: str, what: str, path: str | None = None) -> Finding:
    """A finding that the file `name` is missing and `what` follows; `path` when it differs from the name."""
    return Finding(
        "F2",
        Severity.ERROR,
        path or name,
        f"`{name}` is missing: {what}",
        "go back to a complete checkpoint, or restore the file",
    )


def gaps(present: Set[int], name_of: Callable[[int], str], what: Callable[[int], str], up_to: int) -> Iterator[Finding]:
    """A finding for each missing number from 0 to `up_to`; above _MAX_NAMED of them, one for all others.

    A hostile name may hold any number, so the gaps are not enumerated in memory.
    """
    absent = (n for low, high in _between(present, up_to) for n in range(low, high))
    for _ in range(_MAX_NAMED):
        number = next(absent, None)
        if number is None:
            return
        yield missing_file(name_of(number), what(number))
    others = up_to + 1 - sum(number <= up_to for number in present) - _MAX_NAMED
    if others > 0:
        yield missing_file(name_of(next(absent)), f"the first of {others} more below number {up_to}")


def _between(present: Set[int], up_to: int) -> Iterator[tuple[int, int]]:
    """[low, high) of every gap below and up to `up_to`."""
    low = 0
    for number in sorted(n for n in present if n <= up_to):
        yield low, number
        low = number + 1
    yield low, up_to + 1


# --- Checks of pointer files


def pointer_findings(folder: Path, tag: str | None, where: str, name: str = "latest") -> list[Finding]:
    """F9: `latest` in `folder` names a tag directory that is there; without it DeepSpeed starts from scratch."""
    named, problem = None, ""
    try:
        text = pointer_text(folder / name)
        named = None if text is None else text.strip()
    except UnreadableFile as found:
        problem = found.message
    except OSError:
        pass  # as if it were not there
    if problem:
        message = problem
    elif named is None:
        message = "is missing: `load_checkpoint` without a tag would return nothing and training start from scratch"
    elif not named:
        message = "is empty: a write was lost"
    elif "/" in named or named in (".", "..") or not (folder / named).is_dir():
        message = f"names `{named[:80]}`, which is not a directory beside it"
    elif (folder / named).is_symlink():
        message = f"names `{named}`, a symbolic link: it may lead out of the checkpoints"
    else:
        return []
    return [
        Finding(
            "F9",
            Severity.WARN if tag is not None else Severity.ERROR,
            f"{where}{name}",
            message,
            f"write `{tag}` into it, or let `chronicle rollback` do it" if tag else None,
        )
    ]


# --- Random states

_NO_GENERATOR = {"step"}


def rng_digest(file: TorchFile) -> str:
    """A short digest of all generators' states: numbers, arrays, and the checksums of tensor records.

    Two ranks with equal digests will draw the same numbers. Counters are left out. Two checksums are enough to tell
    ranks apart.
    """
    parts: list[bytes] = []
    checksums = _checksums(file)
    for leaf in file.leaves():
        if leaf.keys and leaf.keys[0] in _NO_GENERATOR:
            continue
        value = leaf.value
        if isinstance(value, TensorRef):
            key = value.storage.key if value.storage else ""
            parts.append(f"{leaf.keys}{value.dtype}{value.shape}{checksums.get(key)}".encode())
        elif isinstance(value, ArrayRef):
            parts.append(f"{leaf.keys}{value.dtype}{value.shape}".encode() + (value.content or b""))
        else:
            parts.append(f"{leaf.keys}{value!r}".encode("utf-8", "backslashreplace"))
    content = b"\0".join(parts)
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}"


def _checksums(file: TorchFile) -> dict[str, int]:
    layouts = [segment.layout for segment in file.segments if segment.layout is not None]
    return {record.name.rpartition("/")[2]: record.crc for layout in layouts for record in layout.records}
