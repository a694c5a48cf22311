"""Readers of other journals: `chronicles.md`, tables of incidents, and JSON lines of entries.

Every reader returns an `Import`: drafts of entries and points cut into launches. What a source does not say stays
unknown. Plain logs (JSONL, CSV, Megatron, Hugging Face, …) are read by `chronicle.metrics`.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import EntryKind, JournalEvent, LaunchEnd, LaunchStart, RollbackReceipt
from chronicle.metrics import Point

__all__ = [
    "Draft",
    "Import",
    "ImportedLaunch",
    "cut_into_launches",
    "is_event_table",
    "parse_moment",
    "read_chronicle",
    "read_entries",
    "read_events",
]


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


# --- chronicles.md

HEADING = re.compile(r"##\s+(.+?)\s*#*")
DATE = re.compile(r"\((\d{4}-\d{2}-\d{2})\)\s*$")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
ROLLBACK = re.compile(r"\broll(?:ed|ing)?[ -]?back\s+to\s+(?:step\s+|iteration\s+)?(\d{2,})", re.IGNORECASE)


def read_chronicle(path: Path) -> Import:
    """Read a `chronicles.md`: one draft per `## heading (date)`; text before the first heading is the first draft.

    Taken are the date of the heading, images, and a rollback target where exactly one is named ("rolled back to 16250").
    Launch, onset and cause stay unknown.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return Import(format="chronicle", drafts=tuple(_markdown_drafts(lines)))


def _markdown_drafts(lines: list[str]) -> Iterator[Draft]:
    title, body, fenced = "", [], False
    for line in lines:
        fenced ^= line.lstrip().startswith("```")
        found = None if fenced else HEADING.fullmatch(line)
        if found is None or line.startswith("###"):
            body.append(line)
            continue
        yield from _section(title, body)
        title, body = found[1], []
    yield from _section(title, body)


def _section(heading: str, body: list[str]) -> Iterator[Draft]:
    text = "\n".join(body).strip("\n")
    if not heading and not text.strip():
        return
    dated = DATE.search(heading)
    title = heading[: dated.start()].strip() if dated else heading
    data: dict[str, object] = {"import": {"heading": heading}}
    if text:
        data["text"] = text
    images = [{"kind": "plot", "path": path, "what": what} for what, path in IMAGE.findall(text)]
    if images:
        data["evidence"] = images
    targets = {int(step) for step in ROLLBACK.findall(text)}
    if len(targets) == 1:
        data["action"] = {"verb": "rollback", "to": targets.pop()}
    first = next((line.strip("# ").strip() for line in body if line.strip()), "")
    yield Draft(kind=EntryKind.NOTE, title=title or first, moment=parse_moment(dated[1]) if dated else None, data=data)


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
    step, target = cells.get("step", ""), cells.get("rollback_to", "")
    data: dict[str, object] = dict(_fields(cells))
    data["import"] = dict(cells)
    if cells.get("action"):
        data["action"] = {"verb": cells["action"], **({"to": int(target)} if WHOLE.fullmatch(target) else {})}
    return Draft(
        kind=EntryKind.INCIDENT,
        title=cells.get("event", "")[:300],
        moment=parse_moment(cells.get("date", "")),
        step=int(step) if WHOLE.fullmatch(step) else None,
        data=data,
    )


