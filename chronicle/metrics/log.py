"""`metrics.jsonl`: one JSON line per logged step, appended by the trainer and read while it grows.

A line is `{"step":12,"t":1700000000.1,"loss":2.1,"lr":0.003}`; `t` is seconds since the epoch, the rest are channels
(loss in nats). Appending is a single `os.write` on an `O_APPEND` descriptor without fsync: the last seconds may be lost
in a power cut, and training does not wait for a disk (DESIGN §5.1). JSON has no NaN: non-finite values are the strings
`"NaN"`, `"Infinity"`, `"-Infinity"`, so that `jq` reads the lines. Logs of other tools: `readers`.

Where torchrun has started its ranks again, the writer of the new ones puts a line `{"attempt":1,"t":1700000000.1}` before its
first: the rows below it are that attempt's own. No reader takes it for a step.
"""

from __future__ import annotations

import json
import math
import os
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from chronicle.paths import RunPaths

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RESERVED = frozenset(("step", "t"))
ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"  # torchrun --max-restarts: how often it has started its ranks again
heard: list[Callable[[int, Mapping[str, float]], None]] = []  # called with every line that this process writes; never raise


class Point(NamedTuple):
    """One logged step: `row` counts accepted lines from 0, `time` is seconds since the epoch or None.

    `launch` numbers the sessions of logs that hold several (event files, restarts); None where there is one. `counted`: the log
    names no step here, its points were counted.
    """

    row: int
    step: int
    time: float | None
    values: Mapping[str, float]
    launch: int | None = None
    counted: bool = False


def join_steps(points: Iterable[Point]) -> Iterator[Point]:
    """Make one point of neighbours with the same step that measured different channels."""
    pending: Point | None = None
    for point in points:
        is_same = pending is not None and point.step == pending.step and point.launch == pending.launch
        if pending is not None and is_same and pending.values.keys().isdisjoint(point.values):
            pending = pending._replace(values={**pending.values, **point.values})
            continue
        if pending is not None:
            yield pending
        pending = point
    if pending is not None:
        yield pending


def number_rows(points: Iterable[Point]) -> Iterator[Point]:
    """The points with their rows counted from 0."""
    return (point._replace(row=row) for row, point in enumerate(points))


def points_of_launches(launches: Sequence[Iterable[Point]]) -> Iterator[Point]:
    """The points of the launches of one run, one after the other; of a single launch they name none."""
    for number, points in enumerate(launches):
        for point in points:
            yield point._replace(launch=number if len(launches) > 1 else None)


def unread_bytes(path: Path, size: int) -> str:
    """What is said of a file of records whose last bytes could not be read."""
    return f"the last {size:,} bytes of `{path.name}`: a record is cut or damaged there"


class MetricsWriter:
    """Append points to `metrics.jsonl`; each `write` is one line in one system call.

    A half line left by a crash is ended with a newline first, so that only that line is lost.
    Raises OSError when the file cannot be opened or written; a short write (disk full) raises too.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Callable[[], float] = clock.time, aloud: bool = True,
        attempt: int | None = None,
    ) -> None:  # fmt: skip
        """`aloud`: those in `heard` are told of each line. `attempt`: whose rows they are; None: this process's own."""
        self.path = Path(path)
        self._clock, self._aloud = clock, aloud
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._keys: dict[str, str] = {}
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        if number := attempt_of(os.environ) if attempt is None else attempt:
            self.begin_attempt(number)

    def begin_attempt(self, number: int, *, time: float | None = None) -> None:
        """The rows from here on are those of the ranks' start with this number."""
        os.write(self._fd, f'{{"attempt":{number:d},"t":{self._clock() if time is None else time:.6f}}}\n'.encode())

    def write(self, step: int, values: Mapping[str, float], *, time: float | None = None) -> None:
        """Append one line; a value of None means "not recorded" and is left out."""
        parts = [f'{{"step":{step:d},"t":{self._clock() if time is None else time:.6f}']
        keys = self._keys
        for name, value in values.items():
            if value is None:
                continue
            key = keys.get(name) or self._key(name)
            number = value if type(value) is int else float(value)
            parts.append(key + (repr(number) if number - number == 0 else f'"{json.dumps(number)}"'))
        line = "".join(parts).encode() + b"}\n"
        if os.write(self._fd, line) != len(line):
            raise OSError(f"short write to `{self.path}`: the line of step {step} is incomplete (disk full?)")
        for hear in heard if self._aloud else ():
            hear(step, values)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _key(self, name: str) -> str:
        if name in _RESERVED:
            raise ValueError(f"channel name `{name}` is reserved: expected another name")
        self._keys[name] = f",{json.dumps(name)}:"
        return self._keys[name]


