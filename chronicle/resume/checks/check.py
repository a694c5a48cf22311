"""The verdict of the guard, the table a person reads, and the exception that ends a process before its first step.

`ResumeRefused` is a `SystemExit`: uncaught, the process ends with code 78 ("do not requeue") and the table, printed when
the refusal was made, is the last word instead of a traceback from every rank. It is deliberately no `Exception`:
`try: load_state() except Exception: start_from_scratch()` is one of the accidents the guard exists for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EXIT_CODE", "Check", "ResumeRefused", "failed", "format_table"]

EXIT_CODE = 78  # EX_CONFIG; schedulers are told not to requeue


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison. `code` is the detection primitive (F1…F10 files, M1…M5 memory, L1…L4 first steps)."""

    name: str
    code: str
    ok: bool
    expected: str = ""
    found: str = ""
    where: str = ""
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the journal."""
        record: dict[str, Any] = {"name": self.name, "code": self.code, "ok": self.ok}
        for key in ("expected", "found", "where", "cause"):
            if getattr(self, key):
                record[key] = getattr(self, key)
        return record


def failed(name: str, code: str, *, expected: str = "", found: str = "", where: str = "", cause: str = "") -> Check:
    """A check that did not hold."""
    return Check(name=name, code=code, ok=False, expected=expected, found=found, where=where, cause=cause)


class ResumeRefused(SystemExit):
    """This process must not take its first step: memory or files are not what was saved or planned."""

    def __init__(self, message: str, remedy: str | None = None, checks: Sequence[Check] = ()) -> None:
        super().__init__(EXIT_CODE)
        self.message = message
        self.remedy = remedy
        self.checks = tuple(checks)
        self.exit_code = EXIT_CODE

    def __str__(self) -> str:
        return self.message


def format_table(headline: str, checks: Sequence[Check], remedy: str | None) -> str:
    """The refusal as one block of text: what was found, what was expected, where, and the likely cause."""
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
