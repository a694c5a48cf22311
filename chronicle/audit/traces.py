"""Read a directory without a journal: relevant log lines, files with their times, running processes.

What a person wrote is no event: in a document only lines count that begin with a time, as quoted log lines do. Runs that have a
journal are listed, and their files are left to it.

Reads at most a fixed amount and lists what was left out. Follows no symbolic links; changes nothing, ends nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from pathlib import Path

from chronicle.credentials import redact_command
from chronicle.launch.processes import list_processes, read_command, read_environment

__all__ = [
    "DirectoryScan",
    "FoundFile",
    "FoundProcess",
    "LineKind",
    "LogTrace",
    "is_document",
    "observe_line",
    "parse_time",
    "scan_directory",
]


class LineKind(Enum):
    """What a log line is evidence of. Planned, created and stepped differ: seed 001 confused them."""

    TARGET = "target"  # only an intention
    HARDWARE = "hardware"  # a program's statement about the machine
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
    WRITTEN = "written by a person"  # a sentence that a pattern matches: a statement about events, none itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTrace:
    """One observation with its place. `time` is as written, without a zone; None when the line has none."""

    kind: LineKind
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
SLURM_SAYS = "slurmstepd: error: ***"
FRAME = re.compile(r"\s*frame #\d+: ")  # of a C++ stack: `c10::Error::Error(…)` is a place and no error
MARKED = re.compile(r"\s*(?:#{1,6}\s|[-*>|•]\s?|\d{1,2}[.)]\s|\*\*|```)")  # Markdown
SENTENCE = re.compile(r"\s*[A-Z\"“'][^=]*?(?:\s+[^\s=]+){5,}[.!?:][\"”')]*\s*")
PROSE_SHARE = 0.3  # of the lines of a document that are sentences or Markdown
STAMPED = re.compile(rf"[^\w]{{0,4}}(?:{STAMP.pattern}|{CLOCK.pattern})")
# every pattern below needs one of these words, so most lines are skipped after one search
TELLING = re.compile(
    r"param|gpu|worker|memory|oom-kill|killed|training|loss|checkpoint|error|exception|traceback|critical|configuration"
    r"|exits|signal|cancelled at|watchdog",
    re.IGNORECASE,
)
# order matters: the first pattern that matches names the line
LINE_PATTERNS: tuple[tuple[LineKind, re.Pattern[str], tuple[str, ...]], ...] = (
    (LineKind.TARGET, re.compile(rf"\btarget:?\s+{GROUPED}\s+param", re.IGNORECASE), ("params",)),
    (LineKind.CREATED, re.compile(rf"\bmodel\b[^\n]*?\b{GROUPED}\s+(?:trainable\s+)?param", re.IGNORECASE), ("params",)),
    (LineKind.CREATED, re.compile(rf"\b(?:total|number of)[^\n]*?param[^\n]*?{GROUPED}", re.IGNORECASE), ("params",)),
    (LineKind.HARDWARE, re.compile(r"\b(\d+)\s*x\s*(?:NVIDIA|AMD)?\s*\w+\s*GPU", re.IGNORECASE), ("devices",)),
    (LineKind.HARDWARE, re.compile(r"\busing (\d+) GPUs?\b", re.IGNORECASE), ("devices",)),
    (
        LineKind.WORKERS,
        re.compile(r"Too many dataloader workers: (\d+) \(max is dataset\.num_shards=(\d+)\)"),
        ("workers", "shards"),
    ),
    (LineKind.WORKERS, re.compile(r"worker .*(?:exited unexpectedly|killed by signal)", re.IGNORECASE), ()),
    (LineKind.ENDED, re.compile(r"\*\*\* (?:JOB|STEP) \d\S* ON \S+ CANCELLED AT \d{4}-"), ()),
    (LineKind.ERROR, re.compile(r"Watchdog caught collective operation timeout: Work"), ()),
    (LineKind.MEMORY, re.compile(r"out of memory|OutOfMemoryError|oom-kill|Killed process", re.IGNORECASE), ()),
    (LineKind.LOOP, re.compile(r"start(?:ing|ed) training", re.IGNORECASE), ()),
    (
        LineKind.STEP,
        re.compile(r"\b(?:step|iteration|global_step)\b\D{0,4}(\d+).*?\bloss\b\D{0,4}(\d+(?:\.\d+)?)", re.IGNORECASE),
        ("step", "loss"),
    ),
    (LineKind.SAVED, re.compile(r"\bsav(?:ed|ing)\b.*\bcheckpoint|checkpoint\b.*\bsaved", re.IGNORECASE), ()),
    (LineKind.ERROR, re.compile(r"Traceback \(most recent call last\)|\b\w*(?:Error|Exception)\b:|\[(?:ERROR|CRITICAL)\]"), ()),
    (LineKind.ENDED, re.compile(r"training (?:complete|finished|ended)|exits successfully|SignalException", re.IGNORECASE), ()),
    (LineKind.CONFIG, re.compile(r"\bconfiguration\b\s*:", re.IGNORECASE), ()),
)  # fmt: skip


def observe_line(text: str, source: str, line: int) -> LogTrace | None:
    """Return the observation in a line, or None when no pattern matches. Only the first 2,000 characters are searched."""
    text = text[max(0, text.find(SLURM_SAYS)) :][:LONGEST_LINE].rstrip()  # it may stand behind a progress bar without an end
    if FRAME.match(text) is not None:
        return None
    listed = PROCESS.fullmatch(text)
    if listed is not None:
        numbers = {"pid": float(listed["pid"])}
        stamp = _clock_time(listed["month"], listed["day"], listed["clock"], None)
        return LogTrace(kind=LineKind.PROCESS, source=source, line=line, text=_short(text), time=stamp, numbers=numbers)
    if TELLING.search(text) is None:
        return None
    for kind, pattern, names in LINE_PATTERNS:
        match = pattern.search(text)
        if match is not None:
            numbers = {name: float(value.replace(",", "")) for name, value in zip(names, match.groups(), strict=False)}
            if kind is LineKind.CONFIG:
                numbers = _configuration(text)
            return LogTrace(kind=kind, source=source, line=line, text=_short(text), time=parse_time(text), numbers=numbers)
    return None


def parse_time(text: str) -> datetime | None:
    """Return the first time written in a line; a missing year is 1900."""
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
    """Return the `'d_model': 2048` pairs of a printed configuration."""
    pairs = re.findall(r"['\"]?(\w+)['\"]?\s*[:=]\s*(\d+(?:\.\d+)?)\b", text.partition(":")[2])
    return {name: float(value) for name, value in pairs if not re.fullmatch(r"\d+", name)}


def _short(text: str) -> str:
    stripped = text.strip()
    return stripped if len(stripped) <= 240 else stripped[:239] + "…"


# --- Files and processes

LOG_NAMES = (".log", ".out", ".err", ".txt", ".md", ".rst")
DOCUMENT_NAMES = (".md", ".rst")
SOURCE_NAMES = (".py", ".sh", ".sbatch")
MAX_FILES = 20_000
MAX_LOG_BYTES = 64 << 20
TRAINING_VARIABLES = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "CHRONICLE_TOKEN")
TELLING_SOURCE = ("device_ids", "DataParallel", "num_shards", "nproc_per_node", "--num_processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """One file, with its modification time in the machine's local time."""

    path: str
    size_bytes: int
    changed: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProcess:
    """A living process that looks like training, with its start time."""

    pid: int
    parent: int
    started: datetime
    command: str
    orphan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryScan:
    """Everything found in a directory. `left_out` lists what was not read."""

    directory: str
    files: tuple[FoundFile, ...]
    observations: tuple[LogTrace, ...]
    scripts: tuple[tuple[str, str], ...]
    processes: tuple[FoundProcess, ...]
    left_out: tuple[str, ...]
    runs: tuple[Path, ...] = ()  # with a journal; their files are not among the others


