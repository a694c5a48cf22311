"""Headers of safetensors files: types, shapes and offsets are checked; tensors are not read.

Format: 8 bytes little-endian header length, a JSON object of `{name: {dtype, shape, data_offsets}}`, the data
(huggingface/safetensors README). Offsets must tile the data without holes; there is no checksum.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollback.errors import UnreadableFile
from rollback.files.json_file import JsonPart, Keys, json_parts
from rollback.files.pickle_values import MAX_DIMENSIONS
from rollback.files.torch_file import naming, open_state_file
from rollback.files.torch_zip import read_at

_MAX_HEADER_BYTES = 90 * 2**20
_MAX_TENSORS = 500_000


def check_safetensors(path: Path) -> None:
    """Check the header; UnreadableFile when it does not describe exactly this file."""
    with _opened(path) as (parts, start, size_bytes):
        _check(parts, size_bytes - start)


def list_tensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, offset in the file, bytes) of each tensor. Raises `UnreadableFile` for a damaged header."""
    with _opened(path) as (parts, data_start, _):
        for name, tensor in _tensors(parts):
            try:
                start, end = tensor["data_offsets"]
                shape = tuple(tensor["shape"])
                dtype = str(tensor["dtype"])
            except (TypeError, KeyError, ValueError) as problem:
                raise UnreadableFile(
                    f"the header of tensor `{name[:80]}` is damaged: expected dtype, shape and data_offsets"
                ) from problem
            yield name, dtype, shape, data_start + start, end - start


def read_metadata(path: Path) -> dict[str, str | int]:
    """What a writer says of the file beside its tensors, all of it text; whole numbers as such. Raises as `list_tensors`."""
    with open_state_file(path) as (fd, size_bytes), naming(path):
        length = int.from_bytes(read_at(fd, 0, 8), "little")
        try:
            header = json.loads(read_at(fd, 8, min(length, size_bytes - 8, _MAX_HEADER_BYTES)))
            given = dict(header.get("__metadata__", {}))
        except (ValueError, TypeError, AttributeError, RecursionError) as problem:
            raise UnreadableFile("the safetensors header is damaged: expected a JSON object") from problem
    return {name: int(text) if re.fullmatch(r"\d{1,18}", str(text)) else str(text) for name, text in given.items()}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Iterator[JsonPart], int, int]]:
    """(parts of the header, where the data begins, size of the file)."""
    with open_state_file(path) as (fd, size_bytes), naming(path):
        length = int.from_bytes(read_at(fd, 0, 8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise UnreadableFile(f"safetensors header of {length} bytes in a file of {size_bytes}: truncated or damaged")
        yield json_parts(fd, 8, length, levels=0, wanted=_is_tensor), 8 + length, size_bytes


def _check(parts: Iterable[JsonPart], data_bytes: int) -> None:
    starts, ends = array("Q"), array("Q")
    for name, tensor in _tensors(parts):
        try:
            start, end = tensor["data_offsets"]
            _check_shape(tensor["shape"])
            if not isinstance(tensor["dtype"], str):
                raise ValueError("no dtype")
            if not (0 <= start <= end <= data_bytes):
                raise UnreadableFile(f"tensor `{name[:80]}` lies at {start}–{end}, the data has {data_bytes} bytes")
            starts.append(start)
            ends.append(end)
        except (KeyError, TypeError, ValueError):
            raise UnreadableFile(f"tensor `{name[:80]}` has no valid offsets, shape and dtype") from None
        if len(starts) > _MAX_TENSORS:
            raise UnreadableFile(f"safetensors header of {len(starts)} tensors: no known writer produces this")
    _check_tiling(starts, ends, data_bytes)


def _is_tensor(keys: Keys) -> bool:
    return keys[:1] != ("__metadata__",)


def _tensors(parts: Iterable[JsonPart]) -> Iterator[tuple[str, Any]]:
    """(name, description) of each tensor, of a header read at once or member by member."""
    for part in parts:
        if part.keys == () and not isinstance(part.value, dict):
            raise UnreadableFile("safetensors header is not an object")
        for name, tensor in part.value.items() if part.keys == () else ((str(part.keys[0]), part.value),):
            if name != "__metadata__":
                if len(part.keys) > 1:
                    raise UnreadableFile(f"tensor `{name[:80]}` has no valid offsets, shape and dtype")
                yield name, tensor


def _check_shape(shape: list[object]) -> None:
    for size in shape:
        if not isinstance(size, int) or not 0 <= size < 2**48 or len(shape) > MAX_DIMENSIONS:
            raise ValueError("no shape")


def _check_tiling(starts: array[int], ends: array[int], data_bytes: int) -> None:
    at = 0
    for index in sorted(range(len(starts)), key=lambda i: starts[i] << 64 | ends[i]):
        if starts[index] != at:
            raise UnreadableFile(f"safetensors data has a hole or an overlap at byte {at}")
        at = ends[index]
    if at != data_bytes:
        raise UnreadableFile(f"safetensors data ends at byte {at}, the file has {data_bytes}: truncated or longer")
