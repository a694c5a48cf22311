"""The inference: against scipy, against hand-made designs, and over simulated studies whose pairs are not independent."""

import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from experiments import statistics as st
from experiments.definition import AnswerRule, Contrast, find_study
from experiments.verdicts import EffectVerdict, Judged, Question, answer_questions, judge, what_would_settle

MARGIN = 2.5  # of the noise of one arm; a difference of two arms has √2 of it
Design = Callable[[int], tuple[int, ...]]


def said(one: Judged) -> str:
    """The answer to a question that this contrast answers."""
    study = replace(find_study("restart-impact"), answers=(AnswerRule(name="?", by=(one.name,)),), contrasts=(
        Contrast(name=one.name, plus="B", minus="A0"),))
    return answer_questions(study, [one])[0][1]


def alone(values: object, margin: float = 1.0) -> st.Estimate:
    """Every value is a unit of its own."""
    pairs = dict(enumerate(np.asarray(values, dtype=float).tolist()))
    found = st.analyse(pairs, lambda pair: (pair,), margin=margin)
    assert found is not None
    return found


def verdict_of(values: object, *, units: Design | None = None, margin: float = 1.0, robust: bool = False) -> Judged:
    pairs = dict(enumerate(np.asarray(values, dtype=float).tolist()))
    question, kinds = Question("q", "B − A", "other"), ("seed",) if units is None else tuple("ab"[: len(units(0))])
    unit_of = units or (lambda pair: (pair,))
    (one,) = judge([(question, pairs)], margin=margin, unit_of=unit_of, robust=robust, kinds=kinds)
    return one


def test_independent_pairs_have_scipys_numbers() -> None:
    from scipy import stats

    d = np.random.default_rng(3).normal(0.3, 1, 11)
    found, t = alone(d, margin=0.9), stats.ttest_1samp(d, 0)
    assert (found.num_units, found.num_pairs, found.levels) == (11, 11, (11,))
    assert found.t_p == pytest.approx(t.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(t.confidence_interval(0.95)))
    assert (found.inner_low, found.inner_high) == pytest.approx(tuple(t.confidence_interval(0.90)))
    sides = [stats.ttest_1samp(d, -0.9, alternative="greater").pvalue, stats.ttest_1samp(d, 0.9, alternative="less").pvalue]
    assert found.tost_p == pytest.approx(max(sides))
    assert found.rank_p == pytest.approx(stats.wilcoxon(d).pvalue)


def test_sign_flip_counts_all_signings() -> None:
    d = [0.3, -0.1, 0.7, 0.2, 0.05]
    signed = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=5)]
    assert alone(d).sign_flip_p == sum(value >= abs(sum(d)) - 1e-12 for value in signed) / 32
    assert alone([1.0, 2.0, 4.0]).sign_flip_p == 2 / 2**3


def test_tost_passes_exactly_when_the_90_percent_interval_lies_inside_the_margin() -> None:
    rng, seen = np.random.default_rng(11), set()
    for _ in range(60):
        found = alone(rng.normal(rng.uniform(-0.02, 0.02), 0.015, 8), margin=0.02)
        inside = found.inner_low > -0.02 and found.inner_high < 0.02
        assert (found.tost_p < 0.05) == inside
        seen.add(inside)
    assert seen == {True, False}


def test_pairs_of_one_unit_are_one_observation() -> None:
    """Each slice at two seeds: the numbers are those of the four means, and the report says four."""
    means = np.array([0.3, -0.1, 0.7, 0.2])
    both = np.concatenate([means - 0.01, means + 0.01])
    shared = verdict_of(both, units=lambda seed: (seed % 4,))
    assert shared.result is not None
    own = alone(means)
    assert (shared.result.num_pairs, shared.result.num_units) == (8, 4)
    for name in ("mean", "low", "high", "t_p", "tost_p", "sign_flip_p"):
        assert getattr(shared.result, name) == pytest.approx(getattr(own, name))
    assert "n = 4 as (8 pairs)" in said(shared)


