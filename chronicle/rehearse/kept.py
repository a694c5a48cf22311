"""What a rehearsal costs, and what is kept of it: A and A′, by a digest of all that decides them.

The digest holds the command, the steps, the code (the commit and what differs from it, or every source file), the packages, the
variables of the environment, the files that the command names, and names, sizes and times of change in the directories that it
names; of a file too large to read its time of change as well. A time that moves without a change only plays A again.
"""

import hashlib
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.launch.code import MOST_SOURCES, SOURCE_SUFFIXES, read_code
from chronicle.launch.provenance import read_packages
from chronicle.rehearse.launches import files_below
from chronicle.resume.launch_facts import NOT_COMPARED
from chronicle.story.plain import format_size
from rollback.disk.durable import write_atomic

PLAYED = "played"  # A and A′ are whole
MOST_KEPT_BYTES = 1 << 30
MOST_READ_BYTES = 64 << 20
NUM_CHECKPOINTS = 6  # two of A, of A′ and of B


def identity_of(command: Sequence[str], steps: tuple[int, int], cwd: Path, environ: Mapping[str, str]) -> str | None:
    """The digest; None where there are too many source files to read."""
    digest = hashlib.sha256(repr((command, steps, str(cwd), platform.python_version())).encode())
    named = [cwd / value for word in command if (value := word.rpartition("=")[2]) and (cwd / value).exists()]
    for root in sorted({cwd, *(path.parent for path in named if path.suffix == ".py")}):
        code = read_code(root, with_patch=False)
        digest.update(repr((code.commit, code.digest)).encode())
        sources = [path for path in files_below(root) if code.commit is None and path.suffix in SOURCE_SUFFIXES]
        if len(sources) > MOST_SOURCES:
            return None
        named += sources
    for path in named:
        for one in files_below(path):
            digest.update(_of_file(one, is_read=path == one))
    digest.update(read_packages(command, environ) or b"")
    digest.update(repr(sorted(one for one in environ.items() if NOT_COMPARED.fullmatch(one[0]) is None)).encode())
    return digest.hexdigest()


def _of_file(path: Path, *, is_read: bool) -> bytes:
    found = path.lstat()
    content = str(found.st_mtime_ns)
    if is_read and found.st_size <= MOST_READ_BYTES:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path}{found.st_size}{content}".encode()


def said_before(scratch: Path, to: int, largest: int | None, seconds: float | None) -> str:
    """What it costs, in one line: starts, steps, time as the last one took, disk."""
    starts = "2 launches (A and A′ are those of an earlier rehearsal)" if (scratch / PLAYED).exists() else "4 launches"
    time = "" if seconds is None else f", {seconds:.0f} s the last time"
    need = "the size of its checkpoints is not known yet"
    if largest is not None:
        need = f"about {format_size(NUM_CHECKPOINTS * largest)} for {NUM_CHECKPOINTS} checkpoints"
    free = format_size(shutil.disk_usage(scratch).free)
    return f"rehearsal: {starts}, about {3 * to} steps{time}; disk: {need}, {free} free at `{scratch}`"


def ensure_room(scratch: Path) -> None:
    """After A: refuse where A′ and B do not find the room that A took. Raises `ChronicleError`."""
    taken, free = size_of(scratch), shutil.disk_usage(scratch).free
    if free < 2 * taken:
        raise ChronicleError(
            f"A took {format_size(taken)}, and `{scratch}` has {format_size(free)} left for A′ and B",
            "name a place with more room: --keep DIR",
        )


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def mark_played(scratch: Path, ranks: int) -> None:
    """A and A′ are whole: they may be used again."""
    write_atomic(scratch / PLAYED, str(ranks).encode(), durable=False)


def tidy(scratch: Path, *, is_known: bool) -> None:
    """Remove B, what other rehearsals left, and A where it is too large, not whole, or its identity is not known."""
    shutil.rmtree(scratch / "b", ignore_errors=True)
    for other in scratch.parent.iterdir():
        is_kept = other == scratch and is_known and (scratch / PLAYED).exists() and size_of(scratch) <= MOST_KEPT_BYTES
        if other.is_dir() and not is_kept:
            shutil.rmtree(other, ignore_errors=True)
