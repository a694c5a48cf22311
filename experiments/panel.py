"""The study's curves and outcomes in neutral form, for pages that draw without knowing studies (docs/studies.md). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.outcomes import Curve, StudyData, outcome_of
from experiments.statistics import compare_paired
from experiments.transients import to_bpb
from experiments.verdicts import PRIMARY, Judged

__all__ = ["build_panel", "list_arms", "slice_ends"]

VERSION = 1
LOSS_EVERY = 5  # updates averaged into one point of a training curve
DIGITS = 6


def build_panel(data: StudyData, judged: Sequence[Judged]) -> dict[str, Any]:
    """`panel.json`: plain finite numbers (None where there is none), the same for the same runs."""
    study = data.plan.study
    return {
        "v": VERSION, "title": study.title, "unit": "bits per byte", "outcome": study.primary, "margin": study.margin_bpb,
        "x": "updates after the common checkpoint", "marks": slice_ends(data), "curves": list(_curves(data)),
        "outcomes": [{"arm": arm, "seed": seed, "value": _plain(outcome_of(data.runs[arm, seed], PRIMARY))}
                     for arm in data.arms for seed in data.seeds(arm)],
        "contrasts": [_contrast(one) for one in judged],
    }  # fmt: skip


def list_arms(data: StudyData) -> list[dict[str, Any]]:
    """Rows of `id`, `name`, `restarts`, `data`: the table of arms that every page can draw."""
    return [{"id": arm, "name": data.plan.study.arm(arm).says, "restarts": len(data.of_arm(arm)[0].restarts),
             "data": " ".join(str(one) for one in data.plan.study.arm(arm).slices)} for arm in data.arms]  # fmt: skip


def slice_ends(data: StudyData) -> list[int]:
    """Updates after which a slice ends, but for the last."""
    return [number * data.plan.profile.slice_updates for number in range(1, len(data.plan.study.arms[0].slices))]


def _curves(data: StudyData) -> Iterator[dict[str, Any]]:
    reference = data.plan.study.reference
    for arm in data.arms:
        runs = data.of_arm(arm)
        yield _band("loss", arm, [_thinned(to_bpb(run.channel("loss"))) for run in runs])
        yield _band("eval", arm, [run.channel("eval/mixture") for run in runs])
        seeds = data.seeds(arm, reference)
        if arm != reference and seeds:
            base = [data.runs[reference, seed].channel("eval/mixture") for seed in seeds]
            own = [data.runs[arm, seed].channel("eval/mixture") for seed in seeds]
            yield _band("difference", arm, [a - b for a, b in zip(own, base, strict=True)])


def _band(channel: str, arm: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """Mean over seeds with its 95 % t interval, at the updates where every seed has a value."""
    stacked = np.stack(curves)
    where = np.flatnonzero(np.isfinite(stacked).all(axis=0))
    mean = stacked[:, where].mean(axis=0)
    ends: list[tuple[float | None, float | None]] = [(None, None)] * len(where)
    if len(curves) > 1:
        found = [compare_paired(stacked[:, i].tolist(), margin=1.0).interval for i in where]
        ends = [(_plain(one.low), _plain(one.high)) for one in found]
    return {"channel": channel, "arm": arm, "x": (where + 1).tolist(), "mean": [_plain(v) for v in mean],
            "low": [low for low, _ in ends], "high": [high for _, high in ends]}  # fmt: skip


def _thinned(curve: Curve) -> Curve:
    """The mean of each `LOSS_EVERY` updates at the last of them, else NaN."""
    thin = np.full(len(curve), np.nan)
    for last in range(LOSS_EVERY - 1, len(curve), LOSS_EVERY):
        thin[last] = curve[last - LOSS_EVERY + 1 : last + 1].mean()
    return thin


def _contrast(one: Judged) -> dict[str, Any]:
    r = one.result
    numbers = (None, None, None) if r is None else (r.mean, r.interval.low, r.interval.high)
    return {"name": one.name, "formula": one.formula, "question": one.question, "family": one.family, "n": len(one.seeds),
            **dict(zip(("mean", "low", "high"), (_plain(v) for v in numbers), strict=True)), "verdict": str(one.verdict),
            "differences": [_plain(value) for value in one.differences]}  # fmt: skip


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")
