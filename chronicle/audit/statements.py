"""Parse a sentence into statements that evidence can answer. Pure.

Each clause is parsed by itself: an intention ("target", "will") is no event, and a denial ("did not train 1.21B") cannot
be shown by evidence. Nothing of a sentence is passed over: a number that no pattern matches, a rate, a vague count and every
word that is not understood become statements of their own, which nothing can support.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

__all__ = [
    "CORPORA",
    "GPU_NAMES",
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
SCALES |= {"trillion": 1e12, "p": 1e15, "hundred": 1e2, "dozen": 12.0}
SCALES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("kmgtp", start=1)}
LARGEST_TOLERANCE = 0.05
LARGEST_TOLERANCE_WITH_DECIMALS = 0.10
ABOUT = 0.10
ABOVE = ("over", "more than", "above", ">")
AT_LEAST = ("at least", "no less than", "no fewer than", "not less than", "not fewer than", "≥", ">=")
BELOW = ("under", "below", "less than", "fewer than", "<")
AT_MOST = ("at most", "no more than", "not more than", "≤", "<=")
APPROXIMATE = ("~", "≈", "about", "around", "roughly", "nearly", "almost", "approximately")

BOUND = rf"(?P<bound>{'|'.join(sorted((*ABOVE, *AT_LEAST, *BELOW, *AT_MOST, *APPROXIMATE), key=len, reverse=True))})?\s*"
DIGITS = r"\d{1,3}(?:[,_]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
UNIT = r"[kKMGBT](?![\w])|hundred|dozen|thousand|million|billion|trillion"
START = rf"{BOUND}(?<![\w.\-/:])(?<!\d,)(?<!%\sof\s)(?P<digits>{DIGITS})"
START += rf"(?:\s?(?P<first_scale>{UNIT})?\s?[–-]\s?(?P<upper>{DIGITS}))?"
MORE = r"(?P<plus>\+|\s+or\s+more\b)"
NUMBER = rf"{START}(?:\s?(?P<scale>{UNIT}))?{MORE}?"
SUFFIXED = rf"{START}\s?(?P<scale>[MBT](?![\w])|million|billion|trillion){MORE}?"
BYTES = rf"{START}\s?(?P<scale>[kKMGTP]i?)B\b(?P<plus>\+)?"
BETWEEN = re.compile(rf"\bbetween\s+((?:{DIGITS})\s?(?:{UNIT})?)\s+and\s+(?={DIGITS})", re.IGNORECASE)

GPU_NAMES = r"A10G?|A100|A800|H100|H200|H800|B100|B200|GB200|GH200|L4|L40S?|V100|P100|T4|MI\d{3}X?|RTX\s?\d{4}"

# --- Numbers in words

SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
SMALL += " eighteen nineteen"
ONES = {word: number for number, word in enumerate(SMALL.split())}
TIES = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * number for number, word in enumerate(TIES.split(), start=2)}
LARGE = {"hundred": 100, "dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
COUNTED = (
    rf"(?=[\s-]+(?:[A-Z]\w*[\s-]+)?(?:GPU|{GPU_NAMES}|device|node|host|machine|rank|process|accelerator|short|text|training|sample"
    r"|example))"
)
ONE_WORD = "|".join(sorted({**ONES, **TENS, **LARGE}, key=len, reverse=True))
WRITTEN_OUT = re.compile(
    rf"\b(?:(?:an?\s+)?(?:half|quarter)\s+(?:of\s+)?(?:an?\s+)?(?=(?:{'|'.join(LARGE)})\b)|an?\s+(?=(?:{'|'.join(LARGE)})\b))?"
    rf"(?:{ONE_WORD})(?:(?:[\s-]+|\s+and\s+(?:an?\s+half\s+)?)(?:{ONE_WORD}))*\b",
    re.IGNORECASE,
)
SINGLE = re.compile(rf"\b(?:a\s+)?(?:single|lone){COUNTED}", re.IGNORECASE)


def normalise(sentence: str) -> str:
    """Return the sentence with numbers as digits and ranges with a dash: `two GPUs` -> `2 GPUs`, `between 1 and 2` -> `1–2`."""
    written = WRITTEN_OUT.sub(lambda match: _digits_of(match, sentence), SINGLE.sub("1", sentence))
    return BETWEEN.sub(r"\1–", written)


def _digits_of(match: re.Match[str], sentence: str) -> str:
    """A number in words as digits; the words as they are where they are no number (`no one`) or follow digits (`2 million`)."""
    words = re.findall(r"[a-z]+", match.group().lower())
    before = sentence[: match.start()].rstrip()
    if before[-1:].isdigit() and words[0] in LARGE:
        return match.group()
    if words == ["one"] and re.match(COUNTED, match.string[match.end() :]) is None:
        return match.group()
    total = current = 0.0
    fraction = next((share for word, share in (("half", 0.5), ("quarter", 0.25)) if word in words[:2]), None)
    for number, word in enumerate(words):
        if word in ONES or word in TENS:
            current += ONES.get(word, TENS.get(word, 0))
        elif word in LARGE:
            scale = LARGE[word]
            if words[number - 1] == "half" and current:  # one and a half billion
                current += 0.5
            current = (current or fraction or 1) * scale
            if scale >= 1000:
                total, current = total + current, 0.0
    value = total + current
    for word in ("trillion", "billion", "million", "thousand"):  # as written: `1 billion` is less exact than 1,000,000,000
        if word in words and words[-1] == word:
            return f"{value / LARGE[word]:g} {word}"
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


def quantity(match: re.Match[str]) -> tuple[float, float]:
    """Return the interval (low, high) of a match of NUMBER or SUFFIXED."""
    groups = match.groupdict()
    bound = "at least" if groups.get("plus") else groups.get("bound")
    scale, upper = groups.get("scale"), groups.get("upper")
    if upper is None:
        return parse_number(match["digits"], scale, bound)
    low, _ = parse_number(match["digits"], groups.get("first_scale") or scale, bound)
    _, high = parse_number(upper, scale, bound)
    return min(low, high), max(low, high)


def parse_number(digits: str, scale: str | None, bound: str | None = None) -> tuple[float, float]:
    """Return the interval (low, high) that a written number stands for.

    The tolerance is half a unit of the last digit, and at most 5 % without decimals ("1B" stands for 1.0B, not 0.77B) or
    10 % with them. "~" allows 10 %; "over" and "1B+" are lower bounds, "under" is an upper bound, both to the digit;
    "700-800M" is both. Whole counts are exact.
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
        return value, float("inf")
    if word in ABOVE:
        return math.nextafter(value, math.inf), float("inf")
    if word in AT_MOST:
        return 0.0, value
    if word in BELOW:
        return 0.0, math.nextafter(value, 0.0)
    if word:
        tolerance = max(tolerance, ABOUT * value)
    return value - tolerance, value + tolerance


