"""The base of every fold: its state is what `__init__` sets, and goes through plain JSON values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, Self

from rollback.records import plain_form


class Fold:
    """A fold that can be stored after any point: folded in two halves it says what it says folded at once."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {name: plain_form(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild the fold from `to_json`; a value takes the type that it has in a fresh fold."""
        fold = cls()
        for name, known in vars(fold).items():
            setattr(fold, name, _like(known, record[name]))
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
