"""`chronicle watch`: follows a growing log, prints events and a status line, and calls hooks."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.errors import UsageProblem
from chronicle.metrics.mlflow_log import is_file_store_run
from chronicle.watch.follow import Follower, follow_file, follow_run
from chronicle.watch.live import Hooks, say_on_stderr
from chronicle.watch.restart import describe_trip
from chronicle.watch.scan import describe_event
from rollback.detect import Event

__all__ = ["watch"]


def watch(
    target: Annotated[
        str | None,
        typer.Argument(help="A run or a log: a file, mlflow.db#RUN, a TensorBoard or MLflow directory.", metavar="[RUN|FILE]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read the log once and stop.")] = False,
    on_notice: Annotated[str | None, typer.Option(help="Command to run on a notice.", metavar="COMMAND")] = None,
    on_warn: Annotated[str | None, typer.Option(help="Command to run on a warning.", metavar="COMMAND")] = None,
    on_propose: Annotated[str | None, typer.Option(help="Command to run on a proposal.", metavar="COMMAND")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two reads.")] = 2.0,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Follow a run or a log file and report what the detector finds.

    Hooks are shell commands, also from chronicle.toml. They get the event as JSON on stdin and in CHRONICLE_EVENT_*
    variables.

    Example: chronicle watch tr-190-80b
    """
    follower, commands = _follower(target, logs, checkpoints, once=once)
    given = {"on_notice": on_notice, "on_warn": on_warn, "on_propose": on_propose}
    hooks = Hooks({**commands, **{name: command for name, command in given.items() if command}}, say_on_stderr)
    events: dict[int, Event] = {}
    told, said = 0, False
    live = sys.stderr.isatty() and not once
    while True:
        for event in follower.look():
            fresh = event.id not in events or events[event.id].tier is not event.tier
            events[event.id] = event
            if fresh:
                hooks.call(event)
                if not once:
                    print(("\r\033[K" if live else "") + describe_event(event), file=sys.stderr, flush=True)
        for step, check in follower.trips[told:] if not once else ():
            print(("\r\033[K" if live else "") + describe_trip(step, check), file=sys.stderr, flush=True)
        told = len(follower.trips)
        if not once and not live and not said:
            print(f"watching {target or 'the run'}: {follower.status_line()}", file=sys.stderr, flush=True)
            said = True  # without a terminal, the status line is printed once
        if once:
            break
        if live:
            print(f"\r\033[K{follower.status_line()}", end="", file=sys.stderr, flush=True)
        hooks.reap()
        time.sleep(max(0.1, interval))
    hooks.finish()
    trips = [describe_trip(step, check) for step, check in follower.trips]
    text = "\n".join([follower.status_line(), *trips, *(describe_event(event) for event in events.values())])
    data = {
        "rows": follower.rows,
        "restarts": [{"step": step, **check.to_json()} for step, check in follower.trips],
        "events": [event.to_json() for event in events.values()],
    }
    return CommandResult(text=text, data=data)


def _is_log(path: Path) -> bool:
    """Whether this is a file, `mlflow.db#RUN`, or a directory with event files or the metrics of one run."""
    if path.is_dir():
        return is_file_store_run(path) or any(path.rglob("*tfevents*"))
    return path.is_file() or Path(str(path).partition("#")[0]).is_file()


def _follower(
    target: str | None, logs: Path | None, checkpoints: Path | None, *, once: bool
) -> tuple[Follower, Mapping[str, str]]:
    if target is not None and _is_log(Path(target)):
        return follow_file(Path(target), once=once), settings_from("file", logs).hooks
    settings = settings_with_checkpoints(target, logs, checkpoints)
    if not settings.paths.run_dir.is_dir():
        raise UsageProblem(f"`{target or settings.run}` is neither a file nor a run", "chronicle watch FILE, or --logs DIR")
    return follow_run(settings.paths), settings.hooks
