"""What of a checkpoint was read: every file is read as state, known as none by its content, or named as not read, with why.

A format reads what its writer keeps where. This module looks at everything else: at files that no format read, at state dicts
that lie elsewhere in a tree, at whatever depth and under whatever key, and at bytes in which something is saved once more.
Nothing here trusts a name or an ending. What was not read and holds an LR, or moments of an optimizer, is `doubtful`.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from rollback.checkpoint.layout import Checkpoint, Role
from rollback.checkpoint.state import (
    MOMENTS,
    CheckpointState,
    Found,
    OptimizerState,
    Prefix,
    SchedulerState,
    walk_states,
)
from rollback.checkpoint.state_digest import place_of_elements
from rollback.disk import pread
from rollback.errors import RollbackError
from rollback.files.pickle_values import ArrayRef, TensorRef
from rollback.files.safetensors_file import check_safetensors, list_tensors, read_metadata
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import LEGACY_MAGIC, open_state_file
from rollback.files.torch_tree import Container, TorchFile
from rollback.files.torch_zip import CHUNK_BYTES


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
        head = read_head(path)
        known_as = _known_content(path, head)
        if known_as is not None:
            yield replace(row, reading=Reading.NONE, why=known_as)
            return
        file = read_state_file(path)
    except (RollbackError, OSError, ValueError, EOFError) as problem:
        said = problem.message if isinstance(problem, RollbackError) else str(problem)
        yield replace(row, reading=Reading.UNREAD, why=said.replace(f"`{path}`: ", ""), doubtful=_is_doubtful(head))
        return
    walk = walk_states(file.tree)
    states = [one for one in walk.found if one.kind != "bytes"]
    is_read = bool(known or states)
    if not is_read and _has_long_state(file):
        yield replace(row, reading=Reading.UNREAD, why="state as text in a long member", doubtful=True)
        return
    yield row if is_read else replace(row, reading=Reading.NONE, why="no optimizer and no schedule in it")
    for one in walk.found:
        if not any(one.keys[: len(place)] == place or place[: len(one.keys)] == one.keys for place in known):
            yield from _part(file, row, one)
    if walk.is_cut:
        yield replace(row, reading=Reading.UNREAD, keys=("…",), why="more values than are looked through", doubtful=True)


def _has_long_state(file: TorchFile) -> bool:
    """Whether there is state in the long members of a JSON file, which are not in its tree."""
    if file.container is not Container.JSON:
        return False
    with open_state_file(file.path) as (fd, size_bytes):
        pieces = (pread(fd, CHUNK_BYTES + _HEAD_BYTES, at) for at in range(0, size_bytes, CHUNK_BYTES))
        return any(_is_state_text(piece.decode("latin-1")) for piece in pieces)


def _is_doubtful(head: bytes) -> bool:
    return any((_is_saved(head), is_safetensors(head), _is_state_text(head.decode("latin-1"))))


def _part(file: TorchFile, row: Accounted, one: Found) -> Iterator[Accounted]:
    why = "state saved as bytes or text in it"
    if one.kind != "bytes":
        why = f"{_NAMES[one.kind]} at a place that is not edited"
    elif not _is_saved(_first_bytes(file, one.value)) and not _is_state_text(one.value):
        return  # a hash, a random state: nothing that a loader opens
    yield replace(row, reading=Reading.UNREAD, keys=one.keys, why=why, doubtful=True)


def _first_bytes(file: TorchFile, value: object) -> bytes:
    """The first bytes of what may hold a file; none where they cannot be found."""
    if isinstance(value, TensorRef) and file.segments:
        with open_state_file(file.path) as (fd, _):
            place = place_of_elements(fd, file.segments[0], value)
            return pread(fd, min(place[1], _LEAST_TEXT), place[0]) if place is not None else b""
    if isinstance(value, str):
        return value[:_HEAD_BYTES].encode("latin-1", "replace")
    if isinstance(value, ArrayRef):
        value = value.content
    return bytes(value[:_LEAST_TEXT]) if isinstance(value, (bytes, list, tuple)) else b""


# a field of an optimizer or a schedule as JSON, YAML or Python write it
_STATE_WORDS = ("param_groups", "base_lrs", "_last_lr", "exp_avg", "momentum_buffer")
_STATE_AS_TEXT = re.compile(rf"""(?m)(?:^[ \t]*|["'])(?:{"|".join(_STATE_WORDS)})["']?\s*:""")


def _is_state_text(text: object) -> bool:
    if not isinstance(text, str) or not any(word in text for word in _STATE_WORDS):
        return False
    return _STATE_AS_TEXT.search(text) is not None


_NAMES = {"optimizer": "an optimizer", "scheduler": "a scheduler", "moments": "moments of an optimizer without its groups"}

# --- Content that is no state, by its first bytes

_HEAD_BYTES = 4096
_LEAST_TEXT = 256
_PICTURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"RIFF")
_PACKED: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", partial(zlib.decompressobj, 31)),  # gzip
    (b"\x78\x9c", zlib.decompressobj),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", lzma.LZMADecompressor),
)


