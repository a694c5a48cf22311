"""Who is alive, and who may start: the processes of earlier launches, and the checks before a new one.

A process belongs to the run when its environment has the token of a launch in this journal, when it is in the cgroup of
such a launch, or when the supervisor recorded its (pid, start time). Boot and user must match too. Names and command
lines are not used: other users of a shared node run the same programs. An orphan is a process whose supervisor is gone.

A launch is refused while another one is alive, while orphans are left, on an excluded node, and while a rollback is
unfinished. A `launch.start` of this machine without an end, whose processes are gone, gets a `launch.end` marked as inferred.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.checkpoints import find_lost_saves
from chronicle.credentials import redact_command
from chronicle.errors import JournalError, Refusal, UsageProblem
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import Hardware, LaunchEnd, LaunchStart, events_of, find_open_transaction
from chronicle.journal.place import anchors_of
from chronicle.journal.reader import DAMAGED_HINT, describe_damage, find_damage
from chronicle.launch.containment import TOKEN_VARIABLE, ControlGroup, EndReport, end_processes, open_group
from chronicle.launch.ending import LostSupervisor, judge_lost
from chronicle.launch.heartbeat import FRESH_SECONDS, Heartbeat, is_free, lease_path, read_heartbeats
from chronicle.launch.processes import (
    Process,
    list_processes,
    read_boot_id,
    read_command,
    read_process,
    read_variable,
)
from chronicle.launch.provenance import host_name
from chronicle.launch.slurm import JobStart, NodeWord, ask_job, ask_node, ask_past_state, is_over, start_of
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.settings import INFERRED, Settings
from rollback.disk.lock import Locked, hold_lock
from rollback.errors import RollbackError

if TYPE_CHECKING:
    from chronicle.launch.keeper import Killed


class ProcessRole(Enum):
    """Role of a living process of the run."""

    SUPERVISOR = "supervisor"
    SUPERVISED = "supervised"
    ORPHAN = "orphan"
    FOREIGN = "foreign"  # has our token but another user: reported, not signalled


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What the journal records about one launch on one host."""

    number: int
    host: str
    token: str | None
    pid: int | None
    start_ticks: int | None
    boot_id: str
    ended: bool
    cgroup: str | None = None
    job: JobStart | None = None  # the start of a SLURM job that it belonged to
    started: float | None = None  # seconds since the epoch, by its own clock
    lease: bool = False  # its supervisor holds a lock while it lives
    indexed: bool = False  # in a pod of an Indexed Job: its host's name is also that of the pod which replaces it

    def supervisor_alive(self, boot_id: str) -> bool:
        """Return whether its supervisor runs on this machine: same boot, pid and start time."""
        if self.pid is None or self.boot_id != boot_id:
            return False
        process = read_process(self.pid)
        return process is not None and process.alive and process.start_ticks == self.start_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """A living process of this run. `how` is how it was recognised: "token", "cgroup" or "recorded"."""

    process: Process
    launch: int
    role: ProcessRole
    how: str
    command: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        about = {name: getattr(self.process, name) for name in ("pid", "start_ticks", "uid")}
        return {**about, "launch": self.launch, "role": self.role.value, "how": self.how, "command": self.command}


def list_launches(entries: Iterable[Entry]) -> list[LaunchFacts]:
    """List every (launch, host) with a `launch.start`, in journal order. Pure."""
    starts: dict[tuple[int, str], LaunchStart] = {}
    moments: dict[tuple[int, str], float] = {}
    ended: set[tuple[int, str | None]] = set()
    for entry in entries:
        if entry.launch is None:
            continue
        if entry.kind == LaunchStart.KIND:
            start = LaunchStart.of(entry)
            starts[entry.launch, start.host] = start
            with suppress(ValueError):  # of an imported journal
                moments[entry.launch, start.host] = datetime.fromisoformat(entry.ts).timestamp()
        elif entry.kind == LaunchEnd.KIND:
            ended.add((entry.launch, LaunchEnd.of(entry).host))
    return [
        LaunchFacts(
            number=number,
            host=host,
            token=start.token,
            pid=start.pid,
            start_ticks=start.start_ticks,
            boot_id=start.boot_id,
            cgroup=start.cgroup,
            job=start_of(start.environment),
            started=moments.get((number, host)),
            lease=start.lease,
            indexed=bool(start.environment.get("JOB_COMPLETION_INDEX")),
            ended=(number, host) in ended or (number, None) in ended,
        )
        for (number, host), start in starts.items()
    ]


