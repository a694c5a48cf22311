"""The order of samples: the samples that one arm reads at each update, for one seed, as arrays. All randomness is seeded.

A data shard is a run of `shard_samples` neighbouring windows, as a tar holds neighbouring documents; with random samples in
a shard, an empty buffer would equal a full shuffle. The shards of a source are permuted once per study, and the first belong
to the common start. A block of as many seeds as there are slices shares one shuffled shard list and rotates it (a Latin
square), so that every slice is the repeated one once. Lines beyond the last slice are the reserve for skipped and over-drawn
data. Stock orders follow webdataset 1.0.2: shuffled shards, then a sample buffer that starts empty.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from bit_transformer.data.corpora import Corpus, read_corpus
from bit_transformer.errors import TrainerError
from chronicle.data.plan import derive_key, permute
from chronicle.errors import DataError
from experiments.definition import Arm, Order, Profile
from experiments.design import Leg, StudyPlan
from experiments.errors import NoData

Ids: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """The sources of a study with their sizes, and the profile that divides them."""

    sources: Mapping[str, int]  # weight by name
    num_windows: tuple[int, ...]
    profile: Profile
    num_slices: int

    def counts(self, num_batches: int, weights: Sequence[int] | None = None) -> Ids:
        """Samples of each source in each of `num_batches` batches, exact in the sum; shape (num_batches, sources)."""
        weights = tuple(self.sources.values()) if weights is None else tuple(weights)
        cumulative = np.concatenate([[0], np.cumsum(weights)])
        bounds = np.arange(num_batches + 1)[:, None] * self.profile.batch_size * cumulative // cumulative[-1]
        counts: Ids = np.diff(np.diff(bounds, axis=1), axis=0)
        return counts

    def per_slice(self, source: int) -> int:
        """Samples of this source in one slice."""
        weights = tuple(self.sources.values())
        return self.profile.slice_updates * self.profile.batch_size * weights[source] // sum(weights)

    def pool(self, source: int) -> tuple[Ids, Ids]:
        """Return the windows of the start phase, and the data shards for slices (rows), both in the study's fixed order.

        The start takes what it needs but leaves the slices and an equal reserve (or half of what the slices leave). A
        start longer than its share reads it again in a new order.
        """
        name, per_shard = tuple(self.sources)[source], self.profile.shard_samples
        shards = _study_order(self.num_windows[source] // per_shard, per_shard, name)
        size, slices = shards.size, self.per_slice(source) * self.num_slices
        needed = int(self.counts(self.profile.start_updates)[:, source].sum())
        share = min(-(-needed // per_shard), max(size - 2 * slices, (size - slices) // 2, 0) // per_shard)
        if needed and not share:
            raise NoData(
                f"source `{name}` has {size} windows of {self.profile.window_bytes} bytes in whole shards, "
                f"the slices alone need {slices}",
                "fewer or shorter slices, or more text",
            )
        return shards[:share].ravel(), shards[share:]

    def shard_list(self, source: int, block: int) -> Ids:
        """The shuffled list of data shards of a block of seeds; rows of `shard_samples` windows."""
        _, shards = self.pool(source)
        return shards[_list_order(len(shards), source, block)]


@lru_cache(maxsize=8)
def _study_order(num_shards: int, per_shard: int, name: str) -> Ids:
    first = permute(np.arange(num_shards, dtype=np.int64), num_shards, derive_key("study", name)) * per_shard
    rows: Ids = first[:, None] + np.arange(per_shard)
    return rows


@lru_cache(maxsize=8)
def _list_order(num_shards: int, source: int, block: int) -> Ids:
    return permute(np.arange(num_shards, dtype=np.int64), num_shards, derive_key("sort -R", source, block))


def start_order(shape: DataShape, number: int = 0) -> Ids:
    """Ids of the start phase of common checkpoint `number`: (updates, batch, 2) of (source, window)."""
    counts = shape.counts(shape.profile.start_updates)
    return _fill(counts, [_again_and_again(shape.pool(source)[0], source, number) for source in range(len(shape.sources))])


def _again_and_again(windows: Ids, source: int, number: int) -> Iterator[int]:
    own = (number,) if number else ()  # the first one's order is as it was when there was one
    for epoch in itertools.count() if len(windows) else ():
        yield from _shuffled(windows, derive_key("start", source, epoch, *own)).tolist()


def slice_samples(shape: DataShape, source: int, seed: int, logical: int) -> Ids:
    """Shards of slice `logical` (from 1; `num_slices + 1` is the reserve) at this seed, as rows of windows."""
    block, turn = divmod(seed, shape.num_slices)
    physical = logical if logical > shape.num_slices else (logical - 1 + turn) % shape.num_slices + 1
    lines = shape.shard_list(source, block)
    per_slice = shape.per_slice(source) // shape.profile.shard_samples
    if logical > shape.num_slices:
        return lines[per_slice * shape.num_slices : 2 * per_slice * shape.num_slices]  # as much again, and no more
    return cut_slice(lines, physical, per_slice)


def leg_order(shape: DataShape, arm: Arm, leg: Leg, seed: int) -> Ids:
    """Ids of one launch: (updates of the leg, batch, 2). Raises `NoData` where slices or reserve run out."""
    size = shape.profile.slice_updates
    reserve = [_reserve(shape, source, seed, leg.number - 1) for source in range(len(shape.sources))]
    rows: list[Ids] = []
    for position in leg.parts(size):
        number = position.start // size
        streams = [itertools.chain(_slice_stream(shape, arm, number, source, seed, leg), reserve[source])
                   for source in range(len(shape.sources))]
        counts = _counts_of_slice(shape, number * size, leg)[: position.stop - number * size]
        whole = _fill(counts, streams)
        rows.append(whole[position.start - number * size : position.stop - number * size])
    return np.concatenate(rows)


def _counts_of_slice(shape: DataShape, begins: int, leg: Leg) -> Ids:
    """Return samples per source and batch over one slice; after a restart another mixture may apply for some updates."""
    counts, restart = shape.counts(shape.profile.slice_updates), leg.restart
    if restart is None or not restart.ratio:
        return counts
    dip_first = leg.first + leg.data_offset - begins
    dip = range(max(0, dip_first), min(len(counts), dip_first + round(restart.ratio_for * shape.profile.slice_updates)))
    if len(dip):
        weights = [restart.ratio[name] for name in shape.sources]
        counts[dip.start : dip.stop] = shape.counts(len(dip), weights)
    return counts


def _slice_stream(shape: DataShape, arm: Arm, number: int, source: int, seed: int, leg: Leg) -> Iterator[int]:
    """Samples of one source over the slice that the arm reads as its `number`-th (from 0)."""
    if number >= len(arm.slices):
        return iter(())  # beyond the last slice only the reserve is left
    if arm.merged:
        parts = [slice_samples(shape, source, seed, logical).ravel() for logical in arm.slices]
        merged = _shuffled(np.concatenate(parts), derive_key("merged", seed, source))
        per_slice = shape.per_slice(source)
        return iter(merged[number * per_slice : (number + 1) * per_slice].tolist())
    logical = arm.slices[number]
    shards = slice_samples(shape, source, seed, logical)
    again = arm.slices[:number].count(logical)  # a repeated slice is read in a new order each time
    order = leg.restart.order if leg.restart is not None else Order.PLAN
    if order is Order.PLAN:
        return iter(_shuffled(shards.ravel(), derive_key("slice", seed, source, logical, again)).tolist())
    if order is Order.RESHUFFLED:
        return iter(_shuffled(shards.ravel(), derive_key("again", seed, source, logical, again, leg.number)).tolist())
    dice = random.Random(f"{seed}/{source}/{logical}/{leg.number}/{number}")
    lines = [row.tolist() for row in shards]
    dice.shuffle(lines)
    samples = (sample for line in lines for sample in line)
    return shuffle_through_buffer(samples, shape.profile.stock_buffer, shape.profile.stock_initial, dice)


def shuffle_through_buffer(samples: Iterator[int], buffer_size: int, initial: int, dice: random.Random) -> Iterator[int]:
    """Shuffle a stream as webdataset's `.shuffle` does: two in, one out, starting when `initial` are buffered.

    After every start the first samples come from the first `initial` of the stream, so they are nearly in the order of
    the shards. The same random numbers give the same order as webdataset 1.0.2.
    """
    initial, held = min(initial, buffer_size), []
    for sample in samples:
        held.append(sample)
        if len(held) < buffer_size:
            held.extend(one for one in (next(samples, None),) if one is not None)
        if len(held) >= initial:
            yield _take_out(held, dice)
    while held:
        yield _take_out(held, dice)


def _take_out(held: list[int], dice: random.Random) -> int:
    chosen = dice.randint(0, len(held) - 1)
    held[chosen], held[-1] = held[-1], held[chosen]
    return held.pop()


def _shuffled(windows: Ids, key: int) -> Ids:
    return windows[permute(np.arange(len(windows), dtype=np.int64), len(windows), key)]


def _reserve(shape: DataShape, source: int, seed: int, part: int) -> Iterator[int]:
    """Return this launch's part of the lines outside all slices; launches of one arm get disjoint parts."""
    lines = slice_samples(shape, source, seed, shape.num_slices + 1).ravel()[part % shape.num_slices :: shape.num_slices]
    return iter(_shuffled(lines, derive_key("reserve", seed, source)).tolist() if len(lines) else ())


