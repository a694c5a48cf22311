"""The first steps after a resume in the log of a trainer without the guard (L1 to L4). Pure.

It sees damage that has already begun. Its thresholds are relative to the run's own last steps, and a curve too short to show
its noise is not judged. Under the guard the LR in use is judged by `lr_in_use.py`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from chronicle.resume.checks.check import Check, failed
from rollback.channels import Role, canonical_of, value_of

NUM_BEFORE = 50  # logged rows before and after a restart that are compared
NUM_AFTER = 50
LEAST_BEFORE = 8  # losses below which nothing is judged
LEAST_AFTER = 5
FAR = 8.0  # robust standard deviations
NORMAL_MAD = 1.4826
LR_JUMP = 1.5  # factor between neighbouring logged LRs that no schedule of a healthy resume makes

LoggedRow = tuple[int, Mapping[str, float]]  # step, values


def logged_row(step: int, values: Mapping[str, float]) -> LoggedRow | None:
    """LR and loss of one logged step; None when it has neither."""
    row = {}
    for role in (Role.LR, Role.LOSS):
        value = value_of(values, role)
        if value is not None and math.isfinite(value):
            row[canonical_of(role)] = value
    return (step, row) if row else None


def check_log(
    before: Sequence[LoggedRow], after: Sequence[LoggedRow], *, resume_step: int, lr_ratio: float = 1.0, warm_until: int = 0
) -> list[Check]:
    """Failed checks only. `before`: rows up to the checkpoint; `after`: the new launch's rows; `lr_ratio`: the rollback's.

    Up to step `warm_until` the rollback asked for a warm-up, so the LR is not judged there.
    """
    earlier = [row for row in before if row[0] <= resume_step][-NUM_BEFORE:]
    later = list(after)[:NUM_AFTER]
    if not later:
        return []
    warm = [row for row in later if row[0] > warm_until]
    checks = [*_step(later, resume_step), *_lr(earlier, warm, lr_ratio)]
    return checks + _loss(earlier, later)


def _step(later: Sequence[LoggedRow], resume_step: int) -> list[Check]:
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


def _lr(earlier: Sequence[LoggedRow], later: Sequence[LoggedRow], ratio: float) -> list[Check]:
    old = [values["lr"] for _, values in earlier if "lr" in values]
    new = [values["lr"] for _, values in later if "lr" in values]
    if not old or not new:
        return []
    steady = max((max(a, b) / min(a, b) for a, b in pairwise(old) if min(a, b) > 0), default=1.0)
    limit = max(LR_JUMP, steady**2)
    # the rollback's own factor: an LR nearer to the old one than to the promised one was not changed
    first_limit = limit if ratio == 1.0 else max(steady**2, min(LR_JUMP, math.sqrt(max(ratio, 1 / ratio))))
    curve = [old[-1] * ratio, *new]
    for index, (last, now) in enumerate(pairwise(curve)):
        bound = first_limit if index == 0 else limit
        fell = now * bound < last
        # a schedule may fall in steps; one that falls and then rises has started again (seed exp9)
        if fell and max(curve[index + 1 :]) > now:
            cause = "the LR is far below its last value and rises: the schedule started again"
        elif index == 0 and (fell or last * bound < now):
            cause = "the LR was not restored, or the script set it again"
        elif index and ratio != 1.0 and _goes_back(last, now, ratio, steady):
            cause = "the LR went back by the factor of the rollback: the scheduler was not loaded, or the script set it again"
        else:
            continue
        return [
            failed(
                "logged learning rate", "L1", expected=f"about {last:.6g}", found=f"{now:.6g}", where="log", cause=cause
            )
        ]
    return []


def _goes_back(last: float, now: float, ratio: float, steady: float) -> bool:
    """Whether an LR jumps by what the rollback took away, give or take twice the schedule's own largest step.

    Where the schedule itself moves nearly as far in one step, nothing is said.
    """
    drift = 1.02 * steady**2
    if min(last, now) <= 0 or drift**2 >= max(ratio, 1 / ratio):
        return False
    return 1 / drift <= now * ratio / last <= drift


def _loss(earlier: Sequence[LoggedRow], later: Sequence[LoggedRow]) -> list[Check]:
    old = [values["loss"] for _, values in earlier if "loss" in values]
    new = [values["loss"] for _, values in later if "loss" in values]
    if len(old) < LEAST_BEFORE or len(new) < LEAST_AFTER:
        return []
    # noise as differences of neighbours, so that a falling curve adds none
    steps = [abs(b - a) for a, b in pairwise(old)]
    last_digit = min((step for step in steps if step), default=0.0)  # of a loss that is printed with few digits
    scale = max(NORMAL_MAD * max(median(steps), last_digit) / 2**0.5, 1e-9 * abs(median(old)))
    centre, found = median(old[-LEAST_BEFORE:]), median(new[:LEAST_AFTER])
    if abs(found - centre) <= FAR * scale:
        return []
    high = found > centre
    cause = "state was lost: weights, moments or precision" if high else "the loss is too low: data may be repeated"
    code, name = "L3" if high else "L4", "loss after the resume"
    return [
        failed(name, code, expected=f"{centre:.6g} ± {FAR * scale:.2g}", found=f"{found:.6g}", where="log", cause=cause)
    ]