def test_crossed_units_have_the_variance_of_both_kinds() -> None:
    """Two-way random effects by hand: (MS rows + MS columns − MS rest) / cells; rows that vary alone leave their own n."""
    table = np.array([[1.0, 2.0, 4.0, 3.0], [2.0, 3.5, 5.0, 4.0], [0.0, 1.0, 3.5, 2.0]])
    rows = 4 * table.mean(axis=1).var(ddof=1)
    columns = 3 * table.mean(axis=0).var(ddof=1)
    rest = ((table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()) ** 2).sum() / 6
    variance = rows + columns - rest
    df = variance**2 / (rows**2 / 2 + columns**2 / 3 + rest**2 / 6)
    found = st.average(dict(enumerate(table.ravel().tolist())), lambda pair: divmod(pair, 4))
    assert found is not None
    assert (found.mean, found.error, found.df) == pytest.approx((table.mean(), math.sqrt(variance / 12), df))
    only_rows = np.repeat([[1.0], [2.0], [4.0]], 4, axis=1) + np.array([1, -1, 1, -1]) * 1e-9
    found = st.average(dict(enumerate(only_rows.ravel().tolist())), lambda pair: divmod(pair, 4))
    assert found is not None and found.df == pytest.approx(2)


def test_a_crossed_design_with_a_missing_run_uses_its_complete_part() -> None:
    values = {pair: float(pair) for pair in range(12) if pair != 5}
    found = st.average(values, lambda pair: divmod(pair, 4))
    assert found is not None and found.table.shape == (3, 3)


