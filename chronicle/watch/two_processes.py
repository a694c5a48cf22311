"""A long finished log scanned by two processes: each reads it, each folds its half of the channels.

The second process hands its findings over in batches; the first folds a batch of points only when the findings of
those points are there. Memory stays flat: both stream, and neither runs more than a few batches ahead.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from chronicle.metrics.log import Point
from chronicle.metrics.readers import read_log
from rollback.detect.split import DecisiveDetector, EvidenceDetector

BATCH_POINTS = 4096
LONG_BYTES = 24 << 20  # below that a second process costs more than it brings


def is_long(path: Path) -> bool:
    """Whether a second process pays."""
    return path.is_file() and path.stat().st_size >= LONG_BYTES


def fold_in_two(path: Path, each: Callable[[Point], None], *, batch_points: int = BATCH_POINTS) -> DecisiveDetector:
    """Fold a log in two processes; `each` sees every point. Raises what reading raises, in either process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    second = context.Process(target=_fold_evidence, args=(str(path), theirs, batch_points), daemon=True)
    second.start()
    theirs.close()
    try:
        detector = DecisiveDetector()
        for batch in _batches(path, batch_points):
            _receive(ours, detector)
            for point in batch:
                each(point)
                detector.skip_to(point.row)
                detector.feed(point.step, point.values, time=point.time, launch=point.launch)
        _receive(ours, detector)
        detector.finish()
        return detector
    finally:
        ours.close()
        second.join(5)
        if second.is_alive():
            second.terminate()


def _receive(ours: Connection, detector: DecisiveDetector) -> None:
    message = ours.recv()
    if isinstance(message, BaseException):
        raise message
    detector.expect(message)


def _fold_evidence(path: str, theirs: Connection, batch_points: int) -> None:
    """The second process: one message a batch, one more at the end."""
    try:
        detector = EvidenceDetector()
        for batch in _batches(Path(path), batch_points):
            for point in batch:
                detector.skip_to(point.row)
                detector.feed(point.step, point.values, time=point.time, launch=point.launch)
            theirs.send(detector.take())
        detector.finish()
        theirs.send(detector.take())
    except BrokenPipeError:
        return  # the first process has given up and said why
    except Exception as problem:  # noqa: BLE001 carried to the process that can report it
        theirs.send(problem)


def _batches(path: Path, size: int) -> Iterator[list[Point]]:
    batch: list[Point] = []
    for point in read_log(path):
        batch.append(point)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
