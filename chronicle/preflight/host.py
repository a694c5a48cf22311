"""Checks of this machine that need no trainer: processes, GPUs, port, disk, save time, build tools, stray files, memory.

`chronicle run` makes them before it starts anything, within about two seconds; so does `chronicle preflight`. They write
nothing. Source of PF23: launchers kill 30 s after a signal (measured 29.8 s).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chronicle.journal import Entry
from chronicle.journal.events import CheckpointSaved, LaunchEnd, events_of
from chronicle.launch.admission import find_alive, list_launches
from chronicle.launch.launchers import LAUNCHERS, SHELLS, count_requested_ranks
from chronicle.paths import RunPaths
from chronicle.preflight.facts import SIGNAL_LEAD_VARIABLE, Baseline, TrainerFacts, read_seconds
from chronicle.preflight.results import CheckAnswer, CheckResult
from rollback.errors import RollbackError

GPU_TOLERANCE_MIB = 512  # what an idle driver context may hold
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/accel")
QUERY_SECONDS = 1.5  # all checks before a launch together take at most two
PORT_FLAGS = ("--master_port", "--master-port", "--main_process_port", "--main-process-port", "--rdzv-port")
ENDPOINT_FLAGS = ("--rdzv_endpoint", "--rdzv-endpoint")
DEFAULT_ENDPOINT_PORT = "29400"  # of torch's c10d rendezvous
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the checks read. `command` is the launcher to be started, empty when there is none yet."""

    paths: RunPaths
    checkpoints_dir: Path | None
    entries: tuple[Entry, ...]
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()
    grace_seconds: float | None = None


def check_host(host: Host, *, skip: Iterable[str] = ()) -> tuple[CheckResult, ...]:
    """Run every check of the host, in the catalogue's order; a skipped one is reported as skipped."""
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
        CheckAnswer(name, "skipped").skipped("skipped on request") if name in skipped else check(host)
        for name, check in checks
    )


def check_orphans(host: Host) -> CheckResult:
    """PF07: no process of this run is alive here."""
    answer = CheckAnswer("PF07", "no processes of earlier launches")
    alive = find_alive(host.paths, list_launches(host.entries))
    if not alive:
        return answer.passed("none here", "token and recorded processes in /proc")
    listed = ", ".join(f"{one.process.pid} (launch {one.launch})" for one in alive[:6])
    text = f"{len(alive)} alive: {listed}"
    return answer.failed(text, "token and recorded processes in /proc", "`chronicle ps --sweep --yes` ends orphans")


