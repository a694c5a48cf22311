"""The seven pictures of a study, each with its numbers. Colours are fixed per arm, so that pictures can be compared."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.document import Table, format_csv
from experiments.gates import Ledger
from experiments.outcomes import StudyData
from experiments.plot_effects import draw_contrasts, draw_ledger, draw_transients
from experiments.plot_runs import draw_differences, draw_losses, draw_ratios, draw_same
from experiments.verdicts import Judged

__all__ = ["PLOTS", "draw_plots"]

PLOTS = {
    "losses": "Training loss per source (mean of 25 updates): thin lines are seeds, thick ones their mean; dashed: ends of "
    "slices, where the restarted arms restart. Arms with one seed only are left out: a mean of others lies elsewhere.",
    "differences": "Held-out bits per byte during the run, minus the reference at the same seed: thin lines are seeds, the "
    "thick one their mean, the band its 95 % paired t interval.",
    "transients": "Excess loss around the restarts, mean over restarts and seeds. Left: on identical batches, each update. "
    "Right: another order, over the reference's local mean, mean of 5 updates.",
    "contrasts": "Contrasts on the primary outcome with 95 % intervals, dots are seeds; shaded: the registered margin of "
    "equivalence.",
    "ratios": "Share of the first source in the batches (mean of 5 updates, first seed).",
    "ledger": "Samples drawn more than once, and samples of the slices never read, per run of the first seed.",
    "same-until-treated": "The A/A check: absolute difference of the loss to the reference at the same seed; it must be 0 "
    "until the treatment.",
}


def draw_plots(
    data: StudyData, judged: Sequence[Judged], ledgers: Sequence[Ledger], directory: Path
) -> tuple[str, ...]:
    """Write `<name>.png` and `<name>.csv` of every plot; the same data give the same bytes with the same matplotlib."""
    drawers: dict[str, Callable[[Any], Table]] = {
        "losses": lambda figure: draw_losses(figure, data),
        "differences": lambda figure: draw_differences(figure, data),
        "transients": lambda figure: draw_transients(figure, data),
        "contrasts": lambda figure: draw_contrasts(figure, data, judged),
        "ratios": lambda figure: draw_ratios(figure, data),
        "ledger": lambda figure: draw_ledger(figure, ledgers),
        "same-until-treated": lambda figure: draw_same(figure, data),
    }
    for name, draw in drawers.items():
        _write(name, draw, directory)
    return tuple(drawers)


def _write(name: str, draw: Callable[[Any], Table], directory: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # means over updates that no arm logged
        table = draw(figure)
    for axes in figure.axes:
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    _save(figure, directory / f"{name}.png")
    (directory / f"{name}.csv").write_text(format_csv(table), encoding="utf-8")


def _save(figure: Any, path: Path) -> None:
    """A PNG of 128 colours: a third of the bytes, and reports are kept in repositories."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
