"""What differs between an undisturbed launch and one that was killed and resumed.

A and A′ are the same launch twice: what differs between them is not deterministic by nature, and is nobody's fault. B was ended
at step k and resumed. A difference between A and B counts where it is larger than A and A′ differ anyway.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

from chronicle.rehearse.leaves import LeafForm, Value
from rollback.channels import Role, role_of

SPREAD = 10.0  # times the difference of A and A′ that one of A and B may have
VARIES = 0.01  # relative difference of A and A′ from which a logged value is a measurement (seconds, speed), and no result
SHOWN = 3  # names of one group
NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")  # keys of lists
GENERATOR_BYTES = 5056  # of torch.get_rng_state(), since torch 1.0

Series = Mapping[int, Mapping[str, float]]  # by step: channel -> value
Gap = Callable[[Value, Value], float]


class Verdict(StrEnum):
    """What a rehearsal says."""

    EXACT = "resumes exactly"
    WITHIN = "resumes as equal as two undisturbed launches are"
    PARTLY = "differs in nothing that was compared, and not everything could be"
    DIFFERS = "does not resume exactly"
    NOT_DONE = "could not be told"


class Rank(IntEnum):
    """The order in which findings are told: causes before what follows from them."""

    START = 0  # where the resumed launch began
    DATA = 1
    LR = 2
    ANEW = 3  # a counter that began anew
    PRINT = 4  # the first step that differs, by the prints of the guard
    STATE = 5  # a flag, a number, a text, a leaf that is not there
    TENSORS = 6
    LOGGED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference, in words."""

    rank: Rank
    what: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was compared, what differs, and what could not be compared."""

    findings: tuple[Finding, ...]
    not_compared: tuple[str, ...]
    num_leaves: int
    num_values: int  # logged
    by_nature: tuple[str, ...]  # names that differ between A and A′
    unsure: tuple[str, ...] = ()  # state and losses that could not be read, or that two undisturbed launches do not share


def judge(compared: Compared) -> Verdict:
    """The word for it. Exact needs files that were compared whole, and nothing in them that differs by nature."""
    if compared.findings:
        return Verdict.DIFFERS
    if not compared.num_leaves:
        return Verdict.NOT_DONE
    if compared.unsure:
        return Verdict.PARTLY
    return Verdict.WITHIN if compared.by_nature else Verdict.EXACT


# --- values in files


@dataclass(slots=True)
class Files:
    """What was found in the files of the last checkpoint."""

    findings: list[Finding]
    by_nature: list[str]
    not_compared: list[str]
    unsure: list[str]
    num_leaves: int = 0


def compare_files(
    first: Mapping[str, Value],
    again: Mapping[str, Value],
    resumed: Mapping[str, Value],
    saved: Mapping[str, Value],
    *,
    gap: Gap,
    size: Callable[[Value], float],
    is_shared: bool = True,
    asked: Sequence[str],
    steps: tuple[int, int],
) -> Files:
    """Compare the last checkpoint of A, A′ and B. `saved`: the one that B resumed from. `asked`: options of the resume alone.

    `gap`: the largest difference of two values. `size`: the largest number in one. `steps`: k and 2k.
    `is_shared`: A and A′ train alike; else one pair of values says nothing about how far apart another pair may be.
    """
    files = Files(findings=[], by_nature=[], not_compared=[], unsure=[])
    moved: dict[str, list[tuple[str, float]]] = defaultdict(list)
    changed: dict[str, list[Finding]] = defaultdict(list)
    varied: set[str] = set()  # lists with a value that is another one in A and A′: so may be its others, which met by chance
    for name in sorted(first.keys() | resumed.keys()):
        if _is_asked(name, asked):
            files.not_compared.append(f"{name}: the resume was asked to set it")
            continue
        one, other, twin = first.get(name), resumed.get(name), again.get(name)
        if one is None or other is None:
            if (name in again) is (name in first):
                changed[NUMBERS.sub("*", name)].append(_missing(name, one is None))
            else:
                files.by_nature.append(name)
            continue
        if LeafForm.UNREAD in (one.form, other.form):
            files.not_compared.append(f"{name}: {one.value if one.form is LeafForm.UNREAD else other.value}")
            files.unsure.append(name)
            continue
        natural = math.inf if twin is None else gap(one, twin)
        if natural > 0:
            files.by_nature.append(name)
        if natural > 0 and (not is_shared or natural > VARIES * size(one)):  # a lost state would not show
            varied.add(NUMBERS.sub("*", name))
            if one.form is LeafForm.TENSOR:
                files.unsure.append(name)
            continue
        files.num_leaves += 1
        found = gap(one, other)
        if found == 0 or found <= SPREAD * natural:
            continue
        if one.form is LeafForm.TENSOR and math.isinf(found):
            files.findings.append(_other_tensor(name, one))
        elif one.form is LeafForm.TENSOR:
            moved[_group_of(name)].append((name, found))
        else:
            changed[NUMBERS.sub("*", name)].append(_changed(name, one, other, saved.get(name), steps))
    files.findings += [_first_of(alike, pattern) for pattern, alike in changed.items() if pattern not in varied]
    files.findings += [_tensors(group, names) for group, names in moved.items()]
    return files


def _is_asked(name: str, asked: Sequence[str]) -> bool:
    last = name.rpartition(": ")[2].rpartition(".")[2]
    return last in asked


def _missing(name: str, is_new: bool) -> Finding:
    text = "is only in the checkpoint of the resumed launch" if is_new else "is not in the checkpoint of the resumed launch"
    return Finding(rank=Rank.STATE, what=name, text=text)


def _changed(name: str, one: Value, other: Value, saved: Value | None, steps: tuple[int, int]) -> Finding:
    if one.form is LeafForm.BYTES or other.form is not one.form:
        return Finding(rank=Rank.STATE, what=name, text=f"other {other.form.value} than in the undisturbed launch")
    text = f"{_word(one)} → {_word(other)}"
    if one.form is not LeafForm.NUMBER or saved is None or saved.form is not LeafForm.NUMBER:
        return Finding(rank=Rank.STATE, what=name, text=text)
    undisturbed, resumed, at_save = float(one.value), float(other.value), float(saved.value)
    if math.isclose(undisturbed - resumed, at_save) and at_save:
        text += f": it began anew at the resume; the checkpoint of step {steps[0]} holds {_word(saved)}, and it was not loaded"
        return Finding(rank=Rank.ANEW, what=name, text=text)
    return Finding(rank=Rank.STATE, what=name, text=text)


def _first_of(alike: Sequence[Finding], pattern: str) -> Finding:
    """Values of one list or table, such as the history of a log, are one finding."""
    first = alike[0]
    if len(alike) == 1:
        return first
    return replace(first, what=pattern, text=f"{len(alike)} values differ, first `{first.what}`: {first.text}")


def _other_tensor(name: str, one: Value) -> Finding:
    """A tensor of whole numbers, or of another shape: no arithmetic tells how far apart the two are."""
    place = one.place
    if place is not None and place.dtype == "uint8" and place.num_bytes == GENERATOR_BYTES:
        text = "the state of torch's generator: other random numbers are drawn after the resume"
        return Finding(rank=Rank.STATE, what=name, text=text, advice=ADVICE["torch"])
    what = "other values" if place is None else f"other values ({place.dtype}, {list(place.shape)})"
    return Finding(rank=Rank.STATE, what=name, text=what)


def _word(value: Value) -> str:
    if value.form is LeafForm.NUMBER:
        return f"{float(value.value):.10g}"
    text = str(value.value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _group_of(name: str) -> str:
    """The part of a checkpoint that a tensor belongs to: its file, or the first key of a single file."""
    file, colon, _ = name.partition(": ")
    return file if colon else name.partition(".")[0]


def _tensors(group: str, names: Sequence[tuple[str, float]]) -> Finding:
    ranked = sorted(names, key=lambda one: -one[1])
    shown = ", ".join(f"`{name.partition(': ')[2] or name}`" for name, _ in ranked[:SHOWN])
    more = f", and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    finite = [found for _, found in ranked if math.isfinite(found)]
    largest = f"; largest difference {max(finite):.2g}" if finite else ""
    plural = "tensor differs" if len(ranked) == 1 else "tensors differ"
    return Finding(rank=Rank.TENSORS, what=group, text=f"{len(ranked)} {plural}: {shown}{more}{largest}")


# --- logged values


@dataclass(slots=True)
class Logs:
    """What was found in the logged values."""

    findings: list[Finding]
    by_nature: list[str]
    measured: list[str]  # seconds, speed: other numbers in every launch
    unsure: list[str]  # losses that are
    num_values: int = 0


def compare_logs(first: Series, again: Series, resumed: Series, steps: tuple[int, int]) -> Logs:
    """Compare the steps k+1 … 2k, channel by channel."""
    logs = Logs(findings=[], by_nature=[], measured=[], unsure=[])
    channels = sorted({name for values in first.values() for name in values})
    spreads = {channel: _spread(_column(first, channel), _column(again, channel)) for channel in channels}
    logs.unsure += [channel for channel in channels if role_of(channel) is Role.LOSS and spreads[channel][1] > VARIES]
    for channel in channels:
        mine, other = _column(first, channel), _column(resumed, channel)
        spread, relative = spreads[channel]
        if relative > VARIES or (spread > 0 and logs.unsure):
            logs.measured.append(channel)
            continue
        if spread > 0:
            logs.by_nature.append(channel)
        common = [step for step in sorted(mine.keys() & other.keys()) if steps[0] < step <= steps[1]]
        logs.num_values += len(common)
        apart = [step for step in common if _differs(mine[step], other[step], spread)]
        if apart:
            logs.findings.append(_logged(channel, mine, other, apart, len(common)))
    return logs


def _column(series: Series, channel: str) -> dict[int, float]:
    return {step: values[channel] for step, values in series.items() if channel in values}


def _spread(mine: Mapping[int, float], twin: Mapping[int, float]) -> tuple[float, float]:
    """The largest |a − b| of two launches at one step, and its share of the largest value."""
    spread = max((abs(mine[step] - twin[step]) for step in mine.keys() & twin.keys()), default=0.0)
    scale = max((abs(value) for value in mine.values()), default=0.0)
    return spread, spread / scale if scale else 0.0


def _differs(one: float, other: float, spread: float) -> bool:
    if math.isnan(one) and math.isnan(other):
        return False
    return not abs(one - other) <= SPREAD * spread


def _logged(
    channel: str, mine: Mapping[int, float], other: Mapping[int, float], apart: Sequence[int], num_common: int
) -> Finding:
    at = apart[0]
    text = f"differs in {len(apart)} of {num_common} steps, first at step {at}: {mine[at]:.8g} → {other[at]:.8g}"
    rank = Rank.LR if role_of(channel) is Role.LR else Rank.LOGGED
    return Finding(rank=rank, what=channel, text=text)


# --- prints of the guard


PARTS = (
    ("batch", "the batch"),
    ("options", "the options of the optimizer (LR, decay, betas)"),
    ("torch", "torch's random generators"),
    ("python", "Python's random generator"),
    ("numpy", "NumPy's random generator"),
    ("gradient", "the gradient"),
    ("weights", "the weights"),
)
ADVICE = {
    "batch": "save and load the position in the data, or skip the batches that were read",
    "torch": "save and load torch's generator states",
    "python": "save and load random.getstate()",
    "numpy": "save and load the state of NumPy's generator",
}


def compare_prints(
    first: Mapping[int, Mapping[int, object]],
    again: Mapping[int, Mapping[int, object]],
    resumed: Mapping[int, Mapping[int, object]],
    steps: tuple[int, int],
) -> Iterator[Finding]:
    """By rank: the first step whose print differs, and in what. A part that A and A′ differ in says nothing."""
    for rank in sorted(first.keys() & resumed.keys()):
        mine, twin, other = first[rank], again.get(rank, {}), resumed[rank]
        for step in sorted(mine.keys() & other.keys()):
            if not steps[0] < step <= steps[1]:
                continue
            parts = [name for name, _ in PARTS if _part_differs(name, mine[step], twin.get(step), other[step])]
            if parts:
                yield _print_finding(rank, step, parts, mine, other[step], several=len(first) > 1)
                break


def _part_differs(name: str, one: object, twin: object | None, other: object) -> bool:
    mine, theirs = getattr(one, name), getattr(other, name)
    if not mine or not theirs or mine == theirs:
        return False  # what was not seen is 0
    return twin is None or getattr(twin, name) == mine


def _print_finding(
    rank: int, step: int, parts: Sequence[str], mine: Mapping[int, object], other: object, *, several: bool
) -> Finding:
    words = dict(PARTS)
    where = f"step {step} of rank {rank}" if several else f"step {step}"
    text = f"differs from {where} on, first in {words[parts[0]]}"
    kind = Rank.PRINT
    if parts[0] == "batch":
        kind = Rank.DATA
        seen = [at for at, one in sorted(mine.items()) if getattr(one, "batch", 0) == getattr(other, "batch", None)]
        if seen and seen[0] < step:
            text = f"the batch of {where} is the batch of step {seen[0]} of the undisturbed launch"
            text += ": the data begin again" if seen[0] == 1 else ""
    return Finding(rank=kind, what=parts[0], text=text, advice=ADVICE.get(parts[0], ""))
