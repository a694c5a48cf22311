"""The exceptions of this package. `rollback.disk.lock` adds `Locked`, a `Refused`.

    RollbackError                   exit 1
    ├── CheckpointNotFound          no checkpoint of that step or path; names the nearest
    ├── UnreadableFile              a file is damaged, hostile or beyond the reader's limits
    ├── UnknownFormat               no known writer writes such files; names what was seen
    ├── Refused                     exit 3: nothing was changed
    │   ├── StrayFiles              a file in the checkpoint could be loaded as state
    │   ├── Incomplete              a required state file is missing or damaged
    │   ├── AmbiguousStep           several checkpoints of one step; lists them
    │   ├── PlanRefused             the plan would not have the requested effect
    │   ├── RunAlive                a launch of this run is still running
    │   └── IntentOpen              an earlier transaction is not finished
    └── StoppedPartWay              exit 4: `chronicle recover` finishes or reverts it
    StoreFailed                     exit 1: a store did not answer; no RollbackError, for it says nothing of a checkpoint

A message says what was found, where, and what was expected. `remedy` is the way out; it is shown as `hint:`.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, NamedTuple


def visible(text: str) -> str:
    """`text` with control characters and undecodable bytes escaped, so that a file name cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """As `visible`, with line breaks escaped too."""
    return visible(text).replace("\n", "\\n")


class RollbackError(Exception):
    """Base of the errors that are raised on purpose; `remedy` is the way out, or None."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str | None = None) -> None:
        self.message = visible(message)
        self.remedy = visible(remedy) if remedy is not None else None
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[RollbackError], tuple[str, str | None]]:
        # Errors are pickled when many files are read in several processes; the default would drop the remedy.
        return type(self), (self.message, self.remedy)


class CheckpointNotFound(RollbackError):
    """No checkpoint of that step, or nothing at that path."""


class UnreadableFile(RollbackError):
    """A file is truncated, damaged, hostile, or beyond the reader's limits."""


class UnknownFormat(RollbackError):
    """No known writer writes such files; the message names what was seen."""


class Refused(RollbackError):
    """Refused before anything was changed."""

    exit_code: ClassVar[int] = 3


class StrayFiles(Refused):
    """The checkpoint holds a file or directory that a loader could take for state."""


class Incomplete(Refused):
    """A state file that the format requires is missing or damaged."""


class AmbiguousStep(Refused):
    """Several checkpoints have the requested step."""


class PlanRefused(Refused):
    """The plan would not have the requested effect."""


class RunAlive(Refused):
    """A launch of the run is still running, or is not known to have ended."""


class IntentOpen(Refused):
    """An earlier transaction is neither finished nor reverted."""


class StoppedPartWay(RollbackError):
    """A transaction started and could not be finished; `chronicle recover` finishes or reverts it."""

    exit_code: ClassVar[int] = 4


class StoreFailed(Exception):
    """An object store did not answer, or what it holds changed while it was read.

    Not a `RollbackError`: those are taken for a fault of the checkpoint, which is then passed over or called damaged.
    """

    def __init__(self, message: str, remedy: str | None = None) -> None:
        self.message = visible(message)
        self.remedy = visible(remedy) if remedy is not None else None
        super().__init__(self.message)


# --- Findings: what a check reports; a value, not an exception

GO_BACK = "go back to another checkpoint"
WRONG_FILE = f"restore the right file, or {GO_BACK}"  # a file of another step or run, which no edit can repair


class Severity(Enum):
    """How serious a finding is: an ERROR forbids resuming, a WARN should be looked at, an INFO explains."""

    ERROR = "error"
    WARN = "warn"
    INFO = "info"


class Finding(NamedTuple):
    """One observation of one check.

    `check` is its code ("F1" … "F11"); `path` is relative to the checkpoint, or the checkpoint itself;
    `message` says what was found and what was expected; `remedy` is the way out, or None.
    """

    check: str
    severity: Severity
    path: str
    message: str
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """The finding as a JSON object."""
        return {**self._asdict(), "severity": self.severity.value}
