"""What a rehearsal found: one page, worst first; as JSON; and as one entry of the run's journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chronicle.journal import Entry, JournalWriter
from chronicle.journal.events import Rehearsed
from chronicle.paths import RunPaths
from chronicle.rehearse.judge import TITLES, Rank
from chronicle.rehearse.rehearse import Answer

SHOWN_ROWS = 5


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain values: those of its entry, and what differs by nature."""
    compared = answer.compared
    return {
        **event_of(answer).to_json(),
        "findings": [{"what": row.what, "text": row.text, "advice": row.advice} for row in compared.findings],
        "by_nature": list(compared.of(Rank.NATURE)),
        "must_differ": list(compared.of(Rank.MUST_DIFFER)),
        "notes": list(compared.of(Rank.NOTE)),
        "resumed_at": answer.resumed_at,
        "compared_at": answer.compared_at,
    }


def event_of(answer: Answer) -> Rehearsed:
    """What the journal keeps of it."""
    asked, compared, start = answer.asked, answer.compared, answer.start
    return Rehearsed(
        verdict=answer.verdict.value,
        command=asked.command,
        resume=asked.resume,
        signal=asked.signal,
        at=asked.at,
        to=asked.to,
        findings=tuple(row.sentence for row in compared.findings),
        not_compared=(*compared.of(Rank.NOT_COMPARED), *compared.of(Rank.UNSURE)),
        leaves=compared.num_leaves,
        logged_values=compared.num_values,
        git_commit=start.git_commit,
        git_dirty_digest=start.git_dirty_digest,
        env_digest=start.env_digest,
        ranks=answer.ranks,
        seconds=round(answer.seconds, 1),
    )


def record(paths: RunPaths, answer: Answer, launch: int | None = None) -> Entry:
    """Write the answer into the journal of the run."""
    event = event_of(answer)
    title = f"rehearsal ({event.signal}): {event.verdict}"
    if launch is not None:
        title = f"first save (step {event.at}): the script {event.verdict}"
    with JournalWriter(paths) as writer:
        return writer.write(event, launch=launch, title=title)


def page(answer: Answer) -> Iterator[str]:
    """The answer as lines of text."""
    compared = answer.compared
    yield answer.verdict.value
    if answer.compared_at is not None:
        values = f"{compared.num_leaves} values in the files of step {answer.compared_at}"
        yield f"  compared: {values} and {compared.num_values} logged values after the resume at step {answer.resumed_at}"
    for one in compared.findings:
        yield f"  {one.sentence}"
        if one.advice:
            yield f"    {one.advice}"
    for rank, title in TITLES.items():
        rows = compared.of(rank)
        yield from (f"  {title}{row}" for row in rows[:SHOWN_ROWS])
        if len(rows) > SHOWN_ROWS:
            yield f"  {title}… and {len(rows) - SHOWN_ROWS} more"
