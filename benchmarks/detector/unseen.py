"""Runs of other kinds than the seed's, drawn from published descriptions of training runs: a test for generalisation.

    python -m benchmarks.detector.unseen [--count 40] [--seed 1]

No constant of the detector was chosen with these in sight; each time they have been looked at, the next figures are
made with a new seed (`README.md` says which). A series is a *descent* (power law with cosine or warm-up-stable-decay
LR, fine-tuning in epochs, classification, a noisy run), a *noise* (white, correlated, heavy-tailed, multiplicative,
shrinking), a *logger* (interval, rounding, averaging), and at most one event whose size is measured in the noise that
a reader of the curve sees.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.detector.curves import Curve, Label
from benchmarks.detector.report import Row, alarm_row, delays, format_table, onset_row, proposal_row, share
from benchmarks.detector.scoring import Alarm, Score, run_detector, score_curve, sees

Noise = Callable[[random.Random, int], list[float]]
INTERVALS = (1, 1, 1, 5, 10, 10, 20, 50, 100, 200, 500)


@dataclass(slots=True)
class Run:
    """A healthy run, one item a logged point; `sigma` is the noise around each point, `drops` are legitimate."""

    rng: random.Random
    interval: int
    level: list[float]
    noise: list[float]
    lr: list[float]
    norm: list[float]
    launches: list[int | None]
    steps: list[int]
    nan_from: int | None = None
    sources: dict[str, list[float]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.level)

    def noise_near(self, row: int) -> float:
        """What an eye takes for the noise there: half the width of the middle 98 % of 200 points, in sigmas of 2.33."""
        near = sorted(self.noise[max(0, row - 200) : row])
        wide = (near[int(0.99 * (len(near) - 1))] - near[int(0.01 * (len(near) - 1))]) / 2.0
        slope = abs(self.level[max(0, row - 20)] - self.level[row]) / 20.0
        return max(wide / 2.33, slope, 1e-4 * abs(self.level[row]))


def white(rng: random.Random, count: int) -> list[float]:
    return [rng.gauss(0.0, 1.0) for _ in range(count)]


def student(rng: random.Random, count: int) -> list[float]:
    """Three degrees of freedom, unit variance: hard batches."""
    values = []
    for _ in range(count):
        chi = sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(3)) / 3.0
        values.append(rng.gauss(0.0, 1.0) / math.sqrt(chi) / math.sqrt(3.0))
    return values


def skewed(rng: random.Random, count: int) -> list[float]:
    """A micro-batch's loss: exponential to the right."""
    return [rng.expovariate(1.0) - 1.0 for _ in range(count)]


def correlated(low: float, high: float) -> Noise:
    def make(rng: random.Random, count: int) -> list[float]:
        rho = rng.uniform(low, high)
        value, values = 0.0, []
        for _ in range(count):
            value = rho * value + rng.gauss(0.0, math.sqrt(1 - rho * rho))
            values.append(value)
        return values

    return make


def periodic(rng: random.Random, count: int) -> list[float]:
    """White, on the wave of a data order that repeats every epoch."""
    period, height = rng.uniform(80.0, 2_000.0), rng.uniform(0.3, 1.5)
    return [rng.gauss(0.0, 1.0) + height * math.sin(2 * math.pi * i / period) for i in range(count)]


NOISES: dict[str, Noise] = {
    "white": white, "student": student, "skewed": skewed, "ar": correlated(0.5, 0.9), "slow": correlated(0.95, 0.99),
    "periodic": periodic,
}  # fmt: skip


def cosine(share: float, warm: float) -> float:
    return share / warm if share < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * (share - warm) / (1 - warm)))


def stable_decay(share: float, warm: float) -> float:
    return share / warm if share < warm else min(1.0, max(0.02, (1.0 - share) / 0.15))


def linear(share: float, warm: float) -> float:
    return share / warm if share < warm else (1.0 - share) / (1.0 - warm)


