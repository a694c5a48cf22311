"""The LR edits of a plan: the numbers to change in each file, the proof of the effect, and the LRs of the next steps. Pure.

An edit is proved on a copy of the state: every LR of the next steps must be the old one times the factor. A plan that
cannot be proved is refused. Where each scheduler keeps its LR is in `rollback.lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState
from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile
from rollback.files.json_file import Keys
from rollback.files.torch_tree import plain_number
from rollback.lr.authority import Doubt, Evidence, filled_by_trainer, lr_assumptions, lr_doubts, seen_by_guard
from rollback.lr.deepspeed import ConfigPlan, config_notes, plan_config
from rollback.lr.effect import (
    Disproof,
    FieldEdit,
    edited_state,
    governed_by,
    lr_edits,
    need_plain_number,
    of_first_rank,
    prove_ratio,
    scheduler_lr_leaves,
)
from rollback.lr.launch_config import named_edits
from rollback.lr.oracle import LrTable, Unknown, next_lrs
from rollback.lr.rules import CLOSED_FORM, SchedulerClass, infer_scheduler_class
from rollback.plan.request import OF_BETAS, ExpectedLrs, RollbackRequest, Source

_SAME_LR = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LrPlan:
    """The LR edits and their effect; `schedulers` are the counters that the next launch must find."""

    edits: tuple[FieldEdit, ...]
    config_edits: tuple[FieldEdit, ...]
    classes: Mapping[str, str]
    expected: ExpectedLrs
    schedulers: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
    options: tuple[str, ...]  # of the optimizer, that `--set` gave another value


def plan_lr_edits(
    request: RollbackRequest,
    state: CheckpointState,
    memory: Mapping[str, Any] | None,
    config: ConfigFile | None = None,
    evidence: Evidence | None = None,
) -> LrPlan:
    """Plan the edits and prove their effect; raises `PlanRefused` with the reason when the proof fails.

    `evidence` is what is known of the next launch: the arguments and fields to change are quoted from it.
    """
    scale = _scale_of(request, state.optimizers)
    configured = _plan_config(state, config, scale)
    edits = plan_sets(request, state)
    moved = len(set_options(request, state)) < len(request.sets)
    ratio: float | None = None if moved else 1.0
    unproved: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    if scale is not None:
        if sets_lr(request):
            raise PlanRefused(
                "--set names an LR field, and --lr-scale or --lr is given too: expected one of them", remedy="drop the --set"
            )
        scaled = lr_edits(state.schedulers, state.optimizers, scale)
        edits += _exact(scaled, request.lr)
        ratio = None if moved else scale
        known = replace(evidence or Evidence(), memory=memory)
        filled = filled_by_trainer(configured.filled, configured.path, scale, known)
        in_configs, unproved = _settled(request, state, scale, known, filled)
        configured = replace(configured, edits=(*configured.edits, *in_configs))
        _prove(state, scaled, scale, accepted=bool(unproved))
        assumed = () if unproved else lr_assumptions(state, known)
    edited = edited_state(state, edits)
    table, source, reason = forecast(edited, state, memory, ratio, moved=moved)
    groups = [group for optimizer in of_first_rank(edited.optimizers) for group in optimizer.groups]
    lrs = tuple(lr for group in groups if (lr := _optional(group.get("lr"))) is not None)
    lrs = lrs if len(lrs) == len(groups) else ()  # nothing is expected when one of the LRs cannot be read
    return LrPlan(
        config_edits=configured.edits,
        # A sharded state names its index; the edit goes to the file that holds the field.
        edits=tuple(replace(edit, file=state.file_holding(edit.file, edit.keys)) for edit in edits),
        classes={s.file: _describe(s) for s in state.schedulers},
        expected=ExpectedLrs(
            lrs=lrs,
            initial_lrs=tuple(_optional(group.get("initial_lr")) for group in groups)[: len(lrs)],
            ratio=ratio,
            next_lrs=table,
            source=source,
            reason=reason,
            unproved=unproved,
            assumed=assumed,
        ),
        schedulers=tuple(_counters(s) for s in edited.schedulers if s.authoritative),
        notes=(*_notes(state, scale, request), *configured.notes),
        options=set_options(request, state),
    )


def lr_elsewhere(state: CheckpointState, evidence: Evidence) -> str:
    """Why an edit of the LRs would be refused because the next launch may take its LR from elsewhere; "" where it is proved.

    DeepSpeed's own schedulers are left out: their LRs are edited in its config.
    """
    if not state.optimizers or any(_is_deepspeeds_own(one) for one in state.schedulers):
        return ""
    if seen_by_guard(state, evidence.memory):
        return ""
    return "; ".join(dict.fromkeys(doubt.seen for doubt in lr_doubts(state, 0.5, evidence)))


def _settled(
    request: RollbackRequest, state: CheckpointState, scale: float, evidence: Evidence, filled: Sequence[Doubt] = ()
) -> tuple[tuple[FieldEdit, ...], tuple[str, ...]]:
    """The edits of the fields that a person named, and what else may decide the LR, empty where the effect is proved.

    A named field is no proof: the guard holds the LR. Raises `PlanRefused` where a doubt remains that nobody accepted.
    """
    if not state.optimizers:
        return (), ()  # refused by `_prove`
    edits = named_edits(request.lr_in, evidence.config.files, scale)
    doubts = (*filled, *lr_doubts(state, scale, evidence))
    seen = tuple(doubt.seen for doubt in doubts)
    if edits:
        return edits, (f"{', '.join(request.lr_in)} was named as the place of the LR", *seen)
    if not doubts or request.accept_unproved:
        return (), seen
    if seen_by_guard(state, evidence.memory):
        return (), ("no scheduler was saved; the guard saw the optimizer's own LR in use",)
    raise _not_proved(doubts)


def _not_proved(doubts: Sequence[Doubt]) -> PlanRefused:
    seen = "; ".join(dict.fromkeys(doubt.seen for doubt in doubts))
    changes = "; ".join(dict.fromkeys(doubt.change for doubt in doubts if doubt.change))
    then = f'--accept-unproved "why it is right" makes the edit{" as well" if changes else ""}, and the guard of the next '
    return PlanRefused(
        f"the LR of the next launch is not proved to follow from this checkpoint: {seen}",
        remedy=f"{changes}; then {then}launch holds the LR" if changes else f"{then}launch holds the LR",
    )


def _plan_config(state: CheckpointState, config: ConfigFile | None, scale: float | None) -> ConfigPlan:
    """Edits of the DeepSpeed config: DeepSpeed's own scheduler reads its LRs there, not in the checkpoint."""
    if not any(_is_deepspeeds_own(scheduler) for scheduler in state.schedulers):
        return ConfigPlan()
    if scale is None:
        return ConfigPlan(notes=config_notes(config, state.config))
    return plan_config(config, state.config, scale)


