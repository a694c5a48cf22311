"""What differs between an undisturbed launch and one that was killed and resumed.

A and A′ are the same launch twice: what differs between them is not deterministic by nature, and is nobody's fault. B was ended
at step k and resumed. A value that was logged is a leaf as one in a file is, `loss at step 12`. Leaves of one name but for the
numbers in it are one group: the difference of A and B counts where it is larger than A and A′ differ anywhere in the group.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any

from chronicle.metrics.log import Point
from chronicle.prints.compared import PARTS, PrintDifference, compare_prints, differing_parts
from chronicle.prints.ring import Print
from rollback.channels import Role, role_of
from rollback.checks.leaves import INDEX, LeafForm, Leaves, Value, measure

SPREAD = 10.0  # times the difference of A and A′ that one of A and B may have
VARIES = 0.01  # relative difference of A and A′ from which a value is a measurement (seconds, speed), and no result
AT_STEP = " at step "  # between a channel that was logged and the step
NUMBERS = re.compile(rf"{INDEX.pattern}|(?<={AT_STEP})\d+$")  # keys of lists, steps of logged values

Printed = Mapping[int, Mapping[int, Print]]  # rank -> step -> print


class Verdict(StrEnum):
    """What a rehearsal says."""

    EXACT = "resumes exactly"
    WITHIN = "resumes as equal as two undisturbed launches are"
    PARTLY = "differs in nothing that was compared, and not everything could be"
    DIFFERS = "does not resume exactly"
    NOT_DONE = "could not be told"
    RANKS = "resumes, and differs in what must differ with another number of ranks"
    HELD = "resumes from its first save"
    SAVES = "saves when the signal comes"
    LOST = "does not save when the signal comes"
    DATA = "reads the same batches after the resume"


class Rank(IntEnum):
    """The order in which rows are told: causes before what follows from them, differences before what is none."""

    SIGNAL = -1  # what was not saved when it came
    START = 0  # where the resumed launch began
    DATA = 1
    LR = 2
    ANEW = 3  # a counter that began anew
    PRINT = 4  # the first step that differs, by the prints of the guard
    LOGGED = 5  # of a step, and so before the files of a later one
    STATE = 6  # a flag, a number, a text, a leaf that is not there
    TENSORS = 7
    NOTE = 8  # from here on no difference was found
    NOT_COMPARED = 9
    MUST_DIFFER = 10
    UNSURE = 11  # state and losses that could not be read, or that two undisturbed launches do not share
    NATURE = 12


TITLES: Mapping[Rank, str] = {
    Rank.NOTE: "",
    Rank.NOT_COMPARED: "not compared: ",
    Rank.MUST_DIFFER: "must differ with another number of ranks: ",
    Rank.UNSURE: "not settled (not readable, or another one in each launch: is the script seeded?): ",
    Rank.NATURE: "differs between two undisturbed launches, too: ",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is told, in words."""

    rank: Rank
    what: str
    text: str = ""
    advice: str = ""

    @property
    def sentence(self) -> str:
        """What, and what of it."""
        return f"{self.what}: {self.text}" if self.text else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What was found, and how much was compared."""

    rows: tuple[Row, ...]
    num_leaves: int = 0  # in files
    num_values: int = 0  # logged
    basis: Verdict = Verdict.NOT_DONE  # what is said where nothing differs and no file was compared

    @property
    def findings(self) -> tuple[Row, ...]:
        """The differences, worst first."""
        found = [row for row in self.rows if row.rank < Rank.NOTE]
        return tuple(sorted(found, key=lambda row: (row.rank, row.what)))

    def of(self, rank: Rank) -> tuple[str, ...]:
        """The sentences of one rank."""
        return tuple(row.sentence for row in self.rows if row.rank is rank)


def judge(compared: Compared) -> Verdict:
    """The word for it. Exact needs files that were compared whole."""
    if compared.findings:
        is_lost = all(row.rank is Rank.SIGNAL for row in compared.findings)
        return Verdict.LOST if is_lost else Verdict.DIFFERS
    if not compared.num_leaves:
        return compared.basis
    if compared.of(Rank.UNSURE):
        return Verdict.PARTLY
    if compared.of(Rank.MUST_DIFFER):
        return Verdict.RANKS
    return Verdict.WITHIN if compared.of(Rank.NATURE) else Verdict.EXACT


# --- values in files and in logs


def logged_leaves(points: Iterable[Point], after: int, until: int) -> dict[str, Value]:
    """The values that were logged in the steps after one and up to another, by channel and step."""
    found: dict[str, Value] = {}
    for point in points:
        if after < point.step <= until:
            for channel, value in point.values.items():
                found[f"{channel}{AT_STEP}{point.step}"] = Value(LeafForm.NUMBER, value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The leaves of A, A′ and B, and those of step `step` that B resumed from."""

    first: Leaves
    again: Leaves
    resumed: Leaves
    saved: Leaves
    step: int

    def at_save(self, name: str) -> Value | None:
        """What a leaf was when B was ended; of a logged value as A logged it."""
        channel, logged, _ = name.partition(AT_STEP)
        return self.first.get(f"{channel}{AT_STEP}{self.step}") if logged else self.saved.get(name)

    def spread(self, names: Iterable[str]) -> tuple[float, bool]:
        """How far A and A′ are apart in a group, and whether that is so far that a difference says nothing."""
        gaps, sizes = [], [0.0]
        for name in names:
            one, twin = self.first.get(name), self.again.get(name)
            if one is not None and twin is not None:
                gap, size = measure(one, twin)
                gaps.append(gap)
                sizes.append(size)
        largest = max(gaps, default=math.inf)
        return largest, largest > VARIES * max(sizes)


