"""Every value in the files of a checkpoint, by name: numbers and texts as they are, tensors by digest and place.

Files of torch, pickles, safetensors and DCP are read by opcodes and executed by nobody (`rollback.files`). JSON is read whole.
Any other file is one leaf: the digest of its bytes. What cannot be read is a leaf that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from chronicle.metrics.log import Point
from rollback.checkpoint.manifest import is_manifest_name
from rollback.checks.values import NOT_FINITE, Pieces, decode_floats, pieces_in, read_pieces
from rollback.errors import RollbackError
from rollback.files.config_text import NotPlainConfig, config_kind, numbers, replace_config_numbers
from rollback.files.dcp_file import METADATA_NAME, read_dcp_directory
from rollback.files.edits import dotted
from rollback.files.pickle_values import ArrayRef, Opaque, TensorRef
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import Container, walk_leaves

OURS = {"ChronicleCallback"}  # what the guard keeps in a checkpoint of Lightning
CHUNK_BYTES = 1 << 20
DIGITS = 20  # of the digest of what is no text
AT_STEP = " at step "  # between a channel and the step


class LeafForm(StrEnum):
    """How a leaf is compared."""

    NUMBER = "number"
    TEXT = "text"
    TENSOR = "tensor"
    UNREAD = "not read"


@dataclass(frozen=True, slots=True)
class Value:
    """One value: a number, a text, or a digest; of a tensor also where its elements lie."""

    form: LeafForm
    value: float | str
    pieces: Pieces = ()

    @property
    def shape(self) -> tuple[str, tuple[int, ...]] | None:
        """Type of the elements and shape of a tensor; None: it is none."""
        return (self.pieces[0][1].dtype, self.pieces[0][1].shape) if self.pieces else None


Leaves = Mapping[str, Value]


def logged_leaves(points: Iterable[Point], after: int, until: int) -> dict[str, Value]:
    """The values that were logged in the steps after one and up to another, by channel and step."""
    found: dict[str, Value] = {}
    for point in points:
        if after < point.step <= until:
            for channel, value in point.values.items():
                found[f"{channel}{AT_STEP}{point.step}"] = Value(LeafForm.NUMBER, value)
    return found


def read_leaves(checkpoint: Path, step: int, out: Path) -> dict[str, Value]:
    """The leaves of a checkpoint (directory or file) by name. `out`: where its launch wrote, which may stand in texts.

    Names of files are without the step, and a single file has none: the same leaf has one name in all checkpoints.
    """
    found: dict[str, Value] = {}
    places = {str(out): "{out}", str(out.parent): "{scratch}"}
    for file, path in _files_of(checkpoint):
        name = re.sub(rf"(?<!\d){step}(?!\d)", "N", file)
        try:
            for keys, value in _leaves_of(path, places):
                if not OURS & set(keys.split(".")):
                    found[f"{name}: {keys}" if name and keys else name or keys] = value
        except (RollbackError, OSError, ValueError) as problem:
            found[name or path.name] = Value(LeafForm.UNREAD, str(problem))
    return found


def measure(one: Value, other: Value) -> tuple[float, float]:
    """The largest |a − b| of two values, inf where they cannot be subtracted; and the largest |a| of what differs."""
    if one.form is other.form is LeafForm.NUMBER:
        a, b = float(one.value), float(other.value)
        return _gap(a, b), abs(a)
    if one.value == other.value:
        return 0.0, 0.0
    if one.shape is None or one.shape != other.shape or one.shape[0] not in NOT_FINITE:
        return math.inf, 0.0
    largest, size, dtype = 0.0, 0.0, one.shape[0]
    for left, right in zip(*(read_pieces(side.pieces, CHUNK_BYTES) for side in (one, other)), strict=True):
        if left != right:
            for a, b in zip(decode_floats(left, dtype), decode_floats(right, dtype), strict=True):
                largest, size = max(largest, _gap(a, b)), max(size, abs(a))
    return largest, size


def _gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a - b) else math.inf


def _files_of(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """(name in the checkpoint, path) of every file, but for our own manifest; files of DCP are one by their index."""
    if checkpoint.is_file():
        yield "", checkpoint
        return
    for path in sorted(checkpoint.rglob("*")):
        named = path.relative_to(checkpoint)
        if path.name == METADATA_NAME:
            yield "/".join(named.parent.parts), path
        elif path.suffix == ".distcp" and path.with_name(METADATA_NAME).exists():
            continue
        elif path.is_file() and not is_manifest_name(path.name):
            yield str(named), path


def _leaves_of(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    if path.suffix == ".zip":
        yield from _of_archive(path, places)
        return
    tree: object = {}
    if path.name == METADATA_NAME:
        tree = read_dcp_directory(path.parent)[0].tree
    elif path.suffix != ".safetensors":
        try:
            file = read_state_file(path)
        except RollbackError:
            yield from _of_text(path, places)
            return
        tree = json.loads(path.read_bytes()) if file.container is Container.JSON else file.tree
    tensors = dict(pieces_in(path))
    for keys, pieces in tensors.items():
        yield dotted(keys), _tensor(pieces)
    for leaf in walk_leaves(tree):
        if leaf.keys not in tensors:
            yield dotted(leaf.keys), _plain(leaf.value, places)


def _of_text(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    """The numbers of YAML and TOML by their keys, and the digest of everything else."""
    text, kind = path.read_bytes().decode("latin-1"), config_kind(path.name)
    if kind is not None:
        with suppress(NotPlainConfig):
            found = numbers(text, kind)
            text = replace_config_numbers(text, kind, dict.fromkeys(found, 0))
            for keys, number in found.items():
                yield dotted(keys), Value(LeafForm.NUMBER, number.value)
    yield "", Value(LeafForm.TEXT, _digest(_placed(text, places).encode()))


def _of_archive(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    """The files of an archive, as Stable-Baselines3 saves; they are unpacked beside it, so that tensors can be compared."""
    unpacked = path.with_name(f".{path.name}.unpacked")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    for name, inner in _files_of(unpacked):
        for keys, value in _leaves_of(inner, places):
            yield f"{name}: {keys}" if keys else name, value


def _plain(value: object, places: Mapping[str, str]) -> Value:
    if isinstance(value, TensorRef):
        return _tensor(())
    if isinstance(value, ArrayRef):
        if value.content is None:
            return Value(LeafForm.UNREAD, "an array whose bytes lie elsewhere")
        value = bytes(value.content)
    if isinstance(value, bytes | bytearray):
        return Value(LeafForm.TEXT, _digest(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Value(LeafForm.NUMBER, float(value))
    if isinstance(value, Opaque):
        plain = [one for one in value.args if isinstance(one, str | int | float)]
        value = f"an object {value.name} {plain}"
    return Value(LeafForm.TEXT, _placed(str(value), places))


def _digest(content: bytes | bytearray) -> str:
    return "bytes " + hashlib.sha256(content).hexdigest()[:DIGITS]


def _tensor(pieces: Pieces) -> Value:
    if not pieces:
        return Value(LeafForm.UNREAD, "its elements are not in one piece of the file")
    first = pieces[0][1]
    digest = hashlib.sha256(f"{first.dtype}{first.shape}".encode())
    for chunk in read_pieces(pieces, CHUNK_BYTES):
        digest.update(chunk)
    return Value(LeafForm.TENSOR, digest.hexdigest(), pieces)


def _placed(text: str, places: Mapping[str, str]) -> str:
    for place, stands in places.items():
        text = text.replace(place, stands)
    return text
