"""Where the LR lives in a saved scheduler and in optimizer groups, and the edits that scale it in all those places.

The seed's one-liner changed `base_lrs` and `_last_lr` of one file, which has no effect for 13 of 26 schedulers: the
recursive ones compute from the optimizer's `lr`, OneCycleLR from its `initial_lr, max_lr, min_lr`. Scaling every field
listed here, nested schedulers included, is right for all of them (measured: each class by 20 real steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rollback.errors import PlanRefused
from rollback.lr.infer import SchedulerClass, infer_scheduler_class

Keys: TypeAlias = tuple[str | int, ...]

GROUP_FIELDS = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULER_FIELDS = ("base_lrs", "_last_lr", "eta_min", "max_lrs", "min_lrs", "default_min_lr")
# ReduceLROnPlateau reduces only when the change exceeds `eps`, an absolute LR: it has to scale like the others.
PLATEAU_FIELDS = (*SCHEDULER_FIELDS, "eps")


class ScheduledFile(Protocol):
    """What is needed of `rollback.checkpoint.rollback_state.SchedulerState`."""

    @property
    def file(self) -> str: ...
    @property
    def prefix(self) -> Keys: ...
    @property
    def state(self) -> Mapping[str, Any]: ...


class OptimizerFile(Protocol):
    """What is needed of `rollback.checkpoint.rollback_state.OptimizerState`."""

    @property
    def file(self) -> str: ...
    @property
    def prefix(self) -> Keys: ...
    @property
    def groups(self) -> tuple[Mapping[str, Any], ...]: ...
    def group_keys(self, index: int, field: str) -> tuple[Keys, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldEdit:
    """One number in one file: `keys` lead to it from the root of the file's tree."""

    file: str
    keys: Keys
    before: float | int
    after: float | int

    @property
    def field(self) -> str:
        """The dotted name a person reads, such as `param_groups.0.lr`."""
        return ".".join(str(key) for key in self.keys)


def scheduler_lr_leaves(state: Mapping[str, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of every LR-valued number of a scheduler state, nested schedulers included."""
    fields = PLATEAU_FIELDS if infer_scheduler_class(state) is SchedulerClass.PLATEAU else SCHEDULER_FIELDS
    for name in fields:
        yield from _numbers(state.get(name), (*prefix, name))
    children = state.get("_schedulers")
    if isinstance(children, list | tuple):
        for index, child in enumerate(children):
            yield from scheduler_lr_leaves(child, (*prefix, "_schedulers", index))


def group_lr_leaves(optimizer: OptimizerFile) -> Iterator[tuple[Keys, Any]]:
    """Yield (keys, value) of every LR-valued number of the optimizer's parameter groups."""
    for index, group in enumerate(optimizer.groups):
        for name in GROUP_FIELDS:
            for keys in optimizer.group_keys(index, name):
                yield from _numbers(group.get(name), keys)


def lr_edits(
    schedulers: Iterable[ScheduledFile], optimizers: Iterable[OptimizerFile], scale: float
) -> tuple[FieldEdit, ...]:
    """The full edit: every LR-valued field of every scheduler and every optimizer group, times `scale`.

    Raises `PlanRefused` for an LR kept as a tensor or numpy scalar, which cannot be edited as a Python float:
    found and refused, never missed.
    """
    edits: list[FieldEdit] = []
    for scheduler in schedulers:
        edits += _scaled(scheduler.file, scheduler_lr_leaves(scheduler.state, scheduler.prefix), scale)
    for optimizer in optimizers:
        edits += _scaled(optimizer.file, group_lr_leaves(optimizer), scale)
    return tuple(edits)


def plain_number(value: Any, *, file: str, keys: Keys) -> float | int:
    """Return `value` when it is a Python int or float, else raise `PlanRefused` naming where it was found."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    name = ".".join(str(key) for key in keys)
    raise PlanRefused(
        f"LR `{name}` in `{file}` is kept as {type(value).__name__}, expected a Python float",
        remedy="save the optimizer with float LRs (not tensor or numpy ones), or edit this field in the training script",
    )


def _scaled(file: str, leaves: Iterable[tuple[Keys, Any]], scale: float) -> Iterator[FieldEdit]:
    for keys, value in leaves:
        before = plain_number(value, file=file, keys=keys)
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
