"""A request and the state of a checkpoint become a plan: every edit, every move and the LRs that follow. Pure.

    request + checkpoints + state + manifest  ->  Plan  (complete, printable, hashable)

A plan whose effect on the LR differs from the request is refused with the reason. `rollback.transaction.apply` carries
a plan out and makes no change that is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.state import CheckpointState
from rollback.lr.deepspeed import ConfigFile
from rollback.lr.effect import FieldEdit
from rollback.plan.lr import plan_lr_edits
from rollback.plan.request import (
    Cost,
    ExpectedLrs,
    InputFile,
    Later,
    PointerEdit,
    RollbackRequest,
    Source,
    refuse_unhonoured,
)

VERSION = 1


WORDS = ("notes", "cost")  # what a plan says beside what it does


def plan_digest(record: Mapping[str, Any]) -> str:
    """The digest of a plan from its JSON form."""
    deeds = {key: value for key, value in record.items() if key not in WORDS}
    text = json.dumps(deeds, sort_keys=True, separators=(",", ":"), default=float)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a rollback will do. Paths in `edits` and `inputs` are relative to the checkpoint's folder.

    `root` is the directory a loader lists, `entry` the checkpoint's name in it, `source` where it lies now (an
    abandoned one lies elsewhere). `displaces` names the launch of a checkpoint that has the entry's name now.
    `config_edits` are in files outside the checkpoint, by their absolute paths; `copies` are further names in `root`
    under which a loader finds the newest checkpoint: they become copies of this one.
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
    classes: Mapping[str, str]  # file -> what its scheduler is, for people
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
    notes: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)

    @property
    def digest(self) -> str:
        """sha256 over all that is done: two plans with the same digest do the same."""
        return plan_digest(self.to_json())

    @property
    def lr_scale(self) -> float | None:
        """The factor on every LR that was asked for, `None` when the LR stays."""
        ratio = self.expected.ratio
        return None if ratio == 1.0 else ratio

    @property
    def changes_anything(self) -> bool:
        """Whether a byte or a name on disk would differ afterwards, or what the next launch is asked for."""
        moved = self.source != str(PurePath(self.root) / self.entry)
        changed = self.edits or self.config_edits or self.copies or self.abandon
        asked = self.request.asks_next_launch
        return bool(changed or moved or asked or any(p.before != p.after for p in self.pointers))

    def contract(self, rollback: str) -> dict[str, Any]:
        """What the next launch must find in memory before its first step (read by the guard)."""
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
            "next_lrs": self.promised_lrs(),
            "next_lrs_source": str(Source.UNKNOWN if self.promised_lrs() is None else expected.source),
            "lr_ratio": expected.ratio,
            "schedulers": [dict(scheduler) for scheduler in self.schedulers],
            "data": data,
            "warmup_steps": request.warmup_steps,
            "world_size": self.world_size,
            "accept_change": list(request.accept_change),
        }

    def promised_lrs(self) -> list[list[float]] | None:
        """LRs the next launch is held to: not those that only hold if it is given the same arguments."""
        rows = self.expected.next_lrs
        if rows is None or self.expected.source is Source.CONFIGURED:
            return None
        return [list(row) for row in rows]

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERSION,
            "request": self.request.to_json(),
            "run": self.run,
            "root": self.root,
            "entry": self.entry,
            "source": self.source,
            "single_file": self.single_file,
            "format": self.format,
            "step": self.step,
            "launch": self.launch,
            "parent_launch": self.parent_launch,
            "optimizer_step": self.optimizer_step,
            "edits": [[e.file, list(e.keys), e.before, e.after] for e in self.edits],
            "config_edits": [[e.file, list(e.keys), e.before, e.after] for e in self.config_edits],
            "copies": list(self.copies),
            "classes": dict(self.classes),
            "expected": self.expected.to_json(),
            "schedulers": [dict(scheduler) for scheduler in self.schedulers],
            "world_size": self.world_size,
            "abandon": [asdict(later) for later in self.abandon],
            "displaces": self.displaces,
            "pointers": [asdict(pointer) for pointer in self.pointers],
            "inputs": [asdict(file) for file in self.inputs],
            "has_manifest": self.has_manifest,
            "notes": list(self.notes),
            "cost": asdict(self.cost),
        }


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
    newest_copies: Sequence[Checkpoint] = (),
    cost: Cost | None = None,
    remarks: Sequence[str] = (),
) -> Plan:
    """Decide everything. `memory` is what the guard stored at save, `pointers` the text of pointer files by name,
    `links` what the root's symbolic links say.

    `honours` names what the trainer said it carries out (`plan_honours`), `config` is the DeepSpeed config of the next
    launch where that is known, `newest_copies` are the `last.ckpt` of the root. Raises `PlanRefused` with the reason when
    the plan would not do what was asked.
    """
    refuse_unhonoured(request, honours, checkpoint.format)
    assert checkpoint.step == request.step, "the selected checkpoint is not the one asked for"
    lr = plan_lr_edits(request, state, memory, config)
    entry = checkpoint.path.name
    copies = _copies(request, checkpoint, newest_copies, edited=bool(lr.edits))
    others = [c for c in checkpoints if c.path.name not in copies]
    later = [] if request.keep_later else _later(checkpoint, others)
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
        pointers=(*_pointer_edits(entry, pointers or {}), *_link_edits(entry, later, links or {})),
        inputs=tuple(inputs),
        has_manifest=has_manifest,
        config_edits=lr.config_edits,
        copies=copies,
        notes=(*state.notes, *lr.notes, *_notes(request, checkpoint, checkpoints), *remarks),
        cost=cost or Cost(),
    )


def _copies(
    request: RollbackRequest, target: Checkpoint, newest: Sequence[Checkpoint], *, edited: bool
) -> tuple[str, ...]:
    """Lightning's `last.ckpt` and the like: a trainer that resumes from `last` would go on with what lies there."""
    names = []
    for copy in newest:
        if copy.abandoned is not None or copy.path == target.path or copy.step is None or target.step is None:
            continue
        same = copy.step == target.step
        if (same and (edited or target.abandoned is not None)) or (copy.step > target.step and not request.keep_later):
            names.append(copy.path.name)
    return tuple(sorted(names))


