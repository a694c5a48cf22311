"""`chronicle prune` deletes abandoned checkpoints, and originals of edited files, that no undo needs."""

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path

from chronicle.checkpoints import find_verdict
from chronicle.cli.options import CHANGING, Changing, CommandResult
from chronicle.cli.transaction import agree
from chronicle.goback import OpenedRun, find_undoable, open_run
from chronicle.goback.applying import uninterrupted
from chronicle.journal import Entry
from chronicle.journal.events import EntryKind, Pruned, RollbackReceipt
from chronicle.story.plain import format_size
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.verify import passes, verify_checkpoint
from rollback.transaction.change import originals_of
from rollback.transaction.cleanup import apply_prune, plan_prune


def prune(at: Changing = CHANGING) -> CommandResult:
    """Delete what rollbacks moved aside and no undo needs.

    Two verified checkpoints remain at least, and what the undo of the last rollback needs.

    Example: chronicle prune
    """
    settings = at.settings()
    settings.refuse_stores()
    with open_run(settings, force=at.force) as opened:
        root = settings.need_checkpoints()
        found = list_checkpoints(root)
        undoable = find_undoable(opened.journal.entries)
        pinned = set() if undoable is None else {str(RollbackReceipt.of(undoable).intent)}
        plan = plan_prune(found, _verified(found, opened.journal.entries), pinned)
        objects = _unneeded_objects(opened)
        data = {
            "changed": bool(plan.delete or objects),
            "deleted": [str(c.path) for c in plan.delete],
            "kept": [{"path": str(c.path), "reason": reason} for c, reason in plan.kept],
            "objects": [path.name for path in objects],
            "bytes": plan.size_bytes,
            "root": str(opened.root),
        }
        kept = [f"{c.path}  ({reason})" for c, reason in plan.kept]
        if not data["changed"]:
            return CommandResult(lines=["nothing to prune", *(f"  kept  {one}" for one in kept)], data=data)
        lines = [f"prune: {len(plan.delete)} abandoned checkpoints, {format_size(plan.size_bytes)}", ""]
        lines += [f"  delete  {c.path}  (step {c.step}, {format_size(c.size_bytes)})" for c in plan.delete]
        lines += [f"  keep    {one}" for one in kept]
        lines += [f"  delete  {len(objects)} originals of rollbacks that were undone"] if objects else []
        agree("Delete them permanently?", lines, yes=at.yes)
        with uninterrupted():
            data |= {} if at.force is None else {"force": at.force, "overrode": list(opened.overrode)}
            title = f"{len(plan.delete)} abandoned checkpoints deleted"
            entry = opened.writer.write(Pruned.from_json(data), title=title)
            apply_prune(plan, objects, parent=opened.root.parent, id_=entry.id)
    return CommandResult(lines=[*lines, "", f"done ({entry.id})"], data=data)


def _verified(found: Sequence[Checkpoint], entries: Sequence[Entry]) -> set[Path]:
    """Checkpoints that pass a quick verification and that no full `chronicle verify` found unsound."""
    good = set()
    for one in found:
        verdict = find_verdict(one.path, entries)
        if (verdict is None or verdict.passes) and passes(verify_checkpoint(one)):
            good.add(one.path)
    return good


def _unneeded_objects(opened: OpenedRun) -> list[Path]:
    """Originals of rollbacks that were undone and that no other entry refers to."""
    undone = {ref for entry in opened.journal.of_kind(EntryKind.UNDO_RECEIPT) for ref in entry.refs}
    past: set[str] = set()
    others = ""
    for entry in opened.journal.entries:
        if entry.kind != EntryKind.ROLLBACK_RECEIPT or entry.id not in undone:
            others += jsonlib.dumps(entry.data, default=str)
        elif "files" in entry.data:
            past |= set(originals_of(entry.data))
    paths = [opened.paths.object_path(sha256) for sha256 in sorted(past) if sha256 not in others]
    return [path for path in paths if path.is_file()]
