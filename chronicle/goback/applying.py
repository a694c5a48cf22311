"""Apply a plan, undo the last rollback, end an interrupted one: on a disk, or in an object store where the run has one."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.checkpoints import with_launches
from chronicle.errors import Refusal
from chronicle.goback.opened import OpenedRun
from chronicle.journal import Entry
from chronicle.journal.events import RollbackReceipt, RunFork
from chronicle.journal.events import read as read_event
from chronicle.journal.place import is_same_directory
from chronicle.settings import is_url
from rollback.checkpoint.identity import read_identity
from rollback.checkpoint.listing import list_checkpoints, open_checkpoint
from rollback.plan.plan import Plan
from rollback.transaction.apply import apply_plan
from rollback.transaction.change import Receipt
from rollback.transaction.protocol import recover_change, undo_change

if TYPE_CHECKING:
    from rollback.transaction.in_store import StorePlan


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Block Ctrl-C during a transaction: it takes milliseconds, and an interrupted one would need `recover`."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def plan_store(plan: Plan, opened: OpenedRun) -> "StorePlan":
    """What a plan becomes in the run's object store; its objects must be those that were read."""
    from rollback.disk.remote import accept_changes, refuse_changed
    from rollback.transaction.in_store import plan_in_store

    chosen = open_checkpoint(Path(plan.source))
    listed = with_launches(list_checkpoints(opened.root, include_abandoned=False), opened.journal.entries)
    change = plan_in_store(plan, replace(chosen, step=plan.step), listed, opened.bucket)
    refuse_changed()
    accept_changes()  # the pointer is to change; the objects are compared by their ETags
    return change


def apply(plan: Plan, opened: OpenedRun, change: "StorePlan | None" = None) -> Receipt:
    """Do what the plan says, and record it. `change`: of `plan_store`, where the checkpoints are in a store."""
    if change is not None:
        return _apply_in_store(plan, opened, change)
    with uninterrupted():
        opened = opened.naming(Path(plan.source))
        return apply_plan(
            plan,
            objects_dir=opened.paths.objects_dir,
            record=opened.record,
            contract_path=opened.paths.contract_path,
            contract_form=opened.contract_form,
        )


def _apply_in_store(plan: Plan, opened: OpenedRun, change: "StorePlan") -> Receipt:
    from rollback.transaction.in_store import apply_in_store

    identity = read_identity(open_checkpoint(Path(plan.source)))
    carried = identity.get("id")
    opened = replace(opened, identity=identity if carried else {})
    contract = plan.contract("") | {"checkpoint": change.target, "stored": change.target, "identity": carried}
    with uninterrupted():
        return apply_in_store(
            change,
            opened.bucket,
            objects_dir=opened.paths.objects_dir,
            record=opened.record,
            contract_path=opened.paths.contract_path,
            contract=contract,
        )


def undo(opened: OpenedRun, entry: Entry, newer: tuple[str, ...] = ()) -> Receipt:
    """Take back the rollback of this receipt. `newer`: what was saved since, which is moved aside."""
    made, named = Receipt(id=entry.id, data=entry.data), opened.finishing(entry)
    objects = opened.paths.objects_dir
    with uninterrupted():
        if opened.bucket is None:
            return undo_change(made, newer=newer, objects_dir=objects, record=named.record)
        from rollback.transaction.in_store import undo_in_store

        contract = opened.paths.contract_path
        return undo_in_store(made, opened.bucket, objects_dir=objects, record=named.record, contract_path=contract)


def recover(opened: OpenedRun, intent: Entry) -> Receipt | None:
    """End the interrupted transaction of this intent: its receipt where it was finished, None where it was reverted."""
    if opened.bucket is None:
        _refuse_unknown_place(opened, intent)
        _refuse_shared(opened, intent)
    else:
        _store_of(opened, intent)
    named = opened.finishing(intent)
    with uninterrupted():
        if opened.bucket is None:
            return recover_change(intent.id, intent.data, record=named.record)
        from rollback.transaction.in_store import recover_in_store

        objects = opened.paths.objects_dir
        return recover_in_store(
            intent.id, intent.kind, intent.data, opened.bucket, objects_dir=objects, record=named.record
        )


def refuse_elsewhere(opened: OpenedRun, receipt: Entry) -> None:
    """Raise `Refusal` when a receipt is of another directory or store than this run's, or of a file that a fork shares."""
    if opened.bucket is not None:
        _store_of(opened, receipt)
        return
    recorded, own = RollbackReceipt.of(receipt).root, str(opened.root)
    if recorded and not is_same_directory(recorded, own):
        raise Refusal(
            f"rollback {receipt.id} was made in `{recorded}`; the checkpoints of this run are `{own}`: "
            "nothing outside the run is changed",
            "name the right directory with --checkpoints, or undo it in the run that it belongs to",
        )
    _refuse_shared(opened, receipt)


def _refuse_unknown_place(opened: OpenedRun, intent: Entry) -> None:
    """Raise `Refusal` when it is not known where an open transaction worked: `run.json` is gone."""
    root = str(intent.data.get("root") or "")
    if is_url(root):
        raise Refusal(f"transaction {intent.id} worked in `{root}`", f"name it: `chronicle recover --checkpoints {root}`")
    if not Path(root).is_absolute():
        raise Refusal(
            f"transaction {intent.id} worked in `{root}`, and no `run.json` says where that is: {opened.paths.run_dir}",
            "restore `run.json` from a backup",
        )


def _store_of(opened: OpenedRun, entry: Entry) -> Mapping[str, Any]:
    """What an entry says of its store. Raises `Refusal` where it is of another place."""
    from rollback.disk.remote import shown

    store, root, own = RollbackReceipt.view(entry.data).store, str(entry.data.get("root") or ""), shown(str(opened.root))
    if not store or root != own:
        raise Refusal(
            f"{entry.kind.partition('.')[0]} {entry.id} worked in `{root}`; the checkpoints named now are `{own}`",
            "name the right place with --checkpoints",
        )
    return store


def _refuse_shared(opened: OpenedRun, entry: Entry) -> None:
    """Raise `Refusal` when a transaction of the run that this one was copied from changed a file that both share."""
    if not _was_forked_since(opened, entry):
        return
    configs = [str(config["path"]) for config in entry.data.get("configs") or ()]
    for path in (*configs, *(str(path) for path in entry.data.get("config_paths") or ())):
        if opened.anchors.store(path) == path:
            raise Refusal(
                f"{entry.kind.partition('.')[0]} {entry.id} changed `{path}`, which is outside this fork: "
                f"expected a file of its own below `{opened.anchors.run}` or `{opened.root}`",
                "change the file in the run that this one was copied from; nothing was changed here",
            )


def _was_forked_since(opened: OpenedRun, entry: Entry) -> bool:
    """Whether a person declared, after this entry, that the directory is a copy."""
    entries = opened.journal.entries
    later = map(read_event, entries[entries.index(entry) + 1 :])
    return any(isinstance(event, RunFork) and event.copied for event in later)
