"""Series for the detector's tests: the benchmark's generator and a few lines more."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from benchmarks.detector.curves import Curve
from rollback.detect import Detector, Event

Points = Sequence[tuple[int, dict[str, float]]]


def noise(count: int, *, seed: int = 1, level: float = 2.0, sigma: float = 0.02, first: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level + rng.gauss(0.0, sigma) for _ in range(first, first + count)]


def fold(losses: Iterable[float | None], *, first: int = 0, finish: bool = False) -> tuple[Event, ...]:
    """Fold a plain loss, one point a step."""
    detector = Detector()
    for step, loss in enumerate(losses, first):
        detector.feed(step, {"loss": loss})
    if finish:
        detector.finish()
    return detector.events


def fold_curve(curve: Curve) -> Detector:
    detector = Detector()
    for step, values, launch in zip(curve.steps, curve.values, curve.launches, strict=True):
        detector.feed(step, values, launch=launch)
    return detector
