"""Reconstruct the launches of a run without a journal: a timeline of its files and of the lines of its logs.

Steps come from the readers that `watch` uses. Beside them a line counts as an event where it begins with a time, or where
it is an exception of a program's log; what people wrote is no event. Files of runs with a journal are left to it.

Reads at most a fixed amount and lists what was left out. Follows no symbolic links and changes nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from chronicle.metrics.lines import PrintedLines, log_lines
from chronicle.metrics.log import Point
from rollback.channels import Role, value_of

LOG_NAMES = (".log", ".out", ".err", ".txt")
MAX_FILES = 20_000
MAX_LOG_BYTES = 64 << 20
MAX_EVENTS = 200  # of one log; a storm of errors is told by its first ones and a count
LONGEST_LINE = 2000
LONGEST_SHOWN = 200
MOST_FILES = 20
STAMP = re.compile(r"[^\w]{0,4}(?P<day>\d{4}-\d{2}-\d{2})[T ](?P<clock>\d{2}:\d{2}:\d{2})")
TELLING = re.compile(
    r"\b(?:launch|start(?:ing|ed)|resum|load(?:ing|ed)|sav(?:ing|ed)|checkpoint|parameters|GPUs?|abort|kill|cancel|finish|complete"
    r"|error|exception|warning|traceback|out of memory|timeout|signal)",
    re.IGNORECASE,
)
EXCEPTION = re.compile(
    r"\s*(?:\[?rank\d+\]?:?\s*)?(?:Traceback \(most recent call last\)|[\w.]*(?:Error|Exception|Interrupt)\b:?)"
    r"|.*(?:out of memory|slurmstepd: error|Watchdog caught collective)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a log that is told. `time` is as written, without a zone; None where the line has none."""

    log: str
    line: int
    text: str
    time: datetime | None


@dataclass(slots=True, kw_only=True)
class LaunchTrace:
    """The steps between two places where a log begins again."""

    log: str
    first_line: int
    last_line: int
    first_step: int
    last_step: int
    started: datetime | None = None
    ended: datetime | None = None
    loss: float | None = None
    lr: float | None = None
    not_finite_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """One file, with its modification time in the machine's local time."""

    path: str
    size_bytes: int
    changed: datetime


@dataclass(slots=True, kw_only=True)
class Scan:
    """Everything found in a directory. `left_out` lists what was not read; `runs` have a journal."""

    directory: str
    files: list[FoundFile] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    launches: list[LaunchTrace] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)


def scan_directory(directory: Path) -> Scan:
    """Read the logs of a directory tree and list its files."""
    scan = Scan(directory=str(directory))
    for path in _walk(directory, scan):
        name = path.relative_to(directory).as_posix()
        try:
            stat = path.stat()
            changed = datetime.fromtimestamp(stat.st_mtime)
            scan.files.append(FoundFile(path=name, size_bytes=stat.st_size, changed=changed))
            if path.suffix in LOG_NAMES:
                _read_log(path, name, scan)
        except OSError as problem:
            scan.left_out.append(f"`{name}`: {problem.strerror or problem}")
    scan.launches.sort(key=lambda one: (one.started or datetime.max, one.log, one.first_line))
    scan.files.sort(key=lambda one: (one.changed, one.path))
    return scan


def _walk(directory: Path, scan: Scan) -> Iterator[Path]:
    count = 0
    for root, names, files in os.walk(directory):
        if "journal" in names and any((Path(root) / "journal").glob("*.jsonl")):
            scan.runs.append(Path(root))
            names.clear()
            continue
        hidden = {name for name in names if name.startswith(".")} | {"__pycache__", "node_modules"}
        names[:] = sorted(set(names) - hidden)
        for name in sorted(files):
            path = Path(root) / name
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > MAX_FILES:
                scan.left_out.append(f"more than {MAX_FILES} files: the rest was not read")
                return
            yield path


