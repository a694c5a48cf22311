"""One log line, one observation: what kind of event it speaks of and which numbers it holds. Pure.

Dialects: Python logging, ISO times, `ps` listings with start times. A line that only states an intention (`Target:`) is
its own kind: planned < started < created < stepped, and none stands in for a later one (seed 001 confused them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

__all__ = ["Kind", "Observed", "parse_line", "parse_time"]


class Kind(Enum):
    """What a line is evidence of."""

    TARGET = "target"  # an intention
    HARDWARE = "hardware"  # what a program says about the machine
    CONFIG = "configuration"
    CREATED = "model created"
    LOOP = "training loop entered"
    STEP = "step"
    WORKERS = "data loader workers"
    MEMORY = "out of memory"
    ERROR = "error"
    ENDED = "ended"
    SAVED = "checkpoint saved"
    PROCESS = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One observation with its place. `time` is as written (no zone is invented), None when the line has none."""

    kind: Kind
    source: str
    line: int
    text: str
    time: datetime | None = None
    numbers: dict[str, float] = field(default_factory=dict)


STAMP = re.compile(r"(\d{4}-\d{2}-\d{2})[T ](\d{2}:\d{2}:\d{2})(?:[.,]\d+)?")
CLOCK = re.compile(r"(?:\w{3} )?(\w{3}) +(\d{1,2}) (\d{2}:\d{2}:\d{2})(?: (\d{4}))?")
PROCESS = re.compile(
    r"\s*(?P<pid>\d{2,8})\s+\w{3} (?P<month>\w{3}) +(?P<day>\d{1,2}) (?P<clock>\d{2}:\d{2}:\d{2})\s+(?P<command>\S.*)"
)
GROUPED = r"(\d{1,3}(?:,\d{3})+|\d{4,})"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

LONGEST_LINE = 2000
# every pattern below needs one of these words: most lines of a log are passed over with one look
TELLING = re.compile(
    r"param|gpu|worker|memory|oom-kill|killed|training|loss|checkpoint|error|exception|traceback|critical|configuration"
    r"|exits|signal",
    re.IGNORECASE,
)
# order matters: the first pattern that matches names the line
PATTERNS: tuple[tuple[Kind, re.Pattern[str], tuple[str, ...]], ...] = (
    (Kind.TARGET, re.compile(rf"\btarget:?\s+{GROUPED}\s+param", re.IGNORECASE), ("params",)),
    (Kind.CREATED, re.compile(rf"\bmodel\b[^\n]*?\b{GROUPED}\s+(?:trainable\s+)?param", re.IGNORECASE), ("params",)),
    (Kind.CREATED, re.compile(rf"\b(?:total|number of)[^\n]*?param[^\n]*?{GROUPED}", re.IGNORECASE), ("params",)),
    (Kind.HARDWARE, re.compile(r"\b(\d+)\s*x\s*(?:NVIDIA|AMD)?\s*\w+\s*GPU", re.IGNORECASE), ("devices",)),
    (Kind.HARDWARE, re.compile(r"\busing (\d+) GPUs?\b", re.IGNORECASE), ("devices",)),
    (
        Kind.WORKERS,
        re.compile(r"Too many dataloader workers: (\d+) \(max is dataset\.num_shards=(\d+)\)"),
        ("workers", "shards"),
    ),
    (Kind.WORKERS, re.compile(r"worker .*(?:exited unexpectedly|killed by signal)", re.IGNORECASE), ()),
    (Kind.MEMORY, re.compile(r"out of memory|OutOfMemoryError|oom-kill|Killed process", re.IGNORECASE), ()),
    (Kind.LOOP, re.compile(r"start(?:ing|ed) training", re.IGNORECASE), ()),
    (
        Kind.STEP,
        re.compile(r"\b(?:step|iteration|global_step)\b\D{0,4}(\d+).*?\bloss\b\D{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE),
        ("step", "loss"),
    ),
    (Kind.SAVED, re.compile(r"\bsav(?:ed|ing)\b.*\bcheckpoint|checkpoint\b.*\bsaved", re.IGNORECASE), ()),
    (Kind.ERROR, re.compile(r"Traceback \(most recent call last\)|\b\w*(?:Error|Exception)\b:|\[(?:ERROR|CRITICAL)\]"), ()),
    (Kind.ENDED, re.compile(r"training (?:complete|finished|ended)|exits successfully|SignalException", re.IGNORECASE), ()),
    (Kind.CONFIG, re.compile(r"\bconfiguration\b\s*:", re.IGNORECASE), ()),
)  # fmt: skip


def parse_line(text: str, source: str, line: int) -> Observed | None:
    """The observation in a line, or None when it says nothing that is looked for; only its first 2,000 characters count."""
    text = text[:LONGEST_LINE].rstrip()
    listed = PROCESS.fullmatch(text)
    if listed is not None:
        numbers = {"pid": float(listed["pid"])}
        stamp = _clock_time(listed["month"], listed["day"], listed["clock"], None)
        return Observed(kind=Kind.PROCESS, source=source, line=line, text=_short(text), time=stamp, numbers=numbers)
    if TELLING.search(text) is None:
        return None
    for kind, pattern, names in PATTERNS:
        match = pattern.search(text)
        if match is not None:
            numbers = {name: float(value.replace(",", "")) for name, value in zip(names, match.groups(), strict=False)}
            if kind is Kind.CONFIG:
                numbers = _configuration(text)
            return Observed(kind=kind, source=source, line=line, text=_short(text), time=parse_time(text), numbers=numbers)
    return None


def parse_time(text: str) -> datetime | None:
    """The first time written in a line; a year that is not written is 1900 and only orders."""
    match = STAMP.search(text)
    if match is not None:
        written = f"{match[1]} {match[2]}"
        return _safe(lambda: datetime.fromisoformat(written))
    match = CLOCK.search(text)
    return None if match is None else _clock_time(match[1], match[2], match[3], match[4])


def _clock_time(month: str, day: str, clock: str, year: str | None) -> datetime | None:
    if month not in MONTHS:
        return None
    number = MONTHS.index(month) + 1
    return _safe(lambda: datetime.fromisoformat(f"{int(year or 1900):04d}-{number:02d}-{int(day):02d} {clock}"))


def _safe(make: Callable[[], datetime]) -> datetime | None:
    try:
        return make()
    except ValueError:
        return None


def _configuration(text: str) -> dict[str, float]:
    """`'d_model': 2048` pairs of a printed configuration."""
    pairs = re.findall(r"['\"]?(\w+)['\"]?\s*[:=]\s*(\d+(?:\.\d+)?)\b", text.partition(":")[2])
    return {name: float(value) for name, value in pairs if not re.fullmatch(r"\d+", name)}


def _short(text: str) -> str:
    stripped = text.strip()
    return stripped if len(stripped) <= 240 else stripped[:239] + "…"
