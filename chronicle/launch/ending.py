"""Why a launch ended: one typed cause, with what was seen, from signals, scheduler, kernel, exit codes and last lines.

    refusal ─ proposal ─ signal from outside (the scheduler says which) ─ code 0, by the steps
    ─ oom_kill ─ scheduler ─ last exception ─ crash

The first that holds is the cause. `because` is what was seen, for people. What nothing tells is `unknown`, and said so: a
supervisor that vanished on a machine that still runs leaves no reason behind. `judge_end` is a function of values; the
other functions look.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from chronicle.journal.events import EndCause
from chronicle.launch.containment import MOUNTS, OWN, own_groups, read_oom_kills
from chronicle.launch.processes import signal_name
from chronicle.launch.slurm import JobWord

NEARLY_FULL_BYTES = 16 << 20
LIMIT_MARGIN_SECONDS = 120.0  # SLURM sends its warning up to a minute early, and a save takes time
LONGEST_LINE = 300


class Ending(NamedTuple):
    """The cause of a launch's end, and what was seen of it."""

    cause: EndCause
    because: str


class Steps(NamedTuple):
    """What is known of the steps of a launch; None: not known."""

    planned: int | None = None  # of the whole run
    begun: int | None = None  # the step that it went on from
    last: int | None = None  # in its log
    stride: int = 1  # between two steps in its log
    none_taken: bool = False  # by the guard: none was begun
    unread: bool = False  # the output was not read to its end: `last` may be an early one
    none_logged: bool = False  # although the log of an earlier launch of this run has steps


class Seen(NamedTuple):
    """What was seen at the end of a launch on one node."""

    exit_code: int = 0
    launcher_code: int = 0  # negative: ended by this signal
    stopped_by: str | None = None  # "signal", "proposal", "peer", "stall"
    stop_signal: str | None = None
    refused: str = ""  # why guard or preflight refused
    rank: int | None = None  # the rank that ended first
    rank_code: int | None = None  # its exit code; negative: ended by this signal
    oom_kills: int | None = None  # by the kernel in our memory cgroup during the launch; None: it has no counter
    full: tuple[str, ...] = ()  # directories that we write to and that have no room left
    lines: tuple[str, ...] = ()  # the last lines of that rank, or of the launcher
    scheduler: JobWord | None = None
    in_job: str | None = None  # id of the SLURM job; its scheduler may still not answer
    lead_seconds: float = 0.0  # how long before its limit SLURM sends USR1
    peer: str = ""  # how another node of this launch ended
    stall: str = ""  # which rank stood still
    steps: Steps = Steps()
    killed: str = ""  # a process behind the launcher that a signal ended, while the launcher ended with 0


def judge_end(seen: Seen) -> Ending:
    """The cause of an end that the supervisor saw. Pure."""
    if seen.refused:
        return Ending(EndCause.REFUSED, seen.refused)
    if seen.stopped_by == "proposal":
        return Ending(EndCause.PROPOSAL, "the detector proposed a rollback")
    if seen.stopped_by == "stall":
        return Ending(EndCause.HANG, seen.stall)
    if seen.stopped_by == "peer":
        return Ending(EndCause.CRASH, seen.peer)  # of several nodes the more telling cause counts (`restarts.TELLING`)
    if seen.stopped_by == "signal":
        return _judge_signal(seen)
    if seen.exit_code == 0:
        return _judge_code_0(seen)
    return _judge_failure(seen)


def _judge_code_0(seen: Seen) -> Ending:
    """Whether the run has finished: by its steps, where they are known. Code 0 alone says that nothing failed."""
    steps, planned = seen.steps, seen.steps.planned
    none = steps.none_taken or steps.none_logged
    last = steps.begun if none else steps.last
    if planned is not None and last is not None and last + steps.stride >= planned:
        return Ending(EndCause.FINISHED, f"the launcher ended with 0 at step {last} of {planned}")
    if seen.killed:
        return Ending(EndCause.CRASH, f"{seen.killed}; the launcher ended with 0")
    if steps.unread:
        return Ending(EndCause.ENDED, "ended with code 0; its output was not read to the end, so its last step is not known")
    if none:
        taken = "took no step" if steps.none_taken else "none of its steps is in the log"
        if planned is not None:
            left = planned - (steps.begun or 0)
            return Ending(EndCause.EARLY, f"ended with code 0 after 0 of {left} planned steps")
        return Ending(EndCause.EARLY, f"ended with code 0 and {taken}; how many were planned is not known")
    if planned is not None and last is not None:
        begun = steps.begun or 0
        return Ending(EndCause.EARLY, f"ended with code 0 after {last - begun} of {planned - begun} planned steps")
    after = ""
    if last is not None:
        after = f" at step {last}" if steps.begun is None else f" after {last - steps.begun} steps"
    return Ending(EndCause.ENDED, f"ended with code 0{after} (no planned step count was known)")