# --- Statements

CLAUSE = re.compile(r"[;\n]+|[.!?](?=\s|$)|,\s+|\s+but\s+")
# words that add nothing that could be false
SAYS_NOTHING = re.compile(
    r"a|an|the|of|on|in|with|for|to|and|by|at|using|used|uses|use|via|from|across|through|during|after|as|it|its|we"
    r"|our|us|i|this|that|these|those|is|are|was|were|be|been|has|have|had|did|does|do|run|runs|ran|model|models"
    r"|network|job|training|train|which|then|also|total|dataset|corpus|data|text|precision|loss|step|steps|parameters"
    r"|params|size|hardware|here|exactly"
)
SAYS = re.compile(r"[^\W_]|[<>=≥≤≈~×+%]")  # not a dash or an arrow alone
TOKEN = re.compile(r"[^\s,;()\[\]\"'“”‘’]+")
RATE = re.compile(
    r"\s*(?:/\s*\w+|\s?(?:per|each|every|apiece)\b(?:\s+\w+)?|\s?an?\s+(?:second|minute|hour|day|step|node|rank|GPU|batch)\b)",
    re.IGNORECASE,
)
INTENT = re.compile(r"\b(target|planned|plan to|will|aim(s|ing)? (at|for|to)|goal|should|going to)\b", re.IGNORECASE)
DENIAL = re.compile(
    r"(?:\bnot(?! only| less| fewer| more)|\bnever|n't|\bno(?! more| fewer| less)|\bwithout)\b(?:\s+\w+){0,3}?\s+"
    r"(?:[~≈]?\d|GPU|FSDP|DDP|ZeRO|DeepSpeed|bf16|fp16)",
    re.IGNORECASE,
)
DEVICE_WORDS = (
    rf"(?:[x×]\s*)?(?:(?:NVIDIA|AMD)\s+)?(?:(?:{GPU_NAMES})[\s-]+)?(?:GPUs?|devices?|accelerators?|TPUs?)\b"
    rf"|(?:[x×]\s*)?(?:(?:NVIDIA|AMD)\s+)?(?:{GPU_NAMES})s?\b"
)
CORPORA = (
    r"WikiText-?103|WikiText-?2|OpenWebText2?|The Pile|RedPajama(?:-V2)?|SlimPajama|FineWeb(?:-Edu)?|(?-i:m?C4)|Wikipedia"
    r"|LAION-?\w*|enwik[89]|text8|ImageNet(?:-?1k|-?21k|-?22k)?|CIFAR-?100?|COCO|MNIST|LibriSpeech|Dolma|DCLM|SQuAD|BookCorpus|OSCAR|LM1B"
    r"|PG-?19|TinyStories|TinyShakespeare|Cosmopedia|CommonCrawl|Common Crawl|The Stack(?: v2)?|StarCoderData|Alpaca|ShareGPT"
    r"|UltraChat|GSM8K"
)
NOT_A_DATASET = re.compile(r"(?:\d|GPUs?\b|CPU|CUDA|TPU|NVIDIA|Linux|Step\b|" + GPU_NAMES + ")", re.IGNORECASE)
# a number with a scale is a parameter count where nothing else follows that it could count
NOTHING_ELSE = (
    r"(?=[\s-]*(?:$|[.,;:)→]|parameters?\b|params?\b|models?\b|LM\b|LLM\b|GPT\b|Llama\b|network\b|transformer\b|decoder\b|encoder\b"
    r"|(?:on|with|for|in|at|and|to|was|is|using|across|from|by|over|via|as|has|had|ran|run|trained|but|not)\b))"
)
NAMED_BY_NUMBER = "".join(rf"(?<!\b{word}\s)" for word in ("GPU", "rank", "seed", "node", "launch", "device", "Xid", "epoch"))
LEFT = re.compile(
    rf"(?<![\w.\-/:#])(?<!\d,){NAMED_BY_NUMBER}(?P<digits>{DIGITS})(?P<share>%?)(?![\d:/]|-\d|\.\d)(?P<noun>[\s-]?[A-Za-z]+)?"
)
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
    NOT_READ = "not read"  # words that are not understood


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement of a claim. `low..high` bound a number; `word` is the value of a statement without number.

    `vague`: the words give a bound only ("several GPUs"), so that evidence can contradict them and not support them.
    `beside`: words next to it that were not understood ("saved every" 100 steps), so that it may count something else.
    `is_moment`: it names a moment of the run ("after 100 steps"). `moments`: those of its sentence, of which its number may be.
    """

    kind: Topic
    text: str
    low: float | None = None
    high: float | None = None
    word: str = ""
    vague: bool = False
    beside: str = ""
    is_moment: bool = False
    moments: tuple[Statement, ...] = ()

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
            found += _read(clause)
    if all(one.kind is Topic.NOT_READ for one in found):
        return ()
    moments = tuple(one for one in found if one.is_moment)
    found = [replace(one, moments=moments) if one.kind in OF_THE_RUN and not one.is_moment else one for one in found]
    order = {kind: number for number, kind in enumerate(Topic)}
    return tuple(dict.fromkeys(sorted(found, key=lambda one: order[one.kind])))


LOSS = r"\b(?:(?:final|last|best|lowest|minimum)\s+(?:training\s+)?)?loss"
OF_TEXT = rf"(?:text|data|code|training|(?i:{CORPORA}))\b"
PATTERNS: tuple[tuple[Topic, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Topic.PARAMETERS, NUMBER + r"[\s-]*(?:parameters?|params?)\b"),
        (Topic.PARAMETERS, SUFFIXED + NOTHING_ELSE),
        (Topic.DEVICES, NUMBER + r"[\s-]*(?:" + DEVICE_WORDS + ")"),
        (Topic.RANKS, NUMBER + r"\s*(?:ranks|processes)\b"),
        (Topic.HOSTS, NUMBER + r"[\s-]*(?:nodes?|hosts?|machines?)\b"),
        (Topic.STEPS, NUMBER + r"\s*(?:optimizer\s+|training\s+)?(?:steps|updates|iterations)\b"),
        (Topic.STEPS, r"\b(?:(?:to|at|reached)\s+)?[Ss]tep\s+" + NUMBER),
        (Topic.TOKENS, NUMBER + r"[\s-]*tokens\b"),
        (Topic.SAMPLES, NUMBER + r"\s*(?:(?:short|text|training)\s+){0,2}(?:samples|examples|sequences)\b"),
        (Topic.BYTES, NUMBER + r"\s*bytes\b"),
        (Topic.BYTES, BYTES + r"(?=\s+of\s+(?:the\s+)?" + OF_TEXT + r"|\s+(?:text|data)\b)"),
        (Topic.DURATION, NUMBER + r"[\s-]*(?P<unit>minute|hour|h|day|week)s?\b"),
        (Topic.LOSS, LOSS + r"\s*(?:of|is|was|=|:|down to|reached)?\s*" + NUMBER),
        (Topic.PARAMETERS, r"(?<![\w.\-/:])(?P<digits>\d{1,3}(?:[,_]\d{3}){2,})(?![\w])" + NOTHING_ELSE),
    )
)
# --- What a number is of: the whole run, a moment of it, or something else

OF_THE_RUN = frozenset((Topic.STEPS, Topic.DURATION, Topic.TOKENS, Topic.SAMPLES, Topic.BYTES, Topic.LOSS))
OVER_MAY_BE_ACROSS = OF_THE_RUN - {Topic.LOSS} | {Topic.DEVICES, Topic.RANKS, Topic.HOSTS}  # "trained over 4 GPUs"
MORE_THAN = re.compile(
    r"(?:^|\b(?:on|for|with|using|at|of|to|in|and|or|just|well|slightly|is|are|has|have|had|was|were))\s*$", re.IGNORECASE
)
AFTER = re.compile(r"\b(?:after|by)(?:\s+the)?\s*$", re.IGNORECASE)
VOLUMES = frozenset((Topic.TOKENS, Topic.SAMPLES, Topic.BYTES))
ITS_SIZE = re.compile(
    rf"\b(?:dataset|corpus|{CORPORA})\s+(?:of|with|is|was)\s*$|\b(?:has|have|had|contains?|holds?)\s*$", re.IGNORECASE
)
PART_OF = re.compile(
    r"(?:\d\s+(?:out\s+)?of(?:\s+(?:the|its|our|all))?|\b(?:node|machine|host|server|box|cluster|partition)s?\s+(?:has|have|had)"
    r"|\b(?:embedding|layer|head|expert|adapter|encoder|decoder|block|critic|generator|discriminator|teacher)s?\s+(?:of|has|have|with)"
    r")\s*$", re.IGNORECASE
)  # fmt: skip
SIZE_OF = re.compile(rf"\s+in\s+(?:the\s+|a\s+|its\s+)?(?:dataset|corpus|{CORPORA})\b", re.IGNORECASE)


AT_LEAST_MANY = {"hundreds of": 200.0, "thousands of": 2e3, "millions of": 2e6, "billions of": 2e9, "dozens of": 24.0}
MULTI = r"multi(?:ple\s+|[\s-]*)"
FEW = r"several|many|some|a few|few|various|numerous|a number of|lots of|a cluster of"
VAGUE = rf"\b(?P<many>{'|'.join(AT_LEAST_MANY)}|{FEW}|{MULTI}(?=\w))\s*"
VAGUE_PATTERNS = tuple(
    (kind, re.compile(VAGUE + rf"(?:{nouns})", re.IGNORECASE))
    for kind, nouns in (
        (Topic.DEVICES, DEVICE_WORDS),
        (Topic.HOSTS, r"nodes?\b|hosts?\b|machines?\b"),
        (Topic.RANKS, r"ranks?\b|process(?:es)?\b"),
        (Topic.STEPS, r"(?:optimizer\s+)?(?:steps|updates|iterations)\b"),
        (Topic.TOKENS, r"tokens\b"),
        (Topic.PARAMETERS, r"param(?:eter)?s\b"),
        (Topic.SAMPLES, r"(?:samples|examples|sequences)\b"),
    )
)
WORD_PATTERNS: tuple[tuple[Topic, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, flags))
    for kind, pattern, flags in (
        (
            Topic.DATASET,
            rf"\b(?:on|dataset:?|corpus:?)\s+(?:the\s+)?(?P<word>(?i:{CORPORA})(?![\w-])|[A-Z][\w.+-]*(?:\s[A-Z][\w.+-]*)*)"
            r"(?:\s+(?:dataset|corpus)\b)?",
            0,
        ),
        (Topic.DATASET, rf"(?<![\w-])(?P<word>(?i:{CORPORA}))(?![\w-])", 0),
        (Topic.DEVICES, rf"\bon\s+(?P<word>(?:{DEVICE_WORDS}))(?!\s*\d)", 0),
        (Topic.PRECISION, r"\b(?P<word>bf16|bfloat16|fp16|float16|fp32|float32|fp8|int8)\b", re.IGNORECASE),
        (Topic.WRAPPER, r"\b(?P<word>FSDP2?|ZeRO-?[123]|DeepSpeed|DDP|DistributedDataParallel|DataParallel)\b(?![\s-]?\d)", 0),
        (Topic.TRAINED, r"\b(?:has\s+)?(?P<word>trained|training ran|finished training)\b", re.IGNORECASE),
    )
)


def _read(clause: str) -> Iterator[Statement]:
    """The statements of one clause; what no pattern took is a statement that nothing supports."""
    taken: list[tuple[int, int]] = []
    of_the_run: list[tuple[int, int, Statement]] = []

    def take(start: int, end: int) -> bool:
        if any(start < last and first < end for first, last in taken):
            return False
        taken.append((start, end))
        return True

    for kind, pattern in PATTERNS:
        for match in pattern.finditer(clause):
            rate = RATE.match(clause, match.end())
            if not take(match.start(), match.end() if rate is None else rate.end()):
                continue
            if rate is not None:  # four GPUs a node, tokens a second: no total
                yield Statement(kind=Topic.OTHER, text=clause[match.start() : rate.end()].strip())
                continue
            before = clause[: match.start()]
            if PART_OF.search(before) or (kind in VOLUMES and (ITS_SIZE.search(before) or SIZE_OF.match(clause, match.end()))):
                yield Statement(kind=Topic.OTHER, text=match.group().strip())
                continue
            low, high = quantity(match)
            if kind is Topic.DURATION:
                low, high = low * SECONDS[match["unit"]], high * SECONDS[match["unit"]]
                low, high = low - 0.05 * low, high + 0.05 * high  # durations are written with 5 % tolerance
            over = (match.groupdict().get("bound") or "").lower() == "over"
            across = over and kind in OVER_MAY_BE_ACROSS and MORE_THAN.search(before) is None
            text = match.group().strip()
            after = kind in OF_THE_RUN and (AFTER.search(before) is not None or "step " in text.lower())
            one = Statement(kind=kind, text=text, low=low, high=high, vague=across, is_moment=after)
            if across:
                one = replace(one, low=parse_number(match["digits"], match.groupdict().get("scale"))[0])
            if kind in OF_THE_RUN:
                of_the_run.append((*match.span(), one))
            else:
                yield one
    for kind, pattern in VAGUE_PATTERNS:
        for match in pattern.finditer(clause):
            if take(*match.span()):
                many = " ".join(match["many"].lower().split())
                yield Statement(
                    kind=kind,
                    text=match.group().strip(),
                    low=AT_LEAST_MANY.get(many, 2.0),
                    high=float("inf"),
                    vague=not many.startswith("multi"),
                )
    for kind, pattern in WORD_PATTERNS:
        for match in pattern.finditer(clause):
            if kind is Topic.DATASET and NOT_A_DATASET.match(match["word"]):
                continue
            if take(*match.span()):
                bounds = (1.0, float("inf")) if kind is Topic.DEVICES else (None, None)
                yield Statement(kind=kind, text=match.group().strip(), word=match["word"], low=bounds[0], high=bounds[1])
    for match in LEFT.finditer(clause):
        if take(match.start(), match.end("digits")):
            counted = "" if SAYS_NOTHING.fullmatch((match["noun"] or "").strip().lower()) else match["noun"] or ""
            text = clause[match.start() : match.end("digits")] + match["share"] + counted
            yield Statement(kind=Topic.OTHER, text=text, is_moment=AFTER.search(clause[: match.start()]) is not None)
    not_read = tuple(_not_read(clause, taken))
    for start, end, one in of_the_run:
        beside = (clause[slice(*run)] for run in not_read if _touch(clause, run, (start, end)))
        yield replace(one, beside=next(beside, ""))
    yield from (Statement(kind=Topic.NOT_READ, text=clause[slice(*run)]) for run in not_read)


def _touch(clause: str, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether nothing but words that say nothing stands between two parts of a clause."""
    first, last = sorted((one, other))
    words = (match.group().strip(".!?:—–-").lower() for match in TOKEN.finditer(clause[first[1] : last[0]]))
    return all(SAYS.search(word) is None or SAYS_NOTHING.fullmatch(word) for word in words)


def _not_read(clause: str, taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The runs of words that no pattern took and that say something."""
    run: tuple[int, int] | None = None
    for match in TOKEN.finditer(clause):
        left = [place for place in range(*match.span()) if not any(first <= place < last for first, last in taken)]
        word = "".join(clause[place] for place in left).strip(".!?:—–-").lower()  # `-hours` of `4 GPU-hours`
        if SAYS.search(word) and not SAYS_NOTHING.fullmatch(word):
            run = (match.start() if run is None else run[0], match.end())
        elif run is not None and not SAYS_NOTHING.fullmatch(word):
            yield run
            run = None
    if run is not None:
        yield run
