"""Writes event files by TensorBoard's own record writer, event by event."""

from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write the events to a new file."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())
