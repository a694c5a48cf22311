"""`chronicle run -- <launcher …>`: starts one launch of a run and supervises it until it ends."""

import functools
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    LogsOption,
    RunOption,
    given_flags,
    settings_with_checkpoints,
)
from chronicle.errors import UsageProblem
from chronicle.launch.beside import Beside
from chronicle.resume.rehearsal import REHEARSAL_VARIABLE
from chronicle.settings import Settings
from chronicle.story.plain import say

if TYPE_CHECKING:
    from chronicle.launch.handover import HandedOver
    from chronicle.launch.keeper import Killed
    from chronicle.launch.launching import LaunchRequest, LaunchResult
    from chronicle.launch.nodes import Node
    from chronicle.launch.restarts import Policy

DEFAULT_GRACE_SECONDS = 90.0
CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": False}


def run_launcher(
    launcher: list[str] | None = None,
    restarts: int | None = None,
    autopilot: bool = False,
    force: str | None = None,
    accept_change: str | None = None,
    sbatch: int | None = None,
    node: bool = False,
    crashes: int | None = None,
    restart_pause: float | None = None,
    on_propose: str = "continue",
    on_stall: str = "report",
    grace: float | None = None,
    skip: list[str] | None = None,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
) -> CommandResult:
    """Start a training command under supervision.

    The launch is recorded in the journal, its output is logged, the detector reads its loss, and none of its
    processes outlives it.

    Example: chronicle run --run demo -- torchrun --nproc_per_node 2 train.py

    With --restarts it hands each launch the newest verified checkpoint (`CHRONICLE_RESUME_FROM`) and starts again by the
    cause of the end.

    Returns the launcher's exit code, 128+n for a signal, 125 when it could not be started, 3 when the run directory is a
    copy or its journal is damaged.

    Options:
      LAUNCHER: The launcher and its arguments, after `--`.
      --restarts N: Start again by itself, at most N times (policy: docs/launching.md).
      --autopilot: Apply proposed rollbacks and launch again, within budgets.
      --force: Start although a launch seems alive, the journal is damaged or the checkpoints are gone: why.
      --accept-change REASON: Accept that model, data, topology or precision differ from the plan.
      --sbatch N: Print a batch script for N nodes; start nothing.

    Rare options:
      --node: This is one of several nodes of one launch (`srun`, or pods of one Job).
      --crashes N: Stop after N failures in a row without a newer verified checkpoint [3].
      --restart-pause SECONDS: Seconds before a restart without progress, doubled each time [10].
      --on-propose ACTION: What to do when the detector proposes a rollback: `stop` or `continue`.
      --on-stall ACTION: What to do when the launch stands still: `report`, or `stop` it as a hang.
      --grace SECONDS: Seconds from a forwarded signal to KILL [90, or twice the longest save].
      --skip PFnn: Skip a preflight check (repeatable; recorded).
    """
    from chronicle.launch.launching import LaunchRequest, launch
    from chronicle.launch.nodes import find_node
    from chronicle.launch.restarts import DEFAULT_CRASHES, DEFAULT_PAUSE_SECONDS, DEFAULT_RESTARTS, policy_of
    from chronicle.preflight.gate import require_known

    command = tuple(launcher or ())
    if not command:
        raise UsageProblem("no launcher given", "chronicle run -- torchrun --nproc_per_node 2 train.py")
    if on_propose not in ("stop", "continue"):
        raise UsageProblem(f"--on-propose is `{on_propose}`: expected `stop` or `continue`")
    if on_stall not in ("report", "stop"):
        raise UsageProblem(f"--on-stall is `{on_stall}`: expected `report` or `stop`")
    if grace is not None and grace < 0:
        raise UsageProblem(f"--grace is {grace:g}: expected seconds, 0 or more")
    settings = settings_with_checkpoints(run, logs, checkpoints)
    settings.say_store("what the launch saves there is not recorded, not checked, and never proposed")
    skipped = require_known(skip or ())
    seconds, recorded = _check_before(settings, command, grace, skipped, force, fresh=force)
    policy = policy_of(
        DEFAULT_RESTARTS if restarts is None else restarts,
        DEFAULT_CRASHES if crashes is None else crashes,
        DEFAULT_PAUSE_SECONDS if restart_pause is None else restart_pause,
    )
    if sbatch is not None:
        flags = tuple(shlex.split(" ".join(given_flags(logs, checkpoints))))
        return CommandResult(raw=_batch_script(settings, command, seconds, sbatch, policy, flags, on_stall))
    environ = dict(os.environ)  # and what the ranks must know
    known = {
        "CHRONICLE_ACCEPT_CHANGE": accept_change,
        "CHRONICLE_PREFLIGHT_SKIP": ",".join(skipped),
        "CHRONICLE_BATCH_TEXT": "" if settings.batch_text else "0",
    }
    environ.update({name: value for name, value in known.items() if value})
    request = LaunchRequest(
        command=command,
        paths=settings.paths,
        checkpoints_dir=settings.checkpoints_dir,
        cwd=Path.cwd(),
        environ=environ,
        grace_seconds=seconds,
        stop_on_stall=on_stall == "stop",
        hooks={} if REHEARSAL_VARIABLE in os.environ else settings.hooks,
        options=given_flags(logs, checkpoints),
        stop_on_proposal=autopilot or on_propose == "stop",
        force=force,
        recorded=recorded | ({"accept_change": accept_change} if accept_change else {}),
        node=find_node(os.environ) if node else None,
    )
    check = functools.partial(_check_before, settings, command, grace, skipped, force)
    starting = _Starting(settings, request, launch, check, autopilot)
    if restarts is not None:
        return CommandResult(exit_code=starting.keep(policy))
    end = starting.mirrored(lambda: starting.launch(request))
    return CommandResult(data={"launch": end.launch, **end.data}, exit_code=end.exit_code)


