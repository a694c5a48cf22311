"""The table of channel names: the role of a logged series (loss, LR, gradient norm, …), found by its name.

A channel is one logged series (`loss`, `lr`, `grad_norm`). Log readers, the detector, `status`, the report and the
restart checks all ask this module. Another literal list of channel names is an error of `scripts/channel_names.py`,
which `make lint` runs.

    role_of("lm loss")                  Role.LOSS
    find_channel(values, Role.LOSS)     the name under which these values hold the training loss, or None
    value_of(values, Role.LR)           the value itself, or None
    canonical_name("learning_rate")     "lr": the name under which the readers of foreign logs hand it out
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class Role(StrEnum):
    """LOSS decides; SOURCE is the loss of one data source; NORM, OTHER, SPEED and LOSS_SCALE never propose alone."""

    LOSS = "loss"
    SOURCE = "source"
    NORM = "norm"
    OTHER = "other"
    SPEED = "speed"
    LR = "lr"
    LR_EXPECTED = "lr-expected"
    LOSS_SCALE = "loss-scale"
    WEIGHT = "weight"
    IGNORED = "ignored"


NEVER = r"(?!)"  # matches nothing


class RoleNames(NamedTuple):
    """The names of one role, in lower case.

    `canonical` is the name that we write; readers of foreign logs rename `aliases` to it. Names that match `pattern`
    have the role and keep their name. `parts` matches series of one part (a parameter group, a layer): the same role,
    shown only where nothing else has it.
    """

    role: Role
    canonical: str | None = None
    aliases: tuple[str, ...] = ()
    pattern: str = NEVER
    parts: str = NEVER


EVAL_WORDS = r"val|eval|test"  # a loss whose name begins so is measured on held-out data: no training loss
EXPECTED_LR = "lr/expected"  # the LR that a rollback promised, beside the one that was logged

# The first row that knows a name decides.
TABLE: tuple[RoleNames, ...] = (
    RoleNames(role=Role.LR_EXPECTED, canonical=EXPECTED_LR),
    RoleNames(
        role=Role.LOSS, canonical="loss",
        aliases=("per_token_loss", "lm_loss", "train_loss", "training_loss", "train/loss", "trl"),
        pattern=r"(train[/_. ])?(lm[ _]|global[_ ]?avg[_ ]?|total[_ ])?loss"
        r"|(train[/_. ])?(loss_metrics/)?(global_avg_loss|lm loss|train_loss|reduced_train_loss)",
    ),
    RoleNames(
        role=Role.SOURCE,
        pattern=rf"(train/)?loss[/.](?!scale)[\w .-]+|(?!z_|{EVAL_WORDS}|dev_|best_)\w+_loss",
    ),
    RoleNames(
        role=Role.NORM, canonical="grad_norm", aliases=("gradient_norm", "norm"),
        pattern=r"(train/)?(total_)?(grad|gradient)s?[_ ]?(norm|l2)|gnorm",
        parts=r"(train/)?(grad|update|param)[_ ]norm([/.][\w.-]+)?",
    ),
    RoleNames(role=Role.OTHER, canonical="z_loss", aliases=("z-loss",), pattern=r"z[_-]?loss|(train/)?z_loss"),
    RoleNames(
        role=Role.LR, canonical="lr", aliases=("learning_rate",), pattern=r"(train/)?(lr|learning[_ ]rate)",
        parts=r"(train/)?(lr|learning[_ ]rate)[-/_].*",
    ),
    RoleNames(role=Role.LOSS_SCALE, canonical="loss_scale", pattern=r"(loss|grad)[_ /]?scale"),
    RoleNames(role=Role.WEIGHT, pattern=r"(weight|mix|ratio|share)s?/[\w.-]+"),
    RoleNames(
        role=Role.SPEED, canonical="tokens_per_second", aliases=("tok/sec", "tps"),
        pattern=r"(tokens|samples)[_ ]?(per|/)[_ ]?s(ec(ond)?)?([_ ]per[_ ]gpu)?|tok/s|throughput",
    ),
)  # fmt: skip

# Columns and fields that place a point; the trainer's own step first, because W&B's `_step` counts log calls.
STEP_NAMES = (
    "train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "_step", "train/step", "steps",
    "iterations", "train_step", "training_step", "num_updates", "update",
)  # fmt: skip
TIME_NAMES = ("t", "time", "wall_time", "_timestamp", "timestamp", "wall time", "created_at")
LAUNCH_NAMES = ("launch", "event_file", "session", "segment")

TELLING = (Role.LOSS, Role.NORM, Role.LR)  # a printed line that holds one of these is a logged step
HINTS = ("loss", "Loss", "trl", "lr", "LR", "norm")  # a printed line without any of these holds none of them
HEALTH_WORDS = ("grad", "norm", "z_loss", "loss_scale", "update", "adam", "variance", "clip")


@lru_cache(maxsize=4096)
def role_of(name: str) -> Role:
    """Return the role of a channel by its name; what is not recognised is IGNORED and not scanned."""
    row = _row_of(name.lower())
    return Role.IGNORED if row is None else row.role


def canonical_name(name: str) -> str:
    """Return the name that we use for what a trainer calls so: `lm loss` and `train_loss` are `loss`."""
    lowered = name.lower().replace(" ", "_")
    return CANONICAL.get(lowered, lowered)


def canonical_of(role: Role) -> str:
    """Return the name that we write for a role; raises KeyError for a role that names many series."""
    return CANONICAL_OF[role]


def find_channel(names: Iterable[str], role: Role) -> str | None:
    """Return the first of these names that has the role, one of a part only where there is no other.

    Of several losses the first one logged leads, in the detector as in every view.
    """
    part = None
    for name in names:
        if role_of(name) is role:
            if not _is_part(name):
                return name
            part = part or name
    return part


def value_of(values: Mapping[str, float], role: Role) -> float | None:
    """Return the value of the channel that `find_channel` names, or None."""
    name = find_channel(values, role)
    return None if name is None else values[name]


def is_health(name: str) -> bool:
    """Whether a channel measures the optimizer (gradients, norms, clipping, moments) rather than the result."""
    return any(word in name.lower() for word in HEALTH_WORDS)


def printed_names() -> str:
    """Return a regular expression for the names that trainers print, a loss of one data source among them."""
    names = {name for row in TABLE if row.role is not Role.LR_EXPECTED for name in (row.canonical, *row.aliases) if name}
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return "|".join([*(re.escape(name).replace("_", "[ _]") for name in longest_first), r"loss[/.][\w-]+"])


def _row_of(lowered: str) -> RoleNames | None:
    plain = lowered.replace(" ", "_")
    for row in TABLE:
        if plain == row.canonical or plain in row.aliases:
            return row
        if re.fullmatch(row.pattern, lowered) or re.fullmatch(row.parts, lowered):
            return row
    return None


def _is_part(name: str) -> bool:
    lowered = name.lower()
    row = _row_of(lowered)
    return row is not None and re.fullmatch(row.parts, lowered) is not None and re.fullmatch(row.pattern, lowered) is None


CANONICAL_OF: Mapping[Role, str] = {row.role: row.canonical for row in TABLE if row.canonical}
CANONICAL: Mapping[str, str] = {alias: row.canonical for row in TABLE if row.canonical for alias in row.aliases}
