"""The loss with its events as a PNG; matplotlib is imported here and nowhere else in this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.watch.scan import Scan
from rollback.detect import Tier

COLOURS = {Tier.NOTICE: "#8a8a8a", Tier.WARN: "#d98200", Tier.PROPOSE: "#c02020"}


def draw_scans(scans: Sequence[Scan], path: Path) -> None:
    """One panel a log; raises ChronicleError when matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ChronicleError("matplotlib is not installed", "pip install 'chronicle[report]'") from None
    figure, panels = pyplot.subplots(len(scans), 1, figsize=(10, 2.6 * len(scans)), squeeze=False)
    for panel, scan in zip(panels[:, 0], scans, strict=True):
        panel.plot([row for row, _ in scan.spark], [value for _, value in scan.spark], color="#205080", linewidth=0.9)
        for event in scan.events:
            end = event.recovered_row if event.recovered_row is not None else scan.rows
            colour = COLOURS[event.tier]
            panel.axvspan(event.onset_row or 0, end, color=colour, alpha=0.12, linewidth=0)
            panel.axvline(event.onset_row or 0, color=colour, linewidth=1)
        panel.set_title(scan.source, fontsize=9)
        panel.set_xlabel("logged point")
        panel.set_ylabel("loss")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
