"""`--set FIELD=VALUE`: which numbers a name means, and when setting it alone is refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollback.errors import PlanRefused
from rollback.lr.fields import FieldEdit, Keys, plain_number, scheduler_lr_leaves
from rollback.lr.infer import CLOSED_FORM, SchedulerClass, infer_scheduler_class
from rollback.plan.request import RollbackRequest
from rollback.checkpoint.state import CheckpointState

_COUNTERS = ("last_epoch", "_step_count", "T_cur", "last_batch_iteration")
# name given to --set -> (fields of the scheduler, fields of the optimizer's groups) that hold it
_LR_NAMES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lr": (("_last_lr",), ("lr",)),
    "_last_lr": (("_last_lr",), ("lr",)),
    "base_lrs": (("base_lrs",), ("initial_lr",)),
    "initial_lr": (("base_lrs",), ("initial_lr",)),
}


def sets_lr(request: RollbackRequest) -> bool:
    return any(name in _LR_NAMES for name in request.sets)


def plan_sets(request: RollbackRequest, state: CheckpointState) -> tuple[FieldEdit, ...]:
    sets = dict(request.sets)
    if not sets:
        return ()
    if "last_epoch" in sets and "_step_count" not in sets:
        sets["_step_count"] = (
            int(sets["last_epoch"]) + 1
        )  # torch keeps it one ahead; a wrapper compares it to total_steps
    edits = [edit for name, value in sets.items() for edit in _set_one(name, value, state, request)]
    _check_counters(sets, state, request)
    _check_lr_sets(sets, state, edits)
    return tuple(edits)


def _set_one(name: str, value: float | int, state: CheckpointState, request: RollbackRequest) -> Iterator[FieldEdit]:
    found = list(_places(name, state))
    if not found:
        known = sorted({*_COUNTERS, *_LR_NAMES, *state.counters} & set(_known_names(state)))
        raise PlanRefused(
            f"--set {name}: no field of that name in this checkpoint, found {', '.join(known) or 'none that can be set'}",
            remedy="`chronicle inspect` lists the fields; a full name is `file:key.path`",
        )
    for file, keys, present in found:
        before = plain_number(present, file=file, keys=keys)
        after = float(value) if isinstance(before, float) else value
        if isinstance(before, int) and int(after) != after:
            raise PlanRefused(f"--set {name}={value}: the field is a whole number in `{file}`")
        if after != before:
            yield FieldEdit(
                file=file, keys=keys, before=before, after=after if isinstance(before, float) else int(after)
            )


def _known_names(state: CheckpointState) -> Iterator[str]:
    for scheduler in state.schedulers:
        yield from scheduler.state
    yield from state.counters
    yield from (name for name in ("lr", "initial_lr") if state.optimizers)


def _places(name: str, state: CheckpointState) -> Iterator[tuple[str, Keys, Any]]:
    """(file, keys, value) of every number that `name` means."""
    if name in _LR_NAMES:
        fields, group_fields = _LR_NAMES[name]
        for scheduler in state.schedulers:
            for keys, value in scheduler_lr_leaves(scheduler.state, scheduler.prefix):
                if any(field in keys for field in fields):
                    yield scheduler.file, keys, value
        for optimizer in state.optimizers:
            for index, group in enumerate(optimizer.groups):
                for field in group_fields:
                    for keys in optimizer.group_keys(index, field) if field in group else ():
                        yield optimizer.file, keys, group[field]
    elif name in _COUNTERS:
        for scheduler in state.schedulers:
            if name in scheduler.state:
                yield scheduler.file, (*scheduler.prefix, name), scheduler.state[name]
    else:
        for full, value in state.counters.items():
            file, _, dotted = full.partition(":")
            if name in (full, dotted):
                yield file, tuple(int(k) if k.isdigit() else k for k in dotted.split(".")), value


def _check_counters(sets: Mapping[str, float | int], state: CheckpointState, request: RollbackRequest) -> None:
    moved = [name for name in ("last_epoch", "T_cur", "last_batch_iteration") if name in sets]
    for scheduler in state.schedulers if moved else ():
        name = infer_scheduler_class(scheduler.state)
        if name not in CLOSED_FORM:
            raise PlanRefused(
                f"--set {moved[0]}: {name or 'this scheduler'} computes each LR from the one before, so moving its counter "
                f"alone in `{scheduler.file}` would leave the LR of the old step",
                remedy="go back to that step's own checkpoint with --to",
            )
    unit, value = state.scheduler_unit, sets.get("last_epoch")
    if unit not in (None, 1) and value is not None and value == request.step:
        raise PlanRefused(
            f"--set last_epoch={value}: this scheduler counts {unit} per optimizer step (one per process), "
            f"step {request.step} is last_epoch={request.step * (unit or 1)}",
            remedy=f"--set last_epoch={request.step * (unit or 1)}",
        )


def _check_lr_sets(sets: Mapping[str, float | int], state: CheckpointState, edits: Sequence[FieldEdit]) -> None:
    """Single LR fields: refused unless what they do to the LR is what they say."""
    given = {_LR_NAMES[name][1][0] for name in sets if name in _LR_NAMES}
    if not given:
        return
    for scheduler in state.schedulers:
        name = infer_scheduler_class(scheduler.state)
        if name is SchedulerClass.LAMBDA and given != {"lr", "initial_lr"}:
            raise PlanRefused(
                f"LambdaLR in `{scheduler.file}` takes the first step with `lr` and all later ones from `base_lrs`: "
                f"setting only {'lr' if 'lr' in given else 'base_lrs'} would change the LR once",
                remedy="set both, or use --lr-scale, which changes all of them",
            )
        if name is not SchedulerClass.LAMBDA:
            raise PlanRefused(
                f"{name or 'the scheduler'} in `{scheduler.file}` computes from several LR fields; "
                "setting single ones does not change the LR as said",
                remedy="use --lr-scale or --lr, which change all of them",
            )
