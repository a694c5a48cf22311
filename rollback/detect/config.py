"""The constants of one channel's detector, with their reasons. Lengths are logged points.

The values come from theory (Siegmund's approximation for the CUSUM, exponential tails for the local threshold) or are
round numbers of the right size; none is fitted to a single curve. A test holds `channel.py` to it: no number with a
meaning is written in the fold itself. The other modules of the detector name their constants at their tops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """Constants of one channel's fold; `log`, `falling` and the two fractions of the level depend on its role."""

    # What is folded
    log: bool = False  # fold log10 of the value: norms and throughput
    falling: bool = False  # a fall is the incident, not a rise: throughput
    least_value: float = 1e-12  # below it the logarithm is taken of this
    grid_points: int = 256  # the number format is sensed from these first values, then from every 32nd
    grid_every: int = 32
    floor_fraction: float = 0.002  # of the level: noise below it is print rounding; absolute for log channels
    quantum_fraction: float = 0.75  # of the number format's step: noise is never taken to be smaller
    least_scale: float = 1e-100  # a loss of exactly zero has no noise: its square must still be a number

    # Local layer: a robust z against a fast level
    warm_points: int = 8  # before them nothing is judged
    few_points: float = 8.0  # the noise of n residuals is itself a guess: the threshold is wider by this share of n
    window_points: int = 16  # residuals whose quartiles give the local noise
    fast_points: int = 4  # span of the fast level
    local_min: float = 7.0  # robust z below which nothing is sudden
    local_max: float = 16.0  # 10: 4.8 notices per 10k on the labelled curves, 14: 1.5, 16: 1.2, 20: 1.0; seen alike
    tail_log_odds: float = 9.0  # ln(0.05 / 5e-6): one false alarm in 200k points under an exponential tail
    tail_prior: float = 0.7  # mean excess assumed before it is learnt (0.4 is Gaussian, 1.0 Laplace)
    tail_first: float = 1.645  # the tail threshold u starts where 5 % of a Gaussian lie above it
    tail_least: float = 1.2
    tail_up: float = 0.0095  # u moves up by this on a point above it and down by `tail_down` on one below:
    tail_down: float = 0.0005  # in balance 5 % of the points lie above u
    tail_gain: float = 0.04  # of a new excess in the learnt mean excess
    tail_cap: float = 3.0  # an outlier counts as at most so many mean excesses
    pair_fraction: float = 0.7  # two of three points above this share of the threshold alarm as well
    leap_until: int = 48  # points; till then a rise is also compared with the last rises and falls themselves
    leap_points: int = 8
    leap_sigmas: float = 10.0
    leap_fraction: float = 0.01  # of the level: their spread is never taken to be smaller
    odd_sigmas: float = 5.0  # robust z above which a point is odd
    odd_span: float = 256.0  # points in which the odd ones are counted, and how often they began
    odd_entries: float = 13.0  # so many beginnings in that span, one in 20 points, are noise of the run: batches of two sorts
    odd_reach: float = 1.5  # times the highest of them: above it a point is sudden all the same
    odd_chance: float = 1e-5  # of so many in a row by themselves: a longer series is no noise
    odd_most: float = 0.6  # share of odd points beyond which a series of any length would be chance
    high_fraction: float = 0.2  # of the level: a spike that is called major
    high_record: float = 2.0  # times the highest of the last residuals: the first of two points, 3 where it is alone
    high_lone: float = 3.0
    high_sigmas: float = 3.0  # local noise units, at least
    high_pair_odds: float = 4.0  # mean excesses above the tail's threshold: one in 50 of the tail's points; alone one in 400
    high_log_odds: float = 6.0
    high_stays: float = 0.25  # of the first point, that the second keeps, and noise units
    high_second: float = 1.5
    high_tail: float = 0.8  # mean excess of an ordinary tail: Gaussian 0.4, Laplace 1.0, small batches of GPT-2 1.2
    high_stale: float = 2.0  # a slow noise of so many local ones is of another time
    drop_sigmas: float = 6.0  # a fall that far below the fast level is sudden
    drop_points: int = 4  # and lasts when so many points in a row stay there
    step_sigmas: float = 3.0  # the fast level follows one point at most so far up, twice as far down
    resettle_points: int = 16  # points above the threshold in a row are a new level: it is learnt from them
    resettle_from: int = 12

    # Slow layer: a CUSUM against a reference that does not follow what it suspects
    middle_points: int = 96  # spans of the two slow levels
    slow_points: int = 768
    lag_points: int = 48  # how old the middle level is that the slow one is compared with
    lag_every: int = 16  # points between two remembered levels; a power of two
    lag_from: int = 192  # points after which the lagged level is trusted
    scale_gain: float = 1.0 / 96.0  # of the local noise in the slow one
    step_units: float = 3.0  # the slow levels follow one point at most so far up
    cusum_clip: float = 4.0  # one point counts as at most so many noise units
    cusum_slack: float = 0.5
    cusum_height: float = 14.0  # Siegmund: about 1 alarm in 8M iid points; the surplus pays for estimation
    doubt_points: int = 512  # the reference is itself an estimate: until then each point counts 1.5 / sqrt(n) less
    doubt: float = 1.5
    young: tuple[tuple[int, float], ...] = ((64, 3.0), (192, 2.0), (600, 1.5))  # until so many points: times the height
    suspicion: float = 0.34  # of the height: above it the reference is frozen
    suspicion_from: int = 96
    marginal_first: float = 1.5  # mean absolute residual against the slow level, in local noise units
    marginal_gain: float = 0.01
    marginal_cap: float = 4.0
    marginal_factor: float = 1.25  # from mean absolute to standard deviation, of a Gaussian

    # How much a run wanders by itself
    block_points: int = 32
    block_gain: float = 1.0 / 24.0
    block_cap: float = 16.0  # a block counts as at most so many times the known long-run variance
    sure_points: int = 48  # until then the slow level is a guess, and its error is no wander of the run
    first_inflation: float = 1.5  # long-run variance over the variance of one point, before it is measured
    max_inflation: float = 64.0
    stray_inflation: float = 256.0  # of rises that came back by themselves: an average of a slow series drifts that far
    residual_points: int = 1024
    calibrate_points: int = 512
    recalibrate_points: int = 16_384

    # Events
    buffer_points: int = 512
    sudden_points: int = 10  # an alarm later than that after the onset is not sudden
    onset_reach: int = 96  # the onset is sought from so many points before the CUSUM left zero
    plain_points: int = 24  # a gradual event so young is proposed only where it is high above all noise and not falling
    preview_points: int = 64  # a gradual event this old, high and not falling is proposed
    unresolved_points: int = 150
    verdict_points: int = 250
    accept_points: int = 600  # after that the new level is the normal one
    wanders: float = 2.25  # min ratio of rise to past drift for PROPOSE
    stayed_points: int = 400  # points after which 0.6 x that ratio suffices
    strayed_half_life: float = 8192.0  # in which half of a rise that came back by itself is forgotten
    restart_points: int = 60  # an event that starts so soon after a restart may be its bump
    too_good_points: int = 500
    too_good_sigmas: float = 3.0
    drop_history: int = 256
    drop_marginals: float = 10.0
    non_finite_points: int = 3  # NaN in a row: weights that no longer work
    equivalence: float = 0.4  # margin of the recovery test in noise units
    level_fraction: float = 0.002  # or this share of the level, whichever is larger
