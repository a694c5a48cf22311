"""DeepSpeed's own schedulers: they read their LRs from the config of the next launch, which is forecast and edited here.

A checkpoint holds a counter and a copy of the config it was saved under, which no loader reads. So the file is edited to
what that copy says times the scale: relative to this checkpoint, and not to an earlier rollback's edit. Pure.

Source: `deepspeed/runtime/lr_schedules.py` (0.19).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainJson, parse_object
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.lr.effect import FieldEdit
from rollback.lr.oracle import LrTable, Unknown, table_from

Lrs: TypeAlias = Callable[[int], list[float]]
Params: TypeAlias = Mapping[str, Any]

# scheduler type -> (section of the config, field) of each LR it computes from: scaling all of them scales its LRs
LR_FIELDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "WarmupLR": (("scheduler", "warmup_max_lr"), ("scheduler", "warmup_min_lr")),
    "WarmupDecayLR": (("scheduler", "warmup_max_lr"), ("scheduler", "warmup_min_lr")),
    "WarmupCosineLR": (("optimizer", "lr"),),
    "OneCycle": (("scheduler", "cycle_min_lr"), ("scheduler", "cycle_max_lr")),
    "LRRangeTest": (("scheduler", "lr_range_test_min_lr"),),
}
# the value of a field that the config does not name; None: the LR that the optimizer was created with
_DEFAULTS: Mapping[tuple[str, str], float | None] = {
    ("WarmupLR", "warmup_max_lr"): None,
    ("WarmupDecayLR", "warmup_max_lr"): 1e-3,
    ("WarmupLR", "warmup_min_lr"): 0.0,
    ("WarmupDecayLR", "warmup_min_lr"): 0.0,
    ("LRRangeTest", "lr_range_test_min_lr"): 1e-3,
}


def deepspeed_lrs(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any], k: int
) -> LrTable | Unknown:
    """The next `k` LRs of DeepSpeed's own scheduler in `config`."""
    step, kind = state.get("last_batch_iteration"), scheduler_type(config)
    if kind is None or not isinstance(step, int):
        return Unknown("the recorded DeepSpeed config names no scheduler")
    if kind not in _RULES:
        return Unknown(f"the LRs of DeepSpeed's {kind} cannot be computed")
    values = []
    for section, name in LR_FIELDS[kind]:
        value = params_of(config, section).get(name, _DEFAULTS.get((kind, name)))
        if value is None and (created_with := params_of(config, "optimizer").get("lr")) is not None:
            value = created_with
        if not _is_lr(value):
            return Unknown(f"DeepSpeed's {kind} computes from the LR that the training script gives its optimizer")
        values.append(_per_group(value, len(groups)))
    try:
        lrs = _RULES[kind](params_of(config, "scheduler"), *values)
    except (TypeError, ValueError, ZeroDivisionError, KeyError) as problem:
        return Unknown(f"DeepSpeed's {kind} has invalid parameters ({problem})")
    return table_from(lrs, step, groups, k, f"DeepSpeed's {kind}")


def scheduler_type(config: Mapping[str, Any]) -> str | None:
    """The type of scheduler that a DeepSpeed config names."""
    section = config.get("scheduler")
    return str(section["type"]) if isinstance(section, Mapping) and section.get("type") else None


