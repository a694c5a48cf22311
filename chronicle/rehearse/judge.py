"""What differs between an undisturbed launch and one that was killed and resumed.

A and A′ are the same launch twice: what differs between them is not deterministic by nature, and is nobody's fault. B was ended
at step k and resumed. A difference between A and B counts where it is larger than A and A′ differ anyway.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any

from chronicle.prints.compared import PARTS, PrintDifference, compare_prints
from chronicle.rehearse.leaves import LeafForm, Value
from chronicle.resume.ring import Print
from rollback.channels import Role, role_of

SPREAD = 10.0  # times the difference of A and A′ that one of A and B may have
VARIES = 0.01  # relative difference of A and A′ from which a logged value is a measurement (seconds, speed), and no result
SHOWN = 3  # names of one group
NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")  # keys of lists
GENERATOR_BYTES = 5056  # of torch.get_rng_state(), since torch 1.0

Series = Mapping[int, Mapping[str, float]]  # by step: channel -> value
Printed = Mapping[int, Mapping[int, Print]]  # rank -> step -> print
Gap = Callable[[Value, Value], float]


class Verdict(StrEnum):
    """What a rehearsal says."""

    EXACT = "resumes exactly"
    WITHIN = "resumes as equal as two undisturbed launches are"
    PARTLY = "differs in nothing that was compared, and not everything could be"
    DIFFERS = "does not resume exactly"
    NOT_DONE = "could not be told"
    SAVES = "saves when the signal comes"
    LOST = "does not save when the signal comes"
    DATA = "reads the same batches after the resume"


class Rank(IntEnum):
    """The order in which findings are told: causes before what follows from them."""

    SIGNAL = -1  # what was not saved when it came
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
    num_leaves: int = 0
    num_values: int = 0  # logged
    num_prints: int = 0  # steps whose batches were compared, where nothing else was asked for
    by_nature: tuple[str, ...] = ()  # names that differ between A and A′
    unsure: tuple[str, ...] = ()  # state and losses that could not be read, or that two undisturbed launches do not share
    must_differ: tuple[str, ...] = ()  # what follows the number of ranks, where the resume has another one


def judge(compared: Compared) -> Verdict:
    """The word for it. Exact needs files that were compared whole, and nothing in them that differs by nature."""
    if compared.findings:
        is_lost = all(one.rank is Rank.SIGNAL for one in compared.findings)
        return Verdict.LOST if is_lost else Verdict.DIFFERS
    if compared.num_prints:
        return Verdict.DATA
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
    must_differ: list[str]
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
    ranks: tuple[int, int] = (1, 1),
) -> Files:
    """Compare the last checkpoint of A, A′ and B. `saved`: the one that B resumed from. `asked`: options of the resume alone.

    `gap`: the largest difference of two values. `size`: the largest number in one. `steps`: k and 2k.
    `is_shared`: A and A′ train alike; else one pair of values says nothing about how far apart another pair may be.
    `ranks`: of A and of the resume. With another number the files of ranks must differ, and sums are rounded otherwise.
    """
    files = Files(findings=[], by_nature=[], not_compared=[], unsure=[], must_differ=[])
    of_ranks = _files_of_ranks(first, resumed) if ranks[0] != ranks[1] else set()
    moved: dict[str, list[tuple[str, float]]] = defaultdict(list)
    changed: dict[str, list[Finding]] = defaultdict(list)
    varied: set[str] = set()  # lists with a value that is another one in A and A′: so may be its others, which met by chance
    for name in sorted(first.keys() | resumed.keys()):
        if _is_asked(name, asked):
            files.not_compared.append(f"{name}: the resume was asked to set it")
            continue
        one, other, twin = first.get(name), resumed.get(name), again.get(name)
        if _family(name) in of_ranks or (ranks[0] != ranks[1] and _are_counts(one, other, ranks)):
            files.must_differ.append(name)
            continue
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
        if ranks[0] != ranks[1] and math.isfinite(found):
            natural = max(natural, VARIES * size(one) / SPREAD)
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


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name.partition(": ")[0])


def _files_of_ranks(first: Mapping[str, Value], resumed: Mapping[str, Value]) -> set[str]:
    """Names of files, with their numbers left out, of which there are as many as ranks: another number in each launch."""
    counts = [Counter(map(_family, {name.partition(": ")[0] for name in leaves})) for leaves in (first, resumed)]
    return {family for family in counts[0].keys() & counts[1].keys() if counts[0][family] != counts[1][family]}


def _are_counts(one: Value | None, other: Value | None, ranks: tuple[int, int]) -> bool:
    return one is not None and other is not None and (one.value, other.value) == ranks


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


def compare_logs(
    first: Series, again: Series, resumed: Series, steps: tuple[int, int], *, is_resharded: bool = False
) -> Logs:
    """Compare the steps k+1 … 2k, channel by channel; with another number of ranks sums are rounded otherwise."""
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
        if is_resharded:
            spread = max(spread, VARIES / SPREAD * max(map(abs, mine.values()), default=0.0))
        common = [step for step in sorted(mine.keys() & other.keys()) if steps[0] < step <= steps[1]]
        logs.num_values += len(common)
        apart = [step for step in common if _differs(mine[step], other[step], spread)]
        if apart:
            logs.findings.append(_logged(channel, mine, other, apart, len(common), steps[0]))
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
    channel: str, mine: Mapping[int, float], other: Mapping[int, float], apart: Sequence[int], num_common: int, resumed: int
) -> Finding:
    at = apart[0]
    text = f"differs in {len(apart)} of {num_common} steps, first at step {at}: {mine[at]:.8g} → {other[at]:.8g}"
    gone = mine.get(resumed, 0.0)
    if gone and all(math.isclose(mine[step] - other[step], gone, rel_tol=1e-6) for step in apart):
        text += f": it began anew at the resume; it was {gone:.8g} at step {resumed}"
        return Finding(rank=Rank.ANEW, what=channel, text=text)
    rank = Rank.LR if role_of(channel) is Role.LR else Rank.LOGGED
    return Finding(rank=rank, what=channel, text=text)


# --- prints of the guard


ADVICE = {
    "batch": "save and load the position in the data, or skip the batches that were read",
    "torch": "save and load torch's generator states",
    "python": "save and load random.getstate()",
    "numpy": "save and load the state of NumPy's generator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prints:
    """What was found in the prints of the guard."""

    findings: tuple[Finding, ...] = ()
    by_nature: tuple[str, ...] = ()  # parts of a step that differ between A and A′
    idle: tuple[str, ...] = ()  # generators that stand elsewhere after the resume, with no effect in these steps


def judge_prints(first: Printed, again: Printed, resumed: Printed, steps: tuple[int, int]) -> Prints:
    """The first step whose print differs, and in what. A part in which A and A′ differ says nothing."""
    natural = _parts_apart(first, again)
    mine, other = _without(first, natural), _without(resumed, natural)
    found = compare_prints(mine, other, start=steps[0], until=steps[1], begins={})
    words = tuple(PARTS[part][1] for part in natural)
    if found.first is None:
        return Prints(by_nature=words, idle=tuple(PARTS[part][1] for part in found.unrestored))
    causes = [part for part in found.first.parts if part in ADVICE] or [found.first.parts[0]]
    findings = tuple(_print_finding(part, found.first, mine) for part in causes)
    return Prints(findings=findings, by_nature=words)


def _parts_apart(first: Printed, again: Printed) -> list[str]:
    pairs = [(one, again.get(rank, {}).get(step)) for rank, rows in first.items() for step, one in rows.items()]
    known = [(one, twin) for one, twin in pairs if twin is not None]
    return [part for part in PARTS if any(_is_apart(part, one, twin) for one, twin in known)]


def _is_apart(part: str, one: Print, twin: Print) -> bool:
    needed = PARTS[part][0]
    if needed not in one.seen & twin.seen:
        return False
    return bool(getattr(one, part) != getattr(twin, part))


def _without(prints: Printed, parts: Sequence[str]) -> dict[int, dict[int, Print]]:
    blank: dict[str, Any] = dict.fromkeys(parts, 0)
    return {rank: {step: replace(one, **blank) for step, one in rows.items()} for rank, rows in prints.items()}


def _print_finding(part: str, found: PrintDifference, first: Printed) -> Finding:
    where = f"step {found.step}"
    if len(first) > 1:
        where += f" of rank {found.ranks[0]}"
    text = f"differs from {where} on, first in the {PARTS[part][1]}"
    if part != "batch":
        return Finding(rank=Rank.PRINT, what=part, text=text, advice=ADVICE.get(part, ""))
    seen = [step for step, one in sorted(first[found.ranks[0]].items()) if one.batch == found.other.batch]
    if seen and seen[0] < found.step:
        text = f"the batch of {where} is the batch of step {seen[0]} of the undisturbed launch"
        text += ": the data begin again" if seen[0] == 1 else ""
    return Finding(rank=Rank.DATA, what=part, text=text, advice=ADVICE[part])
