"""Carry out a study: register, then launch what the journal says is next until nothing is left. Killable at any point.

    register ── ready? ── launch ── ended 0 ── experiment.leg
                                └── otherwise ── experiment.stop (this run, with its reason; the others go on)

Decisions are `history`'s, processes `launching`'s; this file only keeps the slots filled and the journal written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from chronicle.cli.result import ExitCode
from chronicle.journal import JournalWriter, read_journal
from experiments.design import StudyPlan, StudyRun
from experiments.errors import NotRegistered, StudyError
from experiments.history import (
    LAUNCH,
    LEG,
    REGISTER,
    RETRY,
    STOP,
    Finished,
    History,
    NextLaunch,
    list_ready,
    read_history,
)
from experiments.launching import Launcher, Running
from experiments.files import StudyPaths
from experiments.progress import Progress

__all__ = ["Outcome", "read_registered", "register", "run_study"]

POLL_SECONDS = 0.1
BUSY_SECONDS = 60.0  # a launch of a killed runner gets its signal, saves nothing, and is gone within its grace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How far a study is: runs complete, runs stopped with their reasons, runs still open."""

    complete: tuple[str, ...]
    stopped: dict[str, str]
    open: tuple[str, ...]


def register(paths: StudyPaths, plan: StudyPlan, writer: JournalWriter) -> None:
    """Write the plan into the journal before anything is launched; the same plan again changes nothing.

    Raises `NotRegistered` where this study's journal registered another plan: a margin or an arm may not change after
    the first result.
    """
    history = read_history(read_journal(paths.journal).entries)
    if history.plan_hash is None:
        _write_plan(paths, plan)
        study = plan.study
        data = {"study": study.name, "profile": plan.profile.name, "seeds": plan.profile.seeds, "arms": list(plan.arm_names),
                "primary": study.primary, "margin_bpb": study.margin_bpb, "alpha": study.alpha,
                "contrasts": [[c.name, c.plus, c.minus, c.family] for c in study.contrasts],
                "study_digest": study.digest, "plan_hash": plan.plan_hash, "plan": plan.to_json()}  # fmt: skip
        title = (
            f"study {study.name}, profile {plan.profile.name}: {plan.num_launches} launches, plan {plan.plan_hash[:12]}"
        )
        writer.append(REGISTER, title=title, data=data)
    elif history.plan_hash != plan.plan_hash:
        raise NotRegistered(
            f"`{paths.study_dir}` registered plan {history.plan_hash[:12]}, this is plan {plan.plan_hash[:12]}",
            "give the changed study another --name: what was registered does not change after the first launch",
        )
    elif not paths.plan_path.is_file():
        _write_plan(paths, plan)


def read_registered(paths: StudyPaths) -> tuple[StudyPlan, History]:
    """The registered plan and what has happened; raises `NotRegistered`."""
    history = read_history(read_journal(paths.journal).entries)
    if history.plan is None:
        raise NotRegistered(
            f"nothing is registered in `{paths.study_dir}`", "`chronicle experiment run STUDY` begins one"
        )
    return StudyPlan.from_json(dict(history.plan)), history


