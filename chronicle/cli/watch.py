"""`chronicle watch`: spikes and divergences of a run or a log, while it grows or once, and the rollback that they call for."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, ExitCode, Given, settings_from
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.metrics.mlflow_log import is_file_store_run
from chronicle.metrics.readers import LogReading, NothingToWatch, UnknownLog, line_format
from chronicle.settings import Settings
from chronicle.watch.follow import follow_file, follow_run, how_ended, why_unread
from chronicle.watch.live import Hooks, say_on_stderr
from chronicle.watch.restart import describe_trip
from chronicle.watch.scan import Scan, describe_event, scan_file, scan_run
from rollback.channels import LossKind
from rollback.detect import Event, Tier
from rollback.propose import Action

BARS = "▁▂▃▄▅▆▇█"
ENOUGH_ROWS = 8  # of a growing log, before it is said to hold no loss
PATIENT_LOOKS = 5  # at a growing log without a point, before it is said that none was read


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWords(Given):
    """What a person says about a log."""

    loss: Annotated[str | None, Option("--loss", help="The series that is the loss.", metavar="NAME")] = None
    step: Annotated[str | None, Option("--step", help="The column that counts steps.", metavar="NAME")] = None
    lr: Annotated[str | None, Option("--lr", help="The series that is the LR.", metavar="NAME")] = None
    ignore: Annotated[list[str] | None, Option("--ignore", help="Series to leave out; `*` stands for any text.")] = None
    kind: Annotated[
        LossKind | None, Option("--kind", help="How the loss behaves: it falls, is a reward, or two networks compete.")
    ] = None
    form: Annotated[
        str | None,
        Option(
            "--format", help="A line format of chronicle.toml, or a regular expression with named groups.", metavar="NAME|REGEX"
        ),
    ] = None

    def reading(self) -> LogReading:
        """What these options say about a log."""
        pattern = None if self.form is None else line_format(self.form, settings_from("file", None).formats)
        ignore = tuple(self.ignore or ())
        return LogReading(loss=self.loss, step=self.step, lr=self.lr, ignore=ignore, kind=self.kind, pattern=pattern)


NO_WORDS = LogWords()


def watch(
    targets: list[str] | None = None,
    once: bool = False,
    fail: bool = False,
    on_notice: str | None = None,
    on_warn: str | None = None,
    on_propose: str | None = None,
    interval: float = 2.0,
    words: LogWords = NO_WORDS,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Find spikes and divergences in a run or a log, live or --once.

    It begins with what was read: the form of the log, points, steps, and which series is the loss. When a rollback is
    advised, it prints the command. It exits with 2 where it finds no loss in a log; name
    the loss with --loss.

    Hooks are shell commands, also from chronicle.toml. They get the event as JSON on stdin and in CHRONICLE_EVENT_*
    variables. Ctrl-C or the end of the run ends it with a summary.

    Example: chronicle watch tr-190-80b

    A finished log: chronicle watch train.log --once --fail

    Options:
      [RUN|FILE…]: Runs or logs: a file, mlflow.db#RUN, a TensorBoard or MLflow directory.
      --once: Read to the end and stop; several at a time. Only hooks that are given here are called.
      --fail: Exit 5 when an event has tier warn or propose.

    Rare options:
      --on-notice COMMAND: Command to run on a notice.
      --on-warn COMMAND: Command to run on a warning.
      --on-propose COMMAND: Command to run on a proposal.
      --interval: Seconds between two reads.
    """
    reading = words.reading()
    names = targets or [""]
    given = {"on_notice": on_notice, "on_warn": on_warn, "on_propose": on_propose}
    commands = {name: command for name, command in given.items() if command}
    found: list[Scan | _Unread] = []
    hooks = Hooks(commands, say_on_stderr)
    if once:
        for name in names:
            try:
                found.append(_scan(name, at, reading))
            except (UnknownLog, NothingToWatch, OSError) as problem:
                if len(names) == 1:
                    raise
                found.append(_Unread(name, problem))  # the others are still read
        for event in (event for one in found for event in one.events):
            hooks.call(event)
    elif len(names) > 1:
        raise UsageProblem(f"{len(names)} logs cannot be followed at the same time", "read them to their ends with --once")
    else:
        scan, settings = _follow(names[0], at, reading)
        hooks = Hooks({**settings.hooks, **commands}, say_on_stderr)
        _look_on(scan, settings, hooks, interval)
        found.append(scan.finish())
    hooks.finish()
    data = [one.to_json() for one in found]
    return CommandResult(
        lines=[line for one in found for line in ("", *describe_scan(one))][1:],
        data=data if len(names) > 1 else data[0],
        exit_code=_exit_code(found, fail=fail),
    )