def find_alive(paths: RunPaths, launches: Sequence[LaunchFacts]) -> list[LiveProcess]:
    """List living processes of these launches on this machine, supervisors first, then by pid."""
    boot = read_boot_id()
    here = [facts for facts in launches if facts.boot_id == boot]
    by_token = {facts.token: facts.number for facts in here if facts.token}
    recorded = _recorded(read_heartbeats(paths.heartbeats_dir), here)
    grouped = _grouped(here)
    watched = {(facts.pid, facts.start_ticks): facts for facts in here if facts.supervisor_alive(boot)}
    supervised = {facts.number for facts in watched.values()}
    found = []
    for process in list_processes():
        if not process.alive or process.pid == os.getpid():
            continue
        supervisor = watched.get(process.key)
        token = read_variable(process.pid, TOKEN_VARIABLE)
        if supervisor is not None:
            launch, how, role = supervisor.number, "recorded", ProcessRole.SUPERVISOR
            if supervisor.ended:
                continue  # an autopilot between two launches
        elif token in by_token:
            launch, how = by_token[token], "token"
        elif token is None and process.key in recorded:  # a title change has overwritten its environment
            launch, how = recorded[process.key], "recorded"
        elif process.key in grouped:
            launch, how = grouped[process.key], "cgroup"
        else:
            continue
        if supervisor is None:
            role = ProcessRole.SUPERVISED if launch in supervised else ProcessRole.ORPHAN
            role = role if process.uid == os.getuid() else ProcessRole.FOREIGN
        command = " ".join(redact_command(read_command(process.pid))) or f"[{process.name}]"
        found.append(LiveProcess(process=process, launch=launch, role=role, how=how, command=command))
    return sorted(found, key=lambda one: (one.role is not ProcessRole.SUPERVISOR, one.process.pid))


def end_orphans(paths: RunPaths, launches: Sequence[LaunchFacts]) -> EndReport:
    """Send TERM, then KILL, to every orphan of this user. Each is looked up again before each signal."""
    report = end_processes(
        lambda: [one.process for one in find_alive(paths, launches) if one.role is ProcessRole.ORPHAN],
        term_seconds=5.0,
    )
    for facts in launches:  # an empty cgroup remains when its supervisor was killed
        group = open_group(facts.cgroup) if facts.boot_id == read_boot_id() else None
        if group is not None and not facts.supervisor_alive(facts.boot_id):
            group.remove()
    return report


def end_left_behind(paths: RunPaths, killed: Killed, grace_seconds: float) -> None:
    """End what the launch of a killed supervisor left on this machine. Its launcher has had TERM from the kernel, so the ranks
    may be saving: they have `grace_seconds` first.
    """
    boot = read_boot_id()
    launches = [one for one in list_launches(read_journal(paths).entries) if one.pid == killed.pid and one.boot_id == boot]
    deadline = time.monotonic() + grace_seconds
    while find_alive(paths, launches) and time.monotonic() < deadline:
        time.sleep(0.2)
    end_orphans(paths, launches)


def _grouped(here: Iterable[LaunchFacts]) -> dict[tuple[int, int], int]:
    """Return (pid, start ticks) -> launch of every process in the cgroups of these launches."""
    groups = ((facts.number, open_group(facts.cgroup)) for facts in here)
    return {process.key: number for number, group in groups if group is not None for process in group.processes()}


def _recorded(beats: Iterable[Heartbeat], here: Iterable[LaunchFacts]) -> dict[tuple[int, int], int]:
    """Return (pid, start ticks) -> launch from the heartbeats of these launches' supervisors."""
    supervisors = {(facts.number, facts.pid, facts.start_ticks, facts.boot_id) for facts in here}
    pairs: dict[tuple[int, int], int] = {}
    for beat in beats:
        if (beat.launch, beat.pid, beat.start_ticks, beat.boot_id) in supervisors:
            pairs.update(dict.fromkeys(beat.processes, beat.launch))
    return pairs


