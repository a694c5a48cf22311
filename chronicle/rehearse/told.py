"""What a rehearsal found: one page, worst first; as JSON; and as one entry of the run's journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chronicle.journal import Entry, JournalWriter
from chronicle.journal.events import Rehearsed
from chronicle.paths import RunPaths
from chronicle.rehearse.judge import TITLES, Rank, Verdict
from chronicle.rehearse.rehearse import Answer

SHOWN_FINDINGS = 20
SHOWN_ROWS = 5


def page(answer: Answer) -> str:
    """The answer as lines of text."""
    return "\n".join(_lines(answer))


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain values."""
    compared = answer.compared
    return {
        "verdict": answer.verdict.value,
        "findings": [{"what": one.what, "text": one.text, "advice": one.advice} for one in compared.findings],
        "not_compared": [*compared.of(Rank.NOT_COMPARED), *compared.of(Rank.UNSURE)],
        "by_nature": list(compared.of(Rank.NATURE)),
        "must_differ": list(compared.of(Rank.MUST_DIFFER)),
        "leaves": compared.num_leaves,
        "logged_values": compared.num_values,
        "ranks": answer.ranks,
        "resumed_at": answer.resumed_at,
        "compared_at": answer.compared_at,
        "signal": answer.asked.signal.name,
        "notes": list(compared.of(Rank.NOTE)),
        "seconds": round(answer.seconds, 1),
    }


def record(paths: RunPaths, answer: Answer) -> Entry:
    """Write the answer into the journal of the run."""
    start = answer.start
    event = Rehearsed(
        verdict=answer.verdict.value,
        command=answer.asked.command,
        resume=answer.asked.resume,
        signal=answer.asked.signal.name,
        at=answer.asked.at,
        to=answer.asked.to,
        findings=tuple(row.sentence for row in answer.compared.findings),
        not_compared=(*answer.compared.of(Rank.NOT_COMPARED), *answer.compared.of(Rank.UNSURE)),
        leaves=answer.compared.num_leaves,
        logged_values=answer.compared.num_values,
        git_commit=None if start is None else start.git_commit,
        git_dirty_digest=None if start is None else start.git_dirty_digest,
        env_digest=None if start is None else start.env_digest,
        ranks=answer.ranks,
        seconds=answer.seconds,
    )
    with JournalWriter(paths) as writer:
        return writer.write(event, title=f"rehearsal ({answer.asked.signal.name}): {answer.verdict.value}")


def _lines(answer: Answer) -> Iterator[str]:
    compared = answer.compared
    yield f"{answer.verdict.value}{_basis(answer)}"
    for one in compared.findings[:SHOWN_FINDINGS]:
        yield f"  {one.sentence}"
        if one.advice:
            yield f"    {one.advice}"
    if len(compared.findings) > SHOWN_FINDINGS:
        yield f"  … and {len(compared.findings) - SHOWN_FINDINGS} more: --json"
    for rank, title in TITLES.items():
        rows = compared.of(rank)
        yield from (f"  {title}{row}" for row in rows[:SHOWN_ROWS])
        if len(rows) > SHOWN_ROWS:
            yield f"  {title}… and {len(rows) - SHOWN_ROWS} more"


def _basis(answer: Answer) -> str:
    if answer.verdict is Verdict.NOT_DONE or answer.compared_at is None:
        return ""
    values = f"{answer.compared.num_leaves} values in the files of step {answer.compared_at}"
    return f": compared {values} and {answer.compared.num_values} logged values after the resume at step {answer.resumed_at}"