def _is_deepspeeds_own(scheduler: SchedulerState) -> bool:
    return infer_scheduler_class(scheduler.state) is SchedulerClass.DEEPSPEED


def _scale_of(request: RollbackRequest, optimizers: Sequence[OptimizerState]) -> float | None:
    if request.lr is None:
        return request.lr_scale
    if not optimizers:
        raise PlanRefused(
            "--lr: the optimizer states of this checkpoint hold no LR", remedy="set the LR in the training script"
        )
    values = _lrs_of(optimizers)
    if len(values) != 1:
        listed = ", ".join(f"{value:.6g}" for value in sorted(values))
        raise PlanRefused(
            f"--lr {request.lr:g}: the parameter groups have different LRs ({listed}): expected the same LR in all",
            remedy="scale them together with --lr-scale",
        )
    present = values.pop()
    if present == 0.0:
        raise PlanRefused(
            f"--lr {request.lr:g}: the LR is 0 at this step (warm-up): expected an LR that a factor can change",
            remedy="use --lr-scale, or go back to a later step",
        )
    return request.lr / present


def has_one_lr(state: CheckpointState) -> bool:
    """Whether `--lr` can change the LR of this checkpoint: its parameter groups share one, and it is not 0."""
    values = _lrs_of(state.optimizers)
    return len(values) == 1 and 0.0 not in values


