"""A transaction on a run's checkpoints: the lock, the checks before it, its journal entries, and asking the user.

Used by every command that changes checkpoints. The edit itself is in `rollback.transaction`.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import typer

from chronicle.cli.options import CommandResult
from chronicle.errors import ChronicleError, JournalError, UsageProblem
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.launch.admission import LaunchRefused, ensure_startable
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.disk.durable import REAL_DISK
from rollback.disk.lock import hold_lock
from rollback.errors import IntentOpen, RollbackError, RunAlive
from rollback.plan.plan import Plan
from rollback.plan.text import format_plan
from rollback.transaction.apply import apply_plan
from rollback.transaction.protocol import remove_leftovers

__all__ = [
    "Ground",
    "agree",
    "carry_out",
    "closed_intents",
    "find_open_intent",
    "find_undoable",
    "open_ground",
    "uninterrupted",
    "with_launches",
]

@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a transaction needs of the run: where things go, what was, and how to say what is."""

    settings: Settings
    paths: RunPaths
    root: Path
    journal: Journal
    writer: JournalWriter
    force: str | None
    is_new: bool  # the journal did not exist before

    def record(self, kind: str, data: dict[str, Any]) -> str:
        """Append a transaction's entry durably; returns its id. Raises `RollbackError` when it is not on disk."""
        step, launch = data.get("step"), data.get("launch")
        refs = tuple(str(data[key]) for key in ("undoes", "intent") if data.get(key))
        if self.force is not None and kind.endswith(".intent"):
            data = data | {"force": self.force}
        try:
            fresh = not self.paths.journal_dir.is_dir()
            entry = self.writer.append(kind, step=step, launch=launch, title=_title(kind, data), refs=refs, data=data)
            if fresh:
                _sync_upwards(self.paths.journal_dir)
        except JournalError as problem:
            raise RollbackError(problem.message, problem.remedy) from problem
        return entry.id


@contextmanager
def open_ground(
    settings: Settings, *, force: str | None = None, recovering: bool = False, writing: bool = True
) -> Iterator[Ground]:
    """Hold the run's rollback lock for the duration of a block.

    Raises `RunAlive`, `IntentOpen` (unless `recovering`), `Locked`: nothing was changed. `writing` False looks only:
    it takes no lock and creates nothing.
    """
    paths = settings.paths
    if not writing:
        journal = _read_whole(paths)
        intent = find_open_intent(journal.entries)
        if intent is not None:
            raise unfinished(intent)
        yield _ground(settings, journal, force)
        return
    is_new = not paths.journal_dir.is_dir()
    paths.run_dir.mkdir(parents=True, exist_ok=True)
    with hold_lock(paths.lock_path):
        journal = _read_whole(paths)
        intent = find_open_intent(journal.entries)
        if intent is not None and not recovering:
            raise unfinished(intent)
        if force is None:
            _refuse_alive(paths, journal, recovering)
        ground = _ground(settings, journal, force, is_new=is_new)
        try:
            for root in _roots(journal) if intent is None else ():
                remove_leftovers(root, closed_intents(journal.entries))
            yield ground
        finally:
            ground.writer.close()


def _read_whole(paths: RunPaths) -> Journal:
    """The journal; nothing is decided on a part of it, an intent could stand in what cannot be read."""
    journal = read_journal(paths)
    for problem in journal.problems:
        if problem.check == "unreadable":
            raise JournalError(
                f"`{problem.path}` cannot be read: {problem.message}; what was begun or done cannot be known without it",
                "make the journal readable, then repeat the command",
            )
    return journal


def unfinished(intent: Entry) -> IntentOpen:
    """The refusal that everything but `recover` meets while a transaction is open."""
    verb = intent.kind.partition(".")[0]
    step = "" if intent.step is None else f" to step {intent.step}"
    return IntentOpen(
        f"{verb}{step} of {intent.ts[:19]} was begun and not finished ({intent.id})",
        "finish or revert it with `chronicle recover`",
    )


def _ground(settings: Settings, journal: Journal, force: str | None, *, is_new: bool = False) -> Ground:
    return Ground(
        settings=settings,
        paths=settings.paths,
        root=Path(os.path.abspath(settings.checkpoints_dir or settings.logs_dir.parent / "checkpoints")),
        journal=journal,
        writer=JournalWriter(settings.paths),
        force=force,
        is_new=is_new,
    )


def _roots(journal: Journal) -> set[Path]:
    """Every directory that a transaction of this run worked in."""
    return {Path(entry.data["root"]) for entry in journal.entries if isinstance(entry.data.get("root"), str)}


def _refuse_alive(paths: RunPaths, journal: Journal, recovering: bool) -> None:
    if recovering:
        return
    try:
        ensure_startable(paths, journal, now=time.time())
    except LaunchRefused as problem:
        raise RunAlive(problem.message, problem.remedy) from problem


def _sync_upwards(directory: Path) -> None:
    """The journal's own directories are new: bring their names to disk with the first entry in them."""
    for path in (directory, directory.parent, directory.parent.parent):
        REAL_DISK.sync_directory(path)


def _title(kind: str, data: dict[str, Any]) -> str:
    step = data.get("step")
    to = "" if step is None else f" to step {step}"
    ratio = data.get("lr_ratio")
    scaled = f", LR × {ratio:g}" if isinstance(ratio, float) and ratio != 1.0 else ""
    return {
        "rollback.intent": f"rollback{to} begun",
        "rollback.receipt": f"rollback{to}{scaled}",
        "undo.intent": f"undo of the rollback{to} begun",
        "undo.receipt": f"rollback{to} undone",
        "recover.receipt": f"unfinished transaction {data.get('outcome', 'closed')}",
    }.get(kind, kind)