def constant(share: float, warm: float) -> float:
    return min(1.0, share / warm)


SCHEDULES = {"cosine": cosine, "wsd": stable_decay, "linear": linear, "constant": constant}


def pretrain(rng: random.Random, shares: list[float], rates: list[float], steps: list[int]) -> list[float]:
    """Power law to an entropy floor; a high LR holds the loss up, and its decay lets it down."""
    floor, power = rng.uniform(1.2, 2.8), rng.uniform(0.25, 0.55)
    start, held = rng.uniform(8.0, 11.5), rng.uniform(0.02, 0.15)
    scale = rng.uniform(20.0, 400.0)
    return [floor + (start - floor) * (1 + s / scale) ** -power + held * lr for s, lr in zip(steps, rates, strict=True)]


def finetune(rng: random.Random, shares: list[float], rates: list[float], steps: list[int]) -> list[float]:
    """A few epochs: a quick fall, then flat, with a stair down where each epoch begins."""
    epochs, level = rng.randrange(2, 6), rng.uniform(0.8, 2.0)
    quick, stair = rng.uniform(0.2, 1.0), rng.uniform(0.1, 0.35)
    return [level * (1 - stair) ** int(x * epochs) + quick * math.exp(-x * epochs * 8) for x in shares]


def classify(rng: random.Random, shares: list[float], rates: list[float], steps: list[int]) -> list[float]:
    """Cross entropy of a classifier, exponential falls at every cut of the LR."""
    cuts = sorted(rng.uniform(0.3, 0.9) for _ in range(rng.randrange(3)))
    level = rng.uniform(0.5, 3.0)
    return [0.2 + level * 0.45 ** sum(x > cut for cut in cuts) * (0.4 + 0.6 * math.exp(-6 * x)) for x in shares]


def stages(rng: random.Random, shares: list[float], rates: list[float], steps: list[int]) -> list[float]:
    """Curriculum: at one or two points other data or longer sequences lower the loss at once."""
    plain = pretrain(rng, shares, rates, steps)
    cuts = [(rng.uniform(0.2, 0.9), rng.uniform(0.03, 0.4)) for _ in range(rng.randrange(1, 3))]
    return [x - sum(drop * (share > cut) for cut, drop in cuts) for x, share in zip(plain, shares, strict=True)]


DESCENTS = {"pretrain": pretrain, "finetune": finetune, "classify": classify, "stages": stages}


