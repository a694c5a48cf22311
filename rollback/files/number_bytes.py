"""The element types whose single values this package can decode and encode: torch and numpy dtypes, little-endian.

bfloat16 is the upper half of a float32; torch rounds to nearest even when it narrows, and so does `encode_number`.
"""

from __future__ import annotations

import struct

from rollback.errors import PlanRefused

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