class _Starting(NamedTuple):
    """A launch that is about to start, once or as a policy says."""

    settings: Settings
    request: "LaunchRequest"
    launch: "Callable[[LaunchRequest], LaunchResult]"
    check: Callable[[], object]  # of the host, before each further launch
    autopilot: bool

    def mirrored(self, begin: "Callable[[], LaunchResult]") -> "LaunchResult":
        """One launch, or those that an autopilot makes of it, beside the processes that feed MLflow and send alerts."""
        courier = mirror = second = Beside()
        if self.request.is_first:
            courier, mirror = _start_alerts(self.settings), _start_mirror(self.settings)
            second = _start_first_save(self.settings, self.request.command)
        try:
            if not self.autopilot:
                return begin()
            from chronicle.watch.autopilot import run_autopilot

            return run_autopilot(self.settings.paths, begin, _type_command, say)
        finally:
            feeding = mirror.pid
            if not mirror.stop():
                say(f"process {feeding} still sends data to MLflow; it exits when it is done")
            second.stop(0.0)
            courier.stop(0.0)  # it goes on by itself until what is due is sent

    def keep(self, policy: "Policy") -> int:
        """Launch as the policy says, below a keeper that replaces a killed supervisor; the exit code."""
        from chronicle.cli.main import explain
        from chronicle.launch.admission import end_left_behind
        from chronicle.launch.keeper import Killed, keep_supervised
        from chronicle.launch.restarts import chain_of, stand_down

        node, grace = self.request.node, self.request.grace_seconds
        chain = chain_of(self.request.environ)  # of all its launches

        def work(killed: Killed | None) -> int:
            if killed is not None and self.settings.paths.journal_dir.is_dir():
                end_left_behind(self.settings.paths, killed, grace)
                if node is not None:
                    return stand_down(self.settings, node, grace, killed)
            replaced = iter([killed])  # an autopilot begins several times, and stands in for it once
            return self.mirrored(lambda: self._unattended(policy, chain, next(replaced, None))).exit_code

        return keep_supervised(work, most=policy.restarts, pause_seconds=0.5, say=say, explain=explain)

    def _unattended(self, policy: "Policy", chain: str, killed: "Killed | None") -> "LaunchResult":
        """Launch with what to resume from, and again as the policy says; of SLURM's nodes once: `chronicle again` decides."""
        from chronicle.launch.restarts import Unattended, keep_going

        request = self.request
        first = True

        def begin(part: "Node | None", handed: "HandedOver") -> "LaunchResult":
            nonlocal first
            recorded = {**request.recorded, "chain": chain, "handed": handed.to_json()}
            if not first:
                self.check()  # of the host: disk, ports, strays and checkpoints may have changed
                recorded.pop("fresh", None)  # that was the first launch
            first = False
            environ = {**request.environ, **handed.environment()}
            return self.launch(replace(request, recorded=recorded, environ=environ, node=part))

        run = Unattended(
            settings=self.settings, chain=chain, policy=policy, grace_seconds=request.grace_seconds, say=say, node=request.node
        )
        return keep_going(run, begin, killed)


def _start_mirror(settings: Settings) -> Beside:
    """Send the run to MLflow, where `mlflow_uri` asks for it. The launch does not wait for it."""
    from chronicle.integrations.mlflow_process import MLFLOW_OFF, start_mlflow_process

    if settings.mlflow_uri in (None, MLFLOW_OFF):
        return Beside()
    return start_mlflow_process(settings.paths, settings.mlflow_uri, talk=say)


