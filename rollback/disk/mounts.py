"""Mount points, bind mounts of one filesystem on itself included: across them no rename and no hard link goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(rb"\\([0-7]{3})")


def is_mount_point(path: Path, known: frozenset[str] | None = None) -> bool:
    """Whether something is mounted at `path`; `known` is an earlier `mount_points()`, where many paths are asked for."""
    if os.path.ismount(path):
        return True
    return os.path.realpath(path) in (mount_points() if known is None else known)


def mount_points() -> frozenset[str]:
    """Every mount point this process sees, by the kernel's own list; empty where there is none."""
    try:
        with open(MOUNTINFO, "rb") as lines:
            fields = [line.split(b" ", 5)[4] for line in lines if line.count(b" ") > 5]
    except OSError:
        return frozenset()
    return frozenset(os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field)) for field in fields)
