"""The inference, against closed forms worked out by hand, against scipy, and against simulated studies."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from experiments import statistics as st
from experiments.verdicts import EffectVerdict, Question, answer, judge

STUDENT_DATA = [1.0, 2.0, 3.0, 4.0, 5.0]


def test_paired_t_interval_is_the_textbook_one() -> None:
    """mean 3, sd √2.5, t(0.975, 4) = 2.776445: 3 ± 2.776445·√(2.5/5)."""
    result = st.compare_paired(STUDENT_DATA, margin=1.0)
    assert result.interval.low == pytest.approx(3 - 2.7764451 * math.sqrt(0.5), abs=1e-6)
    assert result.interval.high == pytest.approx(3 + 2.7764451 * math.sqrt(0.5), abs=1e-6)
    assert result.sd == pytest.approx(math.sqrt(2.5))


def test_paired_t_p_agrees_with_scipy() -> None:
    from scipy import stats

    d = np.random.default_rng(3).normal(0.3, 1, 11)
    assert st.compare_paired(d, margin=1.0).t_p == pytest.approx(stats.ttest_1samp(d, 0).pvalue)


def test_t_p_with_one_degree_of_freedom_has_a_closed_form() -> None:
    """t with 1 df is Cauchy: p = 1 − (2/π)·atan|t|."""
    t = 1.5 / (math.sqrt(0.5) / math.sqrt(2))
    assert st.compare_paired([1.0, 2.0], margin=1.0).t_p == pytest.approx(1 - 2 / math.pi * math.atan(t))


def test_sign_flip_counts_all_signings() -> None:
    d = [0.3, -0.1, 0.7, 0.2, 0.05]
    signed = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=5)]
    expected = sum(value >= sum(d) - 1e-12 for value in signed) / 32
    assert st.sign_flip_p(d) == expected


def test_sign_flip_of_equal_signs_is_its_smallest_value() -> None:
    assert st.sign_flip_p([0.1] * 8) == 2 / 2**8
    assert st.sign_flip_p([1.0, 2.0, 4.0]) == 2 / 2**3


@given(some.lists(some.floats(-5, 5), min_size=2, max_size=9))
@settings(max_examples=60, deadline=None)
def test_sign_flip_ignores_direction_and_order(d: list[float]) -> None:
    assert st.sign_flip_p(d) == st.sign_flip_p([-x for x in reversed(d)])


def test_sampled_sign_flip_agrees_with_the_exact_one() -> None:
    d = np.random.default_rng(5).normal(0.35, 1, 21)
    exact = np.zeros(1)
    for value in d:
        exact = np.concatenate([exact + value, exact - value])
    assert st.sign_flip_p(d) == pytest.approx((np.abs(exact) >= abs(d.sum()) - 1e-9).mean(), abs=0.004)


def test_tost_is_the_larger_of_two_one_sided_tests() -> None:
    from scipy import stats

    d = np.random.default_rng(7).normal(0.01, 0.02, 9)
    low = stats.ttest_1samp(d, -0.02, alternative="greater").pvalue
    high = stats.ttest_1samp(d, 0.02, alternative="less").pvalue
    assert st.tost_p(d, 0.02) == pytest.approx(max(low, high))


def test_tost_passes_exactly_when_the_90_percent_interval_lies_inside_the_margin() -> None:
    rng = np.random.default_rng(11)
    seen = set()
    for _ in range(200):
        d = rng.normal(rng.uniform(-0.02, 0.02), 0.015, 8)
        inner = st.compare_paired(d, margin=0.02, alpha=0.10).interval
        inside = inner.low > -0.02 and inner.high < 0.02
        assert (st.tost_p(d, 0.02) < 0.05) == inside
        seen.add(inside)
    assert seen == {True, False}


def test_holm_matches_the_worked_example() -> None:
    """Holm's own steps: ×4, ×3, ×2, ×1, made monotone."""
    assert st.adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert st.adjust_holm([0.9, 0.8]) == (1.0, 1.0)


def test_identical_arms_are_no_difference_and_equivalent() -> None:
    result = st.compare_paired([0.0] * 8, margin=0.02)
    assert (result.t_p, result.sign_flip_p, result.tost_p, result.smallest_detectable) == (1.0, 1.0, 0.0, 0.0)


def test_bca_stands_beside_the_t_interval_only_from_twenty_pairs() -> None:
    d = np.random.default_rng(1).normal(size=20)
    assert st.compare_paired(d[:19], margin=1.0).bca is None
    assert st.compare_paired(d, margin=1.0).bca is not None


def test_bca_agrees_with_scipy() -> None:
    from scipy import stats

    d = np.random.default_rng(2).exponential(size=40)
    theirs = stats.bootstrap((d,), np.mean, n_resamples=10_000, rng=np.random.default_rng(9)).confidence_interval
    ours = st.bca_interval(d)
    assert ours.low == pytest.approx(theirs.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.high, abs=0.02)