def judge_attempt(seen: Seen) -> Ending:
    """Why an attempt ended whose launcher lives on and starts its ranks again. Pure."""
    if seen.rank is None:
        return Ending(EndCause.UNKNOWN, "the launcher started its ranks again; no rank was seen to end")
    if seen.rank_code is None:
        last = last_exception(seen.lines)
        said = f"rank {seen.rank} ended first"
        return Ending(_cause_of_line(last) or EndCause.CRASH, f"{said}: {last}" if last else said)
    return _judge_failure(seen)


def _judge_signal(seen: Seen) -> Ending:
    """A signal came from outside: what the scheduler knows decides, then the signal itself."""
    word, name = seen.scheduler, seen.stop_signal or "a signal"
    if word is not None:
        if (said := STATES.get(word.state)) is not None:
            return Ending(said, f"{name}; SLURM says {word.state}")
        if word.preempted:
            return Ending(EndCause.PREEMPTED, f"{name}; SLURM took the nodes for another job")
        left = word.seconds_left
        if left is not None and left <= seen.lead_seconds + LIMIT_MARGIN_SECONDS:
            return Ending(EndCause.TIME_LIMIT, f"{name}, {max(0.0, left):.0f} s before the time limit of the job")
        if name == "SIGUSR1":
            return Ending(EndCause.PREEMPTED, "SIGUSR1, the scheduler's warning; SLURM names no other job and no time limit")
        return Ending(EndCause.STOPPED, f"{name}; SLURM names no preemption and no time limit: a person's `scancel` or kill")
    asked = " (SLURM did not answer)" if seen.in_job else ""
    if name == "SIGUSR1":
        return Ending(EndCause.PREEMPTED, f"SIGUSR1, a scheduler's warning before it takes the machine{asked}")
    return Ending(EndCause.STOPPED, f"{name} was sent to `chronicle run`{asked}")


def _judge_failure(seen: Seen) -> Ending:
    who = _who(seen)
    killed = -signal.SIGKILL in (seen.launcher_code, seen.rank_code) or 128 + signal.SIGKILL in (
        seen.rank_code,
        seen.exit_code,
    )
    if seen.oom_kills and killed:
        counted = f"the kernel ended {_processes(seen.oom_kills)} for lack of memory (oom_kill)"
        return Ending(EndCause.OUT_OF_MEMORY, f"{who}; {counted}")
    if seen.scheduler is not None and (said := STATES.get(seen.scheduler.state)) is not None:
        return Ending(said, f"{who}; SLURM says {seen.scheduler.state}")
    last = last_exception(seen.lines)
    if (named := _cause_of_line(last)) is not None:
        return Ending(named, f"{who}: {last}")
    if seen.full and (WRITE_FAILED.search(last) or _cause_of_line("\n".join(seen.lines)) is EndCause.DISK_FULL):
        return Ending(EndCause.DISK_FULL, f"{who}: {last}; no room left in {', '.join(seen.full)}")
    if killed:
        return Ending(EndCause.CRASH, f"{who}; {_without_oom(seen)}")
    return Ending(EndCause.CRASH, f"{who}: {last}" if last else who)


def _who(seen: Seen) -> str:
    """Which rank ended first and how; the launcher where no rank is known."""
    if seen.rank is None:
        return f"the launcher {_how(seen.launcher_code)}"
    how = f"was the first to end (the launcher {_how(seen.launcher_code)})" if seen.rank_code is None else _how(seen.rank_code)
    return f"rank {seen.rank} {how}"