def _lrs_of(optimizers: Sequence[OptimizerState]) -> set[float]:
    return {
        float(need_plain_number(group["lr"], file=optimizer.file, keys=("param_groups", index, "lr")))
        for optimizer in optimizers
        for index, group in enumerate(optimizer.groups)
    }


def _exact(edits: Sequence[FieldEdit], lr: float | None) -> tuple[FieldEdit, ...]:
    """With `--lr`, the LR becomes exactly that number, without the rounding error of a factor."""
    if lr is None:
        return tuple(edits)
    return tuple(replace(edit, after=lr) if math.isclose(edit.after, lr, rel_tol=_SAME_LR) else edit for edit in edits)


def _prove(state: CheckpointState, edits: Sequence[FieldEdit], scale: float, *, accepted: bool) -> None:
    """Raise `PlanRefused` unless the edits change every next LR by the factor `scale`.

    `accepted`: a person accepted that the effect is not proved. The optimizer's LRs must be changed nevertheless.
    """
    after = edited_state(state, edits)
    pairs = list(zip(state.optimizers, after.optimizers, strict=True))
    if not pairs:
        said = "no optimizer state in this checkpoint: expected parameter groups, which hold the LR of the next step"
        raise PlanRefused("; ".join((said, *state.doubtful)))
    for optimizer, edited in pairs:
        answer = prove_ratio(None, optimizer.groups, None, edited.groups, scale)
        if isinstance(answer, Disproof):
            raise _refusal(optimizer.file, answer)
    for scheduler, edited_scheduler in zip(state.schedulers, after.schedulers, strict=True) if not accepted else ():
        if _is_deepspeeds_own(scheduler):
            continue  # it computes from the config, where every LR field is scaled
        for optimizer, edited in governed_by(scheduler, pairs):
            answer = prove_ratio(scheduler.state, optimizer.groups, edited_scheduler.state, edited.groups, scale)
            if isinstance(answer, Disproof):
                raise _refusal(scheduler.file, answer)


def _refusal(file: str, answer: Disproof) -> PlanRefused:
    return PlanRefused(
        f"the edit would not have the requested effect on the LR, in `{file}`: {answer.reason}",
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
    if scale is not None and request.accept_unproved:
        notes.append(f"accepted without proof: {request.accept_unproved}")
    if request.sets and "last_epoch" in request.sets and state.scheduler_unit is None:
        notes.append(
            "the number of scheduler counts per optimizer step is unknown: last_epoch is set to the given value"
        )
    for name in set_options(request, state):
        notes.append(f"the guard of the next launch does not compare `{name}` with the save: it was set")
    return tuple(notes)


# --- Single fields given a value (`--set`)

_COUNTERS = ("last_epoch", "_step_count", "T_cur", "last_batch_iteration")
# name given to --set -> (fields of the scheduler, fields of the optimizer's groups) that hold it
_LR_NAMES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lr": (("_last_lr",), ("lr",)),
    "_last_lr": (("_last_lr",), ("lr",)),
    "base_lrs": (("base_lrs",), ("initial_lr",)),
    "initial_lr": (("base_lrs",), ("initial_lr",)),
}


def sets_lr(request: RollbackRequest) -> bool:
    """Whether `--set` names an LR field."""
    return any(name in _LR_NAMES for name in request.sets)


def plan_sets(request: RollbackRequest, state: CheckpointState) -> tuple[FieldEdit, ...]:
    """The edits of `--set FIELD=VALUE`; raises `PlanRefused` for an unknown field or one that alone has no effect."""
    sets = dict(request.sets)
    if not sets:
        return ()
    if "last_epoch" in sets and "_step_count" not in sets:
        # torch keeps it one ahead of last_epoch; Accelerate's wrapper compares it with total_steps
        sets["_step_count"] = int(sets["last_epoch"]) + 1
    edits = [edit for name, value in sets.items() for edit in _set_one(name, value, state, request)]
    _check_counters(sets, state, request)
    _check_lr_sets(sets, state, edits)
    return tuple(edits)