def params_of(config: Mapping[str, Any], section: str) -> Params:
    """`scheduler.params` or `optimizer.params`, empty where there is none."""
    found = config.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _is_lr(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_lr, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _per_group(value: Any, num_groups: int) -> list[float]:
    return [float(v) for v in value] if isinstance(value, list | tuple) else [float(value)] * num_groups


def _rise(params: Params) -> tuple[int, Callable[[int], float]]:
    """(steps of the warm-up, its height from 0 to 1)."""
    steps = max(2, int(params.get("warmup_num_steps", 1000)))
    if params.get("warmup_type", "log") == "linear":
        return steps, lambda n: n / steps
    return steps, lambda n: 1.0 / math.log(steps) * math.log(n + 1)


def _between(low: list[float], high: list[float], height: float) -> list[float]:
    return [floor + (peak - floor) * height for floor, peak in zip(low, high, strict=True)]


def _warmup(params: Params, high: list[float], low: list[float]) -> Lrs:
    steps, rise = _rise(params)
    return lambda n: low if n < 0 else _between(low, high, rise(n) if n < steps else 1.0)


def _warmup_decay(params: Params, high: list[float], low: list[float]) -> Lrs:
    steps, rise = _rise(params)
    total = int(params["total_num_steps"])

    def lrs(n: int) -> list[float]:
        if n < 0:
            return low
        fall = max(0.0, float(total - n) / float(max(1.0, total - steps)))
        return _between(low, high, rise(n) if n < steps else fall)

    return lrs


def _warmup_cosine(params: Params, created_with: list[float]) -> Lrs:
    steps, rise = _rise(params)
    total, start, end = int(params["total_num_steps"]), params.get("warmup_min_ratio", 0.0), params.get("cos_min_ratio", 1e-4)

    def ratio(n: int) -> float:
        if n < 0:
            return 0.0
        if n < steps:
            return float(start + rise(n) * (1.0 - start))
        progress = min(1.0, (n - steps + 1) / max(1, total - steps))
        return float(max(0.0, end + (1.0 - end) * ((1 + math.cos(math.pi * progress)) / 2)))

    return lambda n: [lr * ratio(n) for lr in created_with]


def _range_test(params: Params, low: list[float]) -> Lrs:
    size, rate = params.get("lr_range_test_step_size", 2000), params.get("lr_range_test_step_rate", 1.0)
    stairs = bool(params.get("lr_range_test_staircase", False))

    def lrs(n: int) -> list[float]:
        interval = math.floor((n + 1) / size) if stairs else (n + 1) / size
        return [lr * (1 + rate * interval) for lr in low]

    return lrs


def _one_cycle(params: Params, low: list[float], high: list[float]) -> Lrs:
    first = float(params.get("cycle_first_step_size", 2000))
    second = first if params.get("cycle_second_step_size") is None else float(params["cycle_second_step_size"])
    total, ratio = first + second, first / (first + second)
    stairs = int(params.get("cycle_first_stair_count", 0))
    stairs_down = stairs if params.get("cycle_second_stair_count") is None else int(params["cycle_second_stair_count"])
    decay_size, decay_rate = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0.0)

    def height(n: int) -> float:
        x = 1.0 + n / total - math.floor(1 + n / total)
        rising = x <= ratio
        count = stairs if rising else stairs_down
        if count > 0:
            inside = n % total
            position = inside * count / first if inside <= first else (total - inside) * count / second
            return math.floor(position) / count
        return x / ratio if rising else (x - 1) / (ratio - 1)

    def lrs(n: int) -> list[float]:
        if n < 0:
            return low
        if n < total:
            return _between(low, high, height(n + 1))
        if math.isclose(decay_size, 0) or math.isclose(decay_rate, 0):
            return low
        return [lr / (1 + decay_rate * ((n - total + 1) / decay_size)) for lr in low]

    return lrs


_RULES: Mapping[str, Callable[..., Lrs]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}


# --- The config file of the next launch

_OPTION = "--deepspeed-config FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPlan:
    """The edits of the file, and notes for the user; `filled` are the fields that the trainer fills in ("auto"), by their path.

    Their values are (before, after) the edit; `path` is the file.
    """

    edits: tuple[FieldEdit, ...] = ()
    notes: tuple[str, ...] = ()
    filled: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    path: str = ""


