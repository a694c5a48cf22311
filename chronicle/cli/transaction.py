"""The ground a rollback stands on: one writer, no live run, no unfinished transaction, a journal to record it in."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import JournalError
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.launch.admission import LaunchRefused, ensure_startable
from chronicle.paths import RunPaths
from chronicle.cli.history import closed_intents, find_open_intent
from chronicle.settings import Settings
from rollback.disk.durable import REAL_DISK
from rollback.errors import IntentOpen, RollbackError, RunAlive
from rollback.disk.lock import hold_lock
from rollback.transaction.protocol import remove_leftovers

__all__ = ["Ground", "open_ground"]



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
