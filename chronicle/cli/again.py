"""`chronicle again`: whether a SLURM job goes on after its last launch. The decision is that of `chronicle.launch.restarts`."""

import os
import sys
import time
from typing import Annotated

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    RunOption,
    settings_with_checkpoints,
)
from chronicle.errors import UsageProblem
from chronicle.launch.restarts import (
    DEFAULT_CRASHES,
    DEFAULT_PAUSE_SECONDS,
    DEFAULT_RESTARTS,
    Verdict,
    chain_of,
    policy_of,
    requeued_before_a_launch,
    settle_launch,
)
from chronicle.launch.slurm import job_of

__all__ = ["go_on_or_stop"]

AGAIN_HERE, AGAIN_IN_A_NEW_JOB, DO_NOT = 0, 75, 78  # 75: EX_TEMPFAIL; 78 as everywhere: do not requeue


def go_on_or_stop(
    restarts: Annotated[
        int, typer.Option(help="How often the run may start again in this job, requeues included.", metavar="N")
    ] = DEFAULT_RESTARTS,
    crashes: Annotated[
        int, typer.Option(help="Stop after so many failures in a row without a newer verified checkpoint.", metavar="N")
    ] = DEFAULT_CRASHES,
    restart_pause: Annotated[
        float, typer.Option(help="Seconds before the first restart, doubled for each without progress.", metavar="SECONDS")
    ] = DEFAULT_PAUSE_SECONDS,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Ask whether a SLURM job goes on after its last launch.

    For batch scripts, as `chronicle run --sbatch` writes them. Exit code 0: start again in this job (the pause is over then).
    75: requeue the job. 78: neither; the run has finished, or a person has to look.

    Example: chronicle again --run demo --restarts 100
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    policy = policy_of(restarts, crashes, restart_pause)
    if job_of(os.environ) is None:
        raise UsageProblem("this is no SLURM job", "outside SLURM `chronicle run --restarts N` goes on by itself")
    settled = settle_launch(settings, chain_of(os.environ), policy, _say) if settings.paths.journal_dir.is_dir() else None
    if settled is None:
        return _without_a_launch("no launch of this job is in the journal")
    decision = settled.decision
    if decision.verdict is Verdict.HERE and not settled.fresh:
        return _without_a_launch(f"no launch has begun since launch {settled.launch}")
    if decision.verdict is Verdict.HERE:
        time.sleep(decision.pause_seconds)
    return _answer(decision.verdict, f"launch {settled.launch}: {decision.reason}")


def _without_a_launch(what: str) -> CommandResult:
    """The signal may have come before a launch began: then the scheduler says so. Else something refused the start."""
    reason = requeued_before_a_launch(os.environ)
    return _answer(Verdict.NEW_JOB, reason) if reason else _answer(Verdict.STOP, what)


def _answer(verdict: Verdict, reason: str) -> CommandResult:
    codes = {Verdict.HERE: AGAIN_HERE, Verdict.NEW_JOB: AGAIN_IN_A_NEW_JOB}
    return CommandResult(
        text=f"{verdict.value}: {reason}",
        data={"decision": verdict.value, "reason": reason},
        exit_code=codes.get(verdict, DO_NOT),
    )


def _say(line: str) -> None:
    print(f"chronicle: {line}", file=sys.stderr, flush=True)
