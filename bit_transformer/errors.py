"""The errors of the trainer.

    chronicle.errors.ChronicleError
    └── TrainerError
        ├── BadRecipe            a recipe's fields contradict each other or the data
        ├── TopologyMismatch     launcher, torch.distributed and Accelerate disagree about the world
        ├── CannotResume         it is not decided which checkpoint to load, or the named one is not usable
        ├── GateTripped          the safety gate's smoothed values left their limits
        └── NonFiniteGradients   a gradient is NaN or infinite on some rank; all ranks stopped
"""

import sys

from chronicle.errors import ChronicleError


class TrainerError(ChronicleError):
    """Base of the trainer's errors; `remedy` is shown as `hint:`."""


class BadRecipe(TrainerError):
    """A field of the recipe is unknown or its value is impossible; the message names it."""


class TopologyMismatch(TrainerError):
    """Launcher, torch.distributed and Accelerate report different world sizes; the message lists them."""


class CannotResume(TrainerError):
    """No checkpoint can be chosen, or it does not fit the run; nothing has been loaded."""


class NonFiniteGradients(TrainerError):
    """Gradients are not finite on some rank; the figures of the last steps are kept beside the metrics."""


class GateTripped(TrainerError):
    """The safety gate tripped in strict mode; the message names the value and its limits."""


def print_error(problem: ChronicleError) -> None:
    """Print an error as one sentence on stderr, with its hint."""
    print(f"error: {problem}", file=sys.stderr)
    if problem.remedy:
        print(f"hint: {problem.remedy}", file=sys.stderr)
