"""TensorBoard event files without TensorBoard: TFRecord frames, protobuf fields, scalars in both their forms.

Format: tensorflow/core/lib/io/record_writer.h and tensorflow/core/util/event.proto. A frame is length (8), CRC (4),
data, CRC (4). CRCs are not checked, and an incomplete frame ends the file: its writer was stopped. An event file is one
session; a `SessionLog.START` inside one begins another. Files of a directory are read in the order of the seconds in
their names, which is when their writers began.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from chronicle.metrics.log import Point, gather
from chronicle.metrics.wire import BYTES, FIXED_32, FIXED_64, fields_of

FILE_NAME = re.compile(r".*tfevents\.(\d+)\..*")
MAX_FRAME_BYTES = 1 << 28
DT_FLOAT, DT_DOUBLE, DT_INT32, DT_INT64 = 1, 2, 3, 9
SESSION_START = 1


def is_event_file(path: Path) -> bool:
    """Whether a file is an event file, by its name, as TensorBoard decides it."""
    return "tfevents" in path.name


def read_event_files(path: Path) -> Iterator[Point]:
    """Yield the points of one event file, or of all event files below a directory; each session is a launch."""
    row, launch = 0, -1
    for file in sorted(_event_files(path), key=_began):
        launch += 1
        before = launch
        for session, events in groupby(_events(file), key=itemgetter(0)):
            for point in gather(event[1:] for event in events):
                launch = before + session
                yield point._replace(row=row, launch=launch)
                row += 1


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*tfevents*") if file.is_file()]


def _began(path: Path) -> tuple[int, str]:
    match = FILE_NAME.fullmatch(path.name)
    return (int(match[1]) if match else 0, path.name)


def _events(path: Path) -> Iterator[tuple[int, int, float, dict[str, float]]]:
    """Yield (sessions begun in this file, step, wall time, scalars) of every event that has scalars."""
    session = 0
    for frame in _frames(path):
        when, step, started = 0.0, 0, False
        found: dict[str, float] = {}
        try:
            for number, kind, value in fields_of(frame):
                if number == 1 and kind == FIXED_64 and isinstance(value, bytes):
                    (when,) = struct.unpack("<d", value)
                elif number == 2 and isinstance(value, int):
                    step = value - (1 << 64) if value >> 63 else value
                elif number == 5 and isinstance(value, bytes):
                    found |= dict(_scalars(value))
                elif number == 7 and isinstance(value, bytes):
                    started = any(n == 1 and v == SESSION_START for n, _, v in fields_of(value))
        except (IndexError, struct.error, ValueError):
            continue  # a damaged frame costs itself only
        if started:
            session += 1
        elif found:
            yield session, step, when, found


def _frames(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while True:
            head = file.read(12)
            if len(head) < 12:
                return
            (size,) = struct.unpack("<Q", head[:8])
            if size > MAX_FRAME_BYTES:
                return
            data = file.read(size)
            if len(data) < size:
                return
            file.read(4)
            yield data


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, kind, value in fields_of(summary):
        if number != 1 or kind != BYTES or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, inner_kind, content in fields_of(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", errors="replace")
            elif inner == 2 and inner_kind == FIXED_32 and isinstance(content, bytes):
                (scalar,) = struct.unpack("<f", content)
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor_scalar(content)
        if tag and scalar is not None:
            yield tag, scalar


def _tensor_scalar(tensor: bytes) -> float | None:
    """Return the value of a rank-0 tensor, as TensorBoard 2 writes scalars; None for anything larger."""
    dtype, content, value = 0, b"", None
    for number, kind, part in fields_of(tensor):
        if number == 1 and isinstance(part, int):
            dtype = part
        elif number == 2 and isinstance(part, bytes) and part:
            return None
        elif number == 4 and isinstance(part, bytes):
            content = part
        elif number in (5, 6) and isinstance(part, bytes):
            value = _first_number(number, kind, part)
    if content:
        form = {DT_FLOAT: "<f", DT_DOUBLE: "<d", DT_INT32: "<i", DT_INT64: "<q"}.get(dtype)
        if form is None or len(content) != struct.calcsize(form):
            return None
        return float(struct.unpack(form, content)[0])
    return value


def _first_number(number: int, kind: int, part: bytes) -> float | None:
    """Return the first value of float_val (5) or double_val (6), packed or not."""
    size, form = (4, "<f") if number == 5 else (8, "<d")
    return float(struct.unpack(form, part[:size])[0]) if len(part) >= size else None
