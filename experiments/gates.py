"""Control checks of a study; when one fails, no results are reported.

1. An exact restart changes no bit (A′ ≡ A0).
2. Arms have read the same data and have the same loss, bit for bit, until their treatment. After it their data differ, where
   the treatment is one of the data.
3. All arms have the same LR.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.design import StudyPlan, StudyRun
from experiments.outcomes import RunData, StudyData


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """One control: what was compared, whether it held, and where it did not."""

    name: str
    what: str
    ok: bool
    found: str


class Treatment(NamedTuple):
    """After how many updates an arm's data and its settings first differ from the reference's, by plan; None: never."""

    data_after: int | None
    set_after: int | None


def check_gates(data: StudyData) -> tuple[GateCheck, ...]:
    """Return every control that the complete runs allow; a failed one refuses the report."""
    return (*_check_exact(data), *_check_shared(data), _check_rates(data))


def find_treatment(plan: StudyPlan, run: StudyRun) -> Treatment:
    """Return after how many updates an arm differs from the reference, from the plan alone."""
    arm, reference, size = plan.study.arm(run.arm), plan.study.arm(plan.study.reference), plan.profile.slice_updates
    data = [number * size for number, (own, other) in enumerate(zip(arm.slices, reference.slices, strict=True)) if own != other]
    set_ = [0] if arm.set != reference.set else []
    for leg in run.legs:
        if leg.restart is not None:
            data += [leg.first] if leg.restart.reshuffle else []
            set_ += [leg.first] if leg.restart.set else []
    return Treatment(min(data, default=None), min(set_, default=None))


def _check_exact(data: StudyData) -> Iterator[GateCheck]:
    """Compare the ends of both arms; that they read and lost the same at every update is a check of shared data."""
    if not data.plan.study.gate:
        return
    one, other = data.plan.study.gate
    what = f"{other} ends as {one}, bit for bit: outcomes, tensors of the last checkpoint"
    if not data.seeds(one, other):
        found = f"no seed at which both {one} and {other} are complete"
        yield GateCheck(name="exact restart", what=what, ok=False, found=found)
    for seed in data.seeds(one, other):
        last, end = data.runs[one, seed].finished[-1].result, data.runs[other, seed].finished[-1].result
        differ = [name for name in ("weights", "moments", "final") if getattr(last, name) != getattr(end, name)]
        found = f"{', '.join(differ)} at the end differ" if differ else "identical"
        yield GateCheck(name=f"exact restart, seed {seed}", what=what, ok=not differ, found=found)


def _check_shared(data: StudyData) -> Iterator[GateCheck]:
    reference = data.plan.study.reference
    for arm in data.arms:
        for seed in data.seeds(arm, reference) if arm != reference else ():
            yield _compare_until_treated(data.plan, data.runs[arm, seed], data.runs[reference, seed])


def _compare_until_treated(plan: StudyPlan, run: RunData, base: RunData) -> GateCheck:
    """A setting may change which data are read, and may change no loss (a number of workers): that is said, not refused."""
    data_after, set_after = find_treatment(plan, run.run)
    total = run.num_updates
    until = min(after for after in (data_after, set_after, total) if after is not None)
    seen = _equal_length(run.channel("data_digest"), base.channel("data_digest"))
    lost = _equal_length(run.channel("loss"), base.channel("loss"))
    is_logged = bool(np.isfinite(run.channel("data_digest")).any())  # a trainer of the study's own may not log what it read
    problems = []
    if seen < until:
        problems.append(f"data differ from update {seen + 1} on")
    if lost < until:
        problems.append(f"loss differs from update {lost + 1} on")
    if data_after is not None and total in (lost, seen if is_logged else lost):
        problems.append("data never differ: the treatment did not take place")
    read = f"data equal until {seen}" if is_logged else "data not compared: no `data_digest` was logged"
    found = "; ".join(problems) or f"{read}, loss until {lost}, of {total}"
    if set_after is not None and lost == total:
        found += "; what was set changed no loss"
    return GateCheck(name=f"A/A {run.run.name}", what=f"same data, and same loss to the last bit, until update {until}",
                     ok=not problems, found=found)


def _equal_length(one: np.ndarray, other: np.ndarray) -> int:
    unequal = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    return int(unequal[0]) if len(unequal) else len(one)


def _check_rates(data: StudyData) -> GateCheck:
    """Check that the LR of every arm equals the reference's at every update, unless a setting was changed on purpose."""
    reference = data.plan.study.reference
    unequal, num_compared = [], 0
    for (_, seed), run in data.runs.items():
        if find_treatment(data.plan, run.run).set_after is not None or (reference, seed) not in data.runs:
            continue
        num_compared += 1
        if _equal_length(run.channel("lr"), data.runs[reference, seed].channel("lr")) < run.num_updates:
            unequal.append(run.run.name)
    found = f"differs in {', '.join(unequal)}" if unequal else f"equal in {num_compared} runs"
    if all(np.isnan(run.channel("lr")).all() for run in data.runs.values()):
        found = "not compared: no `lr` was logged"
    return GateCheck(name="learning rate", what="the same LR at every update, but where a setting is changed on purpose",
                     ok=not unequal, found=found)
