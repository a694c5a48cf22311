"""Control checks of a study; when one fails, no results are reported.

1. An exact restart changes no bit (A′ ≡ A0).
2. Arms have read the same data and have the same loss, bit for bit, until their treatment, and the same LR throughout, but
   where a setting was changed on purpose. After it their data differ, where the treatment is one of the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.design import StudyPlan, StudyRun
from experiments.files import RESULTS
from experiments.outcomes import RunData, StudyData


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """One control: what was compared, whether it held, and where it did not."""

    name: str
    what: str
    ok: bool
    found: str


DIFFERS = {"data_digest": "data differ", "loss": "loss differs", "lr": "LR differs"}


class Treatment(NamedTuple):
    """After how many updates an arm's data and its settings first differ from the reference's, by plan; None: never."""

    data_after: int | None
    set_after: int | None


def check_gates(data: StudyData) -> tuple[GateCheck, ...]:
    """Return every control that the complete runs allow; a failed one refuses the report."""
    return (*_check_exact(data), *_check_shared(data))


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
        yield GateCheck(
            name="exact restart", what=what, ok=False, found=f"no seed at which both {one} and {other} are complete")
    for seed in data.seeds(one, other):
        last, end = data.runs[one, seed].finished[-1], data.runs[other, seed].finished[-1]
        differ = [name for name in RESULTS if getattr(last, name) != getattr(end, name)]
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
    limits = {"data_digest": until, "loss": until, "lr": total if set_after is None else until}
    logged = [channel for channel in limits if np.isfinite(run.channels[channel]).any()]
    equal = {channel: _equal_length(run.channels[channel], base.channels[channel]) for channel in logged}
    problems, remarks = [], ""
    for channel, limit in limits.items():
        if channel not in equal:  # a trainer of the study's own may not log it
            remarks += f"; not compared: no `{channel}` was logged"
        elif equal[channel] < limit:
            problems.append(f"{DIFFERS[channel]} from update {equal[channel] + 1} on")
    lost = equal.get("loss", total)
    if data_after is not None and total in (lost, equal.get("data_digest", lost)):
        problems.append("data never differ: the treatment did not take place")
    if set_after is not None and lost == total:
        remarks += "; what was set changed no loss"
    told = ", ".join(f"{channel} until {length}" for channel, length in equal.items())
    what = f"same data, and same loss to the last bit, until update {until}; same LR, until a setting changes"
    found = "; ".join(problems) or f"equal: {told}, of {total}{remarks}"
    return GateCheck(name=f"A/A {run.run.name}", what=what, ok=not problems, found=found)


def _equal_length(one: np.ndarray, other: np.ndarray) -> int:
    unequal = np.flatnonzero((one != other) & ~(np.isnan(one) & np.isnan(other)))
    return int(unequal[0]) if len(unequal) else len(one)
