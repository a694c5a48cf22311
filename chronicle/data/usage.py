"""What the lineage read: repeats, skips and re-reads of every restart, computed from the plan.

A launch reads the batch positions of its steps, through its segments. A later launch that starts at step r cuts every
earlier reading to the steps below r: samples that only abandoned weights saw are *re-read*, not repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from chronicle.data.plan import DataPlan, Segments, sample_indices
from chronicle.errors import DataError
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import DataStart, EntryKind, events_of
from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one launch read: optimizer steps `first_step` … `end_step` − 1."""

    launch: int
    first_step: int
    end_step: int
    segments: Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLine:
    """One restart in numbers; counts are samples, per source where it says so."""

    launch: int
    from_step: int
    to_step: int
    position_before: int
    position_after: int
    reread: int
    skipped: int
    skipped_by_source: dict[str, int]
    reshuffled: bool

    def text(self) -> str:
        """Return the sentence for the journal."""
        parts = ", ".join(f"{name} {count:,}" for name, count in self.skipped_by_source.items() if count)
        skipped = f"skips {self.skipped:,} samples" + (f" ({parts})" if parts else "")
        return (f"launch {self.launch}: opt_step {self.from_step}→{self.to_step}, data_pos "
                f"{self.position_before}→{self.position_after}: re-reads {self.reread:,}, {skipped}"
                + (", rest of the epoch reshuffled" if self.reshuffled else ""))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """Use of one source over the lineage: samples drawn, distinct ones among them, and the fraction not yet seen."""

    name: str
    num_samples: int
    drawn: int
    distinct: int
    epochs: float
    unseen_fraction: float

    @property
    def repeats(self) -> int:
        """Return how many draws repeated an earlier sample."""
        return self.drawn - self.distinct


def keep_lineage(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings of the steps that the present weights descend from: later launches cut earlier ones."""
    kept: list[Reading] = []
    for reading in readings:
        kept = [_until(old, reading.first_step) for old in kept if old.first_step < reading.first_step]
        kept.append(reading)
    return kept


def restart_lines(plan: DataPlan, readings: Sequence[Reading]) -> list[RestartLine]:
    """Return one line for every launch after the first."""
    lines = []
    for number, reading in enumerate(readings[1:], 1):
        before = readings[number - 1]
        kept = keep_lineage(readings[:number])
        segment = reading.segments.at(reading.first_step)
        owner = next((old for old in kept if old.first_step < reading.first_step <= old.end_step), before)
        natural = owner.segments.resumed(reading.first_step).position(reading.first_step)
        position = reading.segments.position(reading.first_step)
        skipped: list[int] = [after - earlier for earlier, after in zip(
            plan.drawn_before(natural), plan.drawn_before(position), strict=True)]
        reshuffled = (segment.step == reading.first_step
                      and segment.generation > owner.segments.at(reading.first_step).generation)
        reread = 0 if reshuffled else sum(_positions_from(old, reading.first_step, position) for old in kept)
        lines.append(RestartLine(
            launch=reading.launch, from_step=before.end_step, to_step=reading.first_step,
            position_before=before.segments.position(before.end_step), position_after=position,
            reread=reread * plan.batch_size, skipped=sum(skipped),
            skipped_by_source={source.name: count for source, count in zip(plan.sources, skipped, strict=True)},
            reshuffled=reshuffled))
    return lines


def source_use(plan: DataPlan, readings: Sequence[Reading]) -> list[SourceUse]:
    """Count the lineage's draws of each source exactly; needs one byte of memory per sample."""
    drawn = [0] * len(plan.sources)
    seen = [np.zeros(source.num_samples, dtype=bool) for source in plan.sources]
    for reading in keep_lineage(readings):
        for first, end in _stretches(reading):
            position = reading.segments.position(first)
            starts = reading.segments.generation_starts(first)
            bounds = plan.drawn_before(position), plan.drawn_before(position + end - first)
            for number, source in enumerate(plan.sources):
                draws = np.arange(bounds[0][number], bounds[1][number], dtype=np.int64)
                begun = tuple((generation, plan.drawn_before(start)[number]) for generation, start in starts)
                seen[number][sample_indices(draws, source.num_samples, (plan.seed, source.name), begun)] = True
                drawn[number] += len(draws)
    return [SourceUse(name=source.name, num_samples=source.num_samples, drawn=count, distinct=int(bits.sum()),
                      epochs=count / source.num_samples, unseen_fraction=1 - float(bits.mean()))
            for source, count, bits in zip(plan.sources, drawn, seen, strict=True)]


def _positions_from(reading: Reading, step: int, position: int) -> int:
    """Return how many batches at or after `position` a launch read in its steps from `step` on."""
    first = max(step, reading.first_step)
    if first >= reading.end_step:
        return 0
    last = reading.segments.position(reading.end_step - 1) + 1
    return max(0, last - max(position, reading.segments.position(first)))


def _until(reading: Reading, step: int) -> Reading:
    return replace(reading, end_step=min(reading.end_step, step))


def _stretches(reading: Reading) -> list[tuple[int, int]]:
    """Cut a reading at its segments, so that positions are contiguous within each part."""
    inner = {segment.step for segment in reading.segments.items if reading.first_step < segment.step < reading.end_step}
    cuts = sorted({reading.first_step, reading.end_step, *inner})
    return [(first, end) for first, end in itertools.pairwise(cuts) if end > first]


# --- The data plan in the journal

def has_plan(paths: RunPaths) -> bool:
    """Return whether a launch recorded its data plan."""
    return any(read_journal(paths).of_kind(EntryKind.DATA_START))


def read_readings(paths: RunPaths) -> tuple[DataPlan, list[Reading]]:
    """Return the plan and what each launch read, oldest first. Raises DataError when no launch recorded its plan."""
    starts = list(events_of(read_journal(paths).entries, DataStart))
    if not starts:
        raise DataError(f"run `{paths.run}` has no data plan in its journal",
                        "bit_transformer records its plan; for other loaders use `chronicle.data.observe`")
    readings = []
    for entry, start in starts:
        first, launch = start.first_step or 0, entry.launch or 0
        readings.append(Reading(launch=launch, first_step=first, end_step=max(first, _last_step(paths, launch)),
                                segments=Segments.from_json(start.segments)))
    return DataPlan.from_json(starts[-1][1].plan), readings


def write_start(paths: RunPaths, plan: DataPlan, segments: Segments, *, first_step: int, launch: int) -> str:
    """Append the `data.start` entry of this launch and return its title: start position, re-reads and skips."""
    now = Reading(launch=launch, first_step=first_step, end_step=first_step, segments=segments)
    try:
        known, before = read_readings(paths)
    except DataError:
        known, before = plan, []
    if before and known == plan:
        title = restart_lines(plan, [*before, now])[-1].text()
    else:
        title = f"launch {launch}: data_pos {segments.position(first_step)}, plan {plan.plan_hash[:12]}"
    start = DataStart(
        first_step=first_step, plan=plan.to_json(), plan_hash=plan.plan_hash, segments=segments.to_json())
    JournalWriter(paths).write(start, step=first_step, launch=launch, title=title)
    return title


def _last_step(paths: RunPaths, launch: int) -> int:
    path = paths.metrics_path(launch)
    return max((point.step for point in read_metrics(path)), default=0) if path.is_file() else 0
