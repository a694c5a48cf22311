"""TensorBoard's event files, read by TensorBoard's own reader: scalars in both their forms.

An event file is one session; a `SessionLog.START` inside one begins another. Files of a directory are read in the order of the
seconds in their names, which is when their writers began. A file ends where a record is cut (its writer was stopped) or
damaged: TensorBoard's reader does not tell the two apart.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from chronicle.metrics.log import Point, gather

FILE_NAME = re.compile(r".*tfevents\.(\d+)\..*")


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
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each record that is cut
    session = 0
    for event in LegacyEventFileLoader(str(path)).Load():
        if event.session_log.status == event.session_log.START:
            session += 1
            continue
        scalars = {value.tag: _scalar(value) for value in event.summary.value}
        found = {tag: number for tag, number in scalars.items() if number is not None}
        if found:
            yield session, event.step, event.wall_time, found


def _scalar(value: Any) -> float | None:
    """The number of a summary's value, or of its tensor of rank 0, as TensorBoard 2 writes scalars; None for anything else."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim or value.tensor.string_val:
        return None
    return float(make_ndarray(value.tensor))
