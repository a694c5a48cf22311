"""What a printed line says, apart from its numbers: found once for each shape of a line.

A trainer prints one line again and again, with other numbers. The shape of a line is the line with `0` in place of each digit.
A line is taken apart by regular expressions where its shape is new; what that finds is places in the line, and the numbers of
the next line of this shape stand at the same places.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from chronicle.metrics.counters import COUNT, THROUGH, Counter, find_counter
from chronicle.metrics.numbers import NUMBER, number_of_text
from chronicle.metrics.text import PREFIX
from rollback.channels import EVAL_WORDS, HINTS, TELLING, Role, printed_names, role_of

# --- The named numbers: `name: value`, `name=value`, `name -> value`, and `name value` for the names of the table

REPR = r"(?:np\.b?float\d+|(?:tf\.)?tensor|(?:Device)?Array)\("  # what Python prints around the number
VALUE = rf"[\[(]?\s*(?:{REPR})?(?P<value>{NUMBER})(?P<unit>[KMBT](?![A-Za-z]))?(?!\w|\.\w)"
NAMED = re.compile(
    rf"(?<!\w)(?P<name>[A-Za-z_][\w./@()-]*(?: [A-Za-z_(][\w./()-]*){{0,3}})['\"]?\s*(?:[:=]|-{{1,2}}>|=>)\s*{VALUE}",
    re.IGNORECASE,
)
NO_WORDS = r"(?:nan|inf(?:inity)?|none|null|nil|na|skipped)\b"  # the value of the name before
AFTER_COUNT = r"(?:(?<=loss )\d+ (?=[-+]?(?:\d+\.\d|nan|inf)))?"  # `Train loss 120 0.53`: the step comes first (tacotron2)
SPACED = re.compile(  # with the words before it: `Regression Loss 2.8` is no `loss`
    rf"(?<![\w/.])(?P<name>(?:(?!{NO_WORDS})[A-Za-z_]+ ){{0,2}}(?:training )?(?:[A-Za-z]++[_/])*(?:{printed_names()}))"
    rf"(?![\w/-])\s+(?:is\s+)?{AFTER_COUNT}{VALUE}", re.IGNORECASE,
)  # fmt: skip
BEHIND = re.compile(rf"{VALUE} (?P<name>avg loss|loss)(?=,)")  # `0.53, 0.61 avg loss, 0.001 rate,` (darknet)


class Field(NamedTuple):
    """A number of a line by the name that is printed beside it, and where it stands: of `line`, the text from `begin` to `end`.

    `known` is what the table calls the name; None for a name that it does not know.
    """

    name: str
    known: str | None
    begin: int
    end: int
    unit: str | None

    def number_in(self, line: str) -> float:
        """The number in this line, or in another one of the same shape."""
        return number_of_text(line[self.begin : self.end], self.unit)


def find_fields(line: str) -> list[Field]:
    """`name: value` and `name=value`, then `name value` of the table's names outside of those."""
    named = list(NAMED.finditer(line))
    for field in SPACED.finditer(line):
        at = field.start("value")
        if not any(one.start() <= at < one.end() for one in named):
            named.append(field)
    if "loss," in line:
        named += BEHIND.finditer(line)
    return [Field(one["name"], known_part(one["name"]), *one.span("value"), one["unit"]) for one in named]


@lru_cache(maxsize=4096)
def known_part(phrase: str) -> str | None:
    """Return the longest end of a phrase that is a known name: `INFO loss` is `loss`; None for what is not known."""
    words = re.split(r"[.)] ", phrase)[-1].strip("()").split(" ")
    if re.fullmatch(rf"(?!values?$)(?:{EVAL_WORDS})\w*|std(?:dev)?|time", words[0], re.IGNORECASE):
        return None
    for start in range(len(words)):
        name = " ".join(words[start:])
        if role_of(name) is not Role.IGNORED and not (start and name.lower() == "norm"):  # `params norm` is another one
            return name
    return None


def fields_in(line: str) -> dict[str, float]:
    """The numbers of a line by the names that are known, each name's first."""
    values: dict[str, float] = {}
    for field in find_fields(line):
        if field.known is not None and field.known not in values:
            values[field.known] = field.number_in(line)
    return values