def _known_content(path: Path, head: bytes) -> str | None:
    """What the file is, when it is no state; None when it has to be read as state."""
    if not head:
        return "empty"
    if is_safetensors(head):
        check_safetensors(path)
        return None if _holds_state(path) else "tensors alone (safetensors)"
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
    return "text" if _is_text(head) and not _is_doubtful(head) else None


def _holds_state(path: Path) -> bool:
    """Whether a safetensors file has tensors that are named as moments of an optimizer, or a state in its metadata."""
    moments = any(MOMENTS & set(re.split(r"[./]", name)) for name, *_ in list_tensors(path))
    return moments or any(map(_is_state_text, read_metadata(path).values()))


def may_be_state(path: Path) -> bool:
    """Whether a file holds anything but text, a log, a picture or a vocabulary."""
    try:
        head = read_head(path)
        return head[:1] not in (b"{", b"[") and _known_content(path, head) is None
    except RollbackError:
        return True


def is_saved_file(path: Path) -> bool:
    """Whether a file begins as torch or pickle write it, whatever it is called."""
    try:
        head = read_head(path)
    except RollbackError:
        return False
    return is_torch(head) or _is_pickle(head)


def read_head(path: Path) -> bytes:
    """The first bytes of a file; raises `UnreadableFile`."""
    with open_state_file(path) as (fd, size_bytes):
        return pread(fd, min(size_bytes, _HEAD_BYTES), 0)


def is_torch(head: bytes) -> bool:
    """Whether a file that begins so is what torch saved."""
    name_bytes = int.from_bytes(head[26:28], "little")
    is_zip = head.startswith(b"PK\x03\x04") and head[30 : 30 + name_bytes].endswith(b"/data.pkl")  # of its records the first
    return is_zip or head.startswith(LEGACY_MAGIC)


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins so holds tensors alone."""
    return head[8:10] == b'{"' and b"\0" in head[:8]


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"


def _is_text(head: bytes) -> bool:
    try:
        text = head[: len(head) - 4 if len(head) == _HEAD_BYTES else None].decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not any(ord(char) < 32 and char not in "\t\n\r\f\x1b" for char in text)


def _is_saved(head: bytes) -> bool:
    """Whether bytes begin as something that a loader opens: a torch file, a pickle, an archive; or one packed, or as text."""
    if head.startswith((b"PK\x03\x04", LEGACY_MAGIC)) or _is_pickle(head):
        return len(head) > 2
    inner = _unpacked(head)
    if inner is None:
        inner = _written_as_text(head)
    if inner is None:
        return False
    return not inner or _is_saved(inner)  # packed, and too little of it is here to tell


def _written_as_text(head: bytes) -> bytes | None:
    """The first bytes of what was written in hexadecimal digits or in base64; None where nothing was. A hash is shorter."""
    if len(head) < _LEAST_TEXT:
        return None
    for decode in (binascii.unhexlify, partial(base64.b64decode, validate=True)):
        try:
            return decode(head[:64])
        except ValueError:
            continue
    return None


def _unpacked(head: bytes) -> bytes | None:
    """The first bytes of what is packed, none where they need more than `head`; None where nothing is packed."""
    for magic, opened in _PACKED:
        if head.startswith(magic):
            try:
                inner: bytes = opened().decompress(head, 64)
                return inner
            except (zlib.error, OSError, lzma.LZMAError):
                return None
    return None
