"""Control checks of a study; when one fails, no results are reported.

1. An exact restart changes no bit (A′ ≡ A0).
2. Arms that share an order have read the same data and have the same loss, bit for bit, until their treatment. After it,
   their data or state differ.
3. Each launch read the planned samples.
4. All arms have the same LR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from chronicle.data import step_digest
from experiments.definition import Arm, Loss, Order
from experiments.design import Leg, StudyPlan
from experiments.order import DataShape, Ids, leg_order, slice_samples
from experiments.outcomes import PRIMARY, RunData, StudyData
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The samples of one run: drawn, drawn again, and those of the slices that were never read."""

    run: str
    drawn: int
    repeats: int
    unread: int
    as_planned: bool
    guard: tuple[str, ...]


def check_gates(data: StudyData, ledgers: Sequence[Ledger]) -> tuple[GateCheck, ...]:
    """Return every control that the complete runs allow; a failed one refuses the report."""
    checks = [*_check_exact(data), *_check_shared(data), _check_rates(data)]
    if ledgers:
        checks.append(_check_read(ledgers))
    return tuple(checks)


def find_treatment(plan: StudyPlan, arm: Arm, legs: tuple[Leg, ...]) -> Treatment:
    """Return after how many updates an arm differs from the reference, from the plan alone."""
    reference, size = plan.study.arm(plan.study.reference), plan.profile.slice_updates
    if arm.merged != reference.merged:
        return Treatment(data_after=0, state_after=None)
    reads = set(plan.study.trainer.reads) if plan.study.trainer is not None else set()
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
    what = f"{other} is {one}, bit for bit: losses, evaluations, weights, moments, averaged weights"
    if data.plan.study.trainer is not None:
        what = (f"{other} is {one}, bit for bit: loss, LR and gradient norm where logged, the outcome where both have it, "
                "tensors of the last checkpoint")
    if not seeds:
        yield GateCheck(
            name="exact restart", what=what, ok=False, found=f"no seed at which both {one} and {other} are complete"
        )
    for seed in seeds:
        differ = list(_differences(data.runs[one, seed], data.runs[other, seed]))
        found = "identical" if not differ else "; ".join(differ)
        yield GateCheck(name=f"exact restart, seed {seed}", what=what, ok=not differ, found=found)


def _is_compared(name: str) -> bool:
    """Of a trainer of the study's own: what else it logs may be times, or means over a launch."""
    return name in ("loss", "eval/mixture", "data_digest") or role_of(name) in (Role.LR, Role.NORM)


def _differences(one: RunData, other: RunData) -> Iterator[str]:
    names = {*one.channels, *other.channels}
    for name in sorted(names if one.primary == PRIMARY else filter(_is_compared, names)):
        a, b = one.channel(name), other.channel(name)
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        if name == "eval/mixture" and one.primary != PRIMARY:  # a script may evaluate where it saves: an arm saves elsewhere
            equal |= np.isnan(a) | np.isnan(b)
        unequal = np.flatnonzero(~equal)
        if len(unequal):
            yield f"`{name}` differs from update {unequal[0] + 1} on"
    last, end = one.finished[-1].result, other.finished[-1].result
    for name in ("weights", "moments", "average"):
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


def _check_read(ledgers: Sequence[Ledger]) -> GateCheck:
    wrong = [ledger.run for ledger in ledgers if not ledger.as_planned]
    found = f"other data than planned in {', '.join(wrong)}" if wrong else f"{len(ledgers)} runs as planned"
    return GateCheck(name="data as planned", what="the logged digest of every batch is that of the planned batch",
                     ok=not wrong, found=found)


def planned_order(data: StudyData, shape: DataShape, run: RunData) -> Ids:
    """Return the planned batches of a run's lineage."""
    arm = data.plan.study.arm(run.run.arm)
    rows: list[Ids] = []
    for leg in run.run.legs:
        rows = rows[: leg.first]
        rows += list(leg_order(shape, arm, leg, data.plan.order_seed(run.run)))
    return np.stack(rows)


def count_ledger(data: StudyData, shape: DataShape | None) -> tuple[Ledger, ...]:
    """Return the ledger of every run: repeats, unread samples, and whether the log shows the planned data.

    What a trainer of the study's own reads is not known (`shape` is None), so such a study has none.
    """
    found = []
    for run in data.runs.values() if shape is not None else ():
        assert shape is not None
        batches = planned_order(data, shape, run)
        planned = np.array([int(step_digest(batch)[:13], 16) for batch in batches], dtype=np.float64)
        drawn = {tuple(pair) for pair in batches.reshape(-1, 2).tolist()}
        in_slices = set()
        for source, logical in product(range(len(shape.sources)), range(1, shape.num_slices + 1)):
            windows = slice_samples(shape, source, data.plan.order_seed(run.run), logical).ravel()
            in_slices |= {(source, window) for window in windows.tolist()}
        found.append(Ledger(
            run=run.run.name, drawn=batches.shape[0] * batches.shape[1],
            repeats=batches.shape[0] * batches.shape[1] - len(drawn), unread=len(in_slices - drawn),
            as_planned=bool(np.array_equal(planned, run.channel("data_digest"))),
            guard=tuple(done.guard or "none" for done in run.finished)))
    return tuple(found)
