"""The base of every fold: its state is what `__slots__` names, and goes through plain JSON values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

from rollback.records import plain_form


class Fold:
    """A fold that can be stored after any point: folded in two halves it says what it says folded at once."""

    __slots__: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values; floats keep every bit through repr."""
        return {name: plain_form(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild the fold from `to_json`; a value takes the type that it has in a fresh fold."""
        fold = cls()
        for name in cls.__slots__:
            setattr(fold, name, _like(getattr(fold, name), record[name]))
        return fold


def _like(known: Any, value: Any) -> Any:
    if isinstance(known, Fold):
        return type(known).from_json(value)
    if isinstance(known, Enum):
        return type(known)(value)
    if isinstance(value, list):
        items = [tuple(item) if isinstance(item, list) else item for item in value]
        return deque(items, maxlen=known.maxlen) if isinstance(known, deque) else items
    return value