def _set_one(name: str, value: float | int, state: CheckpointState, request: RollbackRequest) -> Iterator[FieldEdit]:
    found = list(_places(name, state))
    if not found:
        for scheduler in state.schedulers:
            if name in scheduler.state:
                raise PlanRefused(
                    f"--set {name}: the scheduler in `{scheduler.file}` computes its LRs from it, and not from it alone",
                    remedy="use --lr-scale, which changes all that belongs together, or change it in the script",
                )
        known = sorted(set(_known_names(state)))
        raise PlanRefused(
            f"--set {name}: no such field in this checkpoint: expected {', '.join(known) or 'a field that can be set'}",
            remedy="`chronicle inspect` lists the fields; a full name is `file:key.path`",
        )
    for file, keys, present in found:
        before = need_plain_number(present, file=file, keys=keys)
        after = float(value) if isinstance(before, float) else value
        if isinstance(before, int) and int(after) != after:
            raise PlanRefused(f"--set {name}={value}: expected a whole number, as in `{file}`")
        if after != before:
            yield FieldEdit(
                file=file, keys=keys, before=before, after=after if isinstance(before, float) else int(after)
            )


def _known_names(state: CheckpointState) -> Iterator[str]:
    for scheduler in state.schedulers:
        yield from scheduler.state.keys() & {*_COUNTERS, *_LR_NAMES}
    yield from state.counters
    for optimizer in state.optimizers:
        for group in optimizer.groups:
            yield from (name for name, value in group.items() if _is_number(value))
            yield from OF_BETAS if "betas" in group else ()


def _places(name: str, state: CheckpointState) -> Iterator[tuple[str, Keys, Any]]:
    """(file, keys, value) of each number that the field `name` stands for."""
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
        yield from _option_places(name, state)


def _option_places(name: str, state: CheckpointState) -> Iterator[tuple[str, Keys, Any]]:
    """(file, keys, value) of an option of the optimizer in each parameter group; `beta1` and `beta2` are parts of `betas`."""
    field = "betas" if name in OF_BETAS else name
    for optimizer in state.optimizers:
        for index, group in enumerate(optimizer.groups):
            value = group.get(field)
            for keys in optimizer.group_keys(index, field):
                if field == name and _is_number(value):
                    yield optimizer.file, keys, value
                elif field != name and isinstance(value, list | tuple) and len(value) > OF_BETAS[name]:
                    yield optimizer.file, (*keys, OF_BETAS[name]), value[OF_BETAS[name]]


def _is_number(value: Any) -> bool:
    number = plain_number(value)
    return isinstance(number, int | float) and not isinstance(number, bool)


def set_options(request: RollbackRequest, state: CheckpointState) -> tuple[str, ...]:
    """The names of `--set` that are options of the optimizer: no counter and no LR, which are compared as ever."""
    others = {*_COUNTERS, *_LR_NAMES}
    return tuple(name for name in request.sets if name not in others and any(_option_places(name, state)))


def _check_counters(sets: Mapping[str, float | int], state: CheckpointState, request: RollbackRequest) -> None:
    moved = [name for name in ("last_epoch", "T_cur", "last_batch_iteration") if name in sets]
    for scheduler in state.schedulers if moved else ():
        name = infer_scheduler_class(scheduler.state)
        if name not in CLOSED_FORM:
            raise PlanRefused(
                f"--set {moved[0]}: {name or 'this scheduler'} in `{scheduler.file}` computes each LR from the previous "
                "one: a new counter alone would keep the LR of the old step",
                remedy="go back to the checkpoint of that step with --to",
            )
    unit, value = state.scheduler_unit, sets.get("last_epoch")
    if unit not in (None, 1) and value is not None and value == request.step:
        raise PlanRefused(
            f"--set last_epoch={value}: this scheduler counts {unit} per optimizer step (one per process): "
            f"expected last_epoch={request.step * (unit or 1)} for step {request.step}",
            remedy=f"--set last_epoch={request.step * (unit or 1)}",
        )


