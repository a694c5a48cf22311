"""Every value in the files of a checkpoint, by name; which of them differ between two checkpoints, and by how much.

Files of torch, pickles, safetensors and DCP are read by opcodes and executed by nobody (`rollback.files`). JSON is read whole.
Any other file is one leaf: the digest of its bytes. What cannot be read is a leaf that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from rollback.checkpoint.identity import IDENTITY_CALLBACK, IDENTITY_KEY
from rollback.checkpoint.manifest import digest_file, is_manifest_name
from rollback.checks.values import NOT_FINITE, Pieces, decode_floats, pieces_in, read_pieces
from rollback.disk import RemoteView
from rollback.disk.content import read_bounded
from rollback.errors import RollbackError
from rollback.files.config_text import NotPlainConfig, config_kind, numbers, replace_config_numbers
from rollback.files.dcp_file import METADATA_NAME, read_dcp_directory
from rollback.files.edits import dotted
from rollback.files.pickle_values import ArrayRef, Global, Opaque, TensorRef
from rollback.files.safetensors_file import read_metadata
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import Container, walk_leaves

OURS = {IDENTITY_KEY, IDENTITY_CALLBACK}  # what a guard keeps in a checkpoint
CHUNK_BYTES = 1 << 20
MOST_TEXT_BYTES = 64 << 20  # a longer file is a digest
MOST_SHOWN = 64  # bytes that are a text
DIGITS = 20  # of the digest of what is no text
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # the key of a list


class LeafForm(StrEnum):
    """How a leaf is compared."""

    NUMBER = "number"
    TEXT = "text"
    DIGEST = "bytes"
    TENSOR = "tensor"
    UNREAD = "not read"


@dataclass(frozen=True, slots=True)
class Value:
    """One value: a number, a text, or the digest of bytes; of a tensor the places where its elements lie.

    A tensor of one number that was read with the rest is that number.
    """

    form: LeafForm
    value: float | str = ""
    pieces: Pieces = ()

    @property
    def shape(self) -> tuple[str, tuple[int, ...]] | None:
        """Type of the elements and shape of a tensor; None: it is none."""
        return (self.pieces[0][1].dtype, self.pieces[0][1].shape) if self.pieces else None

    def chunks(self) -> Iterator[bytes]:
        """The bytes of a tensor, in parts of `CHUNK_BYTES`."""
        return read_pieces(self.pieces, CHUNK_BYTES)


Leaves = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Leaves of one name, but for keys of lists, that differ between two checkpoints.

    `before` and `after` are the values of those that differ; None stands for one that is not there.
    """

    name: str
    before: tuple[object, ...]
    after: tuple[object, ...]
    num_compared: int


def read_leaves(
    files: Mapping[str, Path], step: int | None, places: Mapping[str, str] | None = None, unpack: Path | None = None
) -> dict[str, Value]:
    """The leaves of a checkpoint by name. `files`: name in the checkpoint -> path; that of a single file is "".

    Names are without the step: the same leaf has one name in all checkpoints. `places`: what stands for a text wherever it is
    in a value, as for a path that each launch has of its own. `unpack`: a directory for the files of archives, which are read
    there; without it an archive is one leaf.
    """
    found: dict[str, Value] = {}
    reader = _Reader(places or {}, unpack)
    for file, path in files.items():
        if step is not None:
            file = re.sub(rf"(?<!\d){step}(?!\d)", "N", file)
        if not is_manifest_name(path.name):
            found |= reader.read(path, file)
    return found


def compare_leaves(before: Leaves, after: Leaves) -> tuple[list[Difference], dict[str, str]]:
    """What differs, and why what could not be compared was not, both by name."""
    groups: dict[str, list[str]] = defaultdict(list)
    unread: dict[str, str] = {}
    for name in dict.fromkeys([*before, *after]):
        sides = [one for one in (before.get(name), after.get(name)) if one is not None]
        why = [str(one.value) for one in sides if one.form is LeafForm.UNREAD]
        if why:
            unread[name] = why[0]
        else:
            groups[INDEX.sub("*", name)].append(name)
    differences = []
    for pattern, names in groups.items():
        apart = [name for name in names if _is_apart(before.get(name), after.get(name))]
        if apart:
            differences.append(
                Difference(
                    name=apart[0] if len(apart) == 1 else pattern,
                    before=tuple(_shown(before.get(name)) for name in apart),
                    after=tuple(_shown(after.get(name)) for name in apart),
                    num_compared=len(names),
                )
            )
    return differences, unread


def _is_apart(one: Value | None, other: Value | None) -> bool:
    if one is None or other is None:
        return True
    return differ(one, other)


def _shown(value: Value | None) -> object:
    if value is None:
        return None
    if isinstance(value.value, float) and not math.isfinite(value.value):
        return str(value.value)  # JSON has no such number
    if value.shape is None or value.form is not LeafForm.TENSOR:
        return value.value
    dtype, shape = value.shape
    return f"<{dtype} {list(shape)}>"


def differ(one: Value, other: Value) -> bool:
    """Whether two values differ; elements of tensors are compared up to the first that differs."""
    if isinstance(one.value, int | float) and isinstance(other.value, int | float):
        return _gap(one.value, other.value) > 0
    if one.value != other.value or one.shape != other.shape:
        return True
    return any(left != right for left, right in zip(one.chunks(), other.chunks(), strict=True))


