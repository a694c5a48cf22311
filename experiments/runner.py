"""Runs a study: registers its plan, then launches what is next until nothing is left. It can be killed at any time.

    register ── ready? ── launch ── exit code 0 ── experiment.leg
                                └── otherwise ──── experiment.stop (ends this run with its reason; the others go on)

`history.py` decides what is next. This file starts and watches the processes, and writes the study's journal.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chronicle.cli.options import ExitCode
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import (
    GuardVerdict,
    LaunchStart,
    StudyLaunch,
    StudyLeg,
    StudyRegistered,
    StudyStop,
    events_of,
)
from chronicle.launch.admission import find_alive, list_launches
from chronicle.launch.containment import die_with_parent
from chronicle.launch.ending import last_exception
from chronicle.launch.processes import signal_name
from experiments.design import StudyPlan, StudyRun
from experiments.errors import NotRegistered, StudyError
from experiments.files import RESULTS, LegResult, StudyPaths
from experiments.history import StudyHistory, list_ready, read_history
from experiments.launches import LegLaunch
from rollback.checkpoint.manifest import MANIFEST_NAME

POLL_SECONDS = 0.1
BUSY_SECONDS = 60.0  # the launches of a killed runner get its signal and end within their grace period


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """How far a study is: runs complete, runs stopped with their reasons, runs still open."""

    complete: tuple[str, ...]
    stopped: dict[str, str]
    open: tuple[str, ...]


def register_study(paths: StudyPaths, plan: StudyPlan, writer: JournalWriter) -> None:
    """Write the plan into the journal before the first launch; registering the same plan again changes nothing.

    Raises `NotRegistered` where this study's journal registered another plan: a margin or an arm may not change after
    the first result.
    """
    registered = _history(paths).plan
    if registered is not None and StudyPlan.from_json(dict(registered)) != plan:
        raise NotRegistered(f"`{paths.study_dir}` has another registered plan than {plan.plan_hash[:12]}",
                            "give the changed study another --name: a registered plan cannot change")
    if registered is None:
        study, profile = plan.study.name, plan.profile.name
        title = f"study {study}, profile {profile}: {plan.num_launches} launches, plan {plan.plan_hash[:12]}"
        entry = StudyRegistered(study=study, profile=profile, plan_hash=plan.plan_hash, plan=plan.to_json())
        writer.write(entry, title=title)


def read_registered(paths: StudyPaths) -> tuple[StudyPlan, StudyHistory]:
    """Return the registered plan and the state of the study. Raises `NotRegistered`."""
    history = _history(paths)
    if history.plan is None:
        raise NotRegistered(f"nothing is registered in `{paths.study_dir}`", "`chronicle experiment run STUDY` begins one")
    return StudyPlan.from_json(dict(history.plan)), history


def _history(paths: StudyPaths) -> StudyHistory:
    return read_history(read_journal(paths.journal).entries)


def run_study(
    plan: StudyPlan, paths: StudyPaths, launcher: ChronicleLauncher, *, jobs: int = 2, only: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None, sleep: Callable[[float], None] = time.sleep,
) -> StudyOutcome:
    """Register the plan and run launches until none is left; what an earlier runner gave up is tried again.

    On an exception the running launches are ended first.
    """
    with JournalWriter(paths.journal) as writer:
        register_study(paths, plan, writer)
        keeper = _Keeper(plan=plan, paths=paths, launcher=launcher, writer=writer, only=only, say=say)
        try:
            keeper.work(jobs, sleep)
        finally:
            for running in keeper.running.values():
                running.stop()
    history = _history(paths)
    complete = tuple(run.name for run in plan.runs if history.is_complete(run))
    return StudyOutcome(complete=complete, stopped=dict(history.stopped), open=tuple(history.open_runs(plan)))


@dataclass(kw_only=True)
class _Keeper:
    """Keeps up to `jobs` launches running and journals their results."""

    plan: StudyPlan
    paths: StudyPaths
    launcher: ChronicleLauncher
    writer: JournalWriter
    only: Collection[str]
    say: Callable[[str], None]
    running: dict[str, Running] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)  # by this runner; the next one tries them again

    def work(self, jobs: int, sleep: Callable[[float], None]) -> None:
        waited = 0.0
        while True:
            busy = self._fill(jobs)
            if self._collect():
                continue
            if not self.running:
                if not busy or waited >= BUSY_SECONDS:
                    for name in sorted(busy):
                        self.say(f"{name}: skipped, another runner has a live launch of it on this host")
                    return
                waited += POLL_SECONDS
            sleep(POLL_SECONDS)

    def _fill(self, jobs: int) -> set[str]:
        """Start the launches that may start; return the runs whose launch by another runner is still alive."""
        busy = set[str]()
        for run, leg in list_ready(self.plan, _history(self.paths), {*self.running, *self.stopped}):
            if len(self.running) == jobs:
                break
            if self.only and run.name not in self.only:
                continue
            if not self.launcher.is_free(run):
                busy.add(run.name)
                continue
            launch = LegLaunch(self.plan, run, leg, self.paths)
            self.writer.write(StudyLaunch(**launch.named), title=f"{run.name}, {launch.title}")
            try:
                self.running[run.name] = self.launcher.start(launch)
            except OSError as problem:
                self._stop(launch, f"could not be started: {problem.strerror}: `{problem.filename}`")
        return busy

    def _collect(self) -> bool:
        """Journal the launches that have ended; return whether there were any."""
        any_ended = False
        for name, running in list(self.running.items()):
            code = running.poll()
            if code is None:
                continue
            any_ended = True
            del self.running[name]
            launch = running.launch
            if code == ExitCode.CANNOT_START and not self.launcher.is_free(launch.run):
                continue  # another runner launched this run first; the run is not stopped
            try:
                if code:
                    raise StudyError(running.explain(code))
                self._done(launch, running.finish())
            except StudyError as problem:
                self._stop(launch, problem.message)
        return any_ended

    def _done(self, launch: LegLaunch, found: LegResult) -> None:
        result = {name: getattr(found, name) for name in RESULTS}
        entry = StudyLeg(**launch.named, launch=found.launch, guard=found.guard, result=result)
        self.writer.write(entry, title=f"{launch.run.name}, {launch.title} done")
        done = sum(map(len, _history(self.paths).done.values()))
        self.say(f"{launch.run.name}: {launch.title} done; {done} of {self.plan.num_launches} launches")

    def _stop(self, launch: LegLaunch, reason: str) -> None:
        name = launch.run.name
        self.stopped.add(name)
        self.writer.write(StudyStop(**launch.named, reason=reason), title=f"{name} is stopped: {reason}")
        self.say(f"{name}: stopped at {launch.title}: {reason}")


# --- Starting one launch

CHRONICLE = (sys.executable, "-m", "chronicle.cli.main")  # from this installation, whatever PATH says
GRACE_SECONDS = 10
FOR_A_STUDY = {
    "CHRONICLE_MLFLOW_URI": "off",  # hundreds of short launches, and the study has its own report
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(slots=True)
class ChronicleLauncher:
    """Starts `chronicle run -- …` with the study's trainer in this environment, without what another launch left there."""

    paths: StudyPaths
    environ: Mapping[str, str]

    def is_free(self, run: StudyRun) -> bool:
        """Whether no process of this run is alive; the launches of a killed runner may still be ending."""
        paths = self.paths.run(run.name)
        return not find_alive(paths, list_launches(read_journal(paths).entries))

    def start(self, launch: LegLaunch) -> Running:
        """Start one launch. Its output goes to a file of the study."""
        output = self.paths.output_path(launch.run.name, launch.leg.number)
        output.parent.mkdir(parents=True, exist_ok=True)
        environ = {key: value for key, value in self.environ.items() if not key.startswith("CHRONICLE_")} | FOR_A_STUDY
        if launch.is_treated:
            environ["CHRONICLE_GUARD"] = "warn"  # it differs on purpose: the guard's word is recorded
        with output.open("ab") as sink:
            process = subprocess.Popen(
                self.command(launch), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ,
                preexec_fn=die_with_parent(signal.SIGTERM))
        return Running(process, launch, output)

    def command(self, launch: LegLaunch) -> list[str]:
        """Return the command line of a launch."""
        name = launch.run.name
        where = ["--run", name, "--logs", str(self.paths.runs_dir), "--checkpoints", str(self.paths.checkpoints_dir(name))]
        return [*CHRONICLE, "run", "--grace", str(GRACE_SECONDS), *where, "--", *launch.words(sys.executable)]


