"""Checks of this machine that need no trainer: processes, GPUs, port, disk, save time, build tools, stray files.

`chronicle run` makes them before it starts anything, within about two seconds; so does `chronicle preflight`. They write
nothing. Source of PF23: launchers kill 30 s after a signal (measured 29.8 s).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chronicle.journal import Entry
from chronicle.journal.events import CheckpointSaved, LaunchEnd, events_of
from chronicle.launch.admission import find_alive, list_launches
from chronicle.launch.ending import free_bytes
from chronicle.launch.launchers import LAUNCHERS, SHELLS, count_requested_ranks
from chronicle.paths import RunPaths
from chronicle.preflight.fact_checks import FACT_CHECKS
from chronicle.preflight.facts import SIGNAL_LEAD_VARIABLE, Baseline, TrainerFacts, read_seconds
from chronicle.preflight.results import CheckAnswer, CheckResult, CheckRow, fails, passes, skips, unknown, warns
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


def _orphans(host: Host) -> CheckAnswer:
    """PF07: no process of this run is alive here."""
    alive = find_alive(host.paths, list_launches(host.entries))
    if not alive:
        return passes("none here", "token and recorded processes in /proc")
    listed = ", ".join(f"{one.process.pid} (launch {one.launch})" for one in alive[:6])
    text = f"{len(alive)} alive: {listed}"
    return fails(text, "token and recorded processes in /proc", "`chronicle ps --sweep --yes` ends orphans")


def _gpus_free(host: Host) -> CheckAnswer:
    """PF08: no other process uses memory of the GPUs that this launch can see; unknown where they cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        if not any(Path(path).exists() for path in GPU_DEVICES):
            return unknown("no GPU in this machine")
        return unknown("no NVIDIA driver here")
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return unknown(f"nvidia-smi did not answer within {QUERY_SECONDS:g} s")
    gpus = [(index, uuid, int(mib)) for index, uuid, mib in _rows(done.stdout) if mib.isdigit()]
    visible = host.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # GPUs that this launch cannot see may be in use
        names = [word.strip() for word in visible.split(",")]
        gpus = [one for one in gpus if one[0] in names or any(name and one[1].startswith(name) for name in names)]
    busy = [(uuid, mib) for _, uuid, mib in gpus if mib > GPU_TOLERANCE_MIB]
    if busy:
        text = ", ".join(f"{uuid}: {mib} MiB" for uuid, mib in busy[:4])
        remedy = "`chronicle ps` shows what is ours; CUDA_VISIBLE_DEVICES leaves GPUs out"
        return fails(f"memory in use by others: {text}", "nvidia-smi", remedy)
    return passes(f"{len(gpus)} GPUs free", "nvidia-smi") if gpus else unknown("no GPU is listed")


def _rows(text: str) -> list[tuple[str, str, str]]:
    split = (tuple(word.strip() for word in line.split(",")) for line in text.splitlines())
    return [(row[0], row[1], row[2]) for row in split if len(row) == 3]


def _port(host: Host) -> CheckAnswer:
    """PF09: the rendezvous port can be bound; `--standalone` picks its own."""
    place, port = _find_port(host.command) or ("", host.environ.get("MASTER_PORT") or "")
    if place not in (*HERE, socket.gethostname(), socket.gethostname().split(".")[0]):
        return unknown(f"the rendezvous is at {place}:{port}, not on this machine")
    if port == "0" or "--standalone" in host.command:
        return passes("the launcher takes a free port", "the command")
    if not port.isdigit():
        if host.command and count_requested_ranks(host.command) is None and not _is_launcher(host.command):
            return unknown("one process: no launcher, no port")
        return unknown("the command names no port")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            return fails(f"port {port}: {reason}", "one bind", "name another, or use --standalone")
    return passes(f"port {port} is free", "one bind")


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


def _latency(host: Host) -> CheckAnswer:
    """PF24: in the newest launch that tested it, printed lines arrived at once."""
    tested = [(entry, end) for entry, end in events_of(host.entries, LaunchEnd) if end.latency_tested_ranks]
    if not tested:
        return unknown("no rank has tested it; a trainer does with `open_rank_output`")
    entry, end = tested[-1]
    read = f"launch {entry.launch}"
    if end.buffered_ranks:
        remedy = "let ranks call `open_rank_output`, or drop the relay (`--tee`)"
        return fails(f"output of rank {', '.join(end.buffered_ranks)} came late: buffered", read, remedy)
    return passes(f"{end.latency_tested_ranks} ranks tested", read)


def measured_save_seconds(entries: Iterable[Entry]) -> float | None:
    """The longest save that was timed in this run."""
    saves = (saved.save_seconds for _, saved in events_of(entries, CheckpointSaved))
    return max((seconds for seconds in saves if seconds is not None), default=None)


