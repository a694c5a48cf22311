"""TensorBoard's event files, read by TensorBoard's own reader: scalars in both their forms.

An event file is one session; a `SessionLog.START` inside one begins another. Files of a directory are read in the order of the
seconds in their names, which is when their writers began. TensorBoard's reader ends a file without a word where a record is
cut (its writer was stopped, or still writes) or damaged. So the records are measured, and what lies behind the last is said.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chronicle.metrics.log import Point, join_steps, number_rows, unread_bytes

RECORD_FRAME = 16  # bytes around a record: its length (8), and the check sums of the length and of the data (4 each)
FILE_NAME = re.compile(r".*tfevents\.(\d+)\..*")


def is_event_file(path: Path) -> bool:
    """Whether a file is an event file, by its name, as TensorBoard decides it."""
    return "tfevents" in path.name


def read_event_files(path: Path, left_out: list[str] | None = None) -> Iterator[Point]:
    """Yield the points of one event file, or of all event files below a directory; each session is a launch.

    `left_out` gets a sentence for each file that could not be read to its end.
    """
    return number_rows(join_steps(_points(path, left_out)))


def _points(path: Path, left_out: list[str] | None) -> Iterator[Point]:
    launch = 0
    files = [path] if path.is_file() else [file for file in path.rglob("*tfevents*") if file.is_file()]
    for file in sorted(files, key=_began):
        before = launch
        for session, step, seconds, values in _events(file, left_out):
            launch = before + session
            yield Point(0, step, seconds, values, launch)
        launch += 1


def _began(path: Path) -> tuple[int, str]:
    match = FILE_NAME.fullmatch(path.name)
    return (int(match[1]) if match else 0, path.name)


def _events(path: Path, left_out: list[str] | None) -> Iterator[tuple[int, int, float, dict[str, float]]]:
    """Yield (sessions begun in this file, step, wall time, scalars) of every event that has scalars."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each record that is cut
    session = read = 0
    for record in RawEventFileLoader(str(path)).Load():
        read += RECORD_FRAME + len(record)
        event = Event.FromString(record)
        if event.session_log.status == event.session_log.START:
            session += 1
            continue
        scalars = {value.tag: _scalar(value) for value in event.summary.value}
        found = {tag: number for tag, number in scalars.items() if number is not None}
        if found:
            yield session, event.step, event.wall_time, found
    if left_out is not None and (rest := path.stat().st_size - read) > 0:
        left_out.append(unread_bytes(path, rest))


def _scalar(value: Any) -> float | None:
    """The number of a summary's value, or of its tensor of rank 0, as TensorBoard 2 writes scalars; None for anything else."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim or value.tensor.string_val:
        return None
    return float(make_ndarray(value.tensor))
