"""The first steps after a resume, from the per-step log alone (L1–L4): for trainers that nobody instrumented. Pure.

What these see is damage that has begun; the guard's checks come before. Thresholds are relative to the run's own last
steps; a curve too short to know its own noise is not judged.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from chronicle.resume.checks.check import Check, failed

__all__ = ["NUM_AFTER", "NUM_BEFORE", "Row", "check_log", "logged_row"]

NUM_BEFORE = 50
NUM_AFTER = 50
LEAST_BEFORE = 8
LEAST_AFTER = 5
FAR = 8.0  # robust standard deviations
NORMAL_MAD = 1.4826
LR_JUMP = 1.5  # factor between neighbouring logged LRs that no schedule of a healthy resume makes

Row = tuple[int, Mapping[str, float]]  # step, values


NAMES = {"lr": ("lr", "learning_rate"), "loss": ("loss", "train_loss", "lm loss")}


def logged_row(step: int, values: Mapping[str, float]) -> Row | None:
    """LR and loss of one logged step under whatever name; None where it has neither."""
    row = {}
    for name, others in NAMES.items():
        value = next((values[other] for other in others if other in values), None)
        if value is not None and math.isfinite(value):
            row[name] = value
    return (step, row) if row else None


def check_log(
    before: Sequence[Row], after: Sequence[Row], *, resume_step: int, lr_ratio: float = 1.0, warm_until: int = 0
) -> list[Check]:
    """Failed checks only. `before`: rows up to the checkpoint; `after`: the new launch's rows; `lr_ratio`: the rollback's.

    A warm-up that the rollback asked for, to step `warm_until`, is a low LR that rises: there the LR is not judged.
    """
    earlier = [row for row in before if row[0] <= resume_step][-NUM_BEFORE:]
    later = list(after)[:NUM_AFTER]
    if not later:
        return []
    warm = [row for row in later if row[0] > warm_until]
    checks = [*_step(later, resume_step), *_lr(earlier, warm, lr_ratio)]
    return checks + _loss(earlier, later)


def _step(later: Sequence[Row], resume_step: int) -> list[Check]:
    spacing = min((b[0] - a[0] for a, b in pairwise(later) if b[0] > a[0]), default=1)
    first = later[0][0]
    if resume_step < first <= resume_step + spacing:
        return []
    cause = (
        "the step counter was not restored"
        if first <= 1 + spacing
        else "another checkpoint was loaded, or steps were skipped"
    )
    return [
        failed("first logged step", "L2", expected=f"{resume_step + 1}", found=f"{first}", where="log", cause=cause)
    ]


def _lr(earlier: Sequence[Row], later: Sequence[Row], ratio: float) -> list[Check]:
    old = [values["lr"] for _, values in earlier if "lr" in values]
    new = [values["lr"] for _, values in later if "lr" in values]
    if not old or not new:
        return []
    steady = max((max(a, b) / min(a, b) for a, b in pairwise(old) if min(a, b) > 0), default=1.0)
    limit = max(LR_JUMP, steady**2)
    curve = [old[-1] * ratio, *new]
    for index, (last, now) in enumerate(pairwise(curve)):
        fell = now * limit < last
        # a schedule may fall by steps; one that falls and then climbs has started again (seed exp9)
        if fell and max(curve[index + 1 :]) > now:
            cause = "the schedule started again: far below its last value, and rising"
        elif index == 0 and (fell or last * limit < now):
            cause = "the LR was not restored, or set again by the script"
        else:
            continue
        return [
            failed(
                "logged learning rate", "L1", expected=f"about {last:.6g}", found=f"{now:.6g}", where="log", cause=cause
            )
        ]
    return []


def _loss(earlier: Sequence[Row], later: Sequence[Row]) -> list[Check]:
    old = [values["loss"] for _, values in earlier if "loss" in values]
    new = [values["loss"] for _, values in later if "loss" in values]
    if len(old) < LEAST_BEFORE or len(new) < LEAST_AFTER:
        return []
    # scatter around the trend: differences of neighbours, so that a falling curve is no noise
    steps = [abs(b - a) for a, b in pairwise(old)]
    last_digit = min((step for step in steps if step), default=0.0)  # of a loss that is printed with few digits
    scale = max(NORMAL_MAD * max(median(steps), last_digit) / 2**0.5, 1e-9 * abs(median(old)))
    centre, found = median(old[-LEAST_BEFORE:]), median(new[:LEAST_AFTER])
    if abs(found - centre) <= FAR * scale:
        return []
    high = found > centre
    cause = "state was lost: weights, moments or precision" if high else "suspiciously low: data is being repeated"
    code, name = ("L3", "loss after the resume") if high else ("L4", "loss after the resume")
    return [
        failed(name, code, expected=f"{centre:.6g} ± {FAR * scale:.2g}", found=f"{found:.6g}", where="log", cause=cause)
    ]
