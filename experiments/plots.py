"""The seven pictures of a study, each with its numbers. Colours are fixed per arm, so that pictures can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.document import Table, format_csv
from experiments.gates import Ledger, find_treatment
from experiments.outcomes import Curve, StudyData
from experiments.statistics import compare_paired
from experiments.transients import excess_over, to_bpb
from experiments.verdicts import Judged

__all__ = ["PLOTS", "draw_plots"]

PLOTS = {
    "losses": "Training loss per source (mean of 15 updates): thin lines are seeds, thick ones their mean; dashed: restarts.",
    "differences": "Held-out bits per byte during the run, minus the reference at the same seed; band: 95 % paired t interval.",
    "transients": "Excess loss around the restarts, mean over restarts and seeds. Solid: identical batches; "
                  "dotted: another order, "
    "over the reference's local mean.",
    "contrasts": "Contrasts on the primary outcome with 95 % intervals; shaded: the registered margin of equivalence.",
    "ratios": "Share of the first source in the batches (mean of 5 updates, first seed).",
    "ledger": "Samples drawn more than once, and samples of the slices never read, per run of the first seed.",
    "same-until-treated": "The A/A check: absolute difference of the loss to the reference at the same seed; it "
                          "must be 0 until "
    "the treatment.",
}
NEAR = 60


def draw_plots(
    data: StudyData, judged: Sequence[Judged], ledgers: Sequence[Ledger], directory: Path
) -> tuple[str, ...]:
    """Write `<name>.png` and `<name>.csv` of every plot; the same data give the same bytes with the same matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    drawers: dict[str, Callable[[Any], Table]] = {
        "losses": lambda axes: _losses(axes, data),
        "differences": lambda axes: _differences(axes, data),
        "transients": lambda axes: _transients(axes, data),
        "contrasts": lambda axes: _contrasts(axes, data, judged),
        "ratios": lambda axes: _ratios(axes, data),
        "ledger": lambda axes: _ledger(axes, ledgers),
        "same-until-treated": lambda axes: _same(axes, data),
    }
    for name, draw in drawers.items():
        _write(name, draw, directory)
    return tuple(drawers)


def _write(name: str, draw: Callable[[Any], Table], directory: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    figure.subplots_adjust(left=0.3 if name == "contrasts" else 0.1, right=0.98, top=0.97, bottom=0.14)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # means over updates that no arm logged
            table = draw(axes)
        axes.grid(alpha=0.25)
        figure.savefig(directory / f"{name}.png", dpi=90, metadata={"Software": None})
    finally:
        pyplot.close(figure)
    (directory / f"{name}.csv").write_text(format_csv(table), encoding="utf-8")


def _colour(data: StudyData, arm: str) -> Any:
    from matplotlib import colormaps

    names = [one.name for one in data.plan.study.arms]
    return colormaps["tab10"](names.index(arm) % 10)


def _losses(axes: Any, data: StudyData) -> Table:
    rows = []
    styles = ["-", "--", ":", "-."]
    for arm in data.arms:
        for number, source in enumerate(data.plan.sources):
            curves = np.stack([_smooth(run.channel(f"bpb/{source}"), 15) for run in data.of_arm(arm)])
            mean, updates = np.nanmean(curves, axis=0), np.arange(1, curves.shape[1] + 1)
            colour, style = _colour(data, arm), styles[number % 4]
            for curve in curves:
                axes.plot(updates, curve, color=colour, lw=0.3, alpha=0.4, ls=style)
            axes.plot(updates, mean, color=colour, lw=1.4, ls=style, label=f"{arm} {source}")
            rows += [(arm, source, str(update), _number(value)) for update, value in zip(updates, mean, strict=True)]
    _mark_slices(axes, data)
    axes.set(xlabel="updates after the common checkpoint", ylabel="bits per byte")
    axes.legend(fontsize=6, ncols=3)
    return Table(name="losses", header=("arm", "source", "update", "bpb_mean_of_seeds"), rows=tuple(rows))


def _differences(axes: Any, data: StudyData) -> Table:
    rows, reference = [], data.plan.study.reference
    for arm in data.arms:
        seeds = data.seeds(arm, reference)
        if arm in (reference, *data.plan.study.gate) or not seeds:
            continue
        curves = np.stack(
            [data.runs[arm, s].channel("eval/mixture") - data.runs[reference, s].channel("eval/mixture") for s in seeds]
        )
        where = np.flatnonzero(np.isfinite(curves).all(axis=0))
        mean = curves[:, where].mean(axis=0)
        axes.plot(where + 1, mean, color=_colour(data, arm), marker=".", ms=3, lw=1, label=f"{arm} (n={len(seeds)})")
        low, high = mean, mean
        if len(seeds) > 1:
            intervals = [compare_paired(curves[:, i].tolist(), margin=1.0).interval for i in where]
            low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
            axes.fill_between(where + 1, low, high, color=_colour(data, arm), alpha=0.12, lw=0)
        rows += [
            (arm, str(u + 1), _number(m), _number(a), _number(b))
            for u, m, a, b in zip(where, mean, low, high, strict=True)
        ]
    _mark_slices(axes, data)
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="updates after the common checkpoint", ylabel=f"bits per byte, minus {reference}")
    if rows:
        axes.legend(fontsize=7, ncols=2)
    return Table(name="differences", header=("arm", "update", "mean", "low", "high"), rows=tuple(rows))


