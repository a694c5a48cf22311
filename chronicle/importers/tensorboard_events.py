"""TensorBoard event files, read without TensorBoard: TFRecord framing and the few protobuf fields that scalars need.

A new file, or a `SessionLog.START` (that is what `purge_step` writes), begins a new launch: other readers lose it and
show a zigzag. Fields: tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chronicle.importers.sources import Import, ImportedLaunch, cut_into_launches
from chronicle.metrics import Point

__all__ = ["is_event_file", "read_event_file", "read_tensorboard"]

NAME = "events.out.tfevents."
SESSION_START = 1
FLOAT, DOUBLE = 1, 2  # DataType of a tensor


@dataclass(slots=True)
class Event:
    """One event: scalars by tag; `starts` when it carries SessionLog.START."""

    time: float = 0.0
    step: int = 0
    scalars: dict[str, float] = field(default_factory=dict)
    starts: bool = False


def is_event_file(path: Path) -> bool:
    """By its name, which TensorBoard itself goes by."""
    return NAME in path.name


def read_tensorboard(path: Path) -> Import:
    """A file, or all event files below a directory in the order of their names (they begin with the time)."""
    found = [path] if path.is_file() else [p for p in path.rglob("*") if is_event_file(p) and p.is_file()]
    files = sorted(found, key=lambda p: (p.name, str(p)))
    launches = [part for file in files for part in _launches(file)]
    return Import(format="tensorboard", launches=tuple(launches))


def _launches(path: Path) -> Iterator[ImportedLaunch]:
    points: list[Point] = []
    for event in read_event_file(path):
        if event.starts and points:
            yield from cut_into_launches(points, path.name)
            points = []
        if event.scalars:
            if points and points[-1].step == event.step and not set(points[-1].values) & set(event.scalars):
                points[-1] = points[-1]._replace(values={**points[-1].values, **event.scalars})
            else:
                points.append(Point(len(points), event.step, event.time, dict(event.scalars)))
    yield from cut_into_launches(points, path.name)


def read_event_file(path: Path) -> Iterator[Event]:
    """Events of one file; a record cut short by a crash ends it."""
    with path.open("rb") as file:
        while True:
            head = file.read(12)
            if len(head) < 12:
                return
            (size,) = struct.unpack("<Q", head[:8])
            record = file.read(size + 4)
            if len(record) < size + 4:
                return
            yield _event(record[:size])


def _event(record: bytes) -> Event:
    event = Event()
    for number, value in _fields(record):
        if number == 1 and isinstance(value, bytes):
            event.time = struct.unpack("<d", value)[0]
        elif number == 2 and isinstance(value, int):
            event.step = value - (1 << 64) if value >= 1 << 63 else value
        elif number == 5 and isinstance(value, bytes):
            event.scalars.update(_summary(value))
        elif number == 7 and isinstance(value, bytes):
            event.starts = (1, SESSION_START) in list(_fields(value))
    return event


def _summary(record: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _fields(record):
        if number != 1 or not isinstance(value, bytes):
            continue
        parts = dict(_fields(value))
        tag, simple, tensor = parts.get(1), parts.get(2), parts.get(8)
        if not isinstance(tag, bytes):
            continue
        scalar = struct.unpack("<f", simple)[0] if isinstance(simple, bytes) and len(simple) == 4 else None
        if scalar is None and isinstance(tensor, bytes):
            scalar = _tensor(tensor)
        if scalar is not None:
            yield tag.decode("utf-8", "replace"), float(scalar)


def _tensor(record: bytes) -> float | None:
    """A tensor of one number: in `tensor_content`, or packed in `float_val` / `double_val`."""
    parts = dict(_fields(record))
    kind, content = parts.get(1), parts.get(4)
    shape = parts.get(2, b"")
    if shape not in (b"", None):
        return None  # not a scalar
    for number, code, size in ((FLOAT, "<f", 4), (DOUBLE, "<d", 8)):
        if kind != number:
            continue
        for raw in (content, parts.get(5 if number == FLOAT else 6)):
            if isinstance(raw, bytes) and len(raw) == size:
                return float(struct.unpack(code, raw)[0])
    return None


def _fields(record: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value): varints as int, everything else as bytes. Damaged bytes end the walk."""
    at = 0
    while at < len(record):
        key, at = _varint(record, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(record, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(record, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            return
        if at + size > len(record):
            return
        yield number, record[at : at + size]
        at += size


def _varint(record: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(record) and shift < 70:
        byte = record[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return value, len(record)
