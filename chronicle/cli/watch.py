"""`chronicle watch`: follows a growing log, prints events and a status line, and calls hooks."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    given_flags,
    settings_from,
    settings_with_checkpoints,
)
from chronicle.cli.spikes import NO_WORDS, LogWords, describe_proposal
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.metrics.mlflow_log import is_file_store_run
from chronicle.metrics.readers import LogReading
from chronicle.watch.follow import Follower, follow_file, follow_run
from chronicle.watch.live import Hooks, say_on_stderr
from chronicle.watch.restart import describe_trip
from chronicle.watch.scan import Advise, advice_on_file, advice_on_run, describe_event
from rollback.detect import Event, Tier
from rollback.errors import RollbackError
from rollback.propose import Proposal

ENOUGH_ROWS = 8  # of a growing log, before it is said to hold no loss
PATIENT_LOOKS = 5  # at a growing log without a point, before it is said that none was read


def watch(
    target: str | None = None,
    once: bool = False,
    on_notice: str | None = None,
    on_warn: str | None = None,
    on_propose: str | None = None,
    interval: float = 2.0,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    words: LogWords = NO_WORDS,
    json: JsonOption = False,
) -> CommandResult:
    """Follow a run or a log file and report what the detector finds.

    When a rollback is advised, it prints the command.

    Hooks are shell commands, also from chronicle.toml. They get the event as JSON on stdin and in CHRONICLE_EVENT_*
    variables. Ctrl-C or the end of the run ends it with a summary.

    Example: chronicle watch tr-190-80b

    Options:
      [RUN|FILE]: A run or a log: a file, mlflow.db#RUN, a TensorBoard or MLflow directory.
      --once: Read the log once and stop.
      --on-notice COMMAND: Command to run on a notice.
      --on-warn COMMAND: Command to run on a warning.
      --on-propose COMMAND: Command to run on a proposal.
      --interval: Seconds between two reads.
    """
    reading = words.reading()
    follower, commands, advise = _follower(target, logs, checkpoints, once=once, reading=reading)
    given = {"on_notice": on_notice, "on_warn": on_warn, "on_propose": on_propose}
    hooks = Hooks({**commands, **{name: command for name, command in given.items() if command}}, say_on_stderr)
    events: dict[int, Event] = {}
    try:
        _look(follower, hooks, events, advise, target or "the run", interval=interval, once=once)
    except KeyboardInterrupt:  # the person has seen enough: what was found is the result
        print(file=sys.stderr)
    hooks.finish()
    trips = [describe_trip(step, check) for step, check in follower.trips]
    told = follower.contents.lines() if follower.contents.points else []
    proposal = _proposal(follower, advise)
    advice = [] if proposal is None else [describe_proposal(proposal)]
    text = "\n".join([*told, follower.status_line(), *trips, *(describe_event(event) for event in events.values()), *advice])
    data = {
        "rows": follower.rows,
        "read": follower.contents.to_json(),
        "restarts": [{"step": step, **check.to_json()} for step, check in follower.trips],
        "events": [event.to_json() for event in events.values()],
        "proposals": [] if proposal is None else [proposal.to_json()],
    }
    return CommandResult(text=text, data=data)


def _proposal(follower: Follower, advise: Advise) -> Proposal | None:
    events = follower.detector.events
    if follower.last is None or all(event.tier is not Tier.PROPOSE for event in events):
        return None
    try:
        return advise(events, follower.last.step)
    except (ChronicleError, RollbackError, OSError) as problem:  # the watch goes on
        print(f"no proposal could be made: {problem}", file=sys.stderr, flush=True)
        return None


def _look(
    follower: Follower, hooks: Hooks, events: dict[int, Event], advise: Advise, name: str, *, interval: float, once: bool
) -> None:
    """Read the log until it is interrupted, or once; raises NothingToWatch where it holds no loss that is known."""
    told, said, looks = 0, False, 0
    live = sys.stderr.isatty() and not once

    def say(text: str) -> None:
        print("\r\033[K" * live + text, file=sys.stderr, flush=True)

    while True:
        calls, before = False, follower.rows
        for event in follower.look():
            fresh = event.id not in events or events[event.id].tier is not event.tier
            events[event.id] = event
            if fresh:
                calls = calls or event.tier is Tier.PROPOSE
                hooks.call(event)
                if not once:
                    say(describe_event(event))
        if once or follower.rows >= ENOUGH_ROWS:
            follower.contents.need_loss(name)
        unread = None if follower.rows else follower.unread()
        if once:
            if unread is not None:
                raise unread
            return
        if calls and (proposal := _proposal(follower, advise)) is not None:
            say(describe_proposal(proposal))
        if unread is not None and looks == PATIENT_LOOKS:
            say(f"watching {name}: {unread.message}; {unread.remedy}")
        looks += 1
        for step, check in follower.trips[told:]:
            say(describe_trip(step, check))
        told = len(follower.trips)
        if not said and (follower.rows or not live):
            contents = follower.contents.lines() if follower.rows else ["no points yet"]
            say(f"watching {name}: {contents[0]}")
            if not live:
                say(f"watching {name}: {follower.status_line()}")
            said = True  # once; without a terminal, so is the status line
        if live:
            print(f"\r\033[K{follower.status_line()}", end="", file=sys.stderr, flush=True)
        hooks.reap()
        if follower.rows == before and (how := follower.ended()):
            say(f"watching {name}: {how}")
            return
        time.sleep(max(0.1, interval))


def _is_log(path: Path) -> bool:
    """Whether this is a file, `mlflow.db#RUN`, or a directory with event files or the metrics of one run."""
    if path.is_dir():
        return is_file_store_run(path) or any(path.rglob("*tfevents*"))
    return path.is_file() or Path(str(path).partition("#")[0]).is_file()


def _follower(
    target: str | None, logs: Path | None, checkpoints: Path | None, *, once: bool, reading: LogReading
) -> tuple[Follower, Mapping[str, str], Advise]:
    if target is not None and _is_log(Path(target)):
        hooks = settings_from("file", logs).hooks
        return follow_file(Path(target), once=once, reading=reading), hooks, advice_on_file(checkpoints)
    settings = settings_with_checkpoints(target, logs, checkpoints)
    settings.say_store("the log is watched, and no checkpoint there is looked at for a proposal")
    if not settings.paths.run_dir.is_dir():
        raise UsageProblem(f"`{target or settings.run}` is neither a file nor a run", "chronicle watch FILE, or --logs DIR")
    advise = advice_on_run(settings.paths, settings.checkpoints_dir, given_flags(logs, checkpoints))
    return follow_run(settings.paths, reading), settings.hooks, advise
