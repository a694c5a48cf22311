"""DeepSpeed's own schedulers: they read their LRs from the config of the next launch, which is edited here.

A checkpoint holds a counter and a copy of the config it was saved under, which no loader reads. So the file is edited to
what that copy says times the scale: relative to this checkpoint, and not to an earlier rollback's edit. Pure.

Source: `deepspeed/runtime/lr_schedules.py` (0.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainJson, parse_object
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.lr.effect import FieldEdit

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


def scheduler_type(config: Mapping[str, Any]) -> str | None:
    """The type of scheduler that a DeepSpeed config names."""
    section = config.get("scheduler")
    return str(section["type"]) if isinstance(section, Mapping) and section.get("type") else None


def names_scheduler(file: ConfigFile) -> bool:
    """Whether a file is a DeepSpeed config with a scheduler of its own."""
    try:
        return scheduler_type(parse_object(file.text)) in LR_FIELDS
    except NotPlainJson:
        return False


def params_of(config: Mapping[str, Any], section: str) -> Params:
    """`scheduler.params` or `optimizer.params`, empty where there is none."""
    found = config.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


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
