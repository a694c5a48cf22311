"""`chronicle ps`: the living processes of a run on this machine, and the hosts that cannot be seen from here."""

import time
from typing import Any

from chronicle.cli.options import JsonOption, LogsOption, RunOption, settings_from
from chronicle.cli.result import CommandResult
from chronicle.journal import read_journal
from chronicle.launch.heartbeat import FRESH_SECONDS, read_heartbeats
from chronicle.launch.orphans import Found, LaunchFacts, Role, find_alive, list_launches
from chronicle.launch.provenance import host_name
from chronicle.paths import RunPaths

__all__ = ["describe_elsewhere", "format_found", "ps"]


def ps(run: RunOption = None, logs: LogsOption = None, json: JsonOption = False) -> CommandResult:
    """List living processes of a run: its supervisor, what it supervises, orphans of earlier launches.

    Example: chronicle ps --run demo
    """
    paths = settings_from(run, logs).paths
    launches = list_launches(read_journal(paths).entries)
    alive = find_alive(paths, launches)
    elsewhere = describe_elsewhere(paths, launches, time.time())
    talk = [f"not visible from `{host_name()}`: {line['text']}" for line in elsewhere]
    if any(one.role is Role.ORPHAN for one in alive):
        talk.append("hint: `chronicle sweep --yes` ends the orphans")
    text = "\n".join(map(format_found, alive)) or f"no living process of run `{paths.run}` on `{host_name()}`"
    data = {"run": paths.run, "processes": [one.to_json() for one in alive], "elsewhere": elsewhere}
    return CommandResult(text=text, data=data, talk=tuple(talk))


def format_found(one: Found) -> str:
    """One process, one line."""
    command = one.command if len(one.command) <= 100 else one.command[:99] + "…"
    return f"{one.process.pid:>8}  launch {one.launch:<4} {one.role.value:<10}  by {one.how:<8}  {command}"


def describe_elsewhere(paths: RunPaths, launches: list[LaunchFacts], now: float) -> list[dict[str, Any]]:
    """Unended launches on other hosts and how old their last sign of life is."""
    beats = {(beat.launch, beat.host): beat for beat in read_heartbeats(paths.heartbeats_dir)}
    lines = []
    for facts in launches:
        if facts.ended or facts.host == host_name():
            continue
        beat = beats.get((facts.number, facts.host))
        age = None if beat is None else round(beat.age(now), 1)
        state = "no heartbeat" if age is None else f"heartbeat {age:.0f} s old"
        word = "alive" if age is not None and age < FRESH_SECONDS else "not heard of"
        text = f"launch {facts.number} on `{facts.host}`: {word}, {state}"
        lines.append({"host": facts.host, "launch": facts.number, "heartbeat_age_seconds": age, "text": text})
    return lines
