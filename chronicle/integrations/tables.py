"""CSV, JSON, JSON lines and Parquet of rows. An empty cell is "not recorded"; NaN and infinities are words, as everywhere."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from chronicle.errors import ChronicleError
from chronicle.integrations.exports import Row

__all__ = ["write_csv", "write_json", "write_jsonl", "write_parquet"]

LEADING = ("step", "launch", "time", "kept")
PARQUET_ROWS = 1 << 16


def write_csv(rows: Iterable[Row], channels: Sequence[str], file: TextIO) -> int:
    """A header and one line a row; a channel whose name spreadsheets would run as a formula is quoted with an apostrophe."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*LEADING, *(f"'{name}" if name[:1] in "=+-@" else name for name in channels)])
    count = 0
    for row in rows:
        cells = [row.step, row.launch, _cell(row.time), int(row.kept)]
        writer.writerow(cells + [_cell(row.values.get(name)) for name in channels])
        count += 1
    return count


def write_jsonl(rows: Iterable[Row], channels: Sequence[str], file: TextIO) -> int:
    """One object a row, like `metrics.jsonl` with `launch` and `kept`."""
    count = 0
    for row in rows:
        file.write(_object(row, channels) + "\n")
        count += 1
    return count


def write_json(rows: Iterable[Row], channels: Sequence[str], file: TextIO) -> int:
    """One array of the objects that `write_jsonl` writes, one a line."""
    count = 0
    file.write("[")
    for count, row in enumerate(rows, start=1):
        file.write((",\n" if count > 1 else "\n") + _object(row, channels))
    file.write("\n]\n")
    return count


def _object(row: Row, channels: Sequence[str]) -> str:
    record: dict[str, Any] = {"step": row.step, "launch": row.launch, "kept": row.kept}
    if row.time is not None:
        record["t"] = row.time
    record |= {name: _json(row.values[name]) for name in channels if name in row.values}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def write_parquet(rows: Iterable[Row], channels: Sequence[str], path: Path) -> int:
    """Columns step, launch, time, kept and one float64 a channel, written in row groups; needs pyarrow."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ModuleNotFoundError as problem:
        raise ChronicleError("pyarrow is not installed: Parquet cannot be written", "pip install pyarrow") from problem
    types = [("step", pyarrow.int64()), ("launch", pyarrow.int32()), ("time", pyarrow.float64()), ("kept", pyarrow.bool_())]
    schema = pyarrow.schema([*types, *((name, pyarrow.float64()) for name in channels)])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for part in _groups(rows):
            columns: list[list[Any]] = [[getattr(row, name) for row in part] for name in LEADING]
            columns += [[row.values.get(name) for row in part] for name in channels]
            writer.write_table(pyarrow.table(columns, schema=schema))
            count += len(part)
    return count


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    for row in rows:
        part.append(row)
        if len(part) == PARQUET_ROWS:
            yield part
            part = []
    if part:
        yield part


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value) if math.isfinite(value) else str(_json(value))


def _json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


Writer = Callable[[Iterable[Row], Sequence[str], TextIO], int]
