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
from dataclasses import asdict, dataclass, field
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
from experiments.design import Leg, StudyPlan, StudyRun
from experiments.errors import NotRegistered, StudyError
from experiments.files import StudyPaths
from experiments.history import Finished, StudyHistory, list_ready, read_history
from experiments.launches import checkpoint_after, command_words, is_treated, read_leg
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
        study, profile = plan.study, plan.profile
        entry = StudyRegistered(
            study=study.name, profile=profile.name, seeds=profile.seeds, arms=plan.arm_names, primary=study.primary,
            margin_bpb=study.margin_bpb, alpha=study.alpha, study_digest=plan.study_hash, plan_hash=plan.plan_hash,
            contrasts=tuple([c.name, c.plus, c.minus, c.family] for c in study.contrasts), plan=plan.to_json())
        title = f"study {study.name}, profile {profile.name}: {plan.num_launches} launches, plan {plan.plan_hash[:12]}"
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
            keeper.stop_all()
    history = _history(paths)
    complete = tuple(run.name for run in plan.runs if history.is_complete(run))
    rest = tuple(run.name for run in plan.runs if run.name not in history.stopped and run.name not in complete)
    return StudyOutcome(complete=complete, stopped=dict(history.stopped), open=rest)


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

    def stop_all(self) -> None:
        for running in self.running.values():
            running.stop()

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
            started = StudyLaunch(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number)
            self.writer.write(started, title=f"{run.name}, launch {leg.number} of {len(run.legs)}")
            try:
                self.running[run.name] = self.launcher.start(self.plan, run, leg)
            except OSError as problem:
                self._stop(run, leg, f"could not be started: {problem.strerror}: `{problem.filename}`")
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
            if code == ExitCode.CANNOT_START and not self.launcher.is_free(running.run):
                continue  # another runner launched this run first; the run is not stopped
            try:
                if code:
                    raise StudyError(running.explain(code))
                self._done(running.run, running.leg, running.finish())
            except StudyError as problem:
                self._stop(running.run, running.leg, problem.message)
        return any_ended

    def _done(self, run: StudyRun, leg: Leg, finished: Finished) -> None:
        entry = StudyLeg(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number, launch=finished.launch,
                         guard=finished.guard, result=asdict(finished.result))
        self.writer.write(entry, title=f"{run.name}, launch {leg.number} of {len(run.legs)} done")
        done = sum(map(len, _history(self.paths).done.values()))
        self.say(f"{run.name}: launch {leg.number} of {len(run.legs)} done; {done} of {self.plan.num_launches} launches")

    def _stop(self, run: StudyRun, leg: Leg, reason: str) -> None:
        stopped = StudyStop(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number, reason=reason)
        self.stopped.add(run.name)
        self.writer.write(stopped, title=f"{run.name} is stopped: {reason}")
        self.say(f"{run.name}: stopped at launch {leg.number} of {len(run.legs)}: {reason}")


# --- Starting one launch

CHRONICLE = (sys.executable, "-m", "chronicle.cli.main")  # from this installation, whatever PATH says
GRACE_SECONDS = 10
INHERITED = ("CHRONICLE_RUN", "CHRONICLE_RUN_DIR", "CHRONICLE_LAUNCH", "CHRONICLE_LAUNCH_DIR", "CHRONICLE_TOKEN",
             "CHRONICLE_CHECKPOINTS", "CHRONICLE_OUTPUT", "CHRONICLE_GUARD", "CHRONICLE_FRESH_START")


@dataclass(slots=True)
class ChronicleLauncher:
    """Starts `chronicle run -- …` with the study's trainer in this environment."""

    paths: StudyPaths
    environ: Mapping[str, str]

    def is_free(self, run: StudyRun) -> bool:
        """Whether no process of this run is alive; the launches of a killed runner may still be ending."""
        paths = self.paths.run(run.name)
        return not find_alive(paths, list_launches(read_journal(paths).entries))

    def start(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> Running:
        """Start one launch. Its output goes to a file of the study."""
        output = self.paths.output_path(run.name, leg.number)
        output.parent.mkdir(parents=True, exist_ok=True)
        environ = {key: value for key, value in self.environ.items() if key not in INHERITED}
        environ.setdefault("CHRONICLE_MLFLOW_URI", "off")  # hundreds of short launches, and the study has its own report
        environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if is_treated(plan, run, leg):
            environ["CHRONICLE_GUARD"] = "warn"  # it differs on purpose: the guard's word is recorded
        with output.open("ab") as sink:
            process = subprocess.Popen(
                self.command(plan, run, leg), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ,
                preexec_fn=die_with_parent(signal.SIGTERM))
        return Running(process, self.paths, plan, run, leg, output)

    def command(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> list[str]:
        """Return the command line of a launch."""
        where = ["--run", run.name, "--logs", str(self.paths.runs_dir), "--checkpoints",
                 str(self.paths.checkpoints_dir(run.name))]
        words = command_words(plan, run, leg, self.paths, sys.executable)
        return [*CHRONICLE, "run", "--grace", str(GRACE_SECONDS), *where, "--", *words]


@dataclass(slots=True)
class Running:
    """A running launch."""

    process: subprocess.Popen[bytes]
    paths: StudyPaths
    plan: StudyPlan
    run: StudyRun
    leg: Leg
    output: Path
    told: bool = False  # that its leg is over

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; negative or 128 + n means a signal."""
        code = self.process.poll()
        if self.plan.study.trainer.stop != "checkpoint":
            return code
        if not self.told and (checkpoint_after(self.plan, self.run, self.leg.last, self.paths) / MANIFEST_NAME).exists():
            self.told = True
            if code is None and self.leg is not self.run.legs[-1]:
                self.process.terminate()
        return 0 if self.told and code is not None and self.leg is not self.run.legs[-1] else code

    def finish(self) -> Finished:
        """Return the result of a launch that ended with 0. Raises `StudyError` where it left none."""
        run_paths = self.paths.run(self.run.name)
        entries = read_journal(run_paths).entries
        own = [entry.launch for entry, start in events_of(entries, LaunchStart) if start.pid == self.process.pid]
        if not own or own[-1] is None:
            raise StudyError(f"run `{self.run.name}` has no launch in its journal")
        launch = own[-1]
        result = read_leg(self.plan, self.run, self.leg, self.paths, launch)
        words = {said.verdict for entry, said in events_of(entries, GuardVerdict) if entry.launch == launch}
        guard = next((word for word in ("refused", "warned", "unverified", "passed") if word in words), None)
        return Finished(result=result, launch=launch, guard=guard)

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
