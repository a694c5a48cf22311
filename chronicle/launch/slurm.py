"""SLURM: the batch script, and what the scheduler says about a job.

The scheduler's word outranks what a process can see of itself: a TERM may be a preemption, a time limit or a person, and a
node that is gone writes nothing at all. It is asked with `scontrol` (and `sacct` where accounting is on), with a time limit;
where it does not answer, that is said and nothing is concluded.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

ASK_SECONDS = 10.0
OVER = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)  # states of a job that no process of it outlives (`man squeue`, JOB STATE CODES)
UNKNOWN_JOB = "Invalid job id"
FIELD = re.compile(r"(\w+)=(\S*)")
Ask = Callable[[Sequence[str]], "tuple[int, str] | None"]


def _ask(words: Sequence[str]) -> tuple[int, str] | None:
    """(exit code, what was printed) of a command of the scheduler; None where it is not installed or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout + done.stderr


class JobWord(NamedTuple):
    """What SLURM says about a job at this moment."""

    state: str  # as in `scontrol show job`; "" when SLURM does not know the job any more
    restarts: int = 0  # how often it was requeued
    preempted: bool = False  # it was told to make room, and its grace time runs
    seconds_left: float | None = None  # until its time limit

    @property
    def over(self) -> bool:
        """Whether no process of the job can be alive, by the scheduler's word."""
        return self.state in OVER or self.state in ("", "PENDING")


def job_of(environ: Mapping[str, Any]) -> str | None:
    """The job's id, `<array>_<task>` for a task of an array; None outside SLURM.

    A task has a number of its own too, but the last task's is that of the whole array: `scontrol requeue` would take them all.
    """
    array, task = (str(environ.get(f"SLURM_ARRAY_{what}_ID") or "") for what in ("JOB", "TASK"))
    if array.isdigit() and task.isdigit():
        return f"{array}_{task}"
    return str(environ.get("SLURM_JOB_ID") or "") or None


def ask_job(job: str, *, now: float, ask: Ask = _ask) -> JobWord | None:
    """What SLURM says about `job`; None where it cannot be asked or does not answer. `now` in seconds since the epoch."""
    answer = ask(("scontrol", "show", "job", "--oneliner", job))
    if answer is None:
        return None
    code, text = answer
    if code != 0:
        return JobWord("") if UNKNOWN_JOB in text else None
    fields = dict(FIELD.findall(text.splitlines()[0] if text else ""))
    if "JobState" not in fields:
        return None
    restarts = fields.get("Restarts", "0")
    return JobWord(
        state=fields["JobState"],
        restarts=int(restarts) if restarts.isdigit() else 0,
        preempted=fields.get("PreemptTime", "None") not in ("None", ""),
        seconds_left=_seconds_until(fields.get("EndTime", ""), now) if fields["JobState"] == "RUNNING" else None,
    )


def _seconds_until(moment: str, now: float) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp() - now  # SLURM writes the local time of this machine
    except ValueError:
        return None  # "Unknown", "N/A"


def ask_past_state(job: str, restart: int, *, ask: Ask = _ask) -> str | None:
    """How accounting says that this start of the job ended ("NODE_FAIL", "PREEMPTED", …); None without accounting."""
    words = ("sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--format=State", "--jobs", job)
    rows = [line.split() for line in (_text(ask(words)) or "").splitlines() if line.strip()]
    states = [row[0] for row in rows if row[0].isupper()]
    return states[restart] if restart < len(states) else None


def ask_step_alive(job: str, step: str, *, ask: Ask = _ask) -> bool | None:
    """Whether this step of the job still runs; None where SLURM cannot be asked."""
    text = _text(ask(("squeue", "--steps", "--noheader", "--format=%i", "--jobs", job)))
    return None if text is None else f"{job}.{step}" in text.split()


def _text(answer: tuple[int, str] | None) -> str | None:
    """What a command printed; None where it failed."""
    return answer[1] if answer is not None and answer[0] == 0 else None


def _trouble(answer: tuple[int, str] | None) -> str:
    """Why a command did not do what it was asked; "" where it did."""
    if answer is None:
        return "SLURM does not answer"
    return "" if answer[0] == 0 else answer[1].strip() or f"code {answer[0]}"


class JobStart(NamedTuple):
    """One start of a job, and the step in it, as its own environment names them."""

    job: str
    restart: int = 0
    step: str = ""


def start_of(environ: Mapping[str, Any]) -> JobStart | None:
    """Which start of which job this environment is of; None outside SLURM."""
    job, restart = job_of(environ), str(environ.get("SLURM_RESTART_COUNT") or "0")
    if job is None:
        return None
    return JobStart(job, int(restart) if restart.isdigit() else 0, str(environ.get("SLURM_STEP_ID") or ""))


def is_over(start: JobStart | None, own: JobStart | None, *, now: float, ask: Ask = _ask) -> bool:
    """Whether SLURM says that nothing of this start of a job can be alive. False where it does not say so.

    A scheduler runs one start of a job at a time: one of a later start needs no question.
    """
    if start is None:
        return False
    if own is not None and own.job == start.job and own.restart > start.restart:
        return True
    word = ask_job(start.job, now=now, ask=ask)
    if word is None:
        return False
    if word.over or word.restarts > start.restart:
        return True
    return bool(start.step) and ask_step_alive(start.job, start.step, ask=ask) is False


