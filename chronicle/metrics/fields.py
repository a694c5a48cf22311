"""The named numbers of a line: `name: value`, `name=value`, `name -> value`, and `name value` for the names of the table."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from chronicle.metrics.numbers import NUMBER, number_of_text
from rollback.channels import EVAL_WORDS, Role, printed_names, role_of

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