BLANK = re.compile(  # a loss that was written and is no number
    rf"(?<![\w/])(?:(?:train|training)[ _])?(?:{printed_names()})(?![\w/-])(?:\s*[:=]\s*|\s+(?:is\s+)?)"
    r"['\"]?(?:none|null|nil|n/?a|<na>|skipped|-{2,}|\*{2,})(?![\w.-])['\"]?", re.IGNORECASE,
)  # fmt: skip
SAID = re.compile(  # `Loss is nan, stopping training`: a line without a step, often the last one
    r"\bloss(?: value)? (?:is|was|became|has become|turned|=)(?: now)? (?:nan|[-+]?inf|not finite|non-?finite)\b"
    r"|\b(?:nan|inf|infinite|non-?finite)(?: or inf)? (?:train(?:ing)? )?loss\b", re.IGNORECASE,
)  # fmt: skip
OTHER_LOSS = re.compile(rf"\b(?!value)(?:{EVAL_WORDS})\w*[_ /-]*loss\b|\bvl:|\btel:", re.IGNORECASE)
EVALUATION = re.compile(rf"(?:^|[\s\[({{|])(?:{EVAL_WORDS})(?:[\s\])}}:|(]|$)", re.IGNORECASE)
TRAINING = re.compile(r"\btrain(?!\w*\.py)", re.IGNORECASE)
EPOCH_WORD = re.compile(r"\bepoch\b", re.IGNORECASE)
STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
RANK = re.compile(r"\[default(\d+)\]|\[?\brank[ _:=]*(\d+)\b\]?|\bDP=(\d+)\|", re.IGNORECASE)
EPOCH = re.compile(rf"\bepoch(?:s)?\s*[:=\[]?\s*{COUNT}", re.IGNORECASE)  # the last resort
LEADS = re.compile(rf"\s*{COUNT}(?:\s*[:|]\s|/\d+(?=[ ,;:])(?!\s*\[))")  # a line that begins with its step: `120 | loss 0.53`
ANNOUNCED = re.compile(  # `12/1000` only in a banner: `===== Step 12/1000 =====`
    r"(?<![\w/.])(?:learning iteration\s+|(?:global[_ ]?step|iteration|step|completed step)\s*[:=]?\s*"
    r"(?!\d[\d,]*\s*(?:%|/(?!\d+ [=*#-]{3,}\s*$))))"
    + COUNT, re.IGNORECASE,
)  # fmt: skip
BLOCK = re.compile(r"\[\w+ ?= ?\d[^\]]*\]\s*:?\s*(?:\{\s*)?$")  # `[step=12/90]`, and names below it: OLMo, Composer
EPOCH_LINE = re.compile(  # a line that says which epoch begins, and nothing else
    r"(?:^|[\s:>|\]=*#-])(?:start(?:ing)? )?epoch\s*[:#=]?\s*(?P<at>\d+)(?:\s*(?:/|of)\s*\d+)?\s*[:.=*#-]*\s*$", re.IGNORECASE
)
OTHER_STEP = re.compile(  # a line that tells of a step or epoch, and nothing begins there
    r"\b(?:best|from|after|until|end|resum|load|sav|restor|checkpoint|eval|valid|test)", re.IGNORECASE
)
REPORT = re.compile(  # `resumed from step 5000, best loss 1.2`: what is said before that number
    r"\b(?:resum(?:ed?|ing)|(?:load|restor|sav)(?:ed|ing)\b[^|;=]{0,20}\b(?:from|checkpoint|ckpt|model|weights|state|best))\b"
    r"[^|;=]{0,80}$", re.IGNORECASE,
)  # fmt: skip
EPOCH_MEAN = re.compile(r"\| train \| epoch \d+ \|")  # fairseq: where single steps are printed too, no point of its own
SAME_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
MOST_SHAPES, LONGEST = 2048, 2000  # letters of a line whose shape is kept: 4 MB in all


class Shape(NamedTuple):
    """What lines of one shape say. A slice is where a number stands in the line; None where there is none."""

    plain: int  # the line begins here, behind time and host
    digits: tuple[tuple[slice, str], ...]  # what stands there belongs to a name: another digit is another shape
    begins_epoch: slice | None = None
    announced: Counter | None = None  # the step of a line that may hold nothing else
    is_hinted: bool = False  # without that nothing below was looked for
    rank: slice | None = None
    stamp: slice | None = None
    is_evaluation: bool = False  # or a report about another step
    is_inner: bool = False
    is_epoch_mean: bool = False
    counter: Counter | None = None
    leads: slice | None = None
    epoch: slice | None = None
    fields: tuple[Field, ...] = ()  # those with a known name, each name's first
    names: tuple[str, ...] = ()  # all that were seen
    loss: str | None = None  # the name of the loss among the fields
    tells: bool = False  # one of them makes a line a step
    measures: bool = False  # a loss, or a part of one
    is_blank: bool = False  # a loss is named, and no number
    says_lost: bool = False

    def values_in(self, line: str) -> dict[str, float]:
        """The numbers of a line of this shape by their known names."""
        return {field.known: field.number_in(line) for field in self.fields if field.known is not None}

    def time_in(self, line: str) -> float | None:
        """The time stamp of a line in seconds since the epoch, read as UTC; only differences are used."""
        if self.stamp is None:
            return None
        try:
            return datetime.datetime.fromisoformat(f"{line[self.stamp]}+00:00").timestamp()
        except ValueError:
            return None


