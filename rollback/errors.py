"""The one exception tree of this package; every error raised on purpose is one of these.

    RollbackError                   exit 1
    ├── CheckpointNotFound          no checkpoint of that step or path; names the nearest
    ├── UnreadableFile              a file is damaged, hostile or beyond the reader's limits
    ├── UnknownFormat               intact perhaps, but of no writer this package knows; says what it saw
    ├── Refused                     exit 3: nothing was changed, and nothing will be
    │   ├── StrayFiles              something in the checkpoint could be taken for state
    │   ├── Incomplete              a state file that must be there is not
    │   ├── AmbiguousStep           two checkpoints of one step; lists them
    │   ├── PlanRefused             the plan's effect is not what was asked
    │   ├── RunAlive                a launch of this run is still going
    │   └── IntentOpen              an earlier transaction is not finished
    └── StoppedPartWay              exit 4: `chronicle recover` finishes or reverts it

A message says what was found, where, and what was expected. The way out rides in `remedy` and is shown as `hint:`.
"""

from __future__ import annotations

from typing import ClassVar


def visible(text: str) -> str:
    """`text` with control characters and undecodable bytes spelled out: names in files must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """As `visible`, for a name or message inside a line: its line breaks are spelled out too."""
    return visible(text).replace("\n", "\\n")


class RollbackError(Exception):
    """Base of every deliberate error; `remedy` tells the reader the way out, or is None."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str | None = None) -> None:
        self.message = visible(message)
        self.remedy = visible(remedy) if remedy is not None else None
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[RollbackError], tuple[str, str | None]]:
        # Errors cross process borders when many files are read at once; the default would drop the remedy.
        return type(self), (self.message, self.remedy)


class CheckpointNotFound(RollbackError):
    """No checkpoint of that step, or nothing at that path."""


class UnreadableFile(RollbackError):
    """A file is truncated, damaged, hostile, or larger than the reader's limits."""


class UnknownFormat(RollbackError):
    """The bytes may be fine, but no known writer wrote them; the message says what was seen."""


class Refused(RollbackError):
    """Refused before anything was changed."""

    exit_code: ClassVar[int] = 3


class StrayFiles(Refused):
    """A file or directory lies in the checkpoint that a loader could take for state."""


class Incomplete(Refused):
    """A state file that the format requires is missing."""


class AmbiguousStep(Refused):
    """More than one checkpoint has the step that was asked for."""


class PlanRefused(Refused):
    """The plan would not do what was asked."""


class RunAlive(Refused):
    """A launch of the run is still going, or cannot be shown to have ended."""


class IntentOpen(Refused):
    """An earlier transaction on this run was neither finished nor reverted."""


class StoppedPartWay(RollbackError):
    """A transaction was begun and could not be finished; `chronicle recover` ends it."""

    exit_code: ClassVar[int] = 4
