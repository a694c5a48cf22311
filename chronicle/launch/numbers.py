"""The number of a launch: the next free directory below `launches/`, taken by creating it."""

from __future__ import annotations

import re

from chronicle.launch.admission import LaunchRefused
from chronicle.paths import RunPaths

__all__ = ["take_number"]

NUMBER = re.compile(r"\d{4,}")


def take_number(paths: RunPaths) -> int:
    """The next launch number, taken by creating its directory: two launches never share one."""
    try:
        paths.launches_dir.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name) for p in paths.launches_dir.iterdir() if NUMBER.fullmatch(p.name)]
        number = max(taken, default=0) + 1
        while True:
            try:
                paths.launch_dir(number).mkdir()
                return number
            except FileExistsError:
                number += 1
    except OSError as error:
        raise LaunchRefused(
            f"cannot create a launch directory in `{paths.launches_dir}`: {error.strerror or error}",
            "free space or name another place with --logs DIR",
        ) from error
