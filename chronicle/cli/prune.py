"""`chronicle prune`: delete abandoned checkpoints, and originals of edited files, that no undo needs."""

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

from chronicle.checkpoints import CheckpointVerdict, find_verdict
from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    ForceOption,
    JsonOption,
    LogsOption,
    RunOption,
    YesOption,
    settings_with_checkpoints,
)
from chronicle.cli.transaction import OpenedRun, agree, find_undoable, open_run, uninterrupted
from chronicle.journal import Entry
from chronicle.journal.events import EntryKind, Pruned, RollbackReceipt
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.verify import passes, verify_checkpoint
from rollback.transaction.change import originals_of
from rollback.transaction.cleanup import PrunePlan, apply_prune, plan_prune

__all__ = ["prune"]

GB = 10**9


def prune(
    force: ForceOption = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Delete abandoned checkpoints that no undo needs.

    It keeps the checkpoints that the undo of the last rollback needs, and enough others
    that two verified ones remain.

    Example: chronicle prune
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    with open_run(settings, force=force) as opened:
        root = settings.need_checkpoints()
        found = list_checkpoints(root)
        undoable = find_undoable(opened.journal.entries)
        pinned = set() if undoable is None else {str(RollbackReceipt.of(undoable).intent)}
        plan = plan_prune(found, _verified(found, opened.journal.entries), pinned)
        objects = _unneeded_objects(opened)
        if not plan.delete and not objects:
            kept = "".join(f"\n  kept  {c.path}  ({reason})" for c, reason in plan.kept)
            return CommandResult(
                text=f"nothing to prune{kept}", data=_data(plan, objects, str(opened.root), done=False)
            )
        text = _text(plan, objects)
        agree("Delete them permanently?", text, yes=yes)
        with uninterrupted():
            forced = {} if force is None else {"force": force, "overrode": list(opened.overrode)}
            data = _data(plan, objects, str(opened.root), done=True) | forced
            entry = opened.writer.write(
                Pruned.from_json(data), title=f"{len(plan.delete)} abandoned checkpoints deleted"
            )
            apply_prune(plan, objects, parent=opened.root.parent, id_=entry.id)
    return CommandResult(text=f"{text}\n\ndone ({entry.id})", data=data)


def _verified(found: Sequence[Checkpoint], entries: Sequence[Entry]) -> set[Path]:
    """Checkpoints that pass a quick verification and that no full `chronicle verify` found unsound."""
    verdicts = {c.path: find_verdict(c.path, entries) for c in found}
    return {c.path for c in found if _passed(verdicts[c.path]) and passes(verify_checkpoint(c))}


def _passed(verdict: CheckpointVerdict | None) -> bool:
    return verdict is None or verdict.passes


def _unneeded_objects(opened: OpenedRun) -> list[Path]:
    """Originals of rollbacks that were undone and that no other entry refers to."""
    undone = {ref for entry in opened.journal.of_kind(EntryKind.UNDO_RECEIPT) for ref in entry.refs}
    past = {
        sha256
        for entry in opened.journal.of_kind(EntryKind.ROLLBACK_RECEIPT)
        if entry.id in undone and "files" in entry.data
        for sha256 in originals_of(entry.data)
    }
    others = "".join(
        jsonlib.dumps(entry.data, default=str)
        for entry in opened.journal.entries
        if not (entry.kind == EntryKind.ROLLBACK_RECEIPT and entry.id in undone)
    )
    paths = [opened.paths.object_path(sha256) for sha256 in sorted(past) if sha256 not in others]
    return [path for path in paths if path.is_file()]


def _text(plan: PrunePlan, objects: Sequence[Path]) -> str:
    lines = [f"prune: {len(plan.delete)} abandoned checkpoints, {plan.size_bytes / GB:.2f} GB", ""]
    lines += [f"  delete  {c.path}  (step {c.step}, {c.size_bytes / GB:.2f} GB)" for c in plan.delete]
    lines += [f"  keep    {c.path}  ({reason})" for c, reason in plan.kept]
    if objects:
        lines.append(f"  delete  {len(objects)} originals of rollbacks that were undone")
    return "\n".join(lines)


def _data(plan: PrunePlan, objects: Sequence[Path], root: str, *, done: bool) -> dict[str, object]:
    return {
        "changed": done,
        "deleted": [str(c.path) for c in plan.delete],
        "kept": [{"path": str(c.path), "reason": reason} for c, reason in plan.kept],
        "objects": [path.name for path in objects],
        "bytes": plan.size_bytes,
        "root": root,
    }
