"""Inference on paired differences, counted by their independent units. Pure: the same differences give the same numbers.

A unit is what the design draws anew for a pair: a slice, an order, a common checkpoint. Pairs that share their unit are one
observation, their mean. Where two kinds of unit are crossed (every order at every checkpoint), both are random effects: the
variance of the mean is the sum of their components, its degrees of freedom are Satterthwaite's (1946), and the number of
independent units is these plus one, rounded. Tests: t, two one-sided t at the margin (Schuirmann 1987), and the exact
sign-flip and signed-rank tests over units; Holm (1979) over the main contrasts. Distributions and tests are scipy's, Holm's
steps statsmodels'; neither has the test of crossed units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Unit: TypeAlias = tuple[int, ...]  # the number of a pair's unit, of each kind that the design draws
Values: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

SIGN_FLIPS = 2**16  # exact below; above, so many drawn with a fixed seed
ALMOST_NOTHING = 1e-12
NO_ERROR = 1e-300  # in place of 0: units that are equal to the last digit are tested like others


class Mean(NamedTuple):
    """The mean over independent units, with its standard error and degrees of freedom."""

    mean: float
    error: float
    df: float
    table: Values  # the mean of every unit; of crossed units rows and columns

    def interval(self, level: float) -> tuple[float, float]:
        """Return the t interval of this level."""
        from scipy import stats

        low, high = stats.t.interval(level, self.df, loc=self.mean, scale=self.error)
        return float(low), float(high)


@dataclass(slots=True, kw_only=True)
class Estimate:
    """The mean of one contrast with both tests; p values are two-sided, and adjusted later where a family shares its error.

    `low` and `high` are the 95 % interval, `inner_low` and `inner_high` the 90 % interval, which lies inside the margin where
    equivalence is shown. `rank_tost_p` is the signed-rank form of that test.
    """

    num_pairs: int
    num_units: int
    levels: tuple[int, ...]  # how many units of each kind
    mean: float
    low: float
    high: float
    inner_low: float
    inner_high: float
    t_p: float
    tost_p: float
    sign_flip_p: float
    rank_p: float
    rank_tost_p: float

    def is_real(self, alpha: float) -> bool:
        """Whether both tests claim a difference, however small."""
        return max(self.t_p, self.sign_flip_p) <= alpha


def average(differences: Mapping[int, float], unit_of: Callable[[int], Unit]) -> Mean | None:
    """Return the mean of the differences of pairs by number; None below two units of a kind.

    Of crossed units only those are used that are complete. Raises ValueError for numbers that are not finite.
    """
    if not np.isfinite(list(differences.values())).all():
        raise ValueError(f"differences are {list(differences.values())}, expected finite numbers")
    cells: dict[Unit, list[float]] = {}
    for pair, value in differences.items():
        cells.setdefault(unit_of(pair), []).append(value)
    table = _complete_table(cells)
    if min(table.shape, default=0) < 2:
        return None
    error, df = _crossed_error(table) if table.ndim == 2 else _plain_error(table)
    return Mean(float(table.mean()), max(error, NO_ERROR), df, table)


def analyse(
    differences: Mapping[int, float], unit_of: Callable[[int], Unit], *, margin: float, alpha: float = 0.05
) -> Estimate | None:
    """Analyse one contrast as `average` does; the exact tests are over the more numerous kind of units."""
    if margin <= 0:
        raise ValueError(f"margin is {margin}, expected a number above 0")
    found = average(differences, unit_of)
    if found is None:
        return None
    table = found.table
    over_units = table.mean(axis=int(np.argmin(table.shape))) if table.ndim == 2 else table
    low, high = found.interval(1 - alpha)
    inner_low, inner_high = found.interval(1 - 2 * alpha)
    t_p, tost_p = _t_tests(found, margin)
    rank_p, rank_tost_p = _rank_tests(over_units, margin)
    return Estimate(
        num_pairs=len(differences), num_units=round(found.df + 1), levels=table.shape, mean=found.mean, low=low, high=high,
        inner_low=inner_low, inner_high=inner_high, t_p=t_p, tost_p=tost_p, sign_flip_p=_sign_flip_p(over_units),
        rank_p=rank_p, rank_tost_p=rank_tost_p)


def _complete_table(cells: Mapping[Unit, Sequence[float]]) -> Values:
    """The mean of every unit; of crossed units a table, without the columns in which a cell is missing."""
    axes = [sorted(set(labels)) for labels in zip(*cells, strict=True)]
    table = np.full([len(axis) for axis in axes], np.nan)
    for unit, values in cells.items():
        table[tuple(axis.index(label) for axis, label in zip(axes, unit, strict=True))] = np.mean(values)
    return np.compress(~np.isnan(table).any(axis=0), table, axis=1) if table.ndim == 2 else table


def _plain_error(values: Values) -> tuple[float, float]:
    """Standard error of the mean of independent units, and its degrees of freedom."""
    return float(values.std(ddof=1)) / len(values) ** 0.5, float(len(values) - 1)


def _crossed_error(table: Values) -> tuple[float, float]:
    """Standard error of the mean of a table of two crossed random effects; a component below 0 counts as 0."""
    num_rows, num_columns = table.shape
    of_rows = num_columns * table.mean(axis=1).var(ddof=1)
    of_columns = num_rows * table.mean(axis=0).var(ddof=1)
    rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    df_rest = (num_rows - 1) * (num_columns - 1)
    residual = float((rest**2).sum()) / df_rest
    terms = [(square, df) for square, df in ((of_rows, num_rows - 1), (of_columns, num_columns - 1)) if square > residual]
    if not terms:
        terms = [(residual, df_rest)]
    total = sum(square for square, _ in terms)
    spread = sum(square**2 / df for square, df in terms)
    if len(terms) == 2:  # both contain the residual
        total -= residual
        spread += residual**2 / df_rest
    df = total**2 / spread if spread else float(df_rest)
    return float((total / table.size) ** 0.5), float(df)


def _t_tests(found: Mean, margin: float) -> tuple[float, float]:
    """The two-sided t p, and the larger of the two one-sided ones at the margin."""
    from scipy import stats

    outside, inside = abs(found.mean) / found.error, (margin - abs(found.mean)) / found.error
    return float(2 * stats.t.sf(outside, found.df)), float(stats.t.sf(inside, found.df))


def _sign_flip_p(units: Values) -> float:
    """Two-sided p over the signings of the units."""
    from scipy import stats

    found = stats.permutation_test((units,), np.mean, permutation_type="samples", vectorized=True, n_resamples=SIGN_FLIPS,
                                   rng=np.random.default_rng(0))
    return float(found.pvalue)


def _rank_tests(units: Values, margin: float) -> tuple[float, float]:
    """Wilcoxon's signed-rank p, and the larger of the two one-sided ones at the margin."""
    from scipy import stats

    if np.abs(units).max() < ALMOST_NOTHING:
        return 1.0, 0.0
    above = stats.wilcoxon(units + margin, alternative="greater").pvalue
    below = stats.wilcoxon(units - margin, alternative="less").pvalue
    return float(stats.wilcoxon(units).pvalue), float(max(above, below))


def adjust_holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p values, in the order given, by statsmodels."""
    from statsmodels.stats.multitest import multipletests

    return tuple(multipletests(p_values, method="holm")[1].tolist())