@pytest.mark.parametrize(("num_pairs", "factor"), [(5, 1.7), (8, 1.16), (11, 0.94), (16, 0.75)])
def test_smallest_detectable_difference_is_the_published_multiple_of_sd(num_pairs: int, factor: float) -> None:
    assert st.smallest_detectable(1.0, num_pairs) == pytest.approx(factor, abs=0.03)


def test_power_at_no_difference_is_alpha() -> None:
    assert st.power_of_difference(0.0, 1.0, 8) == pytest.approx(0.05, abs=1e-6)


def test_seeds_for_a_difference_are_the_fewest_with_that_power() -> None:
    n = st.num_seeds_for_difference(0.5, 1.0)
    assert n == 34  # the textbook value for d = 0.5, 80 %, two-sided 5 %
    assert st.power_of_difference(0.5, 1.0, n - 1) < 0.8 <= st.power_of_difference(0.5, 1.0, n)


def test_seeds_for_equivalence_are_the_fewest_with_that_power() -> None:
    n = st.num_seeds_for_equivalence(0.02, 0.015)
    assert n is not None
    assert st.power_of_equivalence(0.02, 0.015, n - 1) < 0.8 <= st.power_of_equivalence(0.02, 0.015, n)
    assert st.num_seeds_for_equivalence(0.02, 0.015, delta=0.02) is None
    assert st.num_seeds_for_difference(0.0, 1.0) is None


def test_nothing_is_said_about_fewer_than_two_pairs_or_missing_values() -> None:
    for bad in ([0.1], [], [0.1, math.nan]):
        with pytest.raises(ValueError, match="two or more finite"):
            st.compare_paired(bad, margin=0.02)


def simulate(num_studies: int, num_pairs: int, delta: float = 0.0) -> tuple[float, float, float, float]:
    """Shares of studies: interval covers, t rejects, sign-flip rejects, TOST at margin 1.5 sd passes."""
    rng = np.random.default_rng(20260107)
    counts = np.zeros(4)
    for _ in range(num_studies):
        r = st.compare_paired(rng.normal(delta, 1.0, num_pairs), margin=1.5)
        counts += [r.interval.contains(delta), r.t_p <= 0.05, r.sign_flip_p <= 0.05, r.tost_p <= 0.05]
    return tuple(counts / num_studies)  # type: ignore[return-value]


@pytest.mark.parametrize("num_pairs", [4, 8, 12])
def test_coverage_false_positives_and_power_hold_over_5000_simulated_studies(num_pairs: int) -> None:
    covered, rejected, flipped, equivalent = simulate(5000, num_pairs)
    assert 0.93 <= covered <= 0.97
    assert rejected <= 0.06
    assert flipped <= 0.06
    assert equivalent == pytest.approx(st.power_of_equivalence(1.5, 1.0, num_pairs), abs=0.02)
    _, found, _, _ = simulate(5000, num_pairs, delta=1.0)
    assert found == pytest.approx(st.power_of_difference(1.0, 1.0, num_pairs), abs=0.02)


def test_bca_undercovers_at_eight_pairs_which_is_why_it_is_not_shown_there() -> None:
    rng = np.random.default_rng(4)
    covered = np.mean([st.bca_interval(rng.normal(size=8), num_resamples=2000).contains(0.0) for _ in range(5000)])
    assert covered < 0.93


def judged_studies(
    num_studies: int, sds: tuple[float, float, float], means: tuple[float, float, float]
) -> list[list[EffectVerdict]]:
    """Verdicts of whole studies at eight seeds: the main contrasts share the reference arm, as in the real one."""
    rng = np.random.default_rng(20260108)
    names = ("order", "restart", "repetition")
    found = []
    for _ in range(num_studies):
        reference = rng.normal(0, 1, 8)
        arms = [mean + rng.normal(0, sd, 8) for mean, sd in zip(means, sds, strict=True)]
        asked = [(Question(name, "", "", "main"), dict(enumerate(arm - reference)))
                 for name, arm in zip(names, arms, strict=True)]  # fmt: skip
        found.append([one.verdict for one in judge(asked, margin=MARGIN, alpha=0.05)])
    return found


MARGIN = 2.5  # of the noise of one arm; a difference of two arms has √2 of it


