"""LRs kept as float32 (0-dim tensors, numpy scalars): torch rounds them after every operation, and so is done here.

Sum, difference, product and quotient of two float32 in double precision, rounded to float32, are what float32 arithmetic
gives (53 bits are more than twice 24 and two: Figueroa 1995). Python floats beside them count as float32 too, as in torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from rollback.files.pickle_values import Encoding, StoredFloat

_SINGLE = struct.Struct("<f")


def _rounded(value: float) -> float:
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class Single(float):
    """A float32; what is computed with it is one."""

    __slots__ = ()

    def __new__(cls, value: float) -> Single:
        return float.__new__(cls, _rounded(value))

    def __add__(self, other: float) -> Single:
        return Single(float(self) + _rounded(other))

    __radd__ = __add__

    def __sub__(self, other: float) -> Single:
        return Single(float(self) - _rounded(other))

    def __rsub__(self, other: float) -> Single:
        return Single(_rounded(other) - float(self))

    def __mul__(self, other: float) -> Single:
        return Single(float(self) * _rounded(other))

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> Single:
        return Single(float(self) / _rounded(other))


def as_kept(value: Any, *, rounded: bool = True) -> Any:
    """A copy of a state or of groups in which what the file keeps as float32 is `Single`; with `rounded`, else plain."""
    if isinstance(value, Mapping):
        return {key: as_kept(part, rounded=rounded) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_kept(part, rounded=rounded) for part in value]
    if rounded and is_single(value):
        return Single(value)
    return float(value) if isinstance(value, StoredFloat) else value


def is_single(value: Any) -> bool:
    if isinstance(value, StoredFloat):
        place = value.place
        return place is not None and place.encoding in (Encoding.RAW, Encoding.LATIN1) and place.dtype == "float32"
    return isinstance(value, Single)
