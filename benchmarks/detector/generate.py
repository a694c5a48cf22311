"""Series with a known truth, calibrated to the seed's 80B run: level 1.655, noise 0.0115 (1.5 bf16 quanta), bumps on resume.

Every class is drawn with its own seed, so that one class can be looked at alone. The constants come from the
published plots and numbers of that run (research notes, §3.1), not from the detector.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.detector.curves import Curve, Label

BASE_LR = 5e-5
WARM_UP_STEPS, LAST_STEP = 2_000, 500_000
START_STEP = 15_000
CHECKPOINT_INTERVAL = 250


def seed_lr(step: int, factor: float = 1.0) -> float:
    """The seed's schedule: linear warm-up to 5e-5 in 2,000 steps, then linear decay to 0 at 500,000."""
    return factor * BASE_LR * min(step / WARM_UP_STEPS, (LAST_STEP - step) / (LAST_STEP - WARM_UP_STEPS))


def to_bf16(value: float) -> float:
    """Round to the nearest bf16 number and print it with four decimals, as the run's log did."""
    quantum = math.ldexp(1.0, math.frexp(value)[1] - 8)
    return round(round(value / quantum) * quantum, 4)


@dataclass(slots=True)
class Draft:
    """A healthy series to be damaged: plain lists, one item a logged point."""

    random: random.Random
    steps: list[int]
    loss: list[float]
    lr: list[float]
    norm: list[float]
    launches: list[int | None]
    sigma: float
    bf16: bool = True

    def curve(self, name: str, labels: tuple[Label, ...], **more: object) -> Curve:
        shown = [to_bf16(x) if self.bf16 and math.isfinite(x) else x for x in self.loss]
        values = tuple(
            {"loss": x, "lr": lr, "grad_norm": norm} for x, lr, norm in zip(shown, self.lr, self.norm, strict=True)
        )
        return Curve(
            name=name, family=f"generated/{name.rsplit('-', 1)[0]}", steps=tuple(self.steps), values=values,
            launches=tuple(self.launches), labels=labels,
            checkpoints=tuple(range(START_STEP, self.steps[-1] + 1, CHECKPOINT_INTERVAL)), **more,  # type: ignore[arg-type]
        )  # fmt: skip


def healthy(rng: random.Random, points: int = 6_000, *, red: float = 0.0) -> Draft:
    """The 80B run on a good day; `red` adds slow noise of that many sigmas (time constant 100 steps)."""
    sigma, rho = rng.uniform(0.008, 0.016), rng.uniform(0.0, 0.35)
    level, slope = rng.uniform(1.64, 1.75), rng.uniform(0.0, 2e-6)
    noise = slow = norm = 0.0
    steps, loss, lrs, norms = [], [], [], []
    for index in range(points):
        noise = rho * noise + rng.gauss(0.0, sigma * math.sqrt(1 - rho * rho))
        slow = 0.99 * slow + rng.gauss(0.0, red * sigma * math.sqrt(1 - 0.99**2)) if red else 0.0
        norm = 0.3 * norm + rng.gauss(0.0, 0.12)
        steps.append(START_STEP + index)
        loss.append(level - slope * index + noise + slow)
        lrs.append(seed_lr(START_STEP + index, 0.75))
        norms.append(0.3 * math.exp(norm + (rng.random() < 0.002) * rng.uniform(1.0, 2.5)))
    return Draft(rng, steps, loss, lrs, norms, [1] * points, sigma)


def add(draft: Draft, onset: int, excess: Callable[[int], float], *, leads: int | None = None) -> None:
    """Add `excess(points since onset)` to the loss; the gradient norm rises `leads` points earlier when asked."""
    for index in range(onset, len(draft.loss)):
        draft.loss[index] += excess(index - onset)
    if leads is None:
        return
    for index in range(onset - leads, len(draft.norm)):
        grown = excess(index - onset + leads) / draft.sigma
        draft.norm[index] *= min(100.0, 1.0 + 0.3 * max(0.0, grown))


