"""Findings: what a check reports. They are values, so that one verification returns all of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GO_BACK = "go back to another checkpoint"
WRONG_FILE = f"restore the right file, or {GO_BACK}"  # a file of another step or run, which no edit can repair


class Severity(Enum):
    """How serious a finding is: an ERROR forbids resuming, a WARN should be looked at, an INFO explains."""

    ERROR = "error"
    WARN = "warn"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One observation of one check.

    `check` is its code ("F1" … "F10"); `path` is relative to the checkpoint, or the checkpoint itself;
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
