"""Makes the plan of a rollback from a request and the state of a checkpoint, and prints it. Pure.

    request + checkpoints + state + manifest  ->  Plan: every edit, every move, and the LRs that follow

A plan whose effect on the LR differs from the request is refused with the reason. `rollback.transaction.apply` makes
the changes of a plan and no others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.state import CheckpointState
from rollback.files.config_text import ConfigFile
from rollback.lr.authority import Evidence
from rollback.lr.effect import FieldEdit, edits_by_file
from rollback.lr.launch_command import number_words
from rollback.plan.lr import plan_lr_edits
from rollback.plan.request import (
    OF_BETAS,
    Cost,
    ExpectedLrs,
    InputFile,
    Later,
    PointerEdit,
    RollbackRequest,
    Source,
    refuse_unhonoured,
)
from rollback.records import record_of

VERSION = 1
TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM: the iteration, not a name (checkpointing.py `read_metadata`)
# mmengine/hooks/checkpoint_hook.py: an absolute path; fvcore/common/checkpoint.py: a name
LAST = "last_checkpoint"
COMMENTS = ("notes", "cost")  # fields of a plan that change nothing on disk


def plan_digest(record: Mapping[str, Any]) -> str:
    """sha256 over the fields of a plan's JSON form that change something on disk."""
    changes = {key: value for key, value in record.items() if key not in COMMENTS}
    text = json.dumps(changes, sort_keys=True, separators=(",", ":"), default=float)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a rollback will do. Paths in `edits` and `inputs` are relative to the checkpoint's folder.

    `root` is the directory that loaders list, `entry` the checkpoint's name in it, `source` its present path (an
    abandoned one is outside `root`). `displaces`: another checkpoint has the entry's name now.
    `config_edits` change files outside the checkpoint, named by their absolute paths. `copies` are further names in
    `root` under which a trainer finds the newest state (`last.ckpt`, `ckpt.pt`, `latest/`): they become copies of this one.
    `parts` are files of the same save beside it that are edited, too.
    """

    request: RollbackRequest
    run: str
    root: str
    entry: str
    source: str
    single_file: bool
    format: str
    step: int
    launch: int | None
    parent_launch: int | None
    optimizer_step: int | None
    edits: tuple[FieldEdit, ...]
    classes: Mapping[str, str]  # file -> description of its scheduler
    expected: ExpectedLrs
    schedulers: tuple[Mapping[str, Any], ...]
    world_size: int | None
    abandon: tuple[Later, ...]
    displaces: bool
    pointers: tuple[PointerEdit, ...]
    inputs: tuple[InputFile, ...]
    has_manifest: bool
    config_edits: tuple[FieldEdit, ...] = ()
    copies: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of the optimizer, that `--set` gave another value: the next launch finds it as it is
    notes: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)

    @property
    def digest(self) -> str:
        """sha256 over everything that changes the disk: two plans with the same digest do the same."""
        return plan_digest(self.to_json())

    @property
    def lr_scale(self) -> float | None:
        """The requested factor on every LR, None when the LR stays."""
        ratio = self.expected.ratio
        return None if ratio == 1.0 else ratio

    @property
    def changes_anything(self) -> bool:
        """Whether the plan changes bytes or names on disk, or the contract of the next launch."""
        moved = self.source != str(PurePath(self.root) / self.entry)
        changed = self.edits or self.config_edits or self.copies or self.abandon
        asked = self.request.asks_next_launch
        return bool(changed or moved or asked or any(p.before != p.after for p in self.pointers))

    def contract(self, rollback: str) -> dict[str, Any]:
        """The contract of the next launch: what the guard must find in memory before the first step."""
        expected, request = self.expected, self.request
        groups = zip(expected.lrs, expected.initial_lrs, strict=True)
        moves_data = request.skip_batches or request.reshuffle
        data = {"skip_batches": request.skip_batches, "reshuffle": request.reshuffle} if moves_data else None
        return {
            "v": 1,
            "run": self.run,
            "rollback": rollback,
            "checkpoint": str(PurePath(self.root) / self.entry),
            "step": self.step,
            "optimizer_step": self.optimizer_step,
            "groups": [{"lr": lr, "initial_lr": initial} for lr, initial in groups],
            "next_lrs": None if expected.next_lrs is None else [list(row) for row in expected.next_lrs],
            "next_lrs_source": str(expected.source),
            "lr_ratio": expected.ratio,
            "lr_unproved": list(expected.unproved),
            "schedulers": [dict(scheduler) for scheduler in self.schedulers],
            "data": data,
            "warmup_steps": request.warmup_steps,
            "world_size": self.world_size,
            "accept_change": [*request.accept_change, *map(_accepts, self.options)],
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as written by `chronicle rollback --plan-out`, without its digest."""
        return {"v": VERSION} | record_of(self)


