"""An optimizer's state with its keys flattened, as torchtitan saves it: one entry a parameter and hyper-parameter.

    state.<parameter>.step    param_groups.<parameter>.lr    param_groups.<parameter>.initial_lr

torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict=True` (torch/distributed/checkpoint/state_dict.py, 2.13)
repeats a group's values for each of its parameters; parameters with the same values are shown as one group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_GROUP_KEY = re.compile(r"param_groups\.(?P<name>.+)\.(?P<field>[A-Za-z_0-9]+)")
_STATE_KEY = re.compile(r"state\.(?P<name>.+)\.(?P<field>[A-Za-z_0-9]+)")


@dataclass(frozen=True, slots=True)
class FlatOptimizer:
    """`groups` with the parameters of each, and the values kept for each parameter."""

    groups: tuple[tuple[Mapping[str, object], tuple[str, ...]], ...]
    states: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def is_flat_optimizer(value: Mapping[object, object]) -> bool:
    """Whether these are the flattened keys of an optimizer."""
    return any(isinstance(key, str) and key.startswith("param_groups.") and key.endswith(".lr") for key in value)


def read_flat_optimizer(value: Mapping[object, object]) -> FlatOptimizer:
    """Parameters put together again into groups, in their order."""
    values: dict[str, dict[str, object]] = {}
    states: dict[str, dict[str, object]] = {}
    for key, part in value.items():
        for pattern, found in ((_GROUP_KEY, values), (_STATE_KEY, states)):
            match = pattern.fullmatch(key) if isinstance(key, str) else None
            if match is not None:
                found.setdefault(match["name"], {})[match["field"]] = part
    groups: dict[str, tuple[Mapping[str, object], list[str]]] = {}
    for name, fields in values.items():
        groups.setdefault(repr(sorted(fields.items())), (fields, []))[1].append(name)
    return FlatOptimizer(tuple((fields, tuple(names)) for fields, names in groups.values()), states)
