"""Summarises a checkpoint's state as JSON. Pure.

`chronicle inspect` prints the summary. Per-parameter counters appear as a range.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollback.checkpoint.layout import Role
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState, last_epoch_of
from rollback.lr import infer_scheduler_class

LR_FIELDS = ("_last_lr", "base_lrs", "max_lrs", "min_lrs", "eta_min")
GROUP_FIELDS = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "betas", "momentum", "eps")


def summarise(state: CheckpointState) -> dict[str, object]:
    """Everything that decides how the run continues, as one JSON-able mapping."""
    checkpoint = state.checkpoint
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "step": next((n for n in (checkpoint.step, state.writer_step, state.optimizer_step) if n is not None), None),
        "step_source": checkpoint.step_source if checkpoint.step is not None else "counters",
        "launch": checkpoint.launch,
        "abandoned": checkpoint.abandoned,
        "size_bytes": checkpoint.size_bytes,
        "num_files": len(checkpoint.files),
        "optimizer_step": state.optimizer_step,
        "scheduler_unit": state.scheduler_unit,
        "world_size": state.world_size,
        "schedulers": [_scheduler(s) for s in state.schedulers],
        "optimizers": [_optimizer(o) for o in state.optimizers],
        "counters": dict(state.counters),
        "rng": {"ranks": list(state.rng_ranks), "digests": {str(k): v for k, v in state.rng_digests.items()}},
        "data": {key: json_form(value) for key, value in state.data.items()},
        "topology": {key: json_form(value) for key, value in state.topology.items()},
        "config": {key: json_form(value) for key, value in state.config.items()},
        "strays": list(checkpoint.strays),
        "notes": list(state.notes),
        "account": [one.to_json() for one in state.account],
        "files": [
            {"path": f.path, "role": f.role.value, "rank": f.rank, "size_bytes": f.size_bytes}
            for f in checkpoint.files
            if f.role is not Role.OTHER
        ],
    }


def _scheduler(scheduler: SchedulerState) -> dict[str, object]:
    inferred = infer_scheduler_class(scheduler.state)
    return {
        "file": scheduler.file,
        "keys": list(scheduler.prefix),
        "owner": scheduler.owner,
        "authoritative": scheduler.authoritative,
        "rank": scheduler.rank,
        "class": getattr(inferred, "value", inferred),
        "last_epoch": last_epoch_of(scheduler.state),
        "state": {key: json_form(value) for key, value in scheduler.state.items()},
    }


def _optimizer(optimizer: OptimizerState) -> dict[str, object]:
    return {
        "file": optimizer.file,
        "keys": list(optimizer.prefix),
        "owner": optimizer.owner,
        "rank": optimizer.rank,
        "num_states": optimizer.num_states,
        "steps": list(optimizer.steps) if optimizer.steps else None,
        "moments": list(optimizer.moments),
        "groups": [
            {key: json_form(value) for key, value in group.items() if key != "params"}
            | ({"num_params": len(group["params"])} if isinstance(group.get("params"), list) else {})  # type: ignore[arg-type]
            for group in optimizer.groups
        ],
    }


def json_form(value: object, levels: int = 6) -> object:
    """A JSON-able form: numbers as plain numbers, tensors and objects as short descriptions."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if levels == 0:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): json_form(part, levels - 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        shown = [json_form(part, levels - 1) for part in value[:64]]
        return [*shown, f"… {len(value)} values"] if len(value) > 64 else shown
    name, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if name is not None and shape is not None:
        return f"<{name} {list(shape)}>"
    return f"<{getattr(value, 'name', type(value).__name__)}>"
