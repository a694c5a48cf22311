"""Find the living processes of a run on this machine, tell orphans from supervised ones, and end the orphans.

A process belongs to the run when its environment has the token of a launch in this journal, when it is in the cgroup of
such a launch, or when the supervisor recorded its (pid, start time). Boot and user must match too. Names and command
lines are not used: other users of a shared node run the same programs. An orphan is a process whose supervisor is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from chronicle.journal import Entry
from chronicle.journal.events import LaunchEnd, LaunchStart
from chronicle.launch.containment import TOKEN_VARIABLE, EndReport, end_processes, open_group
from chronicle.launch.heartbeat import Heartbeat, read_heartbeats
from chronicle.launch.processes import (
    Process,
    list_processes,
    read_boot_id,
    read_command,
    read_environment,
    read_process,
)
from chronicle.launch.provenance import redact_command
from chronicle.paths import RunPaths

__all__ = ["LaunchFacts", "LiveProcess", "ProcessRole", "end_orphans", "find_alive", "list_launches"]


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
        return {
            "pid": self.process.pid,
            "start_ticks": self.process.start_ticks,
            "uid": self.process.uid,
            "launch": self.launch,
            "role": self.role.value,
            "how": self.how,
            "command": self.command,
        }


def list_launches(entries: Iterable[Entry]) -> list[LaunchFacts]:
    """List every (launch, host) with a `launch.start`, in journal order. Pure."""
    starts: dict[tuple[int, str], LaunchStart] = {}
    ended: set[tuple[int, str | None]] = set()
    for entry in entries:
        if entry.launch is None:
            continue
        if entry.kind == LaunchStart.KIND:
            start = LaunchStart.of(entry)
            starts[entry.launch, start.host] = start
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
            ended=(number, host) in ended or (number, None) in ended,
        )
        for (number, host), start in starts.items()
    ]


def find_alive(paths: RunPaths, launches: Sequence[LaunchFacts]) -> list[LiveProcess]:
    """List living processes of these launches on this machine, supervisors first, then by pid."""
    boot = read_boot_id()
    here = [facts for facts in launches if facts.boot_id == boot]
    by_token = {facts.token: facts for facts in here if facts.token}
    recorded = _recorded(read_heartbeats(paths.heartbeats_dir), here)
    watched = {facts.number for facts in here if facts.supervisor_alive(boot)}
    supervisors = {(facts.pid, facts.start_ticks): facts.number for facts in here if facts.number in watched}
    open_launches = {facts.number for facts in here if not facts.ended}
    grouped = _grouped(here)
    found = []
    for process in list_processes():
        if not process.alive or process.pid == os.getpid():
            continue
        if process.key in supervisors:
            if supervisors[process.key] in open_launches:  # otherwise it is an autopilot between two launches
                found.append(_found(process, supervisors[process.key], ProcessRole.SUPERVISOR, "recorded"))
            continue
        launch, how = _claim(process, by_token, recorded)
        if launch is None and process.key in grouped:
            launch, how = grouped[process.key], "cgroup"
        if launch is not None:
            role = ProcessRole.SUPERVISED if launch in watched else ProcessRole.ORPHAN
            found.append(_found(process, launch, role if process.uid == os.getuid() else ProcessRole.FOREIGN, how))
    return sorted(found, key=lambda one: (one.role is not ProcessRole.SUPERVISOR, one.process.pid))


def end_orphans(paths: RunPaths, launches: Sequence[LaunchFacts], *, term_seconds: float = 5.0) -> EndReport:
    """Send TERM, then KILL, to every orphan of this user. Each is looked up again before each signal."""
    report = end_processes(
        lambda: [one.process for one in find_alive(paths, launches) if one.role is ProcessRole.ORPHAN],
        term_seconds=term_seconds,
    )
    for facts in launches:  # an empty cgroup remains when its supervisor was killed
        group = open_group(facts.cgroup) if facts.boot_id == read_boot_id() else None
        if group is not None and not facts.supervisor_alive(facts.boot_id):
            group.remove()
    return report


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


def _claim(
    process: Process, by_token: Mapping[str, LaunchFacts], recorded: Mapping[tuple[int, int], int]
) -> tuple[int | None, str]:
    environment = read_environment(process.pid)
    token = None if environment is None else environment.get(TOKEN_VARIABLE)
    if token is not None and token in by_token:
        return by_token[token].number, "token"
    if token is None and process.key in recorded:  # a title change has overwritten its environment
        return recorded[process.key], "recorded"
    return None, ""


def _found(process: Process, launch: int, role: ProcessRole, how: str) -> LiveProcess:
    command = " ".join(redact_command(read_command(process.pid))) or f"[{process.name}]"
    return LiveProcess(process=process, launch=launch, role=role, how=how, command=command)