@dataclass(slots=True)
class Running:
    """A running launch."""

    process: subprocess.Popen[bytes]
    launch: LegLaunch
    output: Path
    told: bool = False  # that its leg is over

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; negative or 128 + n means a signal."""
        code, launch = self.process.poll(), self.launch
        if launch.plan.study.trainer.stop != "checkpoint":
            return code
        if not self.told and (launch.checkpoint / MANIFEST_NAME).exists():
            self.told = True
            if code is None and not launch.is_last:
                self.process.terminate()
        return 0 if self.told and code is not None and not launch.is_last else code

    def finish(self) -> LegResult:
        """Return the result of a launch that ended with 0. Raises `StudyError` where it left none."""
        name = self.launch.run.name
        entries = read_journal(self.launch.paths.run(name)).entries
        own = [entry.launch for entry, start in events_of(entries, LaunchStart) if start.pid == self.process.pid]
        if not own or own[-1] is None:
            raise StudyError(f"run `{name}` has no launch in its journal")
        words = {said.verdict for entry, said in events_of(entries, GuardVerdict) if entry.launch == own[-1]}
        guard = next((word for word in ("refused", "warned", "unverified", "passed") if word in words), None)
        return self.launch.read(own[-1], guard)

    def explain(self, code: int) -> str:
        """Return in words why a launch ended with a code other than 0."""
        number = -code if code < 0 else code - 128
        if 0 < number < 65:
            return f"killed by {signal_name(number)}"
        how = {78: "refused by the guard", 125: "not started"}.get(code, f"ended with code {code}")
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{how}: {last_exception(lines).removeprefix('error: ') or 'no message'}"

    def stop(self) -> None:
        """End the launch and wait for it."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=GRACE_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