def _strays(host: Host) -> CheckAnswer:
    """PF30: no file of an odd name in the newest checkpoint or beside it holds state; no save that was cut lies there."""
    if host.checkpoints_dir is None or not host.checkpoints_dir.is_dir():
        return unknown("no checkpoints directory")
    from rollback.checkpoint.listing import list_checkpoints, list_root_strays, list_unrecognised
    from rollback.checks.files import holds_state
    from rollback.checks.remnants import find_remnants

    root = host.checkpoints_dir
    try:
        listed = list_checkpoints(root, include_abandoned=False)
        steps = [one for one in listed if one.step is not None]
        newest = max(steps, key=lambda one: one.step or 0, default=None)
        strays = {name: root / name for name in list_root_strays(root)}
        if newest is not None:
            strays |= {f"{newest.path.name}/{name}": newest.folder / name for name in newest.strays}
        state = [name for name, path in strays.items() if holds_state(path)]
        if state:
            hint = "move it out of there, or let `chronicle verify --quarantine` do it"
            return fails(f"{_some(state)} could be loaded as state", "their content", hint)
        remnants = () if newest is None else sorted(find_remnants(root, listed, newest))
        unknowns = [name for name in list_unrecognised(root, listed) if name not in strays]
    except (RollbackError, OSError) as problem:
        return unknown(f"strays and what a cut save may have left cannot be looked for: {problem}")
    if remnants:
        text = f"{_some(remnants)}: a save that was cut; a loader that takes the newest name takes it"
        return warns(text, "names and what is cut", "move it elsewhere; `chronicle verify --all` names all of it")
    if unknowns:
        text = f"{_some(unknowns)}: not recognised as a checkpoint; if it is a save, no restart resumes from it"
        return warns(text, "names and content", "move it elsewhere; `chronicle verify --all` names all of it")
    known = f"no state in {_some(list(strays))}" if strays else "no stray state"
    if newest is None:
        return passes(known, "names and content")
    return passes(f"{known}, and no save that was cut", "names, content and what is cut")


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:4])


def largest_size(checkpoints_dir: Path | None) -> int | None:
    """Bytes of the largest checkpoint there; None where there is none."""
    if checkpoints_dir is None or not checkpoints_dir.is_dir():
        return None
    from rollback.checkpoint.listing import list_checkpoints

    sizes = [
        sum(file.size_bytes for file in one.files)
        for one in list_checkpoints(checkpoints_dir, include_abandoned=False)
    ]
    return max(sizes, default=None)


# ---- build tools that DeepSpeed needs at its first use ---------------------------------------------------------------

DEEPSPEED = re.compile(r"(?:^|[/_=-])(?:deepspeed|zero-?[123])\b", re.IGNORECASE)


def _build_tools(host: Host) -> CheckAnswer:
    """PF29 before a launch: DeepSpeed needs a C++ compiler and ninja.

    On a CPU DeepSpeed builds `shm_comm` at every first use (deepspeed/comm/torch.py); `bit_transformer` keeps it from that.
    On a GPU what is built depends on the configuration and on the installation, so there a missing tool is only a warning.
    Unknown when the command does not name DeepSpeed.
    """
    named = next((word for word in host.command if DEEPSPEED.search(word)), None)
    if named is None:
        return unknown("the command does not name DeepSpeed")
    path = host.environ.get("PATH")
    compilers = (host.environ.get("CXX") or "c++", "g++")
    missing = []
    if not any(shutil.which(name, path=path) for name in compilers):
        missing.append("a C++ compiler")
    if not shutil.which("ninja", path=path):
        missing.append("ninja")
    read = f"`{named}`, the PATH"
    if not missing:
        return passes("C++ compiler and ninja found; DeepSpeed builds extensions with them", read)
    text = f"DeepSpeed builds parts of itself when it is first used, and {' and '.join(missing)} is not on the PATH"
    remedy = "install g++ and `pip install ninja`, and put both on the PATH (activate the environment)"
    on_cpu = host.environ.get("DS_ACCELERATOR") == "cpu" or shutil.which("nvidia-smi", path=path) is None
    if not on_cpu:
        return warns(text, read, remedy)
    if "bit_transformer.train" in host.command:
        return passes("bit_transformer builds nothing on a CPU", read)
    return fails(text, read, remedy)


# ---- the table -------------------------------------------------------------------------------------------------------

HOST_CHECKS = tuple(
    CheckRow(check, title, judge, {}, ("facts",))
    for check, title, judge in (
        ("PF07", "no processes of earlier launches", _orphans),
        ("PF08", "GPU memory free", _gpus_free),
        ("PF09", "rendezvous port", _port),
        ("PF24", "log latency", _latency),
        ("PF29", "requested flags", _build_tools),
        ("PF30", "stray files", _strays),
    )
)
FROM_FACTS = tuple(check for check in FACT_CHECKS if check.check in ("PF21", "PF23"))  # of which the disk knows something


def check_host(host: Host, *, skip: Iterable[str] = ()) -> tuple[CheckResult, ...]:
    """Run every check of the host, in the catalogue's order; a skipped one is reported as skipped."""
    skipped = frozenset(skip)
    directory = host.checkpoints_dir
    facts = TrainerFacts(
        checkpoint_bytes=None if "PF21" in skipped else largest_size(directory),
        checkpoints_kept=1,
        save_seconds=measured_save_seconds(host.entries),
    )
    limits = Baseline(
        free_bytes=None if directory is None else free_bytes(directory),
        grace_seconds=host.grace_seconds,
        signal_lead_seconds=read_seconds(host.environ, SIGNAL_LEAD_VARIABLE),
    )
    results = []
    for check in sorted((*HOST_CHECKS, *FROM_FACTS), key=lambda check: check.check):
        if check.check in skipped:
            results.append(check.result(skips()))
        else:
            results.append(check.on(*((host,) if check in HOST_CHECKS else (facts, limits))))
    return tuple(results)
