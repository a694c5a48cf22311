"""Verdicts on paired differences (difference, equivalent, inconclusive), and their sentences. Pure.

A difference is claimed only where the paired t test and the exact sign-flip test agree (after Holm in the main family),
equivalence only where TOST passes at the registered margin, neither below four pairs. Where both hold, the difference is
real but smaller than the margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from experiments.definition import Study
from experiments.gates import find_treatment
from experiments.outcomes import PRIMARY, StudyData, outcome_of
from experiments.statistics import (
    PairedResult,
    adjust_holm,
    compare_paired,
    num_seeds_for_difference,
    num_seeds_for_equivalence,
)

__all__ = [
    "LEAST_PAIRS",
    "PRIMARY",
    "EffectVerdict",
    "Judged",
    "Question",
    "answer",
    "answer_questions",
    "describe_errors",
    "format_bpb",
    "judge",
    "judge_contrasts",
    "judge_factorial",
    "judge_runs",
    "limits",
    "paired_differences",
    "what_would_settle",
]

ALPHA = 0.05
LEAST_PAIRS = 4  # below that a t interval rests on the assumption of normality alone: no verdict, only numbers


class EffectVerdict(StrEnum):
    """The verdict on a contrast."""

    DIFFERENCE = "difference"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested"  # fewer than two paired seeds


class Question(NamedTuple):
    """The question on one set of paired differences."""

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
    verdict: EffectVerdict = EffectVerdict.NOT_TESTED
    by_mean: EffectVerdict = EffectVerdict.NOT_TESTED
    by_ranks: EffectVerdict | None = None  # of the robust estimate; None where the study did not register it
    rank_p: float | None = None
    unit: str = "bits per byte"


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
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha, unit=study.unit, robust=study.robust)


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
    return judge(asked, margin=study.margin_bpb, alpha=study.alpha, unit=study.unit, robust=study.robust)


def judge(
    asked: Sequence[tuple[Question, Mapping[int, float]]], *, margin: float, alpha: float, unit: str = "bits per byte",
    robust: bool = False,
) -> tuple[Judged, ...]:  # fmt: skip
    """Return a verdict on the paired differences (by seed) of each question; the family `main` is adjusted together.

    With `robust` a verdict is what the mean and the robust estimate both say; where they part it is inconclusive.
    """
    judged = [replace(_compare(question, differences, margin, alpha), unit=unit) for question, differences in asked]
    main = [(one.name, one.result) for one in judged if one.family == "main" and one.result is not None]
    names = [name for name, _ in main]
    t_ps = dict(zip(names, adjust_holm([result.t_p for _, result in main]), strict=True))
    flips = dict(zip(names, adjust_holm([result.sign_flip_p for _, result in main]), strict=True))
    judged = [_with_verdict(one, t_ps.get(one.name), flips.get(one.name), alpha) for one in judged]
    if not robust:
        return tuple(judged)
    ranks = dict(zip(names, adjust_holm([result.ranks.p for _, result in main]), strict=True))
    return tuple(_with_ranks(one, ranks.get(one.name), margin, alpha) for one in judged)


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
        verdict = EffectVerdict.INCONCLUSIVE
    elif result.tost_p <= alpha:
        verdict = EffectVerdict.EQUIVALENT
    elif t_p <= alpha and sign_flip_p <= alpha:
        verdict = EffectVerdict.DIFFERENCE
    else:
        verdict = EffectVerdict.INCONCLUSIVE
    return replace(
        one,
        t_p=t_p,
        sign_flip_p=sign_flip_p,
        verdict=verdict,
        by_mean=verdict,
    )


def _with_ranks(one: Judged, rank_p: float | None, margin: float, alpha: float) -> Judged:
    if one.result is None:
        return one
    ranks = one.result.ranks
    rank_p = ranks.p if rank_p is None else rank_p
    said = EffectVerdict.INCONCLUSIVE
    if one.result.num_pairs >= LEAST_PAIRS and max(-ranks.inner.low, ranks.inner.high) < margin:
        said = EffectVerdict.EQUIVALENT
    elif one.result.num_pairs >= LEAST_PAIRS and rank_p <= alpha:
        said = EffectVerdict.DIFFERENCE
    return replace(one, by_ranks=said, rank_p=rank_p, verdict=said if said is one.by_mean else EffectVerdict.INCONCLUSIVE)


def _beside_mean(one: Judged) -> str:
    """The robust estimate as the end of a sentence; empty where the study did not register it."""
    if one.result is None or one.by_ranks is None:
        return ""
    ranks = one.result.ranks
    told = (f"; robust (median of pairwise means) {format_bpb(ranks.estimate)}, {format_bpb(ranks.interval.low)} to "
            f"{format_bpb(ranks.interval.high)}, signed-rank {format_p(one.rank_p)}")  # fmt: skip
    parted = f"; **the mean alone says {one.by_mean}, the robust estimate {one.by_ranks}: no claim is made**"
    return told + parted * (one.by_ranks is not one.by_mean)


def judge_runs(arms: tuple[str, str], differences: Mapping[int, float], margin: float) -> tuple[str, dict[str, Any]]:
    """What `chronicle compare` says of two arms of runs: the second minus the first at equal seeds, as words and as values."""
    asked = Question("second − first", f"{arms[1]} − {arms[0]}", "", "compare")
    (one,) = judge([(asked, differences)], margin=margin, alpha=ALPHA)
    r = one.result
    if r is None:
        return f"not tested: {_one_seed(one)}, two are the least", {"verdict": one.verdict.value}
    smaller = one.verdict is EffectVerdict.EQUIVALENT and _is_real(one, ALPHA)
    verdict = f"{one.verdict.value}{', though the difference is real' * smaller}"
    numbers = {
        "mean": r.mean, "low": r.interval.low, "high": r.interval.high, "pairs": r.num_pairs, "margin": margin,
        "t_p": r.t_p, "sign_flip_p": r.sign_flip_p, "tost_p": r.tost_p,
    }  # fmt: skip
    said = (
        f"{verdict}: {one.formula} = {format_bpb(r.mean)}, 95 % interval {_interval(one)}, {r.num_pairs} seeds; "
        f"paired t {format_p(r.t_p)}, sign-flip {format_p(r.sign_flip_p)}, within ±{margin:g} (TOST) {format_p(r.tost_p)}"
    )
    return f"{said}. {what_would_settle(one, margin, ALPHA)}".rstrip(), {"verdict": one.verdict.value, **numbers}


# --- Verdicts as sentences


def format_bpb(value: float) -> str:
    """Signed, four decimals."""
    return f"{value:+.4f}"


def format_p(p: float | None) -> str:
    """`p = 0.012`, `p < 0.001`."""
    return "p unknown" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def answer(one: Judged, margin: float, alpha: float) -> str:
    """Return one contrast in words: the question, the verdict, the numbers, and how many seeds would settle it."""
    if one.result is None:
        return f"**{one.question}** Not tested: {len(one.differences)} paired seed{'s' * (len(one.differences) != 1)} " \
               f"({_one_seed(one)}), two are the least."  # fmt: skip
    r = one.result
    adjusted = " (Holm-adjusted over the main contrasts)" if one.family == "main" else ""
    numbers = (
        f"{one.formula} = {format_bpb(r.mean)}, 95 % interval {_interval(one)}, n = {r.num_pairs}, "
        f"sd of the differences {r.sd:.4f}, smallest detectable difference {r.smallest_detectable:.4f}; "
        f"paired t {format_p(one.t_p)}, sign-flip {format_p(one.sign_flip_p)}{adjusted}, "
        f"equivalence (TOST at ±{margin:g}) {format_p(r.tost_p)}{_beside_mean(one)}"
    )
    return f"**{one.question}** {_verdict(one, margin, alpha)} {numbers}. {what_would_settle(one, margin, alpha)}".rstrip()


def _verdict(one: Judged, margin: float, alpha: float) -> str:
    assert one.result is not None
    if one.verdict is EffectVerdict.DIFFERENCE:
        return f"**Difference**: {_direction(one)}."
    if one.verdict is EffectVerdict.EQUIVALENT:
        if _is_real(one, alpha):
            return f"**Equivalent**: a real difference, but smaller than the margin of {margin:g}."
        return f"**Equivalent** within the margin of {margin:g}."
    inside = one.result.interval.low > -margin and one.result.interval.high < margin
    return "**Inconclusive**" + (", though the interval lies inside the margin." if inside else ".")


def _is_real(one: Judged, alpha: float) -> bool:
    """Whether both tests claim a difference, however small."""
    return one.t_p is not None and one.sign_flip_p is not None and max(one.t_p, one.sign_flip_p) <= alpha


def _direction(one: Judged) -> str:
    assert one.result is not None
    plus, _, minus = one.formula.partition(" − ")
    word = "worse" if one.result.mean > 0 else "better"
    if one.family == "factorial":
        return f"{abs(one.result.mean):.4f} {one.unit} {word}"
    return f"{plus} ends {abs(one.result.mean):.4f} {one.unit} {word} than {minus}"


def _interval(one: Judged) -> str:
    assert one.result is not None
    return f"{format_bpb(one.result.interval.low)} to {format_bpb(one.result.interval.high)}"


def what_would_settle(one: Judged, margin: float, alpha: float) -> str:
    """Return how many seeds would settle an inconclusive contrast; empty where it is settled."""
    if one.verdict is not EffectVerdict.INCONCLUSIVE or one.result is None:
        return ""
    if not any(one.differences):
        return f"The two are equal to the last digit in every pair; a verdict needs {LEAST_PAIRS} pairs."
    parts, r = [], one.result
    equal = num_seeds_for_equivalence(margin, r.sd, alpha=alpha)
    if equal and equal > r.num_pairs:
        parts.append(f"{equal} seeds would show equivalence within ±{margin:g} if there is no difference")
    if observed := num_seeds_for_equivalence(margin, r.sd, delta=r.mean, alpha=alpha):
        parts.append(f"{observed} seeds would show equivalence within ±{margin:g} if the truth is the observed difference")
    if different := num_seeds_for_difference(r.mean, r.sd, alpha=alpha):
        parts.append(f"{different} seeds would show a difference of the observed size if that is the truth")
    else:
        parts.append("no practicable number of seeds would show a difference as small as the observed one")
    floor = ""
    if r.num_pairs < LEAST_PAIRS:
        floor = f" (below {LEAST_PAIRS} pairs no verdict is given, below six no difference can be claimed)"
    elif r.num_pairs < 6:
        floor = " (below six pairs the sign-flip test cannot fall under 5 %)"
    return "What would settle it, with 80 % power: " + "; ".join(parts) + floor + "."


def answer_questions(study: Study, judged: Sequence[Judged]) -> list[tuple[str, str]]:
    """Return the questions of the study with their answers; a study without questions gets its main contrasts."""
    by_name = {one.name: one for one in judged}
    asked = [(one.name, one.by, one.cannot) for one in study.answers]
    asked = asked or [(one.question or one.name, (one.name,), "") for one in study.contrasts if one.family == "main"]
    told = []
    for question, names, cannot in asked:
        found = [by_name[name] for name in names if name in by_name]
        if found:
            beside = "; ".join(f"{one.name} ({one.formula}) {_short(one)}" for one in found[1:])
            said = _plainly(found[0], study.margin_bpb, study.alpha)
            said += f" Beside it: {beside}." if beside else ""
            told.append((question, said + (f" What this cannot say: {cannot}" if cannot else "")))
    return told


def describe_errors(study: Study, judged: Sequence[Judged]) -> str:
    """Return the sentence that says which claims share an error of 5 % and which do not."""
    main = [one.name for one in judged if one.family == "main"]
    rest = f"every contrast, and every equivalence, is judged at {study.alpha:.0%} by itself."
    if not main:
        return rest.capitalize()
    shared = f"The main contrasts ({', '.join(main)}) share one error of {study.alpha:.0%} for differences (Holm)"
    return f"{shared}; {rest.replace('every contrast', 'every other contrast')}"


def _plainly(one: Judged, margin: float, alpha: float) -> str:
    if one.result is None:
        return f"Not tested: {_one_seed(one)}."
    where = f"95 % interval {_interval(one)}, n = {one.result.num_pairs}"
    if one.verdict is EffectVerdict.DIFFERENCE:
        return f"An effect: {_direction(one)} ({where})."
    missed = " An effect that must be there was not seen: where this study sees nothing, that means little."
    weak = " It was seen, but it is small: that a larger effect would be seen, this control does not show by itself."
    rest = missed if one.family == "control" else ""
    if one.verdict is EffectVerdict.EQUIVALENT and _is_real(one, alpha):
        rest = weak if one.family == "control" else ""
        return f"An effect, but smaller than {margin:g} {one.unit}: {_direction(one)} ({where}).{rest}"
    if one.verdict is EffectVerdict.EQUIVALENT:
        return f"No effect as large as {margin:g} {one.unit}: {one.formula} = {format_bpb(one.result.mean)} ({where}).{rest}"
    settle = what_would_settle(one, margin, alpha)
    return f"Not settled: {one.formula} = {format_bpb(one.result.mean)} ({where}). {settle}{rest}"


def _short(one: Judged) -> str:
    if one.result is None:
        return f"{one.verdict}, {_one_seed(one)}"
    interval = one.result.interval
    return f"{one.verdict}, {format_bpb(one.result.mean)} [{format_bpb(interval.low)}, {format_bpb(interval.high)}]"


def _one_seed(one: Judged) -> str:
    return f"one seed: {format_bpb(one.differences[0])}" if one.differences else "no pair"


def limits(data: StudyData) -> list[str]:
    """Return sentences on what the study does not show."""
    profile, trainer = data.plan.profile, data.plan.study.trainer
    start = data.start.result.final if data.start else {}
    seeds = (
        "Seeds vary the slices and the order of samples. The common checkpoint, its initialisation and the "
        f"held-out text are one, and {len(data.plan.study.arms[0].slices)} neighbouring seeds rotate the same slices: "
        "what is said holds for this checkpoint and this text."
    )
    if profile.starts > 1:
        seeds = (f"{profile.starts} common checkpoints are crossed with {profile.seeds} orders, and the pairs are judged as if "
                 "they were independent: orders that share a checkpoint share its noise.")  # fmt: skip
    if trainer is not None:
        seeds = ("What this trainer does with its seed, and what it reads, is its own affair. What is said holds for "
                 f"{profile.starts} common checkpoint{'s' * (profile.starts > 1)}, this data and this size.")  # fmt: skip
        if profile.starts > 1:
            seeds += (f" The pairs are judged as if they were independent; {profile.seeds} orders are crossed with the "
                      "checkpoints, and pairs that share one share its noise (the table by checkpoint).")
    lines = [
        f"The model is small (d {profile.d_model}, {profile.num_layers} layers, windows of "
        f"{profile.window_bytes} bytes) and at "
        f"{start.get('averaged/mixture', float('nan')):.2f} bits per byte at the common checkpoint. What holds "
        f"here need not hold for "
        "9 or 80 billion parameters; what this shows is whether the design can tell the explanations apart, and how large an "
        "effect it would have seen.",
        f"A slice is {profile.slice_updates} updates, the original's about 1,500: effects that need longer are out of sight.",
        seeds,
        "Moments, weights and RNG are restored exactly in every arm that does not lose them on purpose: world "
        "size, precision of the "
        "saved weights and hardware do not change at a restart here.",
    ]
    if trainer is not None:
        lines = [*lines[1:3], "Exactness is shown where the gate's arms agree to the bit; what the guard said is in the runs."]
    single = [arm for arm in data.arms if len(data.seeds(arm)) == 1 and max(len(data.seeds(a)) for a in data.arms) > 1]
    if single:
        lines.append(f"One seed only, so no inference on lasting effects: {', '.join(single)}.")
    same = [arm for arm in single if _same_data(data, arm)]
    if same:
        lines.append(f"Read on identical batches, so that a transient needs no second seed to be seen: {', '.join(same)}.")
    if data.stopped:
        lines.append(
            "Stopped, not in the numbers: " + "; ".join(f"{run}: {why}" for run, why in data.stopped.items()) + "."
        )
    if data.open:
        lines.append("Not run yet: " + ", ".join(data.open) + ".")
    return lines


def _same_data(data: StudyData, arm: str) -> bool:
    return find_treatment(data.plan, data.plan.study.arm(arm), data.of_arm(arm)[0].run.legs).data_after is None