def plan_config(file: ConfigFile | None, recorded: Mapping[str, Any], scale: float) -> ConfigPlan:
    """The edits that make the next launch's LRs `scale` times those of the recorded config.

    Raises `PlanRefused` naming every field, its value and the file (or how to name it) where that cannot be done.
    """
    kind = scheduler_type(recorded)
    if kind is None or kind not in LR_FIELDS:
        raise PlanRefused(
            f"DeepSpeed's own scheduler takes its LRs from the config of the next launch, and {_unknown(kind)}",
            remedy="change the LR in the DeepSpeed config by hand",
        )
    wanted = dict(_wanted(kind, recorded, scale))
    if file is None:
        listed = ", ".join(f"`{dotted(keys)}` {before:.10g} → {after:.10g}" for keys, (before, after) in wanted.items())
        raise PlanRefused(
            f"DeepSpeed's {kind} takes its LRs from the config file of the next launch, not from the checkpoint: {listed}",
            remedy=f"name that file with {_OPTION} (or `deepspeed_config` in chronicle.toml): it is edited and undone "
            "together with the checkpoint",
        )
    config = _parsed(file)
    if scheduler_type(config) != kind:
        raise PlanRefused(
            f"`{file.path}` ({file.origin}) names the scheduler {scheduler_type(config)}, "
            f"but the checkpoint was made with {kind}",
            remedy=f"name the config of the next launch with {_OPTION}",
        )
    filled = {keys: pair for keys, pair in wanted.items() if _value_at(config, keys) == "auto"}
    edits = tuple(_edit(file, config, keys, after) for keys, (_, after) in wanted.items() if keys not in filled)
    return ConfigPlan(
        edits=tuple(e for e in edits if e.after != e.before),
        notes=tuple(_notes(file, config, recorded)),
        filled={dotted(keys): pair for keys, pair in filled.items()},
        path=file.path,
    )


def config_notes(file: ConfigFile | None, recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the file of the next launch differs from the recorded copy, for a plan that leaves the LR alone."""
    if file is None:
        return ()
    try:
        return tuple(_notes(file, parse_object(file.text), recorded))
    except NotPlainJson:
        return ()


def _unknown(kind: str | None) -> str:
    return "the checkpoint records no scheduler" if kind is None else f"`{kind}` is a scheduler with unknown fields"


def _wanted(kind: str, recorded: Mapping[str, Any], scale: float) -> Iterator[tuple[Keys, tuple[float, float]]]:
    """(key path, value before and after) of every LR that the scheduler computes from."""
    for section, name in LR_FIELDS[kind]:
        value = params_of(recorded, section).get(name)
        if value is None and section == "scheduler":
            value = _DEFAULTS.get((kind, name))
        if value is None and _DEFAULTS.get((kind, name), 0.0) is None:  # whatever the optimizer was created with
            section, name = "optimizer", "lr"
            value = params_of(recorded, section).get(name)
        leaves = list(_leaves(value, (section, "params", name)))
        if not leaves:
            raise PlanRefused(
                f"DeepSpeed's {kind} scales the LR that its optimizer is created with, and the recorded config has no "
                f"`{section}.params.{name}`: the training script creates the optimizer",
                remedy=f"multiply the optimizer's LR in the training script by {scale:.10g}",
            )
        yield from ((keys, (number, number * scale)) for keys, number in leaves if number)


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, float]]:
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(part, (*keys, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield keys, float(value)


def _parsed(file: ConfigFile) -> dict[str, Any]:
    try:
        return parse_object(file.text)
    except NotPlainJson as problem:
        raise PlanRefused(
            f"`{file.path}` ({file.origin}) is not plain JSON: {problem}",
            remedy="write it as plain JSON, without comments, or change the LR in it by hand",
        ) from problem


def _edit(file: ConfigFile, config: Mapping[str, Any], keys: Keys, after: float) -> FieldEdit:
    value = _value_at(config, keys)
    if value is None:
        raise PlanRefused(
            f"`{file.path}` ({file.origin}) does not contain `{dotted(keys)}`, from which the next launch takes its LR",
            remedy=f"write `{dotted(keys)}` with {after:.10g} into it, or name another file with {_OPTION}",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanRefused(
            f"`{dotted(keys)}` in `{file.path}` is {value!r}, expected a number", remedy="write the LR as a number"
        )
    return FieldEdit(file=file.path, keys=keys, before=value, after=after)


def _value_at(config: Mapping[str, Any], keys: Keys) -> Any:
    value: Any = config
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _notes(file: ConfigFile, config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    for section in ("scheduler", "optimizer"):
        now, then = params_of(config, section), params_of(recorded, section)
        for name in sorted({*now, *then} if now or then else ()):
            if name in now and name in then and now[name] not in ("auto", then[name]):
                yield (
                    f"`{section}.params.{name}` is {now[name]!r} in `{file.path}`, "
                    f"but the checkpoint was made with {then[name]!r}"
                )
