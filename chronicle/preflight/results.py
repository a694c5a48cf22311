"""The result of one check (verdict, message, data read, remedy), and the exception that failures raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

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


class CheckAnswer(NamedTuple):
    """What a check says; `remedy`: the way out."""

    verdict: CheckVerdict
    message: str
    read: str = ""
    remedy: str | None = None


def passes(message: str, read: str = "") -> CheckAnswer:
    """The check passed."""
    return CheckAnswer(CheckVerdict.PASS, message, read)


def warns(message: str, read: str, remedy: str) -> CheckAnswer:
    """It looks wrong but may be intended."""
    return CheckAnswer(CheckVerdict.WARN, message, read, remedy)


def fails(message: str, read: str, remedy: str) -> CheckAnswer:
    """The check failed."""
    return CheckAnswer(CheckVerdict.FAIL, message, read, remedy)


def unknown(message: str) -> CheckAnswer:
    """There was nothing to read; `message` says what is missing."""
    return CheckAnswer(CheckVerdict.UNKNOWN, message)


def skips(message: str = "skipped on request") -> CheckAnswer:
    """The check was left out on purpose."""
    return CheckAnswer(CheckVerdict.SKIPPED, message)


class CheckRow(NamedTuple):
    """A row of the catalogue. Its judge is called with the values of `needs`, then those of `more`, by name."""

    check: str
    title: str
    judge: Callable[..., CheckAnswer]
    needs: Mapping[str, str]  # name -> what is said where there is nothing
    more: tuple[str, ...] = ()

    def on(self, *sources: object) -> CheckResult:
        """Judge the values that the sources have under these names; "facts" is the first source itself."""
        values = []
        for name in (*self.needs, *self.more):
            owner = next((one for one in sources if hasattr(one, name)), None)
            value = sources[0] if name == "facts" else getattr(owner, name)
            if name in self.needs and value in (None, (), {}):
                return self.result(unknown(self.needs[name]))
            values.append(value)
        return self.result(self.judge(*values))

    def result(self, answer: CheckAnswer) -> CheckResult:
        """An answer under this check's name."""
        return CheckResult(check=self.check, title=self.title, **answer._asdict())


class PreflightFailed(Refusal):
    """At least one check failed. A trainer that ends because of it exits with 78: a requeue would fail again."""

    exit_code = 78

    def __init__(self, failures: tuple[CheckResult, ...]) -> None:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        super().__init__(f"preflight {first.check} {first.title}: {first.message}{more}", first.remedy)
