"""What a checkpoint format must provide, and what several formats share: missing files, pointers, random states."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import ClassVar

from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile
from rollback.checkpoint.state import CheckpointState
from rollback.disk.content import pointer_text
from rollback.errors import Finding, Severity, UnreadableFile
from rollback.files.pickle_values import ArrayRef, TensorRef
from rollback.files.torch_tree import TorchFile

RoleAndRank = tuple[Role, int | None]


class CheckpointFormat(ABC):
    """The layout of one writer. A new writer is a subclass in a file of its own, and a line in `FORMATS`."""

    name: ClassVar[str]  # as shown and stored, e.g. "accelerate"
    editable: ClassVar[bool] = True  # whether a rollback moves and edits it; else it is read and named alone
    single_file: ClassVar[bool] = False  # whether its checkpoints are one file each
    by_content: ClassVar[bool] = False  # its names say little: without a known step it is no checkpoint

    @abstractmethod
    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Whether this writer made a directory (or file) called `name` with these entries below it."""

    @abstractmethod
    def step_in_name(self, name: str) -> int | None:
        """The optimizer step in the name, None where this writer does not put it there."""

    @abstractmethod
    def role_of(self, path: str) -> RoleAndRank | None:
        """Role and rank of the file at this relative path, None when this writer makes no such file."""

    def looks_like_state(self, path: str) -> bool:
        """Whether a loader or a person could take a file of this name, which this writer did not make, for its state."""
        return False

    def loader_lists_siblings(self, name: str) -> bool:
        """Whether the writer's own loader, resuming without a path, looks at everything beside `name`."""
        return False

    @abstractmethod
    def is_checkpoint_name(self, name: str) -> bool:
        """Whether this writer gives checkpoints such a name."""

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


# --- Missing files (F2)

_MAX_NAMED = 32


def missing_file(name: str, what: str, path: str | None = None) -> Finding:
    """A finding that the file `name` is missing and `what` follows; `path` when it differs from the name."""
    return Finding(
        check="F2",
        severity=Severity.ERROR,
        path=path or name,
        message=f"`{name}` is missing: {what}",
        remedy="go back to a complete checkpoint, or restore the file",
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
            check="F9",
            severity=Severity.WARN if tag is not None else Severity.ERROR,
            path=f"{where}{name}",
            message=message,
            remedy=f"write `{tag}` into it, or let `chronicle rollback` do it" if tag else None,
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
