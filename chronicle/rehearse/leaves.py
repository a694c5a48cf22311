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
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from chronicle.metrics.log import Point
from rollback.checkpoint.manifest import is_manifest_name
from rollback.checks.values import NOT_FINITE, TensorPlace, decode_floats, places_in
from rollback.disk import pread
from rollback.errors import RollbackError
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.files.pickle_values import ArrayRef, Opaque
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import open_state_file
from rollback.files.torch_tree import walk_leaves

OURS = {"ChronicleCallback"}  # what the guard keeps in a checkpoint of Lightning
MOST_JSON_BYTES = 64 << 20
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
    """One value: a number, a text, or a digest; of a tensor also its file and its place there."""

    form: LeafForm
    value: float | str
    file: Path | None = None
    place: TensorPlace | None = None


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
    number = re.compile(rf"(?<!\d){step}(?!\d)")
    for file, path in _files_of(checkpoint):
        name = "" if path == checkpoint else number.sub("N", file)
        try:
            for keys, value in _leaves_of(path, places):
                if OURS & set(keys.split(".")):
                    continue
                found[f"{name}: {keys}" if name and keys else name or keys] = value
        except (RollbackError, OSError, ValueError) as problem:
            found[name or file] = Value(LeafForm.UNREAD, str(problem))
    return found


def measure(one: Value, other: Value) -> tuple[float, float]:
    """The largest |a − b| of two values, inf where they cannot be subtracted; and the largest |a| of what differs."""
    if one.form is other.form is LeafForm.NUMBER:
        a, b = float(one.value), float(other.value)
        return _gap(a, b), abs(a)
    if one.value == other.value:
        return 0.0, 0.0
    mine, theirs = one.place, other.place
    if one.file is None or other.file is None or mine is None or theirs is None:
        return math.inf, 0.0
    if mine.dtype not in NOT_FINITE or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return math.inf, 0.0
    largest, size = 0.0, 0.0
    for left, right in zip(_chunks(one.file, mine), _chunks(other.file, theirs), strict=True):
        if left != right:
            for a, b in zip(decode_floats(left, mine.dtype), decode_floats(right, mine.dtype), strict=True):
                largest, size = max(largest, _gap(a, b)), max(size, abs(a))
    return largest, size


def _gap(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a - b) else math.inf


def _files_of(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """(name in the checkpoint, path) of every file, but for our own manifest."""
    if checkpoint.is_file():
        yield checkpoint.name, checkpoint
        return
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and not is_manifest_name(path.name):
            yield str(path.relative_to(checkpoint)), path


def _leaves_of(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    if path.suffix in (".safetensors", ".distcp"):
        for keys, place in places_in(path):
            yield dotted(keys), _tensor(path, place)
        return
    if path.suffix == ".zip":
        yield from _of_archive(path, places)
        return
    is_small = path.stat().st_size < MOST_JSON_BYTES
    if is_small and path.read_bytes()[:1] in (b"{", b"["):
        yield from _of_tree(json.loads(path.read_bytes()), {}, path, places)
        return
    try:
        file = read_state_file(path)
    except RollbackError:
        yield "", Value(LeafForm.TEXT, _digest(_placed(path.read_bytes().decode("latin-1"), places)))
        return
    yield from _of_tree(file.tree, dict(places_in(path)), path, places)


def _of_archive(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    """The files of an archive, as Stable-Baselines3 saves; they are unpacked beside it, so that tensors can be compared."""
    unpacked = path.with_name(f".{path.name}.unpacked")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    for name, inner in _files_of(unpacked):
        for keys, value in _leaves_of(inner, places):
            yield f"{name}: {keys}" if keys else name, value


def _of_tree(
    tree: object, where: Mapping[Keys, TensorPlace | None], path: Path, places: Mapping[str, str]
) -> Iterator[tuple[str, Value]]:
    for leaf in walk_leaves(tree):
        if leaf.keys in where:
            yield dotted(leaf.keys), _tensor(path, where[leaf.keys])
        else:
            yield dotted(leaf.keys), _plain(leaf.value, places)


def _plain(value: object, places: Mapping[str, str]) -> Value:
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


def _digest(content: bytes | bytearray | str) -> str:
    return "bytes " + hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:DIGITS]


def _tensor(path: Path, place: TensorPlace | None) -> Value:
    if place is None:
        return Value(LeafForm.UNREAD, "its elements are not in one piece of the file")
    digest = hashlib.sha256(f"{place.dtype}{place.shape}".encode())
    for chunk in _chunks(path, place):
        digest.update(chunk)
    return Value(LeafForm.TENSOR, digest.hexdigest(), path, place)


def _chunks(path: Path, place: TensorPlace) -> Iterator[bytes]:
    with open_state_file(path) as (fd, _):
        for at in range(0, place.num_bytes, CHUNK_BYTES):
            yield pread(fd, min(CHUNK_BYTES, place.num_bytes - at), place.offset + at)


def _placed(text: str, places: Mapping[str, str]) -> str:
    for place, stands in places.items():
        text = text.replace(place, stands)
    return text
