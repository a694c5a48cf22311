"""Checks that need no trainer and no process group: orphans, GPUs in use, port, disk, save time, stray files.

Run by `chronicle run` before it starts anything (a second or two), and by `chronicle preflight`. Reads only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chronicle.journal import Entry
from chronicle.launch.orphans import find_alive, list_launches
from chronicle.paths import RunPaths
from chronicle.preflight.answers import Answer
from chronicle.preflight.expectation import SIGNAL_LEAD_VARIABLE, Expectation, read_seconds
from chronicle.preflight.facts import TrainerFacts
from chronicle.preflight.results import CheckResult
from chronicle.preflight.saving_checks import check_disk, check_save_time
from chronicle.preflight.tool_checks import check_build_tools

__all__ = ["Host", "check_host", "free_bytes", "list_strays", "measured_save_seconds"]

GPU_TOLERANCE_MIB = 512  # what an idle driver context may hold
QUERY_SECONDS = 1.5  # all checks before a launch together take at most two
PORT_FLAGS = ("--master_port", "--master-port", "--main_process_port", "--main-process-port", "--rdzv-port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the checks look at. `command` is the launcher to be started, empty when there is none yet."""

    paths: RunPaths
    checkpoints_dir: Path | None
    entries: tuple[Entry, ...]
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()
    grace_seconds: float | None = None


def check_host(host: Host, *, skip: Iterable[str] = ()) -> tuple[CheckResult, ...]:
    """Every check of this file, in the catalogue's order; skipped ones say so."""
    checks: tuple[tuple[str, Callable[[Host], CheckResult]], ...] = (
        ("PF07", check_orphans),
        ("PF08", check_gpus_free),
        ("PF09", check_port),
        ("PF21", check_room),
        ("PF23", check_grace),
        ("PF24", check_latency),
        ("PF29", lambda host: check_build_tools(host.command, host.environ)),
        ("PF30", check_strays),
    )
    skipped = set(skip)
    return tuple(
        Answer(name, "skipped").skipped("skipped on request") if name in skipped else check(host)
        for name, check in checks
    )


def check_orphans(host: Host) -> CheckResult:
    """PF07: no process of this run is alive here."""
    answer = Answer("PF07", "no processes of earlier launches")
    alive = find_alive(host.paths, list_launches(host.entries))
    if not alive:
        return answer.passed("none here", "token and recorded processes in /proc")
    listed = ", ".join(f"{one.process.pid} (launch {one.launch})" for one in alive[:6])
    text = f"{len(alive)} alive: {listed}"
    return answer.failed(text, "token and recorded processes in /proc", "`chronicle sweep --yes` ends orphans")


def check_gpus_free(host: Host) -> CheckResult:
    """PF08: nobody else holds memory of the GPUs to be used. Without a driver there is nothing to ask."""
    answer = Answer("PF08", "GPU memory free")
    if shutil.which("nvidia-smi") is None:
        return answer.unknown("no NVIDIA driver here")
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return answer.unknown(f"nvidia-smi did not answer within {QUERY_SECONDS:g} s")
    gpus = [(index, uuid, int(mib)) for index, uuid, mib in _rows(done.stdout) if mib.isdigit()]
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # GPUs that this launch cannot see may be in use by whoever has them
        names = [word.strip() for word in visible.split(",")]
        gpus = [one for one in gpus if one[0] in names or any(name and one[1].startswith(name) for name in names)]
    busy = [(uuid, mib) for _, uuid, mib in gpus if mib > GPU_TOLERANCE_MIB]
    if busy:
        text = ", ".join(f"{uuid}: {mib} MiB" for uuid, mib in busy[:4])
        remedy = "`chronicle ps` shows what is ours; CUDA_VISIBLE_DEVICES leaves GPUs out"
        return answer.failed(f"memory in use by others: {text}", "nvidia-smi", remedy)
    return answer.passed(f"{len(gpus)} GPUs free", "nvidia-smi") if gpus else answer.unknown("no GPU is listed")


def _rows(text: str) -> list[tuple[str, str, str]]:
    split = (tuple(word.strip() for word in line.split(",")) for line in text.splitlines())
    return [(row[0], row[1], row[2]) for row in split if len(row) == 3]


