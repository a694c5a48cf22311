"""Trains one launch of a study with the bit transformer, told which batches of a continuous run to read, and in what order.

    python -m experiments.trainer --begin 500 --first 600 --seed 3 --positions 600:700 --order 1 --recipe modern --stop-at 700

What it does not know itself goes to `bit_transformer.train`. A continuous run of the seed reads the data plan, and from
`begin` on, where the arms start, what is left of it in the seed's own order.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bit_transformer import train
from bit_transformer.data.loaders import StepDataset
from chronicle.data import DataPlan, Segment, Segments
from chronicle.data.plan import SampleIds, derive_key, permute


@dataclass(frozen=True, slots=True, kw_only=True)
class LegData:
    """What a launch reads from its first step on; `order` above 0 is another shuffle of each part of it."""

    begin: int
    first: int
    seed: int
    parts: tuple[range, ...]
    order: int


class LegDataset(StepDataset):
    """The batches of a launch by step, in the study's order instead of the plan's."""

    def __init__(self, *args: Any, leg: LegData, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first, self._rows = leg.first, leg_ids(self.plan, leg)

    def _ids(self, step: int) -> SampleIds:
        ids: SampleIds = self._rows[step - self._first]
        return ids


def leg_ids(plan: DataPlan, leg: LegData) -> SampleIds:
    """Sample ids of a launch: (updates, batch, 2). A part that is read again has another order each time."""
    is_start = leg.first < leg.begin
    at, generation = (0, leg.seed) if is_start else (leg.begin, leg.seed + 1)
    segments = Segments(items=(*Segments().items, Segment(step=at, position=at, generation=generation)))
    found, times = [], Counter[range]()
    for part in leg.parts:
        ids = plan.block_ids(part.start, len(part), segments)
        if leg.order or times[part]:
            ids = _shuffled(ids, derive_key("order", leg.seed, leg.order, times[part]))
        times[part] += 1
        found.append(ids)
    return np.concatenate(found)


def _shuffled(ids: SampleIds, key: int) -> SampleIds:
    """The samples of each source in another order; how many a batch holds of each stays as it is."""
    rows = ids.reshape(-1, 2).copy()
    for source in np.unique(rows[:, 0]):
        places = np.flatnonzero(rows[:, 0] == source)
        rows[places] = rows[places[permute(np.arange(len(places)), len(places), key)]]
    return rows.reshape(ids.shape)


def parse_parts(text: str) -> tuple[range, ...]:
    """Parse `500:600,500:600`."""
    return tuple(range(*map(int, part.split(":"))) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code of `bit_transformer.train`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.trainer", allow_abbrev=False)
    parser.add_argument("--begin", type=int, required=True, help="updates of the common checkpoint")
    parser.add_argument("--first", type=int, required=True, help="step after which this launch starts")
    parser.add_argument("--seed", type=int, required=True, help="of the order of the data")
    parser.add_argument("--positions", dest="parts", type=parse_parts, required=True,
                        help="batches of a continuous run, for example 500:600,500:600")
    parser.add_argument("--order", type=int, default=0, help="how often the order was changed by a restart")
    own, words = parser.parse_known_args(argv)
    leg = LegData(**vars(own))
    return train.main(words, dataset=lambda *args, **options: LegDataset(*args, leg=leg, **options))


if __name__ == "__main__":
    sys.exit(main())