class Shapes:
    """The shapes that were seen, the newest of them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Shape] = {}

    def of(self, line: str) -> Shape:
        """The shape of a line."""
        if len(line) > LONGEST:
            return find_shape(line)
        key = line.encode("utf-8", "surrogatepass").translate(SAME_DIGIT)
        shape = self._known.get(key)
        if shape is None or any(line[at] != text for at, text in shape.digits):
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            shape = self._known[key] = find_shape(line)
        return shape


def find_shape(line: str) -> Shape:
    """Take a line apart."""
    prefix = PREFIX.match(line)
    start = 0 if prefix is None else prefix.end()
    stamp = _place(STAMP.search(line))
    begins = EPOCH_LINE.search(line, max(0, start - 1)) if "poch" in line else None  # with the blank before it
    if begins is not None and OTHER_STEP.search(line, start) is None:
        return Shape(start, (), begins_epoch=_place(begins))
    is_evaluation = EVALUATION.search(line) is not None
    announced = None if is_evaluation else _announced_by(line, start)
    if not any(hint in line for hint in HINTS):
        return Shape(start, (), stamp=stamp, announced=announced)
    found = find_fields(line)
    fields = _known(found)
    is_blank = False
    if not any(role_of(name) is Role.LOSS for name in fields):
        without = BLANK.sub(lambda blank: " " * len(blank[0]), line)
        is_blank = without != line
        fields = _known(find_fields(without))
    roles = {name: role_of(name) for name in fields}
    is_other = is_evaluation and "\t" not in line and TRAINING.search(line) is None
    counter = find_counter(line)
    is_other = is_other or (counter is not None and REPORT.search(line[: counter.at.start]) is not None)
    is_other = is_other or (OTHER_LOSS.search(line) is not None and EPOCH_WORD.search(line) is None)
    return Shape(
        start,
        tuple((slice(at, at + len(field.name)), field.name) for field in found if (at := _digits_in(line, field)) is not None),
        announced=announced, is_hinted=True, rank=_place(RANK.search(line)), stamp=stamp, is_evaluation=is_other,
        is_inner="| train_inner |" in line, is_epoch_mean=EPOCH_MEAN.search(line) is not None,
        counter=counter, leads=_place(LEADS.match(line, start)), epoch=_place(EPOCH.search(line)),
        fields=tuple(fields.values()), names=tuple(field.name for field in found),
        loss=next((name for name, role in roles.items() if role is Role.LOSS), None),
        tells=any(role in TELLING for role in roles.values()),
        measures=any(role in (Role.LOSS, Role.SOURCE) for role in roles.values()),
        is_blank=is_blank, says_lost=SAID.search(line) is not None,
    )  # fmt: skip


def _known(found: Iterable[Field]) -> dict[str, Field]:
    """The fields with a known name, each name's first."""
    fields: dict[str, Field] = {}
    for field in found:
        if field.known is not None:
            fields.setdefault(field.known, field)
    return fields


def _announced_by(line: str, start: int) -> Counter | None:
    """The counter of a line that may be a header: values may stand in the lines below it."""
    if BLOCK.search(line) is not None:
        return find_counter(line)
    at = _place(ANNOUNCED.search(line, start))
    if at is None or OTHER_STEP.search(line, start) is not None:
        return None
    return Counter(THROUGH, at)


def _place(found: re.Match[str] | None) -> slice | None:
    """Where the group stands that matched, or all of it where the pattern has none."""
    return None if found is None else slice(*found.span(found.lastindex or 0))


def _digits_in(line: str, field: Field) -> int | None:
    """Where a name with a digit begins."""
    has_digit = any(letter.isdigit() for letter in field.name)
    return line.rindex(field.name, 0, field.begin) if has_digit else None
