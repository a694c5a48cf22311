"""Readers of other journals: JSON lines of entries, and tables of incidents.

Every reader returns an `Import`: drafts of entries and points cut into launches. What a source does not say stays
unknown. Plain logs (JSONL, CSV, Megatron, Hugging Face, …) are read by `chronicle.metrics`.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import EntryKind
from chronicle.metrics import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An entry that is not written yet. `moment` is None when the source gives no date."""

    kind: str
    title: str = ""
    moment: datetime | None = None
    step: int | None = None
    launch: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLaunch:
    """Points of one launch, in the order in which they were logged, and what its tracker recorded beside them.

    `settings_source` names who recorded the settings ("W&B"). `drafts` are entries of this launch (alerts).
    """

    points: Sequence[Point]
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_source: str = ""
    drafts: tuple[Draft, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Everything read from one source. Launches get their numbers when they are written."""

    format: str
    drafts: tuple[Draft, ...] = ()
    launches: tuple[ImportedLaunch, ...] = ()


def cut_into_launches(points: Iterable[Point], name: str = "") -> tuple[ImportedLaunch, ...]:
    """Cut points into launches where the step decreases or the launch number changes.

    A repeated step does not begin a launch: logs with several lines per step, and curves read from plots, repeat steps.
    """
    launches: list[list[Point]] = []
    last: Point | None = None
    for point in points:
        if last is None or point.step < last.step or point.launch != last.launch:
            launches.append([])
        launches[-1].append(point)
        last = point
    return tuple(ImportedLaunch(points=tuple(part), name=name) for part in launches)


def parse_moment(text: str) -> datetime | None:
    """Parse a date or time; without an offset it is UTC. Return None for other text."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# --- Tables of incidents (CSV)

EVENT_COLUMNS = frozenset(("date", "event", "action", "rollback_to"))
WHOLE = re.compile(r"\d+")


def is_event_table(first_line: str) -> bool:
    """Whether this first line of a file is the head of a table of incidents."""
    return {cell.strip().lower() for cell in first_line.split(",")} >= EVENT_COLUMNS


def read_events(path: Path, run: str | None = None) -> Import:
    """Read a CSV of incidents, one draft per row; with `run`, the rows of that run only. Other cells are kept as text."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for row in rows if run is None or row.get("run", run) == run]
    return Import(format="events", drafts=tuple(_draft(row) for row in chosen))


def _draft(row: Mapping[str, str | None]) -> Draft:
    cells = {key: value for key, value in row.items() if key and value}
    data: dict[str, object] = {"status": "closed", "import": cells}  # incidents of the past need no outcome
    if "kind" in cells:
        data["kind"] = cells["kind"]
    if "source" in cells:
        data["evidence"] = [{"kind": "link", "path": cells["source"]}]
    if "action" in cells:
        action: dict[str, object] = {"verb": cells["action"]}
        target = _whole(cells.get("rollback_to", ""))
        data["action"] = action if target is None else {**action, "to": target}
    return Draft(
        kind=EntryKind.INCIDENT,
        title=cells.get("event", "")[:300],
        moment=parse_moment(cells.get("date", "")),
        step=_whole(cells.get("step", "")),
        data=data,
    )


def _whole(text: str) -> int | None:
    return int(text) if WHOLE.fullmatch(text) else None


# --- Entries as JSON lines

ENVELOPE = ("date", "kind", "title", "step")  # fields of an entry; all others go to `data` or `data.import`
ORIGIN = ("n", "prev", "run", "seg", "seq", "title_run", "v", "writer", "date")  # kept in `data.import`


def read_entries(path: Path) -> Import:
    """Read entries of another journal, one JSON object per line; raises `ChronicleError` naming a line that is no object."""
    drafts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as problem:
            raise ChronicleError(f"`{path}` line {number} is not JSON: {problem}") from problem
        if not isinstance(record, dict) or "kind" not in record:
            raise ChronicleError(f"`{path}` line {number}: expected an object with a `kind`")
        drafts.append(_entry_draft(record))
    return Import(format="entries", drafts=tuple(drafts))


def _entry_draft(record: Mapping[str, Any]) -> Draft:
    data: dict[str, Any] = {key: value for key, value in record.items() if key not in ENVELOPE and key not in ORIGIN}
    origin = {key: record[key] for key in ORIGIN if key in record}
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        if "step" in record:
            data["step"] = step
        step = None
    kind = str(record["kind"])
    if kind == "segment":  # a launch of another journal: what it says stays a note
        kind, origin["kind_there"] = EntryKind.NOTE, "segment"
    return Draft(
        kind=kind,
        title=str(record.get("title", "")),
        moment=parse_moment(str(record.get("date", ""))),
        step=step,
        data={**data, "import": origin},
    )