# --- Admission of a new launch

EXCLUDE = "exclude-node"
READMIT = "readmit-node"


def find_excluded(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the excluded nodes with their reasons, in the order they were excluded.

    Seed 003, exp3: Xid 64 returned because the faulty node had not been removed from the pool.
    """
    excluded: dict[str, str] = {}
    for entry, hardware in events_of(entries, Hardware):
        if hardware.host is not None and hardware.action == EXCLUDE:
            excluded[hardware.host] = hardware.reason or entry.title
        elif hardware.host is not None and hardware.action == READMIT:
            excluded.pop(hardware.host, None)
    return excluded


def find_ever_excluded(entries: Iterable[Entry]) -> tuple[str, ...]:
    """The nodes that were excluded at some time, readmitted ones included."""
    told = [one.host for _, one in events_of(entries, Hardware) if one.action == EXCLUDE]
    return tuple(host for host in dict.fromkeys(told) if host is not None)


# --- Admission


class LaunchRefused(Refusal):
    """`chronicle run` could not start its launcher: not found, already alive, a failed check, an open transaction."""

    exit_code = 125


class NotResumable(Refusal):
    """No checkpoint may be handed to a launch, and it may not begin from scratch."""

    exit_code = 78


def ensure_saves_are_there(settings: Settings, entries: Sequence[Entry], fresh: str | None) -> dict[str, Any]:
    """Raise `NotResumable` where saves were recorded and no checkpoint is there any more: a disk is not mounted, or another.

    With `fresh` (a reason) the launch begins from scratch: what to record of it.
    """
    if settings.checkpoints_url is not None:
        return {}  # in a store, of which nothing is recorded
    try:
        lost = find_lost_saves(settings, entries)
    except (RollbackError, OSError):
        return {}  # not known: who hands a checkpoint on says so
    if not lost:
        return {}
    if fresh is not None:
        return {"fresh": fresh}
    places = ", ".join(f"`{place}`" for place in dict.fromkeys(path.parent for path in lost))
    saves = "a save was completed" if len(lost) == 1 else f"{len(lost)} saves were completed"
    raise NotResumable(
        f"{saves} (the last one `{lost[-1].name}`) and none can be found: {places} is gone, empty or another directory",
        'bring it back (a mount?), name the directory with --checkpoints DIR, or begin from scratch: --force "reason"',
    )


def ensure_same_trainer(settings: Settings, command: Sequence[str], cwd: Path, entries: Sequence[Entry]) -> None:
    """Raise `UsageProblem` where nobody named the run and its launches were of other programs, or named other checkpoints.

    A run is carried by its name and by its checkpoints, not by the folder. What is not known asks nothing: a command that names
    no program, and one that names a place below the run's checkpoints.
    """
    starts = [start for _, start in events_of(entries, LaunchStart)]
    if not starts or settings.origin.get("run") not in INFERRED:
        return
    roots = [os.path.realpath(root) for root in anchors_of(settings.paths).roots]
    own = _places(command, cwd)
    if any(place == root or place.startswith(root + os.sep) for place in own.values() for root in roots):
        return
    told = ""
    programs = [_programs(start.argv, start.cwd) for start in starts]
    if _programs(command, cwd) and all(programs) and not _programs(command, cwd) & frozenset().union(*programs):
        told = f"other programs ({', '.join(sorted(map(os.path.basename, programs[-1])))})"
    for start in starts:
        for option, place in _places(start.argv, start.cwd).items():
            if place in roots and option in own:
                told = told or f"other checkpoints (`{place}`, here `{own[option]}`)"
    if told:
        raise UsageProblem(
            f"no run is named, and `{settings.run}` ({settings.origin['run']}) was launched with {told}",
            f"--run NAME begins another run; --run {settings.run} goes on with this one",
        )


def _programs(words: Sequence[str], cwd: Path | str) -> frozenset[str]:
    """The files and modules of Python that a command names."""
    modules = {word for before, word in pairwise(words) if before == "-m"}
    files = {os.path.realpath(os.path.join(cwd, word)) for word in words if word.endswith(".py")}
    return frozenset(modules | files)


def _places(words: Sequence[str], cwd: Path | str) -> dict[str, str]:
    """What each option of a command names, as a path: `--out DIR` and `--out=DIR`; words alone by their number."""
    named = {str(number): word for number, word in enumerate(words)}
    named |= {before: word for before, word in pairwise(words) if before.startswith("-")}
    named |= {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    return {option: os.path.realpath(os.path.join(cwd, word)) for option, word in named.items() if word}


@contextmanager
def hold_admission(paths: RunPaths, *, wait_seconds: float = 10.0) -> Iterator[None]:
    """Hold the run's lock, so that no other launch or rollback starts until this launch is in the journal.

    Raises `LaunchRefused` when the lock is not free within `wait_seconds`. A filesystem without locks is accepted.
    """
    deadline = time.monotonic() + wait_seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold_lock(paths.lock_path))
                break
            except Locked as held:
                if time.monotonic() >= deadline:
                    raise LaunchRefused(str(held), held.remedy) from held
                time.sleep(0.05)
            except OSError:
                break
        yield


def ensure_startable(
    paths: RunPaths, journal: Journal, *, now: float, force: str | None = None, own: int | None = None
) -> None:
    """Raise `LaunchRefused` when a launch may not start; `force` (a reason) overrides a launch that seems alive elsewhere.

    A damaged journal is a plain `Refusal`, as everywhere, unless there is such a reason.
    `own` is the number of a launch over several nodes that this process joins.
    """
    if force is None:
        refuse_damaged(paths, journal)
    try:
        intent = find_open_transaction(journal.entries)
    except JournalError as problem:  # a receipt of an unknown version
        raise LaunchRefused(problem.message, problem.remedy) from problem
    if intent is not None:
        raise LaunchRefused(
            f"{intent.kind.split('.')[0]} {intent.id} of run `{journal.run}` was started and not finished",
            "finish or revert it first: `chronicle recover`",
        )
    launches = [one for one in list_launches(journal.entries) if one.number != own]
    _refuse_alive_here(journal.run, find_alive(paths, launches))
    for facts, age in find_alive_elsewhere(paths, launches, now) if force is None else ():
        raise LaunchRefused(
            f"launch {facts.number} seems alive on `{facts.host}`: its heartbeat is {age:.0f} s old",
            f'wait until the heartbeat is {FRESH_SECONDS:.0f} s old, or pass `--force "why it is not alive"`',
        )


def refuse_damaged(paths: RunPaths, journal: Journal) -> None:
    """Raise `Refusal` when the journal is damaged: a lost entry may be an open rollback."""
    damage = find_damage(paths, journal)
    if damage:
        raise Refusal(describe_damage(paths, damage), DAMAGED_HINT)


def ensure_node_in_use(journal: Journal, *, force: str | None = None) -> None:
    """Raise `LaunchRefused` on a node that was excluded from this run. Rollbacks are allowed there."""
    excluded = find_excluded(journal.entries)
    if force is None and host_name() in excluded:
        raise LaunchRefused(
            f"this node, `{host_name()}`, is excluded from run `{journal.run}`: {excluded[host_name()]}",
            f"start on another node, or `chronicle hardware --readmit {host_name()}`",
        )


def close_lost_launches(
    paths: RunPaths, journal: Journal, writer: JournalWriter, killed: Killed | None = None
) -> list[int]:
    """Write a `launch.end` for launches whose supervisor is gone, by this machine's or the scheduler's word; their numbers.

    `killed`: the supervisor of which the keeper saw how it ended.
    """
    closed = []
    boot = read_boot_id()
    for facts in list_launches(journal.entries):
        here = facts.host == host_name()
        if facts.ended or (here and facts.supervisor_alive(boot)) or not (here or is_gone(paths, facts, now=time.time())):
            continue
        group = open_group(facts.cgroup) if here else None
        seen = killed if killed is not None and here and facts.pid == killed.pid and facts.boot_id == boot else None
        ending = judge_lost(_look_after(facts, boot, group, here=here)._replace(killed="" if seen is None else seen.name))
        title = f"launch {facts.number} ended without an entry: {ending.because}"
        event = LaunchEnd(host=facts.host, inferred=True, cause=ending.cause.value, because=ending.because)
        writer.write(event, launch=facts.number, title=title)
        closed.append(facts.number)
        if group is not None:
            group.remove()  # succeeds for an empty cgroup; `sweep` ends processes in it
    return closed


def is_gone(paths: RunPaths, facts: LaunchFacts, *, now: float) -> bool:
    """Whether the supervisor on another host is known to be gone: by SLURM, or by the kernel that both share."""
    if is_over(facts.job, start_of(os.environ), now=now):
        return True
    shares_kernel = facts.lease and facts.boot_id == read_boot_id()
    return shares_kernel and is_free(lease_path(paths.heartbeats_dir, facts.host))


def _look_after(facts: LaunchFacts, boot: str, group: ControlGroup | None, *, here: bool) -> LostSupervisor:
    """What can still be seen of a launch whose supervisor wrote no end."""
    state, node, restarted = None, NodeWord(), False
    if facts.job is not None:
        state = ask_past_state(facts.job.job, facts.job.restart)
        word = ask_job(facts.job.job, now=time.time())
        restarted = word is not None and word.restarts > facts.job.restart
        state = state or (word.state if word is not None and not restarted else None)
        node = ask_node(facts.host)
    return LostSupervisor(
        host=facts.host,
        other_boot=here and not facts.indexed and bool(facts.boot_id) and facts.boot_id != boot,
        oom_kills=None if group is None else group.oom_kills(),
        job=None if facts.job is None else facts.job.job,
        scheduler=state,
        node_state=node.state or None,
        node_restarted=node.started is not None and facts.started is not None and node.started > facts.started,
        restarted=restarted,
    )


def _refuse_alive_here(run: str, alive: Sequence[LiveProcess]) -> None:
    if not alive:
        return
    listed = ", ".join(f"{one.process.pid} ({one.role.value} of launch {one.launch})" for one in alive[:6])
    more = f" and {len(alive) - 6} more" if len(alive) > 6 else ""
    if any(one.role is ProcessRole.SUPERVISOR for one in alive):
        hint = "wait for it, or end it: `kill " + str(alive[0].process.pid) + "`"
    else:
        hint = "`chronicle ps` shows them, `chronicle ps --sweep --yes` ends the orphans"
    raise LaunchRefused(f"processes of run `{run}` are alive here: {listed}{more}", hint)


def find_alive_elsewhere(paths: RunPaths, launches: Iterable[LaunchFacts], now: float) -> list[tuple[LaunchFacts, float]]:
    """Unended launches of other hosts with a young heartbeat, and its age in seconds; without those known to be gone."""
    beats = {(beat.launch, beat.host): beat for beat in read_heartbeats(paths.heartbeats_dir)}
    found = []
    for facts in launches:
        beat = beats.get((facts.number, facts.host))
        if facts.ended or facts.host == host_name() or beat is None or beat.age(now) >= FRESH_SECONDS:
            continue
        if not is_gone(paths, facts, now=now):  # that word outranks a heartbeat that nobody could take back
            found.append((facts, beat.age(now)))
    return found


# --- Launch numbers


def take_number(paths: RunPaths) -> int:
    """Take the next launch number by creating its directory, so that two launches cannot share one."""
    try:
        paths.launches_dir.mkdir(parents=True, exist_ok=True)
        number = max(list_launch_numbers(paths), default=0) + 1
        while True:
            try:
                paths.launch_dir(number).mkdir()
                return number
            except FileExistsError:
                number += 1
    except OSError as error:
        raise LaunchRefused(
            f"cannot create a launch directory in `{paths.launches_dir}`: {error.strerror or error}",
            "free space or name another place with --logs DIR",
        ) from error
