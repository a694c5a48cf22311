"""What the machine of a launch does: its GPUs by `nvidia-smi`, its processors and memory.

One line per GPU and sample, and one for the host, in `launches/<nnnn>/evidence/host-<host>.jsonl`; claims about devices leave
out idle ones, and the page draws all of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

QUERY = (
    "--query-gpu=uuid,utilization.gpu,memory.used,power.draw,temperature.gpu", "--format=csv,noheader,nounits"
)  # fmt: skip
SAMPLE_VERSION = 1
HOST_SECONDS = 10.0  # between two samples of the host
DEVICE_SECONDS = 30.0  # between two of its GPUs, each of which starts a process


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


def read_ticks(proc: Path = Path("/proc")) -> tuple[int, int]:
    """(ticks in which a core was busy, all ticks) of this host since its boot; (0, 0) where the kernel does not say."""
    for line in _lines_of(proc / "stat")[:1]:
        ticks = [int(word) for word in line.split()[1:9]]
        if len(ticks) > 4:
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle and iowait
    return 0, 0


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def read_host_memory(proc: Path = Path("/proc")) -> dict[str, float]:
    """Memory of the host that is not available, in bytes, and its part of the whole."""
    rows = [line.split() for line in _lines_of(proc / "meminfo")[:3]]
    sizes = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1 and row[1].isdigit()}
    if "MemAvailable" not in sizes or not sizes.get("MemTotal"):
        return {}
    used = sizes["MemTotal"] - sizes["MemAvailable"]
    return {"memory_bytes": used, "memory_fraction": round(used / sizes["MemTotal"], 4)}


class DeviceSampler:
    """Samples this host and its GPUs, each when it is due; a query of `nvidia-smi` is never waited for.

    Without `nvidia-smi` nothing is started or written, and utilisation stays unknown.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str,
        step: Callable[[], int | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / "evidence" / f"host-{host}.jsonl"
        self._host, self._clock, self._step = host, clock, step
        self._program = shutil.which("nvidia-smi")
        self._query: subprocess.Popen[str] | None = None
        self._asked_at = float("-inf")
        self._sampled_at = float("-inf")
        self._before = (0, 0)
        self._is_over = False  # the disk refused a line
        self.busy: dict[str, float] = {}  # UUID -> fraction, of the newest sample

    def look(self, now: float) -> None:
        """Sample what is due. `now`: monotonic seconds."""
        if self._is_over:
            return
        if now - self._sampled_at >= HOST_SECONDS:
            self._sampled_at = now
            self._sample_host()
        if self._query is not None:
            self._take_answer(self._query)
        elif self._program is not None and now - self._asked_at >= DEVICE_SECONDS:
            self._asked_at = now
            self._ask(self._program)

    def finish(self) -> None:
        """The launch is over: take the answer of a query that was made, where it comes within a second."""
        if self._query is not None:
            with suppress(subprocess.TimeoutExpired):
                self._query.wait(1.0)
            self._take_answer(self._query)

    def _sample_host(self) -> None:
        before, self._before = self._before, read_ticks()
        busy, all_ticks = self._before[0] - before[0], self._before[1] - before[1]
        if not before[1]:
            return  # the first look
        known = {"cpu_fraction": round(busy / all_ticks, 4)} if all_ticks > 0 else {}
        self._append([{"kind": "host", **known, **read_host_memory()}])

    def _ask(self, program: str) -> None:
        try:
            self._query = subprocess.Popen(
                [program, *QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self._program = None

    def _take_answer(self, query: subprocess.Popen[str]) -> None:
        """Take the answer once the query has ended: a line for each GPU, which a pipe holds."""
        if query.poll() is None:
            return
        self._query = None
        assert query.stdout is not None
        with query.stdout as answer:
            rows = parse_sample(answer.read())
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
            self._is_over = True  # missing evidence makes a claim UNSUPPORTED later; the run goes on
