"""What a rehearsal costs, and what is kept of it: A and A′, by a digest of all that decides them.

The digest holds the command, the steps, the code (the commit and what differs from it), the packages, the variables of the
environment, and names, sizes and times of change of the files that the command names; without a commit also of those in the
working directory and beside the script. A time that moves without a change only plays A again.
"""

import hashlib
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.launch.code import read_code
from chronicle.launch.provenance import read_packages
from chronicle.launch.restarts import bytes_below
from chronicle.launch.scratch import MOST_ENTRIES, files_below
from chronicle.prints.launch_facts import NOT_COMPARED
from chronicle.story.plain import format_size
from rollback.disk.durable import write_atomic

PLAYED = "played"  # A and A′ are whole
MOST_KEPT_BYTES = 1 << 30


def identity_of(command: Sequence[str], steps: tuple[int, int], cwd: Path, environ: Mapping[str, str]) -> str | None:
    """The digest; None where there are too many files."""
    facts: list[object] = [command, steps, str(cwd), platform.python_version()]
    named = [cwd / value for word in command if (value := word.rpartition("=")[2]) and (cwd / value).exists()]
    for root in sorted({cwd, *(path.parent for path in named if path.suffix == ".py")}):
        code = read_code(root, with_patch=False)
        facts += [code.commit, code.digest]
        if code.commit is None:
            named.append(root)
    for one in named:
        files = files_below(one)
        if len(files) > MOST_ENTRIES:
            return None
        for path in files:
            found = path.lstat()
            facts += [str(path), found.st_size, found.st_mtime_ns]
    facts.append(read_packages(command, environ))
    facts += sorted(one for one in environ.items() if NOT_COMPARED.fullmatch(one[0]) is None)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def said_before(scratch: Path, to: int, seconds: float | None, *, is_one: bool = False) -> str:
    """What it costs, in one line: starts, steps, time as the last one took; and where. `is_one`: B alone, up to its end."""
    starts, steps = "4 launches", 3 * to
    if is_one:
        starts, steps = "1 launch", to
    elif (scratch / PLAYED).exists():
        starts = "2 launches (A and A′ are those of an earlier rehearsal)"
    time = "" if seconds is None else f", {seconds:.0f} s the last time"
    odd = "" if re.fullmatch(r"[\w./@+-]+", str(scratch)) else ", which options may read as several: --keep DIR names another"
    return f"rehearsal: {starts}, about {steps} steps{time}; below `{scratch}`{odd}"


def ensure_room(scratch: Path) -> None:
    """After A: refuse where A′ and B do not find the room that A took. Raises `ChronicleError`."""
    taken, free = bytes_below(scratch), shutil.disk_usage(scratch).free
    if free < 2 * taken:
        raise ChronicleError(
            f"A took {format_size(taken)}, and `{scratch}` has {format_size(free)} left for A′ and B",
            "name a place with more room: --keep DIR",
        )


def mark_played(scratch: Path, ranks: int) -> None:
    """A and A′ are whole: they may be used again."""
    write_atomic(scratch / PLAYED, str(ranks).encode(), durable=False)


def tidy(scratch: Path, *, is_known: bool) -> None:
    """Remove B, what other rehearsals left, and A where it is too large, not whole, or its identity is not known."""
    shutil.rmtree(scratch / "b", ignore_errors=True)
    for other in scratch.parent.iterdir():
        is_kept = other == scratch and is_known and (scratch / PLAYED).exists() and bytes_below(scratch) <= MOST_KEPT_BYTES
        if other.is_dir() and not is_kept:
            shutil.rmtree(other, ignore_errors=True)