def _read_log(path: Path, name: str, scan: Scan) -> None:
    """Add the launches and events of one log; a text without a step or a time at a line's begin is no log."""
    reader = PrintedLines()
    steps: list[_Step] = []
    events: list[Event] = []
    num_events = 0
    told = 0  # events since the last step
    read = 0
    time: datetime | None = None
    is_log = False
    for number, line in enumerate(log_lines(path), start=1):
        read += len(line)
        if read > MAX_LOG_BYTES:
            scan.left_out.append(f"`{name}`: only its first {MAX_LOG_BYTES >> 20} MiB were read")
            break
        text = line[:LONGEST_LINE]
        stamp = _time_of(text)
        time = stamp or time
        is_log = is_log or stamp is not None
        point = reader.parse(text)
        if point is not None and value_of(point.values, Role.LOSS) is not None:
            reader.passed(point.step)
            steps.append(_Step(point=point, line=number, time=time, told=told))
            told = 0
        elif EXCEPTION.match(text) or (stamp is not None and TELLING.search(text)):
            told += 1
            num_events += 1
            if num_events <= MAX_EVENTS:
                events.append(_event(name, number, text, stamp))
    if not is_log and not steps:
        return
    if num_events > MAX_EVENTS:
        scan.left_out.append(f"`{name}`: {num_events:,} lines tell something; the first {MAX_EVENTS} are told")
    scan.launches += _split(steps, name)
    scan.events += events


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A line with a step, and how many events stood between it and the line with a step before."""

    point: Point
    line: int
    time: datetime | None
    told: int


def _split(steps: list[_Step], log: str) -> list[LaunchTrace]:
    """Another launch begins where the step falls and goes on from there, or comes again after something was told.

    A step that falls for one line alone is another rank that lags behind.
    """
    launches: list[LaunchTrace] = []
    for place, one in enumerate(steps):
        step = one.point.step
        if not launches:
            launches.append(_launch(one, log))
        elif step <= launches[-1].last_step:
            falls = step < launches[-1].last_step
            goes_on = place + 1 == len(steps) or steps[place + 1].point.step <= launches[-1].last_step
            if one.told or (falls and goes_on):
                launches.append(_launch(one, log))
            elif falls:
                continue
        _add(launches[-1], one)
    return launches


def _launch(one: _Step, log: str) -> LaunchTrace:
    step = one.point.step
    return LaunchTrace(
        log=log, first_line=one.line, last_line=one.line, first_step=step, last_step=step, started=one.time
    )


def _add(launch: LaunchTrace, one: _Step) -> None:
    launch.last_step = one.point.step
    launch.last_line = one.line
    launch.ended = one.time
    loss = value_of(one.point.values, Role.LOSS)
    if loss is not None and math.isfinite(loss):
        launch.loss = loss
    elif loss is not None and launch.not_finite_at is None:
        launch.not_finite_at = one.point.step
    if launch.lr is None:
        launch.lr = value_of(one.point.values, Role.LR)


def _time_of(text: str) -> datetime | None:
    match = STAMP.match(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match['day']} {match['clock']}")
    except ValueError:
        return None


def _event(log: str, line: int, text: str, time: datetime | None) -> Event:
    shown = STAMP.sub("", text, count=1).strip()
    if len(shown) > LONGEST_SHOWN:
        shown = shown[: LONGEST_SHOWN - 1] + "…"
    return Event(log=log, line=line, text=shown, time=time)


# --- The draft


def write_draft(scan: Scan, recorded: list[str]) -> str:
    """A post-mortem in Markdown: what was recorded, launches by steps, lines in order, files, what was not read."""
    lines = [f"# Post-mortem draft of `{scan.directory}`", ""]
    if recorded:
        lines += ["## Recorded by chronicle", "", *recorded, ""]
    lines += ["## Launches by the steps of the logs", ""]
    lines += [_launch_line(number, one) for number, one in enumerate(scan.launches, start=1)]
    lines += _gaps(scan.launches)
    if not scan.launches:
        lines.append("- no line with a step was read: whether a step was taken is not known")
    lines += ["", "## Lines of the logs", ""]
    lines += [f"- {_shown(one.time)} {one.text} · `{one.log}:{one.line}`" for one in scan.events] or ["- none"]
    lines += ["", "## Files", ""]
    shown = scan.files[-MOST_FILES:]
    if len(scan.files) > len(shown):
        lines.append(f"- ({len(scan.files) - len(shown)} older ones)")
    lines += [f"- {_shown(one.changed)} `{one.path}` ({one.size_bytes:,} bytes)" for one in shown]
    lines += ["", "## Not read", "", *([f"- {text}" for text in scan.left_out] or ["- nothing"])]
    lines += ["", "## Cause", "", "_Not determined by this draft._", ""]
    return "\n".join(lines)


def _launch_line(number: int, one: LaunchTrace) -> str:
    words = [f"- launch {number}: steps {one.first_step:,}–{one.last_step:,}"]
    words.append(f"{_shown(one.started)} to {_shown(one.ended)}")
    if one.lr is not None:
        words.append(f"first LR {one.lr:.4g}")
    if one.loss is not None:
        words.append(f"last finite loss {one.loss:.4g}")
    if one.not_finite_at is not None:
        words.append(f"loss not finite from step {one.not_finite_at:,}")
    return ", ".join(words) + f" · `{one.log}:{one.first_line}–{one.last_line}`"


def _gaps(launches: list[LaunchTrace]) -> list[str]:
    """What lies between two launches of one log: the pause, and the steps that were taken again."""
    lines: list[str] = []
    for number, (before, after) in enumerate(itertools.pairwise(launches), start=1):
        if before.log != after.log:
            continue
        repeated = before.last_step - after.first_step + 1
        words = f"- between launch {number} and {number + 1}: {repeated:,} steps again from step {after.first_step:,}"
        if before.ended is not None and after.started is not None:
            words += f", {(after.started - before.ended).total_seconds() / 60:.0f} minutes without a step"
        lines.append(words)
    return lines


def _shown(time: datetime | None) -> str:
    return "time unknown" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
