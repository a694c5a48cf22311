"""Small logs of every kind of incident, generated from fixed seeds: what the detector makes of them is recorded.

    python -m tests.detect.recorded > tests/detect/recorded_events.txt        # only when its judgement changes on purpose
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping

from rollback.detect import Detector, Event

Row = tuple[int, Mapping[str, float | None], int | None]  # step, values, launch
SEEDS = (1, 2, 3)


def losses(
    rng: random.Random, size: int, *, sigma: float = 0.02, phi: float = 0.0, tail: float = 0.0, descent: float = 3.0
) -> list[float]:
    """A falling loss with noise of one point `sigma`, correlated by `phi`; a share `tail` of the points is skewed."""
    level, found = 0.0, []
    for step in range(size):
        level = phi * level + rng.gauss(0.0, sigma * math.sqrt(1.0 - phi * phi))
        skew = sigma * 4.0 * rng.expovariate(1.0) if rng.random() < tail else 0.0
        found.append(2.0 + descent / (1.0 + step / 60.0) + level + skew)
    return found


def rows(values: list[float], **others: list[float]) -> list[Row]:
    """One launch, one point a step."""
    return [
        (step, {"loss": loss, **{name: other[step] for name, other in others.items()}}, 1) for step, loss in enumerate(values)
    ]


def launches(steps: list[int], values: list[float], second: int) -> list[Row]:
    """Two launches in one log, the second from this row on."""
    return [(step, {"loss": loss}, 1 + (row >= second)) for row, (step, loss) in enumerate(zip(steps, values, strict=True))]


def healthy(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """No event: white, slow, skewed and rounded noise."""
    for name, options in (
        ("white", {}), ("slow", {"phi": 0.9}), ("slower", {"phi": 0.98}), ("skewed", {"tail": 0.1}),
        ("skewed slow", {"tail": 0.05, "phi": 0.9}),
    ):  # fmt: skip
        yield name, rows(losses(random.Random(seed), 2500, **options))
    yield "two decimals", rows([round(value, 2) for value in losses(random.Random(seed), 1500, sigma=0.006)])
    coarse = losses(random.Random(seed), 2500, sigma=0.002, tail=0.01, descent=0.3)
    yield "coarse", rows([round(value, 2) for value in coarse])
    drift, noise = losses(random.Random(seed), 5000, sigma=0.012, phi=0.99, descent=0.5), random.Random(seed + 100)
    yield "white on slow drift", rows([value + noise.gauss(0.0, 0.02) for value in drift])
    yield "bf16", rows([round(value * 64) / 64 for value in losses(random.Random(seed), 1500, sigma=0.012)])


def spikes(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """One or more high points that go away."""
    for name, at, size, width in (
        ("one point", 700, 12.0, 1), ("two points", 700, 5.2, 2), ("six points", 700, 9.0, 6), ("small", 700, 5.0, 1),
        ("early", 60, 20.0, 2), ("huge", 400, 400.0, 3),
    ):  # fmt: skip
        values = losses(random.Random(seed), 1000, tail=0.03)
        for step in range(at, at + width):
            values[step] += size * 0.02
        yield name, rows(values)
    values = losses(random.Random(seed), 1200)
    for step in (600, 640, 700, 760, 800):
        values[step] += 0.8
    yield "a series", rows(values)


def rises(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Steps and ramps that stay, and some that go back."""
    for size in (1.0, 2.0, 4.0, 10.0, 100.0):
        values = losses(random.Random(seed), 2000)
        yield f"step of {size:g} sigma", rows([value + 0.02 * size * (step >= 900) for step, value in enumerate(values)])
    for name, slope, phi, start in (
        ("slow ramp", 0.01, 0.0, 900), ("ramp", 0.05, 0.0, 900), ("ramp in slow noise", 0.05, 0.95, 900),
        ("early ramp", 0.2, 0.0, 90), ("ramp while young", 0.1, 0.0, 320),
    ):  # fmt: skip
        values = losses(random.Random(seed), start + 900, phi=phi)
        yield name, rows([value + 0.02 * slope * max(0, step - start) for step, value in enumerate(values)])
    values = losses(random.Random(seed), 4000, descent=0.5)
    bump = [0.06 * math.exp(-(((step - 1200) / 90.0) ** 2)) for step in range(4000)]
    again = [0.06 * math.exp(-(((step - 3000) / 90.0) ** 2)) for step in range(4000)]
    yield "two slow bumps", rows([value + a + b for value, a, b in zip(values, bump, again, strict=True)])
    values = losses(random.Random(seed), 2200)
    yield "second rise", rows([v + 0.1 * (step >= 900) + 0.2 * (step >= 1150) for step, v in enumerate(values)])
    values = losses(random.Random(seed), 2200)
    values[1000] += 0.5
    yield "spike on a step", rows([value + 0.1 * (step >= 900) for step, value in enumerate(values)])
    values = losses(random.Random(seed), 1500)
    factors = [1.0 + min(1.0, max(0, step - 400) / 60) for step in range(1500)]
    yield "doubled from 400 on", rows([value * factor for value, factor in zip(values, factors, strict=True)])
    values = losses(random.Random(seed), 1400)
    yield "still open at the end", rows([value + 0.0006 * max(0, step - 1300) for step, value in enumerate(values)])


