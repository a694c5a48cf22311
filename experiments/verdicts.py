"""Verdicts on paired differences (difference, equivalent, inconclusive), and their sentences. Pure.

Both tests are always shown: a difference is claimed where the t test (after Holm in the main family) and the exact sign-flip
test agree, equivalence where both one-sided tests at the registered margin pass (the 90 % interval lies inside it). Neither
below four independent units. Where both hold, the difference is real but smaller than the margin. A study that registered a
robust second opinion claims only what the signed-rank tests say, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from experiments.definition import Study
from experiments.design import StudyPlan
from experiments.statistics import Estimate, Unit, adjust_holm, analyse

ALPHA = 0.05
LEAST_UNITS = 4  # below that an interval rests on the assumption of normality alone: no verdict, only numbers
LEAST_FOR_SIGNS = 6  # below that the sign-flip test cannot fall under 5 %
MOST_UNITS = 10_000

Outcomes = Mapping[str, Mapping[int, float]]  # by arm and seed


class EffectVerdict(StrEnum):
    """The verdict on a contrast."""

    DIFFERENCE = "difference"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested"  # fewer than two independent units


class Question(NamedTuple):
    """The question on one set of paired differences."""

    name: str
    formula: str
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One contrast with its verdict. `t_p`, `sign_flip_p` and `rank_p` are adjusted where the family is adjusted."""

    asked: Question
    differences: Mapping[int, float]  # by seed
    result: Estimate | None
    kinds: tuple[str, ...] = ("seed",)  # of independent units
    margin: float
    alpha: float = ALPHA
    unit: str = "bits per byte"
    t_p: float = 1.0
    sign_flip_p: float = 1.0
    rank_p: float = 1.0
    verdict: EffectVerdict = EffectVerdict.NOT_TESTED

    @property
    def name(self) -> str:
        """Name of the contrast."""
        return self.asked.name

    @property
    def is_real(self) -> bool:
        """Whether both tests claim a difference, however small."""
        return max(self.t_p, self.sign_flip_p) <= self.alpha


def paired_differences(outcomes: Outcomes, plus: str, minus: str) -> dict[int, float]:
    """Difference of an outcome by seed, where both arms have it."""
    one, other = outcomes.get(plus, {}), outcomes.get(minus, {})
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def judge_study(plan: StudyPlan, outcomes: Outcomes) -> tuple[Judged, ...]:
    """Every registered contrast, then the effects of the factorial where all its cells were run."""
    study = plan.study
    asked = []
    for c in study.contrasts:
        if {c.plus, c.minus} <= set(plan.arm_names):
            question = Question(c.name, f"{c.plus} − {c.minus}", c.family)
            asked.append((question, paired_differences(outcomes, c.plus, c.minus)))
    if study.factorial and set(study.factorial.values()) <= set(plan.arm_names):
        asked += _factorial(study.factorial, outcomes)
    seeds = {seed for values in outcomes.values() for seed in values}
    units = {seed: plan.unit_of(seed) for seed in seeds}
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha, unit=study.unit, robust=study.robust, units=units,
                 kinds=plan.unit_kinds)


def judge_bounce(
    plan: StudyPlan, excess: Mapping[tuple[str, int], Mapping[int, float]], scatter: Outcomes
) -> tuple[Judged, ...]:
    """Whether the loss lies above the twin's after a restart, by arm and horizon (updates); empty without a margin.

    `excess` has the mean excess of a run over its restarts, by seed, `scatter` that of a run's evaluations around their trend.
    """
    study, asked = plan.study, []
    if not study.bounce_margin:
        return ()
    units = {seed: plan.unit_of(seed) for values in excess.values() for seed in values}
    for (arm, horizon), values in excess.items():
        formula = f"{arm} over {plan.twin_of(arm)} after a restart"
        asked.append((Question(f"bounce of {arm}, {horizon}", formula, "bounce"), values))
    for arm in dict.fromkeys(arm for arm, _ in excess):
        twin = plan.twin_of(arm)
        question = Question(f"scatter of {arm}", f"{arm} − {twin}, between evaluations", "bounce")
        asked.append((question, paired_differences(scatter, arm, twin)))
    return judge(asked, margin=study.bounce_margin, alpha=study.alpha, unit=study.unit, units=units, kinds=plan.unit_kinds)


