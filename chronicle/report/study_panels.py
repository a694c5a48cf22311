"""Studies for the HTML page: the newest report of each study, with its curves from the object store.

The form is `panel.json` of docs/studies.md. Parts that do not have this form are left out; the report's words are shown in
any case.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chronicle.journal import Entry
from chronicle.journal.events import StudyReport, events_of
from chronicle.paths import RunPaths
from chronicle.report.markup import anchor_of
from chronicle.story.assemble import Story
from chronicle.story.plain import plain

__all__ = ["contrast_reach", "read_panels"]

PANEL_VERSION = 1
MOST_BYTES = 16 << 20
MOST_POINTS = 400  # of one curve
MOST_CURVES = 64
CONTRAST_KEYS = ("name", "formula", "question", "n", "mean", "low", "high", "verdict")


def read_panels(story: Story, paths: RunPaths) -> list[dict[str, Any]]:
    """One panel per study, from its newest report; plain values for the page."""
    newest = {report.study or entry.title: (entry, report) for entry, report in events_of(story.entries, StudyReport)}
    return [panel for entry, report in newest.values() if (panel := _panel(entry, report, paths)) is not None]


def contrast_reach(intervals: Iterable[tuple[float, float]], margin: float) -> float:
    """Half the length of the axis of contrasts. An arm that nearly diverged is cut, so that the others can be read."""
    ends = [max(abs(low), abs(high)) for low, high in intervals]
    return max([2 * margin, *(1.15 * end for end in ends if end <= 5 * margin)])


def _panel(entry: Entry, report: StudyReport, paths: RunPaths) -> dict[str, Any] | None:
    for row in report.evidence:
        digest = row.get("sha256") if row.get("kind") == "panel" else None
        if isinstance(digest, str) and len(digest) == 64 and digest.isalnum():
            found = _read(paths, digest)
            if found is not None:
                return {"anchor": anchor_of(entry.id), **found}
    return None


def _read(paths: RunPaths, digest: str) -> dict[str, Any] | None:
    path = paths.objects_dir / digest[:2] / digest
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        panel = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(panel, dict) or panel.get("v") != PANEL_VERSION:
        return None
    curves = [c for row in _rows(panel.get("curves"))[:MOST_CURVES] if (c := _curve(row)) is not None]
    contrasts = [{key: _value(row.get(key)) for key in CONTRAST_KEYS} for row in _rows(panel.get("contrasts"))[:MOST_CURVES]]
    words = {key: plain(panel.get(key) or "") for key in ("title", "unit", "outcome", "x")}
    marks = [mark for mark in _numbers(panel.get("marks")) if mark is not None][:MOST_CURVES]
    margin = _number(panel.get("margin"))
    ends = [(_number(c["low"]), _number(c["high"])) for c in contrasts]
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    reach = contrast_reach(known, margin) if margin and known else None
    return {**words, "margin": margin, "reach": reach, "marks": marks, "curves": curves, "contrasts": contrasts}


def _curve(row: Mapping[str, Any]) -> dict[str, Any] | None:
    columns = {name: _numbers(row.get(name)) for name in ("x", "mean", "low", "high")}
    count = len(columns["x"])
    if not count or len(columns["mean"]) != count:
        return None
    step = math.ceil(count / MOST_POINTS)
    kept = {name: values[::step] if len(values) == count else [] for name, values in columns.items()}
    return {"channel": plain(row.get("channel") or ""), "arm": plain(row.get("arm") or ""), **kept}


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _numbers(value: object) -> list[float | None]:
    return [_number(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _number(value: object) -> float | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(f"{value:.6g}") if fine else None


def _value(value: object) -> object:
    return _number(value) if isinstance(value, int | float) else None if value is None else plain(value)
