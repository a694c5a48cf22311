"""The loss with its events as a PNG; matplotlib is imported here and nowhere else in this package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.watch.scan import Scan
from rollback.detect import Event, Tier

LABEL_ROOM = 0.025  # of the width
BLUE = "#205080"
COLOURS = {Tier.NOTICE: "#8a8a8a", Tier.WARN: "#d98200", Tier.PROPOSE: "#c02020"}


def draw_scans(scans: Sequence[Scan], path: Path) -> None:
    """One panel a log; raises ChronicleError when matplotlib is not installed."""
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
    panel.plot(above, [top] * len(above), "^", color=BLUE, markersize=4, clip_on=False)  # goes on above the picture
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
    """The onset as a line, the event as a shade, its name where it is loud and the last name (at `named`) leaves room."""
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
    """Lowest and highest loss shown: a spike to a thousand must not make a line of the rest."""
    highs = sorted(high for _, _, high in scan.band if math.isfinite(high))
    lows = sorted(low for _, low, _ in scan.band if math.isfinite(low))
    if not highs or not lows:
        return 0.0, 1.0
    low, usual = lows[0], highs[int(0.9 * (len(highs) - 1))]
    top = min(highs[-1], low + 2.5 * (usual - low)) if usual > low else highs[-1]
    room = 0.05 * ((top - low) or 1.0)
    return low - room, top + room
