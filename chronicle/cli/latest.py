"""`chronicle latest`: the newest checkpoint that a launch can resume from, for people and for scripts.

Newest is by the lineage, not by the number alone: a checkpoint of a side try, whose launch the present weights do not descend
from, is left out, and so are abandoned ones. Of the rest, from the highest step down, the first one counts that verification
passes: names, structure and counters, or every byte with `--verified`. What was passed over is said, with why.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from chronicle.checkpoints import CheckpointVerdict, find_verdict, record_verdicts, stamp_or_none, with_launches
from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    JsonOption,
    LogsOption,
    RunOption,
    settings_with_checkpoints,
)
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, compute_lineage, read_journal
from chronicle.journal.lineage import Lineage
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Finding, RollbackError, Severity, one_line

__all__ = ["PassedOver", "find_latest", "latest"]


class PassedOver(NamedTuple):
    """A newer checkpoint that is not the latest one, and why."""

    checkpoint: Checkpoint
    reason: str


class Latest(NamedTuple):
    """The newest whole checkpoint, or None; whether every byte of it was read; and what was passed over, newest first."""

    checkpoint: Checkpoint | None
    verified: bool
    passed_over: tuple[PassedOver, ...]


def latest(
    verified: Annotated[
        bool, typer.Option("--verified", help="Only one of which every byte was read; reads it if needed.")
    ] = False,
    print_path: Annotated[bool, typer.Option("--print-path", help="Print the path alone, for scripts.")] = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Show the newest whole checkpoint (exit 1 if there is none).

    A checkpoint that is incomplete, damaged, spoilt or of a side try is passed over, with the reason.

    Example: python train.py --resume "$(chronicle latest --verified --print-path)"
    """
    settings = settings_with_checkpoints(run, logs, checkpoints, stores=True)
    root = settings.need_checkpoints()
    entries = read_journal(settings.paths).entries if settings.paths.journal_dir.is_dir() else ()
    found = find_latest(root, entries, full=verified, settings=settings)
    said = tuple(f"passed over: {_name(one.checkpoint)}: {one_line(one.reason)}" for one in found.passed_over)
    if found.checkpoint is None:
        what = "every byte of which can be verified" if verified else "that is whole"
        first = f"; {said[0]}" if said else ""
        raise ChronicleError(f"no checkpoint {what} in `{root}`{first}", "`chronicle verify --all` says what is wrong")
    depth = "every byte read" if found.verified else "names, structure and counters; `--verified` reads every byte"
    path = str(found.checkpoint.path)
    text = path if print_path else f"{_name(found.checkpoint)} · verified ({depth})\n{one_line(path)}"
    return CommandResult(text=text, data=_data(found), talk=said)


def find_latest(root: Path, entries: Sequence[Entry], *, full: bool, settings: Settings | None = None) -> Latest:
    """The newest checkpoint below `root` that passes; with `full` every byte was read, now or earlier.

    With `settings` a verification that is made now is recorded in the journal. Raises `OSError` or `RollbackError` when the
    directory cannot be listed.
    """
    lineage = compute_lineage(entries)
    listed = with_launches(list_checkpoints(root, include_abandoned=False), entries)
    candidates = [one for one in listed if one.step is not None and one.abandoned is None]
    passed_over = []
    for one in sorted(candidates, key=lambda one: (one.step or 0, one.launch or 0), reverse=True):
        if elsewhere := _side_try(one, lineage):
            passed_over.append(PassedOver(one, elsewhere))
            continue
        verdict = find_verdict(one.path, entries)
        reason, was_read = _judge(one, verdict, full=full, settings=settings)
        if not reason:
            return Latest(one, was_read, tuple(passed_over))
        passed_over.append(PassedOver(one, reason))
    return Latest(None, False, tuple(passed_over))


def _side_try(one: Checkpoint, lineage: Lineage) -> str:
    """Why the present weights do not descend from it; "" where they do, or where that is not known."""
    step, stepped = one.step or 0, {span.number for span in lineage.launches if span.has_steps}
    if one.launch not in stepped or not lineage.kept or lineage.contains(one.launch, step):
        return ""
    if one.launch == lineage.head_launch and step > lineage.head_step:
        return ""  # saved after the last logged step
    owner = lineage.owner(step)
    if owner is None:
        return f"launch {one.launch} saved it, and the run is at step {lineage.head_step} of launch {lineage.head_launch}"
    return f"launch {one.launch} saved it, and step {step} of the run is that of launch {owner}"


def _judge(one: Checkpoint, verdict: CheckpointVerdict | None, *, full: bool, settings: Settings | None) -> tuple[str, bool]:
    """(why it does not count, "" if it does; whether every byte was read)."""
    if verdict is not None and not verdict.passes:
        check, path, message = verdict.errors[0] if verdict.errors else ("", "", "see `chronicle verify`")
        return f"{check} {path}: {message}", verdict.full
    if verdict is not None and verdict.sound:
        return "", True
    stamp = stamp_or_none(one.path)
    try:
        findings = verify_checkpoint(one, full=full)
    except (RollbackError, OSError) as problem:
        return f"it cannot be read: {problem}", False
    if full and settings is not None:
        record_verdicts(settings, [(one, stamp, findings)], full=True)
    error = next(_errors(findings), None)
    return ("", full) if error is None else (f"{error.check} {error.path}: {error.message}", full)


def _errors(findings: Sequence[Finding]) -> Iterator[Finding]:
    return (finding for finding in findings if finding.severity is Severity.ERROR)


def _name(one: Checkpoint) -> str:
    launch = "" if one.launch is None else f" (launch {one.launch})"
    return f"step {one.step}{launch} {one_line(one.path.name)}"


def _data(found: Latest) -> dict[str, object]:
    assert found.checkpoint is not None
    one = found.checkpoint
    return {
        "path": str(one.path),
        "step": one.step,
        "launch": one.launch,
        "format": one.format,
        "every_byte_read": found.verified,
        "passed_over": [
            {"path": str(other.path), "step": other.step, "launch": other.launch, "reason": reason}
            for other, reason in found.passed_over
        ],
    }
