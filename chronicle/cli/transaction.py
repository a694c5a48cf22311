"""Shared by the commands that change checkpoints: show what is planned, ask, apply it, and say what was done."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chronicle import goback
from chronicle.cli.options import CommandResult
from chronicle.errors import ChronicleError, Declined, UsageProblem
from chronicle.goback.applying import plan_store, uninterrupted
from chronicle.goback.planning import WORTH_BYTES
from chronicle.journal.events import Quarantined, QuarantineUndone, events_of
from rollback.disk.content import ByteProgress
from rollback.errors import one_line
from rollback.plan.plan import Plan, format_plan

if TYPE_CHECKING:
    from rollback.transaction.in_store import StorePlan

WORTH_CHECKPOINTS = 20
UNDO = "undo it with `chronicle undo`"


def show_plan(plan: Plan, opened: goback.OpenedRun, written: Path | None = None) -> CommandResult:
    """The plan, of which nothing is done. `written`: the file that it was written into."""
    text, data, _ = _told(plan, opened)
    done = "nothing was changed"
    if written is not None:
        done = f"plan written to {written}; apply it with `chronicle rollback --plan`"
    return CommandResult(text=text, data=data, talk=(done,))


def apply_and_report(plan: Plan, opened: goback.OpenedRun, *, yes: bool) -> CommandResult:
    """Show the plan, ask on a terminal, apply it. Raises `UsageProblem` before any change when nobody can be asked."""
    text, data, change = _told(plan, opened)
    if change is None:
        is_done = not plan.changes_anything
        data = plan.to_json()
    else:
        is_done = not change.objects and change.before == change.after
    if is_done:
        return CommandResult(text=f"already at step {plan.step}: nothing to change", data=data | {"changed": False})
    agree("Apply this plan?", text, yes=yes)
    receipt = goback.apply(plan, opened, change)
    talk = [f"new journal: {opened.paths.journal_dir}"] if opened.is_new else []
    talk += [receipt.left_over] if receipt.left_over else []
    if change is not None:
        done = f"the next launch will load step {plan.step} from {change.target}"
        data = data | {"changed": True, "receipt": receipt.id}
    else:
        proved = goback.has_guard(plan, opened.journal)  # else nothing compares what the next launch loads
        done = f"the next launch will load step {plan.step}" if proved else f"step {plan.step} is ready for the next launch"
        data = {"changed": True, "receipt": receipt.id, "plan": data | {"digest": plan.digest}}
    return CommandResult(text=f"{text}\n\ndone: {done} ({receipt.id})", data=data, talk=(*talk, UNDO))


def _told(plan: Plan, opened: goback.OpenedRun) -> tuple[str, dict[str, Any], "StorePlan | None"]:
    """A plan as text and as JSON, and what it becomes in an object store."""
    guarded = goback.has_guard(plan, opened.journal)
    if opened.bucket is None:
        data = plan.to_json() | {"digest": plan.digest, "guarded": guarded}
        return format_plan(plan, guarded=guarded), data, None
    change = plan_store(plan, opened)
    told = replace(change.plan, notes=(*plan.notes, *change.lines()))
    text = format_plan(told, guarded=guarded).rpartition("\n")[0]  # without a digest: the new prefix is new each time
    return text, told.to_json() | {"store": change.to_json(), "guarded": guarded}, change


def agree(question: str, text: str, *, yes: bool) -> None:
    """Show `text` and ask; raises `UsageProblem` without a terminal and `Declined` when the answer is no."""
    if yes:
        return
    print(text, file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageProblem("no terminal to ask on: nothing was changed", "repeat with --yes to go on without asking")
    if not typer.confirm(question, err=True):
        raise Declined


def move_back(opened: goback.OpenedRun, wanted: str, *, yes: bool) -> CommandResult:
    """Move what one `verify --quarantine` moved away back to where it was; asks first.

    Raises `ChronicleError` when there is no such entry, `Refused` instead of overwriting a file.
    """
    from rollback.transaction import cleanup  # only where something comes back

    made_here = events_of(opened.journal.entries, Quarantined)
    found = [(entry, event) for entry, event in made_here if wanted.upper() in (entry.id, entry.id[-len(wanted) :])]
    if len(found) != 1:
        raise ChronicleError(f"{len(found)} quarantines are called `{wanted}`: expected one", "`chronicle log` lists them")
    made, event = found[0]
    root, moves = Path(event.root), cleanup.moves_from_json(list(event.moves))
    text = "\n".join(["strays to move back:", *(f"  {one_line(move.path)}" for move in moves)])
    agree("Move them back?", text, yes=yes)
    with uninterrupted():
        undone = QuarantineUndone(root=str(root))
        entry = opened.writer.write(undone, title=f"{len(moves)} strays moved back", refs=(made.id,))
        count = cleanup.restore(root, cleanup.quarantine_dir(root, made.id), moves)
        pointers = cleanup.pointers_from_json(event.pointers)
        cleanup.point_elsewhere(root, [pointer.reversed() for pointer in pointers])
    return CommandResult(text=f"{text}\n\ndone: {count} moved", data={"changed": True, "id": entry.id, "moved": count})


@contextmanager
def byte_progress(total_bytes: int, checkpoints: int = 1) -> Iterator[ByteProgress | None]:
    """A function that takes the number of bytes read, and moves a bar; None where no bar is shown."""
    if (total_bytes < WORTH_BYTES and checkpoints < WORTH_CHECKPOINTS) or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("verifying", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total_bytes)
        yield lambda count: bar.advance(task, count)
