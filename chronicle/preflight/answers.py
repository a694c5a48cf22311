"""Short ways to write a check's answer; each check function returns exactly one. Pure."""

from __future__ import annotations

from chronicle.preflight.results import CheckResult, Verdict

__all__ = ["Answer"]


class Answer:
    """Answers of one check: its id and title are said once."""

    def __init__(self, check: str, title: str) -> None:
        self.check = check
        self.title = title

    def passed(self, message: str, read: str = "") -> CheckResult:
        """It holds."""
        return self._make(Verdict.PASS, message, read, None)

    def warned(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """It looks wrong and may be meant."""
        return self._make(Verdict.WARN, message, read, remedy)

    def failed(self, message: str, read: str = "", remedy: str | None = None) -> CheckResult:
        """It does not hold."""
        return self._make(Verdict.FAIL, message, read, remedy)

    def unknown(self, missing: str) -> CheckResult:
        """Nothing to read it from."""
        return self._make(Verdict.UNKNOWN, f"not known: {missing}", "", None)

    def skipped(self, message: str) -> CheckResult:
        """Left out on purpose, said loudly."""
        return self._make(Verdict.SKIPPED, message, "", None)

    def _make(self, verdict: Verdict, message: str, read: str, remedy: str | None) -> CheckResult:
        return CheckResult(
            check=self.check, title=self.title, verdict=verdict, message=message, read=read, remedy=remedy
        )
