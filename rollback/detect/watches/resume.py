"""A resume beside the curve that it left: the mean of the first points after a restart, judged against its own error.

After a step back the same steps were logged before: the loss is compared with what it was at each of them. After a
launch that goes on, with the last points before it. Both signs.
"""

from __future__ import annotations

import math
from collections import deque

from rollback.detect.constants import EQUIVALENT, HIGH_RISE, USUAL_POINTS
from rollback.detect.events import Kind, Status, Tier
from rollback.detect.watches import Finding

PAST_POINTS = 1024
LOOKS = (8, 16, 32, 48)  # points after the restart at which the mean is judged
MEAN_POINTS = 8
BUMP_ERRORS = 4.0  # standard errors of that mean


class ResumeWatch:
    """A fold over the leading loss; `restart` says that a launch begins with the next point."""

    def __init__(self) -> None:
        self.past: deque[tuple[int, float]] = deque(maxlen=PAST_POINTS)
        self.expected: list[tuple[int, float]] = []
        self.count, self.total, self.row, self.step = -1, 0.0, 0, 0  # count -1: nothing is compared
        self.fall = 0.0  # of the loss before the restart
        self.error = 0.0  # of a mean of `MEAN_POINTS` points, as the run itself shows it

    def restart(self, row: int, step: int, *, rewound: bool) -> None:
        """Begin to compare: with the abandoned curve where the steps went back, else with the level before."""
        self.expected, self.fall = [], math.inf
        self.error = error_of_means([value for _, value in self.past])
        if rewound:
            while self.past and self.past[-1][0] >= step:
                self.expected.append(self.past.pop())
            self.expected.reverse()
        elif len(self.past) >= USUAL_POINTS:
            last = sorted(value for _, value in list(self.past)[-USUAL_POINTS:])
            self.expected = [(step, last[len(last) // 2])]
            self.fall = self._own_fall()
        self.count, self.total, self.row, self.step = (0 if self.expected else -1), 0.0, row, step

    def _own_fall(self) -> float:
        """By how much the loss fell over the last 256 points; infinite where that is not known."""
        values = [value for _, value in list(self.past)[-10 * USUAL_POINTS :]]
        if len(values) < 10 * USUAL_POINTS:
            return math.inf
        early, late = sorted(values[: 2 * USUAL_POINTS]), sorted(values[-2 * USUAL_POINTS :])
        return max(0.0, early[USUAL_POINTS] - late[USUAL_POINTS])

    def feed(self, step: int, value: float, noise: float, *, troubled: bool) -> Finding | None:
        """Fold one loss; `noise` is the standard deviation of one point; `troubled`: an event is open."""
        finding = self._compare(step, value, noise) if self.count >= 0 else None
        if not troubled:
            self.past.append((step, value))
        return finding

    def _compare(self, step: int, value: float, noise: float) -> Finding | None:
        beside = len(self.expected) > 1
        while len(self.expected) > 1 and self.expected[1][0] <= step:
            self.expected.pop(0)
        if beside and len(self.expected) <= 1:
            self.count = -1
            return None
        self.total += value - self.expected[0][1]
        self.count += 1
        count = self.count
        if count not in LOOKS or noise <= 0.0:
            return None
        mean = self.total / count
        error = max(self.error * math.sqrt(MEAN_POINTS / count), noise / math.sqrt(count))
        if beside:
            error *= math.sqrt(2.0)
        found = abs(mean) > max(BUMP_ERRORS * error, EQUIVALENT * noise)
        if not beside and mean < 0.0:  # lower than its own descent explains: it probably sees data again
            found = -mean > 2.0 * self.fall + HIGH_RISE * noise
        if found or count == LOOKS[-1]:
            self.count = -1
        if not found:
            return None
        where = "at the same steps before" if beside else "before the restart"
        kind, word, tier = Kind.RESUME_BUMP, "higher", Tier.NOTICE
        if mean < 0.0:
            kind, word = Kind.RESUME_DROP, "lower"
            if not beside:
                kind, tier = Kind.TOO_GOOD, Tier.WARN
        sentence = f"after the restart the loss is {abs(mean):.3g} {word} than {where}"
        return Finding(
            kind=kind, tier=tier, sentence=sentence, row=self.row, step=self.step, status=Status.RECOVERED, excess=mean,
            sigmas=mean / noise,
        )  # fmt: skip


def error_of_means(values: list[float]) -> float:
    """Return the standard error of a mean of `MEAN_POINTS` points: by second differences, which no trend moves."""
    recent = values[-16 * MEAN_POINTS :]
    starts = range(0, len(recent) - MEAN_POINTS + 1, MEAN_POINTS)
    means = [math.fsum(recent[at : at + MEAN_POINTS]) / MEAN_POINTS for at in starts]
    bends = sorted(abs(means[i - 1] - 2.0 * means[i] + means[i + 1]) for i in range(1, len(means) - 1))
    return bends[len(bends) // 2] / (0.6745 * math.sqrt(6.0)) if len(bends) >= 4 else 0.0
