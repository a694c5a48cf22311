"""What a check has to say: a value, never an exception, so that one look returns everything there is to see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GO_BACK = "go back to another checkpoint"
WRONG_FILE = f"restore the right file, or {GO_BACK}"  # it is of another step or run: no edit of numbers mends that


class Severity(Enum):
    """How much a finding matters: an ERROR forbids resuming, a WARN deserves a look, an INFO explains."""

    ERROR = "error"
    WARN = "warn"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One observation of one check.

    `check` is its code ("F1" … "F10"); `path` is relative to the checkpoint (or the checkpoint itself);
    `message` says what was found and what was expected; `remedy` is the way out, or None.
    """

    check: str
    severity: Severity
    path: str
    message: str
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """The finding as a JSON object."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "path": self.path,
            "message": self.message,
            "remedy": self.remedy,
        }
