"""Studies for the page: what `experiment.report` entries say, with the curves that lie beside them in `objects/`.

The form is docs/studies.md's `panel.json`; nothing of the package that wrote it is imported. Whatever does not fit the
form is left out: the words of the entry are shown all the same.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chronicle.journal import Entry
from chronicle.paths import RunPaths
from chronicle.report.markup import anchor_of
from chronicle.story.assemble import Story
from chronicle.story.plain import plain

__all__ = ["KIND", "contrast_reach", "read_panels"]

KIND = "experiment.report"
PANEL_VERSION = 1
MOST_BYTES = 16 << 20
MOST_POINTS = 400  # of one curve
MOST_CURVES = 64
CONTRAST_KEYS = ("name", "formula", "question", "n", "mean", "low", "high", "verdict")


def read_panels(story: Story, paths: RunPaths) -> list[dict[str, Any]]:
    """One panel a study, from its newest report that has one; plain values, safe to hand to the page."""
    newest: dict[str, Entry] = {}
    for entry in story.entries:
        if entry.kind == KIND:
            newest[str(entry.data.get("study") or entry.title)] = entry
    return [panel for entry in newest.values() if (panel := _panel(entry, paths)) is not None]


def contrast_reach(intervals: Iterable[tuple[float, float]], margin: float) -> float:
    """Half the axis of the contrasts' picture: one arm that nearly diverged must not hide the answers of all the others."""
    ends = [max(abs(low), abs(high)) for low, high in intervals]
    return max([2 * margin, *(1.15 * end for end in ends if end <= 5 * margin)])


def _panel(entry: Entry, paths: RunPaths) -> dict[str, Any] | None:
    for row in entry.data.get("evidence") or ():
        digest = row.get("sha256") if isinstance(row, Mapping) and row.get("kind") == "panel" else None
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
