"""What the coming steps will use: computed from the edited state, from recorded arguments, or recorded at save. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollback.lr.deepspeed import deepspeed_lrs
from rollback.lr.infer import SchedulerClass, infer_scheduler_class
from rollback.lr.oracle import LrTable, Unknown, next_lrs
from rollback.lr.transformers import transformers_lrs
from rollback.plan.request import Source
from rollback.lr.state_edits import governed_by, of_first_rank
from rollback.checkpoint.state import CheckpointState

FORECAST_STEPS = 20


def forecast(
    edited: CheckpointState,
    state: CheckpointState,
    memory: Mapping[str, Any] | None,
    ratio: float | None,
    *,
    moved: bool,
) -> tuple[LrTable | None, Source, str]:
    computed = _computed(edited, state)
    stored = None if moved or ratio is None else _stored(memory, ratio)
    if stored is not None and (isinstance(computed, Unknown) or not _agree(computed, stored)):
        return stored, Source.STORED, ""
    if not isinstance(computed, Unknown):
        return computed, Source.COMPUTED, ""
    if not moved:
        configured = _configured(edited, state, ratio or 1.0)
        if not isinstance(configured, Unknown):
            return configured, Source.CONFIGURED, "as long as the next launch is given the same arguments"
    return None, Source.UNKNOWN, computed.reason


def _computed(edited: CheckpointState, state: CheckpointState) -> LrTable | Unknown:
    optimizers = list(zip(of_first_rank(state.optimizers), of_first_rank(edited.optimizers), strict=True))
    if not edited.schedulers:
        return Unknown("no scheduler was saved with this checkpoint")
    if state.scheduler_unit is None:
        return Unknown("how often the scheduler advances per optimizer step cannot be told from this checkpoint")
    tables: list[LrTable] = []
    for optimizer, edited_optimizer in optimizers:
        table: LrTable | Unknown = Unknown("no scheduler governs these parameter groups")
        for scheduler, edited_scheduler in zip(state.schedulers, edited.schedulers, strict=True):
            if scheduler.authoritative and governed_by(scheduler, [(optimizer, edited_optimizer)]):
                table = next_lrs(
                    edited_scheduler.state,
                    edited_optimizer.groups,
                    FORECAST_STEPS,
                    scheduler_steps=state.scheduler_unit,
                )
                break
        if isinstance(table, Unknown):
            return table
        tables.append(table)
    return tuple(tuple(lr for row in rows for lr in row) for rows in zip(*tables, strict=True))


def _configured(edited: CheckpointState, state: CheckpointState, ratio: float) -> LrTable | Unknown:
    """From recorded arguments: transformers' schedule, DeepSpeed's own scheduler. Only for a single scheduler."""
    first, schedulers = of_first_rank(state.optimizers), [s for s in state.schedulers if s.authoritative]
    if len(first) != 1 or not schedulers:
        return Unknown("several optimizers, or no scheduler")
    scheduler, groups = schedulers[0].state, first[0].groups
    name = infer_scheduler_class(scheduler)
    if name is SchedulerClass.DEEPSPEED:
        rows = deepspeed_lrs(scheduler, groups, state.config, FORECAST_STEPS)
    elif name is SchedulerClass.LAMBDA and "lr_scheduler_type" in state.config:
        horizon = state.counters.get("trainer_state.json:max_steps")
        rows = transformers_lrs(scheduler, groups, state.config, horizon, FORECAST_STEPS)
    else:
        return Unknown("no arguments were recorded")
    return rows if isinstance(rows, Unknown) else tuple(tuple(lr * ratio for lr in row) for row in rows)


def _stored(memory: Mapping[str, Any] | None, ratio: float) -> LrTable | None:
    """The forecast made from live objects at save; none where the trainer sets its LR by hand."""
    rows = (memory or {}).get("next_lrs")
    if not rows or (memory or {}).get("lr_source") == "manual":
        return None
    return tuple(tuple(float(lr) * ratio for lr in row) for row in rows)


def _agree(computed: LrTable, stored: LrTable) -> bool:
    return all(
        len(x) == len(y) and all(math.isclose(p, q, rel_tol=1e-6, abs_tol=1e-15) for p, q in zip(x, y, strict=True))
        for x, y in zip(computed, stored, strict=False)
    )