def check_port(host: Host) -> CheckResult:
    """PF09: the rendezvous port can be bound; `--standalone` picks its own."""
    answer = Answer("PF09", "rendezvous port")
    port = _find_port(host.command) or host.environ.get("MASTER_PORT")
    if port is None or not port.isdigit() or port == "0":
        return answer.unknown("no port was named")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            return answer.failed(f"port {port}: {reason}", "one bind", "name another, or use --standalone")
    return answer.passed(f"port {port} is free", "one bind")


def _find_port(command: Sequence[str]) -> str | None:
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in PORT_FLAGS:
            return value if equals else (command[index + 1] if index + 1 < len(command) else None)
    return None


def check_room(host: Host) -> CheckResult:
    """PF21 with the size of the newest checkpoint on disk and the free space there."""
    newest = _newest_size(host.checkpoints_dir)
    facts = TrainerFacts(checkpoint_bytes=newest, checkpoints_kept=1)
    return check_disk(facts, Expectation(free_bytes=free_bytes(host.checkpoints_dir)))


def check_grace(host: Host) -> CheckResult:
    """PF23 with the longest save the journal knows and the grace this launch would get."""
    facts = TrainerFacts(save_seconds=measured_save_seconds(host.entries))
    lead = read_seconds(host.environ, SIGNAL_LEAD_VARIABLE)
    return check_save_time(facts, Expectation(grace_seconds=host.grace_seconds, signal_lead_seconds=lead))


def check_latency(host: Host) -> CheckResult:
    """PF24: in the newest launch that tested it, printed lines arrived at once."""
    answer = Answer("PF24", "log latency")
    tested = [one for one in host.entries if one.kind == "launch.end" and one.data.get("latency_tested_ranks")]
    if not tested:
        return answer.unknown("no rank has tested it; a trainer does with `open_rank_output`")
    late = tested[-1].data.get("buffered_ranks")
    read = f"launch {tested[-1].launch}"
    if late:
        remedy = "let ranks call `open_rank_output`, or drop the relay (`--tee`)"
        return answer.failed(f"output of rank {', '.join(late)} came late: buffered", read, remedy)
    return answer.passed(f"{tested[-1].data['latency_tested_ranks']} ranks tested", read)


def measured_save_seconds(entries: Iterable[Entry]) -> float | None:
    """The longest save that was timed in this run."""
    timed = [
        float(entry.data["save_seconds"])
        for entry in entries
        if entry.kind == "checkpoint" and isinstance(entry.data.get("save_seconds"), int | float)
    ]
    return max(timed, default=None)


def check_strays(host: Host) -> CheckResult:
    """PF30: nothing lies in the newest checkpoint or beside it that a loader could take for state."""
    answer = Answer("PF30", "stray files")
    if host.checkpoints_dir is None or not host.checkpoints_dir.is_dir():
        return answer.unknown("no checkpoints directory")
    strays = list_strays(host.checkpoints_dir)
    if strays:
        text = ", ".join(f"`{stray}`" for stray in strays[:4])
        return answer.failed(f"{text} could be taken for state", "names only", "move them out, or `chronicle verify`")
    return answer.passed("no stray file", "names only")


def list_strays(checkpoints_dir: Path) -> list[str]:
    """Strays beside the checkpoints and in the newest one, by names alone."""
    from rollback.checkpoint.listing import list_checkpoints, list_root_strays

    beside = [str(stray) for stray in list_root_strays(checkpoints_dir)]
    steps = [one for one in list_checkpoints(checkpoints_dir, include_abandoned=False) if one.step is not None]
    if not steps:
        return beside
    newest = max(steps, key=lambda one: one.step or 0)
    return beside + [f"{newest.path.name}/{stray}" for stray in newest.strays]


def _newest_size(checkpoints_dir: Path | None) -> int | None:
    if checkpoints_dir is None or not checkpoints_dir.is_dir():
        return None
    from rollback.checkpoint.listing import list_checkpoints

    sizes = [
        sum(file.size_bytes for file in one.files)
        for one in list_checkpoints(checkpoints_dir, include_abandoned=False)
    ]
    return max(sizes, default=None)


def free_bytes(directory: Path | None) -> int | None:
    """Room on the file system of a directory, which may not be there yet; None when it cannot be asked."""
    if directory is None:
        return None
    existing = next((one for one in (directory, *directory.absolute().parents) if one.is_dir()), Path("/"))
    try:
        place = os.statvfs(existing)
    except OSError:
        return None
    return place.f_bavail * place.f_frsize