def compare_values(sides: Sides, asked: Sequence[str] = (), ranks: tuple[int, int] = (1, 1)) -> Compared:
    """Compare all leaves. `asked`: options of the resume alone.

    `ranks`: of A and of the resume. With another number the files of ranks must differ, and sums are rounded otherwise.
    """
    first, resumed = sides.first, sides.resumed
    is_resharded = ranks[0] != ranks[1]
    of_ranks = _files_of_ranks(first, resumed) if is_resharded else set()
    rows: list[Row] = []
    state: set[str] = set()  # groups of tensors and losses
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(first.keys() | resumed.keys()):
        one, other = first.get(name), resumed.get(name)
        if re.split(r"[.:] ?", name)[-1] in asked:
            rows.append(Row(Rank.NOT_COMPARED, name, "the resume was asked to set it"))
        elif _family(name) in of_ranks or (is_resharded and (one and one.value, other and other.value) == ranks):
            rows.append(Row(Rank.MUST_DIFFER, name))
        elif one is not None and one.form is LeafForm.TENSOR:
            groups[name].append(name)
            state.add(name)
        else:
            groups[NUMBERS.sub("*", name)].append(name)
    spreads = {pattern: sides.spread(names) for pattern, names in groups.items()}
    state |= {pattern for pattern in groups if AT_STEP in pattern and role_of(_called(pattern)) is Role.LOSS}
    is_shared = not any(spreads[pattern][1] for pattern in state)
    is_rounded = is_resharded or not is_shared
    is_exact = bool(state) and not any(spreads[pattern][0] for pattern in state)  # then what varies is measured
    tensors: dict[str, dict[str, float]] = defaultdict(dict)
    counts: Counter[bool] = Counter()  # logged or not
    num_rounded = 0
    for pattern, names in groups.items():
        spread, is_wide = spreads[pattern]
        known = [name for name in names if name in first and name in resumed]
        alone = [name for name in names if name not in known and AT_STEP not in name]
        if alone:
            rows.append(_missing(pattern, alone, sides))
        if not known:
            continue
        one, form = first[known[0]], first[known[0]].form
        if LeafForm.UNREAD in (form, resumed[known[0]].form):
            rows.append(Row(Rank.UNSURE, pattern, str(one.value)))
            continue
        if is_wide or (spread > 0 and (is_exact or not is_shared)):  # a lost state would not show
            rows.append(_varies(pattern, is_state=pattern in state or form is LeafForm.DIGEST))
            continue
        if spread > 0:
            rows.append(Row(Rank.NATURE, pattern))
        counts[AT_STEP in pattern] += len(known)
        apart: dict[str, float] = {}
        for name in known:
            gap, size = measure(first[name], resumed[name])
            if gap > max(spread * SPREAD, VARIES * size * is_rounded):
                apart[name] = gap
            elif gap > 0 and is_resharded:
                num_rounded += 1
        if form is LeafForm.TENSOR and math.isfinite(apart.get(pattern, math.inf)):
            tensors[re.split("[.:]", pattern)[0]][pattern] = apart[pattern]  # by file, or first key of a single file
        elif apart:
            rows.append(_changed(pattern, list(apart), len(known), sides))
    if num_rounded:
        rows.append(Row(Rank.MUST_DIFFER, f"{num_rounded} values by less than 1 %: sums are rounded otherwise"))
    for group, moved in tensors.items():
        rows.append(_tensors(group, moved))
    return Compared(rows=tuple(rows), num_leaves=counts[False], num_values=counts[True])


def _varies(pattern: str, *, is_state: bool) -> Row:
    """Bytes whose form nobody knows may hold a time, and state beside it: that they are others tells nothing."""
    if is_state:
        return Row(Rank.UNSURE, _called(pattern))
    if AT_STEP in pattern:
        return Row(Rank.NOT_COMPARED, _called(pattern), "measured anew in each launch")
    return Row(Rank.NATURE, pattern)


def _called(pattern: str) -> str:
    return pattern.removesuffix(f"{AT_STEP}*")


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name.partition(": ")[0])


def _files_of_ranks(first: Leaves, resumed: Leaves) -> set[str]:
    """Names of files, with their numbers left out, of which there are as many as ranks: another number in each launch."""
    files = [{name.partition(": ")[0] for name in leaves if AT_STEP not in name} for leaves in (first, resumed)]
    mine, other = (Counter(map(_family, names)) for names in files)
    return {family for family in mine.keys() & other.keys() if mine[family] != other[family]}


