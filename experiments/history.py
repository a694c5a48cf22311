"""The state of a study from its journal, and what to launch next. Pure: entries in, launches out.

A leg is done when its `experiment.leg` entry is in the journal; only the first such entry of a leg counts. So a killed
runner loses at most the launches that were running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chronicle.journal import Entry
from chronicle.journal.events import StudyLeg, StudyRegistered, StudyStop, read
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.files import RESULTS, LegResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyHistory:
    """The registered plan, the finished legs by run, and the reasons of stopped runs."""

    plan: Mapping[str, Any] | None
    done: Mapping[str, tuple[LegResult, ...]]
    stopped: Mapping[str, str]

    def is_complete(self, run: StudyRun) -> bool:
        """Whether every leg of the run is finished."""
        return len(self.done.get(run.name, ())) == len(run.legs)

    def open_runs(self, plan: StudyPlan) -> list[str]:
        """Names of the runs that are neither complete nor stopped."""
        return [run.name for run in plan.runs if not self.is_complete(run) and run.name not in self.stopped]


def read_history(entries: Iterable[Entry]) -> StudyHistory:
    """Return the state of a study from the entries of its journal."""
    plan: Mapping[str, Any] | None = None
    done: dict[str, dict[int, LegResult]] = {}
    stopped: dict[str, str] = {}
    for entry in entries:
        match read(entry):
            case StudyRegistered() as registered if plan is None:
                plan = registered.plan
            case StudyLeg(leg=int(number), launch=int(launch)) as leg:
                measured = {name: leg.result[name] for name in RESULTS}
                result = LegResult(**measured, launch=launch, guard=leg.guard)
                done.setdefault(leg.run, {}).setdefault(number, result)
                stopped.pop(leg.run, None)
            case StudyStop() as stop:
                stopped[stop.run] = stop.reason
    return StudyHistory(plan=plan, done={run: tuple(legs.values()) for run, legs in done.items()}, stopped=stopped)


def list_ready(plan: StudyPlan, history: StudyHistory, taken: Collection[str] = ()) -> Iterator[tuple[StudyRun, Leg]]:
    """Launches that may start now, most urgent first; an arm waits for its common checkpoint, and `taken` runs are left out."""
    for run in plan.runs:
        if run.name in taken or history.is_complete(run):
            continue
        if run.arm == START or history.is_complete(plan.start_of(run)):
            yield run, run.legs[len(history.done.get(run.name, ()))]
