"""Does an edit do to the LR what was asked? Proved from the fields each class computes from, and by simulation.

A schedule is homogeneous of degree one in its LR-valued fields: if every field a class computes from is multiplied by
s, every later LR is multiplied by s, whatever the function, saved or not. That proves the ratio even for a lambda.
Where the LRs can be computed, before and after are also simulated and compared row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollback.lr.fields import FieldEdit, Keys
from rollback.lr.infer import SchedulerClass, child_states, infer_scheduler_class
from rollback.lr.oracle import LrTable, Unknown, simulate_lrs
from rollback.files.pickle_values import StoredFloat

_RATIO_TOLERANCE = 1e-9

# class -> (scheduler fields, group fields) its next LRs are computed from. `base_lrs` is dead weight in most of them.
_DECIDING: Mapping[SchedulerClass, tuple[tuple[str, ...], tuple[str, ...]]] = {
    SchedulerClass.LAMBDA: (("base_lrs",), ("lr",)),
    SchedulerClass.STEP: ((), ("lr",)),
    SchedulerClass.MULTI_STEP: ((), ("lr",)),
    SchedulerClass.CONSTANT: ((), ("lr",)),
    SchedulerClass.LINEAR: ((), ("lr",)),
    SchedulerClass.EXPONENTIAL: ((), ("lr",)),
    SchedulerClass.POLYNOMIAL: ((), ("lr",)),
    SchedulerClass.COSINE: (("base_lrs", "eta_min"), ("lr",)),
    SchedulerClass.WARM_RESTARTS: (("base_lrs", "eta_min"), ("lr",)),
    SchedulerClass.ONE_CYCLE: ((), ("lr", "initial_lr", "max_lr", "min_lr")),
    SchedulerClass.CYCLIC: (("base_lrs", "max_lrs"), ("lr",)),
    SchedulerClass.PLATEAU: (("min_lrs", "eps"), ("lr",)),
    SchedulerClass.SEQUENTIAL: ((), ("lr",)),
    SchedulerClass.CHAINED: ((), ("lr",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The edit multiplies every later LR by `ratio`; the rows are `Unknown` where a function is not saved."""

    ratio: float
    before: LrTable | Unknown
    after: LrTable | Unknown


@dataclass(frozen=True, slots=True)
class Disproof:
    """The edit does not have the effect that was asked, with the reason in words."""

    reason: str


def prove_ratio(
    state: Mapping[str, Any] | None,
    groups: Sequence[Mapping[str, Any]],
    edited_state: Mapping[str, Any] | None,
    edited_groups: Sequence[Mapping[str, Any]],
    scale: float,
    *,
    k: int = 20,
    scheduler_steps: int = 1,
) -> Proof | Disproof:
    """Prove that the edited state and groups give `scale` times the LRs of the originals, at load and ever after.

    `state` is `None` for an optimizer without a saved scheduler. Groups that share an LR field by name are compared
    one by one; the reason of a `Disproof` names the class and the first field that stands in the way.
    """
    reason = _unscaled_group(groups, edited_groups, ("lr",), scale, "the optimizer steps with")
    if state is not None and edited_state is not None:
        reason = reason or _unscaled(state, edited_state, groups, edited_groups, scale)
    if reason is not None:
        return Disproof(reason)
    if state is None or edited_state is None:
        rows: LrTable = tuple(tuple(float(group["lr"]) for group in groups) for _ in range(k))
        scaled: LrTable = tuple(tuple(float(group["lr"]) for group in edited_groups) for _ in range(k))
        return Proof(ratio=scale, before=rows, after=scaled)
    before = simulate_lrs(state, groups, k, scheduler_steps=scheduler_steps, rounded=False)
    after = simulate_lrs(edited_state, edited_groups, k, scheduler_steps=scheduler_steps, rounded=False)
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        return Proof(ratio=scale, before=before, after=after)
    return _compare(before, after, scale)


def _compare(before: LrTable, after: LrTable, scale: float) -> Proof | Disproof:
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        for group, (x, y) in enumerate(zip(old, new, strict=True)):
            if not _scaled(x, y, scale):
                return Disproof(
                    f"step {row + 1} after the resume would use {y!r} in group {group}, asked: {x * scale!r}"
                )
    return Proof(ratio=scale, before=before, after=after)


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
            "DeepSpeed's own schedulers read their LRs from the DeepSpeed config; nothing in a checkpoint changes them"
        )
    if name is None:
        return f"no known scheduler class has the keys {sorted(map(str, state))}: what it computes from is not known"
    scheduler_fields, group_fields = _DECIDING[name]
    for field in scheduler_fields:
        for x, y in zip(_listed(state.get(field)), _listed(edited.get(field)), strict=True):
            if not _scaled(x, y, scale):
                return f"{name} computes from its {field}; it would be {y!r}, asked: {x!r} x {scale!r}"
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
                    f"asked: {old[field]!r} x {scale!r}"
                )
    return None


def _scaled(before: Any, after: Any, scale: float) -> bool:
    return math.isclose(after, before * scale, rel_tol=_RATIO_TOLERANCE, abs_tol=0.0)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def edited_tree(tree: Any, prefix: Keys, edits: Iterable[FieldEdit]) -> Any:
    """A copy of `tree`, which lies at `prefix` of its file, with the edits under that prefix made."""
    made = {edit.keys: edit.after for edit in edits if edit.keys[: len(prefix)] == prefix}
    return _replaced(tree, prefix, made) if made else tree


def _replaced(tree: Any, keys: Keys, made: Mapping[Keys, float | int]) -> Any:
    if keys in made:  # the file goes on keeping it as it did: an LR in four bytes stays a float32
        return StoredFloat(made[keys], tree.place) if isinstance(tree, StoredFloat) else made[keys]
    if isinstance(tree, Mapping):
        return {key: _replaced(value, (*keys, key), made) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(value, (*keys, index), made) for index, value in enumerate(tree)]
    return tree
