"""Verdicts on paired differences (difference, equivalent, inconclusive), and their sentences. Pure.

Both tests are always shown: a difference is claimed where the t test (after Holm in the main family) and the exact sign-flip
test agree, equivalence where both one-sided tests at the registered margin pass (the 90 % interval lies inside it). Neither
below four independent units. Where both hold, the difference is real but smaller than the margin. A study that registered a
robust second opinion claims only what the signed-rank tests say, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from experiments.definition import CELLS, EFFECTS, AnswerRule, Study
from experiments.design import StudyPlan
from experiments.statistics import Estimate, Unit, adjust_holm, analyse

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
    """One contrast with its verdict. Its `t_p`, `sign_flip_p` and `rank_p` are adjusted where the family is adjusted."""

    asked: Question
    differences: Mapping[int, float]  # by seed
    result: Estimate | None
    kinds: tuple[str, ...]  # of independent units
    margin: float
    alpha: float
    unit: str
    verdict: EffectVerdict

    @property
    def name(self) -> str:
        """Name of the contrast."""
        return self.asked.name


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
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha, unit=study.unit, robust=study.robust,
                 unit_of=plan.unit_of, kinds=plan.unit_kinds)


def judge_bounce(
    plan: StudyPlan, excess: Mapping[tuple[str, int], Mapping[int, float]], scatter: Outcomes
) -> tuple[Judged, ...]:
    """Whether the loss lies above the twin's after a restart, by arm and horizon (updates); empty without a margin.

    `excess` has the mean excess of a run over its restarts, by seed, `scatter` that of a run's evaluations around their trend.
    """
    study, asked = plan.study, []
    if not study.bounce_margin:
        return ()
    for (arm, horizon), values in excess.items():
        formula = f"{arm} over {plan.twin_of(arm)} after a restart"
        asked.append((Question(f"bounce of {arm}, {horizon}", formula, "bounce"), values))
    for arm in dict.fromkeys(arm for arm, _ in excess):
        twin = plan.twin_of(arm)
        question = Question(f"scatter of {arm}", f"{arm} − {twin}, between evaluations", "bounce")
        asked.append((question, paired_differences(scatter, arm, twin)))
    return judge(asked, margin=study.bounce_margin, alpha=study.alpha, unit=study.unit, unit_of=plan.unit_of,
                 kinds=plan.unit_kinds)


def _factorial(cells: Mapping[str, str], outcomes: Outcomes) -> list[tuple[Question, dict[int, float]]]:
    """Main effects and interaction of {fresh, repeated} × {continuous, restarted}, at seeds where all four are complete."""
    columns = [outcomes.get(cells[name], {}) for name in CELLS]
    seeds = sorted(set.intersection(*map(set, columns)))
    table = np.array([[column[seed] for seed in seeds] for column in columns])
    asked = []
    for name, (formula, weights) in EFFECTS.items():
        differences = dict(zip(seeds, np.dot(weights, table).tolist(), strict=True))
        asked.append((Question(name, formula, "factorial"), differences))
    return asked


def judge(
    asked: Sequence[tuple[Question, Mapping[int, float]]], *, margin: float, alpha: float = 0.05,
    unit: str = "bits per byte", robust: bool = False, unit_of: Callable[[int], Unit] = lambda seed: (seed,),
    kinds: tuple[str, ...] = ("seed",),
) -> tuple[Judged, ...]:
    """Return a verdict on the differences (by seed) of each question; the family `main` is adjusted together.

    `unit_of` says to which independent unit a seed belongs.
    """
    results = [analyse(differences, unit_of, margin=margin, alpha=alpha) for _, differences in asked]
    for name in ("t_p", "sign_flip_p", "rank_p"):
        main = [r for (question, _), r in zip(asked, results, strict=True) if question.family == "main" and r is not None]
        adjusted = adjust_holm([getattr(r, name) for r in main])
        for r, p in zip(main, adjusted, strict=True):
            setattr(r, name, p)
    return tuple(
        Judged(asked=question, differences=differences, result=r, kinds=kinds, margin=margin, alpha=alpha, unit=unit,
               verdict=_decide(r, alpha, robust))
        for (question, differences), r in zip(asked, results, strict=True))


def _decide(r: Estimate | None, alpha: float, robust: bool) -> EffectVerdict:
    if r is None:
        return EffectVerdict.NOT_TESTED
    if r.num_units < LEAST_UNITS:
        return EffectVerdict.INCONCLUSIVE
    by_mean = _say(r.tost_p <= alpha, r.is_real(alpha))
    by_ranks = _say(r.rank_tost_p <= alpha, r.rank_p <= alpha)
    return EffectVerdict.INCONCLUSIVE if robust and by_mean is not by_ranks else by_mean


def _say(is_inside: bool, is_apart: bool) -> EffectVerdict:
    if is_inside:
        return EffectVerdict.EQUIVALENT
    return EffectVerdict.DIFFERENCE if is_apart else EffectVerdict.INCONCLUSIVE


def judge_runs(arms: tuple[str, str], differences: Mapping[int, float], margin: float) -> tuple[str, dict[str, Any]]:
    """What `chronicle compare` says of two arms of runs: the second minus the first at equal seeds, as words and as values."""
    question = Question("second − first", f"{arms[1]} − {arms[0]}", "compare")
    (one,) = judge([(question, differences)], margin=margin, unit="of this value")
    numbers: dict[str, Any] = asdict(one.result) if one.result is not None else {}
    numbers |= {"verdict": str(one.verdict), "margin": margin, "pairs": len(differences)}
    return f"{one.verdict}. {_plainly(one)}", numbers


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
    if r.num_units < LEAST_FOR_SIGNS and r.t_p <= one.alpha:
        parts.append(f"the t test sees a difference, but below {LEAST_FOR_SIGNS} units the sign-flip test cannot agree")
    elif r.t_p <= one.alpha < r.sign_flip_p:
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
    rules = study.answers
    if not rules:
        main = [one for one in study.contrasts if one.family == "main"]
        rules = tuple(AnswerRule(name=one.question or one.name, by=(one.name,)) for one in main)
    told = []
    for rule in rules:
        found = [by_name[name] for name in rule.by if name in by_name]
        if not found:
            continue
        said = _plainly(found[0])
        if found[1:]:
            said += f" Beside it: {'; '.join(map(_short, found[1:]))}."
        if rule.cannot:
            said += f" What this cannot say: {rule.cannot}"
        told.append((rule.name, said))
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
    where = (f"difference: 95 % interval {format_bpb(r.low)} to {format_bpb(r.high)}, t {format_p(r.t_p)}, "
             f"sign-flip {format_p(r.sign_flip_p)}; equivalence: 90 % interval {format_bpb(r.inner_low)} to "
             f"{format_bpb(r.inner_high)}, TOST {format_p(r.tost_p)}; {count_units(one)}")
    is_control = one.asked.family == "control"
    if one.verdict is EffectVerdict.DIFFERENCE:
        return f"An effect: {_direction(one)} ({where})."
    if one.verdict is EffectVerdict.EQUIVALENT and r.is_real(one.alpha):
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