class _Unread(NamedTuple):
    """A log that could not be read."""

    source: str
    problem: ChronicleError | OSError
    events: tuple[Event, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a scan of nothing."""
        return {"file": self.source, "rows": 0, "events": [], "proposals": [], "problem": str(self.problem)}


def _exit_code(found: Sequence[Scan | _Unread], *, fail: bool) -> ExitCode:
    problems = [one.problem for one in found if isinstance(one, _Unread)]
    if problems:
        return ExitCode.USAGE if all(isinstance(one, UsageProblem) for one in problems) else ExitCode.ERROR
    loud = any(event.tier is not Tier.NOTICE for one in found for event in one.events)
    return ExitCode.FINDINGS if fail and loud else ExitCode.DONE


# --- the run or the log that is meant


def _scan(name: str, at: AtCheckpoints, reading: LogReading) -> Scan:
    """Read one to its end."""
    if _is_log(name):
        return scan_file(Path(name), checkpoints_dir=at.checkpoints, reading=reading)
    settings = _run_named(name, at)
    return scan_run(settings.paths, settings.checkpoints_dir, options=at.flags(), reading=reading)


def _follow(name: str, at: AtCheckpoints, reading: LogReading) -> tuple[Scan, Settings]:
    """One that grows, with the settings that name its hooks."""
    if _is_log(name):
        return follow_file(Path(name), checkpoints_dir=at.checkpoints, reading=reading), settings_from("file", at.logs)
    settings = _run_named(name, at)
    settings.say_store("the log is watched, and no checkpoint there is looked at for a proposal")
    return follow_run(settings.paths, settings.checkpoints_dir, options=at.flags(), reading=reading), settings


def _is_log(name: str) -> bool:
    """Whether this is a file, `mlflow.db#RUN`, or a directory with event files or the metrics of one run."""
    path = Path(name)
    if not name or (path / "journal").is_dir():
        return False
    if path.is_dir():
        return is_file_store_run(path) or any(path.rglob("*tfevents*"))
    return path.is_file() or Path(name.partition("#")[0]).is_file()


def _run_named(name: str, at: AtCheckpoints) -> Settings:
    """The settings of a run; without a name, of the run of this directory."""
    if not name:
        return at.existing()
    if "/" in name:
        raise UsageProblem(f"no file `{name}`", "name a log, or a run with --logs DIR")
    settings = replace(at, run=name).settings()
    if not settings.paths.run_dir.is_dir():
        raise UsageProblem(f"`{name}` is neither a file nor a run", "name a log, or a run with --logs DIR")
    return settings


# --- while it grows


def _look_on(scan: Scan, settings: Settings, hooks: Hooks, interval: float) -> None:
    """Read and tell until it is interrupted or the run has ended; raises NothingToWatch where no loss is known."""
    live = sys.stderr.isatty()
    tiers: dict[int, Tier] = {}
    looks, told, begun = 0, 0, False
    is_run = scan.source == settings.run

    def say(text: str) -> None:
        print("\r\033[K" * live + text, file=sys.stderr, flush=True)

    try:
        while True:
            before = scan.rows
            fresh = [event for event in scan.look() if tiers.get(event.id) is not event.tier]
            for event in fresh:
                tiers[event.id] = event.tier
                hooks.call(event)
                say(describe_event(event))
            if scan.rows >= ENOUGH_ROWS:
                scan.contents.need_loss(scan.source)
            if any(event.tier is Tier.PROPOSE for event in fresh):
                scan.advise()
                say("\n".join(_advice(scan)))
            for step, check in scan.trips[told:]:
                say(describe_trip(step, check))
            told, looks = len(scan.trips), looks + 1
            if not begun and (scan.rows or not live):
                begun = True  # once; without a terminal, so is the status line
                say(f"watching {scan.source}: {scan.contents.lines()[0] if scan.rows else 'no points yet'}")
            if looks == PATIENT_LOOKS and not scan.rows and not is_run:
                unread = why_unread(Path(scan.source), scan.reading)
                if unread is not None:
                    say(f"watching {scan.source}: {unread.message}; {unread.remedy}")
            if live:
                print(f"\r\033[K{scan.status_line()}", end="", file=sys.stderr, flush=True)
            hooks.reap()
            if is_run and scan.rows == before and (how := how_ended(settings.paths)):
                say(f"watching {scan.source}: {how}")
                return
            time.sleep(max(0.1, interval))
    except KeyboardInterrupt:  # the person has seen enough: what was found is the result
        print(file=sys.stderr)


# --- what is told of a log


def describe_scan(scan: Scan | _Unread) -> list[str]:
    """The lines of one log: title, what was read, sparkline, one line per event, the proposal."""
    if isinstance(scan, _Unread):
        return [f"{scan.source}: {scan.problem}"]
    events = scan.events
    lines = [f"{scan.source}: {scan.rows} points, {len(events)} event{'s' * (len(events) != 1)}, {scan.status_line()}"]
    lines += [f"  {line}" for line in scan.contents.lines()]
    if scan.spark.line():
        lines.append("  " + sparkline([value for _, value in scan.spark.line()]))
    if events:
        lines.append("  " + _marks(scan, events))
    lines += [f"  {describe_trip(step, check)}" for step, check in scan.trips]
    lines += [f"  {describe_event(event)}" for event in events]
    lines += [f"  {line}" for line in _advice(scan)]
    return lines


def sparkline(values: Sequence[float]) -> str:
    """The values as text bars, from the minimum to the 98th percentile; `✗` for a value that is not finite."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return "✗" * len(values)
    low, high = finite[0], finite[int(0.98 * (len(finite) - 1))]
    span = (high - low) or 1.0
    return "".join(BARS[min(7, max(0, int(8 * (one - low) / span)))] if math.isfinite(one) else "✗" for one in values)


def _marks(scan: Scan, events: Sequence[Event]) -> str:
    """A line with `^` under the start of each event of tier warn or propose, and `'` for notices."""
    rows = [row for row, _ in scan.spark.line()]
    out = [" "] * len(rows)
    for event in sorted(events, key=lambda one: one.tier is not Tier.NOTICE):
        at = max((index for index, row in enumerate(rows) if row <= (event.onset_row or 0)), default=0)
        out[at] = "'" if event.tier is Tier.NOTICE else "^"
    return "".join(out).rstrip()


def _advice(scan: Scan) -> Iterator[str]:
    """The proposal as text: reasons, target, cost, alternatives, budgets, command; nothing where none is called for."""
    found = scan.proposal
    if found is None:
        yield from filter(None, (scan.problem,))
        return
    yield from (f"proposal: {reason}" for reason in found.reasons)
    if found.target_step is not None:
        yield f"to: {_place(found.target_step, found.cost_steps, found.cost_hours)}"
    yield from (f"or: {_place(other.step, other.cost_steps, other.cost_hours)}" for other in found.alternatives)
    if found.target_step is not None or found.action is Action.STOP:
        yield f"action: {found.action.value}"
    yield from (f"budget exceeded: {text}" for text in found.exhausted)
    if found.by_hand:
        yield f"by hand: {found.by_hand}"
    if found.command is not None:
        yield found.command


def _place(step: int, cost_steps: int | None, cost_hours: float | None) -> str:
    hours = f", {cost_hours:.1f} h" if cost_hours is not None else ""
    return f"step {step}, discards {cost_steps} steps{hours}"
