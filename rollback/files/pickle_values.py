"""The values read from a pickle: numbers with their byte offsets, descriptions of tensors and arrays, known calls.

Nothing is imported or called: a global stays a name, and a call becomes a description. Element types are torch's and
numpy's, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rollback.errors import PlanRefused


class Encoding(Enum):
    """How a number is encoded at its place."""

    OPCODE = "opcode"  # a pickle constant: opcode byte and argument
    RAW = "raw"  # bytes of a numpy scalar or of a tensor element, in `dtype`
    LATIN1 = "latin1"  # the same bytes as UTF-8 text: protocol 2 has no bytes literal
    JSON = "json"  # digits in a JSON text


class NumberPlace(NamedTuple):
    """Where one number lies: byte `offset` and `width` inside segment `segment` of the file.

    For `Encoding.OPCODE` and `LATIN1` the offset counts from the start of the pickle and covers the opcode;
    for a tensor element (`record` is set) it counts from the start of that zip record or of the file.
    """

    segment: int
    offset: int
    width: int
    encoding: Encoding
    dtype: str = ""
    record: str | None = None


# The place of a pickle constant packed into one int (segment, offset in 48 bits, width in 16): there may be millions.
Spot = int


class StoredFloat(float):
    """A float read from a pickle; `place` says where its bytes are, None when it cannot be edited."""

    __slots__ = ("at",)
    at: Spot | NumberPlace | None

    def __new__(cls, value: float, place: NumberPlace | None) -> StoredFloat:
        self = float.__new__(cls, value)
        self.at = place
        return self

    @property
    def place(self) -> NumberPlace | None:
        """Where its bytes are; None when it cannot be edited."""
        return _place(self.at)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)


class StoredInt(int):
    """An int read from a pickle; `place` says where its bytes are, None when it cannot be edited."""

    at: Spot | NumberPlace | None

    def __new__(cls, value: int, place: NumberPlace | None) -> StoredInt:
        self = int.__new__(cls, value)
        self.at = place
        return self

    @property
    def place(self) -> NumberPlace | None:
        """Where its bytes are; None when it cannot be edited."""
        return _place(self.at)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _place(at: Spot | NumberPlace | None) -> NumberPlace | None:
    if at is None or isinstance(at, NumberPlace):
        return at
    return NumberPlace(at >> 64, (at >> 16) & 0xFFFFFFFFFFFF, at & 0xFFFF, Encoding.OPCODE)


@dataclass(frozen=True, slots=True)
class Global:
    """A name that `pickle.load` would import; here it stays a name."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of a class this package does not model: its name and everything the pickle says about it.

    `items` are its dict items, `elements` its list elements. Identity is the object's own, so it can be a dict key.
    """

    name: str
    args: tuple[object, ...] = ()
    state: object = None
    items: dict[object, object] = field(default_factory=dict)
    elements: list[object] = field(default_factory=list)

    def children(self) -> dict[object, object]:
        """Named parts in one mapping: attributes, then dict items; empty when the state is not a mapping."""
        attributes = self.state if isinstance(self.state, dict) else {}
        return {**attributes, **self.items}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A tensor storage named by a persistent id: `key` names its record, `numel` counts elements of `dtype`."""

    dtype: str
    key: str
    location: str
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """A tensor without its bytes. Shape and stride in elements.

    `value` is the element of a 0-dim tensor where it could be read, else None.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: StorageRef | None
    storage_offset: int
    value: StoredFloat | StoredInt | bool | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True, eq=False)
class ArrayRef:
    """A numpy array in a pickle: `content` holds its bytes when they lie in the pickle itself.

    The call that allocates the array makes it empty; the BUILD opcode that follows fills it. `elements` are those of an
    array of objects.
    """

    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    content: bytes | None = None
    elements: list[object] = field(default_factory=list)


# --- Element types: numbers from and to bytes

_FORMATS = {
    "float64": "d", "float32": "f", "float16": "e",
    "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip
_ITEM_SIZES = {
    "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "quint8": 1, "qint8": 1, "qint32": 4,
}  # fmt: skip


def item_size(dtype: str) -> int | None:
    """Bytes of one element of `dtype` (a torch name without `torch.`), or None when the type is not known."""
    code = _FORMATS.get(dtype)
    return struct.calcsize("<" + code) if code else _ITEM_SIZES.get(dtype)


def decode_number(raw: bytes, dtype: str, *, big_endian: bool = False) -> float | int | bool | None:
    """The value of one element, or None for types without a plain Python value (complex, float8, quantised)."""
    order = ">" if big_endian else "<"
    if dtype == "bfloat16" and len(raw) == 2:
        padded = raw + b"\0\0" if big_endian else b"\0\0" + raw
        return float(struct.unpack(order + "f", padded)[0])
    code = _FORMATS.get(dtype)
    if code is None or len(raw) != struct.calcsize("<" + code):
        return None
    value: float | int | bool = struct.unpack(order + code, raw)[0]
    return value


def encode_number(value: float | int, dtype: str) -> bytes:
    """The little-endian bytes of `value` as `dtype`; PlanRefused when the type cannot hold it."""
    try:
        if dtype == "bfloat16":
            return _bfloat16_bytes(float(value))
        code = _FORMATS[dtype]
        return struct.pack("<" + code, float(value) if code in "dfe" else value)
    except (struct.error, OverflowError, KeyError) as problem:
        raise PlanRefused(f"{value!r} cannot be stored as {dtype}: {problem}") from None


def _bfloat16_bytes(value: float) -> bytes:
    bits = int.from_bytes(struct.pack("<f", value), "little")
    if value != value:
        return b"\xc0\x7f"
    bits += 0x7FFF + ((bits >> 16) & 1)
    return ((bits >> 16) & 0xFFFF).to_bytes(2, "little")


# --- Calls whose meaning is known

_TextPlace = Callable[[str], NumberPlace | None]

MAX_DIMENSIONS = 64

_STORAGE_DTYPES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "uint8", "_UntypedStorage": "uint8",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8", "QInt8Storage": "qint8", "QInt32Storage": "qint32",
}  # fmt: skip
_NUMPY_KINDS = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
}  # fmt: skip
_ENCODERS = {"_codecs.encode"}
_SCALARS = {"numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"}
_ARRAYS = {"numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"}
_DICTS = {"collections.OrderedDict", "builtins.dict", "__builtin__.dict", "collections.Counter"}


class Latin1Bytes(bytes):
    """Bytes that protocol 2 wrote as text; `place` is that of the text literal, None when it is shared or not found."""

    place: NumberPlace | None = None


class RawBytes(bytes):
    """A bytes literal together with its place."""

    place: NumberPlace | None = None


def reduce_global(name: str, args: tuple[object, ...], text_place: _TextPlace) -> object:
    """The value that a call of global `name` with `args` describes.

    `text_place` finds the place of a text literal that was just read (for bytes kept as text).
    """
    if name in _DICTS:
        return _ordered_dict(args)
    if name == "collections.defaultdict":
        return {}
    if name in ("builtins.bytes", "__builtin__.bytes") and not args:
        return b""  # protocols 0 to 2 have no literal for it
    if name.startswith("torch._utils._rebuild_") and name in _TENSORS:
        return _TENSORS[name](args) or Opaque(name, args)
    if name in _ENCODERS:
        return _encoded(args, text_place) or Opaque(name, args)
    if name in _SCALARS:
        return _numpy_scalar(name, args)
    if name in _ARRAYS:
        return ArrayRef()
    if name == "torch.Size" and len(args) == 1 and isinstance(args[0], (tuple, list)):
        return tuple(args[0])
    return Opaque(name, args)


def build_state(target: object, state: object) -> None:
    """Set `state` on `target`; attributes of an OrderedDict or a tensor carry no training state and are dropped."""
    if isinstance(target, ArrayRef):
        _fill_array(target, state)
    elif isinstance(target, Opaque):
        if isinstance(target.state, dict) and isinstance(state, dict):
            target.state.update(state)
        else:
            target.state = state


def storage_from_persistent_id(pid: object) -> StorageRef | None:
    """The storage that a torch persistent id `('storage', type, key, location, numel[, view])` names."""
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        return None
    kind, key, location, numel = pid[1:5]
    if not (isinstance(kind, Global) and isinstance(key, str) and isinstance(numel, int)):
        return None
    dtype = _STORAGE_DTYPES.get(kind.name)
    return StorageRef(dtype, key, str(location), int(numel)) if dtype and numel >= 0 else None


def _ordered_dict(args: tuple[object, ...]) -> object:
    pairs = args[0] if args else ()
    if isinstance(pairs, dict):
        return dict(pairs)
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        return Opaque("collections.OrderedDict", args)
    if not all(isinstance(p[0], (str, int, float, bytes)) for p in pairs):
        return Opaque("collections.OrderedDict", args)
    return {p[0]: p[1] for p in pairs}


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        return None
    if not all(isinstance(v, int) and v >= 0 for v in value):
        return None
    return tuple(int(v) for v in value)


def _tensor(args: tuple[object, ...], dtype: str | None = None) -> TensorRef | None:
    if len(args) < 4:
        return None
    storage, offset, shape, stride = args[0], args[1], _sizes(args[2]), _sizes(args[3])
    if not isinstance(offset, int) or offset < 0 or shape is None or stride is None or len(shape) != len(stride):
        return None
    known = storage if isinstance(storage, StorageRef) else None
    name = dtype or (known.dtype if known else "unknown")
    return TensorRef(name, shape, stride, known, int(offset))


def _tensor_v3(args: tuple[object, ...]) -> TensorRef | None:
    dtype = args[6] if len(args) > 6 else None
    return _tensor(args, dtype.name if isinstance(dtype, Global) else None)


def _parameter(args: tuple[object, ...]) -> object:
    return args[0] if args and isinstance(args[0], TensorRef) else None


_TENSORS: dict[str, Callable[[tuple[object, ...]], object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}


def _encoded(args: tuple[object, ...], text_place: _TextPlace) -> bytes | None:
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        return None
    try:
        raw = Latin1Bytes(args[0].encode("latin1"))
    except UnicodeEncodeError:
        return None
    raw.place = text_place(args[0])
    return raw


def _numpy_dtype(value: object) -> tuple[str, bool] | None:
    """(element type, big-endian) of a described numpy dtype, or None when it is no plain number."""
    if not isinstance(value, Opaque) or value.name != "numpy.dtype" or not value.args:
        return None
    name = _NUMPY_KINDS.get(str(value.args[0]))
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "<"
    return (name, order == ">") if name else None


def _numpy_scalar(name: str, args: tuple[object, ...]) -> object:
    if len(args) != 2 or not isinstance(args[1], bytes):
        return Opaque(name, args)
    dtype = _numpy_dtype(args[0])
    value = decode_number(args[1], dtype[0], big_endian=dtype[1]) if dtype else None
    if dtype is None or value is None:
        return Opaque(name, args)
    place = _scalar_place(args[1], dtype)
    if isinstance(value, bool):
        return value
    return StoredFloat(value, place) if isinstance(value, float) else StoredInt(value, place)


def _scalar_place(raw: bytes, dtype: tuple[str, bool]) -> NumberPlace | None:
    place = raw.place if isinstance(raw, (Latin1Bytes, RawBytes)) else None
    if place is None or dtype[1] or len(raw) < 2:  # one-byte literals are interned by CPython: they may be shared
        return None
    encoding = Encoding.LATIN1 if isinstance(raw, Latin1Bytes) else Encoding.RAW
    return NumberPlace(place.segment, place.offset, place.width, encoding, dtype[0])


def _fill_array(target: ArrayRef, state: object) -> None:
    if not (isinstance(state, tuple) and len(state) == 5):
        return
    shape, dtype, content = _sizes(state[1]), _numpy_dtype(state[2]), state[4]
    if shape is not None and dtype is not None:
        target.dtype, target.shape = dtype[0], shape
        target.content = content if isinstance(content, bytes) else None
    elif isinstance(content, list):
        target.elements = content
