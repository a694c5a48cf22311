"""A sentence taken apart into statements that evidence can answer. Pure.

The tolerance of a number is what its writing implies: half a unit of its last digit, and never more than 5 % ("1B" is
written for 1.0B, not for 0.77B). "~" allows 10 %, "over" and "1B+" are lower bounds. Whole counts are exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["Kind", "Statement", "parse_claim", "parse_number"]

SCALES = {"k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "g": 1e9, "billion": 1e9, "t": 1e12}
SCALES |= {"trillion": 1e12}
LARGEST_TOLERANCE = 0.05
ABOUT = 0.10
AT_LEAST = ("over", "more than", "at least")
BOUND = r"(?P<bound>~|≈|about|around|roughly|nearly|over|more than|at least)?\s*"
NUMBER = (
    BOUND
    + r"(?<![\w.])(?P<digits>\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?)"
    + r"(?:\s?(?P<scale>[kKMGBT](?![\w])|thousand|million|billion|trillion)(?P<plus>\+)?)?"
)
SUFFIXED = (
    BOUND
    + r"(?<![\w.])(?P<digits>\d+(?:\.\d+)?)\s?(?P<scale>[MBT](?![\w])|million|billion|trillion)(?P<plus>\+)?"
)
INTENT = re.compile(r"\b(target|planned|plan to|will|aim(s|ing)? (at|for|to)|goal|should|going to)\b", re.IGNORECASE)
MODEL_NAME = r"[A-Z]{1,2}\d{1,3}"  # L4, A100, H200
DEVICE_WORDS = (
    rf"(?:x\s*)?(?:(?:NVIDIA|AMD)\s+)?(?:{MODEL_NAME}\s+)?(?:GPUs?|devices?|accelerators?|TPUs?)"
    rf"|x\s*(?:NVIDIA\s+)?{MODEL_NAME}s?\b"
)
CORPORA = r"WikiText-?103|WikiText-?2|OpenWebText2?|The Pile|RedPajama|FineWeb(?:-Edu)?|C4|Wikipedia|LAION-?\w*|enwik8|text8"
NOT_A_DATASET = re.compile(r"(?:\d|GPUs?\b|CPU|CUDA|TPU|NVIDIA|Linux|Step\b)", re.IGNORECASE)


class Kind(Enum):
    """What a statement is about."""

    PARAMETERS = "parameters"
    DEVICES = "devices"
    RANKS = "ranks"
    HOSTS = "nodes"
    STEPS = "steps"
    TOKENS = "tokens"
    SAMPLES = "samples"
    BYTES = "bytes"
    LOSS = "loss"
    DATASET = "dataset"
    PRECISION = "precision"
    WRAPPER = "wrapper"
    TRAINED = "trained"
    INTENT = "intent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One checkable piece. `low..high` bound a number; `word` is what a non-number says."""

    kind: Kind
    text: str
    low: float | None = None
    high: float | None = None
    word: str = ""

    def admits(self, value: float) -> bool:
        """Whether a measured value agrees with the number as written."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def parse_claim(sentence: str) -> tuple[Statement, ...]:
    """Every statement found, in the order of the catalogue below; an empty tuple when nothing can be checked."""
    if INTENT.search(sentence):
        return (Statement(kind=Kind.INTENT, text=sentence.strip()),)
    found = [*_numbers(sentence), *_words(sentence)]
    return tuple(dict.fromkeys(found))


def parse_number(digits: str, scale: str | None, bound: str | None = None, *, exact: bool = False) -> tuple[float, float]:
    """The interval a written number stands for, as (low, high)."""
    plain = digits.replace(",", "").replace("_", "")
    factor = SCALES.get((scale or "").lower(), 1.0)
    value = float(plain) * factor
    decimals = len(plain.partition(".")[2])
    half_unit = 0.0 if exact or (factor == 1.0 and not decimals) else 0.5 * 10**-decimals * factor
    tolerance = min(half_unit, LARGEST_TOLERANCE * value)
    word = (bound or "").lower()
    if word in AT_LEAST:
        return value - tolerance, float("inf")
    if word:
        tolerance = max(tolerance, ABOUT * value)
    return value - tolerance, value + tolerance


def _numbers(sentence: str) -> Iterator[Statement]:
    patterns: tuple[tuple[Kind, str], ...] = (
        (Kind.PARAMETERS, NUMBER + r"[\s-]*(?:trainable\s+)?(?:parameters?|params?)\b"),
        (Kind.PARAMETERS, SUFFIXED + r"(?![\s-]*(?:tokens?|samples?|bytes|steps|updates|images|bits|examples))"),
        (Kind.DEVICES, NUMBER + r"\s*(?:" + DEVICE_WORDS + ")"),
        (Kind.RANKS, NUMBER + r"\s*(?:ranks|processes)\b"),
        (Kind.HOSTS, NUMBER + r"\s*(?:nodes?|hosts?|machines?)\b"),
        (Kind.STEPS, NUMBER + r"\s*(?:optimizer\s+)?(?:steps|updates|iterations)\b"),
        (Kind.STEPS, r"\b(?:to|at|reached)\s+step\s+" + NUMBER),
        (Kind.TOKENS, NUMBER + r"\s*tokens\b"),
        (Kind.SAMPLES, NUMBER + r"\s*(?:training\s+)?(?:samples|examples|sequences)\b"),
        (Kind.BYTES, NUMBER + r"\s*(?:bytes)\b"),
        (Kind.BYTES, BOUND + r"(?<![\w.])(?P<digits>\d+(?:\.\d+)?)\s?(?P<scale>[KMGT])i?B\b(?P<plus>\+)?(?=\s+of\b|\s+data)"),
        (Kind.LOSS, r"\bloss\s*(?:of|is|was|=|:|down to|reached)?\s*" + NUMBER),
    )
    taken: list[tuple[int, int]] = []
    for kind, pattern in patterns:
        for match in re.finditer(pattern, sentence):
            start, end = match.span("digits")
            if any(start < last and first < end for first, last in taken):
                continue
            taken.append((start, end))
            bound = "over" if match.group("plus") else match.group("bound")
            low, high = parse_number(match.group("digits"), match.group("scale"), bound)
            yield Statement(kind=kind, text=match.group().strip(), low=low, high=high)


def _words(sentence: str) -> Iterator[Statement]:
    named = rf"\b(?:on|dataset:?|corpus:?)\s+(?:the\s+)?({CORPORA}|[A-Z][\w.+-]*(?:\s[A-Z][\w.+-]*)*)"
    for match in re.finditer(named, sentence):
        if not NOT_A_DATASET.match(match.group(1)):
            yield Statement(kind=Kind.DATASET, text=match.group().strip(), word=match.group(1))
    for match in re.finditer(r"\b(bf16|bfloat16|fp16|float16|fp32|float32|fp8|int8)\b", sentence, re.IGNORECASE):
        yield Statement(kind=Kind.PRECISION, text=match.group(), word=match.group().lower())
    for match in re.finditer(r"\b(FSDP2?|ZeRO-?[123]|DeepSpeed|DDP|DistributedDataParallel|DataParallel)\b", sentence):
        yield Statement(kind=Kind.WRAPPER, text=match.group(), word=match.group())
    for match in re.finditer(r"\b(trained|training ran|has trained|finished training)\b", sentence, re.IGNORECASE):
        yield Statement(kind=Kind.TRAINED, text=match.group(), word="trained")