def _how(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def _without_oom(seen: Seen) -> str:
    if seen.oom_kills is None:
        return "who sent it is not known, and this machine shows no count of processes ended for lack of memory"
    return "who sent it is not known; the kernel ended none for lack of memory"


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


# --- what a scheduler's state means

STATES: Mapping[str, EndCause] = {
    "TIMEOUT": EndCause.TIME_LIMIT,
    "DEADLINE": EndCause.TIME_LIMIT,
    "NODE_FAIL": EndCause.NODE_LOST,
    "BOOT_FAIL": EndCause.NODE_LOST,
    "PREEMPTED": EndCause.PREEMPTED,
    "OUT_OF_MEMORY": EndCause.OUT_OF_MEMORY,
    "CANCELLED": EndCause.STOPPED,
}


class LostSupervisor(NamedTuple):
    """What can be said later of a launch whose supervisor wrote no end."""

    host: str
    other_boot: bool = False  # the machine was started again since
    oom_kills: int | None = None  # counted in the launch's own cgroup, where it is still there
    job: str | None = None
    scheduler: str | None = None  # state of that start of the job, by `sacct` or `scontrol`
    node_state: str | None = None
    node_restarted: bool = False  # its slurmd was started after the launch began
    restarted: bool = False  # the scheduler has started the job again since
    killed: str = ""  # the signal that ended it, by its keeper's word


def judge_lost(seen: LostSupervisor) -> Ending:
    """The cause of an end that nobody saw. Pure."""
    if seen.scheduler and (said := STATES.get(seen.scheduler)) is not None:
        return Ending(said, f"the supervisor on {seen.host} wrote no end; SLURM says {seen.scheduler}")
    if seen.node_state and ("DOWN" in seen.node_state or "NOT_RESPONDING" in seen.node_state or "FAIL" in seen.node_state):
        return Ending(EndCause.NODE_LOST, f"SLURM says that node {seen.host} is {seen.node_state}")
    if seen.restarted and seen.node_restarted:
        back = f"SLURM has started job {seen.job} again, and its daemon on {seen.host} was started after the launch began"
        return Ending(EndCause.NODE_LOST, back)
    if seen.oom_kills:
        counted = _processes(seen.oom_kills)
        return Ending(EndCause.OUT_OF_MEMORY, f"the supervisor is gone, and the kernel ended {counted} for lack of memory")
    if seen.killed:
        return Ending(EndCause.CRASH, f"the supervisor on {seen.host} was ended by {seen.killed}; who sent it is not known")
    if seen.other_boot:
        return Ending(EndCause.NODE_LOST, f"{seen.host} was started again since the launch began")
    again = f"; SLURM has started job {seen.job} again and does not say why" if seen.restarted else ""
    return Ending(EndCause.UNKNOWN, f"the supervisor on {seen.host} no longer runs and wrote no end{again}")


# --- what last lines mean

# The line that ends a traceback, also behind a prefix of torchrun (`[rank1]: `, `[default0]:`) or of srun (`1: `).
EXCEPTION = re.compile(r"^(?:\[?\w+\]?:\s?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure|Exit|Interrupt)\b.*)$")
# What a program says that ends with a sentence and no traceback, argparse among them.
ERROR = re.compile(r"^(?:\[?\w+\]?:\s?)?((?:[\w./-]+: )?(?:error|Error|ERROR|fatal|FATAL): \S.*)$")
NUM_LAST = 10  # lines in which it is looked for: an exception ends a log, a sentence may be a survived one
LAUNCHERS_OWN = re.compile(r"ChildFailedError|CalledProcessError|SignalException|ProcessRaisedException")
DIRECT = re.compile(
    r"Watchdog caught collective operation timeout|terminate called after throwing|Timed out waiting \d+ms|"
    r"Segmentation fault|Bus error|No space left on device|oom-kill"
)
MEANT: Sequence[tuple[EndCause, re.Pattern[str]]] = (
    (EndCause.DISK_FULL, re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]")),
    (
        EndCause.OUT_OF_MEMORY,
        re.compile(
            r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory|^MemoryError\b|"
            r"can't allocate memory|std::bad_alloc|Cannot allocate memory|RESOURCE_EXHAUSTED|oom-kill"
        ),
    ),
    (
        EndCause.HANG,
        re.compile(r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:send|recv) operation"),
    ),
)
WRITE_FAILED = re.compile(r"file write failed|PytorchStreamWriter failed|unexpected pos \d+ vs|short write|Input/output error")


def last_exception(lines: Sequence[str]) -> str:
    """The last line that names an exception or a native abort, else what a program said as its error; "" for none.

    A launcher's own report does not count.
    """
    for line in reversed(lines):
        found = EXCEPTION.match(line.strip())
        if found is not None and not LAUNCHERS_OWN.search(line):
            return found.group(1)[:LONGEST_LINE]
        if DIRECT.search(line):
            return line.strip()[:LONGEST_LINE]
    said = (found for line in reversed(lines[-NUM_LAST:]) if (found := ERROR.match(line.strip())) is not None)
    return next((found.group(1)[:LONGEST_LINE] for found in said), "")


def _cause_of_line(line: str) -> EndCause | None:
    return next((cause for cause, pattern in MEANT if pattern.search(line)), None)


# --- what the kernel counted

def count_oom_kills(cgroups: Path = OWN, mounts: Path = MOUNTS) -> int | None:
    """How many processes the kernel has ended for lack of memory in our memory cgroup and below; None without a counter.

    Version 2: `memory.events` (hierarchical, so that a launch's own cgroup is counted too). Version 1: `memory.oom_control`.
    """
    counts = []
    for controllers, directory in own_groups(cgroups, mounts):
        if controllers == "" or "memory" in controllers.split(","):
            counts.append(read_oom_kills(directory, "memory.oom_control" if controllers else "memory.events"))
    return max((count for count in counts if count is not None), default=None)


def free_bytes(directory: Path) -> int | None:
    """Free bytes on the file system of a directory, which may not exist yet; None when it cannot be asked."""
    existing = next((one for one in (directory, *directory.absolute().parents) if one.exists()), Path("/"))
    try:
        state = os.statvfs(existing)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def full_disks(directories: Iterable[Path]) -> tuple[str, ...]:
    """Of these directories one on each file system that has less than 16 MiB left for us."""
    full: dict[int, str] = {}
    for directory in directories:
        free = free_bytes(directory)
        if free is not None and free < NEARLY_FULL_BYTES and os.access(directory, os.W_OK):
            full.setdefault(os.stat(directory).st_dev, str(directory))
    return tuple(full.values())