def attempt_of(environ: Mapping[str, str]) -> int:
    """How often the launcher has started this process's group again; 0 for the first time, and where nothing says so."""
    count = environ.get(ATTEMPT_VARIABLE, "")
    return int(count) if count.isdecimal() else 0


def number_of(value: Any) -> float | None:
    """A number, or a tensor of one element, as float; None for texts, truth values and what cannot be converted."""
    if isinstance(value, str | bytes | bool) or value is None:
        return None
    try:
        return float(value)
    except Exception:  # noqa: BLE001 whatever an object of a stranger raises
        return None


def parse_line(line: str | bytes, row: int = 0) -> Point | None:
    """Return the point of one line; None where the line is incomplete, is no JSON object or has no integer `step`."""
    try:
        record = json.loads(line if isinstance(line, str) else line.decode())  # from bytes, `loads` looks for UTF-16 first
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step, time = record.pop("step", None), record.pop("t", None)
    if type(step) is not int:
        if type(step) is not float or not step.is_integer():
            return None
        step = int(step)
    return Point(row, step, time if type(time) is float or type(time) is int else None, _numbers(record))


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record; null means "not recorded", and other text is no channel."""
    for value in record.values():
        if type(value) is not float and type(value) is not int:
            break
    else:
        return record
    kept: dict[str, float] = {}
    for name, value in record.items():
        if type(value) is float or type(value) is int:
            kept[name] = value
        elif type(value) is str and value in NON_FINITE:
            kept[name] = NON_FINITE[value]
    return kept


def read_metrics(path: str | os.PathLike[str]) -> Iterator[Point]:
    """Yield the points of a `metrics.jsonl` in file order; lines that cannot be read are skipped."""
    return (point for _, point in read_attempts(path))


def read_attempts(path: str | os.PathLike[str]) -> Iterator[tuple[int, Point]]:
    """Yield the points in file order, each with the attempt that wrote it; 0 where nothing says so."""
    row = attempt = 0
    with open(path, "rb") as lines:
        for line in lines:
            point = parse_line(line, row)
            if point is not None:
                row += 1
                yield attempt, point
            elif line.startswith(ATTEMPT_MARK):
                attempt = _marked(line, attempt)


ATTEMPT_MARK = b'{"attempt":'


def _marked(line: bytes, before: int) -> int:
    """The number that a mark carries; that of the rows before it where the line is cut."""
    try:
        number = json.loads(line)["attempt"]
    except (ValueError, TypeError, KeyError):
        return before
    return number if type(number) is int else before


def logged_pace(paths: RunPaths, launch: int | None) -> tuple[int | None, float | None]:
    """(last step, mean seconds per step) of a launch's per-step log; None where it has no point, or not two with a time."""
    if launch is None or not paths.metrics_path(launch).exists():
        return None, None
    steps = [(point.step, point.time) for point in read_metrics(paths.metrics_path(launch))]
    timed = [(step, time) for step, time in steps if time is not None]
    last = max((step for step, _ in steps), default=None)
    if len(timed) < 2 or timed[-1][0] <= timed[0][0]:
        return last, None
    return last, max(0.0, (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]))
