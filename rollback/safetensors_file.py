"""Headers of safetensors files: sizes, types and offsets, checked as the format demands, contents never read.

Format: 8 bytes little-endian header length, a JSON object of `{name: {dtype, shape, data_offsets}}`, the data
(huggingface/safetensors README). Offsets must tile the data without holes; there is no checksum.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollback.errors import UnreadableFile
from rollback.pickle_globals import MAX_DIMENSIONS
from rollback.torch_file import naming, open_state_file
from rollback.torch_zip import read_at

MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """Number of tensors, their elements in total, element types, and the free-form metadata."""

    num_tensors: int
    num_elements: int
    dtypes: tuple[str, ...]
    metadata: dict[str, str]


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Read and check the header; UnreadableFile when it does not describe exactly this file."""
    with open_state_file(path) as (fd, size_bytes), naming(path):
        length = int.from_bytes(read_at(fd, 0, 8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size_bytes - 8):
            raise UnreadableFile(
                f"safetensors header of {length} bytes in a file of {size_bytes}: truncated or damaged"
            )
        try:
            header = json.loads(read_at(fd, 8, length))
        except (ValueError, RecursionError) as problem:
            raise UnreadableFile(f"safetensors header is no JSON: {problem}") from None
        return _checked(header, size_bytes - 8 - length)


def _checked(header: object, data_bytes: int) -> SafetensorsHeader:
    if not isinstance(header, dict):
        raise UnreadableFile("safetensors header is no object")
    metadata = header.pop("__metadata__", {})
    spans: list[tuple[int, int]] = []
    elements, dtypes = 0, set()
    for name, tensor in header.items():
        try:
            start, end = tensor["data_offsets"]
            count = _num_elements(tensor["shape"])
            dtype = tensor["dtype"]
            if not (0 <= start <= end <= data_bytes):
                raise UnreadableFile(f"tensor `{name[:80]}` lies at {start}–{end}, the data has {data_bytes} bytes")
        except (KeyError, TypeError, ValueError):
            raise UnreadableFile(f"tensor `{name[:80]}` has no valid offsets, shape and dtype") from None
        spans.append((start, end))
        elements += count
        dtypes.add(str(dtype))
    _check_tiling(sorted(spans), data_bytes)
    return SafetensorsHeader(
        num_tensors=len(spans),
        num_elements=elements,
        dtypes=tuple(sorted(dtypes)),
        metadata=metadata if isinstance(metadata, dict) else {},
    )


def _num_elements(shape: list[object]) -> int:
    count = 1
    for size in shape:
        if not isinstance(size, int) or not 0 <= size < 2**48 or len(shape) > MAX_DIMENSIONS:
            raise ValueError("no shape")
        count *= size
    return count


def _check_tiling(spans: list[tuple[int, int]], data_bytes: int) -> None:
    at = 0
    for start, end in spans:
        if start != at:
            raise UnreadableFile(f"safetensors data has a hole or an overlap at byte {at}")
        at = end
    if at != data_bytes:
        raise UnreadableFile(f"safetensors data ends at byte {at}, the file has {data_bytes}: truncated or longer")
