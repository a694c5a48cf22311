"""The one table of channel names: which role a logged series has, by its name.

A channel is one logged series (`loss`, `lr`, `grad_norm`). Readers of logs, the detector, `status`, the report and the
restart checks all ask here; a second list of names elsewhere is a lint error.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    """LOSS decides; SOURCE is one data source's loss; NORM, OTHER, SPEED and LOSS_SCALE never propose alone."""

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


PATTERNS: tuple[tuple[str, Role], ...] = (
    (r"(train[/_. ])?(lm[ _]|global[_ ]?avg[_ ]?|total[_ ])?loss", Role.LOSS),
    (r"(train[/_. ])?(loss_metrics/)?(global_avg_loss|lm loss|train_loss|reduced_train_loss)", Role.LOSS),
    (r"(train/)?loss[/.](?!scale)[\w .-]+|(?!z_|val|eval|test|dev_|best_)\w+_loss", Role.SOURCE),
    (r"(train/)?(total_)?(grad|gradient)s?[_ ]?(norm|l2)|gnorm|(train/)?(grad|update|param)[_ ]norm([/.][\w.-]+)?|norm",
     Role.NORM),
    (r"z[_-]?loss|(train/)?z_loss", Role.OTHER),
    (r"(train/)?(lr|learning[_ ]rate)([-/_].*)?", Role.LR),
    (r"lr/expected", Role.LR_EXPECTED),
    (r"(loss|grad)[_ /]?scale", Role.LOSS_SCALE),
    (r"(weight|mix|ratio|share)s?/[\w.-]+", Role.WEIGHT),
    (r"(tokens|samples)[_ ]?(per|/)[_ ]?s(ec(ond)?)?([_ ]per[_ ]gpu)?|tok/s|tps|throughput", Role.SPEED),
)  # fmt: skip


def role_of(name: str) -> Role:
    """Return the role of a channel by its name; what is not recognised is bookkeeping and not scanned."""
    lowered = name.lower()
    if lowered == "lr/expected":
        return Role.LR_EXPECTED
    for pattern, role in PATTERNS:
        if re.fullmatch(pattern, lowered):
            return role
    return Role.IGNORED
