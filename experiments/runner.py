"""Runs a study: registers its plan, then launches what is next until nothing is left. It can be killed at any time.

    register ── ready? ── launch ── exit code 0 ── experiment.leg
                                └── otherwise ──── experiment.stop (ends this run with its reason; the others go on)

`history.py` decides what is next. This file starts and watches the processes, and writes the study's journal.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicle.cli.options import ExitCode
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import (
    GuardVerdict,
    LaunchStart,
    StudyLaunch,
    StudyLeg,
    StudyRegistered,
    StudyRetry,
    StudyStop,
    events_of,
)
from chronicle.launch.admission import find_alive, list_launches
from chronicle.launch.containment import die_with_parent
from experiments.design import Leg, StudyPlan, StudyRun
from experiments.errors import NotRegistered, StudyError
from experiments.files import StudyPaths
from experiments.history import Finished, NextLaunch, StudyHistory, count_updates, list_ready, read_history
from experiments.launches import (
    checkpoint_after,
    command_words,
    is_treated,
    lose_in_copy,
    lost_in_copy,
    placeholders,
    read_leg,
    resume_path,
)
from rollback.checkpoint.manifest import MANIFEST_NAME
from rollback.disk.durable import write_atomic

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
    if registered is None or not paths.plan_path.is_file():
        paths.study_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(paths.plan_path, json.dumps(registered or plan.to_json(), indent=1, sort_keys=True))
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
    retry_stopped: bool = False, say: Callable[[str], None] = lambda line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> StudyOutcome:
    """Register the plan and run launches until none is left. On an exception the running launches are ended first."""
    with JournalWriter(paths.journal) as writer:
        register_study(paths, plan, writer)
        if retry_stopped:
            for name in _history(paths).stopped:
                writer.write(StudyRetry(run=name), title=f"{name} is tried again")
        keeper = _Keeper(plan, paths, launcher, writer, frozenset(only), say)
        try:
            keeper.work(jobs, sleep)
        finally:
            keeper.stop_all()
    history = _history(paths)
    complete = tuple(run.name for run in plan.runs if history.is_complete(run))
    rest = tuple(run.name for run in plan.runs if run.name not in history.stopped and run.name not in complete)
    return StudyOutcome(complete=complete, stopped=dict(history.stopped), open=rest)


class _Keeper:
    """Keeps up to `jobs` launches running and journals their results."""

    def __init__(
        self, plan: StudyPlan, paths: StudyPaths, launcher: ChronicleLauncher, writer: JournalWriter, only: frozenset[str],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._paths, self._launcher, self._writer = plan, paths, launcher, writer
        self._only, self._say = only, say
        self._running: dict[str, tuple[NextLaunch, Running]] = {}

    def work(self, jobs: int, sleep: Callable[[float], None]) -> None:
        waited = 0.0
        while True:
            busy = self._fill(jobs) if len(self._running) < jobs else set()
            num_ended = self._collect()
            if num_ended:
                continue
            if not self._running:
                if not busy or waited >= BUSY_SECONDS:
                    for name in sorted(busy):
                        self._say(f"{name}: skipped, another runner has a live launch of it on this host")
                    return
                waited += POLL_SECONDS
            sleep(POLL_SECONDS)

    def stop_all(self) -> None:
        for _, running in self._running.values():
            running.stop()
        self._running.clear()

    def _fill(self, jobs: int) -> set[str]:
        """Start the launches that may start; return the runs whose launch by another runner is still alive."""
        history, busy = _history(self._paths), set[str]()
        for launch in list_ready(self._plan, history, set(self._running)):
            if len(self._running) == jobs:
                break
            if self._only and launch.run.name not in self._only:
                continue
            if self._launcher.is_free(launch.run):
                self._start(launch)
            else:
                busy.add(launch.run.name)
        return busy

    def _start(self, launch: NextLaunch) -> None:
        run, leg = launch
        started = StudyLaunch(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number)
        self._writer.write(started, title=f"{run.name}, launch {leg.number} of {len(run.legs)}")
        try:
            self._running[run.name] = (launch, self._launcher.start(self._plan, run, leg))
        except StudyError as problem:
            self._stop(launch, f"could not be started: {problem.message}")
        except OSError as problem:
            self._stop(launch, f"could not be started: {problem.strerror}: `{problem.filename}`")

    def _collect(self) -> int:
        """Journal the launches that have ended; return how many."""
        codes = {name: running.poll() for name, (_, running) in self._running.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name, code in ended.items():
            launch, running = self._running.pop(name)
            if code == ExitCode.CANNOT_START and not self._launcher.is_free(launch.run):
                continue  # another runner launched this run first; the run is not stopped
            if code != 0:
                self._stop(launch, running.explain(code))
                continue
            try:
                self._done(launch, running.finish())
            except StudyError as problem:
                self._stop(launch, problem.message)
        return len(ended)

    def _done(self, launch: NextLaunch, finished: Finished) -> None:
        run, leg = launch
        done = StudyLeg(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number, launch=finished.launch,
                        guard=finished.guard, result=finished.result.to_json())
        self._writer.write(done, title=f"{run.name}, launch {leg.number} of {len(run.legs)} done")
        updates = count_updates(self._plan, _history(self._paths))
        self._say(f"{run.name}: launch {leg.number} of {len(run.legs)} done; {updates:,} of {self._plan.num_updates:,} updates")

    def _stop(self, launch: NextLaunch, reason: str) -> None:
        run, leg = launch
        stopped = StudyStop(run=run.name, arm=run.arm, seed=run.seed, leg=leg.number, reason=reason)
        self._writer.write(stopped, title=f"{run.name} is stopped: {reason}")
        self._say(f"{run.name}: stopped at launch {leg.number} of {len(run.legs)}: {reason}")


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
        """Start one launch, after a rollback where the leg goes back. Its output goes to a file of the study."""
        output = self.paths.output_path(run.name, leg.number)
        output.parent.mkdir(parents=True, exist_ok=True)
        environ = {key: value for key, value in self.environ.items() if key not in INHERITED}
        environ.setdefault("CHRONICLE_MLFLOW_URI", "off")  # hundreds of short launches, and the study has its own report
        environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if lost_in_copy(leg):
            owner = plan.start_of(run) if leg.number == 1 else run
            copy = resume_path(plan, run, leg, self.paths)
            assert copy is not None
            lose_in_copy(checkpoint_after(plan, owner, leg.first, self.paths), copy, lost_in_copy(leg))
        if is_treated(plan, run, leg):
            environ["CHRONICLE_GUARD"] = "warn"  # it differs on purpose: the guard's word is recorded
        if leg.restart is not None and leg.restart.rollback:
            self._roll_back(plan, run, leg, environ, output)
        with output.open("ab") as sink:
            process = subprocess.Popen(
                self.command(plan, run, leg), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ,
                preexec_fn=die_with_parent(signal.SIGTERM))
        return Running(process, self.paths, plan, run, leg, output)

    def command(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> list[str]:
        """Return the command line of a launch."""
        resume = resume_path(plan, run, leg, self.paths)
        resume = resume.resolve() if resume is not None else None
        words = command_words(plan, run, leg, self.paths, resume, sys.executable)
        return [*CHRONICLE, "run", "--grace", str(GRACE_SECONDS), *self._where(run), "--", *words]

    def _where(self, run: StudyRun) -> list[str]:
        checkpoints = self.paths.checkpoints_dir(run.name)
        return ["--run", run.name, "--logs", str(self.paths.runs_dir), "--checkpoints", str(checkpoints)]

    def _roll_back(self, plan: StudyPlan, run: StudyRun, leg: Leg, environ: Mapping[str, str], output: Path) -> None:
        assert leg.restart is not None
        step, values = plan.profile.start_updates + leg.first, placeholders(plan, run, leg, self.paths, None, "")
        words = [word.format_map(values) for word in leg.restart.rollback]
        command = [*CHRONICLE, "rollback", "--to", str(step), "--yes", *self._where(run), *words]
        with output.open("ab") as sink:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ, check=False)
        if done.returncode:
            said = _last_error(output) or "no message"
            raise StudyError(f"`chronicle rollback --to {step}` ended with code {done.returncode}: {said}")


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
        if self.plan.study.program.stop != "checkpoint":
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
        own = (entry.launch for entry, start in events_of(entries, LaunchStart) if start.pid == self.process.pid)
        launch = max((number for number in own if number is not None), default=None)
        if launch is None:
            raise StudyError(f"run `{self.run.name}` has no launch in its journal")
        result = read_leg(self.plan, self.run, self.leg, self.paths, launch)
        words = {said.verdict for entry, said in events_of(entries, GuardVerdict) if entry.launch == launch}
        guard = next((word for word in ("refused", "warned", "unverified", "passed") if word in words), None)
        return Finished(result=result, launch=launch, guard=guard)

    def explain(self, code: int) -> str:
        """Return in words why a launch ended with a code other than 0."""
        number = -code if code < 0 else code - 128
        if 0 < number < 65 and number in {one.value for one in signal.Signals}:
            return f"killed by {signal.Signals(number).name}"
        said = _last_error(self.output)
        if code == 78:
            return f"refused by the guard: {said or 'see its output'}"
        if code == 125:
            return f"not started: {said or 'see its output'}"
        return f"ended with code {code}: {said or 'no message'}"

    def stop(self) -> None:
        """End the launch and wait for it."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=GRACE_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _last_error(output: Path) -> str | None:
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    own = [line.split("error: ", 1)[1] for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception): ", line)]
    said = own or raised or [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return said[-1].strip()[:300] if said else None
