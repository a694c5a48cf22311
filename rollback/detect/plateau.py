"""A run that has stopped learning: Theil-Sen slope over fifty block means, with its confidence interval (Sen 1968).

Information, not trouble: one notice when the slope's 95 % interval no longer lies below zero.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

BLOCK_POINTS = 100
BLOCKS = 50
LOOK_EVERY = 10  # blocks
IMPROVEMENT = 0.005  # of the level: less than that since the last notice is the same plateau
Z_95 = 1.96


class PlateauWatch:
    """A fold over the loss; `feed` returns True once when a plateau is seen, again only after an improvement."""

    __slots__ = ("blocks", "count", "level", "on_plateau", "seen", "total")

    def __init__(self) -> None:
        self.blocks: deque[float] = deque(maxlen=BLOCKS)
        self.total, self.count, self.seen, self.level = 0.0, 0, 0, 0.0
        self.on_plateau = False

    def feed(self, value: float) -> bool:
        self.total += value
        self.count += 1
        if self.count < BLOCK_POINTS:
            return False
        self.blocks.append(self.total / self.count)
        self.total, self.count = 0.0, 0
        self.seen += 1
        if len(self.blocks) < BLOCKS or self.seen % LOOK_EVERY:
            return False
        recent = list(self.blocks)[-LOOK_EVERY:]
        level = math.fsum(recent) / len(recent)
        if self.on_plateau:
            self.on_plateau = level > self.level - IMPROVEMENT * abs(self.level)
            return False
        self.on_plateau, self.level = not is_falling(list(self.blocks)), level
        return self.on_plateau

    def to_json(self) -> dict[str, Any]:
        return {"blocks": list(self.blocks), "total": self.total, "count": self.count, "seen": self.seen,
                "on_plateau": self.on_plateau, "level": self.level}  # fmt: skip

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> PlateauWatch:
        watch = cls()
        watch.blocks.extend(record["blocks"])
        watch.total, watch.count, watch.seen = record["total"], record["count"], record["seen"]
        watch.on_plateau, watch.level = record["on_plateau"], record["level"]
        return watch


def is_falling(means: list[float]) -> bool:
    """Whether the upper end of the slope's 95 % interval lies below zero."""
    size = len(means)
    slopes = sorted((means[j] - means[i]) / (j - i) for i in range(size) for j in range(i + 1, size))
    spread = Z_95 * math.sqrt(size * (size - 1) * (2 * size + 5) / 18.0)
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2.0))
    return slopes[upper] < 0.0
