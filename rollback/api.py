"""The functions of `rollback` for programs: verify, plan, apply, undo and recover, by path. `docs/library.md` shows them.

`apply`, `undo` and `recover` keep a directory of records beside the checkpoints directory, `<root>.rollback/`: a lock, the
originals of edited files, and `transactions.jsonl` with the intent and the receipt of each transaction. For a run that
`chronicle` records, use its commands instead: they keep these records in the run's journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    list_checkpoints,
    open_checkpoint,
    read_state,
    refuse_strays,
)
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.select import refuse_link, select_checkpoint
from rollback.checks.verify import check_names, refuse_unusable, verify_checkpoint
from rollback.disk.durable import REAL_DISK
from rollback.disk.lock import hold_lock
from rollback.errors import Finding, IntentOpen, UnreadableFile
from rollback.plan.plan import Plan
from rollback.plan.request import RollbackRequest
from rollback.transaction.apply import apply_plan, newer_checkpoints, plan_from_disk
from rollback.transaction.change import Receipt, Verb
from rollback.transaction.protocol import recover_change, remove_leftovers, undo_change

__all__ = ["apply", "plan_rollback", "recover", "undo", "verify"]

RECORD_VERSION = 1


def verify(checkpoint: Checkpoint | Path | str, *, full: bool = True) -> list[Finding]:
    """The findings about a checkpoint, worst first; it can be resumed from if none is an ERROR.

    `full` reads every byte and compares checksums. Raises `CheckpointNotFound` or `UnknownFormat`.
    """
    return verify_checkpoint(_opened(checkpoint), full=full)


def plan_rollback(
    root: Path | str,
    step: int,
    *,
    launch: int | None = None,
    lr_scale: float | None = None,
    lr: float | None = None,
    sets: Mapping[str, float | int] | None = None,
    keep_later: bool = False,
    full: bool = True,
    accept_unproved: str = "",
) -> Plan:
    """Plan to go back to the checkpoint of `step` in the directory `root`; changes nothing.

    `accept_unproved` is the reason for an LR edit although something else may set the LR of the next launch.

    `lr_scale` multiplies every LR, `lr` sets it, `sets` gives single fields a value. Later checkpoints are moved to
    `<root>/../abandoned/` unless `keep_later`. `launch` selects one of several checkpoints of the step; `full` verifies
    every byte of it first. Raises `CheckpointNotFound`, `AmbiguousStep`, `StrayFiles`, `Incomplete` or `PlanRefused`.
    """
    directory = Path(os.path.abspath(root))
    request = RollbackRequest(
        step=step, launch=launch, lr_scale=lr_scale, lr=lr, sets=dict(sets or {}), keep_later=keep_later,
        accept_unproved=accept_unproved,
    )
    listed = list_checkpoints(directory)
    chosen = select_checkpoint(listed, step, launch, directory)
    refuse_link(chosen)
    refuse_strays(chosen)
    refuse_unusable(chosen, check_names(chosen))
    refuse_unusable(chosen, verify_checkpoint(chosen, full=full))
    manifest = None if chosen.single_file else read_manifest(chosen.path)
    state = read_state(chosen)
    run = directory.name if manifest is None or manifest.run is None else manifest.run
    return plan_from_disk(request, chosen, listed, state, manifest, root=directory, run=run)


def apply(plan: Plan) -> Receipt:
    """Apply `plan`. After an interruption at any point, the old or the new state can be restored with `recover`.

    Raises `PlanRefused` when a file changed since the plan was made, `IntentOpen` when an earlier transaction is not
    finished, `Locked` when another process works on this root, another `Refused`, or `StoppedPartWay`.
    """
    with _locked(Path(plan.root)) as records:
        records.refuse_open()
        return apply_plan(plan, objects_dir=records.objects_dir, record=records.write)


def undo(root: Path | str) -> Receipt | None:
    """Undo the last rollback of `root` that is not undone yet, byte for byte; None when there is none.

    Checkpoints that were saved since are moved to `<root>/../abandoned/`. Raises as `apply`.
    """
    with _locked(Path(os.path.abspath(root))) as records:
        records.refuse_open()
        last = records.last_receipt()
        if last is None:
            return None
        newer = newer_checkpoints(last.data)
        return undo_change(last, newer=newer, objects_dir=records.objects_dir, record=records.write)


def recover(root: Path | str) -> Receipt | None:
    """Finish or revert an interrupted transaction on `root`.

    Returns the receipt when it was finished, None when it was reverted or nothing was open. Raises `Locked` or
    `StoppedPartWay`.
    """
    with _locked(Path(os.path.abspath(root))) as records:
        intent = records.open_intent()
        return None if intent is None else recover_change(intent.id, intent.data, record=records.write)


def _opened(checkpoint: Checkpoint | Path | str) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line of `transactions.jsonl`."""

    id: str
    kind: str
    data: Mapping[str, Any]

    @classmethod
    def from_json(cls, record: Any, where: str) -> _Entry:
        if not isinstance(record, dict) or record.get("v") != RECORD_VERSION:
            version = record.get("v") if isinstance(record, dict) else None
            raise UnreadableFile(f"{where} has version {version!r}: expected version {RECORD_VERSION}")
        return cls(id=record["id"], kind=record["kind"], data=record["data"])

    def to_json(self) -> dict[str, Any]:
        return {"v": RECORD_VERSION, "id": self.id, "kind": self.kind, "data": dict(self.data)}


