"""The result of one check (verdict, message, data read, remedy), and the exception that failures raise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from chronicle.errors import Refusal


class CheckVerdict(Enum):
    """`UNKNOWN` means that there was nothing to read; it does not count as a pass."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


ORDER = (CheckVerdict.FAIL, CheckVerdict.WARN, CheckVerdict.PASS, CheckVerdict.UNKNOWN, CheckVerdict.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check of the catalogue. `read` names what the verdict is based on."""

    check: str  # PF01 … PF31
    title: str
    verdict: CheckVerdict
    message: str
    read: str = ""
    remedy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The form for the journal and `--json`."""
        data: dict[str, Any] = {"check": self.check, "title": self.title, "verdict": self.verdict.value}
        data |= {"message": self.message, "read": self.read}
        if self.remedy:
            data["remedy"] = self.remedy
        return data


def count_verdicts(results: tuple[CheckResult, ...]) -> str:
    """`3 fail, 1 warn, 12 pass, 14 unknown`; verdicts that do not occur are left out."""
    counts = [(verdict, sum(result.verdict is verdict for result in results)) for verdict in ORDER]
    return ", ".join(f"{count} {verdict.value}" for verdict, count in counts if count)


class CheckAnswer:
    """Makes the result of one check; its id and title are given once. Every check function returns exactly one result."""

    def __init__(self, check: str, title: str) -> None:
        self.check = check
        self.title = title

    def passed(self, message: str, read: str = "") -> CheckResult:
        """The check passed."""
        return self._make(CheckVerdict.PASS, message, read, None)

    def warned(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """It looks wrong but may be intended."""
        return self._make(CheckVerdict.WARN, message, read, remedy)

    def failed(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """The check failed."""
        return self._make(CheckVerdict.FAIL, message, read, remedy)

    def unknown(self, message: str) -> CheckResult:
        """There was nothing to read; `message` says what is missing."""
        return self._make(CheckVerdict.UNKNOWN, message, "", None)

    def skipped(self, message: str) -> CheckResult:
        """The check was left out on purpose."""
        return self._make(CheckVerdict.SKIPPED, message, "", None)

    def _make(self, verdict: CheckVerdict, message: str, read: str, remedy: str | None) -> CheckResult:
        return CheckResult(
            check=self.check, title=self.title, verdict=verdict, message=message, read=read, remedy=remedy
        )


class PreflightFailed(Refusal):
    """At least one check failed. A trainer that ends because of it exits with 78: a requeue would fail again."""

    exit_code = 78

    def __init__(self, failures: tuple[CheckResult, ...]) -> None:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        super().__init__(f"preflight {first.check} {first.title}: {first.message}{more}", first.remedy)
        self.failures = failures
