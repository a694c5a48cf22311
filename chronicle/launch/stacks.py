"""Where the ranks of a launch stand: stacks as Python printed them, the kernel's view of each process, and which rank differs.

    dump of faulthandler ─ parse_dump ─┬─ Stand (one rank) ─ judge_stands ─ groups, the rank that differs, its line
    /proc/<pid>/… ─────── look_at ─────┘

Nothing here waits or sends a signal. Formats: CPython's `_Py_DumpTraceback`, proc(5). The innermost frame comes first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from chronicle.launch.processes import Process, read_process


class CodeLine(NamedTuple):
    """One frame of a Python stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.path)}:{self.line} ({self.function})"


Stack = tuple[CodeLine, ...]

THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')


def parse_dump(text: str) -> tuple[Stack, ...]:
    """The stacks of all threads of one dump of faulthandler, in its order; lines that are none of it are skipped."""
    stacks: list[list[CodeLine]] = []
    for line in text.splitlines():
        if THREAD.match(line):
            stacks.append([])
        elif stacks and (found := FRAME.match(line)):
            stacks[-1].append(CodeLine(found[1], int(found[2]), found[3]))
    return tuple(tuple(stack) for stack in stacks if stack)


def main_stack(stacks: Sequence[Stack]) -> Stack:
    """The main thread's: the one that began in a module; else the oldest, which is printed last. () for none."""
    began = [stack for stack in stacks if stack[-1].function == "<module>"]
    return began[-1] if began else (stacks[-1] if stacks else ())


def shape_of(stack: Stack) -> tuple[object, ...]:
    """The stack without the line on which its innermost function is: a loop on the spot keeps it, work changes it."""
    if not stack:
        return ()
    return (stack[0].path, stack[0].function, *stack[1:])


LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3(?:\.\d+)?/|^<")
OWN = str(Path(__file__).resolve().parents[1]) + os.sep  # frames of the guard are not the user's


def user_frame(stack: Stack) -> CodeLine | None:
    """The innermost frame that is in no library: the line of the user's code that does not return."""
    return next((frame for frame in stack if not LIBRARIES.search(frame.path) and not frame.path.startswith(OWN)), None)


# --- the kernel's view


class ProcessReading(NamedTuple):
    """One look at a process and its descendants."""

    state: str  # letter of /proc/<pid>/stat; "" when it has ended
    cpu: float  # seconds since its start
    below: Mapping[int, float]  # the same of each descendant
    moved: int  # bytes read and written by it and its descendants, since their starts
    wchan: str = ""
    syscall: str = ""
    stopped_below: tuple[int, ...] = ()  # descendants that are stopped


STATES: Mapping[str, str] = {
    "T": "stopped by a signal (SIGSTOP)", "t": "stopped by a debugger", "D": "in an uninterruptible wait for a device",
    "Z": "ended, and its parent has not noticed", "X": "ended",
}  # fmt: skip


def look_at(pid: int, below: Iterable[Process]) -> ProcessReading:
    """Read a process and its descendants; what cannot be read counts as nothing."""
    me, moved, cpus, stopped = read_process(pid), _moved(pid), {}, []
    for child in below:
        moved += _moved(child.pid)
        cpus[child.pid] = child.cpu_seconds
        if child.state in ("T", "t"):
            stopped.append(child.pid)
    wchan, syscall = _line(pid, "wchan"), _line(pid, "syscall")
    if me is None:
        return ProcessReading("", 0.0, cpus, moved, wchan, syscall, tuple(stopped))
    return ProcessReading(me.state, me.cpu_seconds, cpus, moved, wchan, syscall, tuple(stopped))