def _later(target: Checkpoint, checkpoints: Sequence[Checkpoint]) -> list[Later]:
    """Checkpoints in the loader's sight with a higher step, earliest first: the order in which they are moved."""
    found = [
        Later(name=c.path.name, step=c.step, launch=c.launch)
        for c in checkpoints
        if c.abandoned is None and c.step is not None and target.step is not None and c.step > target.step
    ]
    return sorted(found, key=lambda later: (later.step, later.name))


def _displaces(target: Checkpoint, checkpoints: Sequence[Checkpoint]) -> bool:
    return target.abandoned is not None and any(
        c.abandoned is None and c.path.name == target.path.name for c in checkpoints
    )


def _pointer_edits(entry: str, pointers: Mapping[str, str]) -> tuple[PointerEdit, ...]:
    """The name in each pointer replaced; white space around it is the writer's and stays."""
    return tuple(
        PointerEdit(path=path, before=text, after=text.replace(text.strip(), entry) if text.strip() else entry)
        for path, text in sorted(pointers.items())
        if text.strip() != entry
    )


def _link_edits(entry: str, later: Sequence[Later], links: Mapping[str, str]) -> Iterator[PointerEdit]:
    """Links to a checkpoint that is moved away lead to the chosen one instead; the rest of what they say stays."""
    moved = {checkpoint.name for checkpoint in later}
    for path, text in sorted(links.items()):
        parts = PurePath(text).parts
        if moved & set(parts):
            after = PurePath(*(entry if part in moved else part for part in parts))
            yield PointerEdit(path=path, before=text, after=str(after), is_link=True)


def _notes(request: RollbackRequest, target: Checkpoint, checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    notes = []
    unknown = [c.path.name for c in checkpoints if c.abandoned is None and c.step is None]
    if unknown:
        notes.append(f"the step of {', '.join(unknown)} is not known: left where they are")
    if request.keep_later and _later(target, checkpoints):
        notes.append("later checkpoints stay: a loader that takes the newest one will not take this one")
    return tuple(notes)
