"""Export the curve of the lineage: CSV, JSON lines and TensorBoard event files.

Each step appears once, from the launch that the present weights descend from. Purge markers make TensorBoard show the same
curve.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from chronicle.journal import Lineage
from chronicle.metrics.numbers import json_number
from chronicle.story.curve import CurveRow

# --- Tables

LEADING = ("step", "launch", "time", "kept")


def write_csv(rows: Iterable[CurveRow], channels: Sequence[str], file: TextIO) -> int:
    """Write a header and one line per row; return the number of rows. An empty cell means not recorded.

    A channel name that a spreadsheet would execute as a formula gets an apostrophe in front.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*LEADING, *(f"'{name}" if name[:1] in "=+-@" else name for name in channels)])
    count = 0
    for row in rows:
        cells = [row.step, row.launch, _cell(row.time), int(row.kept)]
        writer.writerow(cells + [_cell(row.values.get(name)) for name in channels])
        count += 1
    return count


def write_jsonl(rows: Iterable[CurveRow], channels: Sequence[str], file: TextIO) -> int:
    """Write one JSON object per row, like `metrics.jsonl` with `launch` and `kept`; return the number of rows."""
    count = 0
    for row in rows:
        file.write(_object(row, channels) + "\n")
        count += 1
    return count


def _object(row: CurveRow, channels: Sequence[str]) -> str:
    record: dict[str, Any] = {"step": row.step, "launch": row.launch, "kept": row.kept}
    if row.time is not None:
        record["t"] = row.time
    record |= {name: json_number(row.values[name]) for name in channels if name in row.values}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def _cell(value: float | None) -> str:
    return "" if value is None else str(json_number(value))


# --- TensorBoard event files

FILE_VERSION = "brain.Event:2"


def write_tensorboard(rows: Iterable[CurveRow], lineage: Lineage, directory: Path) -> int:
    """Write one event file per launch, abandoned parts included; return the number of rows.

    Each file begins with SessionLog.START at the first step of its launch. TensorBoard then drops points of earlier files
    from that step on, so the lineage remains.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter

    directory.mkdir(parents=True, exist_ok=True)
    starts = {span.number: (span.start_step or 0) + 1 for span in lineage.launches}
    count = 0
    for launch, mine in groupby(rows, key=attrgetter("launch")):
        first = next(mine)
        begun = first.time or 0.0
        session = SessionLog(status=SessionLog.START)
        # TensorBoard sorts files by name and reads the first number as seconds: the launch number keeps them in order.
        with (directory / f"events.out.tfevents.{launch:010d}.chronicle").open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=begun, file_version=FILE_VERSION).SerializeToString())
            start = Event(wall_time=begun, step=starts.get(launch, first.step), session_log=session)
            writer.write(start.SerializeToString())
            for row in chain([first], mine):
                writer.write(_event(row).SerializeToString())
                count += 1
    return count


def _event(row: CurveRow) -> Any:
    """The row as TensorBoard's event; its numbers have single precision."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
    return Event(wall_time=row.time or 0.0, step=row.step, summary=Summary(value=scalars))
