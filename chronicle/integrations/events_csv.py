"""A table of dated incidents (`run,date,step,event,kind,action,rollback_to,source`): one entry a row."""

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from chronicle.integrations.foreign_journals import Draft, Import, parse_moment

__all__ = ["EVENT_COLUMNS", "read_events"]

EVENT_COLUMNS = frozenset(("date", "event", "action", "rollback_to"))
WHOLE = re.compile(r"\d+")


def read_events(path: Path, run: str | None = None) -> Import:
    """Rows of this run, or all of them; a cell that is no number is kept as the text that it is."""
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
        kind="incident",
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
    yield "status", "closed"  # a table of the past asks nobody for an outcome
