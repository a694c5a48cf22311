"""Folds one log or a whole run: what was read, events, restarts, a line of text, and the proposal.

`scan_file` and `scan_run` read once. `chronicle.watch.follow` gives a `Scan` what a growing log got since the last look.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError, Refusal
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import describe_damage, find_damage, read_journal
from chronicle.metrics.log import Point, read_metrics
from chronicle.metrics.readers import PLAIN, Contents, LogReading, form_of, read_log
from chronicle.paths import RunPaths, list_launch_numbers
from chronicle.resume.checks.check import Check
from chronicle.watch.advice import breach_events, collect_candidates, propose_of_run
from chronicle.watch.restart import LogRestart
from rollback.channels import Role, find_channel
from rollback.detect import Detector, Event, Kind, Status, Tier
from rollback.errors import RollbackError
from rollback.propose import History, Proposal, propose

SPARK_POINTS = 72  # of a line of text
Slice = tuple[int, float]  # first row, highest loss
Advise = Callable[[Sequence[Event], int], Proposal | None]
JSON_FIELDS = (
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster", "excess", "sigmas", "evidence",
)  # fmt: skip


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


class Scan:
    """One log as far as it was read. `look()` folds the points that `read` gives, `finish()` judges what is open."""

    def __init__(
        self, source: str, read: Callable[[], Iterable[Point]], advise: Advise, *, form: str = "metrics.jsonl",
        reading: LogReading = PLAIN, more: Callable[[Sequence[Event]], Sequence[Event]] = lambda _: (),
    ) -> None:  # fmt: skip
        """`advise(events, last_step)` makes the proposal where an event calls for one; `more`: events that no log holds."""
        self.source, self.reading = source, reading
        self.detector = Detector(role_of=reading.role_of)
        self.contents, self.spark = Contents(form, reading), Spark()
        self.trips: list[tuple[int, Check]] = []  # (step of a restart in one log, failed check)
        self.last: Point | None = None
        self.proposal: Proposal | None = None
        self.problem = ""
        self._read, self._advise, self._more = read, advise, more
        self._restarts = LogRestart()
        self._begins: set[int] = set()  # first steps of later launches: the journal tells of them

    @property
    def rows(self) -> int:
        """The number of rows read."""
        return self.detector.row

    @property
    def events(self) -> tuple[Event, ...]:
        """What the detector found, and what stands in no log."""
        own = self.detector.events
        return (*filter(self._is_news, own), *self._more(own))

    def look(self) -> list[Event]:
        """Fold the points since the last look; returns the events that they opened or changed, each as it is now."""
        changed: dict[int, Event] = {}
        for point in self._read():
            if self.last is not None and point.launch != self.last.launch:
                self._begins.add(point.step)
            self.detector.skip_to(point.row)
            loss = self.reading.loss_of(point.values)
            if loss is not None:
                self.spark.feed(self.detector.row, loss)
            self.contents.note(point)
            if point.launch is None:  # the supervisor has compared a run's own launches, and knew of rollbacks
                self.trips += self._restarts.feed(point)
            for event in self.detector.feed(point.step, point.values, time=point.time, launch=point.launch):
                changed[event.id] = event
            self.last = point
        return list(filter(self._is_news, changed.values()))

    def _is_news(self, event: Event) -> bool:
        return event.kind is not Kind.RESTART_REWIND or event.onset_step not in self._begins

    def finish(self) -> Scan:
        """Judge the open events: there is no more to read."""
        self.detector.finish()
        self.advise()
        return self

    def advise(self) -> None:
        """Make the proposal that the events call for; `problem` says why none could be made."""
        self.proposal, self.problem = None, ""
        if any(event.tier is Tier.PROPOSE for event in self.events):
            try:
                self.proposal = self._advise(self.events, self.last_step)
            except (ChronicleError, RollbackError, OSError) as problem:  # what was found is told all the same
                self.problem = f"no proposal could be made: {problem}"

    @property
    def last_step(self) -> int:
        """The last step that was read, or a later one of an event that stands in no log."""
        found = self._more(self.detector.events)
        return max([0 if self.last is None else self.last.step, *(event.alarm_step for event in found)])

    def status_line(self) -> str:
        """Step, loss, LR and gradient norm of the last point."""
        if self.last is None:
            return "no points yet"
        values = self.last.values
        told = ((Role.LOSS, self.reading.loss), (Role.LR, self.reading.lr), (Role.NORM, None))
        names = (find_channel(values, role) if given is None else given if given in values else None for role, given in told)
        shown = [f"{name} {values[name]:.5g}" for name in names if name is not None]
        return f"step {self.last.step}: {', '.join(shown)}"

    def to_json(self) -> dict[str, Any]:
        """One object; `proposals` is a list, empty where no event calls for one."""
        restarts = [{"step": step, **check.to_json()} for step, check in self.trips]
        records = [event.to_json() for event in self.events]
        return {
            "file": self.source,
            "rows": self.rows,
            "read": self.contents.to_json(),
            "events": [{name: record[name] for name in JSON_FIELDS} for record in records],
            "proposals": [] if self.proposal is None else [self.proposal.to_json()],
            **({"problem": self.problem} if self.problem else {}),
            **({"restarts": restarts} if restarts else {}),
        }


def scan_file(path: Path, *, checkpoints_dir: Path | None = None, reading: LogReading = PLAIN) -> Scan:
    """Scan one log that belongs to no run. Without a directory of checkpoints a proposal names the onset and no target."""
    left_out: list[str] = []
    read, form = partial(read_log, path, reading, left_out), form_of(path, reading)
    scan = Scan(str(path), read, advice_on_file(checkpoints_dir), form=form, reading=reading)
    scan.contents.left_out = left_out
    return _read_whole(scan)


def scan_run(
    paths: RunPaths, checkpoints_dir: Path | None, *, options: tuple[str, ...] = (), reading: LogReading = PLAIN
) -> Scan:
    """Scan the launches of a run in order; the proposal uses its journal and the checkpoints on disk.

    `options` go into the proposed command: what else it needs to find the same run and checkpoints.
    """
    advise = advice_on_run(paths, checkpoints_dir, options)
    scan = Scan(paths.run, partial(_run_points, paths), advise, reading=reading, more=breaches_of(paths))
    return _read_whole(scan)


def _read_whole(scan: Scan) -> Scan:
    """Raises NothingToWatch where no loss is known."""
    scan.look()
    scan.contents.need_loss(scan.source)
    return scan.finish()


def breaches_of(paths: RunPaths) -> Callable[[Sequence[Event]], Sequence[Event]]:
    """Return what adds the weights that the guard of a run found spoilt, by its journal as it is now."""
    entries = read_journal(paths).entries
    lineage = compute_lineage(entries)
    return lambda events: breach_events(entries, lineage, after=events)


def advice_on_file(checkpoints_dir: Path | None) -> Advise:
    """Return what makes the proposal for a log that belongs to no run."""

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        roots = () if checkpoints_dir is None else (checkpoints_dir,)
        candidates = collect_candidates(roots, before=_newest_onset(events, last_step))
        options = () if checkpoints_dir is None else (f"--checkpoints {shlex.quote(str(checkpoints_dir))}",)
        return propose(events, candidates, History(last_step=last_step, options=options))

    return advise


def advice_on_run(paths: RunPaths, checkpoints_dir: Path | None, options: tuple[str, ...] = ()) -> Advise:
    """Return what makes the proposal for a run, by its journal as it is then; a damaged one may lack a rollback."""

    def advise(events: Sequence[Event], last_step: int) -> Proposal | None:
        damage = find_damage(paths, read_journal(paths))
        if damage:
            raise Refusal(describe_damage(paths, damage))
        before = _newest_onset(events, last_step)
        return propose_of_run(paths, events, checkpoints_dir, last_step=last_step, before=before, options=options)

    return advise


def _newest_onset(events: Sequence[Event], last_step: int) -> int:
    onsets = [event.onset_low_step for event in events if event.tier is Tier.PROPOSE and event.onset_low_step is not None]
    return onsets[-1] if onsets else last_step


def _run_points(paths: RunPaths) -> Iterable[Point]:
    """Yield the points of all launches, in launch order, each with its launch."""
    for launch in list_launch_numbers(paths) if paths.launches_dir.is_dir() else ():
        if paths.metrics_path(launch).is_file():
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
