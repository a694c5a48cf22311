"""What a check answers: a verdict, what was read, and the way out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["CheckResult", "Verdict", "summarize"]


class Verdict(Enum):
    """`UNKNOWN`: there was nothing to read; never counted as a pass."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check of the catalogue. `read` says from what the verdict follows."""

    check: str  # PF01 … PF31
    title: str
    verdict: Verdict
    message: str
    read: str = ""
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the journal and `--json`."""
        data: dict[str, Any] = {"check": self.check, "title": self.title, "verdict": self.verdict.value}
        data |= {"message": self.message, "read": self.read}
        if self.remedy:
            data["remedy"] = self.remedy
        return data


def summarize(results: tuple[CheckResult, ...]) -> str:
    """`3 fail, 1 warn, 12 pass, 14 unknown`; verdicts that do not occur are left out."""
    counts = [(verdict, sum(result.verdict is verdict for result in results)) for verdict in ORDER]
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts if count)


ORDER = (Verdict.FAIL, Verdict.WARN, Verdict.PASS, Verdict.UNKNOWN, Verdict.SKIPPED)
