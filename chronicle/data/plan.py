"""The data plan: (plan, segments, step) -> the exact samples of that step's global batch. Pure.

Sample i of epoch e of a source is a keyed permutation; the mixture is cumulative apportionment in integers, so every
batch has the exact ratio within one sample and the number of samples drawn before any batch is O(1). World size and
worker count do not enter: a rank takes its slice of the global batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chronicle.errors import DataError

_ROUNDS = 4
_MULTIPLY_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_2 = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT_29 = np.uint64(29)
_SHIFT_32 = np.uint64(32)

SampleIds: TypeAlias = NDArray[np.int64]


def derive_key(*parts: object) -> int:
    """Return a 64-bit key of the parts; equal parts give equal keys on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(positions: SampleIds, n: int, key: int) -> SampleIds:
    """Map positions in [0, n) through the permutation of `key`; the shape is kept. Raises ValueError outside [0, n).

    Constant memory, any position in constant time. A balanced Feistel network over the smallest even number of bits that
    holds n, repeated until the value is below n. For shuffling, not for secrecy.
    """
    if n < 1:
        raise ValueError(f"permutation of {n} elements")
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise ValueError(f"position outside [0, {n})")
    return _walk(positions.astype(np.uint64), n, _round_keys([key]))


def permute_rows(n: int, keys: Sequence[int]) -> SampleIds:
    """Return the whole permutation of [0, n) for each key, one per row: the result of `permute` for 0 … n − 1."""
    rows = np.repeat(np.arange(n, dtype=np.uint64)[None], len(keys), axis=0)
    round_keys = [np.broadcast_to(column[:, None], rows.shape).ravel() for column in _round_keys(keys)]
    return _walk(rows.ravel(), n, round_keys).reshape(rows.shape)


def _round_keys(keys: Sequence[int]) -> list[NDArray[np.uint64]]:
    """Return one array per round, with one entry per key."""
    return [np.array([derive_key(key, number) for key in keys], dtype=np.uint64) for number in range(_ROUNDS)]


