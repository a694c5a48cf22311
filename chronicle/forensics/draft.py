"""Timeline and post-mortem draft as Markdown: observed, inferred and unknown in sections of their own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from chronicle.forensics.infer import Contradiction, InferredLaunch
from chronicle.forensics.lines import Kind, Observed
from chronicle.forensics.scan import Scan

__all__ = ["list_timeline", "write_draft"]

MOST_STEPS = 3  # step lines shown per launch
MOST_FILES = 20


def list_timeline(scan: Scan, launches: Sequence[InferredLaunch]) -> list[tuple[datetime, str, str]]:
    """(time, place, what) in order of time; times without a year are put into the year of the launches."""
    year = next((launch.started.year for launch in launches if launch.started), datetime.min.year)
    rows = [
        (one.time.replace(year=year) if one.time.year == 1900 else one.time, f"{one.source}:{one.line}", one.text)
        for one in _shown(scan.observations)
        if one.time is not None
    ]
    for file in scan.files[-MOST_FILES:]:
        rows.append((file.changed.replace(microsecond=0), file.path, f"file last changed, {file.size_bytes:,} bytes"))
    for process in scan.processes:
        orphan = ", orphan" if process.orphan else ""
        what = f"process started, alive now{orphan}: {process.command[:100]}"
        rows.append((process.started.replace(microsecond=0), f"pid {process.pid}", what))
    return sorted(rows)


def _shown(observations: Sequence[Observed]) -> Iterator[Observed]:
    steps = 0
    for one in observations:
        steps = steps + 1 if one.kind is Kind.STEP else 0
        if steps <= MOST_STEPS:
            yield one


def write_draft(
    scan: Scan,
    launches: Sequence[InferredLaunch],
    contradictions: Sequence[Contradiction],
    unknowns: Sequence[str],
) -> str:
    """The draft; a person writes causes and decisions into it."""
    lines = [f"# Post-mortem draft: `{scan.directory}`", ""]
    lines += ["## Observed", "", "Lines, files and processes as they are; times as written.", ""]
    lines += [f"- {time:%Y-%m-%d %H:%M:%S} · {what} · `{place}`" for time, place, what in list_timeline(scan, launches)]
    lines += ["", "## Inferred", ""]
    lines += [f"- launch {one.number} ({one.source}): {_when(one)}; {one.reached}" for one in launches] or ["- nothing"]
    lines += ["", "### Contradictions", ""]
    lines += [f"- {one.text} · from {_refs(one)}" for one in contradictions] or ["- none found"]
    lines += ["", "## Unknown", ""]
    lines += [f"- {text}" for text in unknowns] or ["- nothing that was looked for"]
    lines += [f"- {text}" for text in scan.left_out]
    lines += ["", "## Cause", "", "_Not decided by this draft: what is above does not name one by itself._", ""]
    return "\n".join(lines)


def _when(launch: InferredLaunch) -> str:
    return "time unknown" if launch.started is None else f"from {launch.started:%Y-%m-%d %H:%M:%S}"


def _refs(one: Contradiction) -> str:
    return ", ".join(f"`{ref}`" for ref in one.follows_from)
