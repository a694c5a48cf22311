"""The data plan: (plan, segments, step) -> the exact samples of that step's global batch.

Pure and without state. Sample i of epoch e of a source is a keyed permutation (`order`); the mixture is cumulative
apportionment in integers, so that every batch has the exact ratio within one sample and the number of samples drawn
before any batch is O(1). World size and worker count do not enter: a rank takes its slice of the global batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chronicle.data.errors import DataError, PlanChanged
from chronicle.data.order import Ids, derive_key, permute, permute_rows
from chronicle.data.segments import Segments

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of the mixture: how many samples it holds, what they are (digest), its integer weight."""

    name: str
    num_samples: int
    digest: str
    weight: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"source `{self.name}` is empty", "build it again or take it out of the mixture")
        if self.weight < 1:
            raise DataError(f"source `{self.name}` has weight {self.weight}, expected a whole number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Everything that decides the order of the data; `plan_hash` names it."""

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
        return {"v": PLAN_VERSION, "seed": self.seed, "batch_size": self.batch_size, "sources": [
            {"name": s.name, "num_samples": s.num_samples, "digest": s.digest, "weight": s.weight}
            for s in self.sources]}

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

    def batch_ids(self, step: int, segments: Segments = Segments()) -> Ids:
        """Return the global batch of `step`: rows (source number, sample index), shape (batch_size, 2)."""
        batch: Ids = self.block_ids(step, 1, segments)[0]
        return batch

    def block_ids(self, first_step: int, count: int, segments: Segments = Segments()) -> Ids:
        """Return the global batches of `count` steps at once, shape (count, batch_size, 2): many times faster than singly."""
        cuts = sorted({first_step, first_step + count, *(segment.step for segment in segments.items
                                                         if first_step < segment.step < first_step + count)})
        return np.concatenate([self._run_ids(first, end - first, segments) for first, end in itertools.pairwise(cuts)])

    def _run_ids(self, first_step: int, count: int, segments: Segments) -> Ids:
        """The batches of steps within one segment, whose positions run on."""
        position, starts = segments.position(first_step), segments.generation_starts(first_step)
        drawn = np.array([self.drawn_before(position + t) for t in range(count + 1)], dtype=np.int64)
        counts = np.diff(drawn, axis=0)  # (count, sources)
        slots = np.cumsum(counts, axis=1) - counts  # where each source begins in its batch, before the batch is shuffled
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
        shuffled: Ids = batches[np.arange(count)[:, None], order]
        return shuffled

    def rank_ids(self, step: int, segments: Segments, *, rank: int, world_size: int) -> Ids:
        """Return this rank's rows of the global batch. Raises DataError where the batch does not divide."""
        if self.batch_size % world_size:
            raise DataError(f"global batch of {self.batch_size} samples does not divide among {world_size} ranks",
                            f"choose a batch size that is a multiple of {world_size}")
        share = self.batch_size // world_size
        return self.batch_ids(step, segments)[rank * share:(rank + 1) * share]

    def require_same(self, stored: Mapping[str, Any]) -> None:
        """Raise PlanChanged, naming every field that differs, unless `stored` is this plan."""
        present = self.to_json()
        if present != dict(stored):
            raise PlanChanged("the data plan changed since the checkpoint: " + "; ".join(_differences(stored, present)),
                              "resume with the stored plan, or start a new run with the new one")


def sample_indices(draws: Ids, num_samples: int, key: tuple[object, ...],
                   begun: Sequence[tuple[int, int]] = ()) -> Ids:
    """Map a source's draw numbers (0, 1, 2, … over all epochs) to sample indices.

    `begun` holds (generation, draw at which it began), oldest first. A generation that begins inside an epoch permutes
    only what that epoch had not drawn yet, so nothing repeats; later epochs take a fresh permutation.
    """
    indices = np.empty_like(draws)
    epochs = draws // num_samples
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        indices[rows] = _epoch_indices(draws[rows] - epoch * num_samples, num_samples, key, int(epoch), begun)
    return indices


def _epoch_indices(offsets: Ids, num_samples: int, key: tuple[object, ...], epoch: int,
                   begun: Sequence[tuple[int, int]]) -> Ids:
    base = max([generation for generation, draw in begun if draw <= epoch * num_samples], default=0)
    inside = [(generation, draw - epoch * num_samples) for generation, draw in begun
              if epoch * num_samples < draw < (epoch + 1) * num_samples]
    for generation, start in reversed(inside):  # newest first: each moves an offset within the remainder it found
        later = offsets >= start
        moved = permute(offsets[later] - start, num_samples - start, derive_key(*key, epoch, generation, "rest"))
        offsets = offsets.copy()
        offsets[later] = moved + start
    return permute(offsets, num_samples, derive_key(*key, epoch, base))


def step_digest(ids: Ids) -> str:
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