# --- What the journal says about earlier transactions

INTENTS = ("rollback.intent", "undo.intent")
RECEIPTS = ("rollback.receipt", "undo.receipt", "recover.receipt")


def find_open_intent(entries: Iterable[Entry]) -> Entry | None:
    """The transaction that was begun and neither finished nor reverted; there is at most one."""
    waiting: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind in INTENTS:
            waiting[entry.id] = entry
        elif entry.kind in RECEIPTS:
            waiting.pop(str(entry.data.get("intent")), None)
    return next(iter(waiting.values()), None)


def closed_intents(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Ids of the transactions that are over; a workspace of theirs may still lie about."""
    return tuple(
        entry.id if entry.kind == "prune" else str(entry.data.get("intent"))
        for entry in entries
        if entry.kind in (*RECEIPTS, "prune")
    )


def find_undoable(entries: Sequence[Entry], wanted: str | None = None) -> Entry | None:
    """The receipt of the last rollback that still stands, or `None`; a named one must be that one.

    Raises `ChronicleError` when another rollback was made on top of the one that is named.
    """
    undone = {ref for entry in entries if entry.kind == "undo.receipt" for ref in entry.refs}
    standing = [entry for entry in entries if entry.kind == "rollback.receipt" and entry.id not in undone]
    last = standing[-1] if standing else None
    if wanted is None:
        return last
    named = [entry for entry in standing if entry.id.endswith(wanted.upper()) or entry.id.startswith(wanted.upper())]
    if not named:
        raise ChronicleError(f"no rollback `{wanted}` that still stands", "`chronicle log` lists the rollbacks")
    if last is not None and named[-1].id != last.id:
        raise ChronicleError(
            f"rollback {last.id} was made on top of {named[-1].id}: undo them in reverse order",
            "`chronicle undo` takes back the last one",
        )
    return last


def with_launches(checkpoints: Iterable[Checkpoint], entries: Iterable[Entry]) -> list[Checkpoint]:
    """Checkpoints with the launch that saved them, from the journal where their manifest does not say it."""
    present: dict[str, int] = {}  # name in the root -> launch that saved it last
    abandoned: dict[tuple[str, str], int] = {}
    for entry in entries:
        path = entry.data.get("path")
        if entry.kind == "checkpoint" and entry.launch is not None and isinstance(path, str):
            present[_entry_name(path)] = entry.launch
        elif entry.kind in ("rollback.receipt", "undo.receipt"):
            for name in entry.data.get("abandoned") or ():
                if name in present:
                    abandoned[str(entry.data.get("intent")), name] = present.pop(name)
            for name in entry.data.get("returned") or ():
                launch = abandoned.get((str(entry.data.get("undoes_intent")), name))
                if launch is not None:
                    present[name] = launch
    return [_with_launch(checkpoint, present, abandoned) for checkpoint in checkpoints]


def _with_launch(checkpoint: Checkpoint, present: dict[str, int], abandoned: dict[tuple[str, str], int]) -> Checkpoint:
    if checkpoint.launch is not None:
        return checkpoint
    name = checkpoint.path.name
    launch = present.get(name) if checkpoint.abandoned is None else abandoned.get((checkpoint.abandoned, name))
    return checkpoint if launch is None else replace(checkpoint, launch=launch)


def _entry_name(path: str) -> str:
    """`…/opt_step-500/accelerator_state` and `…/opt_step-500` are the same checkpoint."""
    pure = PurePath(path)
    return pure.parent.name if pure.name == "accelerator_state" else pure.name


# --- Show a plan, ask, apply it


def carry_out(plan: Plan, ground: Ground, *, yes: bool) -> CommandResult:
    """Show the plan, ask on a terminal, apply it. Raises `UsageProblem` when nobody can be asked: nothing changed."""
    text = format_plan(plan)
    if not plan.changes_anything:
        done = f"already at step {plan.step}: nothing to change"
        return CommandResult(text=done, data=plan.to_json() | {"changed": False})
    agree("Carry out this plan?", text, yes=yes)
    with uninterrupted():
        receipt = apply_plan(
            plan,
            objects_dir=ground.paths.objects_dir,
            record=ground.record,
            contract_path=ground.paths.contract_path,
        )
    talk = [f"new journal: {ground.paths.journal_dir}"] if ground.is_new else []
    talk += [receipt.left_over] if receipt.left_over else []
    talk.append("take it back with `chronicle undo`")
    lines = [text, "", f"done: step {plan.step} is what the next launch will load ({receipt.id})"]
    data = {"changed": True, "receipt": receipt.id, "plan": plan.to_json() | {"digest": plan.digest}}
    return CommandResult(text="\n".join(lines), data=data, talk=tuple(talk))


def agree(question: str, text: str, *, yes: bool) -> None:
    """Ask a person who has seen `text`; raises `UsageProblem` without a terminal, `typer.Abort` on a no."""
    if yes:
        return
    print(text, file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageProblem("no terminal to ask on, nothing was changed", "say --yes to carry it out")
    typer.confirm(question, abort=True, err=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a transaction is over: it takes milliseconds, and half of it would need `recover`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
