"""Summarises a checkpoint's state as JSON, and compares two of them. Pure.

`chronicle inspect` prints the summary, and of two the comparison. Per-parameter counters appear as a range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollback.checkpoint.layout import Role
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState, last_epoch_of
from rollback.lr import infer_scheduler_class
from rollback.records import record_of

LR_FIELDS = ("_last_lr", "base_lrs", "max_lrs", "min_lrs", "eta_min")
GROUP_FIELDS = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "betas", "momentum", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs between two checkpoints; None stands for a missing one."""

    name: str
    before: object
    after: object

    def to_json(self) -> dict[str, object]:
        """The form that `chronicle inspect A B --json` prints."""
        return record_of(self)


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


def compare_states(before: CheckpointState, after: CheckpointState) -> list[Difference]:
    """The differences between two checkpoints, named like `scheduler[0].last_epoch`."""
    one, other = dict(_values_of(before)), dict(_values_of(after))
    names = list(dict.fromkeys([*one, *other]))
    return [
        Difference(name=name, before=one.get(name), after=other.get(name))
        for name in names
        if not _equal(one.get(name), other.get(name)) or (name in one) != (name in other)
    ]


def _values_of(state: CheckpointState) -> Iterator[tuple[str, object]]:
    """(dotted name, leaf) pairs of a checkpoint; the name of one that is a file stands in none of them."""
    own = state.checkpoint.path.name
    for name, value in flatten(_comparable(state)):
        if not state.checkpoint.single_file:
            yield name, value
        elif value != own:
            yield name.replace(f"{own}:", "").replace(own, "size"), value


_COMPARED = (
    "step", "format", "optimizer_step", "scheduler_unit", "world_size", "counters", "rng", "data", "topology", "config",
)  # fmt: skip


def _comparable(state: CheckpointState) -> dict[str, object]:
    """The summary without values that always differ, such as paths."""
    summary = summarise(state)
    return {
        **{name: summary[name] for name in _COMPARED},
        "scheduler": [{k: v for k, v in _scheduler(s).items() if k != "last_epoch"} for s in state.schedulers],
        "optimizer": summary["optimizers"],
        "files": {f.path: f.size_bytes for f in state.checkpoint.files},
    }


def flatten(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, leaf) pairs of a JSON-able value; an empty mapping has none."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flatten(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and any(isinstance(part, (Mapping, list)) for part in value):
        for index, part in enumerate(value):
            yield from flatten(part, f"{name}[{index}]")
    else:
        yield name, value


def _equal(one: object, other: object) -> bool:
    return repr(one) == repr(other)
