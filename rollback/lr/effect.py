"""The places of the LR in a saved state, the edits that scale it in all of them, and the proof of their effect.

Changing only `base_lrs` and `_last_lr` of one file has no effect for 13 of 26 schedulers: the recursive ones compute
from the optimizer's `lr`, OneCycleLR from its `initial_lr, max_lr, min_lr`. Scaling every field listed here, nested
schedulers included, is right for all of them (measured: each class by 20 real steps).

A schedule is homogeneous of degree one in its LR-valued fields: if every field a class computes from is multiplied by
s, every later LR is multiplied by s, whatever the function, saved or not. That proves the ratio even for a lambda.
Where the LRs can be computed, both states are also simulated and compared row by row. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState
from rollback.errors import PlanRefused
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.files.pickle_values import StoredFloat
from rollback.lr.oracle import LrTable, Unknown, simulate_lrs
from rollback.lr.rules import SchedulerClass, child_states, infer_scheduler_class

_GROUP_FIELDS = ("lr", "initial_lr", "max_lr", "min_lr")
_SCHEDULER_FIELDS = ("base_lrs", "_last_lr", "eta_min", "max_lrs", "min_lrs", "default_min_lr")
# ReduceLROnPlateau reduces only when the change exceeds `eps`, an absolute LR: it has to scale like the others.
_PLATEAU_FIELDS = (*_SCHEDULER_FIELDS, "eps")
_TIMM_FIELDS = ("base_values", "lr_min", "warmup_lr_init", "warmup_steps")
_OWN_FIELDS: Mapping[SchedulerClass | None, tuple[str, ...]] = {
    SchedulerClass.PLATEAU: _PLATEAU_FIELDS,
    SchedulerClass.MMENGINE: ("base_values", "_last_value", "eta_min", "eta_max"),
    SchedulerClass.MMENGINE_OTHER: (),
    SchedulerClass.MEGATRON: ("max_lr", "start_lr", "min_lr"),
    SchedulerClass.NEW_BOB: ("hyperparam_value",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldEdit:
    """One number in one file: `keys` lead to it from the root of the file's tree."""

    file: str
    keys: Keys
    before: float | int
    after: float | int

    @property
    def field(self) -> str:
        """The key path as text, such as `param_groups.0.lr`."""
        return dotted(self.keys)

    def to_json(self) -> list[Any]:
        """The form in a written plan."""
        return [self.file, list(self.keys), self.before, self.after]


