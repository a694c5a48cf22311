"""Measure a running launch: metrics from printed lines, polls of the live detector, GPU utilisation.

    bytes of the pipes -> whole lines -> `metrics.lines` dialects -> held for ten seconds -> metrics.jsonl

A trainer's own `metrics.jsonl` takes precedence: once one exists, printed lines are no longer parsed. `DeviceSampler` adds
one line per GPU and sample, and one for the host, to `launches/<nnnn>/evidence/host-<host>.jsonl`; claims about devices leave
out idle ones, and the page draws all of it.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from chronicle.launch.output import read_tail, split_lines
from chronicle.metrics.lines import PrintedLines
from chronicle.metrics.log import MetricsWriter, Point, parse_line, read_metrics
from rollback.channels import HINTS

HOLD_SECONDS = 10.0
LINES_AT_ONCE = 64  # .3 to .5 ms each
BACKLOG_BYTES = 8 << 20
HURRIED_BYTES = 256 << 10
REPEATS = 50  # this many old steps in a row are a restarted counter, not a slow rank
MARKS = tuple(hint.encode() for hint in HINTS)
BLOCK_STARTS = b" \t{}|-[E\x1b0123456789"  # lines of a table or a block may hold none of these hints


class _Step(NamedTuple):
    step: int
    time: float
    values: Mapping[str, float]
    attempt: int = 0


class _Arrived(NamedTuple):
    """What was printed, or that an attempt has begun."""

    source: int
    data: bytes
    attempt: int | None = None
    after_gap: bool = False  # it begins within a line


@dataclass
class PrintedMetrics:
    """Turns printed lines into `metrics.jsonl`. Call `write_due` once a second and `finish` after the last output.

    Lines are held back for ten seconds, so that the trainer's own file can appear first. A line without a step is ignored.
    Steps only grow within an attempt of a launch: a line repeated by another rank is dropped (a bar that moves shows the step
    before at first: its last line counts), and when the step counter restarts (once an epoch) parsing stops with a message.
    `on_step_back` is called when a printed step is no new one: where the ranks were started again, it says so here.
    """

    path: Path
    _: KW_ONLY
    say: Callable[[str], None]
    complain: Callable[[str], None]
    clock: Callable[[], float] = time.time
    on_step_back: Callable[[], None] = lambda: None
    seen: int = 0  # points that were printed, repeated steps too; any output once parsing has stopped: signs of progress
    _arrived: deque[_Arrived] = field(default_factory=deque)  # what is not parsed yet
    _num_waiting: int = 0  # bytes of it
    _lines: deque[tuple[int, bytes]] = field(default_factory=deque)  # of the oldest of it
    _gaps: set[int] = field(default_factory=set)  # sources of which something was left out: the rest of a line comes next
    _said_gap: bool = False
    _is_reading: bool = False
    _attempt: int = 0  # of the ranks that print
    _marked: int = 0  # the one whose mark was written last
    _rest: dict[int, bytes] = field(default_factory=dict)
    _readers: dict[int, PrintedLines] = field(default_factory=dict)  # one a source: blocks and tables go over several lines
    _held: list[_Step] = field(default_factory=list)
    _open: _Step | None = None  # several lines about one step are merged into one point
    _last: int = -1
    _repeats: int = 0
    _writer: MetricsWriter | None = None
    _size: int | None = None  # size of the file after our last write; None: no file yet
    _deaf: bool = False  # parsing has stopped; parsed points are still written
    _off: bool = False  # writing has stopped too

    @property
    def writing(self) -> bool:
        """Return whether metrics of this launch come from printed lines."""
        return self._writer is not None

    def take(self, source: int, data: bytes) -> None:
        """Take bytes from one pipe or rank, and parse some of them where nothing else waits; `source` identifies it."""
        if self._deaf:
            self.seen += 1
            return
        if self._num_waiting + len(data) > BACKLOG_BYTES:
            self._leave_out(source)
            return
        self._arrived.append(_Arrived(source, data, after_gap=source in self._gaps))
        self._gaps.discard(source)
        self._num_waiting += len(data)
        if len(self._arrived) == 1 and not self._lines:
            self.read_some()

    def read_some(self) -> bool:
        """Parse a bounded number of lines; whether more wait. The loop that calls this has signals to look at."""
        if self._is_reading:
            return False  # a line is looked at, and asks for what was printed until now
        self._is_reading = True
        try:
            for _ in range(LINES_AT_ONCE):
                while not self._lines and self._arrived:
                    self._split(self._arrived.popleft())
                if not self._lines:
                    return False
                source, line = self._lines.popleft()
                if not self._deaf and (line[:1] in BLOCK_STARTS or any(mark in line for mark in MARKS)):
                    self._take_line(source, line)
        finally:
            self._is_reading = False
        return bool(self._lines or self._arrived)

    def _split(self, arrived: _Arrived) -> None:
        self._num_waiting -= len(arrived.data)
        if arrived.attempt is not None:
            self._begin(arrived.attempt)
            return
        source, data = arrived.source, arrived.data
        if arrived.after_gap:
            self._rest[source] = b""
            data = data.partition(b"\n")[2]
        lines, self._rest[source] = split_lines(self._rest.get(source, b""), data)
        self._lines.extend((source, line) for line in lines)

    def _leave_out(self, source: int) -> None:
        """More is printed than can be parsed: the log has all of it, the metrics have not."""
        self._gaps.add(source)
        if not self._said_gap:
            self._said_gap = True
            self.say("more is printed than can be read as metrics: some of it is left out of them; the log has every line")

    def begin_attempt(self, number: int) -> None:
        """The launcher has started the ranks again: what they print from here on may go back."""
        if self._is_reading:
            self._begin(number)  # the line that is looked at said so
        else:
            self._arrived.append(_Arrived(0, b"", attempt=number))
            self.read_some()

    def _begin(self, number: int) -> None:
        if number <= self._attempt:
            return
        self._hold_open()
        self._attempt, self._last, self._repeats = number, -1, 0
        self._readers.clear()

    def write_due(self) -> None:
        """Write points that were held long enough, unless the trainer has its own file."""
        if self._off or not self._held:
            return
        if self._writer is not None or self.clock() - self._held[0].time >= HOLD_SECONDS:
            self._write()

    def finish(self, *, in_a_hurry: bool = False) -> None:
        """Parse what waits, write the remaining points and close the file. In a hurry, only the newest output is parsed."""
        while in_a_hurry and self._num_waiting > HURRIED_BYTES:
            left_out = self._arrived.popleft()
            self._num_waiting -= len(left_out.data)
            if left_out.attempt is not None:
                self._begin(left_out.attempt)
            else:
                self._leave_out(left_out.source)
        for place, one in enumerate(self._arrived):
            if one.attempt is None and one.source in self._gaps:  # the first of its source after something was left out
                self._gaps.discard(one.source)
                self._arrived[place] = one._replace(after_gap=True)
        while self.read_some():
            pass
        for source in list(self._rest):
            self.take(source, b"\n")
        self._hold_open()
        if self._held and not self._off:
            self._write()
        self._stop()

    def _take_line(self, source: int, line: bytes) -> None:
        point = self._parse(source, line)
        if point is None or point.step < 0:
            return
        self.seen += 1
        if point.step < self._last:
            before = self._attempt
            self.on_step_back()
            waiting = [one for one in self._arrived if one.attempt is not None]
            if self._attempt == before and waiting:
                self._begin(waiting[0].attempt or 0)  # it was heard of before these lines were parsed
            point = point if self._attempt == before else self._parse(source, line) or point
        if self._open is not None and point.step == self._open.step:
            over, kept = (self._open.values, point.values) if b"%|" in line else (point.values, self._open.values)
            self._open = self._open._replace(values={**over, **kept})
        elif point.step > self._last:
            self._hold_open()
            self._open = _Step(point.step, self.clock(), point.values, self._attempt)
            self._last, self._repeats = point.step, 0
        else:
            self._repeats += 1
            if self._repeats == REPEATS:
                self._deaf = True
                if not self._has_another_writer():
                    self.say(f"printed steps went back from {self._last} to {point.step}: printed lines are no longer read as "
                              "metrics; print the number of completed optimizer steps")  # fmt: skip

    def _hold_open(self) -> None:
        """The lines about one step are over."""
        if self._open is not None:
            self._held.append(self._open)
        self._open = None

    def _parse(self, source: int, line: bytes) -> Point | None:
        reader = self._readers.setdefault(source, PrintedLines(counted=-1))
        return reader.parse(line.decode("utf-8", "replace") + "\n")

    def _write(self) -> None:
        if self._has_another_writer():
            self._deaf = self._off = True
            self._stop()
            return
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self.path, clock=self.clock, attempt=0)
                self.say("the trainer writes no metrics.jsonl: loss and LR are read from its printed lines")
            for held in self._held:
                if held.attempt != self._marked:
                    self._marked = held.attempt
                    self._writer.begin_attempt(held.attempt, time=held.time)
                self._writer.write(held.step, held.values, time=held.time)
            self._size = os.stat(self.path).st_size
        except OSError as error:
            self.complain(f"cannot write `{self.path}`: {error.strerror or error}; metrics are not recorded")
            self._deaf = self._off = True
        self._held.clear()

    def _has_another_writer(self) -> bool:
        """Return whether somebody else created or extended the file: the trainer writes its own."""
        try:
            return os.stat(self.path).st_size != self._size
        except OSError:
            return False

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._held.clear()
        self._rest.clear()
        self._open = None


# --- The live detector, and the ends of the per-step log

TAIL_BYTES = 1 << 16


class LiveDetector(Protocol):
    """The part of `chronicle.watch.LiveWatch` used here. Each event has a `tier`."""

    def poll(self) -> Iterable[object]:
        """Return events opened or changed since the last call."""

    def finish(self) -> Iterable[object]:
        """Return the events of the rest of the log, after the launch has ended."""


def last_point(path: Path) -> Point | None:
    """Return the point of the last complete line of a `metrics.jsonl`; None when there is none."""
    return next(_points_from_the_end(path), None)


def last_steps(path: Path) -> list[int]:
    """The last two steps of a `metrics.jsonl`, in the order of the file; fewer where it has no more."""
    steps = dict.fromkeys(point.step for point in _points_from_the_end(path))
    return list(islice(steps, 2))[::-1]


def _points_from_the_end(path: Path) -> Iterator[Point]:
    lines = read_tail(path, TAIL_BYTES).split(b"\n")[:-1]
    return (point for line in reversed(lines) if (point := parse_line(line)) is not None)


def read_start_step(path: Path) -> int | None:
    """Return the step a launch started from, computed from the first two logged steps; None until both exist.

    A trainer that logs every tenth step writes 10, 20, …: it started at 0, not at 9. One whose first step is 0 started at -1.
    """
    try:
        first, second = (point.step for point in islice(read_metrics(path), 2))
    except (OSError, ValueError):
        return None
    stride = second - first
    return max(first - stride, -1) if stride > 0 and first % stride == 0 else max(first - 1, 0)


# --- What the machine does

QUERY = (
    "--query-gpu=uuid,utilization.gpu,memory.used,power.draw,temperature.gpu", "--format=csv,noheader,nounits"
)  # fmt: skip
SAMPLE_VERSION = 1
HOST_SECONDS = 10.0  # between two samples of the host; the GPUs are asked with each heartbeat, because that starts a process
WHOLE_DISK = re.compile(r"(sd[a-z]+|[hv]d[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")
SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own


class DeviceSample(NamedTuple):
    """One GPU at one moment; `power` in watts and `temperature` in °C where the device reports them."""

    uuid: str
    busy: float  # fraction of the last sample period of the driver
    memory: int  # bytes in use
    power: float | None = None
    temperature: float | None = None


def parse_sample(text: str) -> list[DeviceSample]:
    """Parse the output of `nvidia-smi`: each device that reports its use and its memory."""
    rows = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 3 and words[1].isdigit() and words[2].isdigit():
            more = [float(word) if word.replace(".", "", 1).isdigit() else None for word in [*words[3:5], "", ""]]
            rows.append(DeviceSample(words[0], int(words[1]) / 100, int(words[2]) << 20, more[0], more[1]))
    return rows


def read_devices() -> list[DeviceSample]:
    """The devices of this host now; none without `nvidia-smi`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    return parse_sample(subprocess.run([program, *QUERY], capture_output=True, text=True, check=False).stdout)