def _factorial(cells: Mapping[str, str], outcomes: Outcomes) -> list[tuple[Question, dict[int, float]]]:
    """Main effects and interaction of {fresh, repeated} × {continuous, restarted}, at seeds where all four are complete."""
    on_fresh = paired_differences(outcomes, cells["fresh-restarted"], cells["fresh-continuous"])
    on_repeated = paired_differences(outcomes, cells["repeated-restarted"], cells["repeated-continuous"])
    of_continuous = paired_differences(outcomes, cells["repeated-continuous"], cells["fresh-continuous"])
    of_restarted = paired_differences(outcomes, cells["repeated-restarted"], cells["fresh-restarted"])
    seeds = sorted(on_fresh.keys() & on_repeated.keys())
    return [
        (Question("restart, main effect", "half of (fresh + repeated)", "factorial"),
         {seed: (on_fresh[seed] + on_repeated[seed]) / 2 for seed in seeds}),
        (Question("repetition, main effect", "half of (continuous + restarted)", "factorial"),
         {seed: (of_continuous[seed] + of_restarted[seed]) / 2 for seed in seeds}),
        (Question("interaction", "restart on repeated − restart on fresh", "factorial"),
         {seed: on_repeated[seed] - on_fresh[seed] for seed in seeds}),
    ]


def judge(
    asked: Sequence[tuple[Question, Mapping[int, float]]], *, margin: float, alpha: float = ALPHA,
    unit: str = "bits per byte", robust: bool = False, units: Mapping[int, Unit] | None = None,
    kinds: tuple[str, ...] = ("seed",),
) -> tuple[Judged, ...]:
    """Return a verdict on the differences (by seed) of each question; the family `main` is adjusted together.

    `units` says to which independent unit a seed belongs; every seed is one where it is None.
    """
    judged = []
    for question, differences in asked:
        own = units if units is not None else {seed: (seed,) for seed in differences}
        result = analyse(differences, own, margin=margin, alpha=alpha) if differences else None
        one = Judged(asked=question, differences=differences, result=result, kinds=kinds, margin=margin, alpha=alpha, unit=unit)
        if result is not None:
            one = replace(one, t_p=result.t_p, sign_flip_p=result.sign_flip_p, rank_p=result.rank_p)
        judged.append(one)
    main = [number for number, one in enumerate(judged) if one.asked.family == "main" and one.result is not None]
    for name in ("t_p", "sign_flip_p", "rank_p"):
        adjusted = adjust_holm([getattr(judged[number], name) for number in main])
        for number, p in zip(main, adjusted, strict=True):
            changed: dict[str, Any] = {name: p}
            judged[number] = replace(judged[number], **changed)
    return tuple(_with_verdict(one, robust) for one in judged)


def _with_verdict(one: Judged, robust: bool) -> Judged:
    result = one.result
    if result is None:
        return one
    by_mean = by_ranks = EffectVerdict.INCONCLUSIVE
    if result.num_units >= LEAST_UNITS:
        by_mean = _say(result.tost_p <= one.alpha, one.is_real)
        by_ranks = _say(result.rank_tost_p <= one.alpha, one.rank_p <= one.alpha)
    agreed = by_mean if not robust or by_mean is by_ranks else EffectVerdict.INCONCLUSIVE
    return replace(one, verdict=agreed)


def _say(is_inside: bool, is_apart: bool) -> EffectVerdict:
    if is_inside:
        return EffectVerdict.EQUIVALENT
    return EffectVerdict.DIFFERENCE if is_apart else EffectVerdict.INCONCLUSIVE


