"""Hands events to the parts of the guard, contains their errors, and lets a part rest that has nothing to do.

Each part is contained: an error in one is recorded, and no other part hears of it. A part that answers `RESTS` to an event
hears no more of its kind until a state is saved or loaded: a steady step asks only those that watch every step. `Begins`,
`Loading` and `Logged` are answered by the session alone.
"""

import functools
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, get_args

from chronicle.resume.checks.check import Check
from chronicle.resume.events import (
    BatchEntered,
    Ended,
    Event,
    GradientReady,
    Loaded,
    Saved,
    StepBegins,
)
from chronicle.resume.faults import NUM_FAULTS, Faults, last_resort, raised_by_script


class Rest(Enum):
    """The answer of a part that wants to rest."""

    UNTIL_SAVED_OR_LOADED = "until a state is saved or loaded"


RESTS: Final = Rest.UNTIL_SAVED_OR_LOADED


class Observer:
    """A part of the guard that hears events: it defines the methods of those that it wants.

    `about` names it in an entry of the journal. After `most_errors` it is told that all has ended, and hears no more.
    """

    about = ""
    most_errors = NUM_FAULTS

    def loaded(self, event: Loaded) -> None:
        """Another state is in memory."""

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """Inputs are about to enter the model."""

    def step_begins(self, event: StepBegins) -> Sequence[Check] | Rest | None:
        """A counted optimizer step begins. Checks that are returned are judged: one that differs refuses."""

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """The gradient of this step is complete, and the optimizer has not moved."""

    def saved(self, event: Saved) -> None:
        """A state was saved."""

    def ended(self, event: Ended) -> None:
        """Nothing more is to be watched."""


def heard_by(kind: type[Event]) -> str:
    """The method that hears an event has its name: `StepBegins` is heard by `step_begins`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


HEARD = {kind: heard_by(kind) for kind in get_args(Event) if hasattr(Observer, heard_by(kind))}


class Hub:
    """Who hears what, in the order in which they were added."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._observers: list[Observer] = []
        self._awake: dict[type[Event], list[Observer]] = {kind: [] for kind in HEARD}

    def add(self, observer: Observer) -> None:
        """It hears from now on what it defines."""
        self._observers.append(observer)
        self.wake()

    def wake(self) -> None:
        """Nobody rests any more."""
        for kind, name in HEARD.items():
            own = getattr(Observer, name)
            self._awake[kind] = [one for one in self._observers if getattr(type(one), name) is not own]

    def tell(self, event: Event) -> list[Check]:
        """All who want this event hear it; returns the checks that they made. Only the script's own errors are raised."""
        kind, checks = type(event), list[Check]()
        if kind is Saved or kind is Loaded:
            self.wake()
        for observer in tuple(self._awake[kind]):
            try:
                answer = getattr(observer, HEARD[kind])(event)
            except Exception as problem:
                if raised_by_script(problem):
                    raise
                last_resort(functools.partial(self._failed, observer), problem)
                continue
            if answer is RESTS:
                self._awake[kind].remove(observer)
            elif answer:
                checks += answer
        return checks

    def _failed(self, observer: Observer, problem: Exception) -> None:
        self._faults.record(observer.about, problem)
        if self._faults.count(observer.about) >= observer.most_errors:
            self._observers.remove(observer)
            self.wake()
            observer.ended(Ended(for_good=True))
