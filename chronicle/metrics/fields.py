"""The named numbers of a printed line: `name: value`, `name=value`, and `name value` for the names of the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from chronicle.metrics.numbers import NUMBER, number_of_text
from rollback.channels import EVAL_WORDS, Role, printed_names, role_of

MOST_SEEN = 40
REPR = r"(?:np\.b?float\d+|(?:tf\.)?tensor|(?:Device)?Array)\("  # what Python prints around the number
VALUE = rf"[\[(]?\s*(?:{REPR})?(?P<value>{NUMBER})(?P<unit>[KMBT](?![A-Za-z]))?(?!\w|\.\w)"
NAMED = re.compile(
    rf"(?<!\w)(?P<name>[A-Za-z_][\w./@()-]*(?: [A-Za-z_(][\w./()-]*){{0,3}})['\"]?\s*[:=]\s*{VALUE}", re.IGNORECASE
)
NO_WORDS = r"(?:nan|inf(?:inity)?|none|null|nil|na|skipped)\b"  # the value of the name before
SPACED = re.compile(  # with the words before it: `Regression Loss 2.8` is no `loss`
    rf"(?<![\w/.])(?P<name>(?:(?!{NO_WORDS})[A-Za-z_]+ ){{0,2}}(?:training )?(?:[A-Za-z]++[_/])*(?:{printed_names()}))"
    rf"(?![\w/-])\s+(?:is\s+)?{VALUE}", re.IGNORECASE,
)  # fmt: skip


def fields_of(line: str) -> Iterator[re.Match[str]]:
    """Yield `name: value` and `name=value`, then `name value` of the table's names outside of those."""
    taken: list[tuple[int, int]] = []
    for field in NAMED.finditer(line):
        taken.append(field.span())
        yield field
    for field in SPACED.finditer(line):
        if not any(begin <= field.start("value") < end for begin, end in taken):
            yield field


@lru_cache(maxsize=4096)
def known_part(phrase: str) -> str | None:
    """Return the longest end of a phrase that is a known name: `INFO loss` is `loss`; None for what is not known."""
    words = re.split(r"\. ", phrase)[-1].strip("()").split(" ")
    if re.fullmatch(rf"(?!values?$)(?:{EVAL_WORDS})\w*|std(?:dev)?|time", words[0], re.IGNORECASE):
        return None
    for start in range(len(words)):
        name = " ".join(words[start:])
        if role_of(name) is not Role.IGNORED and not (start and name.lower() == "norm"):  # `params norm` is another one
            return name
    return None


def fields_in(line: str, seen: dict[str, None] | None = None) -> dict[str, float]:
    """The numbers of a line by the names that are known; `seen` collects all names, for a message."""
    values: dict[str, float] = {}
    for field in fields_of(line):
        name = known_part(field["name"])
        if seen is not None and len(seen) < MOST_SEEN:
            seen.setdefault(field["name"])
        if name is not None and name not in values:
            values[name] = number_of_text(field["value"], field["unit"])
    return values
