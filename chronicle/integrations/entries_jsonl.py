"""Entries of other journals, one JSON object a line: title, date, kind, and whatever else they carry.

Nothing is lost: `to_record` gives back every line exactly. What an entry says about rollbacks, restarts and LR factors
also becomes launches and receipts, so that lineage and LR ledger of an old run can be told; those are marked `imported`,
and what the source does not say (last steps, base LRs) stays unknown.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.integrations.foreign_journals import Draft, Import, parse_moment
from chronicle.journal import Entry

__all__ = ["read_entries", "to_record"]

ENVELOPE = ("date", "kind", "title", "step")  # fields of ours; everything else is kept in `data`, or in `data.import`
ORIGIN = ("n", "prev", "run", "seg", "seq", "title_run", "v", "writer", "date")  # bookkeeping of the other journal
FACTOR = re.compile(r"x([0-9.]+)")


def read_entries(path: Path) -> Import:
    """All lines of the file as drafts; raises `ChronicleError` naming the line that is no object."""
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


def to_record(entry: Entry) -> dict[str, Any]:
    """The line that this entry was made from."""
    data = dict(entry.data)
    record: dict[str, Any] = dict(data.pop("import"))
    record |= data
    record["kind"] = record.pop("kind_there", entry.kind)
    if entry.title:
        record["title"] = entry.title
    if entry.step is not None:
        record["step"] = entry.step
    return record


def _drafts(records: Sequence[Mapping[str, Any]]) -> Iterator[Draft]:
    segments = _segments(records)
    seen: list[str] = []
    factor = 1.0
    for record in records:
        segment = record.get("seg")
        moment = parse_moment(str(record.get("date", "")))
        target, changed = _target(record), _factor(record, factor)
        # The other journal writes an action into the entry that explains it: the action comes first, then its launch.
        if isinstance(segment, str) and segment not in seen:
            if target is not None and _verb(record) == "rollback":
                facts: dict[str, Any] = {"imported": True}
                facts |= {"lr_ratio": changed / factor} if changed is not None else _by_hand(record)
                yield Draft(kind="rollback.receipt", title=f"rollback to {target}", moment=moment, step=target, data=facts)
                factor = factor if changed is None else changed
            seen.append(segment)
            yield from _launch(len(seen), segment, segments, target, moment)
        yield _entry(record, len(seen) or None)


def _entry(record: Mapping[str, Any], launch: int | None) -> Draft:
    data: dict[str, Any] = {key: value for key, value in record.items() if key not in ENVELOPE and key not in ORIGIN}
    origin = {key: record[key] for key in ORIGIN if key in record}
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        if "step" in record:
            data["step"] = step
        step = None
    kind = str(record["kind"])
    if kind == "segment":  # its facts are a launch of ours; its words stay a note
        kind, origin["kind_there"] = "note", "segment"
    return Draft(
        kind=kind,
        title=str(record.get("title", "")),
        moment=parse_moment(str(record.get("date", ""))),
        step=step,
        launch=launch,
        data={**data, "import": origin},
    )


def _launch(number: int, segment: str, segments: Mapping[str, int | None], start: int | None, moment: Any) -> Iterator[Draft]:
    data = {"imported": True, "start_step": start or 0, "segment": segment}
    yield Draft(kind="launch.start", title=f"launch {number} ({segment})", moment=moment, launch=number, data=data)
    last = segments.get(segment)
    if last is not None and last > (start or 0):
        # Not the end itself: the furthest step that the source says this launch had reached.
        end = {"imported": True, "last_step": last, "at_least": True}
        yield Draft(kind="launch.end", title="", moment=moment, launch=number, step=last, data=end)


def _segments(records: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Segment -> the furthest step it must have reached: one named in its entries, or one that was gone back to later."""
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
            _raise(reached, order[-2], step)  # the step at which the launch was given up
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
    """The cumulative LR factor after this entry, where it says so (`x0.375`); the present one where it changes none."""
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
    data: dict[str, Any] = {"lr_ratio": None, "sets": stated}
    for name, source in (("base_lr_after", stated), ("base_lr_before", before)):
        try:
            data[name] = float(str(source["base_lrs"]))
        except (KeyError, ValueError):
            continue
    return data