def _transients(axes: Any, data: StudyData) -> Table:
    rows, reference = [], data.plan.study.reference
    offsets = np.arange(-NEAR, NEAR + 1)
    for arm in data.arms:
        cuts, same = [], True
        for seed in data.seeds(arm, reference):
            run = data.runs[arm, seed]
            excess, identical = excess_over(run, data.runs[reference, seed], "loss")
            for index, after in enumerate(run.restarts):
                bounds = (run.restarts[index - 1] if index else 0, [*run.restarts, run.num_updates][index + 1])
                cuts.append(_around(excess, after, bounds))
                same &= bool(identical[after : after + NEAR].all())
        if cuts and arm not in data.plan.study.gate:
            mean = np.nanmean(np.stack(cuts), axis=0)
            axes.plot(
                offsets,
                mean,
                color=_colour(data, arm),
                lw=1,
                ls="-" if same else ":",
                label=f"{arm} ({len(cuts)} restarts)",
            )
            rows += [(arm, "yes" if same else "no", str(o), _number(v)) for o, v in zip(offsets, mean, strict=True)]
    axes.axvline(0, color="black", ls="--", lw=0.8)
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="updates after a restart", ylabel="excess loss, bits per byte")
    if rows:
        axes.legend(fontsize=7)
    return Table(
        name="transients", header=("arm", "identical_batches", "updates_after_restart", "excess_bpb"), rows=tuple(rows)
    )


def _around(curve: Curve, after: int, bounds: tuple[int, int]) -> Curve:
    """The curve at offsets −NEAR … NEAR of a restart, 0 the last update before it; NaN beyond the neighbouring restarts."""
    found = np.full(2 * NEAR + 1, np.nan)
    for position, offset in enumerate(range(-NEAR, NEAR + 1)):
        index = after + offset - 1
        if bounds[0] <= index < min(bounds[1], len(curve)):
            found[position] = curve[index]
    return found


def _contrasts(axes: Any, data: StudyData, judged: Sequence[Judged]) -> Table:
    margin, rows = data.plan.study.margin_bpb, []
    axes.axvspan(-margin, margin, color="tab:green", alpha=0.12, lw=0)
    axes.axvline(0, color="black", lw=0.8)
    labels = []
    for row, one in enumerate(reversed(judged)):
        labels.append(f"{one.name}\n{one.formula} (n={len(one.differences)})")
        axes.scatter(one.differences, [row] * len(one.differences), s=6, color="grey", alpha=0.6)
        mean, low, high = (float("nan"),) * 3
        if one.result is not None:
            mean, low, high = one.result.mean, one.result.interval.low, one.result.interval.high
            axes.plot([low, high], [row, row], color="tab:blue", lw=2)
            axes.plot([mean], [row], "o", color="tab:blue", ms=5)
        rows.append(
            (
                one.name,
                one.formula,
                str(len(one.differences)),
                _number(mean),
                _number(low),
                _number(high),
                str(one.verdict),
            )
        )
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.set(xlabel="difference, bits per byte (below 0: the first arm is better)")
    return Table(
        name="contrasts",
        header=("contrast", "formula", "seeds", "mean", "low", "high", "verdict"),
        rows=tuple(reversed(rows)),
    )


