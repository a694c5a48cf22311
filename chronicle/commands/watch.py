"""`chronicle watch`: follow a growing log, one live line, hooks for each tier."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from chronicle.commands.options import CheckpointsOption, JsonOption, LogsOption
from chronicle.commands.recorded import settings_with_checkpoints
from chronicle.commands.result import CommandResult
from chronicle.commands.spikes import describe_event
from chronicle.errors import UsageProblem
from chronicle.watch.follow import Follower, follow_file, follow_run
from chronicle.watch.restart import describe_trip
from rollback.detect import Event

__all__ = ["watch"]


def watch(
    target: Annotated[str | None, typer.Argument(help="A run or a log file.", metavar="[RUN|FILE]")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once at what is there and stop.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Follow a run or a log file and say what the detector sees.

    Hooks `on_notice`, `on_warn`, `on_propose` in chronicle.toml are shell commands; they get CHRONICLE_EVENT_* variables.

    Example: chronicle watch tr-190-80b
    """
    follower, hooks = _follower(target, logs, checkpoints)
    events: dict[int, Event] = {}
    told = 0
    live = sys.stderr.isatty() and not once
    while True:
        for event in follower.look():
            fresh = event.id not in events or events[event.id].tier is not event.tier
            events[event.id] = event
            if fresh:
                _call_hook(hooks, event)
                if not once:
                    print(("\r\033[K" if live else "") + describe_event(event), file=sys.stderr, flush=True)
        for step, check in follower.trips[told:] if not once else ():
            print(("\r\033[K" if live else "") + describe_trip(step, check), file=sys.stderr, flush=True)
        told = len(follower.trips)
        if once or follower.ended():
            break
        if live:
            print(f"\r\033[K{follower.status_line()}", end="", file=sys.stderr, flush=True)
        time.sleep(max(0.1, interval))
    trips = [describe_trip(step, check) for step, check in follower.trips]
    text = "\n".join([follower.status_line(), *trips, *(describe_event(event) for event in events.values())])
    data = {
        "rows": follower.rows,
        "restarts": [{"step": step, **check.to_json()} for step, check in follower.trips],
        "events": [event.to_json() for event in events.values()],
    }
    return CommandResult(text=text, data=data)


def _follower(
    target: str | None, logs: Path | None, checkpoints: Path | None
) -> tuple[Follower, Mapping[str, str]]:
    if target is not None and Path(target).is_file():
        return follow_file(Path(target)), {}
    settings = settings_with_checkpoints(target, logs, checkpoints)
    if not settings.paths.run_dir.is_dir():
        raise UsageProblem(f"`{target or settings.run}` is neither a file nor a run", "chronicle watch FILE, or --logs DIR")
    return follow_run(settings.paths), settings.hooks


def _call_hook(hooks: Mapping[str, str], event: Event) -> None:
    """Run the tier's command; its failure is said and changes nothing."""
    command = hooks.get(f"on_{event.tier.value}")
    if not command:
        return
    details = {"KIND": event.kind.value, "TIER": event.tier.value, "ONSET": str(event.onset_step),
               "CHANNELS": ",".join(event.channels), "STATUS": event.status.value}  # fmt: skip
    environ = os.environ | {f"CHRONICLE_EVENT_{name}": value for name, value in details.items()}
    # The command comes from the person's own settings file: a shell line is what it is meant to be.
    done = subprocess.run(command, shell=True, env=environ, check=False)  # noqa: S602
    if done.returncode != 0:
        print(f"hook on_{event.tier.value} ended with code {done.returncode}", file=sys.stderr)
