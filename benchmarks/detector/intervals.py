"""The first eight points after a change of the log interval, in both directions: majors seen, and what healthy runs draw.

    python -m benchmarks.detector.intervals [--count 200] [--seed 1]

A run of single steps (power law, plateau or flat; white, heavy-tailed, skewed or correlated noise) is logged every `a`-th step
and, from one row on, every `b`-th: 1 to 500 steps, four times apart or more. The logger writes the step's own loss, or the
mean since its last line. One run in three also changes its launch there, one in four logs fewer than 64 points before.
Each run is folded twice: as it is, and with one spike (1 or 2 logged points; a fifth of the level at least and ten units of
the noise of one point at the new interval) that begins at one of the first eight points.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence

from benchmarks.detector.curves import Curve, Label
from benchmarks.detector.report import Row, format_table
from benchmarks.detector.statistics import format_share
from benchmarks.detector.unseen import NOISES
from rollback.detect import Detector, Event, Tier

INTERVALS = (1, 2, 5, 10, 20, 50, 100, 500)
FIRST_POINTS = 8
AFTER = 120  # points logged after the change
NOISES_HERE = ("white", "ar", "student", "skewed")


def draw(number: int, seed: int) -> tuple[Curve, Curve, str]:
    """The run as it is, the same with a spike, and in which direction its interval changes and how it is logged."""
    rng = random.Random(f"intervals/{seed}/{number}")
    wider = number % 2 == 0
    averaged = number % 4 < 2
    near, far = sorted(rng.sample(INTERVALS, 2))
    while far < 4 * near:
        near, far = sorted(rng.sample(INTERVALS, 2))
    before, after = (near, far) if wider else (far, near)
    points = rng.randrange(24, 64) if rng.random() < 0.25 else rng.randrange(64, 400)
    ends = [before * (row + 1) for row in range(points)]
    ends += [ends[-1] + after * (row + 1) for row in range(AFTER)]
    level = _descent(rng)
    width = math.exp(rng.uniform(math.log(0.003), math.log(0.05)))
    noise = rng.choice(NOISES_HERE)
    loss, units = [], []
    drawn = NOISES[noise](rng, len(ends))
    for row, end in enumerate(ends):
        steps = (before if row < points else after) if averaged else 1
        # neighbouring steps of correlated noise are the more alike the closer they lie; the rest averages out
        unit = width / math.sqrt(steps) if noise != "ar" else width * math.sqrt(0.3 + 0.7 / steps)
        middle = level(end - (steps - 1) / 2)
        loss.append(middle * (1.0 + unit * drawn[row]))
        units.append(unit * middle)
    row = points + rng.randrange(FIRST_POINTS)
    here = level(ends[row])
    height = max(here * math.exp(rng.uniform(math.log(0.22), math.log(1.5))), 10.0 * units[row])
    spiked = list(loss)
    length = rng.randrange(1, 3)
    for at in range(row, row + length):
        spiked[at] += height * (1.0 - 0.3 * (at - row))
    launches = tuple(1 + (at >= points) for at in range(len(ends))) if rng.random() < 1 / 3 else (None,) * len(ends)
    name = f"{'longer' if wider else 'shorter'}, {'means' if averaged else 'single steps'}"

    def curve(values: Sequence[float], labels: tuple[Label, ...]) -> Curve:
        return Curve(
            name=f"intervals-{seed}-{number}", family=f"{noise}/{before}-{after}", steps=tuple(ends),
            values=tuple({"loss": round(x, 5)} for x in values), launches=launches, labels=labels,
        )  # fmt: skip

    label = Label(kind="instant-spike", onset_row=row, peak_row=row, end_row=row + length, major=True)
    return curve(loss, ()), curve(spiked, (label,)), name


def _descent(rng: random.Random) -> Callable[[float], float]:
    start, floor = rng.uniform(4.0, 11.0), rng.uniform(0.5, 3.0)
    scale, power = math.exp(rng.uniform(math.log(20.0), math.log(5_000.0))), rng.uniform(0.3, 0.9)
    if rng.random() < 0.2:  # a fine-tuning: hardly any descent
        start = 1.1 * floor
    return lambda step: floor + (start - floor) * (1.0 + step / scale) ** -power


def fold(curve: Curve) -> tuple[Event, ...]:
    detector = Detector()
    for step, values, launch in zip(curve.steps, curve.values, curve.launches, strict=True):
        detector.feed(step, values, launch=launch)
    detector.finish()
    return detector.events


def measure(count: int, seed: int) -> list[Row]:
    """One row a direction and logger, and one over all."""
    found: dict[str, dict[str, int]] = {}
    for number in range(count):
        healthy, spiked, name = draw(number, seed)
        change = len(healthy.steps) - AFTER
        quiet = [event for event in fold(healthy) if event.alarm_row >= change]
        label = spiked.labels[0]
        events = fold(spiked)
        seen = [event for event in events if label.onset_row <= event.alarm_row <= label.onset_row + 2]
        others = [event for event in events if event.alarm_row > label.onset_row + 2]
        for key in (name, "all"):
            row = found.setdefault(key, dict.fromkeys(("runs", "seen", "early", "later", "warned", "after"), 0))
            row["runs"] += 1
            row["seen"] += bool(seen)
            row["early"] += sum(event.alarm_row < change + FIRST_POINTS for event in quiet)
            row["later"] += sum(event.alarm_row >= change + FIRST_POINTS for event in quiet)
            row["warned"] += sum(event.tier is not Tier.NOTICE for event in quiet)
            row["after"] += len(others)
    return [
        {"the interval becomes": name, "majors seen in the first 8": format_share(row["seen"], row["runs"]),
         "events in healthy runs: first 8 points": row["early"], f"the next {AFTER - FIRST_POINTS}": row["later"],
         "warned or proposed": row["warned"], "further events after the spike": row["after"], "runs": row["runs"]}
        for name, row in sorted(found.items(), key=lambda item: (item[0] == "all", item[0]))
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector.intervals", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    rows = measure(options.count, options.seed)
    print(format_table(f"A change of the log interval, seed {options.seed}, {options.count} runs", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
