"""What a log shows of NaN without showing NaN: a loss of exactly 0.0, one that repeats, one left out, skipped steps.

Trainer's filter writes 0.0 (or the mean of the steps before, the same to the last bit), Megatron leaves the loss out of the
line, the optimizer skips every step. One such point can be an accident; three in a row are told, in the words of what
was seen. Only a gradient norm that is no number makes them a NaN.
"""

from __future__ import annotations

import math

from rollback.detect.constants import NON_FINITE_POINTS, USUAL_POINTS
from rollback.detect.events import Kind, Status, Tier
from rollback.detect.watches import Finding

FAR_FROM_ZERO = 10.0  # noise units: a loss that reaches zero by training comes near it first
TIE_CHANCE = 1e-7  # of so many repeats in a row by themselves


class HiddenWatch:
    """A fold over a point's loss, gradient norm and skipped steps; None is "not in this line"."""

    def __init__(self) -> None:
        self.last_loss: float | None = None
        self.last_skipped: float | None = None
        self.last_step: int | None = None
        self.usual = 0  # points in a row that held a loss
        self.normed = 0  # of these, points in a row that held a gradient norm
        self.ties = self.run = self.longest = 0  # values that repeat: all, in a row, and at most in a row
        self.signs = 0  # points in a row that show a sign
        self.needed = NON_FINITE_POINTS  # so many of them are no accident
        self.first_row = self.first_step = self.sound_step = 0
        self.begun = ""  # the kind that is open

    def pass_by(self, step: int, loss: float, *, normed: bool) -> bool:
        """Fold an ordinary point, which is nearly every one; False where it needs `feed`."""
        if loss == self.last_loss or loss == 0.0 or self.signs or loss - loss != 0.0:
            return False
        self.usual += 1
        self.run = 0
        self.normed = self.normed + 1 if normed else 0
        self.last_loss, self.last_step, self.sound_step = loss, step, step
        return True

    def feed(
        self, row: int, step: int, *, loss: float | None, norm: float | None, skipped: float | None, level: float,
        noise: float, told: bool,
    ) -> Finding | None:  # fmt: skip
        """Fold one point. `level` and `noise` are the loss's usual ones, `told` says that the line holds other values."""
        if loss is not None and loss - loss != 0.0:
            return None  # an open NaN needs no watch
        broken = norm is not None and norm - norm != 0.0
        kind, sentence = self._sign(step, loss, norm, skipped, level, noise, told, broken)
        if not sentence:
            return self._learn(row, step, loss, norm, skipped)
        if self.signs == 0:
            self.first_row, self.first_step, self.needed = row, step, NON_FINITE_POINTS
            if kind is Kind.STANDS_STILL and loss != 0.0 and not broken:
                self.needed = self._repeats_by_chance()
        self.signs += 1
        self._remember(step, loss, skipped)
        if self.begun or self.signs < self.needed:
            return None
        self.begun = kind
        tier, status = (Tier.PROPOSE, Status.DIVERGING) if kind is Kind.NAN else (Tier.WARN, Status.OPEN)
        return Finding(
            kind=kind, tier=tier, status=status, sentence=sentence, row=self.first_row, step=self.first_step,
            low_step=min(self.first_step, self.sound_step + 1),
        )  # fmt: skip

    def _sign(
        self, step: int, loss: float | None, norm: float | None, skipped: float | None, level: float, noise: float,
        told: bool, broken: bool,
    ) -> tuple[Kind, str]:  # fmt: skip
        """Return what this point shows and its words; no words where it shows nothing."""
        kind = Kind.NAN if broken else Kind.STANDS_STILL
        known = self.usual >= USUAL_POINTS
        why = "no gradient norm is logged with it"
        if broken:
            why = f"the gradient norm is {'NaN' if norm != norm else 'infinite'}"
        if loss is None:
            if told and known:
                return kind if broken else Kind.LOSS_MISSING, f"the loss is missing from lines that always held it; {why}"
            return kind, ""
        if skipped is not None and self.last_skipped is not None and self.last_step is not None and known:
            steps = step - self.last_step
            here = skipped if skipped <= steps else 0.0  # since the last line, or counted from the start
            if 0 < steps <= max(skipped - self.last_skipped, here):
                return Kind.STEPS_SKIPPED, f"all of the last {steps} steps were skipped by the optimizer"
        if norm is not None and not broken:
            return kind, ""
        if not broken and 0 < self.normed < USUAL_POINTS:
            return kind, ""
        far = known and noise > 0.0 and abs(level) > FAR_FROM_ZERO * noise
        if not broken and not far:
            return kind, ""
        if loss == 0.0:
            return kind, f"the loss is exactly 0.0; {why}"
        if loss == self.last_loss:
            return kind, f"the loss repeats bit for bit; {why}"
        return kind, ""

    def _learn(self, row: int, step: int, loss: float | None, norm: float | None, skipped: float | None) -> Finding | None:
        """Fold a point that shows nothing: what began is over, and what was seen till now was an accident."""
        ended = None
        if loss is not None:
            if self.begun:
                text, kind = "the log is as usual again", Kind(self.begun)
                ended = Finding(kind=kind, sentence=text, row=row, step=step, ends=True)
            elif self.signs:
                self.ties += self.signs
                self.longest = max(self.longest, self.signs)
            if loss == self.last_loss:
                self.run += 1
                self.ties += 1
                self.longest = max(self.longest, self.run)
            else:
                self.run = 0
            self.signs, self.begun, self.sound_step = 0, "", step
            self.usual += 1
            self.normed = self.normed + 1 if norm is not None else 0
        elif not self.signs:
            self.usual = 0  # lines without a loss are usual here
        self._remember(step, loss, skipped)
        return ended

    def _remember(self, step: int, loss: float | None, skipped: float | None) -> None:
        self.last_step = step
        if loss is not None:
            self.last_loss = loss
        if skipped is not None:
            self.last_skipped = skipped

    def _repeats_by_chance(self) -> int:
        """Return how many repeats in a row show that a series stands still: in a coarse format values repeat by chance."""
        share = (self.ties + 1) / (self.usual + 1)
        if share > 0.005:  # where many repeat, one seldom comes alone
            share = min(0.95, math.sqrt(share))
        chance = math.ceil(math.log(TIE_CHANCE) / math.log(share))
        series = 2 * self.longest + 2 if self.longest > 1 else 0
        return max(NON_FINITE_POINTS, chance, series)
