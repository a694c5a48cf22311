"""Decide whether a launch may start now, and take its number.

Refuses while another launch is alive, while orphans are left, on an excluded node, and over an unfinished rollback. Also
closes launches that ended without an entry: an unended `launch.start` of this machine whose processes are gone gets a
`launch.end` marked as inferred.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from chronicle.errors import JournalError, Refusal
from chronicle.journal import Entry, Journal, JournalWriter
from chronicle.journal.events import Hardware, LaunchEnd, events_of, find_open_transaction
from chronicle.journal.reader import DAMAGED_HINT, describe_damage, find_damage
from chronicle.launch.containment import open_group
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.launch.orphans import LaunchFacts, LiveProcess, ProcessRole, find_alive, list_launches
from chronicle.launch.processes import read_boot_id
from chronicle.launch.provenance import host_name
from chronicle.paths import RunPaths, list_launch_numbers
from rollback.disk.lock import Locked, hold_lock

__all__ = [
    "EXCLUDE",
    "READMIT",
    "LaunchRefused",
    "close_lost_launches",
    "ensure_node_in_use",
    "ensure_startable",
    "find_excluded",
    "hold_admission",
    "take_number",
]

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


# --- Admission



class LaunchRefused(Refusal):
    """`chronicle run` started nothing."""

    exit_code = 125


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

    `own` is the number of a launch over several nodes that this process joins.
    """
    if force is None:
        refuse_damaged(paths, journal)
    intent = _find_open_transaction(journal)
    if intent is not None:
        raise LaunchRefused(
            f"{intent.kind.split('.')[0]} {intent.id} of run `{journal.run}` was started and not finished",
            "finish or revert it first: `chronicle recover`",
        )
    launches = [one for one in list_launches(journal.entries) if one.number != own]
    _refuse_alive_here(journal.run, find_alive(paths, launches))
    if force is None:
        _refuse_alive_elsewhere(paths, launches, now)


def refuse_damaged(paths: RunPaths, journal: Journal) -> None:
    """Raise `LaunchRefused` when the journal is damaged: a lost entry may be an open rollback."""
    damage = find_damage(paths, journal)
    if damage:
        raise LaunchRefused(describe_damage(paths, damage), DAMAGED_HINT)


def ensure_node_in_use(journal: Journal, *, force: str | None = None) -> None:
    """Raise `LaunchRefused` on a node that was excluded from this run. Rollbacks are allowed there."""
    excluded = find_excluded(journal.entries)
    if force is None and host_name() in excluded:
        raise LaunchRefused(
            f"this node, `{host_name()}`, is excluded from run `{journal.run}`: {excluded[host_name()]}",
            f"start on another node, or `chronicle exclude-node {host_name()} --readmit`",
        )


def _find_open_transaction(journal: Journal) -> Entry | None:
    """Return the open intent, if any. A receipt of an unknown version refuses the launch."""
    try:
        return find_open_transaction(journal.entries)
    except JournalError as problem:
        raise LaunchRefused(problem.message, problem.remedy) from problem


def close_lost_launches(paths: RunPaths, journal: Journal, writer: JournalWriter) -> list[int]:
    """Write a `launch.end` for launches of this machine whose supervisor is gone; return their numbers."""
    closed = []
    for facts in list_launches(journal.entries):
        if facts.ended or facts.host != host_name() or facts.supervisor_alive(read_boot_id()):
            continue
        title = f"launch {facts.number} ended without an entry: its supervisor no longer runs"
        writer.write(LaunchEnd(host=facts.host, inferred=True), launch=facts.number, title=title)
        closed.append(facts.number)
        group = open_group(facts.cgroup)
        if group is not None:
            group.remove()  # succeeds for an empty cgroup; `sweep` ends processes in it
    return closed


def _refuse_alive_here(run: str, alive: Sequence[LiveProcess]) -> None:
    if not alive:
        return
    listed = ", ".join(f"{one.process.pid} ({one.role.value} of launch {one.launch})" for one in alive[:6])
    more = f" and {len(alive) - 6} more" if len(alive) > 6 else ""
    if any(one.role is ProcessRole.SUPERVISOR for one in alive):
        hint = "wait for it, or end it: `kill " + str(alive[0].process.pid) + "`"
    else:
        hint = "`chronicle ps` shows them, `chronicle sweep --yes` ends the orphans"
    raise LaunchRefused(f"processes of run `{run}` are alive here: {listed}{more}", hint)


def _refuse_alive_elsewhere(paths: RunPaths, launches: Sequence[LaunchFacts], now: float) -> None:
    beats = {(beat.launch, beat.host): beat for beat in read_heartbeats(paths.heartbeats_dir)}
    for facts in launches:
        beat = beats.get((facts.number, facts.host))
        if facts.ended or facts.host == host_name() or beat is None or beat.age(now) >= FRESH_SECONDS:
            continue
        raise LaunchRefused(
            f"launch {facts.number} seems alive on `{facts.host}`: its heartbeat is {beat.age(now):.0f} s old",
            f'wait until the heartbeat is {FRESH_SECONDS:.0f} s old, or pass `--force "why it is not alive"`',
        )


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
