"""The nine events of a training under guard. An adapter translates its framework into them, and does nothing else.

`GuardSession.hear` takes an event; the hub (`hub.py`) hands it on to the parts of the guard that want it. Fields that stand
below "known to the session" are filled in there. An adapter leaves them as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chronicle.metrics.log import number_of
from chronicle.recording import Recording
from chronicle.resume.checks.check import Check
from chronicle.resume.memory import LrRow, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Begins:
    """A framework begins to train, or has new objects to train with. The inputs of `model` are the batches of the training."""

    model: Any = None
    says_so: bool = True  # the framework begins; else only other objects than before show that it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A checkpoint is about to be loaded; nothing in memory was replaced yet."""

    directory: Path
    checks: Sequence[Check] = ()  # the adapter's own
    memory: Memory | None = None  # what it read inside a checkpoint that has no manifest
    trains: bool = False  # the framework has said that it trains from here


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Another state is in memory: a checkpoint's, or that of an optimizer of a plain loop (`directory` None)."""

    directory: Path | None = None
    generators: bool = True  # they were restored; else the framework does it later, or never
    memory: Memory | None = None  # of a plain loop: as it was when this state was saved
    why: str = ""  # why that is not known
    problem: BaseException | None = None  # the framework's own load raised it
    # known to the session
    again: bool = False  # this process has trained before


class Inputs(StrEnum):
    """What enters a model."""

    BATCH = "a micro-batch of the training"
    PART = "inputs of a part of a container, which no other part made"
    PASS = "a forward pass that is no batch of the training"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntered:
    """Inputs are about to enter the model."""

    batch: Any = None
    kind: Inputs = Inputs.BATCH
    call: tuple[Any, Any, Any] | None = None  # model, arguments, named arguments; None where no model is called
    is_training: bool = True  # the model is in training mode
    is_first: bool = False  # of this launch, or since the latest load
    is_looked_at: bool = False  # one of the first of a launch, or after a save


class Gradient(StrEnum):
    """When the gradient of a step is complete."""

    READY = "before the step"
    AT_END = "the step calls the model and the backward pass by a closure, and its end is heard"
    TOLD = "the same, and an adapter tells `GradientReady`"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBegins:
    """An optimizer step begins. `optimizer` None: a whole step of `engine`."""

    optimizer: Any
    has_closure: bool = False  # the step may call the model itself
    engine: Any = None
    # known to the session
    number: int | None = None  # of the step, as the framework counts
    lrs: LrRow = ()
    gradient: Gradient = Gradient.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReady:
    """The gradient of the step that has begun is complete."""

    optimizer: Any
    # known to the session
    step: int | None = None  # optimizer steps when it is over, as the guard counts
    lrs: LrRow = ()
    gradient: Gradient = Gradient.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The script, or its framework, logged numbers of a step."""

    step: int
    values: Mapping[str, Any]

    def into(self, log: Recording) -> None:
        """Write the numbers among them; nothing is said of the rest, nor outside of a launch."""
        numbers = {}
        for name, value in self.values.items() if log.run is not None else ():
            number = number_of(value)
            if number is not None and name not in ("step", "t"):
                numbers[str(name)] = number
        if numbers:
            log.log(self.step, numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A state was saved at `path`, a directory or a file. None: torch writes it, and nobody has said where."""

    path: Path | None = None
    memory: Memory | None = None  # as it was described when the save began; None: it is described now
    seconds: float | None = None  # how long the save blocked training
    before: Mapping[str, tuple[int, int]] | None = None  # the files that lay there when it began
    digest: str = ""  # of the optimizer's state
    is_over: bool = True  # else it is being written while training goes on
    is_of_now: bool = True  # no step was taken since, as far as the adapter knows; to observers: none was


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The training, the process or the guard ends."""

    for_good: bool = False


Event = Begins | Loading | Loaded | BatchEntered | StepBegins | GradientReady | Logged | Saved | Ended
