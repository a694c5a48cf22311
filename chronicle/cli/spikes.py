"""`chronicle spikes` lists divergences in training logs, and the rollback that an open one calls for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from chronicle.cli.options import (
    AT_CHECKPOINTS,
    FORCING,
    AtCheckpoints,
    CommandResult,
    ExitCode,
    Forcing,
    Given,
    settings_from,
)
from chronicle.errors import UsageProblem
from chronicle.goback.opened import read_sound_journal
from chronicle.metrics.readers import LogReading, NothingToWatch, UnknownLog, line_format
from chronicle.watch.scan import Scan, describe_event, scan_file, scan_run, unread
from rollback.channels import LossKind
from rollback.detect import Tier
from rollback.propose import Action, Proposal

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWords(Given):
    """What a person says about a log."""

    loss: Annotated[str | None, Option("--loss", help="The series that is the loss.", metavar="NAME")] = None
    step: Annotated[str | None, Option("--step", help="The column that counts steps.", metavar="NAME")] = None
    lr: Annotated[str | None, Option("--lr", help="The series that is the LR.", metavar="NAME")] = None
    ignore: Annotated[
        list[str] | None, Option("--ignore", help="Series to leave out; `*` stands for any text.")
    ] = None
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


def spikes(
    files: list[str] | None = None,
    fail: bool = False,
    words: LogWords = NO_WORDS,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """List spikes and divergences in training logs.

    It begins with what was read: the form of the log, points, steps, and which series is the loss. A log without a loss
    that is known ends with 2; name the loss with --loss.

    Example: chronicle spikes train.log --fail

    Options:
      [FILE…|RUN]: Log files, or the name of a run.
      --fail: Exit 5 when an event has tier warn or propose.
    """
    scans = _scan(files or [], at, words.reading())
    return CommandResult(
        text="\n\n".join(describe_scan(scan) for scan in scans),
        data=[scan.to_json() for scan in scans] if len(scans) != 1 else scans[0].to_json(),
        exit_code=_exit_code(scans, fail=fail),
    )


def _exit_code(scans: Sequence[Scan], *, fail: bool) -> ExitCode:
    if any(scan.problem is not None for scan in scans):
        return ExitCode.ERROR if any(scan.problem is not None and not scan.blind for scan in scans) else ExitCode.USAGE
    loud = any(event.tier is not Tier.NOTICE for scan in scans for event in scan.events)
    return ExitCode.FINDINGS if fail and loud else ExitCode.DONE


def _scan(names: Sequence[str], at: AtCheckpoints, reading: LogReading) -> list[Scan]:
    """Scan each name: an existing file, else a run. Without a name, scan the run of this directory."""
    if not names:
        settings = at.existing()
        return [scan_run(settings.paths, settings.checkpoints_dir, options=at.flags(), reading=reading)]
    scans = []
    for name in names:
        try:
            scans.append(_scan_one(name, at, reading))
        except (UnknownLog, NothingToWatch, OSError) as problem:
            if len(names) == 1:
                raise
            scans.append(unread(name, str(problem), blind=isinstance(problem, UsageProblem)))  # the others are still read
    return scans


def _scan_one(name: str, at: AtCheckpoints, reading: LogReading) -> Scan:
    path = Path(name)
    if path.exists() or Path(name.partition("#")[0]).is_file():  # `mlflow.db#RUN`
        return scan_file(path, checkpoints_dir=at.checkpoints, reading=reading)
    if "/" in name:
        raise UsageProblem(f"no file `{name}`", "chronicle spikes FILE")
    named = replace(at, run=name).settings()
    if not named.paths.run_dir.is_dir():
        raise UsageProblem(f"`{name}` is neither a file nor a run", "chronicle spikes FILE, or --logs DIR")
    return scan_run(named.paths, named.checkpoints_dir, options=at.flags(), reading=reading)


def describe_scan(scan: Scan) -> str:
    """The text of one log: title, sparkline, one line per event, the proposal."""
    if scan.problem is not None:
        return f"{scan.source}: {scan.problem}"
    lines = [
        f"{scan.source}: {scan.rows} points to step {scan.last_step}, {len(scan.events)} event{'s' * (len(scan.events) != 1)}"
    ]
    if scan.contents is not None:
        lines += [f"  {line}" for line in scan.contents.lines()]
    if scan.spark:
        lines += ["  " + sparkline([value for _, value in scan.spark]), "  " + marks(scan)]
    lines += [f"  {describe_event(event)}" for event in scan.events]
    if scan.proposal is not None:
        lines += [f"  {line}" for line in describe_proposal(scan.proposal).splitlines()]
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """The values as text bars, from the minimum to the 98th percentile; `✗` for a value that is not finite."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return "✗" * len(values)
    low, high = finite[0], finite[int(0.98 * (len(finite) - 1))]
    span = (high - low) or 1.0
    bars = (
        BARS[min(7, max(0, int(8 * (value - low) / span)))] if math.isfinite(value) else "✗" for value in values
    )
    return "".join(bars)


def marks(scan: Scan) -> str:
    """A line with `^` under the start of each event of tier warn or propose, and `'` for notices."""
    row_of = [row for row, _ in scan.spark]
    out = [" "] * len(row_of)
    for event in scan.events:
        at = max((index for index, row in enumerate(row_of) if row <= (event.onset_row or 0)), default=0)
        out[at] = "^" if event.tier is not Tier.NOTICE else (out[at] if out[at] == "^" else "'")
    return "".join(out).rstrip()


# --- chronicle propose, an old name: what `chronicle spikes` says last


def propose_rollback(at: Forcing = FORCING) -> CommandResult:
    """Propose a checkpoint to go back to, with reasons.

    Changes nothing.

    Example: chronicle propose --run tr-190-80b
    """
    settings = at.existing()
    read_sound_journal(settings.paths, at.force)
    scan = scan_run(settings.paths, settings.checkpoints_dir, options=at.flags())
    if scan.proposal is None:
        text = f"nothing in run `{settings.run}` calls for a rollback ({scan.rows} points to step {scan.last_step})"
        return CommandResult(text=text, data={"proposal": None, "run": settings.run})
    return CommandResult(text=describe_proposal(scan.proposal), data={"proposal": scan.proposal.to_json(), "run": settings.run})


def describe_proposal(proposal: Proposal) -> str:
    """The proposal as text: reasons, target, cost, alternatives, budgets, command."""
    lines = [f"proposal: {reason}" for reason in proposal.reasons]
    if proposal.target_step is not None:
        lines.append(f"to: {_place(proposal.target_step, proposal.cost_steps, proposal.cost_hours)}")
    lines += [f"or: {_place(other.step, other.cost_steps, other.cost_hours)}" for other in proposal.alternatives]
    if proposal.target_step is not None or proposal.action is Action.STOP:
        lines.append(f"action: {proposal.action.value}")
    lines += [f"budget exceeded: {text}" for text in proposal.exhausted]
    lines += [f"by hand: {proposal.by_hand}"] if proposal.by_hand else []
    if proposal.command is not None:
        lines.append(proposal.command)
    return "\n".join(lines)


def _place(step: int, cost_steps: int | None, cost_hours: float | None) -> str:
    hours = f", {cost_hours:.1f} h" if cost_hours is not None else ""
    return f"step {step}, discards {cost_steps} steps{hours}"
