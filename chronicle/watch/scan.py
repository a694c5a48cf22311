"""Scans a finished log or a whole run: events, proposal, the series for a sparkline."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.metrics.log import Point, read_metrics
from chronicle.metrics.readers import PLAIN, Contents, LogReading, form_of, read_log
from chronicle.paths import RunPaths
from chronicle.watch.advice import breach_events, collect_candidates, propose_of_run
from rollback.detect import Detector, Event, Status, Tier
from rollback.propose import History, Proposal, propose

SPARK_POINTS = 72  # of a line of text
Slice = tuple[int, float]  # first row, highest loss
JSON_FIELDS = (
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster", "excess", "sigmas",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result for one log; `spark` holds (first row, highest loss) of equal slices of it."""

    source: str
    rows: int
    last_step: int
    events: tuple[Event, ...]
    proposal: Proposal | None
    spark: tuple[Slice, ...]
    problem: str | None = None  # why the log could not be read
    blind: bool = False  # it was read, and holds no loss that is known
    contents: Contents | None = None  # what was read; None where nothing could be

    def to_json(self) -> dict[str, Any]:
        """Return one object per file; `proposals` is a list, empty where no event calls for one."""
        return {
            "file": self.source,
            "rows": self.rows,
            **({} if self.contents is None else {"read": self.contents.to_json()}),
            "events": [{name: record[name] for name in JSON_FIELDS} | {"evidence": record["evidence"]}
                       for record in (event.to_json() for event in self.events)],
            "proposals": [] if self.proposal is None else [self.proposal.to_json()],
            **({} if self.problem is None else {"problem": self.problem}),
        }  # fmt: skip


class Spark:
    """The highest loss of at most 144 equal slices, which double in length as the log grows; a NaN is the highest."""

    def __init__(self) -> None:
        self.size, self.filled = 1, 0
        self.slices: list[Slice] = []

    def feed(self, row: int, value: float) -> None:
        """Add one value."""
        if self.filled == 0 or not self.slices:
            self.slices.append((row, value))
        else:
            self.slices[-1] = _merge(self.slices[-1], (row, value))
        self.filled = (self.filled + 1) % self.size
        if len(self.slices) > 2 * SPARK_POINTS:
            self.slices = self.halved()
            self.size *= 2
            self.filled = 0

    def halved(self) -> list[Slice]:
        """Neighbours as one slice."""
        pairs = zip(self.slices[::2], [*self.slices[1::2], self.slices[-1]], strict=False)
        return [_merge(first, second) for first, second in pairs]

    def line(self) -> tuple[Slice, ...]:
        """As many slices as fit in a line of text."""
        return tuple(self.slices if len(self.slices) <= SPARK_POINTS else self.halved())


def _merge(first: Slice, second: Slice) -> Slice:
    high = math.nan if math.isnan(first[1]) or math.isnan(second[1]) else max(first[1], second[1])
    return first[0], high


def unread(source: str, problem: str, *, blind: bool = False) -> Scan:
    """Return the scan of a log that could not be read."""
    return Scan(source=source, rows=0, last_step=0, events=(), proposal=None, spark=(), problem=problem, blind=blind)


Advise = Callable[[Sequence[Event], int], Proposal | None]


def scan_points(
    points: Iterable[Point], source: str, advise: Advise, more: Callable[[Sequence[Event]], Sequence[Event]] = lambda _: (),
    *, form: str = "metrics.jsonl", reading: LogReading = PLAIN,
) -> Scan:
    """Fold all points; `advise(events, last_step)` makes the proposal where an event calls for one.

    `more(events)`: events that stand in no log.
    """
    detector, contents, spark = Detector(role_of=reading.role_of), Contents(form, reading), Spark()
    last_step = 0
    for point in points:
        detector.skip_to(point.row)
        row = detector.row
        detector.feed(point.step, point.values, time=point.time, launch=point.launch)
        contents.note(point)
        last_step = point.step
        loss = reading.loss_of(point.values)
        if loss is not None:
            spark.feed(row, loss)
    detector.finish()
    found = more(detector.events)
    events = (*detector.events, *found)
    contents.need_loss(source)
    last_step = max([last_step, *(event.alarm_step for event in found)])
    calls = any(event.tier is Tier.PROPOSE for event in events)
    return Scan(
        source=source,
        rows=detector.row,
        last_step=last_step,
        events=events,
        proposal=advise(events, last_step) if calls else None,
        spark=spark.line(),
        contents=contents,
    )


