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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollback.checkpoint.manifest import is_manifest_name
from rollback.checks.values import NOT_FINITE, TensorPlace, decode_floats, places_in_entries, places_in_tree
from rollback.disk import pread
from rollback.errors import RollbackError
from rollback.files.pickle_values import ArrayRef, Opaque
from rollback.files.safetensors_file import list_tensors
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import open_state_file
from rollback.files.torch_tree import Leaf, TorchFile

OURS = {"ChronicleCallback"}  # what the guard keeps in a checkpoint of Lightning
MOST_JSON_BYTES = 64 << 20
MOST_FILES = 20_000
CHUNK_BYTES = 1 << 20
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class LeafForm(StrEnum):
    """How a leaf is compared."""

    NUMBER = "number"
    TEXT = "text"
    TENSOR = "tensor"
    BYTES = "bytes"
    UNREAD = "not read"


@dataclass(frozen=True, slots=True)
class Value:
    """One value: a number, a text, or a digest; of a tensor also its file and its place there."""

    form: LeafForm
    value: float | str
    file: Path | None = None
    place: TensorPlace | None = None


def read_leaves(checkpoint: Path, step: int, places: Mapping[str, str]) -> dict[str, Value]:
    """The leaves of a checkpoint (directory or file) by name. `places`: paths that stand in texts, and what is put for them.

    Names of files are without the step, and a single file has none: the same leaf has one name in all checkpoints.
    """
    found: dict[str, Value] = {}
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


def largest_difference(one: Value, other: Value) -> float:
    """The largest |a − b| of two values of the same form, 0 where they are equal; inf where they cannot be subtracted."""
    if one.value == other.value:
        return 0.0
    if one.form is LeafForm.NUMBER and other.form is LeafForm.NUMBER:
        return abs(float(one.value) - float(other.value))
    if one.place is None or other.place is None or one.file is None or other.file is None:
        return math.inf
    if one.place.dtype not in NOT_FINITE or (one.place.dtype, one.place.shape) != (other.place.dtype, other.place.shape):
        return math.inf
    return _largest_of(one.file, one.place, other.file, other.place)


def largest_number(value: Value) -> float:
    """The largest |a| in a number or a tensor of floats; 0 of what holds none."""
    if value.form is LeafForm.NUMBER:
        return abs(float(value.value))
    if value.place is None or value.file is None or value.place.dtype not in NOT_FINITE:
        return 0.0
    largest = 0.0
    for chunk in _chunks(value.file, value.place):
        largest = max(largest, *(abs(number) for number in decode_floats(chunk, value.place.dtype)))
    return largest


def _largest_of(first: Path, one: TensorPlace, second: Path, other: TensorPlace) -> float:
    largest = 0.0
    for mine, theirs in zip(_chunks(first, one), _chunks(second, other), strict=True):
        if mine == theirs:
            continue
        for a, b in zip(decode_floats(mine, one.dtype), decode_floats(theirs, one.dtype), strict=True):
            if a == b:
                continue
            gap = abs(a - b)
            if not math.isfinite(gap):
                return math.inf
            largest = max(largest, gap)
    return largest


def _files_of(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """(name in the checkpoint, path) of every file, but for our own manifest."""
    if checkpoint.is_file():
        yield checkpoint.name, checkpoint
        return
    for number, path in enumerate(sorted(checkpoint.rglob("*"))):
        if number > MOST_FILES:
            raise ValueError(f"`{checkpoint}` holds more than {MOST_FILES} files")
        if path.is_file() and not is_manifest_name(path.name):
            yield str(path.relative_to(checkpoint)), path


def _leaves_of(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    if path.suffix == ".safetensors":
        yield from _of_safetensors(path)
        return
    if path.suffix == ".distcp":
        yield from _of_entries(path)
        return
    if path.suffix == ".zip":
        yield from _of_archive(path, places)
        return
    head = path.read_bytes()[:2] if path.stat().st_size < MOST_JSON_BYTES else b""
    if head[:1] in (b"{", b"["):
        yield from _of_json(json.loads(path.read_bytes()), "", places)
        return
    try:
        file = read_state_file(path)
    except RollbackError:
        yield "", Value(LeafForm.BYTES, _digest_of_text(path, places))
        return
    yield from _of_tree(file, places)


def _of_archive(path: Path, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    """The files of an archive, as Stable-Baselines3 saves; they are unpacked beside it, so that tensors can be compared."""
    unpacked = path.with_name(f".{path.name}.unpacked")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unpacked)
    for name, inner in _files_of(unpacked):
        for keys, value in _leaves_of(inner, places):
            yield f"{name}: {keys}" if keys else name, value


def _of_tree(file: TorchFile, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    where = dict(places_in_tree(file))
    for leaf in file.leaves():
        name = _dotted(leaf.keys)
        if leaf.keys in where:
            yield name, _tensor(file.path, where[leaf.keys])
        else:
            yield name, _plain(leaf, places)


def _plain(leaf: Leaf, places: Mapping[str, str]) -> Value:
    value = leaf.value
    if isinstance(value, bool) or value is None:
        return Value(LeafForm.TEXT, str(value))
    if isinstance(value, int | float):
        return Value(LeafForm.NUMBER, float(value))
    if isinstance(value, str):
        return Value(LeafForm.TEXT, _placed(value, places))
    if isinstance(value, bytes | bytearray):
        return Value(LeafForm.BYTES, hashlib.sha256(value).hexdigest())
    if isinstance(value, ArrayRef):
        if value.content is None:
            return Value(LeafForm.UNREAD, "an array whose bytes lie elsewhere")
        return Value(LeafForm.BYTES, hashlib.sha256(bytes(value.content)).hexdigest())
    if isinstance(value, Opaque):
        plain = [one for one in value.args if isinstance(one, str | int | float)]
        return Value(LeafForm.TEXT, _placed(f"an object {value.name} {plain}", places))
    return Value(LeafForm.TEXT, type(value).__name__)


def _of_entries(path: Path) -> Iterator[tuple[str, Value]]:
    for keys, place in places_in_entries(path):
        yield _dotted(keys), _tensor(path, place)


def _of_safetensors(path: Path) -> Iterator[tuple[str, Value]]:
    for name, dtype, shape, offset, num_bytes in list_tensors(path):
        place = TensorPlace(
            keys=(name,), dtype=DTYPES.get(dtype, dtype), shape=shape, offset=offset, num_bytes=num_bytes
        )
        yield name, _tensor(path, place)


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


def _of_json(value: Any, name: str, places: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _of_json(part, f"{name}.{key}" if name else str(key), places)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _of_json(part, f"{name}.{number}", places)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, Value(LeafForm.NUMBER, float(value))
    else:
        yield name, Value(LeafForm.TEXT, _placed(str(value), places))


def _digest_of_text(path: Path, places: Mapping[str, str]) -> str:
    """Of the bytes of a file, with what stands for the places of this launch."""
    content = path.read_bytes()
    for place, stands in places.items():
        content = content.replace(place.encode(), stands.encode())
    return hashlib.sha256(content).hexdigest()


def _placed(text: str, places: Mapping[str, str]) -> str:
    for place, stands in places.items():
        text = text.replace(place, stands)
    return text


def _dotted(keys: tuple[str | int, ...]) -> str:
    return ".".join(map(str, keys))
