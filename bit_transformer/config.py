"""The fields of a recipe: a field's type says what it may hold, and one function checks it where the recipe is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from bit_transformer.errors import BadRecipe


class Bound(NamedTuple):
    """What a number must be, in words and as a test."""

    expected: str
    holds: Callable[[float], bool]


Count = Annotated[int, Bound("a whole number, 1 or more", lambda value: value >= 1)]
Size = Annotated[int, Bound("a whole number, 0 or more", lambda value: value >= 0)]
Amount = Annotated[float, Bound("a number, 0 or more", lambda value: value >= 0)]
Positive = Annotated[float, Bound("a number above 0", lambda value: value > 0)]
BelowOne = Annotated[float, Bound("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, Bound("a number from 0 to 1", lambda value: 0 <= value <= 1)]


def require_fields(config: Any) -> None:
    """Raise BadRecipe for the first field of a dataclass that holds what its type does not allow."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        if not _fits(hint, value):
            raise BadRecipe(f"{name} is {value!r}, expected {_told(hint)}")


def _fits(hint: Any, value: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _fits(parts[0], value) and math.isfinite(value) and parts[1].holds(value)
    if kind is Literal:
        return value in parts
    if kind in (UnionType, Union):
        return any(_fits(part, value) for part in parts)
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(parts[0], one) for one in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(parts[1], one) for one in value.values())
    return type(value) is hint or (hint is float and type(value) is int)


def _told(hint: Any) -> str:
    """What a field of this type holds, in words."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return str(parts[1].expected)
    if kind is Literal:
        return " or ".join(map(str, parts))
    if kind in (UnionType, Union):
        return " or ".join(map(_told, parts))
    if kind is tuple:
        return f"a list of {_told(parts[0])}"
    if kind is dict:
        return f"names, each with {_told(parts[1])}"
    if issubclass(hint, StrEnum):
        return " or ".join(hint)
    words = {type(None): "none", bool: "true or false", str: "a word", int: "a whole number", float: "a number"}
    return words.get(hint, str(hint.__name__))