def check_gpus_free(host: Host) -> CheckResult:
    """PF08: no other process uses memory of the GPUs that this launch can see; unknown where they cannot be asked."""
    answer = CheckAnswer("PF08", "GPU memory free")
    if shutil.which("nvidia-smi") is None:
        if not any(Path(path).exists() for path in GPU_DEVICES):
            return answer.passed("no GPU in this machine", "/dev")
        return answer.unknown("no NVIDIA driver here")
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return answer.unknown(f"nvidia-smi did not answer within {QUERY_SECONDS:g} s")
    gpus = [(index, uuid, int(mib)) for index, uuid, mib in _rows(done.stdout) if mib.isdigit()]
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # GPUs that this launch cannot see may be in use
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
    answer = CheckAnswer("PF09", "rendezvous port")
    place, port = _find_port(host.command) or ("", host.environ.get("MASTER_PORT") or "")
    if place not in (*HERE, socket.gethostname(), socket.gethostname().split(".")[0]):
        return answer.unknown(f"the rendezvous is at {place}:{port}, not on this machine")
    if port == "0" or "--standalone" in host.command:
        return answer.passed("the launcher takes a free port", "the command")
    if not port.isdigit():
        if host.command and count_requested_ranks(host.command) is None and not _is_launcher(host.command):
            return answer.passed("one process: no launcher, no port", "the command")
        return answer.unknown("the command names no port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            return answer.failed(f"port {port}: {reason}", "one bind", "name another, or use --standalone")
    return answer.passed(f"port {port} is free", "one bind")


def _find_port(command: Sequence[str]) -> tuple[str, str] | None:
    """Host ("" where it is not named) and port of the rendezvous, as the command names them."""
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        value = value if equals else (command[index + 1] if index + 1 < len(command) else "")
        if name in PORT_FLAGS:
            return "", value
        if name in ENDPOINT_FLAGS:
            place, _, port = value.rpartition(":") if ":" in value else (value, "", DEFAULT_ENDPOINT_PORT)
            return place.strip("[]"), port
    return None


def _is_launcher(command: Sequence[str]) -> bool:
    """Whether the command starts several processes, or a script that may."""
    words = [os.path.basename(word) for word in command[:4]]
    known = (*LAUNCHERS, *SHELLS)
    return any(word in known or word.endswith(".sh") for word in words) or any(
        word.startswith(("torch.distributed", "accelerate", "deepspeed")) for word in command[:4]
    )


def check_room(host: Host) -> CheckResult:
    """PF21 with the size of the newest checkpoint on disk and the free space there."""
    newest = _newest_size(host.checkpoints_dir)
    facts = TrainerFacts(checkpoint_bytes=newest, checkpoints_kept=1)
    return check_disk(facts, Baseline(free_bytes=free_bytes(host.checkpoints_dir)))


def check_grace(host: Host) -> CheckResult:
    """PF23 with the longest save the journal knows and the grace this launch would get."""
    facts = TrainerFacts(save_seconds=measured_save_seconds(host.entries))
    lead = read_seconds(host.environ, SIGNAL_LEAD_VARIABLE)
    return check_save_time(facts, Baseline(grace_seconds=host.grace_seconds, signal_lead_seconds=lead))


def check_latency(host: Host) -> CheckResult:
    """PF24: in the newest launch that tested it, printed lines arrived at once."""
    answer = CheckAnswer("PF24", "log latency")
    tested = [(entry, end) for entry, end in events_of(host.entries, LaunchEnd) if end.latency_tested_ranks]
    if not tested:
        return answer.unknown("no rank has tested it; a trainer does with `open_rank_output`")
    entry, end = tested[-1]
    read = f"launch {entry.launch}"
    if end.buffered_ranks:
        remedy = "let ranks call `open_rank_output`, or drop the relay (`--tee`)"
        return answer.failed(f"output of rank {', '.join(end.buffered_ranks)} came late: buffered", read, remedy)
    return answer.passed(f"{end.latency_tested_ranks} ranks tested", read)


def measured_save_seconds(entries: Iterable[Entry]) -> float | None:
    """The longest save that was timed in this run."""
    saves = (saved.save_seconds for _, saved in events_of(entries, CheckpointSaved))
    return max((seconds for seconds in saves if seconds is not None), default=None)


def check_strays(host: Host) -> CheckResult:
    """PF30: no file of an odd name in the newest checkpoint or beside it holds state; no save that was cut lies there."""
    answer = CheckAnswer("PF30", "stray files")
    if host.checkpoints_dir is None or not host.checkpoints_dir.is_dir():
        return answer.unknown("no checkpoints directory")
    try:
        state, others = sort_strays(host.checkpoints_dir)
        if state:
            text = ", ".join(f"`{stray}`" for stray in state[:4])
            hint = "move it out of there, or let `chronicle verify --quarantine` do it"
            return answer.failed(f"{text} could be loaded as state", "their content", hint)
        remnants = list_remnants(host.checkpoints_dir)
    except (RollbackError, OSError) as problem:
        return answer.unknown(f"strays and what a cut save may have left cannot be looked for: {problem}")
    if remnants:
        text = ", ".join(f"`{one}`" for one in remnants[:4])
        text += ": a save that was cut; a loader that takes the newest name takes it"
        return answer.warned(text, "names and what is cut", "move it elsewhere; `chronicle verify --all` names all of it")
    known = "no stray state" if not others else f"no state in {', '.join(f'`{one}`' for one in others[:4])}"
    if remnants is None:
        return answer.passed(known, "names and content")
    return answer.passed(f"{known}, and no save that was cut", "names, content and what is cut")


def list_remnants(checkpoints_dir: Path) -> list[str] | None:
    """What saves that were cut left under names of later checkpoints; None where no whole one is there to be named alike."""
    from rollback.checkpoint.listing import list_checkpoints
    from rollback.checks.remnants import find_remnants

    listed = list_checkpoints(checkpoints_dir, include_abandoned=False)
    newest = max((one for one in listed if one.step is not None), key=lambda one: one.step or 0, default=None)
    return None if newest is None else sorted(find_remnants(checkpoints_dir, listed, newest))


def sort_strays(checkpoints_dir: Path) -> tuple[list[str], list[str]]:
    """Files of odd names beside the checkpoints and in the newest one: those that hold state, and the others."""
    from rollback.checkpoint.listing import list_checkpoints, list_root_strays
    from rollback.checks.files import holds_state

    found = {stray: checkpoints_dir / stray for stray in list_root_strays(checkpoints_dir)}
    steps = [one for one in list_checkpoints(checkpoints_dir, include_abandoned=False) if one.step is not None]
    newest = max(steps, key=lambda one: one.step or 0, default=None)
    if newest is not None:
        found |= {f"{newest.path.name}/{stray}": newest.folder / stray for stray in newest.strays}
    state = [name for name, path in found.items() if holds_state(path)]
    return state, [name for name in found if name not in state]


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
    """Free bytes on the file system of a directory, which may not exist yet; None when it cannot be asked."""
    if directory is None:
        return None
    existing = next((one for one in (directory, *directory.absolute().parents) if one.is_dir()), Path("/"))
    try:
        place = os.statvfs(existing)
    except OSError:
        return None
    return place.f_bavail * place.f_frsize


# ---- build tools that DeepSpeed needs at its first use ---------------------------------------------------------------

DEEPSPEED = re.compile(r"(?:^|[/_=-])(?:deepspeed|zero-?[123])\b", re.IGNORECASE)


def check_build_tools(command: Sequence[str], environ: Mapping[str, str]) -> CheckResult:
    """PF29 before a launch: DeepSpeed needs a C++ compiler and ninja.

    On a CPU DeepSpeed builds `shm_comm` at every first use (deepspeed/comm/torch.py); `bit_transformer` keeps it from that.
    On a GPU what is built depends on the configuration and on the installation, so there a missing tool is only a warning.
    Unknown when the command does not name DeepSpeed.
    """
    answer = CheckAnswer("PF29", "requested flags")
    named = next((word for word in command if DEEPSPEED.search(word)), None)
    if named is None:
        return answer.unknown("the command does not name DeepSpeed")
    path = environ.get("PATH")
    compilers = (environ.get("CXX") or "c++", "g++")
    missing = [] if any(shutil.which(name, path=path) for name in compilers) else ["a C++ compiler"]
    missing += [] if shutil.which("ninja", path=path) else ["ninja"]
    read = f"`{named}`, the PATH"
    if not missing:
        return answer.passed("C++ compiler and ninja found; DeepSpeed builds extensions with them", read)
    text = f"DeepSpeed builds parts of itself when it is first used, and {' and '.join(missing)} is not on the PATH"
    remedy = "install g++ and `pip install ninja`, and put both on the PATH (activate the environment)"
    on_cpu = environ.get("DS_ACCELERATOR") == "cpu" or shutil.which("nvidia-smi", path=path) is None
    if on_cpu and "bit_transformer.train" in command:
        return answer.passed("bit_transformer builds nothing on a CPU", read)
    return (answer.failed if on_cpu else answer.warned)(text, read, remedy)


# ---- room and time for a save ----------------------------------------------------------------------------------------

ROOM = 1.2  # factor over the size of the checkpoints that are kept


def check_disk(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF21: enough disk space for the checkpoints that are kept and the one being written."""
    answer = CheckAnswer("PF21", "disk space")
    size, free = facts.checkpoint_bytes, expected.free_bytes
    if size is None or free is None:
        return answer.unknown("the size of a checkpoint is unknown" if size is None else "the free space is unknown")
    needed = int(ROOM * size * ((facts.checkpoints_kept or 1) + 1))
    text = f"{free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
    if free < needed:
        return answer.failed(text, f"checkpoint {size:,} bytes", "free space, or keep fewer checkpoints")
    return answer.passed(text, f"checkpoint {size:,} bytes")


def check_save_time(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF23: a save takes less time than there is between a signal and the KILL that follows it."""
    answer = CheckAnswer("PF23", "save time")
    limits = [seconds for seconds in (expected.grace_seconds, expected.signal_lead_seconds) if seconds is not None]
    if facts.save_seconds is None or not limits:
        return answer.unknown(
            "the trainer did not report how long a save takes"
            if facts.save_seconds is None
            else "the launcher's grace is unknown"
        )
    text = f"save {facts.save_seconds:.0f} s, killed after {min(limits):.0f} s"
    if facts.save_seconds >= min(limits):
        wanted = max(60, round(facts.save_seconds * 2))
        remedy = f"chronicle run --grace {wanted}"
        if expected.signal_lead_seconds is not None and facts.save_seconds >= expected.signal_lead_seconds:
            remedy += f", and a batch script that warns {wanted + 30} s ahead: `chronicle run --sbatch`"
        return answer.failed(text, "a timed save", remedy)
    return answer.passed(text, "a timed save")


# ---- free memory of this host ----------------------------------------------------------------------------------------


def available_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a new process can use without swapping: `MemAvailable`, or less under a memory limit; None if unknown."""
    known = [_of_host(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", cgroups)]
    return min((bytes_free for bytes_free in known if bytes_free is not None), default=None)


def _of_host(meminfo: Path) -> int | None:
    found = _fields(meminfo).get("MemAvailable:")
    return None if found is None else 1024 * found


def _of_groups(membership: Path, cgroups: Path) -> list[int]:
    """Free bytes of each control group from ours up to the root; file cache counts as free, because it can be reclaimed."""
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
