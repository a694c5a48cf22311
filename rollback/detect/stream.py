"""The order of the points: launches, rewinds, log intervals, two writers in one log. Values are not read here.

A segment starts where a launch begins or where the step goes back; what follows may be a resume bump. A change of the
log interval (AlgoPerf's PyTorch runs log the first 100 steps one by one, then every 500th) is known by its third point; the
two before wait, because a gap in the log begins like a longer interval, and a line that is logged beside the others like
a shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERLEAVED_TURNS = 6  # steps back among the last 24 points: no run restarts that often
TURN_WINDOW = 24
SAME_INTERVAL = 4.0  # a factor below this is irregular logging, not another interval
CONFIRM = 3  # points with another interval before it is accepted
BEGINNING_POINTS, RUN_POINTS = 1.5, 24  # steps so near to the first one begin a run; so many points make one before it
REPEATS_AT_MOST = 8  # more points than that under one step: the step column counts something else


@dataclass(frozen=True, slots=True)
class Placement:
    """How one point follows the one before it."""

    segment_start: bool = False
    rewound_from: int | None = None
    new_interval: bool = False
    denser: float = 1.0  # the old interval over the new one, where it changed
    unsettled: bool = (
        False  # not as far from the last point as usual: a gap, a line beside, or the first of another interval
    )
    repeated: bool = False
    another_run: bool = False  # the steps begin again where the log began: a second run in the same log
    interleaved: bool = False  # two writers are recognised with this point
    foreign: bool = False  # the other writer's point


ORDINARY = Placement()
REPEATED = Placement(repeated=True)
UNSETTLED = Placement(unsettled=True)
FOREIGN = Placement(foreign=True)


class Stream:
    """A fold over (step, launch); `interval` is the usual number of steps between two points."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.last_launch: int | None = None
        self.interval = 0.0
        self.candidate = 0.0
        self.candidate_count = 0
        self.points = 0
        self.turns = 0  # bits: which of the last points went back
        self.other_step: int | None = None  # the second writer's last step, while there is one
        self.descending = False  # the log is written newest first: its steps say nothing about restarts
        self.quiet = 0  # points since the second writer's last one
        self.repeats = 0  # further points with this step; negative once repeats are known to be the rule

    def feed(self, step: int, launch: int | None) -> Placement:
        """Say how this point follows the one before it."""
        last, previous_launch = self.last_step, self.last_launch
        self.points += 1
        if self.other_step is not None and last is not None and self._is_foreign(step, last):
            return FOREIGN
        self.last_step, self.last_launch = step, launch
        if last is None:
            self.first_step = step
            return ORDINARY
        started = launch != previous_launch and launch is not None and previous_launch is not None
        self.turns = ((self.turns << 1) | (step < last)) & ((1 << TURN_WINDOW) - 1)
        if step < last:
            return ORDINARY if self.descending else self._go_back(step, last)
        self.descending = False
        delta = step - last
        if delta == 0 and not started:
            return self._repeat()
        if self.repeats > 0:
            self.repeats = 0
        if delta == self.interval and not started:
            self.candidate_count = 0
            return ORDINARY
        before = self.interval
        changed = self._follow_interval(float(delta))
        if not changed and not started:
            return UNSETTLED if self.candidate_count else ORDINARY
        return Placement(segment_start=started, new_interval=changed, denser=before / self.interval if changed else 1.0)

    def _go_back(self, step: int, last: int) -> Placement:
        """Handle a step back: the first of a series is a rewind, the sixth shows that two writers share the log."""
        if self.turns & 0x3F == 0x3F:
            self.descending, self.turns = True, 0
            return ORDINARY
        turns = self.turns.bit_count()
        if turns >= INTERLEAVED_TURNS:
            self.turns = 0
            self.last_step, self.other_step = max(step, last), min(step, last)
            self.quiet = 0
            return Placement(interleaved=True, foreign=step < last)
        if turns == 1 and self._is_begun_again(step, last):
            return Placement(segment_start=True, rewound_from=last, another_run=True)
        return Placement(segment_start=turns == 1, rewound_from=last if turns == 1 else None)

    def _is_begun_again(self, step: int, last: int) -> bool:
        """Whether the steps are back where the log began, and that was the beginning of training."""
        near = BEGINNING_POINTS * max(self.interval, 1.0)
        first = self.first_step or 0
        return first <= near and step <= first + near and last - step >= RUN_POINTS * max(self.interval, 1.0)

    def _is_foreign(self, step: int, last: int) -> bool:
        """Whether a point continues the other writer's steps rather than ours."""
        other = self.other_step
        assert other is not None
        if step <= last and step >= other:
            self.other_step, self.quiet = step, 0
            return True
        self.quiet += 1
        if self.quiet > 4 * TURN_WINDOW:
            self.other_step = None
        return False

    def _repeat(self) -> Placement:
        """Handle the same step again (a second writer, the pixels of a plot): the first value of a step counts."""
        if self.repeats < 0:
            return ORDINARY
        self.repeats += 1
        if self.repeats > REPEATS_AT_MOST:
            self.repeats = -1
        return REPEATED

    def _follow_interval(self, delta: float) -> bool:
        """Accept another interval after three points of it; True when it replaces one that was in use."""
        if self.interval == 0.0:
            self.interval = delta
            return False
        if delta <= 0.0:
            return False
        if 1 / SAME_INTERVAL < delta / self.interval < SAME_INTERVAL:
            self.interval += (delta - self.interval) * 0.05
            self.candidate_count = 0
            return False
        if self.candidate > 0.0 and 1 / SAME_INTERVAL < delta / self.candidate < SAME_INTERVAL:
            self.candidate_count += 1
        else:
            self.candidate, self.candidate_count = delta, 1
        if self.candidate_count < CONFIRM:
            return False
        self.interval, self.candidate_count = delta, 0
        return True
