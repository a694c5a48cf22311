"""Runs that spike, with heights in shares of the level, as an eye labels them: a test for spikes early, often and small.

    python -m benchmarks.detector.spiky [--count 120] [--seed 1]

The labelled curves call a spike major from a fifth of the level on. Here every run has a *logger* (every hundredth step;
or the first hundred steps one by one and then every five hundredth), a *descent* (power law, or a plateau and a late
fall), a relative noise and up to five spikes. A spike is *early* where fewer than 32 points were logged before it at its
interval. One run in four holds a *series*: spikes that come ever closer and end in a level that stays.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence

from benchmarks.detector.curves import Curve, Label
from benchmarks.detector.report import Row, alarm_row, format_table, onset_row, share
from benchmarks.detector.scoring import Found, Score, run_detector, score_curve
from benchmarks.detector.unseen import NOISES
from rollback.detect import Tier

DENSE_POINTS, DENSE_STEP, SPARSE_STEP, USUAL_STEP = 100, 1, 500, 100
MAJOR_SHARE = 0.2
LEAST_SIGMAS = 8.0  # a smaller rise is no spike to the eye
NOISES_HERE = ("white", "ar", "student")


def draw(number: int, seed: int, *, spikes: bool = True) -> Curve:
    """The `number`th run of a seed, with its labels."""
    rng = random.Random(f"spiky/{seed}/{number}/{spikes}")
    size = int(math.exp(rng.uniform(math.log(220), math.log(1400))))
    changes = rng.random() < 0.4
    steps = _steps(size, changes)
    level = _descent(rng, steps)
    noise = rng.choice(NOISES_HERE)
    width = math.exp(rng.uniform(math.log(0.003), math.log(0.02)))
    drawn = NOISES[noise](rng, size)
    loss = [x * (1.0 + width * y) for x, y in zip(level, drawn, strict=True)]
    labels: list[Label] = []
    begin = DENSE_POINTS + 8 if changes else 8
    if spikes:
        series = rng.random() < 0.25
        rows = _series_rows(rng, begin, size) if series else _rows(rng, begin, size)
        labels = [_spike(rng, row, loss, level, width) for row in rows]
        if series:
            last = rows[-1] + 30
            if last < size - 60:
                for row in range(last, size):
                    loss[row] += 0.6 * level[last]
                labels.append(Label(kind="level-shift", onset_row=last))
    norm = [math.exp(rng.gauss(0.0, 0.15)) for _ in range(size)]
    if changes:
        norm = [x * (1.0 if row < DENSE_POINTS else 3.0) for row, x in enumerate(norm)]
    values = tuple({"loss": round(x, 5), "grad_norm": round(y, 5)} for x, y in zip(loss, norm, strict=True))
    return Curve(
        name=f"spiky-{seed}-{number}", family=f"spiky/{number}", steps=steps, values=values,
        launches=(None,) * size, labels=tuple(labels),
    )  # fmt: skip


def _steps(size: int, changes: bool) -> tuple[int, ...]:
    if not changes:
        return tuple(USUAL_STEP * row for row in range(size))
    dense = [DENSE_STEP * (row + 1) for row in range(DENSE_POINTS)]
    return (*dense, *(SPARSE_STEP * (row + 1) for row in range(size - DENSE_POINTS)))


def _descent(rng: random.Random, steps: Sequence[int]) -> list[float]:
    start, floor = rng.uniform(4.0, 11.0), rng.uniform(0.3, 2.5)
    scale, power = math.exp(rng.uniform(math.log(200.0), math.log(5_000.0))), rng.uniform(0.3, 0.9)
    fall = [floor + (start - floor) * (1.0 + step / scale) ** -power for step in steps]
    if rng.random() < 0.3:  # a plateau first: speech models stay at one level for thousands of steps, then fall
        ends, width = rng.uniform(0.02, 0.15) * steps[-1], 0.02 * steps[-1]
        fall = [floor + (x - floor) * 0.5 + 0.4 * start / (1.0 + math.exp((step - ends) / width))
                for x, step in zip(fall, steps, strict=True)]  # fmt: skip
    return fall


def _rows(rng: random.Random, begin: int, size: int) -> list[int]:
    rows: list[int] = []
    for _ in range(rng.randrange(0, 5)):
        row = rng.randrange(begin, begin + 32) if rng.random() < 0.25 else rng.randrange(begin, size - 30)
        if all(abs(row - other) > 45 for other in rows):
            rows.append(row)
    return sorted(rows)


def _series_rows(rng: random.Random, begin: int, size: int) -> list[int]:
    """Four to six spikes whose distances shrink by a third each time."""
    gap, row = 0.16 * (size - begin), begin + rng.randrange(40, 60)
    rows = []
    for _ in range(rng.randrange(4, 7)):
        if row >= size - 40:
            break
        rows.append(row)
        row += int(max(46.0, gap))
        gap *= 0.66
    return rows


def _spike(rng: random.Random, row: int, loss: list[float], level: Sequence[float], width: float) -> Label:
    minor = rng.random() < 0.35
    height = rng.uniform(0.1, 0.19) if minor else math.exp(rng.uniform(math.log(0.22), math.log(3.0)))
    slope = abs(level[max(0, row - 3)] - level[row]) / 3.0
    least = LEAST_SIGMAS * math.hypot(width * level[row], slope)
    size = max(height * level[row], least)
    length = math.exp(rng.uniform(math.log(0.6), math.log(12.0)))
    end = row
    for at in range(row, min(len(loss), row + int(5 * length) + 2)):
        loss[at] += size * math.exp(-(at - row) / length)
        end = at
    return Label(
        kind="instant-spike", onset_row=row, peak_row=row, end_row=end + 1, major=size >= MAJOR_SHARE * level[row]
    )  # fmt: skip


def is_early(curve: Curve, label: Label) -> bool:
    """Whether fewer than 32 points stand before the spike at its interval."""
    first = DENSE_POINTS if curve.steps[1] - curve.steps[0] == DENSE_STEP else 0
    return label.onset_row - first < 32


def measure(count: int, seed: int) -> dict[str, list[Row]]:
    """Recall by size and place, false alarms of the runs with and without spikes, onset."""
    score, quiet = Score(), Score()
    for number in range(count):
        curve = draw(number, seed)
        score_curve(curve, run_detector(curve, score), score)
        still = draw(number, seed, spikes=False)
        score_curve(still, run_detector(still, quiet), quiet)

    def row(title: str, found: list[Found]) -> Row:
        warned = sum(i.alarm is not None and i.alarm.tier is not Tier.NOTICE for i in found)
        return {"labels": title, "seen": share(found), "warned or proposed": warned}

    spikes = score.select(kinds=("instant-spike",))
    rows = []
    for size, major in (("major", True), ("minor", False)):
        for place in ("early", "settled"):
            wanted = [i for i in spikes if i.label.major is major and is_early(i.curve, i.label) is (place == "early")]
            rows.append(row(f"{size}, {place}", wanted))
    rows.append(row("level after a series", score.select(kinds=("level-shift",))))
    return {"recall": rows, "alarms": [alarm_row(score, "runs that spike"), alarm_row(quiet, "the same without spikes")],
            "onset": [onset_row(score, "spikes")]}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector.spiky", description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    tables = measure(options.count, options.seed)
    print(format_table(f"Runs that spike, seed {options.seed}, {options.count} runs", tables["recall"]))
    print(format_table("False alarms per 10k healthy points", tables["alarms"]))
    print(format_table("Onset (logged points)", tables["onset"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