def test_a_study_of_no_effects_claims_any_difference_in_at_most_6_percent() -> None:
    """The error that Holm's adjustment promises is the whole family's."""
    studies = judged_studies(5000, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    assert sum(EffectVerdict.DIFFERENCE in verdicts for verdicts in studies) / 5000 <= 0.06
    equal = np.mean([verdict is EffectVerdict.EQUIVALENT for verdicts in studies for verdict in verdicts])
    assert equal == pytest.approx(st.power_of_equivalence(MARGIN, math.sqrt(2), 8), abs=0.02)


def test_an_effect_of_the_size_of_the_margin_is_called_equivalent_in_at_most_6_percent() -> None:
    studies = judged_studies(5000, (1.0, 1.0, 1.0), (MARGIN, -MARGIN, MARGIN))
    for contrast in range(3):
        assert sum(verdicts[contrast] is EffectVerdict.EQUIVALENT for verdicts in studies) / 5000 <= 0.06


def test_a_large_effect_is_found_among_the_main_contrasts_with_the_power_of_its_worst_adjustment() -> None:
    """Holm multiplies by three at most: between the power at 5/3 % and at 5 %, less what asking for two tests costs."""
    delta, sd = 3.0, math.sqrt(2)
    studies = judged_studies(5000, (1.0, 1.0, 1.0), (delta, 0.0, 0.0))
    share = np.mean([verdicts[0] is EffectVerdict.DIFFERENCE for verdicts in studies])
    least, most = (st.power_of_difference(delta, sd, 8, alpha=alpha) for alpha in (0.05 / 3, 0.05))
    assert least - 0.03 <= share <= most


@pytest.mark.parametrize("num_pairs", [2, 3])
def test_below_four_pairs_there_is_no_verdict_and_below_six_no_difference(num_pairs: int) -> None:
    for value in (9.0, 0.001):  # far outside the margin; far inside
        asked = [(Question("restart", "", "", "other"), {seed: value + seed / 1e6 for seed in range(num_pairs)})]
        assert judge(asked, margin=1.0, alpha=0.05)[0].verdict is EffectVerdict.INCONCLUSIVE
    asked = [(Question("restart", "", "", "other"), {seed: 9.0 + seed / 100 for seed in range(5)})]
    assert judge(asked, margin=1.0, alpha=0.05)[0].verdict is EffectVerdict.INCONCLUSIVE  # sign-flip p is 2/32 at best


def test_both_p_values_of_the_main_contrasts_are_adjusted_and_no_others() -> None:
    rng = np.random.default_rng(6)
    differences = {name: dict(enumerate(rng.normal(0.7, 1, 8))) for name in ("a", "b", "c", "d")}
    asked = [(Question(name, "", "", "other" if name == "d" else "main"), found) for name, found in differences.items()]
    alone = {name: st.compare_paired(list(found.values()), margin=1.0) for name, found in differences.items()}
    for one, adjusted_t, adjusted_flip in zip(
        judge(asked, margin=1.0, alpha=0.05),
        (*st.adjust_holm([alone[name].t_p for name in "abc"]), alone["d"].t_p),
        (*st.adjust_holm([alone[name].sign_flip_p for name in "abc"]), alone["d"].sign_flip_p),
        strict=True,
    ):
        assert (one.t_p, one.sign_flip_p) == (adjusted_t, adjusted_flip)


# --- The robust estimate


@pytest.mark.parametrize("num_pairs", [5, 8, 12, 36])
def test_the_signed_rank_p_is_scipys_and_its_interval_is_the_tests(num_pairs: int) -> None:
    from scipy import stats

    d = np.random.default_rng(num_pairs).normal(0.4, 1, num_pairs)
    found = st.compare_ranks(d)
    assert found.p == pytest.approx(stats.wilcoxon(d, method="exact").pvalue)
    if num_pairs == 5:  # 2/32 is the smallest p there is
        assert math.isinf(found.interval.high)
        return
    low, high = found.interval.low, found.interval.high
    for value, inside in ((low + 1e-9, True), (low - 1e-9, False), (high - 1e-9, True), (high + 1e-9, False)):
        assert (st.compare_ranks(d - value).p > 0.05) is inside
    pairs = [(a + b) / 2 for i, a in enumerate(d) for b in d[i:]]
    assert found.estimate == pytest.approx(np.median(pairs))


def test_one_outlier_decides_no_verdict_where_the_robust_estimate_was_registered() -> None:
    rng = np.random.default_rng(3)
    values = dict(enumerate(rng.normal(0, 0.2, 12)))
    asked = [(Question("restart", "B − A", "", "other"), values | {12: 40.0})]
    assert judge(asked, margin=1.0, alpha=0.05)[0].verdict is EffectVerdict.INCONCLUSIVE
    (one,) = judge(asked, margin=1.0, alpha=0.05, robust=True)
    assert (one.by_mean, one.by_ranks, one.verdict) == (EffectVerdict.INCONCLUSIVE, EffectVerdict.EQUIVALENT, one.by_mean)
    assert "the mean alone says inconclusive, the robust estimate equivalent: no claim is made" in answer(one, 1.0, 0.05)
    for shift, verdict in ((3.0, EffectVerdict.DIFFERENCE), (0.0, EffectVerdict.EQUIVALENT)):
        both = [(Question("restart", "B − A", "", "main"), {seed: value + shift for seed, value in values.items()})]
        assert judge(both, margin=1.0, alpha=0.05, robust=True)[0].verdict is verdict