def _fields(cells: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    if "kind" in cells:
        yield "kind", cells["kind"]
    if "source" in cells:
        yield "evidence", [{"kind": "link", "path": cells["source"]}]
    yield "status", "closed"  # incidents of the past need no outcome


# --- Entries as JSON lines

ENVELOPE = ("date", "kind", "title", "step")  # fields of an entry; all others go to `data` or `data.import`
ORIGIN = ("n", "prev", "run", "seg", "seq", "title_run", "v", "writer", "date")  # kept in `data.import`
FACTOR = re.compile(r"x([0-9.]+)")


def read_entries(path: Path) -> Import:
    """Read entries of another journal, one JSON object per line; raises `ChronicleError` naming a line that is no object.

    Rollbacks, restarts and LR factors also become launches and receipts, marked `imported`, so that lineage and LR ledger
    of an old run can be computed. Last steps and base LRs that the source does not give stay unknown.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as problem:
            raise ChronicleError(f"`{path}` line {number} is not JSON: {problem}") from problem
        if not isinstance(record, dict) or "kind" not in record:
            raise ChronicleError(f"`{path}` line {number}: expected an object with a `kind`")
        records.append(record)
    return Import(format="entries", drafts=tuple(_drafts(records)))


def _drafts(records: Sequence[Mapping[str, Any]]) -> Iterator[Draft]:
    segments = _segments(records)
    seen: list[str] = []
    factor = 1.0
    for record in records:
        segment = record.get("seg")
        moment = parse_moment(str(record.get("date", "")))
        target, changed = _target(record), _factor(record, factor)
        # The other journal writes an action into the entry that explains it: here the action comes first, then its launch.
        if isinstance(segment, str) and segment not in seen:
            if target is not None and _verb(record) == "rollback":
                ratio = None if changed is None else changed / factor
                receipt = RollbackReceipt(imported=True, lr_ratio=ratio, **({} if changed is not None else _by_hand(record)))
                yield _draft_of(receipt, title=f"rollback to {target}", moment=moment, step=target)
                factor = factor if changed is None else changed
            seen.append(segment)
            yield from _launch_drafts(len(seen), segment, segments, target, moment)
        yield _entry_draft(record, len(seen) or None)


def _entry_draft(record: Mapping[str, Any], launch: int | None) -> Draft:
    data: dict[str, Any] = {key: value for key, value in record.items() if key not in ENVELOPE and key not in ORIGIN}
    origin = {key: record[key] for key in ORIGIN if key in record}
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        if "step" in record:
            data["step"] = step
        step = None
    kind = str(record["kind"])
    if kind == "segment":  # its facts become a launch; its text stays a note
        kind, origin["kind_there"] = EntryKind.NOTE, "segment"
    return Draft(
        kind=kind,
        title=str(record.get("title", "")),
        moment=parse_moment(str(record.get("date", ""))),
        step=step,
        launch=launch,
        data={**data, "import": origin},
    )


def _launch_drafts(
    number: int, segment: str, segments: Mapping[str, int | None], start: int | None, moment: datetime | None
) -> Iterator[Draft]:
    begun = LaunchStart(imported=True, start_step=start or 0, segment=segment)
    yield _draft_of(begun, title=f"launch {number} ({segment})", moment=moment, launch=number)
    last = segments.get(segment)
    if last is not None and last > (start or 0):
        # Not the end itself: the furthest step that this launch reached according to the source.
        end = LaunchEnd(imported=True, last_step=last, at_least=True)
        yield _draft_of(end, moment=moment, launch=number, step=last)


def _draft_of(event: JournalEvent, **fields: Any) -> Draft:
    return Draft(kind=event.KIND, data=event.to_json(), **fields)


def _segments(records: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return segment -> furthest step it reached: a step named in its entries, or a later rollback's target."""
    reached: dict[str, int | None] = {}
    order: list[str] = []
    starts: dict[str, int] = {}
    for record in records:
        segment = record.get("seg")
        if not isinstance(segment, str):
            continue
        target = _target(record)
        if segment not in reached:
            if target is not None and order:
                _raise(reached, order[-1], target)
            order.append(segment)
            reached[segment], starts[segment] = None, target or 0
        step = record.get("step")
        if isinstance(step, int) and _verb(record) != "rollback":
            _raise(reached, segment, step)
        elif isinstance(step, int) and len(order) > 1:
            _raise(reached, order[-2], step)  # the step at which the launch was abandoned
    return {segment: last for segment, last in reached.items() if last is None or last > starts[segment]}


def _raise(reached: dict[str, int | None], segment: str, step: int) -> None:
    reached[segment] = max(step, reached[segment] or 0)


def _verb(record: Mapping[str, Any]) -> str:
    action = record.get("action")
    return str(action.get("verb", "")) if isinstance(action, Mapping) else ""


def _target(record: Mapping[str, Any]) -> int | None:
    action = record.get("action")
    target = action.get("to") if isinstance(action, Mapping) and _verb(record) in ("rollback", "restart") else None
    return target if isinstance(target, int) else None


def _factor(record: Mapping[str, Any], now: float) -> float | None:
    """Return the cumulative LR factor after this entry: the stated one (`x0.375`), else `now` when no LR changed, else None."""
    action = record.get("action")
    changes = action.get("changes") if isinstance(action, Mapping) else None
    fields = {str(c.get("field")): c for c in changes or () if isinstance(c, Mapping)}
    if "lr" in fields:
        found = FACTOR.fullmatch(str(fields["lr"].get("after", "")))
        return float(found[1]) if found else None
    return None if any("lr" in name for name in fields) else now


def _by_hand(record: Mapping[str, Any]) -> dict[str, Any]:
    changes = record["action"].get("changes") or ()
    stated = {str(c["field"]): c.get("after") for c in changes if isinstance(c, Mapping) and "field" in c}
    before = {str(c["field"]): c.get("before") for c in changes if isinstance(c, Mapping) and "field" in c}
    data: dict[str, Any] = {"sets": stated}
    for name, source in (("base_lr_after", stated), ("base_lr_before", before)):
        try:
            data[name] = float(str(source["base_lrs"]))
        except (KeyError, ValueError):
            continue
    return data
