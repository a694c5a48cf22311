"""The DeepSpeed config file of the next launch: the one place where DeepSpeed's own schedulers take their LRs from. Pure.

A checkpoint keeps a copy of the config it was saved under, which no loader reads. So the file is edited to what that copy
says times the scale: relative to this checkpoint, as every other LR of a rollback, and not to an earlier rollback's edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollback.errors import PlanRefused
from rollback.files.json_file import NotPlainJson, parse_object
from rollback.lr.deepspeed import DEFAULTS, LR_FIELDS, params_of, scheduler_type
from rollback.lr.fields import FieldEdit, Keys

_OPTION = "--deepspeed-config FILE"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file as it is now, and how it is known to be the one of the next launch."""

    path: str  # absolute
    text: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPlan:
    """What to change in the file, and what a person should know about it."""

    edits: tuple[FieldEdit, ...] = ()
    notes: tuple[str, ...] = ()


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
        listed = ", ".join(f"`{_dotted(keys)}` {before:.10g} → {after:.10g}" for keys, (before, after) in wanted.items())
        raise PlanRefused(
            f"DeepSpeed's {kind} takes its LRs from the config file of the next launch, not from the checkpoint: {listed}",
            remedy=f"name that file with {_OPTION} (or `deepspeed_config` in chronicle.toml): it is edited and undone "
            "together with the checkpoint",
        )
    config = _parsed(file)
    if scheduler_type(config) != kind:
        raise PlanRefused(
            f"`{file.path}` ({file.origin}) names the scheduler {scheduler_type(config)}, the checkpoint was made with {kind}",
            remedy=f"name the config of the next launch with {_OPTION}",
        )
    edits = tuple(_edit(file, config, keys, after) for keys, (_, after) in wanted.items())
    return ConfigPlan(edits=tuple(e for e in edits if e.after != e.before), notes=tuple(_notes(file, config, recorded)))


def config_notes(file: ConfigFile | None, recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the file of the next launch differs from the recorded copy, for a plan that leaves the LR alone."""
    if file is None:
        return ()
    try:
        return tuple(_notes(file, parse_object(file.text), recorded))
    except NotPlainJson:
        return ()


def _unknown(kind: str | None) -> str:
    return "the checkpoint records none" if kind is None else f"`{kind}` is not one whose fields are known"


def _wanted(kind: str, recorded: Mapping[str, Any], scale: float) -> Iterator[tuple[Keys, tuple[float, float]]]:
    """(key path, value before and after) of every LR that the scheduler computes from."""
    for section, name in LR_FIELDS[kind]:
        value = params_of(recorded, section).get(name)
        if value is None and section == "scheduler":
            value = DEFAULTS.get((kind, name))
        if value is None and DEFAULTS.get((kind, name), 0.0) is None:  # whatever the optimizer was created with
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
            f"`{file.path}` ({file.origin}) is no plain JSON: {problem}",
            remedy="write it as plain JSON, without comments, or change the LR in it by hand",
        ) from problem


def _edit(file: ConfigFile, config: Mapping[str, Any], keys: Keys, after: float) -> FieldEdit:
    value: Any = config
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise PlanRefused(
                f"`{file.path}` ({file.origin}) does not name `{_dotted(keys)}`, which the next launch takes its LR from",
                remedy=f"write `{_dotted(keys)}` with {after:.10g} into it, or name another file with {_OPTION}",
            ) from None
    if value == "auto":
        raise PlanRefused(
            f"`{_dotted(keys)}` in `{file.path}` is \"auto\": the trainer fills it in from its own argument",
            remedy=f"give the trainer {after:.10g} (`learning_rate` of a Trainer, `lr` of the optimizer under Accelerate)",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanRefused(f"`{_dotted(keys)}` in `{file.path}` is {value!r}, expected a number")
    return FieldEdit(file=file.path, keys=keys, before=value, after=after)


def _notes(file: ConfigFile, config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    for section in ("scheduler", "optimizer"):
        now, then = params_of(config, section), params_of(recorded, section)
        for name in sorted({*now, *then} if now or then else ()):
            if name in now and name in then and now[name] not in ("auto", then[name]):
                yield (
                    f"`{section}.params.{name}` is {now[name]!r} in `{file.path}`, the checkpoint was made with {then[name]!r}"
                )


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))
