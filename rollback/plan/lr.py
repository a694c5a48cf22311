"""The LR part of a plan: which numbers change, that they do what was asked, and what the coming steps will use. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollback.lr.deepspeed_config import ConfigFile, ConfigPlan, config_notes, plan_config
from rollback.errors import PlanRefused
from rollback.lr.effect import Disproof, prove_ratio
from rollback.lr.fields import FieldEdit, lr_edits, plain_number
from rollback.lr.infer import SchedulerClass, infer_scheduler_class
from rollback.plan.plan_forecast import forecast
from rollback.plan.plan_sets import plan_sets, sets_lr
from rollback.plan.request import ExpectedLrs, RollbackRequest
from rollback.lr.state_edits import edited_state, governed_by, of_first_rank
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState

_SAME_LR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LrPlan:
    """Edits with what follows from them; `schedulers` are the counters the next launch must find."""

    edits: tuple[FieldEdit, ...]
    config_edits: tuple[FieldEdit, ...]
    classes: Mapping[str, str]
    expected: ExpectedLrs
    schedulers: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def plan_lr_edits(
    request: RollbackRequest,
    state: CheckpointState,
    memory: Mapping[str, Any] | None,
    config: ConfigFile | None = None,
) -> LrPlan:
    """Plan the edits and prove their effect; raises `PlanRefused` with the reason when they would not have it."""
    scale = _scale_of(request, state.optimizers)
    configured = _plan_config(state, config, scale)
    edits = plan_sets(request, state)
    ratio: float | None = None if request.sets else 1.0
    if scale is not None:
        if sets_lr(request):
            raise PlanRefused("an LR scale and an LR field were both given", remedy="use --lr-scale or --lr alone")
        scaled = lr_edits(state.schedulers, state.optimizers, scale)
        edits += _exact(scaled, request.lr)
        ratio = None if request.sets else scale
        _prove(state, scaled, scale)
    edited = edited_state(state, edits)
    table, source, reason = forecast(edited, state, memory, ratio, moved=bool(request.sets))
    groups = [group for optimizer in of_first_rank(edited.optimizers) for group in optimizer.groups]
    lrs = tuple(lr for group in groups if (lr := _optional(group.get("lr"))) is not None)
    lrs = lrs if len(lrs) == len(groups) else ()  # an LR that cannot be read promises nothing
    return LrPlan(
        # A sharded state names its index; the edit goes to the part on disk that holds the field.
        config_edits=configured.edits,
        edits=tuple(replace(edit, file=state.file_holding(edit.file, edit.keys)) for edit in edits),
        classes={s.file: _describe(s) for s in state.schedulers},
        expected=ExpectedLrs(
            lrs=lrs,
            initial_lrs=tuple(_optional(group.get("initial_lr")) for group in groups)[: len(lrs)],
            ratio=ratio,
            next_lrs=table,
            source=source,
            reason=reason,
        ),
        schedulers=tuple(_counters(s) for s in edited.schedulers if s.authoritative),
        notes=(*_notes(state, scale, request), *configured.notes),
    )


def _plan_config(state: CheckpointState, config: ConfigFile | None, scale: float | None) -> ConfigPlan:
    """DeepSpeed's own scheduler takes its LRs from a file outside the checkpoint: it has to change with it."""
    if not any(_is_deepspeeds_own(scheduler) for scheduler in state.schedulers):
        return ConfigPlan()
    if scale is None:
        return ConfigPlan(notes=config_notes(config, state.config))
    return plan_config(config, state.config, scale)


def _is_deepspeeds_own(scheduler: SchedulerState) -> bool:
    return infer_scheduler_class(scheduler.state) is SchedulerClass.DEEPSPEED


# --- how much ---------------------------------------------------------------------------------------------------------


def _scale_of(request: RollbackRequest, optimizers: Sequence[OptimizerState]) -> float | None:
    if request.lr is None:
        return request.lr_scale
    if not optimizers:
        raise PlanRefused("--lr: no optimizer state holds an LR in this checkpoint")
    values = {
        float(plain_number(group["lr"], file=optimizer.file, keys=("param_groups", index, "lr")))
        for optimizer in optimizers
        for index, group in enumerate(optimizer.groups)
    }
    if len(values) != 1:
        listed = ", ".join(f"{value:.6g}" for value in sorted(values))
        raise PlanRefused(
            f"--lr {request.lr:g}: the parameter groups have different LRs ({listed}); one absolute LR would end their ratio",
            remedy="scale them together with --lr-scale",
        )
    present = values.pop()
    if present == 0.0:
        raise PlanRefused(
            f"--lr {request.lr:g}: the LR is 0 at this step (warm-up), no factor leads from there to it",
            remedy="use --lr-scale, or go back to a later step",
        )
    return request.lr / present


def _exact(edits: Sequence[FieldEdit], lr: float | None) -> tuple[FieldEdit, ...]:
    """With an absolute LR the LR itself ends at exactly that number, not one rounding beside it."""
    if lr is None:
        return tuple(edits)
    return tuple(replace(edit, after=lr) if math.isclose(edit.after, lr, rel_tol=_SAME_LR) else edit for edit in edits)


# --- does it do what was asked ----------------------------------------------------------------------------------------


def _prove(state: CheckpointState, edits: Sequence[FieldEdit], scale: float) -> None:
    after = edited_state(state, edits)
    pairs = list(zip(state.optimizers, after.optimizers, strict=True))
    if not pairs:
        raise PlanRefused(
            "no optimizer state in this checkpoint: its parameter groups hold the LR that is stepped with"
        )
    for optimizer, edited in pairs:
        answer = prove_ratio(None, optimizer.groups, None, edited.groups, scale)
        if isinstance(answer, Disproof):
            raise _refusal(optimizer.file, answer)
    for scheduler, edited_scheduler in zip(state.schedulers, after.schedulers, strict=True):
        if _is_deepspeeds_own(scheduler):
            continue  # every field that it computes from is in the config, and all of them are scaled there
        for optimizer, edited in governed_by(scheduler, pairs):
            answer = prove_ratio(scheduler.state, optimizer.groups, edited_scheduler.state, edited.groups, scale)
            if isinstance(answer, Disproof):
                raise _refusal(scheduler.file, answer)


def _refusal(file: str, answer: Disproof) -> PlanRefused:
    return PlanRefused(
        f"the edit would not do what was asked, in `{file}`: {answer.reason}",
        remedy="set the LR in the training script, or scale all LR fields with --lr-scale alone",
    )


def _counters(scheduler: SchedulerState) -> dict[str, Any]:
    return {
        "file": scheduler.file,
        "last_epoch": scheduler.state.get("last_epoch", scheduler.state.get("last_batch_iteration")),
        "step_count": scheduler.state.get("_step_count"),
    }


def _describe(scheduler: SchedulerState) -> str:
    name = infer_scheduler_class(scheduler.state)
    return f"{name or 'unknown scheduler'}, {scheduler.owner}" + ("" if scheduler.authoritative else ", overridden")


def _optional(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _notes(state: CheckpointState, scale: float | None, request: RollbackRequest) -> tuple[str, ...]:
    notes = []
    if scale is not None and not state.schedulers:
        notes.append("no scheduler was saved: a scheduler that the script creates anew will overwrite this LR")
    if request.sets and "last_epoch" in request.sets and state.scheduler_unit is None:
        notes.append(
            "how many counts the scheduler makes per optimizer step cannot be told: last_epoch is taken literally"
        )
    return tuple(notes)
