"""Detectors of single signals: the learning rate, the fp16 loss scale, NaN in disguise, and a plateau of the loss.

Each keeps a few numbers, returns a finding when something begins or ends, and knows no other channel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Self


class Watch:
    """A fold whose state is what `__slots__` names: numbers, and lists or deques of numbers or pairs."""

    __slots__: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: _listed(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Rebuild the fold from `to_json`."""
        watch = cls()
        for name in cls.__slots__:
            value = record[name]
            if isinstance(value, list):
                value = [tuple(item) if isinstance(item, list) else item for item in value]
                known = getattr(watch, name)
                value = deque(value, maxlen=known.maxlen) if isinstance(known, deque) else value
            setattr(watch, name, value)
        return watch


def _listed(value: Any) -> Any:
    return [list(item) if isinstance(item, tuple) else item for item in value] if isinstance(value, deque | list) else value


# --- The learning rate

# With an expectation (channel `lr/expected`, from the contract) the observed LR must agree to 1 %.
# Without one it is compared with the run's own past, and four things are reported: an LR that fell to almost nothing;
# one that fell at the start of a launch and climbs again; one higher than ever in this run; one that jumped up where a
# launch began, against the last point or against the parent at the same step. Decays by any factor of a usual schedule
# are not reported.

TOLERANCE = 0.01
VANISHED = 0.02  # of the LR before, from one point to the next: no schedule decays like that
SPENT = 0.05  # of the highest LR: below that a schedule is at its end and may step to zero
RAISED = 1.2
SETTLED_POINTS = 32  # points after the warm-up's last rise
CLIMB_POINTS = 8  # rises in a row that make a warm-up
PARENT_POINTS = 2048


@dataclass(frozen=True, slots=True)
class LrFinding:
    """One mismatch that begins or ends; `expected` is None where the LR was compared with the run's own past."""

    begins: bool
    found: float
    expected: float | None
    sentence: str


class LrWatch(Watch):
    """A fold over the observed and the expected learning rate."""

    __slots__ = ("climb", "fallen_from", "highest", "last", "mismatch", "past", "reference", "settled")

    def __init__(self) -> None:
        self.last: float | None = None
        self.highest = 0.0
        self.settled = 0  # points since the warm-up's last rise
        self.mismatch = False
        self.reference = 0.0  # what the LR was before the mismatch
        self.fallen_from = 0.0  # the LR before it fell at the start of a launch
        self.climb = 0
        self.past: deque[tuple[int, float]] = deque(maxlen=PARENT_POINTS)

    def feed(
        self, found: float, expected: float | None, *, step: int = 0, fresh: bool = False, rewound: bool = False
    ) -> LrFinding | None:
        """Fold one point; `fresh` says that a launch has just begun, `rewound` that its steps were logged before."""
        if found - found != 0.0:
            return None
        if expected is not None:
            finding = self._against(found, expected)
        elif self.mismatch:
            finding = self._look_for_end(found)
        else:
            finding = self._against_past(found, step, fresh, rewound)
        self._remember(found, step)
        return finding

    def _remember(self, found: float, step: int) -> None:
        last = self.last
        rose = last is not None and found > last * (1.0 + 1e-9)
        self.settled = 0 if rose and self.settled < SETTLED_POINTS else self.settled + 1
        self.last = found
        if not self.mismatch:
            self.highest = max(self.highest, found)
            while self.past and self.past[-1][0] >= step:
                self.past.pop()
            self.past.append((step, found))

    def _against(self, found: float, expected: float) -> LrFinding | None:
        wrong = abs(found - expected) > TOLERANCE * abs(expected)
        if wrong == self.mismatch:
            return None
        self.mismatch, self.reference = wrong, expected
        text = f"lr {found:.4g}, expected {expected:.4g}" if wrong else f"lr {found:.4g}, as expected again"
        return LrFinding(wrong, found, expected, text)

    def _look_for_end(self, found: float) -> LrFinding | None:
        """End the mismatch when the LR is near its earlier value; not exactly, because the schedule has moved on."""
        if not 0.5 * self.reference <= found <= 1.1 * self.reference:
            return None
        self.mismatch = False
        return LrFinding(False, found, None, f"lr {found:.4g}, back at its earlier value")

    def _against_past(self, found: float, step: int, fresh: bool, rewound: bool) -> LrFinding | None:
        last = self.last
        if last is None or self.settled < SETTLED_POINTS:
            return None
        if found > RAISED * self.highest > 0.0:
            return self._begin(found, last, f"lr rose from {last:.4g} to {found:.4g}, higher than ever in this run")
        if 0.0 <= found < VANISHED * last and last > SPENT * self.highest:
            return self._begin(found, last, f"lr fell from {last:.4g} to {found:.4g}: the schedule probably restarted")
        if fresh:
            parent = self._parent_at(step) if rewound else last
            if parent is not None and found > RAISED * parent:
                return self._begin(found, parent, f"lr {found:.4g}, {found / parent:.3g} × the parent launch's {parent:.4g}")
        return self._follow_climb(found, last, fresh)

    def _follow_climb(self, found: float, last: float, fresh: bool) -> LrFinding | None:
        """Find a repeated warm-up in a coarse log, whose first line may lie well into it: the LR fell and now climbs."""
        if found < 0.5 * last and (fresh or last > SPENT * self.highest):
            self.fallen_from, self.climb = last, 0
        elif self.fallen_from:
            self.climb = self.climb + 1 if found > last * (1.0 + 1e-9) else 0
            if self.climb >= CLIMB_POINTS:
                before, self.fallen_from = self.fallen_from, 0.0
                text = f"lr fell from {before:.4g} and climbs again, now {found:.4g}: the warm-up is repeated"
                return self._begin(found, before, text)
            if not fresh and self.climb == 0:
                self.fallen_from = 0.0
        return None

    def _parent_at(self, step: int) -> float | None:
        """Return the LR that was logged before at this step, or at the nearest earlier one."""
        earlier = [lr for known, lr in self.past if known <= step]
        return earlier[-1] if earlier else None

    def _begin(self, found: float, before: float, text: str) -> LrFinding:
        self.mismatch, self.reference = True, before
        return LrFinding(True, found, None, text)


