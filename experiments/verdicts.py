"""From paired differences to verdicts: difference, equivalent or inconclusive.

A difference is claimed only where the paired t test and the exact sign-flip test agree (after Holm in the main family);
equivalence only where TOST passes at the registered margin; neither below four
pairs. Both: the difference is real and too small to matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from experiments.outcomes import StudyData, outcome_of
from experiments.statistics import PairedResult, adjust_holm, compare_paired

__all__ = [
    "LEAST_PAIRS",
    "PRIMARY",
    "Judged",
    "Question",
    "Verdict",
    "judge",
    "judge_contrasts",
    "judge_factorial",
    "paired_differences",
]

PRIMARY = "averaged/mixture"
LEAST_PAIRS = 4  # below that a t interval rests on the assumption of normality alone: no verdict, only numbers


class Verdict(StrEnum):
    """What may be said about a contrast."""

    DIFFERENCE = "difference"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested"  # fewer than two paired seeds


class Question(NamedTuple):
    """What is asked of one set of paired differences."""

    name: str
    formula: str
    question: str
    family: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One contrast with its verdict. `t_p` and `sign_flip_p` are adjusted where the family is adjusted."""

    name: str
    formula: str
    question: str
    family: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    result: PairedResult | None
    t_p: float | None = None
    sign_flip_p: float | None = None
    verdict: Verdict = Verdict.NOT_TESTED


def paired_differences(data: StudyData, plus: str, minus: str, outcome: str = PRIMARY) -> dict[int, float]:
    """Difference of an outcome by seed, where both arms are complete."""
    return {seed: outcome_of(data.runs[plus, seed], outcome) - outcome_of(data.runs[minus, seed], outcome)
            for seed in data.seeds(plus, minus)}  # fmt: skip


def judge_contrasts(data: StudyData) -> tuple[Judged, ...]:
    """Every registered contrast; those of the family `main` with Holm's adjustment."""
    study = data.plan.study
    asked = [
        (Question(c.name, f"{c.plus} − {c.minus}", c.question, c.family), paired_differences(data, c.plus, c.minus))
        for c in study.contrasts
        if {c.plus, c.minus} <= set(data.plan.arm_names)
    ]
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha)


def judge_factorial(data: StudyData) -> tuple[Judged, ...]:
    """Main effects and interaction of {fresh, repeated} × {continuous, restarted}, at seeds where all four are complete."""
    study = data.plan.study
    cells = study.factorial
    names = ("fresh-continuous", "fresh-restarted", "repeated-continuous", "repeated-restarted")
    if not set(names) <= set(cells) or not {cells[name] for name in names} <= set(data.plan.arm_names):
        return ()
    seeds = data.seeds(*(cells[name] for name in names))
    fc, fr, rc, rr = ({s: outcome_of(data.runs[cells[name], s], PRIMARY) for s in seeds} for name in names)
    effects: Mapping[str, tuple[str, str, dict[int, float]]] = {
        "restart, main effect": ("half of (fresh + repeated)", "Does restarting matter, over fresh and repeated data?",
                                 {s: ((fr[s] - fc[s]) + (rr[s] - rc[s])) / 2 for s in fc}),
        "repetition, main effect": ("half of (continuous + restarted)", "Does repeating data matter, restarted or not?",
                                    {s: ((rc[s] - fc[s]) + (rr[s] - fr[s])) / 2 for s in fc}),
        "interaction": ("restart on repeated − restart on fresh", "Is a restart worse when the data repeat?",
                        {s: (rr[s] - rc[s]) - (fr[s] - fc[s]) for s in fc}),
    }  # fmt: skip
    asked = [(Question(name, formula, question, "factorial"), differences)
             for name, (formula, question, differences) in effects.items()]  # fmt: skip
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha)


def judge(asked: Sequence[tuple[Question, Mapping[int, float]]], *, margin: float, alpha: float) -> tuple[Judged, ...]:
    """A verdict on the paired differences (by seed) of each question; those of the family `main` are adjusted together."""
    judged = [_compare(question, differences, margin, alpha) for question, differences in asked]
    main = [(one.name, one.result) for one in judged if one.family == "main" and one.result is not None]
    names = [name for name, _ in main]
    t_ps = dict(zip(names, adjust_holm([result.t_p for _, result in main]), strict=True))
    flips = dict(zip(names, adjust_holm([result.sign_flip_p for _, result in main]), strict=True))
    return tuple(_with_verdict(one, t_ps.get(one.name), flips.get(one.name), alpha) for one in judged)


def _compare(question: Question, differences: Mapping[int, float], margin: float, alpha: float) -> Judged:
    values = tuple(differences.values())
    result = compare_paired(values, margin=margin, alpha=alpha) if len(values) >= 2 else None
    return Judged(**question._asdict(), seeds=tuple(differences), differences=values, result=result)


def _with_verdict(one: Judged, t_p: float | None, sign_flip_p: float | None, alpha: float) -> Judged:
    result = one.result
    if result is None:
        return one
    t_p = result.t_p if t_p is None else t_p
    sign_flip_p = result.sign_flip_p if sign_flip_p is None else sign_flip_p
    if result.num_pairs < LEAST_PAIRS:
        verdict = Verdict.INCONCLUSIVE
    elif result.tost_p <= alpha:
        verdict = Verdict.EQUIVALENT
    elif t_p <= alpha and sign_flip_p <= alpha:
        verdict = Verdict.DIFFERENCE
    else:
        verdict = Verdict.INCONCLUSIVE
    return replace(
        one,
        t_p=t_p,
        sign_flip_p=sign_flip_p,
        verdict=verdict,
    )