def scan_directory(directory: Path) -> DirectoryScan:
    """Scan a directory tree and the processes of this machine."""
    files: list[FoundFile] = []
    observations: list[LogTrace] = []
    scripts: list[tuple[str, str]] = []
    left_out: list[str] = []
    runs: list[Path] = []
    for path in _walk(directory, left_out, runs):
        name = path.relative_to(directory).as_posix()
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append(FoundFile(path=name, size_bytes=stat.st_size, changed=datetime.fromtimestamp(stat.st_mtime)))
        if path.suffix in LOG_NAMES:
            if stat.st_size > MAX_LOG_BYTES:
                left_out.append(f"`{name}`: only its first {MAX_LOG_BYTES >> 20} MiB were read")
            observations += _observations(path, name)
        elif path.suffix in SOURCE_NAMES:
            scripts += ((f"{name}:{number}", line) for number, line in _lines(path) if any(w in line for w in TELLING_SOURCE))
    return DirectoryScan(
        directory=str(directory),
        files=tuple(sorted(files, key=lambda one: (one.changed, one.path))),
        observations=tuple(observations),
        scripts=tuple(scripts),
        processes=tuple(find_training_processes(directory)),
        left_out=tuple(left_out),
        runs=tuple(runs),
    )


def _walk(directory: Path, left_out: list[str], runs: list[Path]) -> Iterator[Path]:
    count = 0
    for root, names, files in os.walk(directory):
        if "journal" in names and any((Path(root) / "journal").glob("*.jsonl")):
            runs.append(Path(root))
            names.clear()
            continue
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in ("__pycache__", "node_modules"))
        for name in sorted(files):
            path = Path(root) / name
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > MAX_FILES:
                left_out.append(f"more than {MAX_FILES} files: the rest was not read")
                return
            yield path


