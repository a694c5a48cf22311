"""Collect what is there: files with their times, telling log lines, telling source lines, processes of now.

Reads at most a fixed amount, says what it left out, follows no symbolic links, changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from chronicle.audit.traces import Observed, parse_line
from chronicle.launch.processes import list_processes, read_command, read_environment
from chronicle.launch.provenance import redact_command

__all__ = ["FoundFile", "FoundProcess", "Scan", "scan_directory"]

LOG_NAMES = (".log", ".out", ".err", ".txt", ".md")
SOURCE_NAMES = (".py", ".sh", ".sbatch")
MAX_FILES = 20_000
MAX_LOG_BYTES = 64 << 20
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "CHRONICLE_TOKEN")
TELLING = ("device_ids", "DataParallel", "num_shards", "nproc_per_node", "--num_processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """One file: time of last change, in the machine's own clock."""

    path: str
    size_bytes: int
    changed: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProcess:
    """A process that is alive now and looks like training, with its start time."""

    pid: int
    parent: int
    started: datetime
    command: str
    orphan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Everything found. `left_out` says what was not read."""

    directory: str
    files: tuple[FoundFile, ...]
    observations: tuple[Observed, ...]
    scripts: tuple[tuple[str, str], ...]
    processes: tuple[FoundProcess, ...]
    left_out: tuple[str, ...]


def scan_directory(directory: Path) -> Scan:
    """Look at a directory tree and at the processes of this machine."""
    files: list[FoundFile] = []
    observations: list[Observed] = []
    scripts: list[tuple[str, str]] = []
    left_out: list[str] = []
    for path in _walk(directory, left_out):
        name = path.relative_to(directory).as_posix()
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append(FoundFile(path=name, size_bytes=stat.st_size, changed=datetime.fromtimestamp(stat.st_mtime)))
        if path.suffix in LOG_NAMES:
            if stat.st_size > MAX_LOG_BYTES:
                left_out.append(f"`{name}`: only its first {MAX_LOG_BYTES >> 20} MiB were read")
            observations += _observations(path, name)
        elif path.suffix in SOURCE_NAMES:
            scripts += ((f"{name}:{number}", line) for number, line in _lines(path) if any(w in line for w in TELLING))
    return Scan(
        directory=str(directory),
        files=tuple(sorted(files, key=lambda one: (one.changed, one.path))),
        observations=tuple(observations),
        scripts=tuple(scripts),
        processes=tuple(find_training_processes(directory)),
        left_out=tuple(left_out),
    )


def _walk(directory: Path, left_out: list[str]) -> Iterator[Path]:
    count = 0
    for root, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in ("__pycache__", "node_modules"))
        for name in sorted(files):
            path = Path(root) / name
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > MAX_FILES:
                left_out.append(f"more than {MAX_FILES} files: the rest was not looked at")
                return
            yield path


def _observations(path: Path, name: str) -> list[Observed]:
    found = (parse_line(line, name, number) for number, line in _lines(path))
    return [one for one in found if one is not None]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from enumerate(file.read(MAX_LOG_BYTES).splitlines(), start=1)
    except OSError:
        return


def find_training_processes(directory: Path) -> Iterator[FoundProcess]:
    """Living processes that work in the directory, name it, or are training left without a parent; never touched.

    Training of others on this machine is none of this directory's business.
    """
    me = os.getpid()
    booted = _boot_time()
    ticks = os.sysconf("SC_CLK_TCK")
    for process in list_processes():
        if process.pid == me or not process.alive or process.uid != os.getuid():
            continue
        environment = read_environment(process.pid) or {}
        here = _works_in(process.pid, directory) or any(
            str(directory.resolve()) in word for word in read_command(process.pid)
        )
        orphan = process.parent == 1 and any(name in environment for name in RANK_VARIABLES)
        if not (here or orphan):
            continue
        command = " ".join(redact_command(read_command(process.pid)))
        if "python" in command or "torchrun" in command:
            started = datetime.fromtimestamp(booted + process.start_ticks / ticks)
            yield FoundProcess(
                pid=process.pid, parent=process.parent, started=started, command=command, orphan=process.parent == 1
            )


def _works_in(pid: int, directory: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(directory.resolve())
    except (OSError, ValueError):
        return False


def _boot_time() -> float:
    try:
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError):
        pass
    return datetime.now(UTC).timestamp()
