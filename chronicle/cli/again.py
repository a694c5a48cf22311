"""`chronicle again`: whether a SLURM job goes on after its last launch. The decision is that of `chronicle.launch.restarts`."""

import os
import signal
import time
from collections.abc import Sequence

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult
from chronicle.errors import UsageProblem
from chronicle.journal import read_journal
from chronicle.journal.entries import Entry
from chronicle.launch.admission import find_ever_excluded, find_excluded
from chronicle.launch.restarts import (
    DEFAULT_CRASHES,
    DEFAULT_PAUSE_SECONDS,
    DEFAULT_RESTARTS,
    PATIENCE,
    Policy,
    Verdict,
    chain_of,
    policy_of,
    requeued_before_a_launch,
    requeued_in_vain,
    settle_launch,
)
from chronicle.launch.slurm import expand_nodes, job_of, requeue_job
from chronicle.settings import Settings
from chronicle.story.plain import say

AGAIN_HERE, AGAIN_IN_A_NEW_JOB, DO_NOT = 0, 75, 78  # 75: EX_TEMPFAIL; 78 as everywhere: do not requeue


def go_on_or_stop(
    restarts: int = DEFAULT_RESTARTS,
    crashes: int = DEFAULT_CRASHES,
    restart_pause: float = DEFAULT_PAUSE_SECONDS,
    requeue: bool = False,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Ask whether a SLURM job goes on after its last launch.

    For batch scripts, as `chronicle run --sbatch` writes them. Exit code 0: start again in this job (the pause is over then).
    75: the job belongs back into the queue (`--requeue` puts it there). 78: neither; the run has
    finished, or a person has to look.

    Example: chronicle again --run demo --restarts 100

    Options:
      --restarts N: How often the run may start again in this job, requeues included.
      --crashes N: Stop after so many failures in a row without a newer verified checkpoint.
      --restart-pause SECONDS: Seconds before the first restart, doubled for each without progress.
      --requeue: Put the job back into the queue too, without the nodes that are excluded.
    """
    settings = at.settings()
    policy = policy_of(restarts, crashes, restart_pause)
    job = job_of(os.environ)
    if job is None:
        raise UsageProblem("this is no SLURM job", "outside SLURM `chronicle run --restarts N` goes on by itself")
    if requeue:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM ends the job that it requeues, and so this process
    entries = read_journal(settings.paths).entries
    result = _decide(settings, policy, entries)
    if requeue and result.exit_code == AGAIN_IN_A_NEW_JOB:
        problem = requeue_job(job, tuple(find_excluded(entries)), find_ever_excluded(entries))
        if problem:
            say(f"requeue: {problem}")
    return result


def _decide(settings: Settings, policy: Policy, entries: Sequence[Entry]) -> CommandResult:
    settled = settle_launch(settings, chain_of(os.environ), policy, say) if settings.paths.journal_dir.is_dir() else None
    if (settled is None or not settled.fresh) and (vain := _in_vain(entries)):
        return _answer(Verdict.STOP, vain)
    if settled is None:
        return _without_a_launch("no launch of this job is in the journal", entries)
    decision = settled.decision
    if decision.verdict is Verdict.HERE and not settled.fresh:
        return _without_a_launch(f"no launch has begun since launch {settled.launch}", entries)
    if decision.verdict is Verdict.HERE and (bad := _excluded_here(entries)):
        return _answer(Verdict.NEW_JOB, f"{bad} of this job is excluded")
    if decision.verdict is Verdict.HERE:
        time.sleep(decision.pause_seconds)
    return _answer(decision.verdict, f"launch {settled.launch}: {decision.reason}")


def _excluded_here(entries: Sequence[Entry]) -> str:
    """The nodes of this job that are excluded from the run; "" where none is, and where SLURM does not say which it has."""
    excluded = find_excluded(entries)
    if not excluded:
        return ""
    return ", ".join(sorted(set(expand_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))) & set(excluded)))


def _in_vain(entries: Sequence[Entry]) -> str:
    """Why the job should not be requeued once more: SLURM gives it excluded nodes again and again; "" where it may be."""
    bad, count = _excluded_here(entries), requeued_in_vain(entries, os.environ)
    if not bad or count < PATIENCE:
        return ""
    job = os.environ["SLURM_JOB_ID"]
    said = f"SLURM gave job {job} an excluded node {count} times in a row, now {bad}, and no launch began"
    return f"{said}: submit it with `--exclude={bad.replace(' ', '')}`, or `chronicle hardware --readmit` the node"


def _without_a_launch(what: str, entries: Sequence[Entry]) -> CommandResult:
    """The signal may have come before a launch began: then the scheduler says so. An excluded node is asked to be replaced.

    Else something refused the start.
    """
    bad = _excluded_here(entries)
    reason = f"{bad} of this job is excluded" if bad else requeued_before_a_launch(os.environ)
    return _answer(Verdict.NEW_JOB, reason) if reason else _answer(Verdict.STOP, what)


def _answer(verdict: Verdict, reason: str) -> CommandResult:
    codes = {Verdict.HERE: AGAIN_HERE, Verdict.NEW_JOB: AGAIN_IN_A_NEW_JOB}
    return CommandResult(
        lines=f"{verdict.value}: {reason}",
        data={"decision": verdict.value, "reason": reason},
        exit_code=codes.get(verdict, DO_NOT),
    )
