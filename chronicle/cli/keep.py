"""`chronicle keep` sets checkpoints aside for which a byte budget has no room; `--prune` deletes what was set aside.

`keep` chooses by `rollback.plan.retention`: what stays is what a rollback would most likely need. It renames the others to
`<checkpoints>/../abandoned/<id>/`, where no loader looks, and `keep --restore` brings them back. `prune` deletes abandoned
checkpoints, and originals of edited files, that no undo needs.
"""

import json as jsonlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from chronicle.checkpoints import find_verdict
from chronicle.cli.options import CHANGING, Changing, CommandResult
from chronicle.cli.transaction import agree, move_back
from chronicle.errors import Refusal, UsageProblem
from chronicle.goback import OpenedRun, find_undoable, open_run
from chronicle.goback.applying import uninterrupted
from chronicle.journal import Entry, Journal
from chronicle.journal.events import EntryKind, Incident, Pruned, RollbackReceipt, SetAside, events_of
from chronicle.journal.lineage import compute_lineage
from chronicle.story.matters import answer_matters, collect_matters, event_of, open_proposal
from chronicle.story.plain import format_size
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.verify import passes, verify_checkpoint
from rollback.disk.content import read_pointer
from rollback.errors import RollbackError, one_line
from rollback.files.state_file import read_state_file
from rollback.plan.plan import TRACKER
from rollback.plan.retention import SAFE, Retention, Save, plan_retention
from rollback.transaction.apply import POINTER_NAMES
from rollback.transaction.change import originals_of
from rollback.transaction.cleanup import (
    PrunePlan,
    apply_moves,
    apply_prune,
    plan_prune,
    plan_set_aside,
    refuse_mount_points,
    set_aside_dir,
)

UNITS = ["", "K", "M", "G", "T", "P"]
SHARES = (100, 75, 50, 40, 25, 10)  # of the bytes, shown without a budget


# --- keep


def keep(
    budget: str | None = None,
    restore_id: str | None = None,
    prune_: bool = False,
    at: Changing = CHANGING,
) -> CommandResult:
    """Keep within a budget the checkpoints a rollback may need.

    Without --budget it shows what each budget would cost: the steps that a rollback would lose. The others are moved out of the
    checkpoints directory; `keep --restore` moves them back, `keep --prune` deletes them. The run may be running.

    Example: chronicle keep --budget 2TB

    Options:
      --budget SIZE: Bytes that checkpoints may take: 500GB, 1.5TB, or 40% of now.
      --restore ID: Move back what an earlier `keep` set aside.
      --prune: Delete what rollbacks and `keep` moved aside and no undo needs.
    """
    if prune_ and (budget is not None or restore_id is not None):
        raise UsageProblem("--prune with --budget or --restore: one of them at a time")
    if prune_:
        return _prune(at)
    settings = at.settings()
    settings.refuse_stores()
    if restore_id is not None:
        with open_run(settings, force=at.force, while_running=True) as opened:
            return move_back(opened, SetAside, restore_id, yes=at.yes)
    with open_run(settings, force=at.force, while_running=True) as opened:
        root = settings.need_checkpoints()
        listed = [one for one in list_checkpoints(root, include_abandoned=False) if one.abandoned is None]
        found = [one for one in listed if not one.path.is_symlink()]  # a link to a checkpoint is a pointer
        saves = _saves(found, opened.journal.entries)
        referred = _referred(root, found)
        if (good := sum(save.verified for save in saves)) < SAFE:
            raise Refusal(
                f"`{root}` has {good} checkpoints that pass verification: at least {SAFE} must stay",
                "`chronicle verify --all` says what is wrong with the others",
            )
        if budget is None:
            return _offers(saves, opened.journal, referred)
        limit = _bytes(budget, sum(save.size_bytes for save in saves))
        plan = _plan(saves, limit, opened.journal, referred)
        data = _keep_data(plan, limit, str(root))
        if not plan.remove:
            fits = "fits" if plan.kept_bytes <= limit else "nothing more may go"
            return CommandResult(text=f"nothing to set aside: {format_size(plan.kept_bytes)}, {fits}", data=data)
        refuse_mount_points(root)
        text = "\n".join(_keep_lines(plan, limit))
        agree("Move them out of the checkpoints directory?", text, yes=at.yes)
        gone = {save.name for save in plan.remove}
        aside = [one for one in found if str(one.path) in gone]
        moves = plan_set_aside(root, aside, [one for one in found if one not in aside])
        with uninterrupted():
            event = SetAside(
                root=str(root),
                moves=tuple(move.to_json() for move in moves),
                budget=limit,
                kept=tuple(_kept(plan)),
                bytes=plan.removed_bytes,
                expected_loss=round(plan.expected_loss, 1),
                worst_loss=plan.worst_loss,
                force=at.force,
                overrode=opened.overrode,
            )
            entry = opened.writer.write(event, title=f"{len(gone)} checkpoints set aside, {format_size(plan.removed_bytes)}")
            where = set_aside_dir(root, entry.id)
            apply_moves(root, where, moves)
    talk = (f"undo it with `chronicle keep --restore {entry.id}`; `chronicle keep --prune` deletes them",)
    data |= {"changed": True, "id": entry.id, "directory": str(where)}
    return CommandResult(text=f"{text}\n\ndone: moved to {where}", data=data, talk=talk)


