"""The measurements of a study, read from journals and per-step logs: one `RunData` per arm and seed.

The excess loss after a restart is relative to the reference: on identical batches at each update, else to its local mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chronicle.metrics.log import read_metrics
from experiments.design import START, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths
from experiments.history import StudyHistory
from experiments.statistics import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One complete run. `channels` are curves over updates 1 … n of the arm (NaN where not logged)."""

    run: StudyRun
    finished: tuple[LegResult, ...]
    channels: Mapping[str, Values]
    num_updates: int

    @property
    def final(self) -> Mapping[str, float]:
        """Outcomes measured after the last update, in the unit of the study."""
        return self.finished[-1].final

    @property
    def restarts(self) -> tuple[int, ...]:
        """Updates after which a new launch started."""
        return tuple(leg.first for leg in self.run.legs if leg.restart is not None)

    def outcome(self, name: str) -> float:
        """An outcome by name: a final measurement, or `bounce`; NaN where it was not measured."""
        return bounce(self.channels["eval/mixture"]) if name == "bounce" else self.final.get(name, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """All complete runs of a study by (arm, seed)."""

    plan: StudyPlan
    runs: Mapping[tuple[str, int], RunData]

    def seeds(self, *arms: str) -> tuple[int, ...]:
        """Seeds at which all of these arms are complete."""
        everywhere = [{seed for name, seed in self.runs if name == arm} for arm in arms]
        return tuple(sorted(set.intersection(*everywhere))) if everywhere else ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms with at least one complete run, in the study's order."""
        return tuple(name for name in self.plan.arm_names if self.seeds(name))


def read_study(plan: StudyPlan, history: StudyHistory, paths: StudyPaths) -> StudyData:
    """Read every complete run."""
    runs = {}
    for run in plan.runs:
        if run.arm != START and history.is_complete(run):
            runs[run.arm, run.seed] = _read_run(plan, run, history.done[run.name], paths)
    return StudyData(plan=plan, runs=runs)


def bounce(evals: Values) -> float:
    """Return the standard deviation of a run's evaluations around their line of regression; NaN below four of them."""
    where = np.flatnonzero(np.isfinite(evals))
    if len(where) < 4:
        return float("nan")
    slope, level = np.polyfit(where, evals[where], 1)
    return float(np.std(evals[where] - slope * where - level, ddof=2))


def _read_run(plan: StudyPlan, run: StudyRun, finished: tuple[LegResult, ...], paths: StudyPaths) -> RunData:
    total = run.legs[-1].last
    rows: dict[int, Mapping[str, float]] = {}
    for leg, done in zip(run.legs, finished, strict=True):
        path = paths.curves_path(run.name, done.launch)
        if not path.exists():
            raise StudyError(
                f"launch {done.launch} of `{run.name}` left no `{path.name}`: an earlier version measured it, or it is gone",
                "its report stays as it was; `chronicle experiment run STUDY --name NEW` measures anew")
        for point in read_metrics(path):
            update = point.step - plan.profile.start_updates
            if leg.first < update <= leg.last:
                rows[update] = point.values
    trainer = plan.study.trainer
    named = {"loss": trainer.loss, "eval/mixture": trainer.outcome, "lr": "lr", "data_digest": "data_digest"}
    channels = {}
    for channel, name in named.items():
        channels[channel] = np.array([rows.get(u, {}).get(name, np.nan) for u in range(1, total + 1)])
    return RunData(run=run, finished=finished, channels=channels, num_updates=total)


# --- Excess loss after each restart

HORIZONS = (20, 80, 320)  # updates after a restart
TREND_WIDTH = 25  # updates
SMOOTHED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """After one restart: area in the study's unit × updates, peak of the 5-update mean, updates to recover (None: not yet)."""

    run: str
    after: int
    identical_batches: bool
    num_updates: int
    area: float
    peak: float
    recovered_after: int | None


def excess_over(run: RunData, reference: RunData) -> tuple[Values, Values]:
    """Excess loss over the reference in the study's unit, and per update whether both are known to have seen one batch."""
    own, base = run.channels["loss"], reference.channels["loss"]
    same = run.channels["data_digest"] == reference.channels["data_digest"]
    return own - np.where(same, base, _local_mean(base)), same


def find_transients(run: RunData, reference: RunData) -> tuple[Transient, ...]:
    """One per restart of the run and horizon; a horizon ends at the next restart, and equal ones count once."""
    excess, same = excess_over(run, reference)
    found = []
    for after, limit in pairwise((*run.restarts, run.num_updates)):
        before = excess[max(0, after - 30) : after]
        noise = float(np.nanstd(before)) if np.isfinite(before).any() else 0.0
        for end in sorted({min(after + horizon, limit) for horizon in HORIZONS}):
            window = excess[after:end]
            if np.isnan(window).all():
                continue
            smooth = window
            if len(window) >= SMOOTHED:
                smooth = np.convolve(np.nan_to_num(window), np.ones(SMOOTHED) / SMOOTHED, mode="valid")
            inside = np.flatnonzero(smooth <= 2 * noise / math.sqrt(SMOOTHED) + 1e-12)  # two sd of its own noise
            found.append(Transient(
                run=run.run.name, after=after, identical_batches=bool(same[after:end].all()), num_updates=end - after,
                area=float(np.nansum(window)), peak=float(np.max(smooth)),
                recovered_after=int(inside[0]) if len(inside) else None))
    return tuple(found)


def _local_mean(curve: Values) -> Values:
    from scipy.ndimage import uniform_filter1d

    filled = np.nan_to_num(curve, nan=float(np.nanmean(curve)) if np.isfinite(curve).any() else 0.0)
    mean: Values = uniform_filter1d(filled, TREND_WIDTH, mode="nearest")
    return mean
