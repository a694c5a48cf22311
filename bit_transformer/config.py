"""The fields of a recipe: a field's type says what it may hold, and one function checks it where the recipe is made."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        fits, expected = _judge(hint, value)
        if not fits:
            raise BadRecipe(f"{name} is {value!r}, expected {expected}")


def _judge(hint: Any, value: Any) -> tuple[bool, str]:
    """Whether a field of this type may hold the value, and in words what it holds."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        is_number, _ = _judge(parts[0], value)
        return is_number and math.isfinite(value) and parts[1].holds(value), parts[1].expected
    if kind is Literal:
        return value in parts, " or ".join(map(str, parts))
    if kind in (UnionType, Union):
        each = [_judge(part, value) for part in parts]
        return any(fits for fits, _ in each), " or ".join(expected for _, expected in each)
    if kind in (tuple, dict):
        held = value.values() if isinstance(value, dict) else value
        inner = parts[0] if kind is tuple else parts[1]
        fits = isinstance(value, kind) and all(_judge(inner, one)[0] for one in held)
        return fits, f"{'a list of' if kind is tuple else 'names, each with'} {_judge(inner, None)[1]}"
    words = {type(None): "none", bool: "true or false", str: "a word", int: "a whole number", float: "a number"}
    return type(value) is hint or (hint is float and type(value) is int), words.get(hint, hint.__name__)
