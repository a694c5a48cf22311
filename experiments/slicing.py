"""Slices of a shuffled list of data shards, by lines, as the seed cut them; and what its `sed` really cut.

The seed (003, "Experiment to check the impact of restarts"): `sed -n '1,+3840p'`, `sed -n '3841,+3840p'`, … In GNU sed
`N,+Mp` prints line N *and the next M*: 3,841 lines, the last of which is the next slice's first. Ours are exact. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from experiments.errors import NoData

__all__ = ["cut_slice", "cut_slice_like_sed"]

T = TypeVar("T")
Lines = TypeVar("Lines", bound=Any)  # a list, or an array whose rows are lines


def cut_slice(lines: Lines, number: int, size: int) -> Lines:
    """Slice `number` (from 1) of exactly `size` lines. Raises `NoData` where the list ends before the slice does."""
    first = (number - 1) * size
    if first + size > len(lines):
        raise NoData(
            f"slice {number} needs lines {first + 1} to {first + size}, the shard list has {len(lines)}",
            "fewer or shorter slices, a shorter start, or more text",
        )
    part: Lines = lines[first : first + size]
    return part


def cut_slice_like_sed(lines: Sequence[T], first: int, more: int) -> Sequence[T]:
    """What `sed -n 'FIRST,+MOREp'` prints: line FIRST (from 1) and the next MORE lines, silently fewer at the end."""
    return lines[first - 1 : first + more]
