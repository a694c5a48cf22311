"""The plan of the LR, looked at before the first step: does it ramp, does it last, does it count optimizer steps? Pure.

A scheduler that is stepped once a micro-batch, or was made for micro-batches, warms up too fast or never. The curve of the
planned steps shows it before any of them is taken. What is found is said and never refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chronicle.resume.first_batch import BatchFault

__all__ = ["LrCurve", "find_in_plan"]

MIN_PLANNED = 8  # optimizer steps: a shorter plan has no shape


@dataclass(frozen=True, slots=True, kw_only=True)
class LrCurve:
    """The LR of the first group at every optimizer step from 0 on, as far as it was computed, and what was asked for.

    `horizon`, `warmup`: what the scheduler itself was made with, in its own steps. None: unknown.
    """

    lrs: tuple[float, ...]
    planned: int | None = None  # optimizer steps of the run
    asked_warmup: int | None = None
    accumulation: int = 1
    world_size: int = 1
    horizon: int | None = None
    warmup: int | None = None


def find_in_plan(plan: LrCurve) -> list[BatchFault]:
    """What is wrong with the LR's plan."""
    lrs, planned = plan.lrs, plan.planned
    if not lrs or planned is None or planned < MIN_PLANNED or len(lrs) < planned:
        return []
    lrs = lrs[:planned]
    peak = max(lrs)
    if peak <= 0:
        return [BatchFault(name="lr-zero", text=f"the LR is 0 in all {planned} planned steps: nothing is learned")]
    return [finding for find in (_warm_up, _end) for finding in find(plan, lrs, peak)]


def _warm_up(plan: LrCurve, lrs: Sequence[float], peak: float) -> Iterator[BatchFault]:
    planned, ramp = len(lrs), _ramp(lrs, peak)
    asked = plan.asked_warmup or 0
    if ramp >= planned - 1 and lrs[-1] > 1.2 * lrs[0]:
        text = f"the LR still rises at the last of {planned} planned steps: the warm-up never ends"
        yield BatchFault(name="warm-up-never-ends", text=text + _unit(plan, plan.warmup, asked or None))
    elif asked >= 3 and ramp == 0:
        text = f"a warm-up of {asked} steps was asked for, and the LR does not ramp: it is {lrs[0]:.3g} from the first step on"
        yield BatchFault(name="no-warm-up", text=text)
    elif asked >= 3 and not 0.67 <= ramp / asked <= 1.5 and abs(ramp - asked) > 2:
        text = f"a warm-up of {asked} steps was asked for, and the LR ramps for {ramp} of {planned} steps"
        yield BatchFault(name="warm-up-length", text=text + _unit(plan, ramp, asked))
    elif ramp > 0.5 * planned and (plan.warmup or asked):
        yield BatchFault(
            name="warm-up-too-long",
            text=f"the warm-up takes {ramp} of {planned} planned steps" + _unit(plan, plan.warmup, asked or None),
        )


def _ramp(lrs: Sequence[float], peak: float) -> int:
    """Steps until the LR is at its peak for the first time, when it rises at the beginning; else 0."""
    first = next(index for index, lr in enumerate(lrs) if lr >= 0.999 * peak)
    return first if first and all(a <= b for a, b in pairwise(lrs[: first + 1])) else 0


def _end(plan: LrCurve, lrs: Sequence[float], peak: float) -> Iterator[BatchFault]:
    planned = len(lrs)
    dead = planned
    while dead and lrs[dead - 1] <= 1e-6 * peak:
        dead -= 1
    if planned - dead > max(2, planned // 10):
        text = f"the LR is 0 from step {dead} of {planned} planned steps on: nothing is learned after it"
        yield BatchFault(name="lr-ends-early", text=text + _unit(plan, planned, dead))
    elif plan.horizon is not None and plan.horizon > 1.5 * planned and _unit(plan, plan.horizon, planned):
        text = f"the scheduler was made for {plan.horizon} steps, the run takes {planned}: LR {lrs[-1] / peak:.0%} at its end"
        yield BatchFault(name="lr-plan-too-long", text=text + _unit(plan, plan.horizon, planned))


def _unit(plan: LrCurve, longer: int | None, shorter: int | None) -> str:
    """The likely cause: one of the two counts something other than optimizer steps."""
    if not longer or not shorter:
        return "; it may count micro-batches" if plan.accumulation > 1 else ""
    ratio = max(longer, shorter) / min(longer, shorter)
    for factor, what in ((plan.accumulation, "micro-batches"), (plan.world_size, "the batches of all ranks")):
        if factor > 1 and abs(ratio / factor - 1) <= 0.1:
            return f"; it counts {what}, of which a step takes {factor}"
    return ""
