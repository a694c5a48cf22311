"""JSON read piece by piece says what `json` says, wherever the pieces end; numbers lie where it says they do."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollback.errors import UnreadableFile
from rollback.files import json_file
from rollback.files.json_file import JsonPart, json_parts, put_part

LEAVES = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
TREES = st.recursive(
    LEAVES | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=6), inner, max_size=12),
    max_leaves=60,
)


def parts_of(text: str, **options: Any) -> list[JsonPart]:
    data = text.encode("utf-8", "surrogatepass")
    with tempfile.TemporaryFile() as file:
        file.write(b"head" + data)
        file.flush()
        return list(json_parts(file.fileno(), 4, len(data), **options))


@settings(max_examples=100, deadline=None)
@given(
    tree=st.dictionaries(st.text(max_size=6), TREES, max_size=8),
    piece=st.integers(80, 200),  # the longest key: six characters of twelve bytes each, and its quotes
    read=st.integers(1, 300),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    levels=st.integers(1, 2),
)
def test_pieces_of_any_size_say_the_same(
    tree: dict[str, Any], piece: int, read: int, indent: int | None, ascii_only: bool, levels: int
) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_only)
    old = json_file.PIECE, json_file.READ
    json_file.PIECE, json_file.READ = piece, read
    try:
        parts = parts_of(text, levels=levels)
    finally:
        json_file.PIECE, json_file.READ = old
    rebuilt: dict[str | int, Any] = {}
    data = b"head" + text.encode("utf-8", "surrogatepass")
    for part in parts:
        put_part(rebuilt, part)
        if part.start >= 0:
            assert json.loads(data[part.start : part.end]) == part.value
    assert json.dumps(rebuilt, sort_keys=True) == json.dumps(_without_empty(tree, levels), sort_keys=True)


def _without_empty(tree: Any, levels: int) -> Any:
    """What has no members has no parts, in the levels that are walked."""
    if not isinstance(tree, dict | list) or levels == 0:
        return tree
    if isinstance(tree, list):
        return [_without_empty(part, levels - 1) for part in tree if part not in ([], {}) or levels == 1]
    return {key: _without_empty(part, levels - 1) for key, part in tree.items() if part not in ([], {}) or levels == 1}


@pytest.mark.parametrize(
    "text",
    ['{"a":1', '{"a" 1}', "[1,]", '{"a":1,}', "[1 2]", '{"a":1} x', "nul", "", "  ", "{1:2}", "[" * 100_000, '{"a":' * 100_000,
     '{"a":' + "1" * 5000 + "}", "{,}", "[[1,2]", '{"a":"b\n"}', "[01]"],
)  # fmt: skip
@pytest.mark.parametrize("levels", [0, 1])
def test_what_is_no_json_is_refused_with_its_byte(text: str, levels: int) -> None:
    with pytest.raises(UnreadableFile, match="invalid JSON at byte"):
        parts_of(text, levels=levels)


def test_text_that_is_not_utf8_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b'{"a": "\xff"}')
        file.flush()
        with pytest.raises(UnreadableFile, match="invalid JSON"):
            list(json_parts(file.fileno(), 0, 10))


def test_a_long_history_is_checked_and_not_kept() -> None:
    log = [{"step": n, "note": "é, },{"} for n in range(40_000)]
    text = json.dumps({"global_step": 5, "log_history": log, "epoch": 1.5}, ensure_ascii=False)
    wanted = {part.keys: part.value for part in parts_of(text, wanted=lambda keys: len(keys) <= 1)}
    assert wanted == {("global_step",): 5, ("epoch",): 1.5}
    assert [part.value for part in parts_of(text) if part.keys[0] == "log_history"] == log
    with pytest.raises(UnreadableFile, match="invalid JSON"):
        parts_of(text.replace('"step": 39000', '"step": 39000.'), wanted=lambda keys: len(keys) <= 1)
