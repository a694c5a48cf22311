"""Timeline and post-mortem draft as Markdown: observed, inferred and unknown in sections of their own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from chronicle.audit.postmortem import Contradiction, InferredLaunch
from chronicle.audit.traces import CLOCK, STAMP, Kind, Observed
from chronicle.audit.scan import Scan

__all__ = ["list_timeline", "write_draft"]

MOST_ALIKE = 3  # step lines, and listed processes, shown in a row
MOST_FILES = 20
MOST_SCRIPT_LINES = 20
LEADING_LEVEL = re.compile(r"^[\s,.:|\d-]*(?=\S)")


def list_timeline(scan: Scan, launches: Sequence[InferredLaunch]) -> list[tuple[datetime, str, str]]:
    """(time, place, what) in order of time; times without a year are put into the year of the launches."""
    year = next((launch.started.year for launch in launches if launch.started), datetime.min.year)
    rows = [
        (one.time.replace(year=year) if one.time.year == 1900 else one.time, f"{one.source}:{one.line}", text)
        for one, text in _shown(scan.observations)
        if one.time is not None
    ]
    for file in scan.files[-MOST_FILES:]:
        rows.append((file.changed.replace(microsecond=0), file.path, f"file last changed, {file.size_bytes:,} bytes"))
    for process in scan.processes:
        orphan = ", orphan" if process.orphan else ""
        what = f"process started, alive now{orphan}: {process.command[:100]}"
        rows.append((process.started.replace(microsecond=0), f"pid {process.pid}", what))
    return sorted(rows)


def _shown(observations: Sequence[Observed]) -> Iterator[tuple[Observed, str]]:
    """Each observation with its text, the time taken off; of many steps or processes in a row the first and the last."""
    alike: list[Observed] = []
    for one in [*observations, None]:
        same = one is not None and alike and (one.kind, one.source) == (alike[-1].kind, alike[-1].source)
        if not same:
            yield from _few(alike)
            alike = []
        if one is not None and one.kind in (Kind.STEP, Kind.PROCESS):
            alike.append(one)
        elif one is not None:
            yield one, _without_time(one.text)


def _few(alike: Sequence[Observed]) -> Iterator[tuple[Observed, str]]:
    if len(alike) <= MOST_ALIKE + 1:
        yield from ((one, _without_time(one.text)) for one in alike)
        return
    yield from ((one, _without_time(one.text)) for one in alike[:MOST_ALIKE])
    yield alike[-1], f"({len(alike) - MOST_ALIKE - 1} like these between) {_without_time(alike[-1].text)}"


def _without_time(text: str) -> str:
    """The line without the time that stands before it in the draft."""
    for stamp in (STAMP, CLOCK):
        match = stamp.search(text)
        if match is not None and match.end() < len(text):
            return (text[: match.start()] + LEADING_LEVEL.sub("", text[match.end() :])).strip() or text
    return text


def write_draft(
    scan: Scan,
    launches: Sequence[InferredLaunch],
    contradictions: Sequence[Contradiction],
    unknowns: Sequence[str],
) -> str:
    """The draft; a person writes causes and decisions into it."""
    lines = [f"# Post-mortem draft: `{scan.directory}`", ""]
    zone = datetime.now().astimezone().tzname()
    lines += ["## Observed", "", f"Lines, files and processes as they are; times of lines as written, of files in {zone}.", ""]
    lines += [f"- {time:%Y-%m-%d %H:%M:%S} · {what} · `{place}`" for time, place, what in list_timeline(scan, launches)]
    untimed = [(one, text) for one, text in _shown(scan.observations) if one.time is None]
    lines += ["", "### Without a time", ""] if untimed else []
    lines += [f"- {text} · `{one.source}:{one.line}`" for one, text in untimed]
    lines += ["", "### What scripts ask for", ""] if scan.scripts else []
    lines += [f"- {line.strip()[:160]} · `{place}`" for place, line in scan.scripts[:MOST_SCRIPT_LINES]]
    lines += ["", "## Inferred", ""]
    lines += [f"- launch {one.number} ({one.source}): {_when(one)}; {one.reached}{_last_word(one)}" for one in launches] or [
        "- nothing"
    ]
    lines += ["", "### Contradictions", ""]
    lines += [f"- {one.text} · from {_refs(one)}" for one in contradictions] or ["- none found"]
    lines += ["", "## Unknown", ""]
    lines += [f"- {text}" for text in unknowns] or ["- nothing that was looked for"]
    lines += [f"- {text}" for text in scan.left_out]
    lines += ["", "## Cause", "", "_Not decided by this draft: what is above does not name one by itself._", ""]
    return "\n".join(lines)


def _last_word(launch: InferredLaunch) -> str:
    ending = launch.ending
    return "" if ending is None else f"; its last word: {_without_time(ending.text)[:160]} (`{ending.source}:{ending.line}`)"


def _when(launch: InferredLaunch) -> str:
    return "time unknown" if launch.started is None else f"from {launch.started:%Y-%m-%d %H:%M:%S}"


def _refs(one: Contradiction) -> str:
    return ", ".join(f"`{ref}`" for ref in one.follows_from)