def scan_file(path: Path, *, checkpoints_dir: Path | None = None, reading: LogReading = PLAIN) -> Scan:
    """Scan one log that belongs to no run. Without a directory of checkpoints a proposal names the onset and no target."""
    form, advise = form_of(path, reading), advice_on_file(checkpoints_dir)
    return scan_points(read_log(path, reading), str(path), advise, form=form, reading=reading)


def scan_run(
    paths: RunPaths, checkpoints_dir: Path | None, *, options: tuple[str, ...] = (), reading: LogReading = PLAIN
) -> Scan:
    """Scan the launches of a run in order; the proposal uses its journal and the checkpoints on disk.

    `options` go into the proposed command: what else it needs to find the same run and checkpoints.
    """
    entries = read_journal(paths).entries

    def breaches(events: Sequence[Event]) -> Sequence[Event]:
        return breach_events(entries, compute_lineage(entries), after=events)

    advise = advice_on_run(paths, checkpoints_dir, options)
    return scan_points(_run_points(paths), paths.run, advise, breaches, reading=reading)


def advice_on_file(checkpoints_dir: Path | None) -> Advise:
    """Return what makes the proposal for a log that belongs to no run."""

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        roots = () if checkpoints_dir is None else (checkpoints_dir,)
        candidates = collect_candidates(roots, before=_newest_onset(events, last_step))
        options = () if checkpoints_dir is None else (f"--checkpoints {shlex.quote(str(checkpoints_dir))}",)
        return propose(events, candidates, History(last_step=last_step, options=options))

    return advise


def advice_on_run(paths: RunPaths, checkpoints_dir: Path | None, options: tuple[str, ...] = ()) -> Advise:
    """Return what makes the proposal for a run, by its journal as it is then."""

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        before = _newest_onset(events, last_step)
        return propose_of_run(paths, events, checkpoints_dir, last_step=last_step, before=before, options=options)

    return advise


def _newest_onset(events: Sequence[Event], last_step: int) -> int:
    onsets = [event.onset_low_step for event in events if event.tier is Tier.PROPOSE and event.onset_low_step is not None]
    return onsets[-1] if onsets else last_step


def _run_points(paths: RunPaths) -> Iterable[Point]:
    """Yield the points of all launches, in launch order, each with its launch."""
    if not paths.launches_dir.is_dir():
        return
    for directory in sorted(paths.launches_dir.iterdir()):
        if not (directory.name.isdecimal() and paths.metrics_path(int(directory.name)).is_file()):
            continue
        launch = int(directory.name)
        for point in read_metrics(paths.metrics_path(launch)):
            yield point._replace(launch=launch)


def describe_event(event: Event) -> str:
    """One line about an event: tier, class, onset with its lower bound, size, end, channels, evidence."""
    since = f"{event.onset_step}"
    if event.onset_low_step != event.onset_step:
        since = f"{event.onset_low_step}–{event.onset_step}"
    size = f" +{event.excess:.3g}" if event.excess is not None else ""
    end = f" back at {event.recovered_step}" if event.status is Status.RECOVERED and event.recovered_step else ""
    why = f"  ({'; '.join(event.evidence)})" if event.evidence else ""
    return (
        f"{event.tier.value:7} {event.kind.value:18} {event.status.value:9} since {since}"
        f"{size}{end}  [{', '.join(event.channels)}]{why}"
    )
