"""Rollback, undo and recover where the checkpoints are in an object store; `rollback.transaction.in_store` says how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.checkpoints import with_launches
from chronicle.cli.options import CommandResult
from chronicle.cli.transaction import OpenedRun, agree, find_undoable, has_guard, open_run, uninterrupted
from chronicle.errors import Refusal
from chronicle.journal import Entry
from chronicle.journal.events import RollbackReceipt, find_open_transaction
from chronicle.settings import Settings, is_url
from rollback.checkpoint.listing import list_checkpoints, open_checkpoint, read_identity
from rollback.disk.remote import Bucket, accept_changes, local_path, open_bucket, refuse_changed, shown
from rollback.plan.plan import Plan, format_plan
from rollback.plan.request import RollbackRequest
from rollback.transaction.change import Receipt
from rollback.transaction.in_store import apply_in_store, plan_in_store, recover_in_store, undo_in_store

__all__ = ["recover_store", "rollback_store", "undo_store"]


def rollback_store(
    request: RollbackRequest, settings: Settings, make_plan: Callable[..., Plan], *, force: str | None, path: Path | None,
    verify: str, look: bool, yes: bool,
) -> CommandResult:  # fmt: skip
    """Go back in a store: plan by ranged reads with the command's own `make_plan`, copy under a new prefix, put the pointer."""
    with _opened(settings, force=force, writing=not look) as (opened, bucket):
        if path is not None and is_url(path):
            path = local_path(path)
        plan = make_plan(request, opened, path=path, verify=verify)
        return _go_back(plan, opened, bucket, look=look, yes=yes)


def _go_back(plan: Plan, opened: OpenedRun, bucket: Bucket, *, look: bool, yes: bool) -> CommandResult:
    chosen = open_checkpoint(Path(plan.source))
    listed = with_launches(list_checkpoints(opened.root, include_abandoned=False), opened.journal.entries)
    change = plan_in_store(plan, replace(chosen, step=plan.step), listed, bucket)
    refuse_changed()
    accept_changes()  # the pointer is to change; the objects are compared by their ETags
    told = replace(change.plan, notes=(*plan.notes, *change.lines()))
    guarded = has_guard(plan, opened.journal)
    text = format_plan(told, guarded=guarded).rpartition("\n")[0]  # without a digest: the new prefix is new each time
    data = told.to_json() | {"store": change.to_json(), "guarded": guarded}
    if look:
        return CommandResult(text=text, data=data, talk=("nothing was changed",))
    if not change.objects and change.before == change.after:
        return CommandResult(text=f"already at step {plan.step}: nothing to change", data=data | {"changed": False})
    agree("Apply this plan?", text, yes=yes)
    identity = read_identity(chosen)
    opened = replace(opened, identity=identity if identity.get("id") else {})
    contract = plan.contract("") | {"checkpoint": change.target, "stored": change.target, "identity": identity.get("id")}
    with uninterrupted():
        receipt = apply_in_store(
            change, bucket, objects_dir=opened.paths.objects_dir, record=opened.record,
            contract_path=opened.paths.contract_path, contract=contract,
        )  # fmt: skip
    lines = [text, "", f"done: the next launch will load step {plan.step} from {change.target} ({receipt.id})"]
    return CommandResult(
        text="\n".join(lines), data=data | {"changed": True, "receipt": receipt.id}, talk=("undo it with `chronicle undo`",)
    )


def undo_store(settings: Settings, wanted: str | None, *, force: str | None, yes: bool) -> CommandResult:
    """Put the pointer of the last rollback back."""
    with _opened(settings, force=force) as (opened, bucket):
        entry = find_undoable(opened.journal.entries, wanted)
        if entry is None:
            return CommandResult(text="no rollback to undo", data={"changed": False})
        store = _of_store(entry, opened)
        text = "\n".join([
            f"undo of {entry.title or 'rollback'} ({entry.id})", "",
            f"  pointer     {store['pointer']}", f"  remove      {store['folder']}  (the copy that the rollback made)",
        ])  # fmt: skip
        agree("Undo it?", text, yes=yes)
        with uninterrupted():
            receipt = undo_in_store(
                Receipt(id=entry.id, data=entry.data), bucket, objects_dir=opened.paths.objects_dir,
                record=opened.finishing(entry).record, contract_path=opened.paths.contract_path,
            )  # fmt: skip
    talk = (receipt.left_over,) if receipt.left_over else ()
    return CommandResult(text=f"{text}\n\ndone ({receipt.id})", data={"changed": True, "receipt": receipt.id}, talk=talk)


def recover_store(settings: Settings, *, force: str | None) -> CommandResult:
    """Finish or revert what was interrupted."""
    with _opened(settings, force=force, recovering=True) as (opened, bucket):
        intent = find_open_transaction(opened.journal.entries)
        if intent is None:
            return CommandResult(text="nothing to recover", data={"recovered": None})
        _of_store(intent, opened)
        with uninterrupted():
            receipt = recover_in_store(
                intent.id, intent.kind, intent.data, bucket, objects_dir=opened.paths.objects_dir,
                record=opened.finishing(intent).record,
            )  # fmt: skip
    outcome = "reverted: nothing was changed" if receipt is None else f"finished ({receipt.id})"
    data = {"recovered": intent.id, "outcome": "reverted" if receipt is None else "finished"}
    return CommandResult(text=f"{intent.kind.partition('.')[0]} {intent.id} {outcome}", data=data)


@contextmanager
def _opened(
    settings: Settings, *, force: str | None, writing: bool = True, recovering: bool = False
) -> Iterator[tuple[OpenedRun, Bucket]]:
    """The run, whose journal is on a disk and records URLs, and whose root is the view of the store; and the bucket."""
    bucket = open_bucket(str(settings.checkpoints_url))
    with open_run(settings, force=force, writing=writing, recovering=recovering) as opened:
        yield replace(opened, root=local_path(str(settings.checkpoints_url))), bucket


def _of_store(entry: Entry, opened: OpenedRun) -> Mapping[str, Any]:
    """What an entry says of its store. Raises `Refusal` where it is of another place."""
    store, root, own = RollbackReceipt.view(entry.data).store, str(entry.data.get("root") or ""), shown(str(opened.root))
    if not store or root != own:
        raise Refusal(
            f"{entry.kind.partition('.')[0]} {entry.id} worked in `{root}`; the checkpoints named now are `{own}`",
            "name the right place with --checkpoints",
        )
    return store
