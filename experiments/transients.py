"""The excess loss right after each restart: area, peak, updates to recover. Pure arithmetic over curves.

On identical batches the difference to the reference is free of batch noise; where batches differ the reference is its
own local mean, and only an average over seeds means anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from experiments.outcomes import Curve, RunData

__all__ = ["HORIZON", "Transient", "excess_over", "find_transients", "to_bpb"]

HORIZON = 50
TREND_HALF_WIDTH = 12
SMOOTHED = 5
BITS_PER_BYTE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """After one restart: area in bits per byte × updates, peak of the 5-update mean, updates to recover (None: not within)."""

    run: str
    after: int
    channel: str
    identical_batches: bool
    num_updates: int
    area: float
    peak: float
    recovered_after: int | None


def to_bpb(nats_per_bit: Curve) -> Curve:
    """The logged loss in bits per byte (of the predicted bits)."""
    return nats_per_bit * (BITS_PER_BYTE / math.log(2))


def excess_over(run: RunData, reference: RunData, channel: str) -> tuple[Curve, Curve]:
    """Excess of a run over the reference in bits per byte, and per update whether both saw the same batch."""
    own, base = (
        to_bpb(one.channel(channel)) if channel == "loss" else one.channel(channel) for one in (run, reference)
    )
    same = run.channel("data_digest") == reference.channel("data_digest")
    return own - np.where(same, base, _local_mean(base)), same


def find_transients(run: RunData, reference: RunData, channel: str = "loss") -> tuple[Transient, ...]:
    """One per restart of the run."""
    excess, same = excess_over(run, reference, channel)
    found = []
    for index, after in enumerate(run.restarts):
        later = [point for point in run.restarts[index + 1 :] if point > after]
        end = min([after + HORIZON, run.num_updates, *later])
        window = excess[after:end]
        if not len(window) or np.isnan(window).all():
            continue
        before = excess[max(0, after - 30) : after]
        smooth = (
            np.convolve(np.nan_to_num(window), np.ones(SMOOTHED) / SMOOTHED, mode="valid")
            if len(window) >= SMOOTHED
            else window
        )
        found.append(
            Transient(
                run=run.run.name,
                after=after,
                channel=channel,
                identical_batches=bool(same[after:end].all()),
                num_updates=end - after,
                area=float(np.nansum(window)),
                peak=float(np.max(smooth)),
                recovered_after=_recovery(smooth, float(np.nanstd(before)) if len(before) else 0.0),
            )
        )
    return tuple(found)


def _recovery(smooth: Curve, noise: float) -> int | None:
    """Updates until the smoothed excess is within two sd of its own noise; 0 where it never left."""
    bound = 2 * noise / math.sqrt(SMOOTHED)
    inside = np.flatnonzero(smooth <= bound + 1e-12)
    return int(inside[0]) if len(inside) else None


def _local_mean(curve: Curve) -> Curve:
    filled = np.nan_to_num(curve, nan=float(np.nanmean(curve)) if np.isfinite(curve).any() else 0.0)
    padded = np.pad(filled, TREND_HALF_WIDTH, mode="edge")
    width = 2 * TREND_HALF_WIDTH + 1
    return np.convolve(padded, np.ones(width) / width, mode="valid")