def add_restarts(draft: Draft, rows: tuple[int, ...]) -> None:
    """A new launch at each row, with the seed's resume bump: 0.07 to 0.10 nats for 15 to 50 steps."""
    for launch, row in enumerate(rows, 2):
        height, length = draft.random.uniform(0.07, 0.10), draft.random.uniform(15.0, 50.0)
        for index in range(row, len(draft.loss)):
            draft.launches[index] = launch
            draft.loss[index] += height * math.exp(-3.0 * (index - row) / length)


def rewind(draft: Draft, row: int, to_step: int) -> None:
    """From `row` on the log continues at `to_step`, as after a rollback."""
    for index in range(row, len(draft.steps)):
        draft.steps[index] = to_step + index - row
        draft.launches[index] = (draft.launches[row - 1] or 1) + 1


def make_instant(rng: random.Random, name: str) -> Curve:
    """A spike of 0.1 to 2 nats, back within 10 to 60 points."""
    draft, onset = healthy(rng), rng.randrange(600, 5_000)
    height, length = rng.uniform(0.1, 2.0), rng.uniform(3.0, 20.0)
    add(draft, onset, lambda i: height * math.exp(-i / length))
    return draft.curve(name, (Label(kind="instant-spike", onset_row=onset, end_row=onset + int(6 * length)),))


def make_step(rng: random.Random, name: str) -> Curve:
    """A level shift of 2 to 6 sigma that stays."""
    draft, onset = healthy(rng), rng.randrange(600, 5_000)
    height = rng.uniform(2.0, 6.0) * draft.sigma
    add(draft, onset, lambda _: height)
    return _divergence(draft, "level-shift", onset, name)


def make_exponential(rng: random.Random, name: str) -> Curve:
    """exp7: an e-fold every 10 to 40 steps from half a sigma, to at most 3 nats."""
    draft, onset = healthy(rng), rng.randrange(600, 5_000)
    fold = rng.uniform(10.0, 40.0)
    add(draft, onset, lambda i: min(3.0, 0.5 * draft.sigma * math.expm1(min(60.0, i / fold))), leads=rng.randrange(12))
    return _divergence(draft, "gradual-divergence", onset, name)


def make_ramp(rng: random.Random, name: str) -> Curve:
    """exp3: up by 1.4 sigma (0.015 nats) within 20 to 150 steps, and it stays there."""
    draft, onset = healthy(rng), rng.randrange(600, 5_000)
    length, height = rng.uniform(20.0, 150.0), 1.4 * draft.sigma
    add(draft, onset, lambda i: height * min(1.0, i / length))
    return _divergence(draft, "gradual-divergence", onset, name)


def make_nan(rng: random.Random, name: str) -> Curve:
    """Healthy, then NaN for good."""
    draft, onset = healthy(rng), rng.randrange(40, 5_000)
    draft.loss[onset:] = [math.nan] * (len(draft.loss) - onset)
    return _divergence(draft, "nan", onset, name)


def make_reinit(rng: random.Random, name: str) -> Curve:
    """A restart that lost the weights: the loss begins at 11 again and descends; steps and LR go on."""
    draft, onset = healthy(rng), rng.randrange(600, 5_000)
    for index in range(onset, len(draft.loss)):
        draft.launches[index] = 2
        draft.loss[index] += 9.3 * (1.0 + (index - onset) / 60.0) ** -0.7
    level = min(draft.loss[:100]) + 2 * draft.sigma
    first = [11.0 * (1.0 + i / 50.0) ** -0.5 for i in range(400)]  # the run's own first steps stand in front
    _prepend(draft, [max(x, level) + rng.gauss(0.0, draft.sigma) for x in first])
    return _divergence(draft, "reinit", onset + 400, name)


