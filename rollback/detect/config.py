"""Every constant of the detector in one place, with its reason. Lengths are logged points unless they say steps.

The values come from theory (Siegmund's approximation for the CUSUM, exponential tails for the local threshold) or are
round numbers of the right size; none is fitted to a single curve.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """Constants of one channel's fold."""

    log: bool = False
    falling: bool = False  # a fall is the trouble, not a rise: throughput
    warm_points: int = 24
    window_points: int = 48
    fast_points: int = 8  # local level: EW span
    middle_points: int = 96
    slow_points: int = 768
    lag_points: int = 48
    floor_fraction: float = 0.001  # of the level: below it noise is print rounding; absolute for log channels
    local_min: float = 6.0  # robust z below which nothing is sudden
    local_max: float = 25.0
    tail_start: float = 0.05  # share of points above the tail threshold u
    tail_log_odds: float = 9.2  # ln(0.05 / 5e-6): one false alarm in 200k points under an exponential tail
    tail_prior: float = 0.7  # mean excess assumed before it is learnt (0.4 is Gaussian, 1.0 Laplace)
    pair_fraction: float = 0.7  # two of three points above this share of the threshold alarm as well
    far_marginals: float = 8.0  # three points in a row this far from the slow reference alarm as well
    cusum_slack: float = 0.5
    cusum_height: float = 14.0  # Siegmund: about 1 alarm in 8M iid points; the surplus pays for estimation
    block_points: int = 32
    residual_points: int = 1024
    calibrate_points: int = 512
    recalibrate_points: int = 16_384
    max_inflation: float = 64.0
    freeze_points: int = 400
    buffer_points: int = 512
    plain_points: int = 24  # so young only where it is plain: high above all noise and not falling
    preview_points: int = 64  # a gradual event this old, high and not falling is proposed
    unresolved_points: int = 150
    verdict_points: int = 250
    accept_points: int = 600
    wanders: float = 2.25  # a rise is proposed only when it is so much larger than the run's own wander, or
    strayed_half_life: float = 8192.0  # in which half of a rise that came back by itself is forgotten
    stayed_points: int = 400  # so old and not much smaller
    restart_points: int = 60
    too_good_points: int = 500
    too_good_sigmas: float = 3.0
    drop_history: int = 256
    drop_marginals: float = 10.0
    non_finite_points: int = 3
    equivalence: float = 0.4  # margin of the recovery test in noise units
    level_fraction: float = 0.002  # or this share of the level, whichever is larger
