"""Numbers as programs print them: units, thousands, and what is no number in all its spellings."""

from __future__ import annotations

import json
import math
import re

NOT_A_NUMBER = r"nan(?:\(\w*\)|\.0+)?|1\.#(?!INF)\w+"  # `nan.0` is Lightning's bar, `-nan(ind)` and `1.#QNAN` are C on Windows
INFINITE = r"inf(?:inity)?(?:\.0+)?|1\.#INF\w*"
NUMBER = rf"[-+]?(?:{NOT_A_NUMBER}|{INFINITE}|\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
NON_FINITE_TEXT = re.compile(rf"\s*[-+]?(?:(?:{NOT_A_NUMBER})|(?P<infinite>{INFINITE}))\s*", re.IGNORECASE)


def number_of_text(text: str, unit: str | None) -> float:
    """Return the number that `NUMBER` matched, times its unit."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return non_finite(text) or math.nan
    return number * UNITS[unit.upper()] if unit else number


def non_finite(text: str) -> float | None:
    """Return NaN or an infinity in any of the ways that programs print them; None for everything else."""
    found = NON_FINITE_TEXT.fullmatch(text)
    if found is None:
        return None
    if found["infinite"] is None:
        return math.nan
    return -math.inf if text.startswith("-") else math.inf


def json_number(value: float) -> float | str:
    """The number as JSON has it; NaN and the infinities, which JSON has not, as texts."""
    return value if math.isfinite(value) else json.dumps(value)


def number_in(value: object) -> float | None:
    """Return a JSON value or a cell as a number: `2.5`, `"2.5"`, `"NaN"`, `"1,200"`; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return value if isinstance(value, int) else float(value)
    except ValueError:
        text = str(value)
    return float(text.replace(",", "")) if THOUSANDS.fullmatch(text) else non_finite(text)
