"""Sample the utilisation of this host's GPUs with `nvidia-smi`, without blocking the supervisor.

Each sample adds one line per device to `launches/<nnnn>/evidence/host-<host>.jsonl`; claims about devices use it to leave
out idle ones. Without `nvidia-smi` nothing is started or written, and utilisation stays unknown.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["DeviceSampler", "parse_sample"]

QUERY = ("--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
VERSION = 1


def parse_sample(text: str) -> list[tuple[str, float, int]]:
    """Parse the output of `nvidia-smi`: (UUID, busy fraction, bytes in use) of each device that reports all three."""
    rows = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[1].isdigit() and words[2].isdigit():
            rows.append((words[0], int(words[1]) / 100, int(words[2]) << 20))
    return rows


class DeviceSampler:
    """Starts queries; each answer is written when it arrives through the selector."""

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        *,
        host: str,
        clock: Callable[[], float],
        step: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._path = directory / "evidence" / f"host-{host}.jsonl"
        self._selector = selector
        self._host = host
        self._clock = clock
        self._step = step
        self._program = shutil.which("nvidia-smi")
        self._pipe: int | None = None
        self._answer = b""

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

    def _write(self, rows: list[tuple[str, float, int]]) -> None:
        now, step = round(self._clock(), 3), self._step()
        records = (
            {"v": VERSION, "kind": "device", "t": now, "step": step, "host": self._host, "device": uuid,
             "busy_fraction": busy, "memory_bytes": memory}
            for uuid, busy, memory in rows
        )  # fmt: skip
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        if not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(lines.encode())
        except OSError:
            self._program = None  # missing evidence makes a claim UNSUPPORTED later; the run goes on
