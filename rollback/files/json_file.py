"""Numbers in a JSON text replaced where they stand: order, indentation and everything else stay as people wrote them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeAlias

Keys: TypeAlias = tuple[str | int, ...]

MAX_CHARACTERS = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[^\s,\]}]+")


class NotPlainJson(ValueError):
    """The text is no JSON object, names a key twice, or is far too large or deep; the message says which."""


def parse_object(text: str) -> dict[str, Any]:
    """The object that the text holds; a key that is there twice is refused, since readers disagree on which one counts."""
    if len(text) > MAX_CHARACTERS:
        raise NotPlainJson(f"larger than {MAX_CHARACTERS} characters")
    try:
        found = json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise NotPlainJson("nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise NotPlainJson(f"{problem.msg} in line {problem.lineno}") from None
    if not isinstance(found, dict):
        raise NotPlainJson("not an object")
    return found


def replace_numbers(text: str, values: Mapping[Keys, float | int]) -> str:
    """The text with the numbers at these key paths replaced; every path must lead to a number."""
    parse_object(text)
    spans: dict[Keys, tuple[int, int]] = {}
    _scan(text, 0, (), spans)
    for keys, value in sorted(values.items(), key=lambda item: -spans[item[0]][0]):
        start, end = spans[keys]
        text = text[:start] + json.dumps(value) + text[end:]
    return text


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twins = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise NotPlainJson(f"the key {twins[0]!r} is there twice")
    return found


def _scan(text: str, at: int, keys: Keys, spans: dict[Keys, tuple[int, int]]) -> int:
    """Note where every number, true, false and null of the value at `at` lies; returns the end. The text is valid."""
    at = _skip(text, at)
    if text[at] == '"':
        return int(scanstring(text, at + 1)[1])
    if text[at] not in "{[":
        found = _WORD.match(text, at)
        assert found is not None
        spans[keys] = found.span()
        return found.end()
    is_object, index = text[at] == "{", 0
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        key: str | int = index
        if is_object:
            key, at = scanstring(text, at + 1)
            at = _skip(text, at) + 1  # the colon
        at = _skip(text, _scan(text, at, (*keys, key), spans))
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1
    return at + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