class _Records:
    """The records of the transactions on one checkpoints directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "transactions.jsonl"
        self.objects_dir = directory / "objects"
        self.entries = self._read()

    def write(self, kind: str, data: Mapping[str, Any]) -> str:
        """Append an entry durably; returns its id."""
        entry = _Entry(id=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(4).hex()}", kind=kind, data=data)
        new = not self.path.exists()
        line = json.dumps(entry.to_json(), default=float).encode() + b"\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
                line = b"\n" + line  # a write was interrupted here; its line is ignored
            REAL_DISK.write_all(descriptor, line, self.path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            for directory in (self.directory, self.directory.parent):
                REAL_DISK.sync_directory(directory)
        self.entries.append(entry)
        return entry.id

    def open_intent(self) -> _Entry | None:
        """The intent that no receipt answers, or None."""
        closed = {entry.data.get("intent") for entry in self.entries}
        kinds = frozenset(verb.intent for verb in Verb)
        return next((entry for entry in self.entries if entry.kind in kinds and entry.id not in closed), None)

    def refuse_open(self) -> None:
        """Raise `IntentOpen` while a transaction is open."""
        intent = self.open_intent()
        if intent is not None:
            raise IntentOpen(
                f"a transaction on `{intent.data['root']}` is not finished ({intent.id})", "call `rollback.recover(root)`"
            )

    def last_receipt(self) -> Receipt | None:
        """The receipt of the last rollback that is not undone."""
        undone = {entry.data.get("undoes") for entry in self.entries if entry.kind == Verb.UNDO.receipt}
        done = [entry for entry in self.entries if entry.kind == Verb.ROLLBACK.receipt and entry.id not in undone]
        return Receipt(id=done[-1].id, data=done[-1].data) if done else None

    def closed(self) -> Sequence[str]:
        """Ids of the transactions that are over."""
        return [str(entry.data["intent"]) for entry in self.entries if entry.data.get("intent")]

    def _read(self) -> list[_Entry]:
        if not self.path.exists():
            return []
        entries = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a write that was cut short: nothing was done after it
            entries.append(_Entry.from_json(record, f"line {number} of `{self.path}`"))
        return entries


@contextmanager
def _locked(root: Path) -> Iterator[_Records]:
    directory = root.with_name(f"{root.name}.rollback")
    with hold_lock(directory / "lock"):
        records = _Records(directory)
        if records.open_intent() is None:
            remove_leftovers(root, records.closed())
        yield records
