"""Parse a sentence into statements that evidence can answer. Pure.

Each clause is parsed by itself: an intention ("target", "will") is no event, and a denial ("did not train 1.21B") cannot
be shown by evidence. A number that no pattern matches becomes a statement of its own, which nothing can support.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "NUMBER",
    "SUFFIXED",
    "Statement",
    "Topic",
    "normalise",
    "parse_claim",
    "parse_number",
    "quantity",
]

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
    """Return the sentence with counts as digits and ranges with a dash: `two GPUs` -> `2 GPUs`, `between 1 and 2` -> `1–2`."""
    written = WRITTEN_OUT.sub(lambda match: str(WORDS[match[1].lower()]), sentence)
    return BETWEEN.sub(r"\1–", written)


def quantity(match: re.Match[str]) -> tuple[float, float]:
    """Return the interval (low, high) of a match of NUMBER or SUFFIXED."""
    groups = match.groupdict()
    bound = "over" if groups.get("plus") else groups.get("bound")
    scale, upper = groups.get("scale"), groups.get("upper")
    if upper is None:
        return parse_number(match["digits"], scale, bound)
    low, _ = parse_number(match["digits"], groups.get("first_scale") or scale, bound)
    _, high = parse_number(upper, scale, bound)
    return min(low, high), max(low, high)


def parse_number(digits: str, scale: str | None, bound: str | None = None) -> tuple[float, float]:
    """Return the interval (low, high) that a written number stands for.

    The tolerance is half a unit of the last digit, and at most 5 % without decimals ("1B" stands for 1.0B, not 0.77B) or
    10 % with them. "~" allows 10 %; "over" and "1B+" are lower bounds, "under" is an upper bound, "700-800M" is both.
    Whole counts are exact.
    """
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


# --- Statements

CLAUSE = re.compile(r"[;\n]+|[.!?](?=\s|$)|,\s+|\s+but\s+")
INTENT = re.compile(r"\b(target|planned|plan to|will|aim(s|ing)? (at|for|to)|goal|should|going to)\b", re.IGNORECASE)
DENIAL = re.compile(
    r"(?:\bnot(?! only| less| fewer| more)|\bnever|n't|\bno(?! more| fewer| less)|\bwithout)\b(?:\s+\w+){0,3}?\s+"
    r"(?:[~≈]?\d|GPU|FSDP|DDP|ZeRO|DeepSpeed|bf16|fp16)",
    re.IGNORECASE,
)
GPU_NAMES = r"A10G?|A100|A800|H100|H200|H800|B100|B200|GB200|GH200|L4|L40S?|V100|P100|T4|MI\d{3}X?|RTX\s?\d{4}"
DEVICE_WORDS = (
    rf"(?:x\s*)?(?:(?:NVIDIA|AMD)\s+)?(?:(?:{GPU_NAMES})[\s-]+)?(?:GPUs?|devices?|accelerators?|TPUs?)\b"
    rf"|(?:x\s*)?(?:(?:NVIDIA|AMD)\s+)?(?:{GPU_NAMES})s?\b"
)
CORPORA = (
    r"WikiText-?103|WikiText-?2|OpenWebText2?|The Pile|RedPajama|FineWeb(?:-Edu)?|(?-i:C4)|Wikipedia|LAION-?\w*|enwik8|text8"
)
NOT_A_DATASET = re.compile(r"(?:\d|GPUs?\b|CPU|CUDA|TPU|NVIDIA|Linux|Step\b|" + GPU_NAMES + ")", re.IGNORECASE)
COUNTED_OTHERWISE = r"(?![\s-]*(?:tokens?|samples?|bytes|steps|updates|images|bits|examples|iterations|hours|sequences))"
NAMED_BY_NUMBER = "".join(rf"(?<!\b{word}\s)" for word in ("GPU", "rank", "seed", "node", "launch", "device", "Xid", "epoch"))
LEFT = re.compile(rf"(?<![\w.\-/:#]){NAMED_BY_NUMBER}(?P<digits>{DIGITS})%?(?![\d:/]|-\d|\.\d)(?:[\s-]?[A-Za-z]+)?")
SECONDS = {"minute": 60.0, "hour": 3600.0, "h": 3600.0, "day": 86400.0, "week": 604800.0}


class Topic(Enum):
    """What a statement is about."""

    PARAMETERS = "parameters"
    DEVICES = "devices"
    RANKS = "ranks"
    HOSTS = "nodes"
    STEPS = "steps"
    TOKENS = "tokens"
    SAMPLES = "samples"
    BYTES = "bytes"
    DURATION = "duration"
    LOSS = "loss"
    DATASET = "dataset"
    PRECISION = "precision"
    WRAPPER = "wrapper"
    TRAINED = "trained"
    INTENT = "intent"
    DENIAL = "denial"
    OTHER = "other"  # a number that no record can answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a claim. `low..high` bound a number; `word` is the value of a statement without number."""

    kind: Topic
    text: str
    low: float | None = None
    high: float | None = None
    word: str = ""

    def admits(self, value: float) -> bool:
        """Return whether a measured value agrees with the number as written."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def parse_claim(sentence: str) -> tuple[Statement, ...]:
    """Return every statement found, clause by clause; an empty tuple when there is nothing to check."""
    found: list[Statement] = []
    for clause in filter(str.strip, CLAUSE.split(normalise(sentence))):
        if INTENT.search(clause):
            found.append(Statement(kind=Topic.INTENT, text=clause.strip()))
        elif DENIAL.search(clause):
            found.append(Statement(kind=Topic.DENIAL, text=clause.strip()))
        else:
            found += [*_numbers(clause), *_words(clause)]
    order = {kind: number for number, kind in enumerate(Topic)}
    return tuple(dict.fromkeys(sorted(found, key=lambda one: order[one.kind])))


PATTERNS: tuple[tuple[Topic, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Topic.PARAMETERS, NUMBER + r"[\s-]*(?:trainable\s+)?(?:parameters?|params?)\b"),
        (Topic.PARAMETERS, SUFFIXED + COUNTED_OTHERWISE),
        (Topic.DEVICES, NUMBER + r"[\s-]*(?:" + DEVICE_WORDS + ")"),
        (Topic.RANKS, NUMBER + r"\s*(?:ranks|processes)\b"),
        (Topic.HOSTS, NUMBER + r"[\s-]*(?:nodes?|hosts?|machines?)\b"),
        (Topic.STEPS, NUMBER + r"\s*(?:optimizer\s+)?(?:steps|updates|iterations)\b"),
        (Topic.STEPS, r"\b(?:(?:to|at|reached)\s+)?[Ss]tep\s+" + NUMBER),
        (Topic.TOKENS, NUMBER + r"\s*tokens\b"),
        (Topic.SAMPLES, NUMBER + r"\s*(?:(?!and\b|or\b|steps\b)[a-z]+\s+){0,2}(?:samples|examples|sequences)\b"),
        (Topic.BYTES, NUMBER + r"\s*(?:bytes)\b"),
        (Topic.BYTES, NUMBER.replace(r"(?![\w])", "") + r"i?B\b(?=\s+of\b|\s+data)"),
        (Topic.DURATION, NUMBER + r"\s*(?P<unit>minute|hour|h|day|week)s?\b"),
        (Topic.LOSS, r"\bloss\s*(?:of|is|was|=|:|down to|reached)?\s*" + NUMBER),
        (Topic.PARAMETERS, r"(?<![\w.\-/:])(?P<digits>\d{1,3}(?:[,_]\d{3}){2,})(?![\w])" + COUNTED_OTHERWISE),
    )
)


def _numbers(clause: str) -> Iterator[Statement]:
    taken: list[tuple[int, int]] = []
    for kind, pattern in PATTERNS:
        for match in pattern.finditer(clause):
            start, end = match.span()
            if any(start < last and first < end for first, last in taken):
                continue
            taken.append((start, end))
            low, high = quantity(match)
            if kind is Topic.DURATION:
                low, high = low * SECONDS[match["unit"]], high * SECONDS[match["unit"]]
                low, high = low - 0.05 * low, high + 0.05 * high  # durations are written with 5 % tolerance
            yield Statement(kind=kind, text=match.group().strip(), low=low, high=high)
    for match in LEFT.finditer(clause):
        if not any(match.start() < last and first < match.end("digits") for first, last in taken):
            yield Statement(kind=Topic.OTHER, text=match.group().strip())


def _words(clause: str) -> Iterator[Statement]:
    named = rf"\b(?:on|dataset:?|corpus:?)\s+(?:the\s+)?((?i:{CORPORA})|[A-Z][\w.+-]*(?:\s[A-Z][\w.+-]*)*)"
    said = ""
    for match in re.finditer(named, clause):
        if not NOT_A_DATASET.match(match.group(1)):
            said += match.group(1).lower()
            yield Statement(kind=Topic.DATASET, text=match.group().strip(), word=match.group(1))
    for match in re.finditer(rf"(?<![\w-])(?i:{CORPORA})(?![\w-])", clause):
        if match.group().lower() not in said:
            yield Statement(kind=Topic.DATASET, text=match.group(), word=match.group())
    for match in re.finditer(r"\b(bf16|bfloat16|fp16|float16|fp32|float32|fp8|int8)\b", clause, re.IGNORECASE):
        yield Statement(kind=Topic.PRECISION, text=match.group(), word=match.group().lower())
    for match in re.finditer(r"\b(FSDP2?|ZeRO-?[123]|DeepSpeed|DDP|DistributedDataParallel|DataParallel)\b", clause):
        yield Statement(kind=Topic.WRAPPER, text=match.group(), word=match.group())
    for match in re.finditer(r"\b(trained|training ran|has trained|finished training)\b", clause, re.IGNORECASE):
        yield Statement(kind=Topic.TRAINED, text=match.group(), word="trained")