def _saves(found: Sequence[Checkpoint], entries: Sequence[Entry]) -> list[Save]:
    """Those whose step is known; the others are no business of a plan by steps, and stay."""
    good = _verified(found, entries)
    return [Save(str(one.path), one.step, one.size_bytes, one.path in good) for one in found if one.step is not None]


def _plan(saves: Sequence[Save], limit: int, journal: Journal, referred: Mapping[str, str]) -> Retention:
    seen = [event for _, event in events_of(journal.entries, Incident) if event.onset_step is not None]
    told = [event for event in seen if event.tier in ("warn", "propose")]
    late = [event.alarm_step - (event.onset_step or 0) for event in told if event.alarm_step is not None]
    matters = answer_matters(collect_matters(journal.entries), compute_lineage(journal.entries))
    still = [matter for matter in matters if matter.open and event_of(matter.entry).tier in ("warn", "propose")]
    return plan_retention(
        saves,
        budget_bytes=limit,
        onsets=[min(event.onset_low_step or event.onset_step or 0, event.onset_step or 0) for event in told],
        open_onsets=[matter.onset for matter in still if matter.onset is not None],
        delays=[delay for delay in late if delay > 0],
        pinned={**_pinned(saves, journal), **referred},
    )


def _pinned(saves: Sequence[Save], journal: Journal) -> dict[str, str]:
    """The checkpoint that the undo of the last rollback needs, and the one that an open proposal names, by name."""
    undoable, proposed = find_undoable(journal.entries), open_proposal(journal.entries)
    steps = {
        undoable.step if undoable else None: "the undo of the last rollback needs it",
        proposed.target_step if proposed else None: "an open proposal names it",
    }
    return {save.name: steps[save.step] for save in saves if save.step in steps}


def _referred(root: Path, found: Sequence[Checkpoint]) -> dict[str, str]:
    """What something else refers to, by name: links, pointer files, and the newest Trainer's best checkpoint.

    A link beside the checkpoints or beside their directory counts. A pointer names a directory; Megatron's names a step.
    """
    by_path = {os.path.realpath(one.path): str(one.path) for one in found}
    by_name = {one.path.name: str(one.path) for one in found}
    pinned: dict[str, str] = {}
    for link in (*sorted(root.iterdir()), *sorted(root.parent.iterdir())):
        if link.is_symlink() and (name := by_path.get(os.path.realpath(link))) is not None:
            pinned[name] = f"the link `{link.name}` leads to it"
    for name in POINTER_NAMES:
        text = (read_pointer(root / name) or "").strip()
        steps = [str(one.path) for one in found if name == TRACKER and text.isdigit() and one.step == int(text)]
        for target in (*steps, *([by_name[text]] if text in by_name else [])):
            pinned[target] = f"`{name}` names it"
    trainers = [one for one in found if (one.path / TRAINER_STATE).is_file()]
    if trainers:
        newest = max(trainers, key=lambda one: one.step or 0)
        best = _best_checkpoint(newest.path / TRAINER_STATE)
        if best in by_name:
            pinned[by_name[best]] = f"the best checkpoint by `{newest.path.name}/{TRAINER_STATE}`"
    return pinned


TRAINER_STATE = "trainer_state.json"


def _best_checkpoint(path: Path) -> str:
    """The name of the Trainer's best checkpoint; "" where it has none or the file cannot be read: `verify` reports that."""
    try:
        tree = read_state_file(path).tree
    except RollbackError:
        return ""
    best = tree.get("best_model_checkpoint") if isinstance(tree, dict) else None
    return PurePath(best).name if isinstance(best, str) else ""


