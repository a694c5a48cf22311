"""F11 by the bytes: NaN and infinite numbers in weights and in the state of an optimizer, whatever was noted at the save.

An element is not finite where all bits of its exponent are set, and the highest byte of such an element has one of a few
values that no weight of a healthy model comes near (1.7e38 in float32 and bfloat16). So every n-th byte of a tensor is looked
at first, as one slice, and single elements only where such a byte stands. This needs no numpy: 1 GB of
float32 in the page cache took .4 s.

What a checkpoint may hold for good reasons is no damage: a mask of 0 and -inf, a statistic that is NaN until it is known. So
NaN counts in the state of an optimizer and in tensors of a shape that the optimizer trains; without an optimizer that tells
shapes, in state dicts. Infinite numbers count there too, unless every other element is 0. Everything else is a note.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from operator import itemgetter, mul
from pathlib import Path

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.state import OptimizerState, find_states
from rollback.checkpoint.state_digest import place_of_elements
from rollback.disk import RemoteView, pread
from rollback.errors import Finding, RollbackError, Severity
from rollback.files.dcp_file import METADATA_NAME, DcpChunk, DcpEntry, read_dcp_index
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.files.pickle_values import TensorRef, item_size
from rollback.files.safetensors_file import list_tensors
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import open_state_file, read_zip_segment
from rollback.files.torch_tree import LeafKind, PickleSegment, TorchFile

CHUNK_BYTES = 4 << 20  # a multiple of every element's size
WIDE, HALF = b"\x7f\xff", b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"  # highest bytes of elements that are not finite
NOT_FINITE = {"float64": WIDE, "float32": WIDE, "bfloat16": WIDE, "float16": HALF}
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
REMEDY = "go back to an earlier checkpoint: `chronicle watch --once` names one"


class _NotRead(RollbackError):
    """A file with tensors whose elements lie elsewhere than in a zip: torch before 1.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where the elements of a tensor lie in its file; `dtype` is torch's name without `torch.`."""

    keys: Keys
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor that is looked at."""

    file: str
    name: str
    place: TensorPlace
    of_optimizer: bool
    in_state_dict: bool


def check_values(checkpoint: Checkpoint, optimizers: Sequence[OptimizerState]) -> list[Finding]:
    """F11: an ERROR for each file with spoilt numbers, and what was not counted or not looked at as INFO."""
    if RemoteView.opened is not None:
        return [_finding(Severity.INFO, ".", "not looked for NaN: its bytes would be fetched from the store once more")]
    tensors: list[_Tensor] = []
    unread: list[str] = []
    scattered: list[str] = []
    for file in checkpoint.files:
        try:
            for one in _tensors_of(checkpoint.folder / file.path, file.path, optimizers):
                if isinstance(one, str):
                    scattered.append(f"`{one}` of `{file.path}`")
                else:
                    tensors.append(one)
        except _NotRead:
            unread.append(file.path)
        except (RollbackError, OSError):
            continue  # damage has its own finding; files of other kinds hold no tensors that we know
    trained = {one.place.shape for one in tensors if one.of_optimizer}
    spoilt: dict[str, list[str]] = {}
    notes: list[str] = []
    for one in tensors:
        words = _what_is_wrong(checkpoint.folder / one.file, one.place)
        if not words:
            continue
        counts = one.of_optimizer or (one.place.shape in trained if trained else one.in_state_dict and words == "NaN")
        if counts:
            spoilt.setdefault(one.file, []).append(f"`{one.name}` holds {words}")
        else:
            notes.append(f"`{one.name}` of `{one.file}` holds {words}")
    found = [_finding(Severity.ERROR, file, _first_of(said), REMEDY) for file, said in spoilt.items()]
    found += [_finding(Severity.INFO, file, "not looked for NaN: no torch zip") for file in unread]
    if notes:
        found.append(_finding(Severity.INFO, ".", f"{_first_of(notes)}: no trained weight, as far as is known"))
    if scattered:
        more = "" if len(scattered) == 1 else f", and {len(scattered) - 1} tensors more"
        found.append(_finding(Severity.INFO, ".", f"not looked for NaN: {scattered[0]}{more}: not in one piece in the file"))
    return found


def _first_of(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 else f"{said[0]}, and {len(said) - 1} tensors more are not finite"


def _finding(severity: Severity, path: str, message: str, remedy: str | None = None) -> Finding:
    return Finding("F11", severity, path, message, remedy)


# --- which tensors there are


def _tensors_of(path: Path, name: str, optimizers: Sequence[OptimizerState]) -> Iterator[_Tensor | str]:
    """The tensors of floats in a file; of one that does not lie in one piece the name alone."""
    if path.suffix == ".safetensors":
        for keys, ((_, place),) in pieces_in(path):
            if place.shape and place.dtype in NOT_FINITE:
                yield _Tensor(file=name, name=str(keys[0]), place=place, of_optimizer=False, in_state_dict=True)
    elif path.suffix == ".distcp":
        yield from _tensors_in_entries(path, name)
    else:
        yield from _tensors_in_tree(read_state_file(path), name, optimizers)


def _tensors_in_tree(file: TorchFile, name: str, optimizers: Sequence[OptimizerState]) -> Iterator[_Tensor | str]:
    segment = file.segments[0] if len(file.segments) == 1 else None
    if segment is None or segment.layout is None:
        if file.tensors:
            raise _NotRead(name)
        return
    prefixes = [one.prefix for one in optimizers if one.file == name]
    prefixes += [prefix for prefix, _, kind in find_states(file.tree) if kind == "optimizer"]
    tensors = (LeafKind.TENSOR, LeafKind.SCALAR_TENSOR)
    mixed = {leaf.keys[:-1] for leaf in file.leaves() if leaf.kind not in tensors}
    seen: set[tuple[str, int, int]] = set()  # tied weights are one tensor
    for keys, tensor, place in _in_tree(file):
        here = ("" if tensor.storage is None else tensor.storage.key, tensor.storage_offset, tensor.numel)
        if here in seen or not _has_floats(tensor):
            continue
        seen.add(here)
        own = any(keys[: len(prefix)] == tuple(prefix) for prefix in prefixes)
        yield _of(name, keys, place, of_optimizer=own, in_state_dict=keys[:-1] not in mixed)


def _tensors_in_entries(path: Path, name: str) -> Iterator[_Tensor | str]:
    """Each entry of a `.distcp` file is a zip with one tensor."""
    with open_state_file(path) as (fd, size_bytes):
        for entry, chunk in _entries_of(path):
            if chunk.offset + chunk.length > size_bytes:
                yield dotted(entry.keys)  # it lies behind the end: the file was cut, which has its own finding
                continue
            tensor, place = _read_entry(fd, entry.keys, chunk)
            if isinstance(tensor, TensorRef) and _has_floats(tensor):
                own = any(str(key).startswith("optim") for key in entry.keys)
                yield _of(name, entry.keys, place, of_optimizer=own, in_state_dict=True)


def _has_floats(tensor: TensorRef) -> bool:
    return bool(tensor.shape) and tensor.dtype in NOT_FINITE and tensor.numel > 0


def _of(file: str, keys: Keys, place: TensorPlace | None, *, of_optimizer: bool, in_state_dict: bool) -> _Tensor | str:
    name = dotted(keys)
    if place is None:
        return name
    return _Tensor(file=file, name=name, place=place, of_optimizer=of_optimizer, in_state_dict=in_state_dict)


def _in_tree(file: TorchFile) -> Iterator[tuple[Keys, TensorRef, TensorPlace | None]]:
    """Each tensor of a torch file, with its place if its elements are in one piece."""
    segment = file.segments[0] if len(file.segments) == 1 else None
    with open_state_file(file.path) as (fd, _):
        for leaf in file.leaves():
            if isinstance(leaf.value, TensorRef):
                place = None if segment is None else _place(fd, segment, leaf.keys, leaf.value)
                yield leaf.keys, leaf.value, place


def _entries_of(path: Path) -> Iterator[tuple[DcpEntry, DcpChunk]]:
    """Everything in a `.distcp` file."""
    for entry in read_dcp_index(path.parent / METADATA_NAME):
        for chunk in entry.chunks:
            if chunk.file == path.name:
                yield entry, chunk


def _read_entry(fd: int, keys: Keys, chunk: DcpChunk) -> tuple[object, TensorPlace | None]:
    """The value of one chunk, and the place of a tensor in one piece."""
    content, segment = read_zip_segment(fd, chunk.offset, chunk.length, index=0)
    tensor = content.value
    return tensor, _place(fd, segment, keys, tensor) if isinstance(tensor, TensorRef) else None


def _place(fd: int, segment: PickleSegment, keys: Keys, tensor: TensorRef) -> TensorPlace | None:
    """The place of a tensor that lies in one piece; None for any other."""
    reach = 1 + sum((count - 1) * abs(step) for count, step in zip(tensor.shape, tensor.stride, strict=True))
    found = place_of_elements(fd, segment, tensor)
    if found is None or segment.big_endian or reach != tensor.numel:
        return None
    return TensorPlace(keys=keys, dtype=tensor.dtype, shape=tensor.shape, offset=found[0], num_bytes=found[1])


# --- places, for who compares two files

Pieces = Sequence[tuple[Path, TensorPlace]]  # of one tensor, in the order of its elements; none: not known


def pieces_in(path: Path) -> Iterator[tuple[Keys, Pieces]]:
    """The key path of each tensor of a file with the pieces that it lies in; a `.metadata` stands for its directory.

    A tensor of several ranks has as many pieces as its saved parts have rows in one piece; all have the shape of the whole.
    """
    if path.suffix == ".safetensors":
        for name, dtype, shape, offset, num_bytes in list_tensors(path):
            known = SAFETENSORS.get(dtype, dtype)
            place = TensorPlace(keys=(name,), dtype=known, shape=shape, offset=offset, num_bytes=num_bytes)
            yield (name,), ((path, place),)
    elif path.name == METADATA_NAME:
        for entry in read_dcp_index(path):
            if entry.shape:
                yield entry.keys, _pieces_of(path.parent, entry, entry.shape)
    else:
        for keys, _, found in _in_tree(read_state_file(path)):
            yield keys, [(path, place) for place in (found,) if place is not None]


def _pieces_of(directory: Path, entry: DcpEntry, shape: tuple[int, ...]) -> Pieces:
    """The pieces of one entry; none where they are not the whole tensor once."""
    pieces: list[tuple[Path, TensorPlace]] = []
    num_read = 0
    for first, num_elements, piece in sorted(_rows_of(directory, entry, shape), key=itemgetter(0)):
        if first != num_read:
            return ()
        num_read += num_elements
        pieces.append(piece)
    return pieces if num_read == prod(shape) else ()


def _rows_of(
    directory: Path, entry: DcpEntry, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, tuple[Path, TensorPlace]]]:
    """(first element in the whole, number of elements, piece) of each row that lies in one piece in the whole, too."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for chunk in entry.chunks:
        path = directory / chunk.file
        with open_state_file(path) as (fd, _):
            place = _read_entry(fd, entry.keys, chunk)[1]
        if place is None or len(place.shape) != len(shape):
            return
        cut = max((axis for axis, size in enumerate(shape) if place.shape[axis] != size), default=0)
        num_elements = place.shape[cut] * strides[cut]
        num_bytes = num_elements * (item_size(place.dtype) or 1)
        first = sum(map(mul, chunk.start, strides))
        for number, outer in enumerate(product(*map(range, place.shape[:cut]))):
            row = replace(place, shape=shape, offset=place.offset + number * num_bytes, num_bytes=num_bytes)
            yield first + sum(map(mul, outer, strides)), num_elements, (path, row)


