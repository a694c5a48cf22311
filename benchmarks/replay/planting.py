"""How a fault of a machine is planted in a recorded launch, and in it alone: the one place for all lists of causes.

A script of the lists begins with `PLANTED` and does by itself what its `kind` says, at step `at`. In the record it is told by
a variable of the prefix `CHRONICLE_`: these are ours, no record holds or compares them, and a replay starts without those of
others. So nothing of it can be seen but its effect, as with a machine that is broken: no file, no argument, no system call.
A fault that is in the replay, too (`stays`), is written into the script before it is recorded.
"""

from pathlib import Path

__all__ = ["PLANTED", "fault", "plant", "plant_for_good"]

VARIABLE = "CHRONICLE_PLANTED"
NONE = "-0-0"
PLANTED = f"""
import os
kind, at, place = os.environ.get("{VARIABLE}", "{NONE}").split("-")
at, place = int(at), int(place)
"""


def fault(kind: str, step: int, place: int = 0) -> str:
    """What is planted, in a word."""
    return f"{kind}-{step}-{place}"


def plant(environ: dict[str, str], fault: str) -> dict[str, str]:
    """The variables of a launch with a fault, "" for none."""
    without = {name: value for name, value in environ.items() if name != VARIABLE}
    return {**without, VARIABLE: fault} if fault else without


def plant_for_good(directory: Path, fault: str) -> None:
    """Write a fault into the scripts of a directory."""
    before = f'"{VARIABLE}", "{NONE}"'
    holders = [path for path in directory.glob("*.py") if before in path.read_text()]
    assert holders, "no script asks what is planted"
    for path in holders:
        path.write_text(path.read_text().replace(before, f'"{VARIABLE}", "{fault}"'))
