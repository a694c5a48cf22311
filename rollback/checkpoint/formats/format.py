"""What a checkpoint format must provide, and what several formats share: missing files, pointers, random states."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Protocol

from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile
from rollback.checkpoint.state import CheckpointState
from rollback.disk.reading import read_bounded
from rollback.errors import UnreadableFile
from rollback.files.pickle_values import ArrayRef, TensorRef
from rollback.files.torch_tree import TorchFile
from rollback.findings import Finding, Severity

RoleAndRank = tuple[Role, int | None]


class CheckpointFormat(Protocol):
    """One writer's layout."""

    @property
    def name(self) -> str:
        """The format's name as shown and stored, e.g. "accelerate"."""

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Whether a directory (or file) called `name` with these entries below it is of this writer."""

    def step_in_name(self, name: str) -> int | None:
        """The optimizer step that the writer puts into the name, or None where it does not."""

    def role_of(self, path: str) -> RoleAndRank | None:
        """Role and rank of a file with this exact relative path, None when the writer makes no such file."""

    def looks_like_state(self, path: str) -> bool:
        """Whether a name that is not this writer's could be taken for its state by a loader or by a person."""

    def loader_lists_siblings(self, name: str) -> bool:
        """Whether the writer's own loader, resuming without a path, looks at everything beside `name`."""

    def is_checkpoint_name(self, name: str) -> bool:
        """Whether a sibling's name is exactly one that this writer gives to checkpoints."""

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """What the names alone show to be incomplete (F2)."""

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Read counters, schedulers and optimizers; raises UnreadableFile or Incomplete."""


# --- Missing files (F2)

MAX_NAMED = 32


def missing_file(name: str, what: str, path: str | None = None) -> Finding:
    """The file `name` is missing; `path` where it is not the same, `what` says what follows from it."""
    return Finding(
        check="F2",
        severity=Severity.ERROR,
        path=path or name,
        message=f"`{name}` is missing: {what}",
        remedy="go back to a complete checkpoint, or restore the file",
    )


def gaps(present: Set[int], name_of: Callable[[int], str], what: Callable[[int], str], up_to: int) -> Iterator[Finding]:
    """A finding for each of the numbers 0 … `up_to` that is not there; beyond MAX_NAMED of them one for all others.

    A file may be called after any number: the gaps are counted, never filled.
    """
    absent = (n for low, high in _between(present, up_to) for n in range(low, high))
    for _ in range(MAX_NAMED):
        number = next(absent, None)
        if number is None:
            return
        yield missing_file(name_of(number), what(number))
    others = up_to + 1 - sum(number <= up_to for number in present) - MAX_NAMED
    if others > 0:
        yield missing_file(name_of(next(absent)), f"the first of {others} more below number {up_to}")


def _between(present: Set[int], up_to: int) -> Iterator[tuple[int, int]]:
    """[low, high) of every gap below and up to `up_to`."""
    low = 0
    for number in sorted(n for n in present if n <= up_to):
        yield low, number
        low = number + 1
    yield low, up_to + 1


# --- Pointer files

MAX_POINTER_BYTES = 4096  # a name in a directory has at most 255
REMEDY = "write the name of a checkpoint into it, or remove it"


def read_pointer(path: Path) -> str | None:
    """What a pointer file or a symbolic link says, None when there is none; UnreadableFile when it is no such thing."""
    return os.readlink(path) if path.is_symlink() else pointer_text(path)


def pointer_text(path: Path) -> str | None:
    """What stands in the file; as `read_pointer`, but a link is followed."""
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableFile(f"pointer `{path}` is no text", REMEDY) from None
    if not text.strip().isprintable():
        raise UnreadableFile(f"pointer `{path}` has characters that no name has", REMEDY)
    return text


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
        message = f"names `{named[:80]}`, which is no directory beside it"
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
    """A short digest of every generator's state: numbers, arrays, and the checksums of tensor records.

    Two ranks with equal digests will draw the same numbers. Counters that are no random state are left out. Two CRCs
    rather than a cryptographic hash: ranks are told apart here, not attackers.
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
