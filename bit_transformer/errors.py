"""Errors of the trainer.

    TrainerError
    ├── BadRecipe            a recipe's fields contradict each other or the data
    ├── TopologyMismatch     launcher, torch.distributed and Accelerate disagree about the world
    ├── CannotResume         no checkpoint may be taken, or the one named is not usable
    ├── GateTripped          the safety gate's smoothed values left their limits
    └── NonFiniteGradients   a rank found NaN or infinity; all ranks stopped
"""


class TrainerError(Exception):
    """Base of everything raised on purpose here; `remedy` is the way out, shown as `hint:`."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class BadRecipe(TrainerError):
    """A field of the recipe is unknown, unreadable or impossible; the message names it."""


class TopologyMismatch(TrainerError):
    """The parts of the stack do not agree on the number of ranks; the message lists what each believes."""


class CannotResume(TrainerError):
    """Which checkpoint to resume from is open, or it does not fit the run; nothing has been loaded."""


class NonFiniteGradients(TrainerError):
    """Gradients are not finite on some rank; the last frames are kept beside the launch's log."""


class GateTripped(TrainerError):
    """The safety gate tripped in strict mode; the message names the value, where it is and where it must be."""
