"""`chronicle ps` lists the processes of a run; with `--sweep` it ends its orphans."""

import time
from typing import Any

from chronicle.cli.options import IN_RUN, CommandResult, ExitCode, InRun, YesOption
from chronicle.cli.transaction import agree
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Swept
from chronicle.launch.admission import (
    LaunchFacts,
    LiveProcess,
    ProcessRole,
    close_lost_launches,
    end_orphans,
    find_alive,
    list_launches,
)
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.launch.provenance import host_name
from chronicle.paths import RunPaths


def ps(sweep_: bool = False, yes: YesOption = False, at: InRun = IN_RUN) -> CommandResult:
    """List the living processes of a run, or end its orphans.

    It lists the supervisor, the processes of the launches, and orphans of earlier launches. `--sweep` ends only processes
    of this run, user and boot, identified by token or record, never by name.

    Example: chronicle ps --sweep --yes

    Options:
      --sweep: End the orphans of earlier launches.
    """
    paths = at.settings().paths
    launches = list_launches(read_journal(paths).entries)
    alive = find_alive(paths, launches)
    orphans = [one for one in alive if one.role is ProcessRole.ORPHAN]
    elsewhere = describe_elsewhere(paths, launches, time.time())
    talk = [f"not visible from `{host_name()}`: {line['text']}" for line in elsewhere]
    if sweep_:
        talk += [f"not ended, it is another user's: {format_found(one)}" for one in alive if one.role is ProcessRole.FOREIGN]
        return _sweep(paths, launches, orphans, talk, yes=yes)
    if orphans:
        talk.append("hint: `chronicle ps --sweep --yes` ends the orphans")
    lines = [format_found(one) for one in alive]
    lines = lines or [f"no living process of run `{paths.run}` on `{host_name()}`"]
    data = {"run": paths.run, "processes": [one.to_json() for one in alive], "elsewhere": elsewhere}
    return CommandResult(lines=lines, data=data, talk=talk)


def _sweep(
    paths: RunPaths, launches: list[LaunchFacts], orphans: list[LiveProcess], talk: list[str], *, yes: bool
) -> CommandResult:
    """End orphaned processes of earlier launches, after an answer."""
    listed = [one.to_json() for one in orphans]
    if not orphans:
        return CommandResult(lines="no orphans", data={"orphans": [], "ended": 0, "left": []}, talk=talk)
    lines = [format_found(one) for one in orphans]
    agree(f"End these {len(orphans)} processes?", lines, yes=yes)
    report = end_orphans(paths, launches)
    left = [process.pid for process in report.left]
    ended = len(orphans) - len(left)
    with JournalWriter(paths) as writer:
        event = Swept(orphans=tuple(listed), killed=report.killed, left=tuple(left))
        writer.write(event, title=f"swept {ended} orphans")
        close_lost_launches(paths, read_journal(paths), writer)
    return CommandResult(
        lines=[*lines, f"ended {ended}, left {len(left)}"],
        data={"orphans": listed, "ended": ended, "left": left},
        exit_code=ExitCode.ERROR if left else ExitCode.DONE,
        talk=talk,
    )


def format_found(one: LiveProcess) -> str:
    """One line about a process."""
    command = one.command if len(one.command) <= 100 else one.command[:99] + "…"
    return f"{one.process.pid:>8}  launch {one.launch:<4} {one.role.value:<10}  by {one.how:<8}  {command}"


def describe_elsewhere(paths: RunPaths, launches: list[LaunchFacts], now: float) -> list[dict[str, Any]]:
    """The launches on other hosts that have not ended, with the age of their last heartbeat."""
    beats = {(beat.launch, beat.host): beat for beat in read_heartbeats(paths.heartbeats_dir)}
    lines = []
    for facts in launches:
        if facts.ended or facts.host == host_name():
            continue
        beat = beats.get((facts.number, facts.host))
        age = None if beat is None else round(beat.age(now), 1)
        state = "no heartbeat" if age is None else f"heartbeat {age:.0f} s old"
        word = "alive" if age is not None and age < FRESH_SECONDS else "no recent sign of life"
        text = f"launch {facts.number} on `{facts.host}`: {word}, {state}"
        lines.append({"host": facts.host, "launch": facts.number, "heartbeat_age_seconds": age, "text": text})
    return lines