def _fill(counts: Ids, streams: Sequence[Iterator[int]]) -> Ids:
    """Batches with `counts` samples of each source, taken from the streams in order."""
    batches = []
    for row in counts.tolist():
        batch = []
        for source, (number, stream) in enumerate(zip(row, streams, strict=True)):
            taken = [next(stream, None) for _ in range(number)]
            if None in taken:
                raise NoData(f"source number {source} ran out of samples", "fewer or shorter slices, or more text")
            batch += [(source, sample) for sample in taken]
        batches.append(batch)
    return np.asarray(batches, dtype=np.int64).reshape(len(batches), -1, 2)


# --- Slices by line numbers, as the seed cut them

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


# --- The text in windows

Windows: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


def cut_windows(text: bytes, window_bytes: int, name: str) -> Windows:
    """Consecutive windows (N, window_bytes); the incomplete last one is left out. Raises `NoData` where there is none."""
    number = len(text) // window_bytes
    if not number:
        raise NoData(f"source `{name}` has {len(text)} bytes, fewer than one window of {window_bytes}")
    return np.frombuffer(text, dtype=np.uint8)[: number * window_bytes].reshape(number, window_bytes)


def read_shape(plan: StudyPlan) -> tuple[DataShape, tuple[Corpus, ...]]:
    """The corpora of the study, and how many windows each holds."""
    corpora = tuple(_read(name) for name in plan.sources)
    return DataShape(
        sources=plan.sources,
        num_windows=tuple(len(corpus.train) // plan.profile.window_bytes for corpus in corpora),
        profile=plan.profile,
        num_slices=len(plan.study.arms[0].slices),
    ), corpora


def _read(name: str) -> Corpus:
    try:
        return read_corpus(name)
    except (DataError, TrainerError) as problem:
        raise NoData(str(problem), problem.remedy) from problem


def spread(number: int, count: int) -> Ids:
    """At most `count` numbers below `number`, evenly spaced."""
    return np.linspace(0, number - 1, min(count, number)).astype(np.int64)
