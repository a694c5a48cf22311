"""A sentence taken apart into statements that evidence can answer. Pure.

Clause by clause: an intention ("target", "will") is no event, and a denial ("did not train 1.21B") is nothing that
evidence shows. A number that no statement takes is a statement of its own, which nothing can support: what is said and
not checked must not look checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from chronicle.audit.statements import DIGITS, NUMBER, SUFFIXED, normalise, parse_number, quantity

__all__ = ["Kind", "Statement", "parse_claim", "parse_number"]

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
    DURATION = "duration"
    LOSS = "loss"
    DATASET = "dataset"
    PRECISION = "precision"
    WRAPPER = "wrapper"
    TRAINED = "trained"
    INTENT = "intent"
    DENIAL = "denial"
    OTHER = "other"  # a number nothing recorded can answer


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
    """Every statement found, clause by clause; an empty tuple when there is no number and nothing else to check."""
    found: list[Statement] = []
    for clause in filter(str.strip, CLAUSE.split(normalise(sentence))):
        if INTENT.search(clause):
            found.append(Statement(kind=Kind.INTENT, text=clause.strip()))
        elif DENIAL.search(clause):
            found.append(Statement(kind=Kind.DENIAL, text=clause.strip()))
        else:
            found += [*_numbers(clause), *_words(clause)]
    order = {kind: number for number, kind in enumerate(Kind)}
    return tuple(dict.fromkeys(sorted(found, key=lambda one: order[one.kind])))


PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.PARAMETERS, NUMBER + r"[\s-]*(?:trainable\s+)?(?:parameters?|params?)\b"),
        (Kind.PARAMETERS, SUFFIXED + COUNTED_OTHERWISE),
        (Kind.DEVICES, NUMBER + r"[\s-]*(?:" + DEVICE_WORDS + ")"),
        (Kind.RANKS, NUMBER + r"\s*(?:ranks|processes)\b"),
        (Kind.HOSTS, NUMBER + r"[\s-]*(?:nodes?|hosts?|machines?)\b"),
        (Kind.STEPS, NUMBER + r"\s*(?:optimizer\s+)?(?:steps|updates|iterations)\b"),
        (Kind.STEPS, r"\b(?:(?:to|at|reached)\s+)?[Ss]tep\s+" + NUMBER),
        (Kind.TOKENS, NUMBER + r"\s*tokens\b"),
        (Kind.SAMPLES, NUMBER + r"\s*(?:(?!and\b|or\b|steps\b)[a-z]+\s+){0,2}(?:samples|examples|sequences)\b"),
        (Kind.BYTES, NUMBER + r"\s*(?:bytes)\b"),
        (Kind.BYTES, NUMBER.replace(r"(?![\w])", "") + r"i?B\b(?=\s+of\b|\s+data)"),
        (Kind.DURATION, NUMBER + r"\s*(?P<unit>minute|hour|h|day|week)s?\b"),
        (Kind.LOSS, r"\bloss\s*(?:of|is|was|=|:|down to|reached)?\s*" + NUMBER),
        (Kind.PARAMETERS, r"(?<![\w.\-/:])(?P<digits>\d{1,3}(?:[,_]\d{3}){2,})(?![\w])" + COUNTED_OTHERWISE),
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
            if kind is Kind.DURATION:
                low, high = low * SECONDS[match["unit"]], high * SECONDS[match["unit"]]
                low, high = low - 0.05 * low, high + 0.05 * high  # nobody writes a duration to the second
            yield Statement(kind=kind, text=match.group().strip(), low=low, high=high)
    for match in LEFT.finditer(clause):
        if not any(match.start() < last and first < match.end("digits") for first, last in taken):
            yield Statement(kind=Kind.OTHER, text=match.group().strip())


def _words(clause: str) -> Iterator[Statement]:
    named = rf"\b(?:on|dataset:?|corpus:?)\s+(?:the\s+)?((?i:{CORPORA})|[A-Z][\w.+-]*(?:\s[A-Z][\w.+-]*)*)"
    said = ""
    for match in re.finditer(named, clause):
        if not NOT_A_DATASET.match(match.group(1)):
            said += match.group(1).lower()
            yield Statement(kind=Kind.DATASET, text=match.group().strip(), word=match.group(1))
    for match in re.finditer(rf"(?<![\w-])(?i:{CORPORA})(?![\w-])", clause):
        if match.group().lower() not in said:
            yield Statement(kind=Kind.DATASET, text=match.group(), word=match.group())
    for match in re.finditer(r"\b(bf16|bfloat16|fp16|float16|fp32|float32|fp8|int8)\b", clause, re.IGNORECASE):
        yield Statement(kind=Kind.PRECISION, text=match.group(), word=match.group().lower())
    for match in re.finditer(r"\b(FSDP2?|ZeRO-?[123]|DeepSpeed|DDP|DistributedDataParallel|DataParallel)\b", clause):
        yield Statement(kind=Kind.WRAPPER, text=match.group(), word=match.group())
    for match in re.finditer(r"\b(trained|training ran|has trained|finished training)\b", clause, re.IGNORECASE):
        yield Statement(kind=Kind.TRAINED, text=match.group(), word="trained")
