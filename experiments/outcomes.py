"""What the launches of a study measured, read back from journals and per-step logs: one `RunData` per arm and seed.

A run's series follows its lineage: the updates of a leg that was rolled back are not in it, and a leg counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from chronicle.metrics.log import read_metrics
from experiments.design import START, StudyPlan, StudyRun
from experiments.history import Finished, History
from experiments.files import StudyPaths

__all__ = ["Curve", "RunData", "StudyData", "bounce", "outcome_of", "read_study"]

Curve: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

GAINS = {"copy-gain": ("copy/0", "copy/4"), "recall-gain": ("recall/0", "recall/1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One complete run. `channels` are curves over updates 1 … n of the arm (NaN where not logged)."""

    run: StudyRun
    finished: tuple[Finished, ...]
    channels: Mapping[str, Curve]
    num_updates: int

    @property
    def final(self) -> Mapping[str, float]:
        """Outcomes measured after the last update, in bits per byte."""
        return self.finished[-1].result.final

    @property
    def restarts(self) -> tuple[int, ...]:
        """Updates after which a new launch took over."""
        return tuple(leg.first for leg in self.run.legs[1:])

    def channel(self, name: str) -> Curve:
        """A curve; all NaN where the run never logged it."""
        return self.channels.get(name, np.full(self.num_updates, np.nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """All complete runs of a study by (arm, seed), the start, and what was stopped with its reason."""

    plan: StudyPlan
    runs: Mapping[tuple[str, int], RunData]
    start: Finished | None
    stopped: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()

    def seeds(self, *arms: str) -> tuple[int, ...]:
        """Seeds at which all of these arms are complete."""
        everywhere = [{seed for name, seed in self.runs if name == arm} for arm in arms]
        return tuple(sorted(set.intersection(*everywhere))) if everywhere else ()

    def of_arm(self, arm: str) -> tuple[RunData, ...]:
        """The complete runs of one arm, by seed."""
        return tuple(self.runs[arm, seed] for seed in self.seeds(arm))

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms with at least one complete run, in the study's order."""
        return tuple(name for name in self.plan.arm_names if self.seeds(name))


def read_study(plan: StudyPlan, history: History, paths: StudyPaths) -> StudyData:
    """Read every complete run."""
    runs = {}
    for run in plan.runs:
        if run.arm != START and history.is_complete(run):
            runs[run.arm, run.seed] = _read_run(plan, run, history.done[run.name], paths)
    start = history.done.get(START, ())
    unfinished = [run.name for run in plan.runs if not history.is_complete(run) and run.name not in history.stopped]
    return StudyData(
        plan=plan, runs=runs, start=start[0] if start else None, stopped=dict(history.stopped), open=tuple(unfinished)
    )


def outcome_of(run: RunData, name: str) -> float:
    """An outcome by name: a final measurement, `bounce`, or a gain; NaN where it was not measured."""
    if name == "bounce":
        return bounce(run.channel("eval/mixture"))
    if name in GAINS:
        before, after = (run.final.get(key, np.nan) for key in GAINS[name])
        return before - after
    return run.final.get(name, np.nan)


def bounce(evals: Curve) -> float:
    """Standard deviation of the evaluations along a run around their straight line; NaN below four of them."""
    where = np.flatnonzero(np.isfinite(evals))
    if len(where) < 4:
        return float("nan")
    slope, level = np.polyfit(where, evals[where], 1)
    return float(np.std(evals[where] - slope * where - level, ddof=2))


def _read_run(plan: StudyPlan, run: StudyRun, finished: tuple[Finished, ...], paths: StudyPaths) -> RunData:
    total = run.legs[-1].last
    rows: dict[int, Mapping[str, float]] = {}
    for leg, done in zip(run.legs, finished, strict=True):
        rows = {update: values for update, values in rows.items() if update <= leg.first}
        for point in read_metrics(paths.run(run.name).metrics_path(done.launch)):
            update = point.step - plan.profile.start_updates
            if leg.first < update <= leg.last:
                rows[update] = point.values
    names = sorted({name for values in rows.values() for name in values})
    channels = {name: np.array([rows.get(u, {}).get(name, np.nan) for u in range(1, total + 1)]) for name in names}
    return RunData(run=run, finished=finished, channels=channels, num_updates=total)