def _moved(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/io", "rb") as counters:
            values = dict(line.split(b": ") for line in counters.read().splitlines())
        return int(values[b"rchar"]) + int(values[b"wchar"]) + int(values[b"read_bytes"]) + int(values[b"write_bytes"])
    except (OSError, ValueError, KeyError):
        return 0


def _line(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(200).decode("utf-8", "replace").strip()
    except OSError:
        return ""


# --- what a rank does

IDLE_CPU = 0.03  # of a core
MOVED_BYTES = 1 << 16  # in a window: more than a log line
NUM_SHAPES = 4  # stacks that must be equal before a busy rank counts as standing
PATIENT_SECONDS = 300.0
DEVICE_SECONDS = 120.0
# Frames of what may take minutes without a sign: such a rank is left alone longer. All else is judged by what it does.
PATIENT = re.compile(
    r"/torch/(?:_dynamo|_inductor|_functorch|serialization|distributed/checkpoint|utils/cpp_extension)|/triton/|/safetensors/|"
    r"/huggingface_hub/|/urllib/|/urllib3/|/http/client|/ssl\.py|/fsspec/|/botocore/|/numba/"
)


class RankDoing(NamedTuple):
    """What one rank did in a window."""

    verdict: str  # "stands", "works", "unknown"
    why: str
    patience: float = 0.0  # seconds of silence that are left to it
    busy: bool = False  # it or its children use the CPU


def judge_rank(
    readings: Sequence[ProcessReading], seconds: float, printed: int, stacks: Sequence[Stack], why_none: str = ""
) -> RankDoing:
    """What a rank did in a window of `seconds`, of which `printed` bytes were its own dumps. Pure.

    `stacks`: of the process that used the CPU, in their order; `why_none`: why there is none.
    """
    first, last = readings[0], readings[-1]
    stack = stacks[-1] if stacks else ()
    patience = PATIENT_SECONDS if any(PATIENT.search(frame.path) for frame in stack) else 0.0
    if all(one.state in ("T", "t") for one in readings):
        return RankDoing("stands", "stopped")
    if not last.state:
        return RankDoing("stands", "ended")
    moved = last.moved - first.moved - printed
    if moved > MOVED_BYTES:
        return RankDoing("works", f"moved {moved:,} bytes", busy=True)
    if sum(one.state == "D" for one in readings) * 2 >= len(readings):
        return RankDoing("stands", "waits for a device", DEVICE_SECONDS)
    own = (last.cpu - first.cpu) / seconds
    below = sum(max(0.0, cpu - first.below.get(pid, 0.0)) for pid, cpu in last.below.items()) / seconds
    if own < IDLE_CPU and below < IDLE_CPU:
        return RankDoing("stands", "uses no CPU and moves no data", patience)
    if len(stacks) < NUM_SHAPES:
        return RankDoing("unknown", f"uses the CPU, and its stack is not known: {why_none or 'too few dumps'}", busy=True)
    if len({shape_of(one) for one in stacks}) > 1:
        return RankDoing("works", "its stack changes", busy=True)
    if user_frame(stack) != stack[0]:  # an evaluation of one kind of layer looks the same in every sample
        patience = PATIENT_SECONDS
    return RankDoing("stands", "uses the CPU and does not leave its function", patience, busy=True)


# --- which rank differs

# Innermost frames of a rank that waits for other ranks: what is known to wait. What is not listed counts as the rank's own.
WAITS = re.compile(r"/torch/distributed/|/torch/nn/parallel/|/torch/autograd/graph\.py$|/accelerate/utils/operations\.py$")
WAITING = re.compile(r"barrier|reduce|gather|scatter|broadcast|_engine_run_backward|wait|recv|synchronize")


class Stand(NamedTuple):
    """Where one rank stands. `idle`: it used next to no CPU; `why`: why there is no stack."""

    rank: int
    pid: int
    state: str = ""
    idle: bool = True
    stack: Stack = ()
    wchan: str = ""
    syscall: str = ""
    stopped_below: tuple[int, ...] = ()
    why: str = ""
    steps: int | None = None
    ended: str = ""  # how it ended, where it did

    @property
    def place(self) -> CodeLine | None:
        """The line of the user's code, else the innermost frame."""
        return user_frame(self.stack) or (self.stack[0] if self.stack else None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as its stack shows."""
        if not self.stack or not (WAITS.search(self.stack[0].path) and WAITING.search(self.stack[0].function)):
            return False
        return self.idle or self.stack[0].function != "_engine_run_backward"  # a backward pass that computes is no wait

    @property
    def words(self) -> str:
        """What it does, in a few words."""
        if self.ended:
            return f"has ended ({self.ended})"
        if self.state in STATES:
            return f"is {STATES[self.state]}{self._at()}"
        if not self.stack:
            kernel = f", in the kernel: {self.wchan}" if self.wchan not in ("", "0") else ""
            return f"{'uses no CPU' if self.idle else 'uses the CPU'}{kernel}; no stack: {self.why or 'none was printed'}"
        doing = f"waits for other ranks in {self.stack[0].function}" if self.waits else ("waits" if self.idle else "runs")
        below = f"; its process {self.stopped_below[0]} is stopped" if self.stopped_below else ""
        return f"{doing}{self._at()}{below}"

    def _at(self) -> str:
        place = self.place
        if place is None:
            return ""
        inner = self.stack[0]
        deeper = "" if inner == place else f", in {inner.function} of {_short(inner.path)}:{inner.line}"
        return f" at {place}{deeper}"


class Autopsy(NamedTuple):
    """Ranks that stand in the same place, and the ranks that differ. `culprits` is () when nothing tells them apart."""

    groups: tuple[tuple[str, tuple[int, ...]], ...]
    culprits: tuple[int, ...]
    because: str


def judge_stands(stands: Sequence[Stand], stepping: Collection[int] = ()) -> Autopsy:
    """Group ranks by equal places and name the one that the others wait for; it is none of those that are `stepping`. Pure.

    In this order: a rank that ended or is stopped; one that does not wait for other ranks while all others do; the
    smallest group where all wait, but in different collectives; the one behind in steps.
    """
    groups: dict[str, list[int]] = {}
    for stand in stands:
        groups.setdefault(_key(stand), []).append(stand.rank)
    told = tuple((key, tuple(ranks)) for key, ranks in sorted(groups.items(), key=lambda one: (-len(one[1]), one[1])))
    standing = [stand for stand in stands if stand.rank not in stepping]
    culprits, because = _find_culprits(standing or stands, told)
    return Autopsy(told, culprits, because)


def _find_culprits(stands: Sequence[Stand], groups: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[int, ...], str]:
    if len(stands) == 1:
        return (stands[0].rank,), "the only rank that stands"
    for because, odd in (
        ("ended", [one for one in stands if one.ended]),
        ("is stopped", [one for one in stands if one.state in ("T", "t")]),
        ("has a process that is stopped", [one for one in stands if one.stopped_below]),
        (
            "does not wait for other ranks, and the others do",
            [one for one in stands if not one.waits and (one.stack or not one.idle)],
        ),
        ("uses the CPU, and the others wait", [one for one in stands if not one.idle]),
    ):
        if 0 < len(odd) < len(stands):
            return tuple(one.rank for one in odd), because
    if len(groups) > 1 and len(groups[-1][1]) < len(groups[0][1]):
        smallest = [ranks for _, ranks in groups if len(ranks) == len(groups[-1][1])]
        return tuple(rank for ranks in smallest for rank in ranks), "waits in another place than most"
    steps = [one.steps for one in stands if one.steps is not None]
    if len(steps) == len(stands) and min(steps) < max(steps):
        return tuple(one.rank for one in stands if one.steps == min(steps)), "has taken fewer steps"
    return (), "all wait in one place" if len(groups) == 1 else "nothing tells which of them is wrong"


def _key(stand: Stand) -> str:
    place = stand.place
    if place is None or stand.ended or stand.state in STATES:
        return stand.words
    return f"{'waits for other ranks in ' + stand.stack[0].function + ' at ' if stand.waits else ''}{place}"


def _short(path: str) -> str:
    """The last two parts of a path: enough to find the file, and readable."""
    return os.sep.join(path.rsplit(os.sep, 2)[-2:]) if path.startswith(os.sep) else path