PSEUDO: dict[str, tuple[Design, tuple[int, ...]]] = {
    "seeds that repeat a slice": (lambda pair: (pair % 4,), (4,)),
    "seeds nested in checkpoints": (lambda pair: (pair // 6,), (4,)),
    "orders crossed with checkpoints": (lambda pair: divmod(pair, 6), (4, 6)),
}


@pytest.mark.parametrize("name", PSEUDO)
def test_planted_pseudo_replication_is_analysed_by_its_units(name: str) -> None:
    """No effect, units that vary more than pairs within them: counted as pairs most studies would claim something."""
    from scipy import stats

    units, levels = PSEUDO[name]
    rng, claimed, naive = np.random.default_rng(5), 0, 0
    for _ in range(300):
        noise = [rng.normal(0, 1, number) for number in levels]
        d = [sum(n[u] for n, u in zip(noise, units(pair), strict=True)) + rng.normal(0, 0.2) for pair in range(24)]
        found = st.average(dict(enumerate(d)), units)
        assert found is not None
        low, high = found.interval(0.95)
        claimed += not low <= 0 <= high
        naive += stats.ttest_1samp(d, 0).pvalue <= 0.05
    assert claimed / 300 <= 0.08 and naive / 300 > 0.3


def test_holm_matches_the_worked_example() -> None:
    """Holm's own steps: ×4, ×3, ×2, ×1, made monotone."""
    assert st.adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert st.adjust_holm([0.9, 0.8]) == (1.0, 1.0)
    assert st.adjust_holm([]) == ()  # a study without main contrasts


def test_identical_arms_are_no_difference_and_equivalent() -> None:
    found = alone([0.0] * 8, margin=0.02)
    assert (found.t_p, found.sign_flip_p, found.tost_p, found.rank_p, found.rank_tost_p) == (1.0, 1.0, 0.0, 1.0, 0.0)


def test_nothing_is_said_about_one_unit_or_missing_values() -> None:
    assert st.analyse({0: 0.1, 4: 0.2}, lambda pair: (0,), margin=0.02) is None
    with pytest.raises(ValueError, match="expected finite numbers"):
        alone([0.1, math.nan])


@pytest.mark.parametrize("num_units", [4, 8, 12])
def test_coverage_and_false_positives_hold_over_simulated_studies(num_units: int) -> None:
    rng, covered = np.random.default_rng(20260107), 0
    for _ in range(2000):
        d = dict(enumerate(rng.normal(0, 1.0, num_units).tolist()))
        found = st.average(d, lambda pair: (pair,))
        assert found is not None
        low, high = found.interval(0.95)
        covered += low <= 0 <= high
    assert 0.93 <= covered / 2000 <= 0.97


def judged_studies(num_studies: int, means: tuple[float, float, float]) -> list[list[EffectVerdict]]:
    """Verdicts of whole studies at eight seeds: the main contrasts share the reference arm, as in the real one."""
    rng, found = np.random.default_rng(20260108), []
    gc.freeze()  # statsmodels collects garbage in every call, which takes 0.1 s with all modules of a test run
    for _ in range(num_studies):
        reference = rng.normal(0, 1, 8)
        arms = [mean + rng.normal(0, 1, 8) for mean in means]
        asked = [(Question(name, "", "main"), dict(enumerate((arm - reference).tolist())))
                 for name, arm in zip(("order", "restart", "repetition"), arms, strict=True)]  # fmt: skip
        found.append([one.verdict for one in judge(asked, margin=MARGIN, alpha=0.05)])
    gc.unfreeze()
    return found


def test_a_study_of_no_effects_claims_any_difference_in_at_most_6_percent() -> None:
    """The error that Holm's adjustment promises is the whole family's."""
    studies = judged_studies(600, (0.0, 0.0, 0.0))
    assert sum(EffectVerdict.DIFFERENCE in verdicts for verdicts in studies) / 600 <= 0.06


def test_an_effect_of_the_size_of_the_margin_is_called_equivalent_in_at_most_6_percent() -> None:
    studies = judged_studies(1000, (MARGIN, -MARGIN, MARGIN))
    assert np.mean([verdict is EffectVerdict.EQUIVALENT for verdicts in studies for verdict in verdicts]) <= 0.06


def test_a_large_effect_is_found_among_the_main_contrasts() -> None:
    studies = judged_studies(200, (5.0, 0.0, 0.0))
    assert np.mean([verdicts[0] is EffectVerdict.DIFFERENCE for verdicts in studies]) > 0.9


@pytest.mark.parametrize("num_pairs", [2, 3])
def test_below_four_units_there_is_no_verdict_and_below_six_no_difference(num_pairs: int) -> None:
    for value in (9.0, 0.001):  # far outside the margin; far inside
        assert verdict_of([value + seed / 1e6 for seed in range(num_pairs)]).verdict is EffectVerdict.INCONCLUSIVE
    twelve = verdict_of([9.0 + seed / 1e6 for seed in range(12)], units=lambda seed: (seed % num_pairs,))
    assert twelve.verdict is EffectVerdict.INCONCLUSIVE
    assert f"{num_pairs} independent units are too few" in what_would_settle(twelve)
    five = verdict_of([9.0 + seed / 100 for seed in range(5)])
    assert five.verdict is EffectVerdict.INCONCLUSIVE  # sign-flip p is 2/32 at best
    assert "the t test sees a difference, but below 6 units" in what_would_settle(five).lower()


def test_all_p_values_of_the_main_contrasts_are_adjusted_and_no_others() -> None:
    rng = np.random.default_rng(6)
    differences = {name: rng.normal(0.7, 1, 8).tolist() for name in ("a", "b", "c", "d")}
    asked = [(Question(name, "", "other" if name == "d" else "main"), dict(enumerate(found)))
             for name, found in differences.items()]  # fmt: skip
    own = {name: alone(found) for name, found in differences.items()}
    judged = judge(asked, margin=1.0)
    for field in ("t_p", "sign_flip_p", "rank_p"):
        expected = (*st.adjust_holm([getattr(own[name], field) for name in "abc"]), getattr(own["d"], field))
        assert tuple(getattr(one.result, field) for one in judged) == expected


def test_one_outlier_decides_no_verdict_where_the_robust_opinion_was_registered() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.2, 12)
    assert verdict_of([*values, 40.0]).verdict is EffectVerdict.INCONCLUSIVE
    one = verdict_of([*values, 40.0], robust=True)
    assert one.verdict is EffectVerdict.INCONCLUSIVE
    assert one.result is not None  # the ranks alone say equivalent
    assert one.result.rank_p > 0.05 and one.result.rank_tost_p < 0.05
    for shift, verdict in ((3.0, EffectVerdict.DIFFERENCE), (0.0, EffectVerdict.EQUIVALENT)):
        assert verdict_of(values + shift, robust=True).verdict is verdict
