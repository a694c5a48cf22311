"""A request and what lies on disk become a plan: every edit, every move, every LR that follows. Pure.

    request + checkpoints + state + manifest  ->  Plan  (complete, printable, hashable)

Nothing is written and nothing is guessed: a plan whose effect on the LR is not what was asked is refused with the
reason. `rollback.apply` carries a plan out and does nothing that is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from rollback.errors import PlanRefused
from rollback.layout import Checkpoint
from rollback.lr.fields import FieldEdit
from rollback.plan_lr import plan_lr_edits
from rollback.request import Cost, ExpectedLrs, InputFile, Later, PointerEdit, RollbackRequest, Source
from rollback.state_values import CheckpointState

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a rollback will do. Paths in `edits` and `inputs` are relative to the checkpoint's folder.

    `root` is the directory a loader lists, `entry` the checkpoint's name in it, `source` where it lies now (an
    abandoned one lies elsewhere). `displaces` names the launch of a checkpoint that has the entry's name now.
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
    notes: tuple[str, ...] = ()
    cost: Cost = field(default_factory=Cost)

    @property
    def digest(self) -> str:
        """sha256 over the whole plan: two plans with the same digest do the same."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), default=float)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def lr_scale(self) -> float | None:
        """The factor on every LR that was asked for, `None` when the LR stays."""
        ratio = self.expected.ratio
        return None if ratio == 1.0 else ratio

    @property
    def changes_anything(self) -> bool:
        """Whether a byte or a name on disk would differ afterwards."""
        moved = self.source != str(PurePath(self.root) / self.entry)
        return bool(self.edits or self.abandon or moved or any(p.before != p.after for p in self.pointers))

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

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """Read a plan back; raises `PlanRefused` for another version or a damaged one."""
        if record.get("v") != VERSION:
            raise PlanRefused(f"plan has version {record.get('v')!r}: this program carries out version {VERSION}")
        try:
            return cls(
                **{
                    **{key: value for key, value in record.items() if key != "v"},
                    "request": RollbackRequest.from_json(record["request"]),
                    "edits": tuple(
                        FieldEdit(file=file, keys=tuple(keys), before=before, after=after)
                        for file, keys, before, after in record["edits"]
                    ),
                    "expected": ExpectedLrs.from_json(record["expected"]),
                    "schedulers": tuple(record["schedulers"]),
                    "abandon": tuple(Later(**later) for later in record["abandon"]),
                    "pointers": tuple(PointerEdit(**pointer) for pointer in record["pointers"]),
                    "inputs": tuple(InputFile(**file) for file in record["inputs"]),
                    "notes": tuple(record["notes"]),
                    "cost": Cost(**record["cost"]),
                }
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise PlanRefused(f"plan is damaged: {type(problem).__name__} {problem}", remedy="plan again") from problem


def plan_rollback(
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
    cost: Cost | None = None,
    remarks: Sequence[str] = (),
) -> Plan:
    """Decide everything. `memory` is what the guard stored at save, `pointers` the text of pointer files by name,
    `links` what the root's symbolic links say.

    `honours` names the options that an attached guard or our own trainer carries out: "warmup", "data". Raises
    `PlanRefused` with the reason when the plan would not do what was asked.
    """
    _refuse_unhonoured(request, honours)
    assert checkpoint.step == request.step, "the selected checkpoint is not the one asked for"
    lr = plan_lr_edits(request, state, memory)
    entry = checkpoint.path.name
    later = [] if request.keep_later else _later(checkpoint, checkpoints)
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
        notes=(*state.notes, *lr.notes, *_notes(request, checkpoint, checkpoints), *remarks),
        cost=cost or Cost(),
    )


def _refuse_unhonoured(request: RollbackRequest, honours: frozenset[str]) -> None:
    asked = {
        "--warmup": ("warmup", request.warmup_steps, "its own warm-up option"),
        "--skip-batches": (
            "data",
            request.skip_batches,
            "its own data option, such as Accelerate's skip_first_batches",
        ),
        "--reshuffle": ("data", request.reshuffle, "its own data seed"),
    }
    for option, (name, value, own) in asked.items():
        if value and name not in honours:
            raise PlanRefused(
                f"{option} is carried out by the trainer, and this checkpoint was saved without a guard that could do it",
                remedy=f"use {own}, or attach `chronicle.guard` to the trainer",
            )


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