def scheduler_lr_leaves(state: Mapping[str, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of every LR-valued number of a scheduler state, nested schedulers included."""
    for name in _lr_fields(state):
        yield from _numbers(state.get(name), (*prefix, name))
    children = state.get("_schedulers")
    if isinstance(children, list | tuple):
        for index, child in enumerate(children):
            if isinstance(child, Mapping):
                yield from scheduler_lr_leaves(child, (*prefix, "_schedulers", index))


def _lr_fields(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a scheduler state that hold LRs, by its class."""
    name = infer_scheduler_class(state)
    if name is SchedulerClass.TIMM:  # without a warm-up `warmup_steps` are placeholders that nothing reads
        return _TIMM_FIELDS if state.get("warmup_t") else tuple(f for f in _TIMM_FIELDS if f != "warmup_steps")
    if name is None:  # edited only where a person accepts it
        own = (field for field in state if isinstance(field, str) and _LR_FIELD.fullmatch(field))
        return tuple(dict.fromkeys((*_SCHEDULER_FIELDS, *own)))
    return _OWN_FIELDS.get(name, _SCHEDULER_FIELDS)


# an LR by its name, and no factor of one (`lr_ratio`, `lr_mult`, `lr_decay`)
_LR_FIELD = re.compile(r"(?:(?:max|min|base|peak|init|initial|start|end|final|warmup|warmup_init|constant|target)_)?"
                       r"(?:lrs?|learning_rates?)(?:_(?:max|min|init|start|end|final|initial|list))?")  # fmt: skip


def group_lr_leaves(optimizer: OptimizerState) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of every LR-valued number of the optimizer's parameter groups."""
    for index, group in enumerate(optimizer.groups):
        for name in _GROUP_FIELDS:
            for keys in optimizer.group_keys(index, name):
                yield from _numbers(group.get(name), keys)


def lr_edits(
    schedulers: Iterable[SchedulerState], optimizers: Iterable[OptimizerState], scale: float
) -> tuple[FieldEdit, ...]:
    """The edits that multiply every LR-valued field of all schedulers and optimizer groups by `scale`.

    Raises `PlanRefused` for an LR that is not stored as a number.
    """
    edits: list[FieldEdit] = []
    for scheduler in schedulers:
        edits += _scaled_field(scheduler.file, scheduler_lr_leaves(scheduler.state, scheduler.prefix), scale)
    for optimizer in optimizers:
        edits += _scaled_field(optimizer.file, group_lr_leaves(optimizer), scale)
    return tuple(edits)


def need_plain_number(value: Any, *, file: str, keys: Keys) -> float | int:
    """Return `value` when it is a Python int or float, else raise `PlanRefused` naming where it was found."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise PlanRefused(
        f"LR `{dotted(keys)}` in `{file}` is stored as {type(value).__name__}: expected a Python float",
        remedy="save the optimizer with float LRs (not tensor or numpy ones), or edit this field in the training script",
    )


def _scaled_field(file: str, leaves: Iterable[tuple[Keys, Any]], scale: float) -> Iterator[FieldEdit]:
    for keys, value in leaves:
        before = need_plain_number(value, file=file, keys=keys)
        after = before * scale
        if after != before:
            yield FieldEdit(file=file, keys=keys, before=before, after=after)


def _numbers(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    if value is None:
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, (*keys, index))
    else:
        yield keys, value


# --- Proof of the effect

_RATIO_TOLERANCE = 1e-9
_PROVED_STEPS = 20

# class -> (scheduler fields, group fields) that its next LRs are computed from; most classes do not use `base_lrs`
_BY_LR_ALONE = (
    SchedulerClass.STEP, SchedulerClass.MULTI_STEP, SchedulerClass.CONSTANT, SchedulerClass.LINEAR, SchedulerClass.EXPONENTIAL,
    SchedulerClass.POLYNOMIAL, SchedulerClass.SEQUENTIAL, SchedulerClass.CHAINED,
)  # fmt: skip
_DECIDING: Mapping[SchedulerClass, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(_BY_LR_ALONE, ((), ("lr",))),
    SchedulerClass.LAMBDA: (("base_lrs",), ("lr",)),
    SchedulerClass.COSINE: (("base_lrs", "eta_min"), ("lr",)),
    SchedulerClass.WARM_RESTARTS: (("base_lrs", "eta_min"), ("lr",)),
    SchedulerClass.ONE_CYCLE: ((), _GROUP_FIELDS),
    SchedulerClass.CYCLIC: (("base_lrs", "max_lrs"), ("lr",)),
    SchedulerClass.PLATEAU: (("min_lrs", "eps"), ("lr",)),
    SchedulerClass.TIMM: (_TIMM_FIELDS[:3], ("lr",)),
    SchedulerClass.MMENGINE: (("base_values", "eta_min", "eta_max"), _GROUP_FIELDS),
    SchedulerClass.MMENGINE_OTHER: ((), ()),
    SchedulerClass.MEGATRON: (("max_lr", "start_lr", "min_lr"), ("lr", "max_lr", "min_lr")),
    SchedulerClass.NEW_BOB: (("hyperparam_value",), ("lr",)),  # each new value is the last one times a factor
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The edit multiplies every later LR by `ratio`."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Disproof:
    """The edit does not have the requested effect; `reason` says why."""

    reason: str


def prove_ratio(
    state: Mapping[str, Any] | None,
    groups: Sequence[Mapping[str, Any]],
    edited_state: Mapping[str, Any] | None,
    edited_groups: Sequence[Mapping[str, Any]],
    scale: float,
) -> Proof | Disproof:
    """Prove that the edited state and groups give `scale` times the original LRs at every later step.

    `state` is `None` for an optimizer without a saved scheduler. A `Disproof` names the class and the first field that
    has another value than requested.
    """
    reason = _unscaled_group(groups, edited_groups, ("lr",), scale, "the optimizer steps with")
    if state is not None and edited_state is not None:
        reason = reason or _unscaled(state, edited_state, groups, edited_groups, scale)
    if reason is not None:
        return Disproof(reason)
    if state is None or edited_state is None:
        return Proof(ratio=scale)
    before = simulate_lrs(state, groups, _PROVED_STEPS, rounded=False)
    after = simulate_lrs(edited_state, edited_groups, _PROVED_STEPS, rounded=False)
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        return Proof(ratio=scale)
    return _compare(before, after, scale)


def _compare(before: LrTable, after: LrTable, scale: float) -> Proof | Disproof:
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        for group, (x, y) in enumerate(zip(old, new, strict=True)):
            if not _scaled(x, y, scale):
                return Disproof(
                    f"step {row + 1} after the resume would use {y!r} in group {group}, requested: {x * scale!r}"
                )
    return Proof(ratio=scale)


def _unscaled(
    state: Mapping[str, Any],
    edited: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    edited_groups: Sequence[Mapping[str, Any]],
    scale: float,
) -> str | None:
    name = infer_scheduler_class(state)
    if name is SchedulerClass.DEEPSPEED:
        return (
            "DeepSpeed's own schedulers read their LRs from the DeepSpeed config; no edit of the checkpoint changes them"
        )
    if name is None:
        return f"no known scheduler class has the keys {sorted(map(str, state))}: the fields that its LR depends on are unknown"
    scheduler_fields, group_fields = _DECIDING[name]
    for field in scheduler_fields:
        for x, y in zip(_listed(state.get(field)), _listed(edited.get(field)), strict=True):
            if not _scaled(x, y, scale):
                return f"{name} computes from its {field}; it would be {y!r}, requested: {x!r} x {scale!r}"
    reason = _unscaled_group(groups, edited_groups, group_fields, scale, f"{name} computes from")
    for child, edited_child in zip(child_states(state), child_states(edited), strict=True):
        reason = reason or _unscaled(child, edited_child, groups, edited_groups, scale)
    return reason


def _unscaled_group(
    groups: Sequence[Mapping[str, Any]],
    edited: Sequence[Mapping[str, Any]],
    fields: Iterable[str],
    scale: float,
    who: str,
) -> str | None:
    for field in fields:
        for index, (old, new) in enumerate(zip(groups, edited, strict=True)):
            if field in old and not _scaled(old[field], new[field], scale):
                return (
                    f"{who} the optimizer's {field}; in group {index} it would be {new[field]!r}, "
                    f"requested: {old[field]!r} x {scale!r}"
                )
    return None


def _scaled(before: Any, after: Any, scale: float) -> bool:
    return math.isclose(after, before * scale, rel_tol=_RATIO_TOLERANCE, abs_tol=0.0)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def edited_tree(tree: Any, prefix: Keys, edits: Iterable[FieldEdit]) -> Any:
    """A copy of `tree`, which is at `prefix` of its file, with the edits below that prefix applied."""
    made = {edit.keys: edit.after for edit in edits if edit.keys[: len(prefix)] == prefix}
    return _replaced(tree, prefix, made) if made else tree


def _replaced(tree: Any, keys: Keys, made: Mapping[Keys, float | int]) -> Any:
    if keys in made:  # the storage stays as it was: a float32 LR remains one
        return StoredFloat(made[keys], tree.place) if isinstance(tree, StoredFloat) else made[keys]
    if isinstance(tree, Mapping):
        return {key: _replaced(value, (*keys, key), made) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(value, (*keys, index), made) for index, value in enumerate(tree)]
    return tree


# --- The state of a checkpoint after edits


def edits_by_file(edits: Iterable[FieldEdit]) -> dict[str, list[FieldEdit]]:
    """The edits of each file, in their order."""
    found: dict[str, list[FieldEdit]] = {}
    for edit in edits:
        found.setdefault(edit.file, []).append(edit)
    return found


def edited_state(state: CheckpointState, edits: Sequence[FieldEdit]) -> CheckpointState:
    """The state that will be read from the edited files."""
    by_file = edits_by_file(edits)
    schedulers = [replace(s, state=edited_tree(s.state, s.prefix, by_file.get(s.file, ()))) for s in state.schedulers]
    optimizers = []
    for o in state.optimizers:
        made = {edit.keys: edit.after for edit in by_file.get(o.file, ())}
        groups = [
            {name: made.get(o.group_keys(index, name)[0], value) for name, value in group.items()}
            for index, group in enumerate(o.groups)
        ]
        optimizers.append(replace(o, groups=tuple(groups)))
    return replace(state, schedulers=tuple(schedulers), optimizers=tuple(optimizers))


def of_first_rank(optimizers: Sequence[OptimizerState]) -> list[OptimizerState]:
    """The optimizers of the lowest rank: every rank shard repeats the same groups."""
    ranks = [o.rank for o in optimizers if o.rank is not None]
    return [o for o in optimizers if o.rank is None or o.rank == min(ranks)]


def governed_by(
    scheduler: SchedulerState, pairs: Sequence[tuple[OptimizerState, OptimizerState]]
) -> list[tuple[OptimizerState, OptimizerState]]:
    """The optimizers that are at the LRs of this scheduler; all where none is."""
    found = [pair for pair in pairs if agrees(scheduler.state, [group.get("lr") for group in pair[0].groups])]
    return found or list(pairs)


_SAME = 1e-6


def last_lrs(state: Mapping[str, object]) -> Sequence[object] | None:
    """The LRs that a scheduler set last; None where it does not keep them."""
    for name in ("_last_lr", "_last_value"):
        value = state.get(name)
        if isinstance(value, list | tuple):
            return value
    return (state["hyperparam_value"],) if infer_scheduler_class(state) is SchedulerClass.NEW_BOB else None


def agrees(state: Mapping[str, object], lrs: Sequence[object]) -> bool:
    """Whether a scheduler is at these LRs; one that keeps no LRs agrees when it has as many base values."""
    last = last_lrs(state)
    if last is None:
        counts = [len(v) for name in ("base_lrs", "base_values", "min_lrs") if isinstance(v := state.get(name), list | tuple)]
        return not counts or len(lrs) in counts
    if len(last) == len(lrs):
        return all(_is_same(a, b) for a, b in zip(last, lrs, strict=True))
    # saved flat (FSDP, DCP): parameters with equal fields are one group
    return all(any(_is_same(a, b) for b in lrs) for a in last) and all(any(_is_same(a, b) for a in last) for b in lrs)


def _is_same(a: object, b: object) -> bool:
    return isinstance(a, int | float) and isinstance(b, int | float) and math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-15)