# --- Loss scale of fp16 training

# One halving is an overflow and a skipped step; several in a row are a warning. GLM-130B's scale fell thirty
# steps before its loss exploded. A scale that starts too high falls in the first steps of every launch, so a fall
# counts only after the scale has been constant for a while.

STEADY_POINTS = 64  # points without a fall
FALLS = 4  # in a row, without a rise between them: a sixteenth
FALL_POINTS = 400  # points within which these falls lie


@dataclass(frozen=True, slots=True)
class ScaleFinding:
    """A collapse that begins or is over; `row` and `step` are those of its first halving."""

    begins: bool
    row: int
    step: int
    sentence: str


class ScaleWatch(Watch):
    """A fold over the loss scale."""

    __slots__ = ("collapsed", "falls", "first_row", "first_step", "last", "start", "steady")

    def __init__(self) -> None:
        self.last: float | None = None
        self.steady = 0  # points without a fall
        self.falls = 0  # in a row
        self.start = 0.0  # the scale before the first of them
        self.first_row = self.first_step = 0
        self.collapsed = False

    def restart(self) -> None:
        """Forget the scale before: a launch begins, and its scale may start high and fall again."""
        self.last, self.steady, self.falls = None, 0, 0

    def feed(self, row: int, step: int, scale: float) -> ScaleFinding | None:
        """Fold one point; returns a collapse that begins or is over."""
        last, self.last = self.last, scale
        if last is None or scale - scale != 0.0:
            return None
        if scale < last:
            return self._fall(row, step, last, scale)
        self.steady += 1
        if scale > last:
            self.falls = 0
            if self.collapsed and scale >= self.start / 4.0:
                self.collapsed = False
                return ScaleFinding(False, self.first_row, self.first_step, f"loss scale {scale:g}: growing again")
        return None

    def _fall(self, row: int, step: int, last: float, scale: float) -> ScaleFinding | None:
        if self.falls == 0 or row - self.first_row > FALL_POINTS:
            self.falls = 0
            if self.steady < STEADY_POINTS:
                self.steady = 0
                return None
            self.first_row, self.first_step, self.start = row, step, last
        self.steady = 0
        self.falls += 1
        if self.falls < FALLS or self.collapsed:
            return None
        self.collapsed = True
        text = f"loss scale fell from {self.start:g} to {scale:g}: {self.falls} reductions in a row"
        return ScaleFinding(True, self.first_row, self.first_step, text)


# --- NaN in disguise