def make_lr_bug(rng: random.Random, name: str) -> Curve:
    """exp8/9: a rollback whose LR restarts from zero and climbs past the intended one; later the loss blows up."""
    draft, onset = healthy(rng, 4_000), rng.randrange(800, 2_000)
    rewind(draft, onset, draft.steps[onset] - 500)
    kind = rng.choice(("restarted", "doubled", "tenfold"))
    for index in range(onset, len(draft.lr)):
        intended = seed_lr(draft.steps[index], 0.375)
        since = index - onset + 1
        draft.lr[index] = (
            seed_lr(since) if kind == "restarted" else (2.0 if kind == "doubled" else 10.0) * intended * 2.0
        )
    add(draft, onset + 700, lambda i: min(4.0, 0.02 * math.expm1(min(60.0, i / 40.0))))
    labels = (Label(kind="lr-bug", onset_row=onset), Label(kind="gradual-divergence", onset_row=onset + 700))
    return draft.curve(name, labels)


def make_healthy(rng: random.Random, name: str) -> Curve:
    return healthy(rng).curve(name, ())


def make_restarts(rng: random.Random, name: str) -> Curve:
    """Seven restarts with bumps and nothing else."""
    draft = healthy(rng)
    rows = tuple(sorted(rng.sample(range(400, 5_800), 7)))
    add_restarts(draft, rows)
    labels = tuple(Label(kind="resume-bump", onset_row=row, end_row=row + 60, major=False) for row in rows)
    return draft.curve(name, labels)


def make_red(rng: random.Random, name: str) -> Curve:
    """Slow noise of 0.43 sigma with a time constant of 100 steps: nothing is wrong."""
    return healthy(rng, red=0.43).curve(name, ())


def make_early(rng: random.Random, name: str) -> Curve:
    """A run from its first step: power-law descent, noise of 0.2 to 5 % of the level, log interval 1 to 100."""
    points, interval = rng.randrange(400, 3_000), rng.choice((1, 5, 10, 50, 100))
    floor, amplitude = rng.uniform(0.3, 3.0), rng.uniform(2.0, 8.0)
    noise, power = rng.uniform(0.002, 0.05), rng.uniform(0.3, 0.8)
    steps = [interval * (i + 1) for i in range(points)]
    loss = [(floor + amplitude * (1 + s / 50) ** -power) * math.exp(rng.gauss(0.0, noise)) for s in steps]
    lrs = [1e-3 * min(1.0, s / 200) for s in steps]
    norms = [math.exp(rng.gauss(0.0, 0.3)) for _ in steps]
    draft = Draft(rng, steps, loss, lrs, norms, [None] * points, noise, bf16=False)
    return draft.curve(name, ())


MAKERS: dict[str, Callable[[random.Random, str], Curve]] = {
    "instant": make_instant, "step": make_step, "exponential": make_exponential, "ramp": make_ramp, "nan": make_nan,
    "reinit": make_reinit, "lr-bug": make_lr_bug, "healthy": make_healthy, "restarts": make_restarts, "red": make_red,
    "early": make_early,
}  # fmt: skip


def generate(kind: str, count: int, seed: int = 2023) -> Iterator[Curve]:
    """Yield `count` series of a class; the same seed gives the same series."""
    for number in range(count):
        yield MAKERS[kind](random.Random(f"{seed}/{kind}/{number}"), f"{kind}-{number}")


def _divergence(draft: Draft, kind: str, onset: int, name: str) -> Curve:
    return draft.curve(name, (Label(kind=kind, onset_row=onset),))


def _prepend(draft: Draft, loss: list[float]) -> None:
    count = len(loss)
    draft.loss[:0] = loss
    draft.steps[:0] = range(draft.steps[0] - count, draft.steps[0])
    draft.lr[:0] = [draft.lr[0]] * count
    draft.norm[:0] = [draft.norm[0]] * count
    draft.launches[:0] = [1] * count