def read_pieces(pieces: Pieces, size: int) -> Iterator[bytes]:
    """The bytes of a tensor, `size` at a time and the rest, whatever its pieces are."""
    kept = b""
    for path, place in pieces:
        with open_state_file(path) as (fd, _):
            for at in range(0, place.num_bytes, size):
                kept += pread(fd, min(size, place.num_bytes - at), place.offset + at)
                if len(kept) >= size:
                    yield kept[:size]
                    kept = kept[size:]
    if kept:
        yield kept


# --- the elements


def _what_is_wrong(path: Path, tensor: TensorPlace) -> str:
    """"NaN" or "infinite numbers"; "" where all are finite, and for a mask, in which all others are 0."""
    has_inf = has_others = False
    with open_state_file(path) as (fd, _):
        for chunk in _chunks(fd, tensor):
            if not _may_be_infinite(chunk, tensor.dtype):
                has_others = has_others or bool(chunk.strip(b"\0"))
                continue
            values = decode_floats(chunk, tensor.dtype)
            if any(value != value for value in values):
                return "NaN"
            infinite = inf in values or -inf in values
            has_inf = has_inf or infinite
            has_others = has_others or any(value and abs(value) != inf for value in values)
    return "infinite numbers" if has_inf and has_others else ""


def _chunks(fd: int, tensor: TensorPlace) -> Iterator[bytes]:
    for at in range(0, tensor.num_bytes, CHUNK_BYTES):
        yield pread(fd, min(CHUNK_BYTES, tensor.num_bytes - at), tensor.offset + at)


def _may_be_infinite(chunk: bytes, dtype: str) -> bool:
    size = item_size(dtype) or 1
    highest = chunk[size - 1 :: size]
    return len(highest.translate(None, NOT_FINITE[dtype])) != len(highest)


def decode_floats(chunk: bytes, dtype: str) -> Sequence[float]:
    """The numbers in these bytes; `dtype` is one of `NOT_FINITE`."""
    if dtype == "float16":
        return struct.unpack(f"<{len(chunk) // 2}e", chunk)
    if dtype == "bfloat16":
        wide = bytearray(2 * len(chunk))
        wide[2::4], wide[3::4] = chunk[::2], chunk[1::2]
        chunk = bytes(wide)
    values = array("d" if dtype == "float64" else "f", chunk)
    if sys.byteorder == "big":
        values.byteswap()
    return values
