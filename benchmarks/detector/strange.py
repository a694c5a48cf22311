"""Noise that is not one bell around one level: what healthy runs look like that no labelled curve of the folder does.

    python -m benchmarks.detector.strange [--count 40] [--seed 1]

Each kind is drawn from a behaviour met in public logs: batches of two sorts (mixup or not), a changed order of the data, a
gradient norm that grows for the whole run, epochs, plateaus, another log interval, very short logs, a steep start, small
batches, and a late phase with hardly any noise. A run is drawn twice, with and without one to four short spikes (1 to 3
points; minor: 5 to 20 % of the level). Two kinds do hold an event, another order of the data from some row in the middle
third on: a notice that names it so (`data-order`) is no false alarm there, and any other is. The plain rule "8 MADs above the
median of 64 points" is scored beside the detector.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence

from benchmarks.detector.curves import Curve, Label
from benchmarks.detector.noises import NOISES
from benchmarks.detector.report import Row, alarm_row, format_table, share
from benchmarks.detector.rules import window_median
from benchmarks.detector.scoring import Alarm, Score, merge_rows, run_detector, score_curve, spread_rows
from rollback.detect import Kind

LEAST_SIGMAS = 10.0  # of what an eye takes for the noise around: a smaller rise is no spike
MAJOR_SHARE = 0.2
Drawn = tuple[list[float], list[float], list[float]]  # level, noise, gradient norm


def _descent(rng: random.Random, size: int) -> list[float]:
    start, floor = rng.uniform(4.0, 11.0), rng.uniform(0.5, 3.0)
    scale, power = math.exp(rng.uniform(math.log(5.0), math.log(60.0))), rng.uniform(0.4, 1.0)
    return [floor + (start - floor) * (1.0 + row / scale) ** -power for row in range(size)]


def _size(rng: random.Random, low: int = 400, high: int = 3000) -> int:
    return int(math.exp(rng.uniform(math.log(low), math.log(high))))


def _norm(rng: random.Random, size: int) -> list[float]:
    return [0.5 * math.exp(rng.gauss(0.0, 0.2)) for _ in range(size)]


def _noise(rng: random.Random, level: Sequence[float], names: Sequence[str] = ("white", "ar", "student")) -> list[float]:
    width = math.exp(rng.uniform(math.log(0.004), math.log(0.02)))
    drawn = NOISES[rng.choice(list(names))](rng, len(level))
    return [width * y * x for x, y in zip(level, drawn, strict=True)]


def two_sorts(rng: random.Random) -> Drawn:
    """Batches with and without mixup: most are learnt well, the others stay near where they began."""
    size, share_high = _size(rng), rng.uniform(0.1, 0.6)
    low, gap = _descent(rng, size), rng.uniform(0.3, 2.0)
    grows = [min(1.0, row / rng.uniform(40.0, 200.0)) for row in range(size)]
    noise = _noise(rng, low, ("white",))
    for row in range(size):
        if rng.random() < share_high:
            noise[row] += gap * grows[row] * rng.uniform(0.5, 1.0)
    return low, noise, _norm(rng, size)


def changed_order(rng: random.Random) -> Drawn:
    """From one row on every batch is of one kind: the noise widens and wanders, and the lower values stand."""
    size = _size(rng, 1200, 4000)
    level = _descent(rng, size)
    noise, at = _noise(rng, level, ("white",)), rng.randrange(size // 3, 2 * size // 3)
    sigma = math.sqrt(sum(x * x for x in noise[at - 100 : at]) / 100.0)
    rho, wider = rng.uniform(0.5, 0.97), rng.uniform(1.5, 5.0)
    wave = 0.0
    for row in range(at, size):
        wave = rho * wave + math.sqrt(1 - rho * rho) * rng.gauss(0.0, 1.0)
        noise[row] += sigma * wider * (wave + 0.5)
    return level, noise, _norm(rng, size)


def domains(rng: random.Random) -> Drawn:
    """From one row on documents come by domain: stretches of 5 to 60 points above or below, around the same mean."""
    size = _size(rng, 1200, 4000)
    level = _descent(rng, size)
    noise, row = _noise(rng, level, ("white",)), rng.randrange(size // 3, 2 * size // 3)
    sigma = math.sqrt(sum(x * x for x in noise[row - 100 : row]) / 100.0)
    while row < size:
        height, length = rng.gauss(0.0, rng.uniform(1.5, 3.0)), rng.randrange(5, 60)
        for at in range(row, min(size, row + length)):
            noise[at] += sigma * height
        row += length
    return level, noise, _norm(rng, size)


def norm_grows(rng: random.Random) -> Drawn:
    """The gradient norm falls in the first tens of points and then grows tenfold while the loss learns."""
    size = _size(rng)
    level = _descent(rng, size)
    decades, dip = rng.uniform(0.5, 1.2), rng.uniform(10.0, 60.0)
    norm = [
        0.3 * 10 ** (decades * row / size + 0.6 * math.exp(-row / dip)) * math.exp(rng.gauss(0.0, 0.15)) for row in range(size)
    ]
    return level, _noise(rng, level), norm


def epochs(rng: random.Random) -> Drawn:
    """The loss falls by a stair when an epoch begins, and the data order of an epoch repeats."""
    size, period = _size(rng), rng.randrange(60, 600)
    level = [x * (1.0 - 0.06 * (row // period) / (1 + row // period)) for row, x in enumerate(_descent(rng, size))]
    noise = _noise(rng, level, ("white",))
    wave = [rng.uniform(-1.0, 1.0) for _ in range(period)]
    width = 0.5 * max(abs(x) for x in noise[-100:])
    return level, [x + width * wave[row % period] for row, x in enumerate(noise)], _norm(rng, size)


def plateau(rng: random.Random) -> Drawn:
    size = _size(rng)
    level, ends = _descent(rng, size), rng.uniform(0.1, 0.5) * size
    held = [0.6 * level[0] / (1.0 + math.exp((row - ends) / (0.01 * size))) for row in range(size)]
    level = [0.5 * x + y for x, y in zip(level, held, strict=True)]
    return level, _noise(rng, level), _norm(rng, size)


def short(rng: random.Random) -> Drawn:
    size = rng.randrange(50, 220)
    level = _descent(rng, size)
    return level, _noise(rng, level), _norm(rng, size)


def small_batches(rng: random.Random) -> Drawn:
    """The loss of a few samples: skewed, a tenth to a third of the level wide."""
    size = _size(rng)
    level, width = _descent(rng, size), rng.uniform(0.08, 0.3)
    return level, [x * width * (rng.gammavariate(3.0, 1.0) - 3.0) / math.sqrt(3.0) for x in level], _norm(rng, size)


def quiet_end(rng: random.Random) -> Drawn:
    """The LR decays and with it the noise, to a tenth and less."""
    size = _size(rng)
    level = _descent(rng, size)
    noise = _noise(rng, level)
    return level, [x * (0.03 + 0.97 * (1 - row / size) ** 1.5) for row, x in enumerate(noise)], _norm(rng, size)


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "two sorts of batches": two_sorts, "changed order": changed_order, "domains": domains, "norm grows": norm_grows,
    "epochs": epochs, "plateau": plateau, "short": short, "small batches": small_batches, "quiet end": quiet_end,
}  # fmt: skip
REORDERED = ("changed order", "domains")


def draw(kind: str, number: int, seed: int, *, spikes: bool) -> Curve:
    """The `number`th run of a kind and seed; with `spikes`, their labels too."""
    rng = random.Random(f"strange/{kind}/{seed}/{number}")
    level, noise, norm = KINDS[kind](rng)
    size = len(level)
    loss = [x + y for x, y in zip(level, noise, strict=True)]
    labels = _add_spikes(random.Random(f"spikes/{kind}/{seed}/{number}"), loss, level) if spikes else []
    stride = rng.choice((1, 10, 100))
    steps = tuple(stride * row for row in range(size))
    if kind != "short" and rng.random() < 0.3:  # the first hundred steps one by one
        steps = (*range(100), *(100 + 50 * (row + 1) for row in range(size - 100)))
    values = tuple({"loss": round(x, 5), "grad_norm": round(y, 5)} for x, y in zip(loss, norm, strict=True))
    return Curve(
        name=f"{kind}-{seed}-{number}", family=f"strange/{kind}/{number}", steps=steps, values=values,
        launches=(None,) * size, labels=tuple(labels),
    )  # fmt: skip


def _add_spikes(rng: random.Random, loss: list[float], level: Sequence[float]) -> list[Label]:
    labels: list[Label] = []
    for _ in range(rng.randrange(1, 5)):
        row = rng.randrange(16, len(loss) - 12)
        if any(abs(row - label.onset_row) < 40 for label in labels):
            continue
        near = sorted(loss[max(0, row - 40) : row] + loss[row + 4 : row + 40])
        middle = near[len(near) // 2]
        deviations = sorted(abs(x - middle) for x in near)
        noise = max(1.48 * deviations[len(deviations) // 2], (near[int(0.97 * (len(near) - 1))] - middle) / 2.5, 0.002 * middle)
        wanted = rng.uniform(0.05, 0.19) if rng.random() < 0.5 else math.exp(rng.uniform(math.log(0.22), math.log(1.5)))
        size = max(wanted * level[row], LEAST_SIGMAS * noise)
        length = rng.randrange(1, 4)
        for at in range(row, row + length):
            loss[at] += size * (1.0 - 0.3 * (at - row))
        major = size >= MAJOR_SHARE * level[row]
        labels.append(Label(kind="instant-spike", onset_row=row, peak_row=row, end_row=row + length, major=major))
    return labels


def measure(count: int, seed: int) -> dict[str, list[Row]]:
    """Recall of the detector and of the plain rule, and false alarms of the runs without spikes."""
    recall, alarms = [], []
    total = {name: (Score(), Score()) for name in ("chronicle", "8 MADs of 64")}
    for kind in KINDS:
        scores = {name: (Score(), Score()) for name in total}
        for number in range(count):
            for which, spikes in enumerate((True, False)):
                curve = draw(kind, number, seed, spikes=spikes)
                found = run_detector(curve, Score())
                fired = list(window_median([v["loss"] for v in curve.values], window=64, least=8, z=8.0, floor=0.0))
                for store in (scores, total):
                    score_curve(curve, found if spikes else _unexplained(kind, curve, found), store["chronicle"][which])
                    score_curve(curve, merge_rows(fired), store["8 MADs of 64"][which], matching=spread_rows(fired))
        recall.append(_recall_row(kind, scores))
        alarms.append(alarm_row(scores["chronicle"][1], kind))
    recall.append(_recall_row("all", total))
    alarms += [alarm_row(total["chronicle"][1], "all"), alarm_row(total["8 MADs of 64"][1], "all, 8 MADs of 64")]
    return {"recall": recall, "alarms": alarms}


def _unexplained(kind: str, curve: Curve, found: Sequence[Alarm]) -> list[Alarm]:
    """Leave out what names the event that two of the kinds hold."""
    first = len(curve.steps) // 3 if kind in REORDERED else len(curve.steps)
    return [a for a in found if a.event is None or a.event.kind is not Kind.DATA_ORDER or a.row < first]


def _recall_row(kind: str, scores: dict[str, tuple[Score, Score]]) -> Row:
    row: Row = {"kind": kind}
    for name, (spiked, _) in scores.items():
        for size, major in (("major", True), ("minor", False)):
            row[f"{size}, {name}"] = share(spiked.select(kinds=("instant-spike",), major=major))
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector.strange", description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    tables = measure(options.count, options.seed)
    print(format_table(f"Spikes in strange noise, seed {options.seed}, {options.count} a kind", tables["recall"]))
    print(format_table("False alarms per 10k healthy points, the same runs without spikes", tables["alarms"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
