"""Scans a finished log or a whole run: events, proposal, the series for a sparkline, the picture.

matplotlib and rich are imported inside the functions that draw.
"""

from __future__ import annotations

import functools
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.lineage import compute_lineage
from chronicle.journal.reader import read_journal
from chronicle.metrics.log import Point, read_metrics
from chronicle.metrics.readers import PLAIN, Contents, LogReading, form_of, read_log
from chronicle.paths import RunPaths
from chronicle.watch.advice import breach_events, collect_candidates, collect_history, propose_of_run
from rollback.detect import Detector, Event, Status, Tier
from rollback.propose import History, Proposal, propose

LONG_BYTES = 24 << 20  # a log that is worth a progress bar
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


Progress = Callable[[int], None] | None
Advise = Callable[[Sequence[Event], int], Proposal | None]


def scan_points(
    points: Iterable[Point], source: str, advise: Advise, more: Callable[[Sequence[Event]], Sequence[Event]] = lambda _: (),
    *, form: str = "metrics.jsonl", reading: LogReading = PLAIN, progress: Progress = None,
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
        if progress is not None and not detector.row & 0x3FFF:
            progress(detector.row)
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


def scan_file(
    path: Path, *, checkpoints_dir: Path | None = None, progress: Progress = None, reading: LogReading = PLAIN
) -> Scan:
    """Scan one log that belongs to no run. `progress` gets the number of points so far.

    Without a directory of checkpoints a proposal names the onset and no target.
    """
    form = form_of(path, reading)
    advise = advice_on_file(checkpoints_dir)
    return scan_points(read_log(path, reading), str(path), advise, form=form, reading=reading, progress=progress)


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
        entries = read_journal(paths).entries
        launches = compute_lineage(entries).launches
        launch = launches[-1].number if launches else None
        history = collect_history(entries, run=paths.run, launch=launch, last_step=last_step)
        before = _newest_onset(events, last_step)
        return propose_of_run(events, entries, replace(history, options=options), before, checkpoints_dir)

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


# --- Progress bar


@contextmanager
def progress_bar(path: Path) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that takes the number of points read; None without a terminal or for a short log."""
    if not (sys.stderr.isatty() and path.is_file() and path.stat().st_size >= LONG_BYTES):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(path.name, total=_count_lines(path))
        yield lambda done: progress.update(task, completed=done)


def _count_lines(path: Path) -> int:
    """Return the number of lines, estimated from the length of the first ones."""
    with open(path, "rb") as log:
        head = log.read(1 << 16)
    return max(1, path.stat().st_size * head.count(b"\n") // max(1, len(head)))


# --- Picture: the loss and its events as a PNG

LABEL_ROOM = 0.025  # of the width
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
    rows = [row for row, _, _ in scan.band]
    low, top = _range(scan)
    panel.fill_between(rows, [a for _, a, _ in scan.band], [b for _, _, b in scan.band], color=BLUE, alpha=0.35, linewidth=0)
    panel.plot(rows, [(a + b) / 2 for _, a, b in scan.band], color=BLUE, linewidth=0.9)
    above = [row for row, _, high in scan.band if high > top]
    panel.plot(above, [top] * len(above), "^", color=BLUE, markersize=4, clip_on=False)  # continues above the panel
    broken = [row for row, _, high in scan.band if not math.isfinite(high)]
    panel.plot(broken, [low] * len(broken), "x", color=COLOURS[Tier.PROPOSE], markersize=4, clip_on=False)
    named = -math.inf
    for event in sorted(scan.events, key=lambda event: event.alarm_row):
        named = _draw_event(panel, scan, event, named)
    panel.set_ylim(low, top)
    panel.set_xlim(0, max(1, scan.rows - 1))
    panel.set_title(Path(scan.source).name, fontsize=9, loc="left")
    panel.set_xlabel(f"logged point (the last is step {scan.last_step:,})", fontsize=8)
    panel.set_ylabel("loss", fontsize=8)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.grid(axis="y", alpha=0.25, linewidth=0.6)


def _draw_event(panel: Any, scan: Scan, event: Event, named: float) -> float:
    """Draw the onset as a line and the event as a shade; label warnings and proposals where there is room after `named`.

    Returns the row of the last label.
    """
    colour, begin = COLOURS[event.tier], event.onset_row if event.onset_row is not None else event.alarm_row
    end = event.recovered_row if event.recovered_row is not None else scan.rows
    loud = event.tier is not Tier.NOTICE
    if end > begin:
        panel.axvspan(begin, end, color=colour, alpha=0.10 if loud else 0.05, linewidth=0)
    panel.axvline(begin, color=colour, linewidth=1.0 if loud else 0.6, alpha=1.0 if loud else 0.6)
    if not loud or abs(begin - named) < scan.rows * LABEL_ROOM:
        return named
    label = panel.text(
        begin, 0.98, f" {event.kind.value}", transform=panel.get_xaxis_transform(), rotation=90, fontsize=7, color=colour,
        va="top", ha="right",
    )  # fmt: skip
    label.set_in_layout(False)
    return begin


def _range(scan: Scan) -> tuple[float, float]:
    """Return the lowest and highest loss shown, so that one spike does not flatten the rest of the curve."""
    highs = sorted(high for _, _, high in scan.band if math.isfinite(high))
    lows = sorted(low for _, low, _ in scan.band if math.isfinite(low))
    if not highs or not lows:
        return 0.0, 1.0
    low, usual = lows[0], highs[int(0.9 * (len(highs) - 1))]
    top = min(highs[-1], low + 2.5 * (usual - low)) if usual > low else highs[-1]
    room = 0.05 * ((top - low) or 1.0)
    return low - room, top + room


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
