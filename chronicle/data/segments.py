"""Segments: from which step on the data is read from which position, in which generation of the order.

A run without incidents has one segment (0, 0, 0). A rollback that skips batches appends (step, position + k, same
generation); a reshuffle appends (step, position, generation + 1). They are saved with every checkpoint and never
removed: a later resume that forgot a skip would read the skipped data after all (microsoft/Megatron-DeepSpeed skips
are relative and have no memory). Pure: no clock, no disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronicle.data.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From optimizer step `step` on, batch number `position + (s - step)` is read at step s."""

    step: int
    position: int
    generation: int

    def __post_init__(self) -> None:
        if min(self.step, self.position, self.generation) < 0:
            raise DataError(f"segment with a negative field: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The whole history of positions of one lineage, oldest first."""

    items: tuple[Segment, ...] = (Segment(step=0, position=0, generation=0),)

    def __post_init__(self) -> None:
        if not self.items or self.items[0] != Segment(step=0, position=0, generation=0):
            raise DataError("the first data segment must be step 0, position 0, generation 0")
        for before, after in zip(self.items, self.items[1:], strict=False):
            advance = after.position - (before.position + after.step - before.step)
            if after.step < before.step or advance < 0 or after.generation < before.generation:
                raise DataError(f"data segments go backwards: {before} then {after}")

    def at(self, step: int) -> Segment:
        """Return the segment that governs `step`: the last one that begins at or before it."""
        return [segment for segment in self.items if segment.step <= step][-1]

    def position(self, step: int) -> int:
        """Return the number of the batch read at `step` (0-based)."""
        segment = self.at(step)
        return segment.position + step - segment.step

    def generation_starts(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return (generation, first position) of every generation above 0 in force at `step`, oldest first."""
        starts: list[tuple[int, int]] = []
        known = 0
        for segment in self.items:
            if segment.step <= step and segment.generation > known:
                starts.append((segment.generation, segment.position))
                known = segment.generation
        return tuple(starts)

    def resumed(self, step: int, *, skip_batches: int = 0, reshuffle: bool = False) -> Segments:
        """Return the segments of a launch that starts at `step`, with the skip and the reshuffle asked for."""
        if skip_batches < 0:
            raise DataError(f"skip_batches is {skip_batches}, expected 0 or more")
        kept = tuple(segment for segment in self.items if segment.step <= step)
        if not skip_batches and not reshuffle:
            return Segments(items=kept)
        position = Segments(items=kept).position(step) + skip_batches
        return Segments(items=(*kept, Segment(
            step=step, position=position, generation=kept[-1].generation + int(reshuffle))))

    def to_json(self) -> list[list[int]]:
        """Return [[step, position, generation], …]."""
        return [[segment.step, segment.position, segment.generation] for segment in self.items]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[int]] | Any) -> Segments:
        """Read what `to_json` wrote. Raises DataError on anything else."""
        if isinstance(data, Mapping | str) or not all(len(row) == 3 for row in data):
            raise DataError(f"data segments are {data!r}, expected rows of step, position, generation")
        return cls(items=tuple(Segment(step=int(s), position=int(p), generation=int(g)) for s, p, g in data))
