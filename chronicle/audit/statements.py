"""Numbers as people write them, and the interval each stands for. Pure.

The tolerance is what the writing implies: half a unit of the last digit, and never more than 5 % without decimals ("1B" is
written for 1.0B, not for 0.77B) or 10 % with them. "~" allows 10 %, "over" and "1B+" are lower bounds, "under" an upper
one, "700-800M" is both. Whole counts are exact.
"""

from __future__ import annotations

import re

__all__ = ["NUMBER", "SUFFIXED", "normalise", "parse_number", "quantity"]

SCALES = {"k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "g": 1e9, "billion": 1e9, "t": 1e12}
SCALES |= {"trillion": 1e12}
LARGEST_TOLERANCE = 0.05
LARGEST_TOLERANCE_WITH_DECIMALS = 0.10
ABOUT = 0.10
AT_LEAST = ("over", "more than", "at least", "above")
AT_MOST = ("under", "below", "less than", "fewer than", "at most", "up to", "no more than")
APPROXIMATE = ("~", "≈", "about", "around", "roughly", "nearly", "almost", "approximately")

BOUND = rf"(?P<bound>{'|'.join((*AT_LEAST, *AT_MOST, *APPROXIMATE))})?\s*"
DIGITS = r"\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
UNIT = r"[kKMGBT](?![\w])|thousand|million|billion|trillion"
START = rf"{BOUND}(?<![\w.\-/:])(?<!%\sof\s)(?P<digits>{DIGITS})(?:\s?(?P<first_scale>{UNIT})?\s?[–-]\s?(?P<upper>{DIGITS}))?"
NUMBER = rf"{START}(?:\s?(?P<scale>{UNIT})(?P<plus>\+)?)?"
SUFFIXED = rf"{START}\s?(?P<scale>[MBT](?![\w])|million|billion|trillion)(?P<plus>\+)?"

WORDS = {"a single": 1, "single": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8}
WORDS |= {"ten": 10, "twelve": 12, "sixteen": 16, "thirty-two": 32, "sixty-four": 64}
COUNTED = r"(?=[\s-]+(?:GPU|device|node|host|machine|rank|process|accelerator|short|text|training|sample|example))"
WRITTEN_OUT = re.compile(rf"\b({'|'.join(WORDS)})\b{COUNTED}", re.IGNORECASE)
BETWEEN = re.compile(rf"\bbetween\s+((?:{DIGITS})\s?(?:{UNIT})?)\s+and\s+(?={DIGITS})", re.IGNORECASE)


def normalise(sentence: str) -> str:
    """The sentence with counts in digits and ranges with a dash: `two GPUs` is `2 GPUs`, `between 1 and 2` is `1–2`."""
    written = WRITTEN_OUT.sub(lambda match: str(WORDS[match[1].lower()]), sentence)
    return BETWEEN.sub(r"\1–", written)


def quantity(match: re.Match[str]) -> tuple[float, float]:
    """The interval of a match of NUMBER or SUFFIXED."""
    groups = match.groupdict()
    bound = "over" if groups.get("plus") else groups.get("bound")
    scale, upper = groups.get("scale"), groups.get("upper")
    if upper is None:
        return parse_number(match["digits"], scale, bound)
    low, _ = parse_number(match["digits"], groups.get("first_scale") or scale, bound)
    _, high = parse_number(upper, scale, bound)
    return min(low, high), max(low, high)


def parse_number(digits: str, scale: str | None, bound: str | None = None) -> tuple[float, float]:
    """The interval a written number stands for, as (low, high)."""
    mantissa, _, exponent = digits.replace(",", "").replace("_", "").lower().partition("e")
    factor = SCALES.get((scale or "").lower(), 1.0) * 10.0 ** int(exponent or 0)
    value = float(mantissa) * factor
    decimals = len(mantissa.partition(".")[2])
    half_unit = 0.0 if factor == 1.0 and not decimals else 0.5 * 10**-decimals * factor
    largest = LARGEST_TOLERANCE_WITH_DECIMALS if decimals else LARGEST_TOLERANCE
    tolerance = min(half_unit, largest * value)
    word = (bound or "").lower()
    if word in AT_LEAST:
        return value - tolerance, float("inf")
    if word in AT_MOST:
        return 0.0, value + tolerance
    if word:
        tolerance = max(tolerance, ABOUT * value)
    return value - tolerance, value + tolerance
