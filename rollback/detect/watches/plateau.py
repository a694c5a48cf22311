"""A plateau of the loss: the slope over fifty block means, with its confidence interval (Theil-Sen; Sen 1968).

Information, not an alarm: one notice when the slope's 95 % interval no longer lies below zero.
"""

from __future__ import annotations

import math
from collections import deque

BLOCK_POINTS, BLOCKS, LOOK_EVERY = 100, 50, 10  # points, blocks, blocks
IMPROVEMENT = 0.005  # of the level: less than that since the last notice is the same plateau
SENTENCE = f"no significant fall over the last {BLOCKS * BLOCK_POINTS} points"


class PlateauWatch:
    """A fold over the loss; it says once that a plateau is seen, again only after an improvement.

    The engine adds up the losses of a block by itself (a call a point costs as much as the sum) and ends the block here.
    """

    def __init__(self) -> None:
        self.blocks: deque[float] = deque(maxlen=BLOCKS)
        self.total, self.count, self.seen, self.level = 0.0, 0, 0, 0.0
        self.on_plateau = False

    def end_block(self) -> bool:
        """Fold the mean of a whole block; True when a plateau is seen for the first time."""
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


def is_falling(means: list[float]) -> bool:
    """Whether the upper end of the slope's 95 % interval lies below zero."""
    size = len(means)
    slopes = sorted((means[j] - means[i]) / (j - i) for i in range(size) for j in range(i + 1, size))
    spread = 1.96 * math.sqrt(size * (size - 1) * (2 * size + 5) / 18.0)
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2.0))
    return slopes[upper] < 0.0
