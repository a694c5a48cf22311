"""Export the curve of the lineage: CSV, JSON lines and TensorBoard event files.

Each step appears once, from the launch that the present weights descend from. TensorBoard files are written without
TensorBoard; their purge markers make it show the same curve. Format: TFRecord of tensorflow/core/util/event.proto.
"""

import csv
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

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

CASTAGNOLI = 0x82F63B78
MASK_DELTA = 0xA282EAD8
FILE_VERSION = b"brain.Event:2"
SESSION_START = b"\x08\x01"  # SessionLog{status: START}


def write_tensorboard(rows: Iterable[CurveRow], lineage: Lineage, directory: Path) -> int:
    """Write one event file per launch, abandoned parts included; return the number of rows.

    Each file begins with SessionLog.START at the first step of its launch. TensorBoard then drops points of earlier files
    from that step on, so the lineage remains.
    """
    directory.mkdir(parents=True, exist_ok=True)
    starts = {span.number: (span.start_step or 0) + 1 for span in lineage.launches}
    count = 0
    for launch, mine in groupby(rows, key=attrgetter("launch")):
        first = next(mine)
        begun = first.time or 0.0
        # TensorBoard sorts files by name and reads the first number as seconds: the launch number keeps them in order.
        with (directory / f"events.out.tfevents.{launch:010d}.chronicle").open("wb") as file:
            _write(file, _double(1, begun) + _bytes(3, FILE_VERSION))
            _write(file, _event(begun, starts.get(launch, first.step), b"") + _bytes(7, SESSION_START))
            for row in chain([first], mine):
                _write(file, _event(row.time or 0.0, row.step, b"".join(_scalars(row))))
                count += 1
    return count


def _scalars(row: CurveRow) -> Iterator[bytes]:
    for name, value in row.values.items():
        yield _bytes(1, _bytes(1, name.encode("utf-8", "replace")) + b"\x15" + struct.pack("<f", _single(value)))


def _single(value: float) -> float:
    """Return the value, or infinity when it exceeds single precision, which is what TensorBoard stores."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _event(time: float, step: int, summary: bytes) -> bytes:
    return _double(1, time) + b"\x10" + _varint(step) + (_bytes(5, summary) if summary else b"")


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _write(file: BinaryIO, record: bytes) -> None:
    size = struct.pack("<Q", len(record))
    file.write(size + _masked_crc(size) + record + _masked_crc(record))


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


TABLE = _table()


def _masked_crc(data: bytes) -> bytes:
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 255] ^ value >> 8
    value ^= 0xFFFFFFFF
    masked = ((value >> 15 | value << 17) & 0xFFFFFFFF) + MASK_DELTA & 0xFFFFFFFF
    return struct.pack("<I", masked)
