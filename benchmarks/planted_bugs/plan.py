"""What a planted bug is: changes to the launch that saves, to the files, and to the launch that resumes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["Acts", "Cause", "Plan", "Row", "cause", "registered"]

Row = tuple[int, dict[str, float]]  # step, {"lr", "loss"} as the script itself would log them


class Acts(StrEnum):
    """When a cause first changes training."""

    AT_LOAD = "load"  # state is wrong when the first step begins
    LATER = "later"  # nothing is wrong until a later step
    ALLOWED = "allowed, said"  # may be on purpose: one line names it, and nothing is refused
    NEVER_SEEN = "no trace"  # leaves no trace in files, memory or the first data: not detectable


@dataclass
class Plan:
    """The accident, as hooks. `first` and `again` are options of the rig for the two launches."""

    first: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)
    files: list[Callable[[Path], object]] = field(default_factory=list)  # the checkpoint directory or file
    moved: bool = False  # the checkpoint lies in another directory when it is loaded
    before_load: list[Callable[[Any], object]] = field(default_factory=list)  # the launch
    after_load: list[Callable[[Any], object]] = field(default_factory=list)
    at_step: dict[int, Callable[[Any], object]] = field(default_factory=dict)  # steps of the new launch, from 1
    num_steps: int = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One catalogued cause on one rig."""

    rig: str
    name: str
    source: str
    acts: Acts
    alone: bool  # one rank fails by itself: without the guard the others would wait for ever
    plant: Callable[[Plan], object]


_ALL: list[Cause] = []


def cause(
    rig: str, name: str, source: str = "", *, acts: Acts = Acts.AT_LOAD, alone: bool = False
) -> Callable[[Callable[[Plan], object]], Callable[[Plan], object]]:
    """Register a function that plants one cause."""

    def register(plant: Callable[[Plan], object]) -> Callable[[Plan], object]:
        _ALL.append(Cause(rig=rig, name=name, source=source, acts=acts, alone=alone, plant=plant))
        return plant

    return register


def registered() -> tuple[Cause, ...]:
    """The causes registered so far, in the order they are written; `catalogue.causes` imports all of them first."""
    return tuple(_ALL)
