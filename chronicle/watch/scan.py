"""A finished or growing log, or a whole run, scanned after the fact: events, series for the picture, proposal."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.metrics.log import Point, read_metrics
from chronicle.metrics.readers import read_log
from chronicle.paths import RunPaths
from chronicle.watch.facts import collect_candidates, collect_history, find_checkpoint_roots
from chronicle.watch.two_processes import fold_in_two, is_long
from rollback.detect import Detector, Event, Tier
from rollback.propose import History, Proposal, propose

SPARK_POINTS = 72
BAND_POINTS = 600
Slice = tuple[int, float, float]
LOSS_NAMES = ("loss", "train_loss", "lm loss")
JSON_FIELDS = (
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one log says; `band` holds (first row, lowest, highest loss) of equal slices of it."""

    source: str
    rows: int
    last_step: int
    events: tuple[Event, ...]
    proposal: Proposal | None
    band: tuple[Slice, ...]
    problem: str | None = None  # why the log could not be read

    @property
    def spark(self) -> tuple[tuple[int, float], ...]:
        """(first row, worst loss) of as many slices as a line of text has room for."""
        group = max(1, math.ceil(len(self.band) / SPARK_POINTS))
        parts = [self.band[start : start + group] for start in range(0, len(self.band), group)]
        return tuple((part[0][0], functools.reduce(_merge, part)[2]) for part in parts)

    def to_json(self) -> dict[str, Any]:
        """One object a file; proposals are a list, empty where nothing calls for one."""
        return {
            "file": self.source,
            "rows": self.rows,
            "events": [{name: record[name] for name in JSON_FIELDS} | {"evidence": record["evidence"]}
                       for record in (event.to_json() for event in self.events)],
            "proposals": [] if self.proposal is None else [self.proposal.to_json()],
            **({} if self.problem is None else {"problem": self.problem}),
        }  # fmt: skip


class Band:
    """Lowest and highest loss of at most 1,200 equal slices, slices doubling as the log grows; O(1) memory."""

    def __init__(self) -> None:
        self.size, self.filled = 1, 0
        self.slices: list[Slice] = []

    def feed(self, row: int, value: float) -> None:
        if self.filled == 0 or not self.slices:
            self.slices.append((row, value, value))
        else:
            first, low, high = self.slices[-1]
            if value < low or value > high or value != value:
                self.slices[-1] = _merge((first, low, high), (row, value, value))
        self.filled = (self.filled + 1) % self.size
        if len(self.slices) > 2 * BAND_POINTS:
            pairs = zip(self.slices[::2], [*self.slices[1::2], self.slices[-1]], strict=False)
            self.slices = [_merge(a, b) for a, b in pairs]
            self.size *= 2
            self.filled = 0


def _merge(a: Slice, b: Slice) -> Slice:
    """Both slices as one; a value that is no number stays visible as the highest."""
    lows = [value for value in (a[1], b[1]) if value == value]
    high = math.nan if a[2] != a[2] or b[2] != b[2] else max(a[2], b[2])
    return a[0], min(lows, default=math.nan), high


class Trace:
    """What the picture and the last line need of every point."""

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self.band, self.last_step, self.rows = Band(), 0, 0
        self._progress = progress

    def note(self, point: Point) -> None:
        self.last_step = point.step
        self.rows = max(self.rows, point.row)
        loss = next((point.values[name] for name in LOSS_NAMES if name in point.values), None)
        if loss is not None:
            self.band.feed(self.rows, loss)
        self.rows += 1
        if self._progress is not None and not self.rows & 0x3FFF:
            self._progress(self.rows)


def unread(source: str, problem: str) -> Scan:
    """The place of a log that could not be read among those that could."""
    return Scan(source=source, rows=0, last_step=0, events=(), proposal=None, band=(), problem=problem)


Advise = Callable[[Sequence[Event], int], Proposal | None]


def scan_points(points: Iterable[Point], source: str, advise: Advise) -> Scan:
    """Fold all points; `advise(events, last_step)` makes the proposal when an event calls for one."""
    detector, trace = Detector(), Trace()
    for point in points:
        detector.skip_to(point.row)
        detector.feed(point.step, point.values, time=point.time, launch=point.launch)
        trace.note(point)
    detector.finish()
    return _scan(detector, trace, source, advise)


def _scan(detector: Detector, trace: Trace, source: str, advise: Advise) -> Scan:
    calls = any(event.tier is Tier.PROPOSE for event in detector.events)
    return Scan(
        source=source, rows=detector.row, last_step=trace.last_step, events=detector.events,
        proposal=advise(detector.events, trace.last_step) if calls else None, band=tuple(trace.band.slices),
    )  # fmt: skip


def scan_file(
    path: Path, *, checkpoints_dir: Path | None = None, progress: Callable[[int], None] | None = None
) -> Scan:
    """Scan one log without a run around it; a long one by two processes. `progress` is told the points so far.

    Without a directory of checkpoints a proposal says what is wrong and names no target.
    """

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        roots = () if checkpoints_dir is None else (checkpoints_dir,)
        candidates = collect_candidates(roots, before=_newest_onset(events, last_step))
        options = () if checkpoints_dir is None else (f"--checkpoints {shlex.quote(str(checkpoints_dir))}",)
        return propose(events, candidates, History(last_step=last_step, options=options))

    if not is_long(path):
        return scan_points(read_log(path), str(path), advise)
    trace = Trace(progress)
    return _scan(fold_in_two(path, trace.note), trace, str(path), advise)


def scan_run(paths: RunPaths, checkpoints_dir: Path | None, *, options: tuple[str, ...] = ()) -> Scan:
    """Scan every launch of a run in order; the proposal knows its journal and its checkpoints.

    `options` go into the proposed command: what else it needs to find the same run and checkpoints.
    """
    entries = read_journal(paths).entries

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        return advise_run(paths, entries, checkpoints_dir, events, last_step, options)

    return scan_points(run_points(paths), paths.run, advise)


def advise_run(
    paths: RunPaths, entries: Sequence[Entry], checkpoints_dir: Path | None, events: Sequence[Event], last_step: int,
    options: tuple[str, ...] = (),
) -> Proposal | None:  # fmt: skip
    """The proposal for a run's events from its journal and the checkpoints on disk."""
    lineage = compute_lineage(entries)
    launch = lineage.launches[-1].number if lineage.launches else None
    roots = find_checkpoint_roots(entries, checkpoints_dir, Path.cwd())
    candidates = collect_candidates(roots, before=_newest_onset(events, last_step), entries=entries)
    history = collect_history(entries, run=paths.run, launch=launch, last_step=last_step)
    return propose(events, candidates, replace(history, options=options))


def _newest_onset(events: Sequence[Event], last_step: int) -> int:
    onsets = [event.onset_low_step for event in events if event.tier is Tier.PROPOSE and event.onset_low_step is not None]
    return onsets[-1] if onsets else last_step


def run_points(paths: RunPaths) -> Iterable[Point]:
    """The points of all launches, in launch order, each with its launch."""
    if not paths.launches_dir.is_dir():
        return
    for directory in sorted(paths.launches_dir.iterdir()):
        if not (directory.name.isdecimal() and paths.metrics_path(int(directory.name)).is_file()):
            continue
        launch = int(directory.name)
        for point in read_metrics(paths.metrics_path(launch)):
            yield point._replace(launch=launch)
