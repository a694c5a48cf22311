"""The readers against generated input: whatever Python pickles reads back equal; whatever is broken is refused."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollback.errors import RollbackError
from rollback.files.pickle_reader import read_pickle
from rollback.files.state_file import read_state_file, write_edited_copy
from rollback.files.torch_tree import LeafKind
from tests.attacks.fuzz import fuzz, opcodes_only, use_pickle

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.booleans() | st.none()
KEYS = st.text(max_size=8) | st.integers(-(2**62), 2**62)
TREES = st.recursive(
    NUMBERS | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)
BUDGET = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@BUDGET
@given(tree=TREES, protocol=st.integers(0, 5))
def test_what_python_pickles_reads_back_equal(tree: Any, protocol: int) -> None:
    """Round trip against the real pickler, in every protocol; bytes need a codec call before protocol 3."""
    read = read_pickle(pickle.dumps(tree, protocol)).value
    assert repr(read) == repr(tree) or read == tree


@BUDGET
@given(tree=st.dictionaries(KEYS, TREES, min_size=1, max_size=4), protocol=st.integers(0, 5), data=st.data())
def test_an_edit_changes_what_it_names_and_nothing_else(
    tree: dict[Any, Any], protocol: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any tree, any number in it, any new value: the real unpickler sees exactly that change."""
    folder = tmp_path_factory.mktemp("edit")
    path = folder / "tree.pkl"
    path.write_bytes(pickle.dumps(tree, protocol))
    file = read_state_file(path)
    numbers = [leaf for leaf in file.leaves() if leaf.kind in (LeafKind.INT, LeafKind.FLOAT)]
    numbers = [leaf for leaf in numbers if leaf.kind is LeafKind.FLOAT or not _in_a_tuple(tree, leaf.keys)]
    if not numbers:
        return
    leaf = data.draw(st.sampled_from(numbers))
    new = data.draw(st.integers(-(2**70), 2**70) if leaf.kind is LeafKind.INT else st.floats(allow_nan=False))
    write_edited_copy(file, {leaf.keys: new}, folder / "new.pkl")
    expected: Any = pickle.loads(path.read_bytes())
    assert repr(pickle.loads((folder / "new.pkl").read_bytes())) == repr(_replaced(expected, leaf.keys, new))


def _in_a_tuple(tree: Any, keys: tuple[Any, ...]) -> bool:
    """Integers right in a tuple keep no place: shapes are such, by the hundred thousand."""
    for key in keys[:-1]:
        tree = tree[key]
    return isinstance(tree, tuple)


def _replaced(tree: Any, keys: tuple[Any, ...], new: Any) -> Any:
    if not keys:
        return new
    if isinstance(tree, dict):
        return {key: _replaced(part, keys[1:], new) if key == keys[0] else part for key, part in tree.items()}
    parts = [_replaced(part, keys[1:], new) if index == keys[0] else part for index, part in enumerate(tree)]
    return type(tree)(parts)


@BUDGET
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        use_pickle(data)
    except RollbackError as problem:
        assert problem.message and math.isfinite(len(problem.message))


@BUDGET
@given(chance=st.randoms(use_true_random=False))
def test_any_row_of_opcodes_is_read_or_refused(chance: Any) -> None:
    try:
        use_pickle(opcodes_only(chance))
    except RollbackError as problem:
        assert problem.message


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    """A small, fixed part of the budget that `python -m tests.attacks.fuzz 200000` runs."""
    outcomes = fuzz(1500, seed, tmp_path)
    assert outcomes["read"] > 50 and outcomes["UnreadableFile"] > 500