def compose_plan(
    request: RollbackRequest,
    checkpoint: Checkpoint,
    checkpoints: Sequence[Checkpoint],
    state: CheckpointState,
    *,
    run: str,
    root: str,
    inputs: Sequence[InputFile],
    memory: Mapping[str, Any] | None = None,
    has_manifest: bool = False,
    pointers: Mapping[str, str] | None = None,
    links: Mapping[str, str] | None = None,
    honours: frozenset[str] = frozenset(),
    config: ConfigFile | None = None,
    evidence: Evidence | None = None,
    newest_copies: Sequence[Checkpoint] = (),
    remnants: Mapping[str, int] | None = None,
    cost: Cost | None = None,
    remarks: Sequence[str] = (),
) -> Plan:
    """Make the plan of `request` from values that were read before. Pure.

    `memory` is what the guard recorded at save, `pointers` the text of each pointer file by name, `links` the target of each
    symbolic link in the root. `honours` lists the options that the run supports at run time (`request.HONOURED`), `config` is
    the DeepSpeed config of the next launch where it is known, `evidence` what else is known of that launch, `newest_copies`
    are the `last.ckpt` of the root, `remnants` what later saves that were cut have left, with its step.
    Raises `PlanRefused` when the plan would not do what was asked.
    """
    refuse_unhonoured(request, honours, checkpoint.format)
    assert checkpoint.step == request.step, "the selected checkpoint is not the one asked for"
    lr = plan_lr_edits(request, state, memory, config, evidence)
    entry = checkpoint.path.name
    copies = _copies(request, checkpoint, newest_copies, edited=bool(lr.edits))
    parts = tuple(name for name in checkpoint.names[1:] if any(edit.file == name for edit in lr.edits))
    others = [c for c in checkpoints if c.path.name not in copies]
    later = [] if request.keep_later else _later(checkpoint, others)
    if not request.keep_later:
        later += [Later(name=name, step=step) for name, step in (remnants or {}).items()]
    return Plan(
        request=request,
        run=run,
        root=root,
        entry=entry,
        source=str(checkpoint.path),
        single_file=checkpoint.single_file,
        format=checkpoint.format,
        step=request.step,
        launch=checkpoint.launch,
        parent_launch=checkpoint.launch if request.launch is not None or checkpoint.abandoned else None,
        optimizer_step=state.optimizer_step,
        edits=lr.edits,
        classes=lr.classes,
        expected=lr.expected,
        schedulers=lr.schedulers,
        world_size=state.world_size,
        abandon=tuple(later),
        displaces=_displaces(checkpoint, checkpoints),
        pointers=(*_pointer_edits(entry, checkpoint, pointers or {}), *_link_edits(entry, later, links or {})),
        inputs=tuple(inputs),
        has_manifest=has_manifest,
        config_edits=lr.config_edits,
        copies=copies,
        parts=parts,
        options=lr.options,
        notes=(*state.notes, *lr.notes, *_notes(request, checkpoint, checkpoints, remnants or {}), *remarks),
        cost=cost or Cost(),
    )