def _walk(values: NDArray[np.uint64], n: int, round_keys: list[NDArray[np.uint64]]) -> SampleIds:
    """Encrypt until every value is below n. Round keys have one entry for all values, or one per value."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    values = _encrypt(values, half_bits, round_keys)
    outside = values >= np.uint64(n)
    while outside.any():
        values[outside] = _encrypt(values[outside], half_bits, [
            keys if len(keys) == 1 else keys[outside] for keys in round_keys])
        outside = values >= np.uint64(n)
    return values.astype(np.int64)


def _encrypt(values: NDArray[np.uint64], half_bits: int, round_keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        mixed = (right ^ round_key) * _MULTIPLY_1
        mixed = (mixed ^ (mixed >> _SHIFT_29)) * _MULTIPLY_2
        left, right = right, left ^ ((mixed ^ (mixed >> _SHIFT_32)) & mask)
    return (left << shift) | right


# --- Segments: positions and generations across restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From optimizer step `step` on, batch number `position + (s - step)` is read at step s.

    A rollback that skips k batches adds a segment with position + k; a reshuffle adds one with generation + 1.
    """

    step: int
    position: int
    generation: int

    def __post_init__(self) -> None:
        if min(self.step, self.position, self.generation) < 0:
            raise DataError(f"segment with a negative field: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """All segments of one lineage, oldest first. A run without incidents has one segment (0, 0, 0).

    They are saved with every checkpoint and are not removed: a later resume without them would read skipped data after all
    (skips of microsoft/Megatron-DeepSpeed are relative and are not stored).
    """

    items: tuple[Segment, ...] = (Segment(step=0, position=0, generation=0),)

    def __post_init__(self) -> None:
        if not self.items or self.items[0] != Segment(step=0, position=0, generation=0):
            raise DataError("the first data segment must be step 0, position 0, generation 0")
        for before, after in zip(self.items, self.items[1:], strict=False):
            advance = after.position - (before.position + after.step - before.step)
            if after.step < before.step or advance < 0 or after.generation < before.generation:
                raise DataError(f"data segments go backwards: {before} then {after}")

    def at(self, step: int) -> Segment:
        """Return the segment that applies at `step`: the last one that begins at or before it."""
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


# --- The plan

PLAN_VERSION = 1


class PlanChanged(DataError):
    """The stored plan and the present plan differ; the message lists the fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of the mixture: number of samples, digest of their content, integer weight."""

    name: str
    num_samples: int
    digest: str
    weight: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"source `{self.name}` is empty", "build it again, or remove it from the mixture")
        if self.weight < 1:
            raise DataError(f"source `{self.name}` has weight {self.weight}, expected a whole number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Everything that determines the order of the data. `plan_hash` identifies it."""

    seed: int
    batch_size: int
    sources: tuple[SourceSpec, ...]

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names or len(set(names)) != len(names):
            raise DataError(f"sources of the plan are {names}, expected one or more with different names")
        if self.batch_size < 1:
            raise DataError(f"batch size is {self.batch_size}, expected 1 or more")

    @property
    def plan_hash(self) -> str:
        """Hex sha256 over the canonical JSON of the plan."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values; sources in mixture order."""
        return {"v": PLAN_VERSION, "seed": self.seed, "batch_size": self.batch_size,
                "sources": [asdict(source) for source in self.sources]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataPlan:
        """Read what `to_json` wrote; an unknown version is refused with both named."""
        if data.get("v") != PLAN_VERSION:
            raise DataError(f"data plan has version {data.get('v')}, this program reads {PLAN_VERSION}")
        return cls(seed=data["seed"], batch_size=data["batch_size"],
                   sources=tuple(SourceSpec(**source) for source in data["sources"]))

    def drawn_before(self, position: int) -> tuple[int, ...]:
        """Return how many samples of each source the first `position` batches hold. Exact, O(sources)."""
        total = sum(source.weight for source in self.sources)
        cumulative, bounds = 0, [0]
        for source in self.sources:
            cumulative += source.weight
            bounds.append(position * self.batch_size * cumulative // total)
        return tuple(after - before for before, after in itertools.pairwise(bounds))

    def batch_ids(self, step: int, segments: Segments = Segments()) -> SampleIds:
        """Return the global batch of `step`: rows (source number, sample index), shape (batch_size, 2)."""
        batch: SampleIds = self.block_ids(step, 1, segments)[0]
        return batch

    def block_ids(self, first_step: int, count: int, segments: Segments = Segments()) -> SampleIds:
        """Return the global batches of `count` steps, shape (count, batch_size, 2). Faster than one call per step."""
        cuts = sorted({first_step, first_step + count, *(segment.step for segment in segments.items
                                                         if first_step < segment.step < first_step + count)})
        return np.concatenate([self._run_ids(first, end - first, segments) for first, end in itertools.pairwise(cuts)])

    def _run_ids(self, first_step: int, count: int, segments: Segments) -> SampleIds:
        """Return the batches of steps within one segment, whose positions are contiguous."""
        position, starts = segments.position(first_step), segments.generation_starts(first_step)
        drawn = np.array([self.drawn_before(position + t) for t in range(count + 1)], dtype=np.int64)
        counts = np.diff(drawn, axis=0)  # (count, sources)
        slots = np.cumsum(counts, axis=1) - counts  # start of each source in its batch, before shuffling
        batches = np.empty((count, self.batch_size, 2), dtype=np.int64)
        for number, source in enumerate(self.sources):
            draws = np.arange(drawn[0, number], drawn[-1, number], dtype=np.int64)
            begun = tuple((generation, self.drawn_before(start)[number]) for generation, start in starts)
            t = np.repeat(np.arange(count), counts[:, number])
            slot = slots[t, number] + draws - drawn[t, number]
            batches[t, slot, 0] = number
            batches[t, slot, 1] = sample_indices(draws, source.num_samples, (self.seed, source.name), begun)
        generation = segments.at(first_step).generation
        order = permute_rows(self.batch_size, [
            derive_key(self.seed, "batch", position + t, generation) for t in range(count)])
        shuffled: SampleIds = batches[np.arange(count)[:, None], order]
        return shuffled

    def require_same(self, stored: Mapping[str, Any]) -> None:
        """Raise PlanChanged, naming every field that differs, when `stored` is not this plan."""
        present = self.to_json()
        if present != dict(stored):
            raise PlanChanged("the data plan changed since the checkpoint: " + "; ".join(_differences(stored, present)),
                              "resume with the stored plan, or start a new run with the new one")


def sample_indices(draws: SampleIds, num_samples: int, key: tuple[object, ...],
                   begun: Sequence[tuple[int, int]] = ()) -> SampleIds:
    """Map a source's draw numbers (0, 1, 2, … over all epochs) to sample indices.

    `begun` holds (generation, draw at which it began), oldest first. A generation that begins inside an epoch permutes
    only the samples that the epoch had not drawn yet, so none repeats; later epochs use a new permutation.
    """
    indices = np.empty_like(draws)
    epochs = draws // num_samples
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        indices[rows] = _epoch_indices(draws[rows] - epoch * num_samples, num_samples, key, int(epoch), begun)
    return indices


def _epoch_indices(offsets: SampleIds, num_samples: int, key: tuple[object, ...], epoch: int,
                   begun: Sequence[tuple[int, int]]) -> SampleIds:
    base = max([generation for generation, draw in begun if draw <= epoch * num_samples], default=0)
    inside = [(generation, draw - epoch * num_samples) for generation, draw in begun
              if epoch * num_samples < draw < (epoch + 1) * num_samples]
    for generation, start in reversed(inside):  # newest first: each permutes the remainder at its start
        later = offsets >= start
        moved = permute(offsets[later] - start, num_samples - start, derive_key(*key, epoch, generation, "rest"))
        offsets = offsets.copy()
        offsets[later] = moved + start
    return permute(offsets, num_samples, derive_key(*key, epoch, base))


def step_digest(ids: SampleIds) -> str:
    """Return 16 hex digits of the global batch's ids: two runs with equal digests saw the same data in that step."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    found = []
    for field in sorted({*stored, *present}):
        old, new = stored.get(field), present.get(field)
        if old == new:
            continue
        if field == "sources" and isinstance(old, list) and isinstance(new, list):
            by_name = {source["name"]: source for source in old}, {source["name"]: source for source in new}
            for name in sorted({*by_name[0], *by_name[1]}):
                if by_name[0].get(name) != by_name[1].get(name):
                    found.append(f"source `{name}` was {by_name[0].get(name)}, is {by_name[1].get(name)}")
            if not found:
                found.append("order of the sources")
        else:
            found.append(f"{field} was {old}, is {new}")
    return found
