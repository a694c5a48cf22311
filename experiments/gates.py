"""Control checks of a study; when one fails, no results are reported.

1. An exact restart changes no bit (A′ ≡ A0).
2. Arms that share an order have read the same data and have the same loss, bit for bit, until their treatment. After it,
   their data or state differ.
3. All arms have the same LR.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments.definition import Arm, Loss, Order
from experiments.design import Leg, StudyPlan
from experiments.outcomes import RunData, StudyData
from rollback.channels import Role, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """One control: what was compared, whether it held, and where it did not."""

    name: str
    what: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """After how many updates an arm's data and its state first differ from the reference's, by plan; None: never.

    `by_settings`: what differs in state are settings of the command alone, and a setting may change no loss (an interval of
    checkpoints, a number of workers).
    """

    data_after: int | None
    state_after: int | None
    by_settings: bool = False

    @property
    def first(self) -> int | None:
        """The first difference of either kind."""
        known = [after for after in (self.data_after, self.state_after) if after is not None]
        return min(known) if known else None


def check_gates(data: StudyData) -> tuple[GateCheck, ...]:
    """Return every control that the complete runs allow; a failed one refuses the report."""
    return (*_check_exact(data), *_check_shared(data), _check_rates(data))


def find_treatment(plan: StudyPlan, arm: Arm, legs: tuple[Leg, ...]) -> Treatment:
    """Return after how many updates an arm differs from the reference, from the plan alone."""
    reference, size = plan.study.arm(plan.study.reference), plan.profile.slice_updates
    if arm.merged != reference.merged:
        return Treatment(data_after=0, state_after=None)
    reads = set(plan.study.program.reads)
    slices = zip(arm.slices, reference.slices, strict=True)
    data = [number * size for number, (own, other) in enumerate(slices) if own != other]
    state, by_settings = [], True
    changed = {name for name in arm.set.keys() | reference.set.keys() if arm.set.get(name) != reference.set.get(name)}
    if changed & reads:
        data.append(0)
    if changed:
        state.append(0)
    for leg in legs:
        restart = leg.restart
        if restart is None:
            continue
        if restart.order is not Order.PLAN or restart.ratio or leg.data_offset or restart.set.keys() & reads:
            data.append(leg.first)
        if restart.loses or restart.rollback:
            by_settings = False
        if restart.loses or restart.rollback or restart.set.keys() - reads:
            state.append(leg.first)
    return Treatment(data_after=min(data, default=None), state_after=min(state, default=None), by_settings=by_settings)


def _check_exact(data: StudyData) -> Iterator[GateCheck]:
    if not data.plan.study.gate:
        return
    one, other = data.plan.study.gate
    seeds = data.seeds(one, other)
    what = (f"{other} is {one}, bit for bit: loss, LR and gradient norm where logged, evaluations where both have them, the "
            "outcomes, tensors of the last checkpoint")
    if not seeds:
        yield GateCheck(
            name="exact restart", what=what, ok=False, found=f"no seed at which both {one} and {other} are complete"
        )
    for seed in seeds:
        differ = list(_differences(data.runs[one, seed], data.runs[other, seed]))
        found = "identical" if not differ else "; ".join(differ)
        yield GateCheck(name=f"exact restart, seed {seed}", what=what, ok=not differ, found=found)


def _is_compared(name: str) -> bool:
    """What else a trainer logs may be times, or means over a launch."""
    return name in ("loss", "eval/mixture", "data_digest") or role_of(name) in (Role.LR, Role.NORM)


def _differences(one: RunData, other: RunData) -> Iterator[str]:
    for name in sorted(filter(_is_compared, {*one.channels, *other.channels})):
        a, b = one.channel(name), other.channel(name)
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        if name == "eval/mixture":  # a script may evaluate where it saves: an arm saves elsewhere
            equal |= np.isnan(a) | np.isnan(b)
        unequal = np.flatnonzero(~equal)
        if len(unequal):
            yield f"`{name}` differs from update {unequal[0] + 1} on"
    last, end = one.finished[-1].result, other.finished[-1].result
    for name in ("weights", "moments"):
        if getattr(last, name) != getattr(end, name):
            yield f"{name} at the end differ"
    if dict(last.final) != dict(end.final):
        yield "final outcomes differ"


def _check_shared(data: StudyData) -> Iterator[GateCheck]:
    reference = data.plan.study.reference
    for arm in data.arms:
        for seed in data.seeds(arm, reference) if arm != reference else ():
            yield _compare_until_treated(data.plan, data.runs[arm, seed], data.runs[reference, seed])


def _compare_until_treated(plan: StudyPlan, run: RunData, base: RunData) -> GateCheck:
    treatment = find_treatment(plan, plan.study.arm(run.run.arm), run.run.legs)
    total = run.num_updates
    seen = _equal_length(run.channel("data_digest"), base.channel("data_digest"))
    lost = _equal_length(run.channel("loss"), base.channel("loss"))
    data_until = total if treatment.data_after is None else treatment.data_after
    bits_until = total if treatment.first is None else treatment.first
    what = f"same data until update {data_until}, same loss to the last bit until {bits_until}"
    is_logged = bool(np.isfinite(run.channel("data_digest")).any())  # a trainer of the study's own may not log what it read
    problems = []
    if seen < data_until:
        problems.append(f"data differ from update {seen + 1} on")
    if lost < bits_until:
        problems.append(f"loss differs from update {lost + 1} on")
    if treatment.data_after is not None and seen == total and is_logged:
        problems.append("data never differ: the treatment did not take place")
    if treatment.state_after is not None and lost == total and not treatment.by_settings:
        problems.append("loss never differs: the treatment did not take place")
    read = f"data equal until {seen}" if is_logged else "data not compared: no `data_digest` was logged"
    found = "; ".join(problems) or f"{read}, loss until {lost}, of {total}"
    if treatment.state_after is not None and lost == total and treatment.by_settings:
        found += "; what was set changed no loss"
    return GateCheck(name=f"A/A {run.run.name}", what=what, ok=not problems, found=found)


def _equal_length(one: np.ndarray, other: np.ndarray) -> int:
    unequal = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    return int(unequal[0]) if len(unequal) else len(one)


def _check_rates(data: StudyData) -> GateCheck:
    """Check that the LR of every arm equals the reference's at every update, unless the schedule is lost on purpose."""
    reference = data.plan.study.reference
    unequal, num_compared = [], 0
    for (arm, seed), run in data.runs.items():
        restart = data.plan.study.arm(arm).restart
        is_own = bool(data.plan.study.arm(arm).set)
        if restart is not None:
            is_own = is_own or bool(restart.set or restart.rollback) or Loss.SCHEDULE in restart.loses
        if is_own or (reference, seed) not in data.runs:
            continue
        num_compared += 1
        if _equal_length(run.channel("lr"), data.runs[reference, seed].channel("lr")) < run.num_updates:
            unequal.append(run.run.name)
    found = f"differs in {', '.join(unequal)}" if unequal else f"equal in {num_compared} runs"
    if all(np.isnan(run.channel("lr")).all() for run in data.runs.values()):
        found = "not compared: no `lr` was logged"
    return GateCheck(name="learning rate", what="the same LR at every update, but where it is changed on purpose",
                     ok=not unequal, found=found)
