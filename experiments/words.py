"""A study's answers as sentences. Pure text; numbers in bits per byte, held-out, averaged weights."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.outcomes import StudyData
from experiments.verdicts import LEAST_PAIRS, Judged, Verdict

__all__ = ["answer", "answer_for_the_seed", "format_bpb", "limits", "what_would_settle"]


def format_bpb(value: float) -> str:
    """Signed, four decimals."""
    return f"{value:+.4f}"


def format_p(p: float | None) -> str:
    """`p = 0.012`, `p < 0.001`."""
    return "p unknown" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def answer(one: Judged, margin: float) -> str:
    """One contrast in words: the question, the numbers, the verdict, and what would settle it."""
    if one.result is None:
        return f"**{one.question}** Not tested: {len(one.differences)} paired seed{'s' * (len(one.differences) != 1)} " \
               f"({_one_seed(one)}), two are the least."  # fmt: skip
    r = one.result
    numbers = (
        f"{one.formula} = {format_bpb(r.mean)}, 95 % interval {format_bpb(r.interval.low)} to {format_bpb(r.interval.high)}, "
        f"n = {r.num_pairs}, sd of the differences {r.sd:.4f}, smallest detectable difference {r.smallest_detectable:.4f}; "
        f"paired t {format_p(one.t_p)}, sign-flip {format_p(one.sign_flip_p)}, "
        f"equivalence (TOST at ±{margin:g}) {format_p(r.tost_p)}"
    )
    adjusted = " (Holm-adjusted over the main contrasts)" if one.family == "main" else ""
    return f"**{one.question}** {_verdict(one, margin)} {numbers}{adjusted}. {what_would_settle(one, margin)}".rstrip()


def _verdict(one: Judged, margin: float) -> str:
    assert one.result is not None
    direction = "worse" if one.result.mean > 0 else "better"
    if one.verdict is Verdict.DIFFERENCE:
        return f"**Difference**: the first arm ends {direction}."
    if one.verdict is Verdict.EQUIVALENT:
        if not one.result.interval.contains(0.0):
            return f"**Equivalent**: a real difference, but smaller than the margin of {margin:g}."
        return f"**Equivalent** within the margin of {margin:g}."
    inside = one.result.interval.low > -margin and one.result.interval.high < margin
    return "**Inconclusive**" + (", though the interval lies inside the margin." if inside else ".")


def what_would_settle(one: Judged, margin: float) -> str:
    """How many seeds would settle an inconclusive contrast; empty where it is settled."""
    if one.verdict is not Verdict.INCONCLUSIVE or one.result is None:
        return ""
    parts = []
    if one.seeds_for_equivalence:
        parts.append(
            f"{one.seeds_for_equivalence} seeds would show equivalence within ±{margin:g} if there is no difference"
        )
    if one.seeds_for_difference:
        parts.append(
            f"{one.seeds_for_difference} seeds would show a difference of the observed size if that is the truth"
        )
    else:
        parts.append("no practicable number of seeds would show a difference as small as the observed one")
    few = one.result.num_pairs
    floor = " (below six pairs the sign-flip test cannot fall under 5 %)" if few < 6 else ""
    floor = (
        f" (below {LEAST_PAIRS} pairs no verdict is given, below six no difference can be claimed)"
        if few < LEAST_PAIRS
        else floor
    )
    return "What would settle it, with 80 % power: " + "; ".join(parts) + floor + "."


def answer_for_the_seed(judged: Sequence[Judged], factorial: Sequence[Judged]) -> list[str]:
    """The three questions of the original experiment, from the contrasts that isolate each."""
    by_name = {one.name: one for one in (*judged, *factorial)}
    lines = []
    for question, names in (
        ("A vs B: is it the simple fact of restarting?", ("a-vs-b", "order", "restart", "restart, main effect")),
        ("B vs C: is it the repetition of data?", ("b-vs-c", "repetition", "repetition, main effect")),
        ("Or neither, or both together?", ("interaction", "restart-on-repeated")),
    ):
        told = [
            f"{one.name} ({one.formula}): {_short(one)}" for name in names if (one := by_name.get(name)) is not None
        ]
        if told:
            lines.append(f"**{question}** " + "; ".join(told) + ".")
    return lines


def _short(one: Judged) -> str:
    if one.result is None:
        return f"{one.verdict}, {_one_seed(one)}"
    interval = one.result.interval
    return f"{one.verdict}, {format_bpb(one.result.mean)} [{format_bpb(interval.low)}, {format_bpb(interval.high)}]"


def _one_seed(one: Judged) -> str:
    return f"one seed: {format_bpb(one.differences[0])}" if one.differences else "no pair"


def limits(data: StudyData) -> list[str]:
    """What the study does not show, from its own facts."""
    profile = data.plan.profile
    start = data.start.result.final if data.start else {}
    lines = [
        f"The model is small (d {profile.d_model}, {profile.num_layers} layers, windows of "
        f"{profile.window_bytes} bytes) and at "
        f"{start.get('averaged/mixture', float('nan')):.2f} bits per byte at the common checkpoint. What holds "
        f"here need not hold for "
        "9 or 80 billion parameters; what this shows is whether the design can tell the explanations apart, and how large an "
        "effect it would have seen.",
        f"A slice is {profile.slice_updates} updates, the original's about 1,500: effects that need longer are out of sight.",
        "Seeds vary the slices and the order of samples; the common checkpoint and its initialisation are one.",
        "Moments, weights and RNG are restored exactly in every arm that does not lose them on purpose: world "
        "size, precision of the "
        "saved weights and hardware do not change at a restart here.",
    ]
    single = [arm for arm in data.arms if len(data.seeds(arm)) == 1]
    if single:
        lines.append(f"One seed only, so no inference on lasting effects: {', '.join(single)}. Their transients "
                     f"are on identical "
                     "batches and need no second seed to be seen.")  # fmt: skip
    if data.stopped:
        lines.append(
            "Stopped, not in the numbers: " + "; ".join(f"{run}: {why}" for run, why in data.stopped.items()) + "."
        )
    if data.open:
        lines.append("Not run yet: " + ", ".join(data.open) + ".")
    return lines
