"""What of a checkpoint was read: every file is read as state, known as none by its content, or named as not read, with why.

A format reads what its writer keeps where. This module looks at everything else: at files that no format read, at state dicts
that lie elsewhere in a tree, at whatever depth and under whatever key, and at bytes in which something is saved once more.
Nothing here trusts a name or an ending. What was not read and holds an LR, or moments of an optimizer, is `doubtful`.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rollback.checkpoint.layout import Checkpoint, Role
from rollback.checkpoint.state import CheckpointState, Found, OptimizerState, Prefix, SchedulerState, walk_states
from rollback.disk import pread
from rollback.errors import RollbackError
from rollback.files.safetensors_file import check_safetensors
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import LEGACY_MAGIC, open_state_file


class Reading(StrEnum):
    """How far a file was read."""

    STATE = "read as state"
    NONE = "no state"
    UNREAD = "not read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounted:
    """One file, or a part of one (`keys`): its relative path, its bytes, and `why` it is none or was not read.

    `doubtful`: it holds what decides an LR, or cannot be told from that.
    """

    path: str
    size_bytes: int
    reading: Reading
    why: str = ""
    keys: Prefix = ()
    doubtful: bool = False

    def to_json(self) -> dict[str, object]:
        """The form that `chronicle inspect --json` prints."""
        return {"path": self.path, "keys": [str(key) for key in self.keys], "size_bytes": self.size_bytes,
                "reading": str(self.reading), "why": self.why}  # fmt: skip

    def sentence(self) -> str:
        """What was not read, where and why."""
        place = ".".join(map(str, self.keys))
        return f"not read: `{self.path}{':' + place if place else ''}`, {self.why}"


def account_for(checkpoint: Checkpoint, state: CheckpointState) -> tuple[Accounted, ...]:
    """Every file of the checkpoint, and each part of one that was not read; in the order of their paths."""
    if state.unread:
        return tuple(
            Accounted(path=file.path, size_bytes=file.size_bytes, reading=Reading.UNREAD, why=f"{state.unread} not read")
            for file in checkpoint.files
            if file.role is not Role.MANIFEST
        )
    known = _known_places(state)
    own_rank = min((file.rank for file in checkpoint.files if file.rank is not None), default=None)
    found: list[Accounted] = []
    for file in checkpoint.files:
        row = Accounted(path=file.path, size_bytes=file.size_bytes, reading=Reading.STATE)
        if file.role is Role.MANIFEST:
            row = replace(row, reading=Reading.NONE, why="the inventory")
        elif file.rank in (None, own_rank):  # the other ranks hold the same parts in files of the same form
            rows = list(_of_file(checkpoint.folder / file.path, row, known.get(file.path, set())))
            found += rows[1:]
            row = rows[0]
        found.append(row)
    return tuple(sorted(found, key=lambda one: (one.path, one.keys != (), str(one.keys))))


def with_account(checkpoint: Checkpoint, state: CheckpointState) -> CheckpointState:
    """The state with its account; what is doubtful in it is named."""
    account = account_for(checkpoint, state)
    doubtful = [one.sentence() for one in account if one.doubtful]
    assumed = [one.sentence() for one in account if one.reading is Reading.UNREAD and not one.doubtful]
    more = [f"{assumed[0]} (and {len(assumed) - 1} more)"] if len(assumed) > 1 else assumed
    return replace(
        state, account=account, doubtful=(*state.doubtful, *doubtful), assumed=(*state.assumed, *more)
    )


def _known_places(state: CheckpointState) -> dict[str, set[Prefix]]:
    """The key paths that a format has read, by file."""
    known: dict[str, set[Prefix]] = {}
    held: list[OptimizerState | SchedulerState] = [*state.optimizers, *state.schedulers]
    for one in held:
        known.setdefault(one.file, set()).add(one.prefix)
        known.setdefault(state.file_holding(one.file, one.prefix), set()).add(one.prefix)
    for hint in state.lr_hints:
        known.setdefault(hint.file, set()).add(hint.keys)
    for (file, keys), part in state.located.items():
        known.setdefault(part, set()).add(())  # it is named by its index, which was read
        known.setdefault(file, set()).add(keys)
    return known


def _of_file(path: Path, row: Accounted, known: set[Prefix]) -> Iterator[Accounted]:
    """The file itself first, then the parts of it that were not read."""
    if path.suffix == ".distcp" and (path.parent / ".metadata").is_file():
        yield row  # its entries are read by the index beside it
        return
    head = b""
    try:
        with open_state_file(path) as (fd, size_bytes):
            head = pread(fd, min(size_bytes, _HEAD_BYTES), 0)
        known_as = _known_content(path, head)
        if known_as is not None:
            yield replace(row, reading=Reading.NONE, why=known_as)
            return
        tree = read_state_file(path).tree
    except (RollbackError, OSError, ValueError, EOFError) as problem:
        said = problem.message if isinstance(problem, RollbackError) else str(problem)
        yield replace(row, reading=Reading.UNREAD, why=said.replace(f"`{path}`: ", ""), doubtful=_is_saved(head))
        return
    walk = walk_states(tree)
    states = [one for one in walk.found if one.kind != "bytes"]
    is_read = bool(known or states)
    yield row if is_read else replace(row, reading=Reading.NONE, why="no optimizer and no schedule in it")
    for one in walk.found:
        if not any(one.keys[: len(place)] == place or place[: len(one.keys)] == one.keys for place in known):
            yield from _part(row, one)
    if walk.is_cut:
        yield replace(row, reading=Reading.UNREAD, keys=("…",), why="more values than are looked through", doubtful=True)


def _part(row: Accounted, one: Found) -> Iterator[Accounted]:
    if one.kind != "bytes":
        why = f"{_NAMES[one.kind]} at a place that is not edited"
        yield replace(row, reading=Reading.UNREAD, keys=one.keys, why=why, doubtful=True)
        return
    content = one.value
    assert isinstance(content, bytes)
    if not _is_saved(content):
        return  # text, a hash, a random state: nothing that a loader opens
    yield replace(row, reading=Reading.UNREAD, keys=one.keys, size_bytes=len(content), why="state saved as bytes in it",
                  doubtful=True)  # fmt: skip


_NAMES = {"optimizer": "an optimizer", "scheduler": "a scheduler", "moments": "moments of an optimizer without its groups"}

# --- Content that is no state, by its first bytes

_HEAD_BYTES = 4096
_PICTURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"RIFF")
_PACKED = ((b"\x1f\x8b", 31), (b"\x78\x9c", 15))  # gzip, zlib: window bits of `zlib.decompressobj`


def _known_content(path: Path, head: bytes) -> str | None:
    """What the file is, when it is no state; None when it has to be read as state."""
    if not head:
        return "empty"
    if head[8:10] == b'{"' and b"\0" in head[:8]:
        check_safetensors(path)
        return "tensors alone (safetensors)"
    if head.startswith(b"\x93NUMPY") and b"'|O'" not in head[:256]:
        return "one array (NumPy)"
    if head.startswith(_PICTURES):
        return "a picture or sound"
    if b"brain.Event:" in head[:64]:
        return "a log (TensorBoard)"
    if head[:1] == b"\n" and b"<unk>" in head:
        return "a vocabulary (SentencePiece)"
    if head[:1] in (b"{", b"[") or _is_saved(head):
        return None
    return "text" if _is_text(head) else None


def may_be_state(path: Path) -> bool:
    """Whether a file holds anything but text, a log, a picture or a vocabulary."""
    try:
        with open_state_file(path) as (fd, size_bytes):
            head = pread(fd, min(size_bytes, _HEAD_BYTES), 0)
        return head[:1] not in (b"{", b"[") and _known_content(path, head) is None
    except RollbackError:
        return True


def is_saved_file(path: Path) -> bool:
    """Whether a file begins as torch or pickle write it, whatever it is called."""
    try:
        with open_state_file(path) as (fd, size_bytes):
            head = pread(fd, min(size_bytes, _HEAD_BYTES), 0)
    except RollbackError:
        return False
    if head.startswith(b"PK\x03\x04"):
        name_bytes = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + name_bytes].endswith(b"/data.pkl")  # of all its records torch writes this one first
    return head.startswith(LEGACY_MAGIC) or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05")


def _is_text(head: bytes) -> bool:
    try:
        text = head[: len(head) - 4 if len(head) == _HEAD_BYTES else None].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not any(ord(char) < 32 and char not in "\t\n\r\f\x1b" for char in text)


def _is_saved(head: bytes) -> bool:
    """Whether bytes begin as something that a loader opens: a torch file, a pickle, an archive, or one of these packed."""
    if head.startswith((b"PK\x03\x04", LEGACY_MAGIC)) or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        return len(head) > 2
    unpacked = _unpacked(head)
    return bool(unpacked) and _is_saved(unpacked or b"")


def _unpacked(head: bytes) -> bytes | None:
    """The first bytes of what is packed; None where nothing is."""
    if head.startswith(b"BZh"):
        return bz2.BZ2Decompressor().decompress(head)
    if head.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(head, 64)
    bits = next((bits for magic, bits in _PACKED if head.startswith(magic)), None)
    if bits is None:
        return None
    try:
        return zlib.decompressobj(bits).decompress(head, 64)
    except zlib.error:
        return None
