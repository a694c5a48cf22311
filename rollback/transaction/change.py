"""The values of a transaction (what changes, what is prepared, what was done), and the in-place patch of large files.

A large file (32 MiB) on a filesystem without reflinks is patched in place instead of copied, and a config outside the root
changes together with its checkpoint. The checkpoint alone is out of sight meanwhile, never the root:

    checkpoint -> workspace/parked    the other checkpoints stay where they are
    patch, config                     the old bytes are in `transaction.json` and in the object store; repeating is safe
    workspace/parked -> checkpoint    then the other moves
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollback.disk.durable import Attributes, BytePatch, Disk
from rollback.errors import StoppedPartWay, UnreadableFile
from rollback.records import record_of
from rollback.transaction.moves import Move, run_moves
from rollback.transaction.staging import Writer, inside

READY = "transaction.json"
VERSION = 3
RECEIPT_VERSION = 1  # of the data of a receipt, which undo reads; a receipt without `v` has version 1
ABANDONED = "abandoned"
Record = Callable[[str, dict[str, Any]], str]  # (kind, data) -> id of the entry; the entry is durable when it returns


class Verb(StrEnum):
    """What a transaction does. The kinds of its journal entries follow from it."""

    ROLLBACK = "rollback"
    UNDO = "undo"
    RECOVER = "recover"

    @property
    def intent(self) -> str:
        """Kind of the entry that says that the transaction begins."""
        return f"{self}.intent"

    @property
    def receipt(self) -> str:
        """Kind of the entry that says that the transaction is over."""
        return f"{self}.receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFile:
    """A very large file of which a few bytes change in place; `path` is relative to the checkpoint."""

    path: str
    patches: tuple[BytePatch, ...]
    attributes: Attributes  # of the original

    def backwards(self) -> PatchedFile:
        """The patch that undoes this one."""
        return replace(self, patches=tuple(BytePatch(p.offset, old=p.new, new=p.old) for p in self.patches))

    def to_json(self) -> dict[str, Any]:
        """The form stored in receipts and in `transaction.json`; bytes are written as hex."""
        return record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PatchedFile:
        """The inverse of `to_json`."""
        return cls(
            path=record["path"],
            patches=tuple(map(BytePatch.from_json, record["patches"])),
            attributes=Attributes.from_json(record["attributes"]),
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """The new content of a name in the root: a copy of `source`, a file or a directory, with what `writers` write in it."""

    source: Path
    writers: Mapping[str, Writer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a transaction changes. Names are relative to `root`, the directory that loaders list."""

    root: Path
    entry: str  # the checkpoint's name in `root`
    source: Path  # where it is now: `root / entry`, or the place of an abandoned checkpoint that is brought back
    writers: Mapping[str, Writer] = field(default_factory=dict)  # path in the checkpoint -> new content
    patches: Mapping[str, tuple[BytePatch, ...]] = field(default_factory=dict)  # path in the checkpoint -> bytes in place
    abandon: tuple[str, ...] = ()  # names in `root`, earliest step first
    pointers: Mapping[str, bytes] = field(default_factory=dict)  # path in `root` -> new content
    links: Mapping[str, str] = field(default_factory=dict)  # symbolic link in `root` -> its new target
    copies: Mapping[str, Copy] = field(default_factory=dict)  # further name in `root` -> its content
    configs: Mapping[Path, bytes] = field(default_factory=dict)  # file outside `root` that changes too -> new content
    contract: tuple[Path, Callable[[str], bytes]] | None = None  # its path, and its content for a rollback id
    facts: Mapping[str, Any] = field(default_factory=dict)  # copied into intent and receipt

    @property
    def place(self) -> Path:
        """Where the checkpoint is after the transaction."""
        return self.root / self.entry

    @property
    def parent(self) -> Path:
        """The directory that holds `root`; workspace and abandoned checkpoints are in it."""
        return self.root.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was done, with all that `undo` needs; `id` is the journal entry that holds it.

    `left_over` names what could not be removed afterwards. It is outside the directories that loaders list.
    """

    id: str
    data: Mapping[str, Any]
    left_over: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The content of `transaction.json`. Once that file exists, the transaction is finished, never reverted."""

    intent: str
    receipt_kind: str
    moves: tuple[Move, ...]
    patched: tuple[PatchedFile, ...]
    place: str  # path of the checkpoint in the root
    final: str  # its path after the transaction: `place`, or again among the abandoned ones
    twin: str  # where its hard-linked copy is built
    checks: Mapping[str, str]  # absolute path -> sha256 that must be read back
    attributes: tuple[tuple[str, Attributes], ...]  # to set when the moves are made
    final_attributes: tuple[tuple[str, Attributes], ...]  # to set when the workspace is gone
    remove: tuple[str, ...]  # leftovers outside the workspace: files, or directories if empty
    receipt: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The content of `transaction.json`."""
        return {"v": VERSION} | record_of(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Prepared:
        """The inverse of `to_json`; raises `UnreadableFile` for another version."""
        if record.get("v") != VERSION:
            raise UnreadableFile(f"{READY} has version {record.get('v')!r}: this program reads {VERSION}")
        return cls(
            intent=record["intent"],
            receipt_kind=record["receipt_kind"],
            moves=tuple(Move.from_json(move) for move in record["moves"]),
            patched=tuple(PatchedFile.from_json(file) for file in record["patched"]),
            place=record["place"],
            final=record["final"],
            twin=record["twin"],
            checks=record["checks"],
            attributes=tuple((path, Attributes.from_json(values)) for path, values in record["attributes"]),
            final_attributes=tuple((path, Attributes.from_json(values)) for path, values in record["final_attributes"]),
            remove=tuple(record["remove"]),
            receipt=record["receipt"],
        )


def workspace_of(parent: Path, intent: str) -> Path:
    """Directory in which a transaction prepares: beside the checkpoints root, where no loader looks."""
    return parent / f".chronicle-{intent}"


def originals_of(data: Mapping[str, Any]) -> Iterable[str]:
    """Digests of the objects that the undo of this receipt needs."""
    yield from (file["before"] for file in data["files"])
    yield from (pointer["before"] for pointer in data["pointers"] if pointer["before"] is not None)
    yield from (config["before"] for config in data.get("configs") or ())
    if data.get("contract") and data["contract"]["before"] is not None:
        yield data["contract"]["before"]


def contract_part(path: Path, intent: str) -> Path:
    """Temporary file of the new contract, beside the one it replaces."""
    return path.with_name(f".contract-{intent}.json")


def config_part(path: Path, intent: str) -> Path:
    """Temporary file with the new content of a config, beside the one it replaces."""
    return path.with_name(f".{path.name}.chronicle-{intent}")


# --- Transactions that patch large files in place


def run_steps(disk: Disk, prepared: Prepared, workspace: Path) -> None:
    """Make all steps in their order. Continues wherever an earlier attempt stopped.

    Patches come right after the move that takes their checkpoint out of sight.
    """
    if prepared.patched and not patched_at(Path(prepared.final), prepared):
        hidden = parked_at(workspace, Path(prepared.place).name)
        targets = [move.target for move in prepared.moves]
        run_moves(disk, prepared.moves[: targets.index(hidden) + 1] if hidden in targets else ())
        for file in prepared.patched:
            _patch(disk, _find(file, hidden, Path(prepared.twin), Path(prepared.final)), file)
    run_moves(disk, prepared.moves)


def parked_at(workspace: Path, name: str) -> Path:
    """Where a checkpoint lies while it is out of sight."""
    return workspace / "parked" / name


def patched_at(checkpoint: Path, prepared: Prepared) -> bool:
    """Whether every patched file of the checkpoint at this path has its new bytes."""
    return all(is_patched(inside(checkpoint, file.path), file) for file in prepared.patched)


def is_patched(path: Path, file: PatchedFile) -> bool:
    """Whether the file has all of its new bytes."""
    return path.is_file() and all(
        found == patch.new for found, patch in zip(_read(path, file), file.patches, strict=True)
    )


def _patch(disk: Disk, path: Path, file: PatchedFile) -> None:
    for found, patch in zip(_read(path, file), file.patches, strict=True):
        if any(byte not in pair for byte, *pair in zip(found, patch.old, patch.new, strict=True)):
            raise StoppedPartWay(
                f"`{path}` holds unexpected bytes at offset {patch.offset}: neither the old ones nor the new ones",
                remedy="another program wrote to it; restore it from a copy, then run `chronicle recover`",
            )
    disk.overwrite(path, [(patch.offset, patch.new) for patch in file.patches])


def _read(path: Path, file: PatchedFile) -> Sequence[bytes]:
    with path.open("rb") as stream:
        descriptor = stream.fileno()
        return [os.pread(descriptor, len(patch.old), patch.offset) for patch in file.patches]


def _find(file: PatchedFile, *bases: Path) -> Path:
    """The path of the file at this point of the moves; in the twin it is a hard link to the same inode."""
    for base in bases:
        path = inside(base, file.path)
        if path.is_file():
            return path
    raise StoppedPartWay(f"`{file.path or bases[0]}` is gone", remedy="put it back, then run `chronicle recover`")
