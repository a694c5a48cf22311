"""`<run>/heartbeats/<host>.json`: the supervisor on this host is alive, and these are its processes.

Rewritten every 30 s, removed at the end. A launch without an end whose heartbeat is younger than three minutes counts
as alive for those on other hosts; on the same host the processes themselves are looked at. Writing it never raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollback.disk.durable import write_atomic

__all__ = ["FRESH_SECONDS", "INTERVAL_SECONDS", "Heartbeat", "read_heartbeats", "remove_heartbeat", "write_heartbeat"]

INTERVAL_SECONDS = 30.0
FRESH_SECONDS = 180.0
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One host's sign of life. `processes` are (pid, start time in ticks) of the launch on that host."""

    host: str
    launch: int
    pid: int
    start_ticks: int
    boot_id: str
    uid: int
    time: float
    processes: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The file's form."""
        return {
            "v": VERSION,
            "host": self.host,
            "launch": self.launch,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
            "uid": self.uid,
            "t": round(self.time, 3),
            "processes": [list(pair) for pair in self.processes],
        }

    def age(self, now: float) -> float:
        """Seconds since it was written, by its own clock; a clock that runs ahead counts as fresh."""
        return max(0.0, now - self.time)


def parse_heartbeat(text: str) -> Heartbeat | None:
    """None for a file of another version, torn, or not ours: no sign of life is read out of it."""
    try:
        data = json.loads(text)
        if data["v"] != VERSION:
            return None
        return Heartbeat(
            host=str(data["host"]),
            launch=int(data["launch"]),
            pid=int(data["pid"]),
            start_ticks=int(data["start_ticks"]),
            boot_id=str(data["boot_id"]),
            uid=int(data["uid"]),
            time=float(data["t"]),
            processes=tuple((int(pid), int(ticks)) for pid, ticks in data["processes"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def write_heartbeat(directory: Path, beat: Heartbeat) -> OSError | None:
    """Replace this host's file; returns the error instead of raising: a full disk must not end a run."""
    path = directory / f"{beat.host}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(beat.to_json()) + "\n", durable=False)
    except OSError as error:
        return error
    return None


def remove_heartbeat(directory: Path, beat: Heartbeat) -> None:
    """Remove this host's file if it is still this supervisor's."""
    path = directory / f"{beat.host}.json"
    try:
        mine = parse_heartbeat(path.read_text(encoding="utf-8"))
        if mine is not None and (mine.pid, mine.start_ticks) == (beat.pid, beat.start_ticks):
            path.unlink()
    except OSError:
        pass  # it is stale in three minutes anyway


def read_heartbeats(directory: Path) -> list[Heartbeat]:
    """Heartbeats of all hosts, in order of host name."""
    return [beat for beat in _parse_all(sorted(directory.glob("*.json"))) if beat is not None]


def _parse_all(paths: Iterable[Path]) -> Iterable[Heartbeat | None]:
    for path in paths:
        try:
            yield parse_heartbeat(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            yield None