def measure(one: Value, other: Value) -> tuple[float, float]:
    """The largest |a − b| of two values, inf where they cannot be subtracted; and the largest |a| of what differs."""
    if isinstance(one.value, int | float) and isinstance(other.value, int | float):
        return _gap(one.value, other.value), abs(one.value)
    if not differ(one, other):
        return 0.0, 0.0
    if one.shape is None or one.shape != other.shape or one.shape[0] not in NOT_FINITE:
        return math.inf, 0.0
    largest, size, dtype = 0.0, 0.0, one.shape[0]
    for left, right in zip(one.chunks(), other.chunks(), strict=True):
        if left != right:
            for a, b in zip(decode_floats(left, dtype), decode_floats(right, dtype), strict=True):
                largest, size = max(largest, _gap(a, b)), max(size, abs(a))
    return largest, size


def _gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a - b) else math.inf


# --- reading


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads files into leaves."""

    places: Mapping[str, str]
    unpack: Path | None

    def read(self, path: Path, name: str) -> dict[str, Value]:
        """The leaves of a file, below its name in the checkpoint; files of DCP are one by their index."""
        if path.suffix == ".distcp" and path.with_name(METADATA_NAME).exists():
            return {}
        if path.name == METADATA_NAME:
            name = name.rpartition("/")[0]
        found: dict[str, Value] = {}
        try:
            for keys, value in self._leaves_of(path):
                if OURS & set(keys.split(".")):
                    continue
                label = f"{name}: {keys}" if name and keys else name or keys or "(file)"
                while label in found:  # a key 1 and a key "1" have one name
                    label += "#"
                found[label] = value
        except (RollbackError, OSError, ValueError, RecursionError) as problem:
            found[name or path.name] = Value(LeafForm.UNREAD, str(problem))
        return found

    def _leaves_of(self, path: Path) -> Iterator[tuple[str, Value]]:
        if path.suffix == ".zip" and self.unpack is not None:
            yield from self._of_archive(path, self.unpack)
            return
        if path.name == METADATA_NAME:
            tree = read_dcp_directory(path.parent)[0].tree
        elif path.suffix == ".safetensors":
            tree = read_metadata(path)
        else:
            try:
                file = read_state_file(path)
            except RollbackError:
                yield from self._of_text(path)
                return
            tree = file.tree
            if file.container is Container.JSON:  # of which long members were left out
                tree = json.loads(read_bounded(path, MOST_TEXT_BYTES))
        tensors = dict(pieces_in(path))
        for leaf in walk_leaves(tree):
            if leaf.keys not in tensors:
                yield dotted(leaf.keys), self._plain(leaf.value)
            elif isinstance(leaf.value, int | float):
                yield dotted(leaf.keys), replace(self._plain(leaf.value), pieces=tensors.pop(leaf.keys))
        for keys, pieces in tensors.items():
            yield dotted(keys), self._tensor(pieces)

    def _of_text(self, path: Path) -> Iterator[tuple[str, Value]]:
        """The numbers of YAML and TOML by their keys, and the digest of everything else."""
        if path.stat().st_size > MOST_TEXT_BYTES:
            yield "", Value(LeafForm.DIGEST, digest_file(path)[0])
            return
        text, kind = read_bounded(path, MOST_TEXT_BYTES).decode("latin-1"), config_kind(path.name)
        if kind is not None:
            with suppress(NotPlainConfig):
                found = numbers(text, kind)
                text = replace_config_numbers(text, kind, dict.fromkeys(found, 0))
                for keys, number in found.items():
                    yield dotted(keys), Value(LeafForm.NUMBER, number.value)
        yield "", Value(LeafForm.DIGEST, _digest(self._placed(text).encode()))

    def _of_archive(self, path: Path, unpack: Path) -> Iterator[tuple[str, Value]]:
        """The files of an archive, as Stable-Baselines3 saves."""
        unpacked = unpack / f"{_digest(str(path).encode())}.unpacked"
        with zipfile.ZipFile(path) as archive:
            archive.extractall(unpacked)
        for inner in sorted(unpacked.rglob("*")):
            if inner.is_file():
                yield from self.read(inner, str(inner.relative_to(unpacked))).items()

    def _tensor(self, pieces: Pieces) -> Value:
        if not pieces:
            return Value(LeafForm.UNREAD, "its elements are not in one piece of the file")
        if RemoteView.opened is not None:
            return Value(LeafForm.UNREAD, "its elements would be fetched from the store")
        return Value(LeafForm.TENSOR, pieces=pieces)

    def _plain(self, value: object) -> Value:
        if isinstance(value, TensorRef):
            return self._tensor(())
        if isinstance(value, ArrayRef):
            if value.content is None:
                return Value(LeafForm.UNREAD, "an array whose bytes lie elsewhere")
            value = bytes(value.content)
        if isinstance(value, bytes | bytearray) and len(value) > MOST_SHOWN:
            return Value(LeafForm.DIGEST, _digest(value))
        if isinstance(value, float):
            return Value(LeafForm.NUMBER, float(value))
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 64:
            return Value(LeafForm.NUMBER, int(value))
        if isinstance(value, Opaque):
            return Value(LeafForm.UNREAD if value.args else LeafForm.TEXT, f"an object {value.name}")
        if isinstance(value, Global):
            return Value(LeafForm.TEXT, f"a class {value.name}")
        if value is None or isinstance(value, str | int | bytes | bytearray):
            return Value(LeafForm.TEXT, self._placed(str(value)))
        return Value(LeafForm.UNREAD, f"a {type(value).__name__}")

    def _placed(self, text: str) -> str:
        for place, stands in self.places.items():
            text = text.replace(place, stands)
        return text


def _digest(content: bytes | bytearray) -> str:
    return "bytes " + hashlib.sha256(content).hexdigest()[:DIGITS]
