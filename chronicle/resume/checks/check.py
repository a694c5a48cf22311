"""One check: two values compared, the likely cause of a difference, the table a person reads and the exception.

A check has one of four outcomes. Only `DIFFERENT` refuses. A value that could not be compared is `NOT_COMPARED`: it refuses
nothing, but a resume with such a check is not called verified.

`ResumeRefused` is a `SystemExit`: an uncaught refusal ends the process with code 78 ("do not requeue"), and the table on
stderr replaces a traceback from every rank. It is no `Exception`, because
`try: load_state() except Exception: start_from_scratch()` is one of the accidents the guard exists for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.resume.faults import raised_by_script, reason_of
from rollback.errors import RollbackError

EXIT_CODE = 78  # EX_CONFIG; schedulers are told not to requeue


class Outcome(StrEnum):
    """What a comparison found."""

    EQUAL = "equal"
    NOTED = "noted"  # different, which is allowed; it is said
    NOT_COMPARED = "not compared"  # `cause` says why
    DIFFERENT = "different"  # refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison. `code` is its kind: F1…F10 files, M1…M5 memory, L1…L4 first steps.

    `error`: the guard's own error that prevented the comparison, also recorded as `guard.fault`. `accepted`: the name by which
    a person accepts this difference; "" for state that was saved.
    """

    name: str
    code: str
    outcome: Outcome = Outcome.EQUAL
    expected: str = ""
    found: str = ""
    where: str = ""
    cause: str = ""
    error: str = ""
    accepted: str = ""

    @property
    def ok(self) -> bool:
        """Whether training may go on, as far as this check is concerned."""
        return self.outcome is not Outcome.DIFFERENT

    def to_json(self) -> dict[str, Any]:
        """The form written to the journal; empty fields are left out. `ok` is what older versions read."""
        record: dict[str, Any] = {"name": self.name, "code": self.code, "ok": self.ok, "outcome": str(self.outcome)}
        for key in ("expected", "found", "where", "cause"):
            if getattr(self, key):
                record[key] = getattr(self, key)
        return record


class ResumeRefused(SystemExit):
    """Raised before the first step when memory or files are not what was saved or planned."""

    def __init__(self, message: str, remedy: str | None = None, checks: Sequence[Check] = ()) -> None:
        super().__init__(EXIT_CODE)
        self.message = message
        self.remedy = remedy
        self.checks = tuple(checks)
        self.exit_code = EXIT_CODE

    def __str__(self) -> str:
        return self.message


def format_refusal(headline: str, checks: Sequence[Check], remedy: str | None) -> str:
    """The failed checks as one block of text: expected, found, where, and the likely cause."""
    lines = [f"chronicle guard: {headline}"]
    for check in checks:
        if check.ok:
            continue
        lines.append(f"  {check.code:<3} {check.name}")
        for label, text in (
            ("expected", check.expected),
            ("found", check.found),
            ("where", check.where),
            ("likely", check.cause),
        ):
            if text:
                lines.append(f"      {label + ':':<10}{text}")
    if remedy:
        lines.append(f"hint: {remedy}")
    return "\n".join(lines) + "\n"


# ---- making checks ---------------------------------------------------------------------------------------------------


def failed(name: str, code: str, **words: str) -> Check:
    """A check that failed. `words`: expected, found, where, cause."""
    return Check(name=name, code=code, outcome=Outcome.DIFFERENT, **words)


def noted(name: str, code: str, **words: str) -> Check:
    """A difference that is allowed; `cause` says why it is."""
    return Check(name=name, code=code, outcome=Outcome.NOTED, **words)


def compared(name: str, code: str, ok: bool, *, cause: str = "", **words: str) -> Check:
    """A check of two values that are equal (`ok`) or must not differ as they do; `cause` is used only then."""
    if ok:
        return Check(name=name, code=code, outcome=Outcome.EQUAL, **words)
    return failed(name, code, cause=cause, **words)


def not_compared(name: str, code: str, why: str, *, where: str = "", error: str = "") -> Check:
    """A value that could not be compared. `error`: the guard's own error, when that is the reason."""
    return Check(name=name, code=code, outcome=Outcome.NOT_COMPARED, where=where, cause=why, error=error)


def attempt(name: str, code: str, work: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The checks of `work`; an unexpected error in it ends these checks alone, and the rest is not compared.

    Errors that are raised on purpose (a damaged manifest, an unreadable contract) are not caught: they are findings.
    """
    try:
        yield from work()
    except (ChronicleError, RollbackError):
        raise
    except Exception as problem:
        if raised_by_script(problem):
            raise
        error = reason_of(problem)
        yield not_compared(name, code, f"the check itself failed: {error}", error=error)