def _accepts(option: str) -> str:
    """What the guard of the next launch accepts, because this option was set."""
    return f"{'betas' if option in OF_BETAS else option}: {option} was set by this rollback"


def copied_from(copy: str, names: Sequence[str]) -> str:
    """Which file of a save a name without a number stands for: `optim.pt` for `optim_20.pt`; else the first of them."""
    letters = _letters(copy)
    return next((name for name in names if _letters(name) == letters), names[0])


def _letters(name: str) -> str:
    return re.sub(r"[-_.]*\d+", "", name)


def _copies(
    request: RollbackRequest, target: Checkpoint, newest: Sequence[Checkpoint], *, edited: bool
) -> tuple[str, ...]:
    """Names without a number from which a trainer would resume another step than the target, with their parts."""
    names: list[str] = []
    for copy in newest:
        if copy.abandoned is not None or copy.path == target.path or copy.step is None or target.step is None:
            continue
        same = copy.step == target.step
        if (same and (edited or target.abandoned is not None)) or (copy.step > target.step and not request.keep_later):
            names += copy.names
    return tuple(sorted(names))


def _later(target: Checkpoint, checkpoints: Sequence[Checkpoint]) -> list[Later]:
    """Checkpoints in the root with a higher step, earliest first: the order in which they are moved; each file of them once."""
    found = {
        name: Later(name=name, step=c.step, launch=c.launch)
        for c in checkpoints
        if c.abandoned is None and c.step is not None and target.step is not None and c.step > target.step
        for name in c.names
    }
    return sorted(found.values(), key=lambda later: (later.step, later.name))


def _displaces(target: Checkpoint, checkpoints: Sequence[Checkpoint]) -> bool:
    return target.abandoned is not None and any(
        c.abandoned is None and c.path.name == target.path.name for c in checkpoints
    )


def _pointer_edits(entry: str, target: Checkpoint, pointers: Mapping[str, str]) -> tuple[PointerEdit, ...]:
    """Edits that replace the name in each pointer file; white space around it is kept."""
    named = {path: str(target.step) if path == TRACKER else entry for path in pointers}
    if LAST in pointers:
        present = PurePath(pointers[LAST].strip() or entry)
        named[LAST] = str(present.with_name(entry)) if present.suffix == PurePath(entry).suffix else pointers[LAST].strip()
    return tuple(
        PointerEdit(path=path, before=text, after=text.replace(text.strip(), named[path]) if text.strip() else named[path])
        for path, text in sorted(pointers.items())
        if text.strip() != named[path] and (path != TRACKER or target.format == "megatron")
    )


def _link_edits(entry: str, later: Sequence[Later], links: Mapping[str, str]) -> Iterator[PointerEdit]:
    """Edits of links to a checkpoint that is moved away: they point to the chosen one; the rest of the path is kept."""
    moved = {checkpoint.name for checkpoint in later}
    for path, text in sorted(links.items()):
        parts = PurePath(text).parts
        if moved & set(parts):
            after = PurePath(*(entry if part in moved else part for part in parts))
            yield PointerEdit(path=path, before=text, after=str(after), is_link=True)


def _notes(
    request: RollbackRequest, target: Checkpoint, checkpoints: Sequence[Checkpoint], remnants: Collection[str]
) -> tuple[str, ...]:
    notes = []
    unknown = [c.path.name for c in checkpoints if c.abandoned is None and c.step is None and c.path.name not in remnants]
    if remnants:
        notes.append(f"moved although no whole checkpoint: {', '.join(sorted(remnants))} (a save that was cut leaves such)")
    if unknown:
        notes.append(f"not moved, because their step is unknown: {', '.join(unknown)}")
    beside = [c.path.name for c in checkpoints if c.step == target.step and c.abandoned is None and c.path != target.path]
    if beside and target.abandoned is None and (request.lr_scale or request.lr or request.sets):
        notes.append(f"not edited, though of the same step: {', '.join(beside)}")
    if request.keep_later and _later(target, checkpoints):
        notes.append("later checkpoints stay: a loader that selects the newest checkpoint will not load this one")
    return tuple(notes)