def _missing(pattern: str, alone: Sequence[str], sides: Sides) -> Row:
    """Leaves that only one of A and B has; where A and A′ differ in that, too, it is nobody's fault."""
    is_ours = alone[0] in sides.first
    if is_ours is not (alone[0] in sides.again):
        return Row(Rank.NATURE, pattern)
    what = alone[0] if len(alone) == 1 else pattern
    where = "not" if is_ours else "only"
    return Row(Rank.STATE, what, f"is {where} in the checkpoint of the resumed launch")


def _changed(pattern: str, apart: Sequence[str], num_known: int, sides: Sides) -> Row:
    """Values of one list or table, such as the history of a log, are one row."""
    name = apart[0]
    one, other, at_save = sides.first[name], sides.resumed[name], sides.at_save(name)
    rank = Rank.STATE
    if AT_STEP in name:
        rank = Rank.LR if role_of(_called(pattern)) is Role.LR else Rank.LOGGED
    text = f"{_word(one)} → {_word(other)}"
    if one.form is LeafForm.TENSOR and one.shape is not None:
        text = f"other values ({one.shape[0]}, {list(one.shape[1])})"
    if len(apart) > 1:
        text = f"{len(apart)} of {num_known} values differ, first `{name}`: {text}"
    if at_save is not None and all(_is_anew(sides.first[key], sides.resumed[key], sides.at_save(key)) for key in apart):
        rank, text = Rank.ANEW, f"{text}: it began anew at the resume; at step {sides.step} it was {_word(at_save)}"
    elif rank is Rank.STATE and [name] == list(apart) and other == at_save:
        rank, text = Rank.ANEW, f"{text}: as it was at step {sides.step}; it began anew, or stands still"
    return Row(rank, name if len(apart) == 1 else _called(pattern), text)


def _is_anew(one: Value, other: Value, at_save: Value | None) -> bool:
    """A count of 1 that is one behind may have missed a step as well."""
    if at_save is None or at_save.value in (0, 1) or not one.form is other.form is at_save.form is LeafForm.NUMBER:
        return False
    return math.isclose(float(one.value) - float(other.value), float(at_save.value))


def _word(value: Value) -> str:
    if value.form is LeafForm.NUMBER:
        return repr(value.value).removesuffix(".0")
    return str(value.value)[:60]


def _tensors(group: str, moved: Mapping[str, float]) -> Row:
    most = max(moved, key=moved.__getitem__)
    return Row(Rank.TENSORS, group, f"{len(moved)} of its tensors differ, most `{most}` by {moved[most]:.2g}")


# --- prints of the guard


ADVICE = {
    "batch": "save and load the position in the data, or skip the batches that were read",
    "torch": "save and load torch's generator states",
    "python": "save and load random.getstate()",
    "numpy": "save and load the state of NumPy's generator",
}
MADE_ANEW = "save and load the position in the data, and what a batch is made with: a generator, a count, a stage"


def judge_prints(first: Printed, again: Printed, resumed: Printed, steps: tuple[int, int]) -> Iterator[Row]:
    """The first step whose print differs, and in what. A part in which A and A′ differ says nothing."""
    natural = _parts_apart(first, again)
    mine, other = without(first, natural), without(resumed, natural)
    found = compare_prints(mine, other, start=steps[0], until=steps[1], begins={})
    yield from (Row(Rank.NATURE, PARTS[part][1]) for part in natural)
    if found.first is None:
        idle = "stand elsewhere after the resume, with no effect in these steps"
        yield from (Row(Rank.NOT_COMPARED, f"{PARTS[part][1]} {idle}") for part in found.unrestored)
        return
    causes = [part for part in found.first.parts if part in ADVICE] or [found.first.parts[0]]
    yield from (_of_print(part, found.first, mine) for part in causes)


def _parts_apart(first: Printed, again: Printed) -> list[str]:
    found: set[str] = set()
    for rank, rows in first.items():
        for step, one in rows.items():
            found |= set(differing_parts(one, again.get(rank, {}).get(step, one)))
    return [part for part in PARTS if part in found]


def without(prints: Printed, parts: Sequence[str]) -> dict[int, dict[int, Print]]:
    """The prints, with these parts left out."""
    blank: dict[str, Any] = dict.fromkeys(parts, 0)
    return {rank: {step: replace(one, **blank) for step, one in rows.items()} for rank, rows in prints.items()}


def _of_print(part: str, found: PrintDifference, first: Printed) -> Row:
    text = f"differs first at {found.words}"
    if part != "batch":
        return Row(Rank.PRINT, part, text, ADVICE.get(part, ""))
    seen = [step for step, one in sorted(first[found.ranks[0]].items()) if one.batch == found.other.batch]
    if not seen:
        return Row(Rank.DATA, part, text, MADE_ANEW)
    if seen[0] < found.step:
        text = f"the batch of step {found.step} is the batch of step {seen[0]} of the undisturbed launch"
        text += ": the data begin again" if seen[0] == 1 else ""
    return Row(Rank.DATA, part, text, ADVICE[part])