def falls(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """The loss drops, the throughput falls, the loss scale collapses."""
    values = losses(random.Random(seed), 1500)
    yield "drop", rows([value - 0.6 * (step >= 800) for step, value in enumerate(values)])
    rng = random.Random(seed)
    speed = [rng.gauss(1000.0, 10.0) - 300.0 * (step >= 700) for step in range(1200)]
    yield "throughput", rows(losses(rng, 1200), tokens_per_second=speed)
    worse = [value + 0.3 * (step >= 700) for step, value in enumerate(losses(rng, 1200))]
    yield "throughput and loss", rows(worse, tokens_per_second=speed)
    scale = [65536.0 if step < 700 else max(1.0, 65536.0 / 2 ** ((step - 700) // 5)) for step in range(1200)]
    yield "loss scale", rows(losses(rng, 1200), loss_scale=scale)
    first = [2.0 ** (24 - step // 3) if step < 30 else 16384.0 for step in range(600)]
    yield "loss scale at the start", rows(losses(rng, 600), loss_scale=first)


def broken(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """NaN, and weights that are lost."""
    for count in (1, 2, 3, 20):
        values = losses(random.Random(seed), 900)
        values[600 : 600 + count] = [math.nan] * count
        yield f"{count} NaN", rows(values)
    values = losses(random.Random(seed), 800)
    values[-2:] = [math.nan] * 2
    yield "NaN at the end", rows(values)
    values = losses(random.Random(seed), 1500)
    lost = [value + 3.0 * math.exp(-(step - 800) / 300) * (step >= 800) for step, value in enumerate(values)]
    yield "lost weights", rows(lost)
    yield "lost weights at a restart", [(step, values, 1 + (step >= 800)) for step, values, _ in rows(lost)]


def norms(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Gradient norms that move alone or before the loss."""
    rng = random.Random(seed)

    def norm(factor: float, first: int, last: int) -> list[float]:
        return [rng.lognormvariate(0.0, 0.3) * (factor if first <= step < last else 1.0) for step in range(1300)]

    yield "norm alone, short", rows(losses(rng, 1300), grad_norm=norm(12.0, 700, 703))
    yield "norm alone, lasting", rows(losses(rng, 1300), grad_norm=norm(12.0, 700, 1300))
    yield "norm a little higher", rows(losses(rng, 1300), grad_norm=norm(1.7, 700, 1300))
    rise = [value + 0.002 * max(0, step - 720) for step, value in enumerate(losses(rng, 1300))]
    yield "norm before the loss", rows(rise, grad_norm=norm(5.0, 690, 1300))
    spike = losses(rng, 1300)
    spike[700] += 0.6
    yield "spike with a norm that explodes", rows(spike, grad_norm=norm(40.0, 699, 702))
    low = [rng.lognormvariate(0.0, 0.3) if not 700 <= step < 703 else math.nan for step in range(1300)]
    yield "norm NaN", rows(losses(rng, 1300), grad_norm=low, z_loss=norm(1.0, 0, 0))


def rates(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Wrong learning rates."""
    rng = random.Random(seed)

    def schedule(step: int) -> float:
        return 3e-4 * min(1.0, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / 4000))

    right = [schedule(step) for step in range(1200)]
    yield "right", rows(losses(rng, 1200), lr=right)
    yield "begun again", rows(losses(rng, 1200), lr=[*right[:700], *right[:500]])
    raised = [lr * (2.0 if step >= 700 else 1.0) for step, lr in enumerate(right)]
    rising = [value + 0.004 * max(0, step - 720) for step, value in enumerate(losses(rng, 1200))]
    yield "raised, and the loss rises", rows(rising, lr=raised)
    passing = [value + 0.1 * (705 <= step < 765) for step, value in enumerate(losses(rng, 1200))]
    doubled = [lr * (2.0 if 700 <= step < 760 else 1.0) for step, lr in enumerate(right)]
    yield "raised for a while, and the loss with it", rows(passing, lr=doubled)
    yield "the same rise under the right LR", rows(passing, lr=right)
    low = [lr * (0.3 if step >= 300 else 1.0) for step, lr in enumerate(right)]
    back = [*low[:700], *[lr * 0.55 for lr in right[600:1100]]]
    steps = [*range(700), *range(600, 1100)]
    values = losses(rng, 1200)
    points = enumerate(zip(steps, values, back, strict=True))
    yield "above the parent's", [(s, {"loss": v, "lr": lr}, 1 + (i >= 700)) for i, (s, v, lr) in points]
    halved = [lr * (0.5 if 700 <= step < 900 else 1.0) for step, lr in enumerate(right)]
    yield "not as promised", rows(values, lr=halved, **{"lr/expected": right})


def restarts(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Launches that go on, go back, are bumped or see data again."""
    for name, back, change in (
        ("plain", 0, lambda age: 0.0),
        ("rewound", 150, lambda age: 0.0),
        ("bump", 0, lambda age: 0.15 * math.exp(-age / 12)),
        ("rewound and worse", 100, lambda age: 0.15),
        ("data again", 0, lambda age: -0.3 * min(1.0, age / 60)),
        ("other weights", 0, lambda age: -0.5),
        ("bump that stays", 0, lambda age: 0.2),
    ):
        values = losses(random.Random(seed), 1500)
        steps = [step if step < 800 else step - back for step in range(1500)]
        moved = [value + (change(i - 800) if i >= 800 else 0.0) for i, value in enumerate(values)]
        yield name, launches(steps, moved, 800)
    values = losses(random.Random(seed), 1500)
    rise = [value + 0.004 * max(0, step - 700) * (step < 850) for step, value in enumerate(values)]
    steps = [step if step < 850 else step - 300 for step in range(1500)]
    yield "taken back in time", launches(steps, rise, 850)
    yield "taken back, and again", launches(steps, [value + 0.004 * max(0, i - 1100) for i, value in enumerate(rise)], 850)


def orders(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Two writers, repeated steps, a log written newest first, another interval."""
    rng = random.Random(seed)
    values = losses(rng, 1400)
    yield "two writers", [(i // 2 if i % 2 else 700 + i // 2, {"loss": value}, None) for i, value in enumerate(values)]
    yield "each step twice", [(i // 2, {"loss": value}, None) for i, value in enumerate(values)]
    wild = [value + (4.0 if i % 2 and 600 < i < 700 else 0.0) for i, value in enumerate(values)]
    yield "second values are wild", [(i // 2, {"loss": value}, None) for i, value in enumerate(wild)]
    yield "newest first", [(1400 - i, {"loss": value}, None) for i, value in enumerate(values)]
    late = [step if step < 100 else 100 + 50 * (step - 100) for step in range(1400)]
    yield "another interval", [(step, {"loss": value}, None) for step, value in zip(late, values, strict=True)]
    yield "nothing learnt", rows([3.0 + rng.gauss(0.0, 0.02) for _ in range(7100)])


def mixtures(seed: int) -> Iterator[tuple[str, list[Row]]]:
    """Sources of data: one that moves, all that move, and shares that change."""
    rng = random.Random(seed)
    for name, moved, shifted in (("one source", 0.4, False), ("the mixture", 0.0, True), ("nothing", 0.0, False)):
        points: list[Row] = []
        for step in range(1200):
            after = step >= 700
            easy, hard = 1.5 + rng.gauss(0.0, 0.02), 2.5 + rng.gauss(0.0, 0.02) + (moved if after else 0.0)
            share = 0.8 if after and shifted else 0.4
            total = share * hard + (1.0 - share) * easy
            points.append((step, {"loss": total, "loss/easy": easy, "loss/hard": hard, "ratio/hard": share}, 1))
        yield name, points


MAKERS: tuple[Callable[[int], Iterator[tuple[str, list[Row]]]], ...] = (
    healthy, spikes, rises, falls, broken, norms, rates, restarts, orders, mixtures,
)  # fmt: skip


def fold(points: list[Row]) -> tuple[Event, ...]:
    """The events of one log."""
    detector = Detector()
    for step, values, launch in points:
        detector.feed(step, values, launch=launch)
    detector.finish()
    return detector.events


def describe(event: Event) -> str:
    """One event in a line: what it is, where it began, was seen and ended, and its cluster."""
    when = f"{event.onset_low_row}<={event.onset_row} alarm {event.alarm_row} until {event.recovered_row}"
    what = f"{event.tier.value} {event.kind.value} {event.status.value}"
    return f"{what} {when} cluster {event.cluster} on {' '.join(event.channels)}".rstrip()


def record() -> Iterator[str]:
    """Lines of the whole record."""
    for maker in MAKERS:
        for seed in SEEDS:
            for name, points in maker(seed):
                yield f"{maker.__name__}: {name}, seed {seed}"
                yield from (f"    {describe(event)}" for event in fold(points))


if __name__ == "__main__":
    print("\n".join(record()))