# --- A plan as text for a person

_SHOWN_STEPS = 5
_SHOWN_GROUPS = 3
_SHOWN_WIDTH = 90


def format_plan(plan: Plan, *, guarded: bool = False) -> str:
    """The whole plan, one fact per line, without a final newline. `guarded`: a guard will check the next launch."""
    return "\n".join(_lines(plan, guarded))


def _lines(plan: Plan, guarded: bool) -> Iterator[str]:
    launch = "" if plan.launch is None else f" of launch {plan.launch}"
    yield f"rollback of run {plan.run} to step {plan.step}{launch}"
    yield ""
    yield _row("checkpoint", f"{PurePath(plan.root) / plan.entry}  ({plan.format})")
    if plan.source != str(PurePath(plan.root) / plan.entry):
        yield _row("bring back", plan.source)
        if plan.displaces:
            yield _row("", f"the current {plan.entry} is moved to abandoned/")
    yield from _edits(plan)
    for name in plan.copies:
        of = copied_from(name, (plan.entry, *plan.parts))
        yield _row("copy", f"{name} becomes a copy of {of}; the current one is moved to abandoned/")
    if plan.has_manifest and plan.edits:
        yield _row("manifest", "updated: digests of the edited files, expected LRs")
    for pointer in plan.pointers:
        yield _row("pointer", f"{pointer.path}: {pointer.before.strip()} → {pointer.after.strip()}")
    if plan.abandon:
        steps = {(later.step, later.launch) for later in plan.abandon}
        count = _count(plan.abandon, "later checkpoint")
        if plan.single_file and len(steps) < len(plan.abandon):
            count = f"{_count(plan.abandon, 'file')} of {_count(steps, 'later step')}"
        yield _row("abandon", f"{count}, moved to abandoned/, not deleted:")
        yield from (_row("", line) for line in _wrapped([later.name for later in plan.abandon]))
    yield _row("LR", _lr_sentence(plan, guarded))
    yield from (_row("assumed", assumed) for assumed in plan.expected.assumed)
    yield from (_row("", line) for line in _forecast(plan, guarded))
    yield from (_row("data", line) for line in _data(plan))
    cost = _cost(plan)
    if cost:
        yield _row("cost", cost)
    yield from (_row("note", note) for note in plan.notes)
    yield _row("plan", plan.digest[:12])


def _row(label: str, text: str) -> str:
    return f"  {label:<12}{text}".rstrip()


def _edits(plan: Plan) -> Iterator[str]:
    for file, edits in edits_by_file((*plan.edits, *plan.config_edits)).items():
        what = plan.classes.get(file) or ("config of the next launch" if file.startswith("/") else "")
        yield _row("edit", file + (f"  ({what})" if what else ""))
        rows = _merged(edits)
        width = max(len(name) for name, _, _ in rows)
        for name, before, after in rows:
            yield _row("", f"  {name:<{width}}  {number_words(before)} → {number_words(after)}")


def _merged(edits: Sequence[FieldEdit]) -> list[tuple[str, float | int, float | int]]:
    """One row for neighbours with the same change: `base_lrs.0-3`, `param_groups.0-1.lr`."""
    groups: dict[tuple[str, float | int, float | int], list[int]] = {}
    for edit in edits:
        index = next((i for i, key in reversed(list(enumerate(edit.keys))) if isinstance(key, int)), None)
        pattern = ".".join("#" if i == index else str(key) for i, key in enumerate(edit.keys))
        position = edit.keys[index] if index is not None else -1
        groups.setdefault((pattern, edit.before, edit.after), []).append(int(position))
    return [
        (pattern.replace("#", _span(indices)), before, after) for (pattern, before, after), indices in groups.items()
    ]


