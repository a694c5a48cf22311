"""The JSON form of values that are kept: fields by their names, tuples as lists, enums and paths as text.

What has a `to_json` of its own is asked for it. How a record is read again stands where it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

_AS_IT_IS = (int, float, str, bool, type(None))


def record_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by their names."""
    return {field.name: plain_form(getattr(value, field.name)) for field in fields(value)}


def plain_form(value: Any) -> Any:
    """The value as JSON holds it; floats keep every bit through repr."""
    if type(value) in _AS_IT_IS:
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return record_of(value)
    if isinstance(value, Mapping):
        return {key: plain_form(part) for key, part in value.items()}
    if isinstance(value, tuple | list | deque):
        return [plain_form(part) for part in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
