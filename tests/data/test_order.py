"""Keyed permutations: every position once, the same everywhere, any place at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronicle.data.plan import derive_key, permute

PINNED = [2, 3, 1, 0, 5, 4, 8, 7, 11, 10, 6, 9]
PINNED_KEY = 18164866893799164668


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_holds_every_index_once(n: int, key: int) -> None:
    """A permutation of [0, n) is a bijection for every n and key; otherwise samples repeat or are lost."""
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(n=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_part_is_mapped_as_in_the_whole(n: int, key: int, data: st.DataObject) -> None:
    """Mapping some positions alone gives what mapping them together gives: order needs no history."""
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = permute(positions, n, key)
    assert [int(permute(positions[i : i + 1], n, key)[0]) for i in range(len(positions))] == together.tolist()
    assert ((together >= 0) & (together < n)).all()


def test_order_is_the_written_one() -> None:
    """The numbers are pinned: a changed permutation would silently change the data of every resumed run."""
    assert permute(np.arange(12), 12, derive_key(7, "code", 0)).tolist() == PINNED
    assert derive_key(7, "code", 0) == PINNED_KEY


def test_different_keys_give_different_orders() -> None:
    """A second epoch is shuffled anew."""
    first, second = (permute(np.arange(1000), 1000, derive_key(0, "code", epoch)) for epoch in (0, 1))
    assert (first == second).mean() < 0.01


def test_neighbours_are_torn_apart() -> None:
    """Consecutive positions land far from each other: mean distance near n/3, as for random pairs."""
    order = permute(np.arange(100_000), 100_000, 3)
    assert np.abs(np.diff(order)).mean() == pytest.approx(100_000 / 3, rel=0.03)


@pytest.mark.parametrize("positions", [[-1], [12]])
def test_position_outside_is_refused(positions: list[int]) -> None:
    """A wrong position is an error, not some other sample."""
    with pytest.raises(ValueError, match=r"outside \[0, 12\)"):
        permute(np.array(positions), 12, 0)
