"""What a study's journal says has happened, and from it what to launch next. Pure: entries in, launches out.

Killing the runner anywhere loses at most launches under way: a leg counts when its `experiment.leg` entry is there, and
the first such entry of a leg is the only one that counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chronicle.journal import Entry
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.result import LegResult

__all__ = ["Finished", "History", "NextLaunch", "list_ready", "next_launch", "read_history"]

REGISTER = "experiment.register"
LAUNCH = "experiment.launch"
LEG = "experiment.leg"
STOP = "experiment.stop"
RETRY = "experiment.retry"
REPORT = "experiment.report"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One leg that counts: its result, the launch of its run that made it, the guard's verdict on that launch."""

    result: LegResult
    launch: int
    guard: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Legs done by run, and runs that were stopped with their reason."""

    plan_hash: str | None = None
    plan: Mapping[str, Any] | None = None
    done: Mapping[str, tuple[Finished, ...]] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)

    def is_complete(self, run: StudyRun) -> bool:
        """Whether every leg of the run counts."""
        return len(self.done.get(run.name, ())) == len(run.legs)


class NextLaunch(NamedTuple):
    """A launch that may start now."""

    run: StudyRun
    leg: Leg


def read_history(entries: Iterable[Entry]) -> History:
    """Fold the study's journal, in its order."""
    plan_hash: str | None = None
    plan: Mapping[str, Any] | None = None
    done: dict[str, dict[int, Finished]] = {}
    stopped: dict[str, str] = {}
    for entry in entries:
        data = entry.data
        if entry.kind == REGISTER and plan_hash is None:
            plan_hash, plan = str(data["plan_hash"]), data["plan"]
        elif entry.kind == LEG:
            finished = Finished(
                result=LegResult.from_json(data["result"]), launch=int(data["launch"]), guard=data.get("guard")
            )
            done.setdefault(str(data["run"]), {}).setdefault(int(data["leg"]), finished)
        elif entry.kind == STOP:
            stopped.setdefault(str(data["run"]), str(data["reason"]))
        elif entry.kind == RETRY:
            stopped.pop(str(data["run"]), None)
    in_order = {run: tuple(_unbroken(legs)) for run, legs in done.items()}
    return History(plan_hash=plan_hash, plan=plan, done=in_order, stopped=stopped)


def _unbroken(legs: Mapping[int, Finished]) -> Iterator[Finished]:
    number = 1
    while number in legs:
        yield legs[number]
        number += 1


def next_launch(run: StudyRun, history: History) -> Leg | None:
    """The next leg of a run: the first that is not done, None when all are or the run was stopped."""
    finished = len(history.done.get(run.name, ()))
    if run.name in history.stopped or finished == len(run.legs):
        return None
    return run.legs[finished]


def list_ready(plan: StudyPlan, history: History, running: Collection[str] = ()) -> Iterator[NextLaunch]:
    """Launches that may start now, most urgent first; all arms wait for the start's checkpoint."""
    started = history.is_complete(plan.run(START))
    for run in plan.runs:
        if run.name in running or (run.arm != START and not started):
            continue
        leg = next_launch(run, history)
        if leg is not None:
            yield NextLaunch(run, leg)