class NodeWord(NamedTuple):
    """What SLURM says about a node."""

    state: str = ""  # "IDLE", "DOWN*", …
    started: float | None = None  # when its slurmd was started, in seconds since the epoch


def ask_node(node: str) -> NodeWord:
    """What SLURM says about a node; nothing where it cannot be asked or does not know it."""
    fields = dict(FIELD.findall(_text(_ask(("scontrol", "show", "node", "--oneliner", node))) or ""))
    return NodeWord(fields.get("State", ""), _seconds_until(fields.get("SlurmdStartTime", ""), 0.0))


# --- Nodes that a job must not get

REQUEUE_TRIES = 15  # seconds: SLURM ends the script half a minute after the requeue


def expand_nodes(listed: str, *, ask: Ask = _ask) -> tuple[str, ...]:
    """The names in a list such as `n[1-3]`; () for an empty one, and where SLURM cannot be asked."""
    if listed in ("", "(null)"):
        return ()
    return tuple((_text(ask(("scontrol", "show", "hostnames", listed))) or "").split())


def exclude_from_job(job: str, excluded: Sequence[str], known: Sequence[str], *, ask: Ask = _ask) -> str:
    """Tell SLURM which nodes a waiting job must not get; "" when it has them, else what it says.

    `known` are all nodes that were ever excluded by us: of those only `excluded` stay, and what somebody else wrote stays too.
    """
    answer = ask(("scontrol", "show", "job", "--oneliner", job))
    if answer is None or _trouble(answer):
        return _trouble(answer)
    fields = dict(FIELD.findall(answer[1]))
    if fields.get("JobState") == "RUNNING":  # COMPLETING right after its requeue, and it may be changed then
        return f"job {job} is RUNNING: its nodes are chosen already"
    theirs = [node for node in expand_nodes(fields.get("ExcNodeList", ""), ask=ask) if node not in known]
    wanted = dict.fromkeys([*theirs, *excluded])
    return _trouble(ask(("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(wanted)}")))


def requeue_job(
    job: str,
    excluded: Sequence[str],
    known: Sequence[str],
    *,
    ask: Ask = _ask,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Put the job back into the queue, away from the excluded nodes; "" when that is done, else what SLURM says."""
    trouble = _trouble(ask(("scontrol", "requeue", job)))
    if trouble or not known:
        return trouble
    for _ in range(REQUEUE_TRIES):
        trouble = exclude_from_job(job, excluded, known, ask=ask)
        if not trouble:
            break
        sleep(1.0)
    return trouble


# --- The batch script

SIGNAL_MARGIN_SECONDS = 30  # between the end of the grace period and SLURM's KILL

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={run}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Send USR1 to the steps (not to this shell) early enough for a save: {grace:.0f} s and a margin.
#SBATCH --signal=USR1@{lead:d}
{exclude}
export CHRONICLE_SIGNAL_LEAD={lead:d}
# Each task of an array (`sbatch --array=0-3`) is a run of its own.
run={run}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
while true; do
  # One supervisor per node; torchrun starts the ranks of its node. A node that has ended does not end the others:
  # they may be saving, and a supervisor whose peer failed ends its own part a minute later.
  srun --kill-on-bad-exit=0 --wait=0 --unbuffered \\
    chronicle run --run "$run"{node_flag} --grace {grace:.0f} {on_stall}{again} -- {command}
  code=$?
  # By the cause of the end and by progress: 0 start again here; else stop. 75: the job is back in the queue, away from the
  # nodes that are excluded by then; SLURM ends this script meanwhile.
  trap '' TERM
  chronicle again --requeue --run "$run" {again} || exit "$code"
  trap - TERM
done
"""


def _quote(word: str) -> str:
    """A word for the script. `$HEAD` in it is the first node's name there: variables expand, all else is quoted."""
    if re.search(r"\$\{?[A-Za-z_]", word) is None:
        return shlex.quote(word)
    return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'


def format_sbatch(
    run: str,
    command: Sequence[str],
    *,
    grace_seconds: float,
    again: Sequence[str],
    nodes: int = 1,
    excluded: Sequence[str] = (),
    on_stall: str = "report",
) -> str:
    """Return a batch script for this run; `again`: the options of the restart policy, `on_stall` as in `chronicle run`.

    SLURM sends its warning `grace + 30` seconds before the time limit.
    """
    return TEMPLATE.format(
        run=shlex.quote(run),
        nodes=nodes,
        grace=grace_seconds,
        lead=math.ceil(grace_seconds) + SIGNAL_MARGIN_SECONDS,
        exclude=f"#SBATCH --exclude={','.join(excluded)}\n" if excluded else "",
        node_flag=" --node" if nodes > 1 else "",
        command=" ".join(map(_quote, command)),
        again=" ".join(map(_quote, again)),
        on_stall="" if on_stall == "report" else f"--on-stall {on_stall} ",
    )
