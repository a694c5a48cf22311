"""Heartbeats: `<run>/heartbeats/<host>.json` says that the supervisor on this host is alive and lists its processes.

The file is rewritten every 30 s and removed at the end. Other hosts count a launch as alive while its heartbeat is younger
than three minutes; on the same host the processes themselves are checked. An error while writing is returned, not raised.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

INTERVAL_SECONDS = 30.0
FRESH_SECONDS = 180.0
VERSION = 1


class Heartbeat(NamedTuple):
    """One host's heartbeat. `processes` are (pid, start time in ticks) of the launch on that host."""

    host: str
    launch: int
    pid: int
    start_ticks: int
    boot_id: str
    uid: int
    time: float
    processes: tuple[tuple[int, int], ...] = ()
    progress: Mapping[str, Any] | None = None  # `StallWatch.progress`

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        fields = self._asdict()
        moment = round(fields.pop("time"), 3)
        return {"v": VERSION, **fields, "t": moment}

    def age(self, now: float) -> float:
        """Return the seconds since it was written, by the writer's clock; 0 when that clock is ahead."""
        return max(0.0, now - self.time)


def parse_heartbeat(text: str) -> Heartbeat | None:
    """Parse a heartbeat; None for another version, a partial file, or one that is not a heartbeat."""
    try:
        data = json.loads(text)
        if data["v"] != VERSION:
            return None
        return Heartbeat(
            *(str(data["host"]), int(data["launch"]), int(data["pid"]), int(data["start_ticks"])),
            *(str(data["boot_id"]), int(data["uid"]), float(data["t"])),
            processes=tuple((int(pid), int(ticks)) for pid, ticks in data["processes"]),
            progress=data["progress"] if isinstance(data.get("progress"), dict) else None,
        )
    except (ValueError, KeyError, TypeError):
        return None


def write_heartbeat(directory: Path, beat: Heartbeat) -> OSError | None:
    """Replace this host's file. Returns the error instead of raising it: a full disk must not end a run."""
    path = directory / f"{beat.host}.json"
    from rollback.disk.durable import write_atomic  # `status` only reads heartbeats

    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(beat.to_json()) + "\n", durable=False)
    except OSError as error:
        return error
    return None


def remove_heartbeat(directory: Path, beat: Heartbeat) -> None:
    """Remove this host's file if this supervisor wrote it."""
    path = directory / f"{beat.host}.json"
    try:
        mine = parse_heartbeat(path.read_text(encoding="utf-8"))
        if mine is not None and (mine.pid, mine.start_ticks) == (beat.pid, beat.start_ticks):
            path.unlink()
    except OSError:
        pass  # it counts as stale after three minutes


def lease_path(directory: Path, host: str) -> Path:
    """The file that a supervisor on `host` keeps locked while it lives."""
    return directory / f"{host}.lease"


def read_heartbeats(directory: Path) -> list[Heartbeat]:
    """Return the heartbeats of all hosts, in order of host name."""
    beats = []
    for path in sorted(directory.glob("*.json")):
        try:
            beat = parse_heartbeat(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if beat is not None:
            beats.append(beat)
    return beats


# --- The lease: a file that a supervisor keeps locked

# The kernel lets go of the lock when the process ends, whatever ended it. It counts only between processes of one kernel (the
# same boot id), because locks of network file systems may be local to a machine. Where it does not tell, nothing is concluded.


def take_lease(path: Path) -> int | None:
    """Lock this file for as long as the process lives; the descriptor, or None where it cannot be locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def is_free(path: Path) -> bool:
    """Whether nobody holds the lease. False where that cannot be found out."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