def _ratios(axes: Any, data: StudyData) -> Table:
    source, rows = next(iter(data.plan.sources)), []
    for arm in data.arms:
        run = data.of_arm(arm)[0]
        curve = _smooth(run.channel(f"ratio/{source}"), 5)
        axes.plot(np.arange(1, len(curve) + 1), curve, color=_colour(data, arm), lw=1, label=arm)
        rows += [(arm, str(update), _number(value)) for update, value in enumerate(run.channel(f"ratio/{source}"), 1)]
    _mark_slices(axes, data)
    axes.set(xlabel="updates after the common checkpoint", ylabel=f"share of `{source}`", ylim=(0, 1))
    axes.legend(fontsize=7, ncols=3)
    return Table(name="ratios", header=("arm", "update", "share"), rows=tuple(rows))


def _ledger(axes: Any, ledgers: Sequence[Ledger]) -> Table:
    first = [ledger for ledger in ledgers if ledger.run.endswith("-s0")]
    places = np.arange(len(first))
    axes.bar(places - 0.2, [ledger.repeats for ledger in first], width=0.4, label="drawn again")
    axes.bar(places + 0.2, [ledger.unread for ledger in first], width=0.4, label="of the slices, never read")
    axes.set_xticks(places, [ledger.run for ledger in first], rotation=30, fontsize=7)
    axes.set(ylabel="samples")
    axes.legend(fontsize=7)
    rows = tuple(
        (one.run, str(one.drawn), str(one.repeats), str(one.unread), "yes" if one.as_planned else "no", " ".join(one.guard))
        for one in ledgers
    )
    return Table(
        name="ledger", header=("run", "drawn", "repeats", "unread", "digests_as_planned", "guard_by_launch"), rows=rows
    )


def _same(axes: Any, data: StudyData) -> Table:
    rows, reference = [], data.plan.study.reference
    for arm in data.arms:
        seeds = data.seeds(arm, reference)
        if arm == reference or not seeds:
            continue
        run = data.runs[arm, seeds[0]]
        apart = np.abs(to_bpb(run.channel("loss")) - to_bpb(data.runs[reference, seeds[0]].channel("loss")))
        treated = find_treatment(data.plan, data.plan.study.arm(arm), run.run.legs).first
        axes.plot(
            np.arange(1, len(apart) + 1),
            apart + 1e-9,
            color=_colour(data, arm),
            lw=0.8,
            label=f"{arm} (treated after {treated})",
        )
        rows += [(arm, str(update), repr(float(value))) for update, value in enumerate(apart, 1)]
    axes.set(
        yscale="log", xlabel="updates after the common checkpoint", ylabel="|loss difference| + 1e-9, bits per byte"
    )
    if rows:
        axes.legend(fontsize=6, ncols=2)
    return Table(name="same-until-treated", header=("arm", "update", "abs_difference_bpb"), rows=tuple(rows))


def _mark_slices(axes: Any, data: StudyData) -> None:
    size = data.plan.profile.slice_updates
    for number in range(1, len(data.plan.study.arms[0].slices)):
        axes.axvline(number * size, color="black", ls="--", lw=0.5, alpha=0.5)


def _smooth(curve: Curve, width: int) -> Curve:
    """Trailing mean over `width` updates, over what is there at the beginning."""
    filled = np.nan_to_num(curve)
    total = np.cumsum(filled)
    counts = np.cumsum(np.isfinite(curve).astype(float))
    total[width:], counts[width:] = total[width:] - total[:-width], counts[width:] - counts[:-width]
    smooth: Curve = total / np.maximum(counts, 1)
    return smooth


def _number(value: float) -> str:
    return f"{value:.6g}"
