"""What a reproduction is: a public report, played with the real library without chronicle and with it.

Every file beside this one holds one `CASE`. `test_all.py` plays them, `scripts/reproductions.py` writes the page of them.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from chronicle import ResumeRefused
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths

__all__ = ["Answer", "Case", "heard", "incidents", "planted"]


class Answer(StrEnum):
    """What chronicle does about it."""

    REFUSED = "refused before the first step"
    STOPPED = "stopped at the step where it acts"
    NAMED = "named: what and where"
    PROPOSED = "a rollback is proposed"
    COMMAND = "done by a command"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A public report. `row` is its number in the list of reports from which the cases were taken.

    `bare(folder)` plays it without chronicle and asserts what goes wrong. `guarded(folder)` plays it with chronicle and
    returns everything that was said; `says` are patterns that must be found in it. `waits_for` says why a case does not
    hold yet. `needs`: a library that is no requirement of the tests; the case is skipped without it.
    """

    row: int
    source: str
    pain: str
    without: str
    answer: Answer
    says: tuple[str, ...]
    bare: Callable[[Path], None]
    guarded: Callable[[Path], str]
    waits_for: str = ""
    needs: str = ""


def heard(launch: Callable[[], object], run_dir: Path | None = None) -> str:
    """Everything that a launch makes the guard say: stderr, the refusal, and the incidents of the journal."""
    said = io.StringIO()
    refusal = ""
    with warnings.catch_warnings(), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        try:
            launch()
        except ResumeRefused as problem:
            refusal = f"REFUSED {problem} " + "; ".join(f"{c.code} {c.name}: {c.found}" for c in problem.checks)
    lines = [line for line in said.getvalue().splitlines() if "chronicle" in line or line.startswith(("  ", "hint"))]
    return "\n".join([*lines, refusal, *(incidents(run_dir) if run_dir else ())])


def incidents(run_dir: Path) -> list[str]:
    """Incidents of the run, as one line each."""
    entries = read_journal(RunPaths(run_dir)).entries
    found = [entry for entry in entries if "incident" in entry.kind]
    return [f"{entry.kind} step {entry.step}: {entry.title} {json.dumps(dict(entry.data), default=str)}" for entry in found]


def planted(rig: str, name: str) -> tuple[Callable[[Path], None], Callable[[Path], str]]:
    """The two plays of a cause that `benchmarks/planted_bugs` already has."""
    from benchmarks.planted_bugs.catalogue import causes
    from benchmarks.planted_bugs.play import Outcome, play

    cause = next(cause for cause in causes() if cause.rig == rig and cause.name == name)

    def bare(folder: Path) -> None:
        outcome = play(cause, guarded=False, folder=folder).outcome
        assert outcome in (Outcome.MISSED, Outcome.LOG), outcome

    def guarded(folder: Path) -> str:
        result = play(cause, guarded=True, folder=folder)
        return f"{result.outcome} {result.detail}"

    return bare, guarded