def _start_alerts(settings: Settings) -> Beside:
    """Send alerts, where `[alerts]` names a destination. The launch does not wait for it."""
    if not settings.alerts or REHEARSAL_VARIABLE in os.environ:
        return Beside()
    from chronicle.alerts.process import start_alerts

    return start_alerts(settings, talk=say)


def _start_first_save(settings: Settings, command: Sequence[str]) -> Beside:
    """Load the first save in a second process, where `[rehearse]` asks for it. The launch does not wait for it."""
    if settings.rehearse.get("first_save") is not True or REHEARSAL_VARIABLE in os.environ:
        return Beside()
    from chronicle.launch.beside import start_beside

    own = ("rehearse", "--only", "save", "--run", settings.run, "--logs", str(settings.logs_dir))
    words = (sys.executable, "-m", "chronicle_ml", *own, "--", *command)
    later = "`chronicle rehearse` shows whether it resumes"
    return start_beside(words, os.environ, what="the rehearsal of the first save", later=later, talk=say)


def _type_command(words: Sequence[str]) -> int:
    """Run another `chronicle` command in a process of its own; returns its exit code."""
    return subprocess.run([sys.executable, "-m", "chronicle.cli.main", *words], check=False).returncode


def _batch_script(
    settings: Settings,
    command: tuple[str, ...],
    grace: float,
    nodes: int,
    policy: "Policy",
    flags: tuple[str, ...],
    on_stall: str,
) -> str:
    from chronicle.journal import read_journal
    from chronicle.launch.admission import find_excluded
    from chronicle.launch.slurm import format_sbatch

    excluded = tuple(find_excluded(read_journal(settings.paths).entries))
    counts = ("--restarts", f"{policy.restarts}", "--crashes", f"{policy.crashes}")
    again = (*flags, *counts, "--restart-pause", f"{policy.pause_seconds:g}")
    return format_sbatch(
        settings.run, command, grace_seconds=grace, nodes=nodes, excluded=excluded, again=again, on_stall=on_stall
    )


def _check_before(
    settings: Settings,
    command: tuple[str, ...],
    grace: float | None,
    skipped: tuple[str, ...],
    force: str | None,
    fresh: str | None = None,
) -> tuple[float, dict[str, Any]]:
    """The grace in seconds and the results of the quick preflight. `fresh`: why lost checkpoints do not keep it from starting.

    Raises `LaunchRefused` when a check failed, `NotResumable` when the checkpoints are gone, `Refusal` when the directory is a
    copy, or when the journal is damaged and no reason to go on (`force`) is given.
    """
    from chronicle.cli.rehearse import said_of
    from chronicle.journal import read_journal
    from chronicle.journal.place import look, refuse_copy
    from chronicle.launch.admission import LaunchRefused, ensure_same_trainer, ensure_saves_are_there, refuse_damaged
    from chronicle.preflight.host import Host, check_host, measured_save_seconds
    from chronicle.preflight.results import CheckVerdict

    place, standing = look(settings.paths)
    if place is not None:
        refuse_copy(place, standing, settings.paths)
    journal = read_journal(settings.paths)
    if force is None:
        refuse_damaged(settings.paths, journal)
    entries = journal.entries
    ensure_same_trainer(settings, command, Path.cwd(), entries)
    begun = ensure_saves_are_there(settings, entries, fresh)
    save = measured_save_seconds(entries) or 0.0
    seconds = grace if grace is not None else max(DEFAULT_GRACE_SECONDS, 2.0 * save)
    host = Host(
        paths=settings.paths,
        checkpoints_dir=settings.checkpoints_dir,
        entries=entries,
        environ=os.environ,
        command=command,
        grace_seconds=seconds,
    )
    results = check_host(host, skip={*skipped, "PF07", "PF31"})  # `launch` itself refuses for both
    failed = [result for result in results if result.verdict is CheckVerdict.FAIL]
    if failed:
        hint = f"{failed[0].remedy}; or skip the check: --skip {failed[0].check}"
        raise LaunchRefused(f"preflight {failed[0].check} {failed[0].title}: {failed[0].message}", hint)
    for result in results:
        if result.verdict is CheckVerdict.WARN:
            say(f"preflight {result.check} {result.title}: {result.message}")
    say(said_of(command, entries, Path.cwd(), time.time()))
    verdicts = {result.check: result.verdict.value for result in results if result.check != "PF07"}
    return seconds, {"preflight": verdicts, "skipped": list(skipped), **begun}


run_launcher.context_settings = CONTEXT  # type: ignore[attr-defined]  # options after the launcher's name belong to the launcher
