"""Checks of this machine that need no trainer: processes, GPUs, disk, save time, stray files.

`chronicle run` makes them before it starts anything, within about two seconds; so does `chronicle preflight`. They write
nothing. Source of PF23: launchers kill 30 s after a signal (measured 29.8 s).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chronicle.journal import Entry
from chronicle.journal.events import CheckpointSaved, events_of
from chronicle.launch.admission import find_alive, list_launches
from chronicle.launch.ending import free_bytes
from chronicle.paths import RunPaths
from chronicle.preflight.fact_checks import FACT_CHECKS
from chronicle.preflight.facts import SIGNAL_LEAD_VARIABLE, Baseline, TrainerFacts, read_seconds
from chronicle.preflight.results import CheckAnswer, CheckResult, CheckRow, fails, passes, skips, unknown, warns
from rollback.errors import RollbackError

GPU_TOLERANCE_MIB = 512  # what an idle driver context may hold
QUERY_SECONDS = 1.5  # all checks before a launch together take at most two


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the checks read. `command` is the launcher to be started, empty when there is none yet."""

    paths: RunPaths
    checkpoints_dir: Path | None
    entries: tuple[Entry, ...]
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()
    grace_seconds: float | None = None


def _can_start(host: Host) -> CheckAnswer:
    """PF31: the program of the command is on the PATH, and a Python script that it names is there."""
    if not host.command:
        return unknown("no command is named")
    program = host.command[0]
    found = shutil.which(program, path=host.environ.get("PATH"))
    if found is None:
        return warns(f"`{program}` is not on the PATH here", "the PATH", "activate its environment first")
    script = next((word for word in host.command[1:] if word.endswith(".py") and not word.startswith("-")), None)
    if script is not None and not Path(script).is_file():
        return warns(f"`{script}` is not in `{Path.cwd()}`", "the files here", "start it where the script lies")
    return passes(found if script is None else f"{found}, {script}", "the PATH and the files here")


def _orphans(host: Host) -> CheckAnswer:
    """PF07: no process of this run is alive here."""
    alive = find_alive(host.paths, list_launches(host.entries))
    read = "token and recorded processes in /proc"
    if not alive:
        return passes("none here", read)
    listed = ", ".join(f"{one.process.pid} (launch {one.launch})" for one in alive[:6])
    return fails(f"{len(alive)} alive: {listed}", read, "`chronicle ps --sweep --yes` ends orphans")


def _gpus_free(host: Host) -> CheckAnswer:
    """PF08: no other process uses memory of the GPUs that this launch can see; unknown where they cannot be asked."""
    if shutil.which("nvidia-smi") is None:
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

    return max((one.size_bytes for one in list_checkpoints(checkpoints_dir, include_abandoned=False)), default=None)


# ---- the table -------------------------------------------------------------------------------------------------------

HOST_CHECKS = (
    CheckRow("PF07", "no processes of earlier launches", _orphans, {}, ("facts",)),
    CheckRow("PF08", "GPU memory free", _gpus_free, {}, ("facts",)),
    CheckRow("PF30", "stray files", _strays, {}, ("facts",)),
    CheckRow("PF31", "the command can be started", _can_start, {}, ("facts",)),
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