# What a log shows of NaN without showing NaN: Trainer's filter writes a loss of exactly 0.0 (or the mean of the steps
# before, the same to the last bit), Megatron leaves the loss out of the line, the loss scale lies at its floor, the
# optimizer skips every step. One such point can be an accident; three in a row are weights that no longer work.

DISGUISED_POINTS = 3
USUAL_POINTS = 32  # points that show what is usual in this log
TIE_POINTS, TIES_LEAST = 64, 12  # values before a repeat that show how often one repeats by chance, and how many are needed
TIE_DENSITY = 0.3  # of a Gaussian's differences at zero, times their median: the chance of a tie for a grid of one
TIE_CHANCE, TIE_MOST = 1e-7, 0.95  # of so many repeats in a row; of one, at most
TIE_SHARE = 100  # points for each that repeats: fewer are an accident, and before so many it is not known
FAR_FROM_ZERO = 10.0  # noise units: a loss that reaches zero by training comes near it first
FLOOR_SCALE = 1.0
FLOOR_FALL = 16.0  # a scale that fell by this factor to its floor


@dataclass(frozen=True, slots=True)
class DisguiseFinding:
    """A disguised NaN that begins or is over; `row` and `step` are of its first point, `sound_step` is the last one before."""

    begins: bool
    row: int
    step: int
    sound_step: int
    sentence: str


class DisguiseWatch(Watch):
    """A fold over a point's loss, gradient norm, loss scale and skipped steps; None is "not in this line"."""

    __slots__ = (
        "begun", "first_row", "first_step", "last_loss", "last_skipped", "last_step", "needed", "normed", "repeats",
        "scale_top", "signs", "sound_step", "usual",
    )  # fmt: skip

    def __init__(self) -> None:
        self.last_loss: float | None = None
        self.last_skipped: float | None = None
        self.last_step: int | None = None
        self.usual = 0  # points in a row that held a loss
        self.normed = 0  # of these, points in a row that held a gradient norm
        self.repeats = 0  # points whose loss was that of the point before: a coarse number format
        self.scale_top = 0.0
        self.signs = 0  # points in a row that show a sign
        self.needed = DISGUISED_POINTS  # so many of them are no accident
        self.first_row = self.first_step = self.sound_step = 0
        self.begun = False

    def feed(
        self, row: int, step: int, *, loss: float | None, norm: float | None, scale: float | None, skipped: float | None,
        level: float, noise: float, told: bool, before: Callable[[], Sequence[float]] = tuple,
    ) -> DisguiseFinding | None:  # fmt: skip
        """Fold one point. `level` and `noise` are the loss's usual ones, `told` says that the line holds other values.

        `before` returns the last values, this one among them: asked where a value repeats and no norm says why.
        """
        if loss is not None and loss - loss != 0.0:
            return None  # an open NaN needs no watch
        sign = self._sign(step, loss, norm, scale, skipped, level, noise, told)
        if sign is None:
            ended = self.begun and loss is not None
            finding = DisguiseFinding(False, row, step, self.sound_step, "the log is as usual again") if ended else None
            if loss is not None:
                self.repeats += 0 if self.begun else self.signs  # of a coarse number format, then
                self.signs, self.begun, self.sound_step = 0, False, step
                self._learn(loss, norm)
            self._remember(step, loss, skipped)
            return finding
        if self.signs == 0:
            self.first_row, self.first_step, self.needed = row, step, DISGUISED_POINTS
        self.signs += 1
        self._remember(step, loss, skipped)
        if self.signs == DISGUISED_POINTS and norm is None and self.normed == 0 and loss is not None and loss != 0.0:
            self.needed = points_of_chance(before(), self.repeats, self.usual)
        if self.begun or self.signs < self.needed:
            return None
        self.begun = True
        return DisguiseFinding(True, self.first_row, self.first_step, self.sound_step, sign)

    def pass_by(self, step: int, loss: float, *, normed: bool) -> bool:
        """Fold an ordinary point, which is nearly every one; False where it needs `feed`."""
        if loss == self.last_loss or loss == 0.0 or self.signs or loss - loss != 0.0:
            return False
        self.usual += 1
        self.normed = self.normed + 1 if normed else 0
        self.last_loss, self.last_step, self.sound_step = loss, step, step
        return True

    def _sign(
        self, step: int, loss: float | None, norm: float | None, scale: float | None, skipped: float | None, level: float,
        noise: float, told: bool,
    ) -> str | None:  # fmt: skip
        broken = norm is not None and norm - norm != 0.0
        normless = broken or (norm is None and self.normed >= USUAL_POINTS)
        unknown = norm is None and self.normed == 0
        if loss is None:
            if told and self.usual >= USUAL_POINTS:
                return "the loss is missing from lines that always held it: NaN is left out by the trainer"
            return None
        if skipped is not None and self.last_step is not None and self.last_skipped is not None and self.usual >= USUAL_POINTS:
            steps = step - self.last_step
            if 0 < steps <= max(skipped - self.last_skipped, skipped if skipped <= steps else 0.0):
                return f"all of the last {steps} steps were skipped: their gradients were not finite"
        if scale is not None:
            self.scale_top = max(self.scale_top, scale)
            if scale <= FLOOR_SCALE < self.scale_top / FLOOR_FALL:
                return f"the loss scale fell from {self.scale_top:g} to its floor of {scale:g}: every gradient overflows"
        far = broken or (noise > 0.0 and abs(level) > FAR_FROM_ZERO * noise and self.usual >= USUAL_POINTS)
        why = "there is no gradient norm" if norm is None else f"the gradient norm is {'NaN' if norm != norm else 'infinite'}"
        if loss == 0.0 and far and (normless or unknown):
            return f"the loss is exactly 0.0 and {why}: a filter of the trainer hides NaN"
        if loss == self.last_loss and far and (normless or unknown):
            return f"the loss repeats bit for bit and {why}: a filter of the trainer hides NaN"
        return None

    def _learn(self, loss: float, norm: float | None) -> None:
        self.usual += 1
        self.normed = self.normed + 1 if norm is not None else 0

    def _remember(self, step: int, loss: float | None, skipped: float | None) -> None:
        self.last_step = step
        self.repeats += not self.signs and loss is not None and loss == self.last_loss
        self.last_loss = loss if loss is not None else self.last_loss
        self.last_skipped = skipped if skipped is not None else self.last_skipped
        if loss is None and not self.signs:
            self.usual = 0  # lines without a loss are usual here