def _check_lr_sets(sets: Mapping[str, float | int], state: CheckpointState, edits: Sequence[FieldEdit]) -> None:
    """Raise `PlanRefused` for single LR fields that do not set the LR: only LambdaLR with both fields does."""
    given = {_LR_NAMES[name][1][0] for name in sets if name in _LR_NAMES}
    if not given:
        return
    for scheduler in state.schedulers:
        name = infer_scheduler_class(scheduler.state)
        if name is SchedulerClass.LAMBDA and given != {"lr", "initial_lr"}:
            raise PlanRefused(
                f"LambdaLR in `{scheduler.file}` uses `lr` for the first step and `base_lrs` for all later ones: "
                f"expected both, found only {'lr' if 'lr' in given else 'base_lrs'}",
                remedy="set both, or use --lr-scale, which changes all of them",
            )
        if name is not SchedulerClass.LAMBDA:
            raise PlanRefused(
                f"{name or 'the scheduler'} in `{scheduler.file}` computes the LR from several fields: setting one of them "
                "does not set the LR",
                remedy="use --lr-scale or --lr, which change all of them",
            )


# --- The LRs of the next steps

FORECAST_STEPS = 20


def forecast(
    edited: CheckpointState,
    state: CheckpointState,
    memory: Mapping[str, Any] | None,
    ratio: float | None,
    *,
    moved: bool,
) -> tuple[LrTable | None, Source, str]:
    """LRs of the next steps, where they are known from, and the reason where not. `moved`: a counter was set.

    Those recorded at save are preferred where they contradict the computed ones, since they come from live objects.
    """
    computed = _computed(edited, state)
    stored = None if moved or ratio is None else _stored(memory, ratio)
    if stored is not None and (isinstance(computed, Unknown) or not _agree(computed, stored)):
        return stored, Source.STORED, ""
    if not isinstance(computed, Unknown):
        return computed, Source.COMPUTED, ""
    return None, Source.UNKNOWN, computed.reason


def _computed(edited: CheckpointState, state: CheckpointState) -> LrTable | Unknown:
    optimizers = list(zip(of_first_rank(state.optimizers), of_first_rank(edited.optimizers), strict=True))
    if not edited.schedulers:
        return Unknown("no scheduler was saved with this checkpoint")
    if state.scheduler_unit is None:
        return Unknown("the checkpoint does not record how often the scheduler advances per optimizer step")
    tables: list[LrTable] = []
    for pair in optimizers:
        table: LrTable | Unknown = Unknown("no scheduler governs these parameter groups")
        for scheduler, edited_scheduler in zip(state.schedulers, edited.schedulers, strict=True):
            if scheduler.authoritative and pair in governed_by(scheduler, optimizers):
                table = next_lrs(
                    edited_scheduler.state,
                    pair[1].groups,
                    FORECAST_STEPS,
                    scheduler_steps=state.scheduler_unit,
                )
                break
        if isinstance(table, Unknown):
            return table
        tables.append(table)
    return tuple(tuple(lr for row in rows for lr in row) for rows in zip(*tables, strict=True))


def _stored(memory: Mapping[str, Any] | None, ratio: float) -> LrTable | None:
    """The forecast that the guard made at save, scaled; None where the trainer sets its LR itself."""
    rows = (memory or {}).get("next_lrs")
    if not rows or (memory or {}).get("lr_source") == "manual":
        return None
    return tuple(tuple(float(lr) * ratio for lr in row) for row in rows)


def _agree(computed: LrTable, stored: LrTable) -> bool:
    return all(
        len(x) == len(y) and all(math.isclose(p, q, rel_tol=1e-6, abs_tol=1e-15) for p, q in zip(x, y, strict=True))
        for x, y in zip(computed, stored, strict=False)
    )
