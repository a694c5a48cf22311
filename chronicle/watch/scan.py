"""Scans a finished log or a whole run: events, proposal, the series for a sparkline, the picture.

matplotlib and rich are imported inside the functions that draw.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.metrics.log import Point, read_metrics
from chronicle.metrics.readers import PLAIN, Contents, LogReading, form_of, read_log
from chronicle.paths import RunPaths
from chronicle.watch.advice import breach_events, collect_candidates, propose_of_run
from rollback.detect import Detector, Event, Status, Tier
from rollback.propose import History, Proposal, propose

SPARK_POINTS = 72  # of a line of text
BAND_POINTS = 600  # of the picture, at least
Slice = tuple[int, float, float]  # first row, lowest, highest loss
JSON_FIELDS = (
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster", "excess", "sigmas",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result for one log; `band` holds (first row, lowest, highest loss) of equal slices of it."""

    source: str
    rows: int
    last_step: int
    events: tuple[Event, ...]
    proposal: Proposal | None
    band: tuple[Slice, ...]
    problem: str | None = None  # why the log could not be read
    blind: bool = False  # it was read, and holds no loss that is known
    contents: Contents | None = None  # what was read; None where nothing could be

    @property
    def spark(self) -> tuple[tuple[int, float], ...]:
        """Return (first row, highest loss) of as many slices as fit in a line of text."""
        group = max(1, math.ceil(len(self.band) / SPARK_POINTS))
        parts = [self.band[start : start + group] for start in range(0, len(self.band), group)]
        return tuple((part[0][0], functools.reduce(_merge, part)[2]) for part in parts)

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


class Band:
    """Lowest and highest loss of at most 1,200 equal slices, which double in length as the log grows."""

    def __init__(self) -> None:
        self.size, self.filled = 1, 0
        self.slices: list[Slice] = []

    def feed(self, row: int, value: float) -> None:
        """Add one value."""
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
    """Join two slices; a NaN is kept as the highest value."""
    lows = [value for value in (a[1], b[1]) if value == value]
    high = math.nan if a[2] != a[2] or b[2] != b[2] else max(a[2], b[2])
    return a[0], min(lows, default=math.nan), high


def unread(source: str, problem: str, *, blind: bool = False) -> Scan:
    """Return the scan of a log that could not be read."""
    return Scan(source=source, rows=0, last_step=0, events=(), proposal=None, band=(), problem=problem, blind=blind)


Advise = Callable[[Sequence[Event], int], Proposal | None]


def scan_points(
    points: Iterable[Point], source: str, advise: Advise, more: Callable[[Sequence[Event]], Sequence[Event]] = lambda _: (),
    *, form: str = "metrics.jsonl", reading: LogReading = PLAIN,
) -> Scan:
    """Fold all points; `advise(events, last_step)` makes the proposal where an event calls for one.

    `more(events)`: events that stand in no log.
    """
    detector, contents, band = Detector(role_of=reading.role_of), Contents(form, reading), Band()
    last_step = 0
    for point in points:
        detector.skip_to(point.row)
        row = detector.row
        detector.feed(point.step, point.values, time=point.time, launch=point.launch)
        contents.note(point)
        last_step = point.step
        loss = reading.loss_of(point.values)
        if loss is not None:
            band.feed(row, loss)
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
        band=tuple(band.slices),
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


# --- Picture: the loss and its events as a PNG

BLUE = "#205080"
COLOURS = {Tier.NOTICE: "#8a8a8a", Tier.WARN: "#d98200", Tier.PROPOSE: "#c02020"}


def draw_scans(scans: Sequence[Scan], path: Path) -> None:
    """Write a PNG with one panel per log; raises ChronicleError when matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ChronicleError("matplotlib is not installed", "pip install 'chronicle-ml[report]'") from None
    scans = [scan for scan in scans if scan.band]
    if not scans:
        raise ChronicleError("there is no loss to draw")
    figure, panels = pyplot.subplots(len(scans), 1, figsize=(10, 3.2 * len(scans)), squeeze=False, layout="constrained")
    for panel, scan in zip(panels[:, 0], scans, strict=True):
        _draw(panel, scan)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(panel: Any, scan: Scan) -> None:
    """The loss as a band, each event as a line at its onset and a shade to its end; loud ones have their kind beside it."""
    rows, lows, highs = zip(*scan.band, strict=True)
    panel.fill_between(rows, lows, highs, color=BLUE, alpha=0.35, linewidth=0)
    panel.plot(rows, highs, color=BLUE, linewidth=0.9)
    finite = sorted(high for high in highs if math.isfinite(high))
    if finite:  # so that one spike does not flatten the rest
        panel.set_ylim(top=finite[int(0.98 * (len(finite) - 1))] * 1.1)
    for event in scan.events:
        begin = event.alarm_row if event.onset_row is None else event.onset_row
        end = scan.rows if event.recovered_row is None else event.recovered_row
        panel.axvspan(begin, max(begin, end), color=COLOURS[event.tier], alpha=0.10, linewidth=0)
        panel.axvline(begin, color=COLOURS[event.tier], linewidth=0.6)
        if event.tier is not Tier.NOTICE:
            where = panel.get_xaxis_transform()
            panel.text(begin, 0.98, event.kind.value, transform=where, rotation=90, fontsize=7, va="top", ha="right")
    panel.set_xlim(0, max(1, scan.rows - 1))
    panel.set(title=Path(scan.source).name, ylabel="loss", xlabel=f"logged point (the last is step {scan.last_step:,})")


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
