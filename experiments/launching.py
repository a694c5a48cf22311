"""How one launch of a study is started: through `chronicle run`, supervised, logged, with the guard on.

The seam the runner is tested at. A launch that goes back in time (`back`) is preceded by a real `chronicle rollback`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bit_transformer.training.resume import checkpoint_path
from chronicle.journal import read_journal
from chronicle.launch.containment import die_with_parent
from chronicle.launch.orphans import find_alive, list_launches
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.history import Finished
from experiments.files import StudyPaths
from experiments.result import LEG_RESULT, read_result

__all__ = ["ChronicleLauncher", "Launcher", "Running"]

GRACE_SECONDS = 10
INHERITED = ("CHRONICLE_RUN", "CHRONICLE_RUN_DIR", "CHRONICLE_LAUNCH", "CHRONICLE_LAUNCH_DIR", "CHRONICLE_TOKEN",
             "CHRONICLE_CHECKPOINTS", "CHRONICLE_OUTPUT", "CHRONICLE_GUARD", "CHRONICLE_FRESH_START")  # fmt: skip


class Running(Protocol):
    """A launch under way."""

    def poll(self) -> int | None:
        """Exit code once it has ended (negative or 128+n: a signal)."""

    def finish(self) -> Finished:
        """The result of a launch that ended with 0; raises `StudyError` where it left none."""

    def explain(self, code: int) -> str:
        """Why a launch ended with another code."""

    def stop(self) -> None:
        """End it and wait."""


class Launcher(Protocol):
    """Starts launches; raises `OSError` or `StudyError` when one cannot be started."""

    def is_free(self, run: StudyRun) -> bool:
        """Whether nothing of an earlier launch of this run is alive here."""

    def start(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> Running:
        """Start one."""


@dataclass(slots=True)
class ChronicleLauncher:
    """Starts `chronicle run -- python -m experiments.trainer …` in this environment."""

    paths: StudyPaths
    environ: Mapping[str, str]

    def is_free(self, run: StudyRun) -> bool:
        """Whether nothing of this run is alive: a runner that was killed leaves launches that are just ending."""
        paths = self.paths.run(run.name)
        return not find_alive(paths, list_launches(read_journal(paths).entries))

    def start(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> Running:
        """Start one launch; its output goes to a file of the study."""
        output = self.paths.output_path(run.name, leg.number)
        output.parent.mkdir(parents=True, exist_ok=True)
        environ = {key: value for key, value in self.environ.items() if key not in INHERITED}
        environ.setdefault("CHRONICLE_MLFLOW_URI", "off")  # hundreds of short launches: the study has its own report
        environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if leg.first < (run.legs[leg.number - 2].last if leg.number > 1 else leg.first):
            self._roll_back(plan, run, leg, environ, output)
        with output.open("ab") as sink:
            process = subprocess.Popen(
                self.command(plan, run, leg), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ,
                preexec_fn=die_with_parent(signal.SIGTERM))  # fmt: skip
        return _Process(process, self.paths, run, leg, plan.plan_hash, output)

    def command(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> list[str]:
        """The whole command line."""
        trainer = [sys.executable, "-m", "experiments.trainer", "--plan", str(self.paths.plan_path.resolve()),
                   "--run", run.name, "--leg", str(leg.number)]  # fmt: skip
        resume = resume_path(plan, run, leg, self.paths)
        if resume is not None:
            trainer += ["--resume", str(resume.resolve())]
        return [*chronicle_command(), "run", "--grace", str(GRACE_SECONDS), *self._where(run), "--", *trainer]

    def _where(self, run: StudyRun) -> list[str]:
        checkpoints = self.paths.checkpoints_dir(run.name)
        return ["--run", run.name, "--logs", str(self.paths.runs_dir), "--checkpoints", str(checkpoints)]

    def _roll_back(self, plan: StudyPlan, run: StudyRun, leg: Leg, environ: Mapping[str, str], output: Path) -> None:
        step = plan.profile.start_updates + leg.first
        command = [*chronicle_command(), "rollback", "--to", str(step), "--yes", *self._where(run)]
        if leg.data_offset:
            command += ["--skip-batches", str(leg.data_offset)]
        with output.open("ab") as sink:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environ, check=False)
        if done.returncode:
            said = _last_error(output) or "no message"
            raise StudyError(f"`chronicle rollback --to {step}` ended with code {done.returncode}: {said}")


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    paths: StudyPaths
    run: StudyRun
    leg: Leg
    plan_hash: str
    output: Path

    def poll(self) -> int | None:
        return self.process.poll()

    def finish(self) -> Finished:
        run_paths = self.paths.run(self.run.name)
        entries = read_journal(run_paths).entries
        own = (e for e in entries if e.kind == "launch.start" and e.data.get("pid") == self.process.pid)
        launch = max((entry.launch for entry in own if entry.launch is not None), default=None)
        if launch is None:
            raise StudyError(f"run `{self.run.name}` has no launch in its journal")
        result = read_result(run_paths.launch_dir(launch) / LEG_RESULT)
        if (result.plan_hash, result.run, result.leg) != (self.plan_hash, self.run.name, self.leg.number):
            raise StudyError(
                f"launch {launch} of `{self.run.name}` left the result of leg {result.leg} of `{result.run}`"
            )
        verdicts = [entry.data for entry in entries if entry.kind == "guard.verdict" and entry.launch == launch]
        words = {str(data.get("verdict")) for data in verdicts}
        guard = next((word for word in ("refused", "warned", "passed") if word in words), None)
        return Finished(result=result, launch=launch, guard=guard)

    def explain(self, code: int) -> str:
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
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=GRACE_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def resume_path(plan: StudyPlan, run: StudyRun, leg: Leg, paths: StudyPaths) -> Path | None:
    """The checkpoint a leg loads: the start's for a first leg, the run's own for the others."""
    if run.arm == START:
        return None
    owner = START if leg.number == 1 else run.name
    return checkpoint_path(paths.checkpoints_dir(owner), plan.profile.start_updates + leg.first)


def chronicle_command() -> list[str]:
    """The command line of this installation, whatever is on the PATH."""
    return [sys.executable, "-m", "chronicle.cli.main"]


def _last_error(output: Path) -> str | None:
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    own = [line.split("error: ", 1)[1] for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception): ", line)]
    said = own or raised or [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return said[-1].strip()[:300] if said else None