def judge_runs(arms: tuple[str, str], differences: Mapping[int, float], margin: float) -> tuple[str, dict[str, Any]]:
    """What `chronicle compare` says of two arms of runs: the second minus the first at equal seeds, as words and as values."""
    question = Question("second − first", f"{arms[1]} − {arms[0]}", "compare")
    (one,) = judge([(question, differences)], margin=margin)
    r = one.result
    if r is None:
        return f"not tested: {_few(one)}, two are the least", {"verdict": one.verdict.value}
    verdict = one.verdict.value
    if one.verdict is EffectVerdict.EQUIVALENT and one.is_real:
        verdict += ", though the difference is real"
    numbers = {"mean": r.mean, "low": r.low, "high": r.high, "pairs": r.num_pairs, "margin": margin, "t_p": r.t_p,
               "sign_flip_p": r.sign_flip_p, "tost_p": r.tost_p}
    said = (f"{verdict}: {one.asked.formula} = {format_bpb(r.mean)}, 95 % interval {_interval(one)}, {r.num_pairs} seeds; "
            f"paired t {format_p(r.t_p)}, sign-flip {format_p(r.sign_flip_p)}, within ±{margin:g} (TOST) {format_p(r.tost_p)}")
    return f"{said}. {what_would_settle(one)}".rstrip(), {"verdict": one.verdict.value, **numbers}


# --- Verdicts as sentences


def format_bpb(value: float) -> str:
    """Signed, four decimals."""
    return f"{value:+.4f}"