def draw_run(rng: random.Random, noise: str, descent: str) -> Run:
    size = int(math.exp(rng.uniform(math.log(300), math.log(12_000))))
    interval = rng.choice(INTERVALS)
    schedule, warm = SCHEDULES[rng.choice(list(SCHEDULES))], rng.uniform(0.005, 0.05)
    steps = [interval * (i + 1) for i in range(size)]
    shares = [i / size for i in range(size)]
    rates = [schedule(x, warm) for x in shares]
    level = DESCENTS[descent](rng, shares, rates, steps)
    width = math.exp(rng.uniform(math.log(0.002), math.log(0.15)))
    grows = rng.choice((0.0, 0.0, 1.0))  # noise that follows the level, or shrinks with it twice as fast
    ramp = rng.random() < 0.15  # the batch grows in four stages, the noise shrinks
    drawn = NOISES[noise](rng, size)
    mean = level[size // 2]
    scaled = [
        x * width * (mean if grows == 0.0 else 0.3 * mean + 0.7 * base) / (2.0 ** (int(4 * share) / 2) if ramp else 1.0)
        for x, base, share in zip(drawn, level, shares, strict=True)
    ]
    peak, hold = math.exp(rng.uniform(math.log(1e-5), math.log(6e-3))), 0.0
    norms = []
    for passed in shares:
        hold = 0.5 * hold + rng.gauss(0.0, 0.2)
        norms.append(math.exp(hold + 1.2 * math.exp(-12 * passed) + (rng.random() < 0.004) * rng.expovariate(0.7)))
    return Run(
        rng=rng, interval=interval, level=level, noise=scaled, lr=[peak * x for x in rates], norm=norms,
        launches=[None] * size, steps=steps,
    )  # fmt: skip


def log(run: Run, name: str, labels: tuple[Label, ...], zones: tuple[tuple[int, int], ...] = ()) -> Curve:
    """Write the run down as some logger would: averaged, rounded, with or without LR and norm."""
    rng = run.rng
    loss = [a + b for a, b in zip(run.level, run.noise, strict=True)]
    if rng.random() < 0.2:
        weight, smooth = rng.choice((0.6, 0.9, 0.95)), loss[0]
        for row, value in enumerate(loss):
            smooth = value if not math.isfinite(value) else weight * smooth + (1 - weight) * value
            loss[row] = smooth
    if run.nan_from is not None:
        loss[run.nan_from :] = [math.nan] * (len(loss) - run.nan_from)
    rounding = rng.choice(("none", "none", "6", "4", "4", "3", "bf16", "fp16"))
    loss = [_rounded(value, rounding) for value in loss]
    with_norm = rng.random() < 0.5
    rows = []
    for row, value in enumerate(loss):
        values = {"loss": value, "lr": run.lr[row]}
        if with_norm:
            values["grad_norm"] = run.norm[row]
        rows.append(values | {key: series[row] for key, series in run.sources.items()})
    spacing = max(1, run.size // 60) * run.interval
    return Curve(
        name=name, family=name.rsplit("-", 1)[0], steps=tuple(run.steps), values=tuple(rows),
        launches=tuple(run.launches), labels=labels, dont_care=zones,
        checkpoints=tuple(range(spacing, run.steps[-1] + 1, spacing)),
    )  # fmt: skip


def _rounded(value: float, rounding: str) -> float:
    if rounding == "none" or not math.isfinite(value) or value == 0.0:
        return value
    if rounding in ("bf16", "fp16"):
        quantum = math.ldexp(1.0, math.frexp(abs(value))[1] - (8 if rounding == "bf16" else 11))
        return round(value / quantum) * quantum
    return round(value, int(rounding))


def _onset(run: Run, low: float = 0.1, high: float = 0.8) -> int:
    return run.rng.randrange(max(40, int(low * run.size)), max(60, int(high * run.size)))


def _lift(run: Run, onset: int, excess: Callable[[int], float], norm: float = 0.0) -> None:
    for row in range(onset, run.size):
        run.level[row] += excess(row - onset)
        run.norm[row] *= 1.0 + norm * min(1.0, excess(row - onset) / (abs(excess(0)) + 1e-9))


def healthy(run: Run) -> tuple[Label, ...]:
    return ()


def spike(run: Run) -> tuple[Label, ...]:
    """Up at once by 10 to 100 sigmas, back within 1 to 40 points."""
    onset, length = _onset(run), math.exp(run.rng.uniform(0.0, math.log(12.0)))
    height = run.noise_near(onset) * math.exp(run.rng.uniform(math.log(10.0), math.log(100.0)))
    _lift(run, onset, lambda i: height * math.exp(-i / length) if i < 6 * length else 0.0, norm=3.0)
    return (Label(kind="instant-spike", onset_row=onset, peak_row=onset, end_row=onset + int(6 * length) + 1),)


def shift(run: Run) -> tuple[Label, ...]:
    """Up by 4 to 20 sigmas, and there it stays."""
    onset, height = _onset(run), run.rng.uniform(4.0, 20.0)
    size = height * run.noise_near(onset)
    _lift(run, onset, lambda _: size)
    return (Label(kind="level-shift", onset_row=onset),)


def gradual(run: Run) -> tuple[Label, ...]:
    """Up by 4 to 40 sigmas within 30 to 250 points, straight, rooted or exponential, and there it stays."""
    onset, height = _onset(run), run.noise_near(run.size // 2) * run.rng.uniform(4.0, 40.0)
    length, shape = run.rng.uniform(30.0, 250.0), run.rng.choice(("straight", "root", "exponential"))
    shapes: dict[str, Callable[[float], float]] = {
        "straight": lambda x: x, "root": math.sqrt, "exponential": lambda x: math.expm1(4.0 * x) / math.expm1(4.0),
    }  # fmt: skip
    _lift(run, onset, lambda i: height * shapes[shape](min(1.0, i / length)))
    return (Label(kind="gradual-divergence", onset_row=onset),)


def lost_weights(run: Run) -> tuple[Label, ...]:
    """The loss is back where the run began and falls again; half of the time the steps go back too."""
    onset = _onset(run, low=0.3)
    start, here = run.level[0], run.level[onset]
    _lift(run, onset, lambda i: 0.95 * (start - here) * (1.0 + i / 40.0) ** -0.8)
    if run.rng.random() < 0.5:
        _rewind(run, onset, run.rng.randrange(5, 60))
    return (Label(kind="reinit", onset_row=onset),)


def not_a_number(run: Run) -> tuple[Label, ...]:
    run.nan_from = _onset(run)
    return (Label(kind="nan", onset_row=run.nan_from),)


def wrong_rate(run: Run) -> tuple[Label, ...]:
    """A launch resumes with an LR multiplied by 1.5 to 10, or its schedule begins anew."""
    onset = _onset(run, low=0.3)
    if run.rng.random() < 0.7:
        _rewind(run, onset, run.rng.randrange(0, 60))
    if run.rng.random() < 0.3:
        warm = max(10, run.size // 50)
        run.lr[onset:] = [max(run.lr) * min(1.0, (i + 1) / warm) for i in range(run.size - onset)]
    else:
        factor = math.exp(run.rng.uniform(math.log(1.5), math.log(10.0)))
        run.lr[onset:] = [factor * lr for lr in run.lr[onset:]]
    height = run.noise_near(onset) * run.rng.uniform(0.0, 5.0)
    _lift(run, onset, lambda i: height * min(1.0, i / 60.0))
    return (Label(kind="lr-bug", onset_row=onset),)


def resume(run: Run) -> tuple[Label, ...]:
    """A launch goes back a little and the loss is a few sigmas higher for a while: nothing to act on."""
    onset, length = _onset(run), run.rng.uniform(5.0, 40.0)
    _rewind(run, onset, run.rng.randrange(1, 80))
    height = run.noise_near(onset) * run.rng.uniform(0.0, 8.0)
    _lift(run, onset, lambda i: height * math.exp(-3.0 * i / length))
    return (Label(kind="resume-bump", onset_row=onset, end_row=onset + int(2 * length), major=False),)


def mixture(run: Run) -> tuple[Label, ...]:
    """Two sources; their shares change, the sources go on as before."""
    onset, rng = _onset(run), run.rng
    gap, before, after = rng.uniform(0.3, 1.0), rng.uniform(0.3, 0.5), rng.uniform(0.7, 0.9)
    spread = run.noise_near(onset)
    share = [before if row < onset else after for row in range(run.size)]
    hard = [x + gap + y + rng.gauss(0.0, 0.3 * spread) for x, y in zip(run.level, run.noise, strict=True)]
    easy = [x + y + rng.gauss(0.0, 0.3 * spread) for x, y in zip(run.level, run.noise, strict=True)]
    run.sources = {"loss/hard": hard, "loss/easy": easy, "weight/hard": share, "weight/easy": [1 - x for x in share]}
    total = [s * a + (1 - s) * b for s, a, b in zip(share, hard, easy, strict=True)]
    run.level = [x - y for x, y in zip(total, run.noise, strict=True)]
    return (Label(kind="mix-shift", onset_row=onset, major=gap * (after - before) > 4.0 * spread),)


def _rewind(run: Run, row: int, points: int) -> None:
    back = min(points, row - 1) * run.interval
    for index in range(row, run.size):
        run.steps[index] -= back


EVENTS: dict[str, Callable[[Run], tuple[Label, ...]]] = {
    "healthy": healthy, "spike": spike, "shift": shift, "gradual": gradual, "reinit": lost_weights,
    "nan": not_a_number, "lr-bug": wrong_rate, "resume": resume, "mixture": mixture,
}  # fmt: skip


def draw(event: str, number: int, seed: int) -> Curve:
    """The `number`th series of an event; descents and noises take turns."""
    rng = random.Random(f"unseen/{seed}/{event}/{number}")
    noise = list(NOISES)[number % len(NOISES)]
    descent = list(DESCENTS)[(number // len(NOISES) + number) % len(DESCENTS)]
    run = draw_run(rng, noise, descent)
    drops = _drops(run)
    labels = EVENTS[event](run)
    return log(run, f"{noise}+{descent}-{event}{number}", (*labels, *drops))


def _drops(run: Run) -> tuple[Label, ...]:
    """The falls that belong to the run: stairs of epochs, cuts of the LR, other data. To name them is no false alarm."""
    level = run.level
    rows = [row for row in range(100, run.size) if level[row - 1] - level[row] > 2.0 * run.noise_near(row)]
    return tuple(Label(kind="level-drop", onset_row=row, end_row=row + 10, major=False) for row in rows)


def measure(count: int, seed: int, say: Callable[[str], None] = lambda _: None) -> dict[str, list[Row]]:
    """All tables: recall by event, false alarms of the healthy ones by noise and by descent, proposals."""
    seen: list[Row] = []
    alarms: list[Row] = []
    quiet: dict[str, Score] = {}
    every = Score()
    for event in EVENTS:
        say(event)
        score = Score()
        named: list[bool] = []
        for number in range(count if event != "healthy" else 3 * count):
            curve = draw(event, number, seed)
            found = run_detector(curve, score)
            score_curve(curve, found, score)
            score_curve(curve, found, every)
            named += [_is_named(found, label) for label in curve.labels if label.kind != "level-drop"]
            if event == "healthy":
                for key in curve.family.split("+"):
                    score_curve(curve, found, quiet.setdefault(key, Score()))
        if event != "healthy":
            major = [item for item in score.found if item.label.major or item.label.kind == "resume-bump"]
            score.found = [item for item in score.found if item.label.kind != "level-drop"]
            onset = onset_row(score, event)
            right = {name: onset[name] for name in ("|onset error| p50", "p90", "bound before onset")}
            proposals = proposal_row(score, event)
            seen.append(
                {"event": event, "recall": share(major), "so named": sum(named), "delay p50/p90": delays(major), **right,
                 "proposals": proposals["proposals"], "target before": proposals["target before onset"]}
            )  # fmt: skip
        alarms.append(alarm_row(score, event))
    by_kind = [alarm_row(score, key) for key, score in quiet.items()]
    return {"recall": seen, "alarms": [*alarms, alarm_row(every, "all")], "healthy": by_kind}


def _is_named(alarms: Sequence[Alarm], label: Label) -> bool:
    """Whether an event near the onset has the label's own name (a wrong LR is an LR mismatch)."""
    wanted = "lr-mismatch" if label.kind == "lr-bug" else label.kind
    return any(
        alarm.event is not None and alarm.event.kind.value == wanted and sees(alarm, label) for alarm in alarms
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detector.unseen", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="series of each event; three times as many healthy ones")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    tables = measure(options.count, options.seed, lambda event: print(event, end=" ", file=sys.stderr, flush=True))
    print(format_table(f"Unseen kinds of runs, seed {options.seed}, {options.count} a class", tables["recall"]))
    print(format_table("False alarms per 10k healthy points", tables["alarms"]))
    print(format_table("The healthy ones by noise and by descent", tables["healthy"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