def run_study(
    plan: StudyPlan,
    paths: StudyPaths,
    launcher: Launcher,
    *,
    jobs: int = 2,
    only: Collection[str] = (),
    retry_stopped: bool = False,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Register and run until nothing is left to launch. On any exception the launches under way are ended first."""
    with JournalWriter(paths.journal) as writer:
        register(paths, plan, writer)
        keeper = _Keeper(plan, paths, launcher, writer, frozenset(only), say, Progress(plan, clock))
        if retry_stopped:
            keeper.retry_stopped()
        try:
            keeper.work(jobs, sleep)
        finally:
            keeper.stop_all()
        return keeper.outcome()


class _Keeper:
    """Keeps `jobs` launches under way."""

    def __init__(
        self, plan: StudyPlan, paths: StudyPaths, launcher: Launcher, writer: JournalWriter, only: frozenset[str],
        say: Callable[[str], None], progress: Progress,
    ) -> None:  # fmt: skip
        self._plan, self._paths, self._launcher, self._writer = plan, paths, launcher, writer
        self._only, self._say, self._progress = only, say, progress
        self._running: dict[str, tuple[NextLaunch, Running]] = {}

    def work(self, jobs: int, sleep: Callable[[float], None]) -> None:
        waited = 0.0
        while True:
            busy = self._fill(jobs)
            ended = [(name, code) for name, (_, run) in self._running.items() if (code := run.poll()) is not None]
            for name, code in ended:
                launch, running = self._running.pop(name)
                self._record(launch, running, code)
            if not ended and not self._running:
                if not busy or waited >= BUSY_SECONDS:
                    return self._say_busy(busy)
                waited += POLL_SECONDS
            if not ended:
                sleep(POLL_SECONDS)

    def retry_stopped(self) -> None:
        for name in self._history().stopped:
            self._writer.append(RETRY, title=f"{name} is tried again", data={"run": name})

    def stop_all(self) -> None:
        for _, running in self._running.values():
            running.stop()
        self._running.clear()

    def outcome(self) -> Outcome:
        history = self._history()
        complete = tuple(run.name for run in self._plan.runs if history.is_complete(run))
        rest = (run.name for run in self._plan.runs if run.name not in history.stopped and run.name not in complete)
        return Outcome(complete=complete, stopped=dict(history.stopped), open=tuple(rest))

    def _history(self) -> History:
        return read_history(read_journal(self._paths.journal).entries)

    def _fill(self, jobs: int) -> set[str]:
        """Start what may start; returns runs that are ready but still have a launch of another runner alive."""
        history = self._history()
        refused: set[str] = set()
        busy: set[str] = set()
        while len(self._running) < jobs:
            ready = (one for one in list_ready(self._plan, history, {*self._running, *refused, *busy}) if self._wanted(one.run))
            launch = next(ready, None)
            if launch is None:
                break
            if not self._launcher.is_free(launch.run):
                busy.add(launch.run.name)
            elif not self._start(launch):
                refused.add(launch.run.name)
        return busy

    def _say_busy(self, busy: Collection[str]) -> None:
        for name in sorted(busy):
            self._say(f"{name}: a launch of it is alive here, started by another runner; left to that one")

    def _wanted(self, run: StudyRun) -> bool:
        return not self._only or run.name in self._only

    def _start(self, launch: NextLaunch) -> bool:
        run, leg = launch
        where = {"run": run.name, "arm": run.arm, "seed": run.seed, "leg": leg.number}
        self._writer.append(LAUNCH, title=f"{run.name}, launch {leg.number} of {len(run.legs)}", data=where)
        try:
            self._running[run.name] = (launch, self._launcher.start(self._plan, run, leg))
        except (OSError, StudyError) as problem:
            reason = problem.message if isinstance(problem, StudyError) else f"{problem.strerror}: `{problem.filename}`"
            self._stop(launch, f"could not be started: {reason}")
            return False
        return True

    def _record(self, launch: NextLaunch, running: Running, code: int) -> None:
        if code == ExitCode.CANNOT_START and not self._launcher.is_free(launch.run):
            return  # another runner's launch of this run came first: left to that one, and no reason to stop the run
        if code != 0:
            self._stop(launch, running.explain(code))
            return
        try:
            self._done(launch, running.finish())
        except StudyError as problem:
            self._stop(launch, problem.message)

    def _done(self, launch: NextLaunch, finished: Finished) -> None:
        run, leg = launch
        data = {"run": run.name, "arm": run.arm, "seed": run.seed, "leg": leg.number, "launch": finished.launch,
                "guard": finished.guard, "result": finished.result.to_json()}  # fmt: skip
        self._writer.append(LEG, title=f"{run.name}, launch {leg.number} of {len(run.legs)} done", data=data)
        self._say(self._progress.tell(launch, self._history()))

    def _stop(self, launch: NextLaunch, reason: str) -> None:
        run, leg = launch
        data = {"run": run.name, "arm": run.arm, "seed": run.seed, "leg": leg.number, "reason": reason}
        self._writer.append(STOP, title=f"{run.name} is stopped: {reason}", data=data)
        self._say(f"{run.name}: stopped at launch {leg.number} of {len(run.legs)}: {reason}")


def _write_plan(paths: StudyPaths, plan: StudyPlan) -> None:
    paths.study_dir.mkdir(parents=True, exist_ok=True)
    temporary = paths.plan_path.with_name(f".plan.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(plan.to_json(), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, paths.plan_path)