def format_p(p: float) -> str:
    """`p = 0.012`, `p < 0.001`."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def count_units(one: Judged) -> str:
    """`n = 8 seeds`, `n = 4 slices (8 pairs)`, `n = 13 (39 pairs: 3 checkpoints × 13 orders)`."""
    r = one.result
    if r is None:
        return "n = 0"
    if len(r.levels) == 1:
        beside = f" ({r.num_pairs} pairs)" if r.num_pairs != r.num_units else ""
        return f"n = {r.num_units} {one.kinds[0]}s{beside}"
    crossed = " × ".join(f"{number} {kind}s" for number, kind in zip(r.levels, one.kinds, strict=True))
    return f"n = {r.num_units} ({r.num_pairs} pairs: {crossed})"


def _interval(one: Judged) -> str:
    assert one.result is not None
    return f"{format_bpb(one.result.low)} to {format_bpb(one.result.high)}"


def _few(one: Judged) -> str:
    if not one.differences:
        return "no pair"
    if len(one.differences) == 1:
        return f"one seed: {format_bpb(next(iter(one.differences.values())))}"
    return f"{len(one.differences)} pairs of one {one.kinds[0]}"


def _direction(one: Judged) -> str:
    assert one.result is not None
    plus, _, minus = one.asked.formula.partition(" − ") if one.asked.family != "factorial" else ("", "", "")
    word = "worse" if one.result.mean > 0 else "better"
    size = f"{abs(one.result.mean):.4f} {one.unit} {word}"
    return f"{plus} ends {size} than {minus}" if minus else size


def what_would_settle(one: Judged) -> str:
    """Return why a contrast is not settled, and about how many units would settle it; empty where it is."""
    r = one.result
    if one.verdict is not EffectVerdict.INCONCLUSIVE or r is None:
        return ""
    if not any(one.differences.values()):
        return f"The two are equal to the last digit in every pair; a verdict needs {LEAST_UNITS} independent units."
    if r.num_units < LEAST_UNITS:
        return f"{r.num_units} independent units are too few for a verdict, {LEAST_UNITS} are the least."
    parts = []
    if r.num_units < LEAST_FOR_SIGNS and one.t_p <= one.alpha:
        parts.append(f"the t test sees a difference, but below {LEAST_FOR_SIGNS} units the sign-flip test cannot agree")
    elif one.t_p <= one.alpha < one.sign_flip_p:
        parts.append("the t test sees a difference, the sign-flip test does not")
    for half, room, what in ((r.inner_high - r.mean, one.margin - abs(r.mean), f"equivalence within ±{one.margin:g}"),
                             (r.high - r.mean, abs(r.mean), "a difference of the observed size")):
        needed = r.num_units * (half / room) ** 2 if room > 0 else MOST_UNITS
        if LEAST_FOR_SIGNS <= needed < MOST_UNITS:
            parts.append(f"about {needed:.0f} units would show {what}, if that is the truth")
    return f"{'; '.join(parts).capitalize()}." if parts else ""


def answer_questions(study: Study, judged: Sequence[Judged]) -> list[tuple[str, str]]:
    """Return the questions of the study with their answers; a study without questions gets its main contrasts."""
    by_name = {one.name: one for one in judged}
    asked = [(rule.name, rule.by, rule.cannot) for rule in study.answers]
    if not asked:
        asked = [(c.question or c.name, (c.name,), "") for c in study.contrasts if c.family == "main"]
    told = []
    for question, names, cannot in asked:
        found = [by_name[name] for name in names if name in by_name]
        if not found:
            continue
        said = _plainly(found[0])
        if found[1:]:
            said += f" Beside it: {'; '.join(map(_short, found[1:]))}."
        if cannot:
            said += f" What this cannot say: {cannot}"
        told.append((question, said))
    return told


def answer_bounce(bounces: Sequence[Judged]) -> str:
    """Return the answer to the question of the bounce: the mean excess loss after a restart, by arm and horizon."""
    tested = [one for one in bounces if one.result is not None] or bounces
    return (f"Mean excess of the training loss over the twin without restarts, and scatter of evaluations, against "
            f"±{tested[0].margin:g} {tested[0].unit}, {count_units(tested[0])}: {'; '.join(map(_short, tested))}.")


def _plainly(one: Judged) -> str:
    """The answer of a contrast in words, with both tests."""
    r = one.result
    if r is None:
        return f"Not tested: {_few(one)}, two independent units are the least."
    where = (f"difference: 95 % interval {_interval(one)}, t {format_p(one.t_p)}, sign-flip {format_p(one.sign_flip_p)}; "
             f"equivalence: 90 % interval {format_bpb(r.inner_low)} to {format_bpb(r.inner_high)}, TOST {format_p(r.tost_p)}; "
             f"{count_units(one)}")
    is_control = one.asked.family == "control"
    if one.verdict is EffectVerdict.DIFFERENCE:
        return f"An effect: {_direction(one)} ({where})."
    if one.verdict is EffectVerdict.EQUIVALENT and one.is_real:
        weak = " It was seen, but it is small: that a larger effect would be seen, this control does not show by itself."
        return f"An effect, but smaller than {one.margin:g} {one.unit}: {_direction(one)} ({where}).{weak * is_control}"
    missed = ""
    if is_control:
        missed = " An effect that must be there was not seen by both tests: where this study sees nothing, that means little."
    numbers = f"{one.asked.formula} = {format_bpb(r.mean)} ({where})"
    if one.verdict is EffectVerdict.EQUIVALENT:
        return f"No effect as large as {one.margin:g} {one.unit}: {numbers}.{missed}"
    return f"Not settled: {numbers}. {what_would_settle(one)}".rstrip() + missed


def _short(one: Judged) -> str:
    head = f"{one.name} ({one.asked.formula})"
    if one.result is None:
        return f"{head} {one.verdict}, {_few(one)}"
    word = "not settled" if one.verdict is EffectVerdict.INCONCLUSIVE else str(one.verdict)
    return f"{head} {word}, {format_bpb(one.result.mean)} [{format_bpb(one.result.low)}, {format_bpb(one.result.high)}]"


def describe_errors(study: Study, judged: Sequence[Judged]) -> str:
    """Return the sentence that says which claims share an error of 5 % and which do not."""
    main = [one.name for one in judged if one.asked.family == "main"]
    if not main:
        return f"Every contrast, and every equivalence, is judged at {study.alpha:.0%} by itself."
    return (f"The main contrasts ({', '.join(main)}) share one error of {study.alpha:.0%} for differences (Holm); every other "
            f"contrast, and every equivalence, is judged at {study.alpha:.0%} by itself.")
