"""The values of a transaction (what changes, what is prepared, what was done), and the in-place patch of large files.

A large file (32 MiB) on a filesystem without reflinks is patched in place instead of copied. This happens while the whole
checkpoints root is renamed, as does a transaction on a filesystem that cannot exchange two names:

    root -> root.chronicle-<id>     a loader finds no checkpoints at all and reports it
    patch                           the old bytes are in `transaction.json` and in the object store; repeating is safe
    moves                           as in every transaction, inside the renamed root
    root.chronicle-<id> -> root
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollback.disk.durable import Attributes, BytePatch, Disk, is_there
from rollback.errors import StoppedPartWay, UnreadableFile
from rollback.records import record_of
from rollback.transaction.moves import Move, run_moves
from rollback.transaction.staging import Writer, inside

READY = "transaction.json"
VERSION = 2
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
    hides_root: bool  # the root is renamed until all is done: to patch, to park, or as a file outside it changes too
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
            hides_root=record["hides_root"],
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


def hidden_root(root: Path, intent: str) -> Path:
    """The root's path while it is renamed."""
    return root.with_name(f"{root.name}.chronicle-{intent}")


def run_out_of_sight(disk: Disk, prepared: Prepared) -> None:
    """Rename the root, patch, move, rename it back. Continues wherever an earlier attempt stopped."""
    place = Path(prepared.place)
    root, hidden = place.parent, hidden_root(place.parent, prepared.intent)
    if not is_there(hidden):
        if is_finished(prepared):
            return
        disk.move(root, hidden)
        disk.sync_directory(root.parent)
    for file in prepared.patched:
        _patch(disk, _find(file, hidden / place.name, Path(prepared.twin), Path(prepared.final)), file)
    run_moves(disk, [_inside(move, root, hidden) for move in prepared.moves])
    disk.move(hidden, root)
    disk.sync_directory(root.parent)


def is_finished(prepared: Prepared) -> bool:
    """Whether every move is made and every patch is written. The root must have its own name."""
    return all(move.is_done() for move in prepared.moves) and patched_at(Path(prepared.final), prepared)


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


def _inside(move: Move, root: Path, hidden: Path) -> Move:
    return replace(move, source=_mapped(move.source, root, hidden), target=_mapped(move.target, root, hidden))


def _mapped(path: Path, root: Path, hidden: Path) -> Path:
    return hidden / path.relative_to(root) if path.is_relative_to(root) else path