def _bytes(said: str, now: int) -> int:
    """Bytes of `500GB`, `1.5TiB`, `40%`; raises `UsageProblem`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|([KMGTP]?)(i?)B?)\s*", said, re.IGNORECASE)
    if found is None:
        raise UsageProblem(f"--budget `{said}`: expected bytes such as 500GB or 1.5TB, or a share such as 40%")
    number = float(found[1])
    if found[2] == "%":
        return int(now * number / 100)
    return int(number * (1024 if found[4] else 1000) ** UNITS.index(found[3].upper()))


def _offers(saves: Sequence[Save], journal: Journal, referred: Mapping[str, str]) -> CommandResult:
    """What each budget would cost."""
    total = sum(save.size_bytes for save in saves)
    rows, data = ["   budget           checkpoints   steps lost by a rollback: mean, worst in the recent window"], []
    for share in SHARES:
        plan = _plan(saves, total * share // 100, journal, referred)
        lost = f"{plan.expected_loss:>9.0f}  {plan.worst_loss:>9}"
        rows.append(f"  {share:>4} %  {format_size(plan.kept_bytes):>12}  {len(plan.keep):>7}       {lost}")
        data.append({"share": share, "bytes": plan.kept_bytes, "checkpoints": len(plan.keep), **_losses(plan)})
    return CommandResult(text="\n".join(rows), data={"changed": False, "budgets": data}, talk=("choose with --budget SIZE",))


def _losses(plan: Retention) -> dict[str, object]:
    return {"expected_loss": round(plan.expected_loss, 1), "worst_loss": plan.worst_loss, "window": plan.window}


def _kept(plan: Retention) -> list[dict[str, object]]:
    return [{"path": save.name, "step": save.step, "why": why} for save, why in plan.keep]


def _keep_lines(plan: Retention, limit: int) -> Iterator[str]:
    yield f"keep: {len(plan.keep)} checkpoints, {format_size(plan.kept_bytes)} of {format_size(limit)}"
    if plan.kept_bytes > limit:
        yield "  more than the budget: what stays may not go"
    yield (
        f"  a rollback would lose {plan.expected_loss:.0f} steps in the mean (now {plan.expected_before:.0f}), and "
        f"{plan.worst_loss} at most for an onset in the last {plan.window} steps (now {plan.worst_before})"
    )
    yield ""
    for save, why in plan.keep:
        yield f"  keep       {one_line(save.name)}  (step {save.step}{': ' + why if why else ''})"
    for save in plan.remove:
        doubt = "" if save.verified else ", does not pass verification"
        yield f"  set aside  {one_line(save.name)}  (step {save.step}, {format_size(save.size_bytes)}{doubt})"


def _keep_data(plan: Retention, limit: int, root: str) -> dict[str, object]:
    return {
        "changed": False,
        "root": root,
        "budget": limit,
        "kept": _kept(plan),
        "kept_bytes": plan.kept_bytes,
        "set_aside": [save.name for save in plan.remove],
        "set_aside_bytes": plan.removed_bytes,
        **_losses(plan),
    }


# --- prune


def _prune(at: Changing) -> CommandResult:
    """Delete abandoned checkpoints that no undo needs, and leave two verified ones at least."""
    settings = at.settings()
    settings.refuse_stores()
    with open_run(settings, force=at.force) as opened:
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
        agree("Delete them permanently?", text, yes=at.yes)
        with uninterrupted():
            forced = {} if at.force is None else {"force": at.force, "overrode": list(opened.overrode)}
            data = _data(plan, objects, str(opened.root), done=True) | forced
            entry = opened.writer.write(
                Pruned.from_json(data), title=f"{len(plan.delete)} abandoned checkpoints deleted"
            )
            apply_prune(plan, objects, parent=opened.root.parent, id_=entry.id)
    return CommandResult(text=f"{text}\n\ndone ({entry.id})", data=data)


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


def _text(plan: PrunePlan, objects: Sequence[Path]) -> str:
    lines = [f"prune: {len(plan.delete)} abandoned checkpoints, {format_size(plan.size_bytes)}", ""]
    lines += [f"  delete  {c.path}  (step {c.step}, {format_size(c.size_bytes)})" for c in plan.delete]
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