def _observations(path: Path, name: str) -> list[LogTrace]:
    lines = list(_lines(path))
    written = path.suffix in DOCUMENT_NAMES or is_document(text for _, text in lines)
    found = (observe_line(line, name, number) for number, line in lines)
    return [_as_written(one) if written and not _is_quoted(one.text) else one for one in found if one is not None]


def is_document(lines: Iterable[str]) -> bool:
    """Whether lines are a person's notes rather than a program's output: sentences and Markdown, and few times."""
    texts = [line for line in islice((line for line in lines if line.strip()), 2000) if STAMPED.match(line) is None]
    prose = sum(MARKED.match(line) is not None or SENTENCE.fullmatch(line[:LONGEST_LINE]) is not None for line in texts)
    return len(texts) >= 3 and prose >= PROSE_SHARE * len(texts)


def _is_quoted(text: str) -> bool:
    return STAMPED.match(text) is not None or PROCESS.fullmatch(text) is not None


def _as_written(one: LogTrace) -> LogTrace:
    return replace(one, kind=LineKind.WRITTEN, time=None, numbers={})


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from enumerate(file.read(MAX_LOG_BYTES).splitlines(), start=1)
    except OSError:
        return


def find_training_processes(directory: Path) -> Iterator[FoundProcess]:
    """Yield this user's living processes that work in the directory, name it, or are orphaned ranks.

    Other training processes of this machine are left out.
    """
    me = os.getpid()
    booted = _boot_time()
    ticks = os.sysconf("SC_CLK_TCK")
    for process in list_processes():
        if process.pid == me or not process.alive or process.uid != os.getuid():
            continue
        environment = read_environment(process.pid) or {}
        here = _works_in(process.pid, directory) or any(
            str(directory.resolve()) in word for word in read_command(process.pid)
        )
        orphan = process.parent == 1 and any(name in environment for name in TRAINING_VARIABLES)
        if not (here or orphan):
            continue
        command = " ".join(redact_command(read_command(process.pid)))
        if "python" in command or "torchrun" in command:
            started = datetime.fromtimestamp(booted + process.start_ticks / ticks)
            yield FoundProcess(
                pid=process.pid, parent=process.parent, started=started, command=command, orphan=process.parent == 1
            )


def _works_in(pid: int, directory: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(directory.resolve())
    except (OSError, ValueError):
        return False


def _boot_time() -> float:
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError):
        pass
    return datetime.now(UTC).timestamp()