def read_counters(now: float, proc: Path = Path("/proc")) -> dict[str, float]:
    """What the kernel of this host counts since its boot; what a file does not say is left out.

    `time` (`now`, monotonic seconds), `busy` and `all` (ticks), bytes `read` and `written` of whole disks, bytes of `network`
    in and out without loopback.
    """
    found = {"time": now}
    ticks = [int(word) for line in _lines_of(proc / "stat")[:1] for word in line.split()[1:9]]
    if len(ticks) > 4:
        found |= {"all": sum(ticks), "busy": sum(ticks) - ticks[3] - ticks[4]}  # idle, iowait
    disks = [line.split() for line in _lines_of(proc / "diskstats")]
    whole = [words for words in disks if WHOLE_DISK.match(words[2])]
    if disks:
        found["read"] = SECTOR_BYTES * sum(int(words[5]) for words in whole)
        found["written"] = SECTOR_BYTES * sum(int(words[9]) for words in whole)
    cards = [line.replace(":", " ").split() for line in _lines_of(proc / "net" / "dev")[2:]]
    if cards:
        found["network"] = sum(int(words[1]) + int(words[9]) for words in cards if words[0] != "lo")
    return found


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def host_rates(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Use between two readings: `cpu_fraction` of all cores, bytes a second; what is not known is left out."""
    grown = {name: after[name] - before[name] for name in after if name in before}
    found: dict[str, float] = {}
    if grown["time"] <= 0:
        return found
    if grown.get("all", 0) > 0:
        found["cpu_fraction"] = round(grown["busy"] / grown["all"], 4)
    for name in ("read", "written", "network"):
        if grown.get(name, -1) >= 0:  # a counter that went back was reset
            found[f"{name}_bytes_per_second"] = round(grown[name] / grown["time"])
    return found


def read_host_memory(proc: Path = Path("/proc")) -> dict[str, float]:
    """Memory of the host that is not available, in bytes, and its part of the whole."""
    rows = [line.split() for line in _lines_of(proc / "meminfo")[:3]]
    sizes = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1 and row[1].isdigit()}
    if "MemAvailable" not in sizes or not sizes.get("MemTotal"):
        return {}
    used = sizes["MemTotal"] - sizes["MemAvailable"]
    return {"memory_bytes": used, "memory_fraction": round(used / sizes["MemTotal"], 4)}


class DeviceSampler:
    """Samples this host, and its GPUs with `nvidia-smi`, without blocking the supervisor.

    `sample` starts a query; its answer is written when it arrives through the selector. Without `nvidia-smi` nothing is
    started or written, and utilisation stays unknown. `look` reads the host's counters when they are due.
    """

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        *,
        host: str,
        step: Callable[[], int | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / "evidence" / f"host-{host}.jsonl"
        self._selector, self._host, self._clock, self._step = selector, host, clock, step
        self._program = shutil.which("nvidia-smi")
        self._pipe: int | None = None
        self._answer = b""
        self._before: dict[str, float] = {}
        self._is_over = False  # the disk refused a line
        self.busy: dict[str, float] = {}  # UUID -> fraction, of the newest sample

    def sample(self) -> None:
        """Start a query, unless one is still running or `nvidia-smi` is missing."""
        if self._program is None or self._pipe is not None:
            return
        read_end, write_end = os.pipe()
        try:
            child = subprocess.Popen([self._program, *QUERY], stdout=write_end, stderr=subprocess.DEVNULL)
            child.returncode = 0  # the supervisor reaps it
        except OSError:
            self._program = None
            os.close(read_end)
            return
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self._pipe, self._answer = read_end, b""
        self._selector.register(read_end, selectors.EVENT_READ, self._read)

    def look(self, now: float) -> None:
        """Sample the host if the last sample is `HOST_SECONDS` old. `now`: monotonic seconds."""
        if self._is_over or now - self._before.get("time", float("-inf")) < HOST_SECONDS:
            return
        try:
            before, self._before = self._before, read_counters(now)
        except (ValueError, IndexError):
            return  # a kernel that writes these files otherwise
        if before and (found := host_rates(before, self._before) | read_host_memory()):
            self._append([{"kind": "host", **found}])

    def close(self) -> None:
        """Drop a query that has not been answered."""
        if self._pipe is not None:
            self._selector.unregister(self._pipe)
            os.close(self._pipe)
            self._pipe = None

    def _read(self) -> None:
        assert self._pipe is not None
        try:
            block = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        self._answer += block
        if not block:
            self.close()
            self._write(parse_sample(self._answer.decode("utf-8", "replace")))

    def _write(self, rows: list[DeviceSample]) -> None:
        self.busy = {row.uuid: row.busy for row in rows}
        records: list[dict[str, Any]] = []
        for row in rows:
            record = {"kind": "device", "device": row.uuid, "busy_fraction": row.busy, "memory_bytes": row.memory}
            more = {"power_watts": row.power, "temperature_celsius": row.temperature}
            records.append(record | {name: value for name, value in more.items() if value is not None})
        self._append(records)

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        shared = {"v": SAMPLE_VERSION, "t": round(self._clock(), 3), "step": self._step(), "host": self._host}
        lines = "".join(json.dumps({**shared, **record}, separators=(",", ":")) + "\n" for record in records)
        if not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(lines.encode())
        except OSError:
            self._program, self._is_over = None, True  # missing evidence makes a claim UNSUPPORTED later; the run goes on
