"""Views over the journal that rollbacks need: open intents, what can be undone, which launch saved which checkpoint.

Pure over entries and listed checkpoints.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

from chronicle.errors import ChronicleError
from chronicle.journal import Entry
from rollback.checkpoint.layout import Checkpoint

__all__ = ["closed_intents", "find_open_intent", "find_undoable", "with_launches"]

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
