"""The result of one check: a verdict, the message, what was read, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "CheckAnswer",
    "CheckResult",
    "CheckVerdict",
    "count_verdicts",
]

class CheckVerdict(Enum):
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
    verdict: CheckVerdict
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


def count_verdicts(results: tuple[CheckResult, ...]) -> str:
    """`3 fail, 1 warn, 12 pass, 14 unknown`; verdicts that do not occur are left out."""
    counts = [(verdict, sum(result.verdict is verdict for result in results)) for verdict in ORDER]
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts if count)


ORDER = (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS, CheckVerdict.UNKNOWN, CheckVerdict.SKIPPED)


# --- Short ways to write a check's answer; each check function returns exactly one. Pure.


class CheckAnswer:
    """Answers of one check: its id and title are said once."""

    def __init__(self, check: str, title: str) -> None:
        self.check = check
        self.title = title

    def passed(self, message: str, read: str = "") -> CheckResult:
        """It holds."""
        return self._make(CheckVerdict.PASS, message, read, None)

    def warned(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """It looks wrong and may be meant."""
        return self._make(CheckVerdict.WARN, message, read, remedy)

    def failed(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """It does not hold."""
        return self._make(CheckVerdict.FAIL, message, read, remedy)

    def unknown(self, missing: str) -> CheckResult:
        """Nothing to read it from."""
        return self._make(CheckVerdict.UNKNOWN, f"not known: {missing}", "", None)

    def skipped(self, message: str) -> CheckResult:
        """Left out on purpose, said loudly."""
        return self._make(CheckVerdict.SKIPPED, message, "", None)

    def _make(self, verdict: CheckVerdict, message: str, read: str, remedy: str | None) -> CheckResult:
        return CheckResult(
            check=self.check, title=self.title, verdict=verdict, message=message, read=read, remedy=remedy
        )