def _span(indices: Sequence[int]) -> str:
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return str(first)
    return f"{first}-{last}" if last - first + 1 == len(indices) else ",".join(map(str, indices))


def _lr_sentence(plan: Plan, guarded: bool) -> str:
    ratio = plan.expected.ratio
    if ratio is None:
        return "set field by field; see the edits above"
    if ratio == 1.0:
        return "unchanged"
    if plan.expected.unproved:
        return f"× {ratio:.10g} in the checkpoint; not proved for the next launch: {'; '.join(plan.expected.unproved)}"
    if plan.expected.assumed:
        settles = "the guard settles" if guarded else "the first logged LRs settle"
        return f"× {ratio:.10g} from the first step on, not proved: {settles} what is assumed"
    classes = ", ".join(dict.fromkeys(text.split(",")[0] for text in plan.classes.values()))
    if not plan.classes and plan.config_edits:
        classes = "the LRs in " + ", ".join(dict.fromkeys(f"`{PurePath(e.file).name}`" for e in plan.config_edits))
    return f"× {ratio:.10g} from the first step on, proved for {classes or 'the LRs of the optimizer'}"


def _forecast(plan: Plan, guarded: bool) -> Iterator[str]:
    expected, warmup = plan.expected, plan.request.warmup_steps
    under = f", under a warm-up over {warmup} steps" if warmup else ""
    if expected.next_lrs is None:
        yield f"LRs of the next steps unknown: {expected.reason}"
        yield f"first step{under}: {_lrs(_warmed(expected.lrs, 1, warmup))}" + ("; the guard checks it" if guarded else "")
        return
    source = "computed from the checkpoint" if expected.source is Source.COMPUTED else "recorded at save"
    yield f"next steps ({source}{under}):"
    rows = expected.next_lrs
    last = [len(rows)] if len(rows) > _SHOWN_STEPS else []
    for number in (*range(1, min(len(rows), _SHOWN_STEPS) + 1), *last):
        yield f"  +{number:<3} {_lrs(_warmed(rows[number - 1], number, warmup))}"


def _warmed(row: Sequence[float], number: int, warmup: int) -> Sequence[float]:
    """The LRs of step `number` of the next launch under a linear warm-up over `warmup` steps, as the guard applies it."""
    if number >= warmup:
        return row
    return [lr * number / warmup for lr in row]


def _lrs(row: Sequence[float]) -> str:
    if len(set(row)) == 1:
        return f"{row[0]:.6g}" + (f" in all {len(row)} groups" if len(row) > 1 else "")
    shown = "  ".join(f"{lr:.6g}" for lr in row[:_SHOWN_GROUPS])
    return shown + (f"  … {len(row)} groups" if len(row) > _SHOWN_GROUPS else "")


def _data(plan: Plan) -> Iterator[str]:
    request = plan.request
    if request.warmup_steps:
        yield f"the next launch warms the LR up again over {request.warmup_steps} steps"
    if request.skip_batches:
        yield f"the next launch skips {request.skip_batches} batches after the checkpoint"
    if request.reshuffle:
        yield "the next launch reads the data after the checkpoint in another order"


def _cost(plan: Plan) -> str:
    if plan.cost.steps is None:
        return ""
    hours = "" if plan.cost.hours is None else f", {plan.cost.hours:.1f} h of training"
    return f"{plan.cost.steps} steps{hours}"


def _count(things: Collection[object], noun: str) -> str:
    return f"{len(things)} {noun}" + ("" if len(things) == 1 else "s")


def _wrapped(names: Sequence[str]) -> Iterator[str]:
    line = ""
    for name in names:
        if line and len(line) + len(name) > _SHOWN_WIDTH:
            yield line
            line = ""
        line += f"  {name}"
    yield line
