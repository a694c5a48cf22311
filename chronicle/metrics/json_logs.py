"""JSON in its many shapes: our own lines, W&B history, Trainer's `trainer_state.json`, any JSONL with a step.

Ours is read by `log.read_metrics`; here is the general reader, which flattens nested objects and knows other names for
the step. W&B's `_step` counts log calls: where a record names the trainer's own step, that one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chronicle.metrics.lines import canonical_name
from chronicle.metrics.log import NON_FINITE, Point
from chronicle.metrics.opening import log_lines

STEP_NAMES = ("train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "_step", "train/step")
TIME_NAMES = ("t", "time", "_timestamp", "timestamp", "wall_time", "created_at")
LAUNCH_NAMES = ("launch", "session")
SUMMARY = "train_runtime"  # Trainer's last record: its train_loss is the mean of the run, not a point of it


def read_json_lines(path: Path) -> Iterator[Point]:
    """Yield the points of a JSONL file; lines that are no object or have no step are passed over."""
    yield from _points(_records(log_lines(path)))


def parse_json_line(line: str | bytes, row: int = 0) -> Point | None:
    """The point of one line; None where it is no object with a step."""
    text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
    point = next(_points(_records([text])), None)
    return None if point is None else point._replace(row=row)


def read_trainer_state(path: Path) -> Iterator[Point]:
    """Yield the points of `log_history`, or of a list of records; a file that holds neither has none."""
    try:
        state = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return
    history = state.get("log_history") if isinstance(state, dict) else state
    if isinstance(history, list):
        yield from _points(record for record in history if isinstance(record, dict) and SUMMARY not in record)


def _records(lines: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _points(records: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    row = 0
    for record in records:
        flat = dict(_flatten(record))
        step = next((flat[name] for name in STEP_NAMES if name in flat), None)
        if step is None or not math.isfinite(step) or step != int(step):
            continue
        time = next((flat[name] for name in TIME_NAMES if name in flat), None)
        launch = next((int(flat[name]) for name in LAUNCH_NAMES if name in flat and math.isfinite(flat[name])), None)
        skip = {*STEP_NAMES, *TIME_NAMES, *LAUNCH_NAMES, "epoch"}
        values = {canonical_name(name): value for name, value in flat.items() if name not in skip}
        if values:
            yield Point(row, int(step), time, values, launch)
            row += 1


def _flatten(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        full = f"{prefix}{name}"
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield full, float(value) if isinstance(value, float) else value
        elif isinstance(value, str) and value in NON_FINITE:
            yield full, NON_FINITE[value]
        elif isinstance(value, dict) and depth < 3:
            yield from _flatten(value, f"{full}/", depth + 1)
