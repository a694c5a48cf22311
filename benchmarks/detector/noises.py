"""Kinds of noise of a loss: white, heavy tails, a tail to one side, correlated, and on the wave of an epoch."""

import math
import random
from collections.abc import Callable

Noise = Callable[[random.Random, int], list[float]]


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
