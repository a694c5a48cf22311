"""How much memory this host can still give to a process, its control group's limit included. Reads only."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]


def available_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that new work can have without swapping: `MemAvailable`, or less under a memory limit; None where unknown."""
    known = [_of_host(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", cgroups)]
    return min((bytes_free for bytes_free in known if bytes_free is not None), default=None)


def _of_host(meminfo: Path) -> int | None:
    found = _fields(meminfo).get("MemAvailable:")
    return None if found is None else 1024 * found


def _of_groups(membership: Path, cgroups: Path) -> list[int]:
    """What each group from ours up to the root has left; file cache counts as left, since it is given back when asked for."""
    rows = [line.partition("::") for line in _text(membership).splitlines()]
    mine = next((path for number, mark, path in rows if number == "0" and mark), "/").strip("/")
    here, left = cgroups / mine, []
    for group in (here, *here.parents):
        limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used) + _fields(group / "memory.stat").get("inactive_file", 0))
        if group == cgroups:
            break
    return left


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