def points_of_chance(values: Sequence[float], repeats: int, usual: int) -> int:
    """Return how many repeats in a row prove that a series is stuck: in a coarse number format values repeat by chance.

    Of a grid of width q, differences of the median size d repeat a value with a chance of about 0.3 q / d. Where the
    differences are themselves alike (averages of a slow series) a tie seldom comes alone: then d is by how much they differ,
    twice the longest series so far counts, and so does how many of the `usual` values were `repeats`, if that is no accident.
    """
    size = len(values)
    while size > 1 and values[size - 1] == values[size - 2]:
        size -= 1
    seen = values[:size]
    if size < TIES_LEAST and not repeats:
        return DISGUISED_POINTS
    leaps = [later - earlier for earlier, later in pairwise(seen[-TIE_POINTS:])]
    bends = [abs(later - earlier) for earlier, later in pairwise(leaps)]
    grid = min((later - earlier for earlier, later in pairwise(sorted(set(seen[-TIE_POINTS:])))), default=0.0)
    apart = min(sorted(map(abs, leaps))[len(leaps) // 2], sorted(bends)[len(bends) // 2]) if size >= TIES_LEAST else 0.0
    chance = TIE_DENSITY * grid / apart if apart > 0.0 else TIE_MOST
    if repeats * TIE_SHARE > usual:
        chance = max(chance, math.sqrt(repeats / usual)) if usual >= TIE_SHARE else TIE_MOST
    chance = min(TIE_MOST, max(chance, TIE_CHANCE))
    longest = max(len(list(same)) for _, same in groupby(seen)) - 1
    return max(DISGUISED_POINTS, 2 * longest + 2 if longest > 1 else 0, math.ceil(math.log(TIE_CHANCE) / math.log(chance)))


# --- A resume beside the curve it left

# After a step back the same steps were logged before: the loss is compared with what it was at each of them. After a
# launch that goes on, with the last points before it. Both signs; the mean of the first points against its own error.

PAST_POINTS = 1024
LOOKS = (8, 16, 32, 48)  # points after the restart at which the mean is judged
MEAN_POINTS = 8
BUMP_ERRORS = 4.0  # standard errors of that mean
BUMP_LEAST = 0.35  # noise units: less is no bump that a person would name
BEFORE_POINTS = 32


@dataclass(frozen=True, slots=True)
class ResumeFinding:
    """The loss after a restart is higher (`excess` above zero) or lower than at the same steps before."""

    row: int
    step: int
    excess: float
    sigmas: float
    sentence: str


class ResumeWatch(Watch):
    """A fold over the leading loss; `restart` says that a launch begins with the next point."""

    __slots__ = ("count", "error", "expected", "past", "row", "step", "total")

    def __init__(self) -> None:
        self.past: deque[tuple[int, float]] = deque(maxlen=PAST_POINTS)
        self.expected: list[tuple[int, float]] = []
        self.count, self.total, self.row, self.step = -1, 0.0, 0, 0  # count -1: nothing is compared
        self.error = 0.0  # of a mean of `MEAN_POINTS` points, as the run itself shows it

    def restart(self, row: int, step: int, *, rewound: bool) -> None:
        """Begin to compare: with the abandoned curve where the steps went back, else with the level before."""
        self.expected = []
        self.error = error_of_means([value for _, value in self.past])
        if rewound:
            while self.past and self.past[-1][0] >= step:
                self.expected.append(self.past.pop())
            self.expected.reverse()
        elif len(self.past) >= BEFORE_POINTS:
            last = sorted(value for _, value in list(self.past)[-BEFORE_POINTS:])
            self.expected = [(step, last[len(last) // 2])]
        self.count, self.total, self.row, self.step = (0 if self.expected else -1), 0.0, row, step

    def feed(self, step: int, value: float, noise: float, *, troubled: bool) -> ResumeFinding | None:
        """Fold one loss; `noise` is the standard deviation of one point; `troubled`: an event is open."""
        finding = self._compare(step, value, noise) if self.count >= 0 else None
        if not troubled:
            self.past.append((step, value))
        return finding

    def _compare(self, step: int, value: float, noise: float) -> ResumeFinding | None:
        beside = len(self.expected) > 1
        while len(self.expected) > 1 and self.expected[1][0] <= step:
            self.expected.pop(0)
        if beside and len(self.expected) <= 1:
            self.count = -1
            return None
        self.total += value - self.expected[0][1]
        self.count += 1
        if self.count not in LOOKS or noise <= 0.0:
            return None
        mean = self.total / self.count
        own = max(self.error * math.sqrt(MEAN_POINTS / self.count), noise / math.sqrt(self.count))
        error = own * (math.sqrt(2.0) if beside else 1.0)
        found = abs(mean) > max(BUMP_ERRORS * error, BUMP_LEAST * noise)
        if not beside and mean < 0.0:
            found = False  # a loss that goes on falling
        if found or self.count == LOOKS[-1]:
            self.count = -1
        if not found:
            return None
        where = "at the same steps before" if beside else "before the restart"
        sentence = f"after the restart the loss is {abs(mean):.3g} {'higher' if mean > 0.0 else 'lower'} than {where}"
        return ResumeFinding(self.row, self.step, mean, mean / noise, sentence)


def error_of_means(values: list[float]) -> float:
    """Return the standard error of a mean of `MEAN_POINTS` points: by second differences, which no trend moves."""
    recent = values[-16 * MEAN_POINTS :]
    starts = range(0, len(recent) - MEAN_POINTS + 1, MEAN_POINTS)
    means = [math.fsum(recent[at : at + MEAN_POINTS]) / MEAN_POINTS for at in starts]
    bends = sorted(abs(means[i - 1] - 2.0 * means[i] + means[i + 1]) for i in range(1, len(means) - 1))
    return bends[len(bends) // 2] / (0.6745 * math.sqrt(6.0)) if len(bends) >= 4 else 0.0


# --- Plateau: slope of block means

# Theil-Sen slope over fifty block means, with its confidence interval (Sen 1968). Information, not an alarm: one notice
# when the slope's 95 % interval no longer lies below zero.

BLOCK_POINTS = 100
BLOCKS = 50
LOOK_EVERY = 10  # blocks
IMPROVEMENT = 0.005  # of the level: less than that since the last notice is the same plateau
Z_95 = 1.96


class PlateauWatch(Watch):
    """A fold over the loss; it says once that a plateau is seen, again only after an improvement.

    The engine adds up the losses of a block by itself (a call a point costs as much as the sum) and ends the block here.
    """

    __slots__ = ("blocks", "count", "level", "on_plateau", "seen", "total")

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
    spread = Z_95 * math.sqrt(size * (size - 1) * (2 * size + 5) / 18.0)
    upper = min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2.0))
    return slopes[upper] < 0.0
