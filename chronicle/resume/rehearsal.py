"""What a rehearsal asks of the guard: save after one step, wait there to be ended, end after another one. No torch here.

`chronicle rehearse` sets the variable; without it nothing of this does anything.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

REHEARSAL_VARIABLE = "CHRONICLE_REHEARSAL"  # `save=10,hold=10,end=20`
MOST_HELD_SECONDS = 120.0


class Asked(NamedTuple):
    """Steps; 0 where it is not asked for."""

    save: int = 0
    hold: int = 0  # the process waits after the save of this step or a later one, until it is ended
    end: int = 0

    def text(self) -> str:
        """The value of the variable."""
        return ",".join(f"{name}={step}" for name, step in self._asdict().items() if step)


def asked_of(environ: Mapping[str, str] = os.environ) -> Asked:
    """What is asked of this process; nothing where the variable is not set or not understood."""
    steps: dict[str, int] = {}
    for part in environ.get(REHEARSAL_VARIABLE, "").split(","):
        name, _, number = part.partition("=")
        if name in Asked._fields and number.isdecimal():
            steps[name] = int(number)
    return Asked(**steps)


def hold_after_save(saved: int, hold: int, end_prints: Callable[[], None]) -> None:
    """Before the step that follows a save of step `hold` or later: write the prints, and wait to be ended.

    A script of small steps would be past its next save.
    """
    if saved >= hold:
        end_prints()
        time.sleep(MOST_HELD_SECONDS)
