"""The digest of an optimizer's state in a torch file: by it a saved state is known again wherever its file lies.

The same digest as `chronicle.resume.records.state_digest` computes in memory: the first elements of some of the tensors that
the optimizer keeps of its parameters, in the order of its groups. LRs and other options are no part of it: a rollback changes
them, and the state stays the same.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TypeVar

from rollback.checkpoint.state import as_mapping
from rollback.files.pickle_values import TensorRef, item_size
from rollback.files.torch_file import open_state_file
from rollback.files.torch_tree import PickleSegment, TorchFile
from rollback.files.torch_zip import data_offset, read_at

NUM_TENSORS = 64  # of which a state's digest is made
NUM_ELEMENTS = 16  # the first of each
MOST_DEPTH = 6  # of containers around an optimizer's state

T = TypeVar("T")


def evenly(rows: Sequence[T]) -> Sequence[T]:
    """At most `NUM_TENSORS` of them, at equal distances."""
    return rows[:: -(-len(rows) // NUM_TENSORS)]


def header(place: int, key: object, shape: tuple[int, ...], dtype: str) -> bytes:
    """What a tensor is, before its elements: the place of its parameter, its name there, shape and type."""
    return f"{place}.{key}{shape}{dtype}:".encode()


def digest_in_file(file: TorchFile, state: object) -> str:
    """Digest of an optimizer's state that was read from a torch zip; "" where it has no tensors, or they cannot be read."""
    rows = [
        (place, key, value)
        for place, entry in enumerate(_entries(state))
        for key, value in sorted(entry.items(), key=lambda item: str(item[0]))
        if isinstance(value, TensorRef) and value.numel
    ]
    if not rows:
        return ""
    total = hashlib.sha256()
    with open_state_file(file.path) as (fd, _):
        for place, key, tensor in evenly(rows):
            raw = bytes_of_first(fd, file.segments[0], tensor)
            if raw is None:
                return ""
            total.update(header(place, key, tensor.shape, tensor.dtype) + raw)
    return total.hexdigest()[:32]


def _entries(state: object) -> Iterator[dict[object, object]]:
    whole = as_mapping(state) or {}
    kept, groups = as_mapping(whole.get("state")) or {}, whole.get("param_groups")
    for group in groups if isinstance(groups, (list, tuple)) else ():
        parameters = (as_mapping(group) or {}).get("params")
        for parameter in parameters if isinstance(parameters, (list, tuple)) else ():
            yield dict(as_mapping(kept.get(parameter)) or {})


def place_of_storage(fd: int, segment: PickleSegment, tensor: TensorRef) -> tuple[int, int] | None:
    """(offset in the file, bytes) of the storage of a tensor of a torch zip; None where it cannot be read as it lies there."""
    if segment.layout is None or segment.record is None or tensor.storage is None or not item_size(tensor.dtype):
        return None
    record = segment.layout.find(f"{segment.record.name.removesuffix('data.pkl')}data/{tensor.storage.key}")
    if record is None or not record.stored:
        return None
    return data_offset(fd, segment.layout, record), record.size_bytes


def place_of_elements(fd: int, segment: PickleSegment, tensor: TensorRef) -> tuple[int, int] | None:
    """As `place_of_storage`, of the elements of a tensor that lies in one piece."""
    found, size = place_of_storage(fd, segment, tensor), item_size(tensor.dtype) or 0
    start, num_bytes = tensor.storage_offset * size, tensor.numel * size
    return None if found is None or start + num_bytes > found[1] else (found[0] + start, num_bytes)


def bytes_of_first(fd: int, segment: PickleSegment, tensor: TensorRef) -> bytes | None:
    """The first elements of a tensor in the order of its indices."""
    found, size = place_of_storage(fd, segment, tensor), item_size(tensor.dtype) or 0
    if found is None or segment.big_endian:
        return None
    begin, num_bytes = found
    raw = b""
    for index in islice(product(*map(range, tensor.shape)), NUM_ELEMENTS):
        at = tensor.storage_offset + sum(i * step for i, step in zip(index, tensor.stride, strict=True))
        if (at + 1) * size > num_bytes:
            return None
        raw += read_at(fd, begin + at * size, size)
    return raw
