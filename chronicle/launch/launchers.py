"""Settings for the launchers: environment variables, requested ranks, and SLURM's batch script and node identity.

Covers torchrun, accelerate, deepspeed, srun and mpirun. The variable names are the public interface to trainers.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chronicle.launch.containment import TOKEN_VARIABLE
from chronicle.paths import RunPaths
from rollback.disk.durable import write_atomic

__all__ = [
    "REQUESTED_VARIABLE",
    "NodeIdentity",
    "build_environment",
    "count_requested_ranks",
    "format_sbatch",
    "node_identity",
    "share_number",
]

REQUESTED_VARIABLE = "CHRONICLE_REQUESTED_RANKS"
STARTUP_DIR = Path(__file__).resolve().parent / "startup"  # its `sitecustomize` guards HF Trainers without a line
PER_NODE_FLAGS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
NODE_FLAGS = ("--nnodes", "--num_nodes", "-N", "--nodes")
TOTAL_FLAGS = ("--num_processes", "--num-processes", "-n", "-np", "--ntasks")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "srun", "mpirun", "mpiexec")
SHELLS = ("bash", "sh", "zsh")
PROGRAM = re.compile(r"(?:.*/)?(?:accelerate|torchrun|deepspeed|srun|mpirun|mpiexec|python[\d.]*)")
MODULE_FLAGS = ("-m", "--module")
FLAGS: Mapping[str, Sequence[str]] = {"total": TOTAL_FLAGS, "per node": PER_NODE_FLAGS, "nodes": NODE_FLAGS}

# torchrun's default omits USR1: USR1 then kills its agent and leaves the workers running (measured).
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def build_environment(
    inherited: Mapping[str, str],
    *,
    run: str,
    run_dir: Path,
    launch: int,
    launch_dir: Path,
    token: str,
    grace_seconds: float,
    output_address: str | None,
    checkpoints_dir: Path | None,
    requested_ranks: int | None = None,
) -> dict[str, str]:
    """Return the environment of the launcher and its descendants. The user's own torchrun signals and timeout are kept."""
    environment = dict(inherited)
    environment.update(
        CHRONICLE_RUN=run,
        CHRONICLE_RUN_DIR=str(run_dir),
        CHRONICLE_LAUNCH=str(launch),
        CHRONICLE_LAUNCH_DIR=str(launch_dir),
        # children of the launcher inherit this variable, but not `python -u`
        PYTHONUNBUFFERED="1",
    )
    environment[TOKEN_VARIABLE] = token
    environment.pop("CHRONICLE_OUTPUT", None)
    if output_address is not None:
        environment["CHRONICLE_OUTPUT"] = output_address
    environment.pop(REQUESTED_VARIABLE, None)
    if requested_ranks is not None:
        environment[REQUESTED_VARIABLE] = str(requested_ranks)
    if checkpoints_dir is not None:
        environment["CHRONICLE_CHECKPOINTS"] = str(checkpoints_dir)
    # torchrun sends SIGKILL 30 s after a signal by default, which would interrupt a longer save
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_seconds)))
    environment.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)
    environment.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)  # torchrun's flag, as a variable
    environment.setdefault("SRUN_LABELIO", "1")  # makes `srun` print the task number before each line
    if environment.get("CHRONICLE_GUARD", "").strip().lower() != "off":
        environment["PYTHONPATH"] = _before_others(STARTUP_DIR, environment.get("PYTHONPATH", ""))
    return environment


def _before_others(directory: Path, python_path: str) -> str:
    """`python_path` with the directory in front; an empty entry would mean the working directory."""
    others = [entry for entry in python_path.split(os.pathsep) if entry != str(directory)] if python_path else []
    return os.pathsep.join([str(directory), *others])


def count_requested_ranks(command: Sequence[str]) -> int | None:
    """Count the ranks that the launcher's options request; None when they do not say (`auto`, a config file, a wrapper).

    The number started can differ: `accelerate launch --cpu --num_processes 2` silently starts one process. Options behind
    the script or module belong to the trainer. `srun -n 2 torchrun --nproc_per_node 4` requests 8.
    """
    asked: dict[str, int] = {}
    for index, word in enumerate(command):
        if Path(word).name in SHELLS or word.endswith(".sh"):
            return None  # a script may start anything
        if index == 0 or PROGRAM.fullmatch(word) is not None:
            if Path(word).name not in LAUNCHERS:
                break
            continue
        name, equals, value = word.partition("=")
        kind = next((kind for kind, flags in FLAGS.items() if name in flags), None)
        if kind is not None:
            value = value if equals else (command[index + 1] if index + 1 < len(command) else "")
            if not value.isdigit():
                return None
            asked.setdefault(kind, int(value))
        if word.endswith(".py") or word in MODULE_FLAGS:
            break
    if "per node" in asked:
        return asked["per node"] * asked.get("nodes", asked.get("total", 1))
    return asked.get("total")


# --- SLURM

SIGNAL_MARGIN_SECONDS = 30  # between the end of the grace period and SLURM's KILL
NodeIdentity = tuple[str, int]  # (key shared by all nodes of the launch, number of this node)

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={run}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# Send USR1 to the steps (not to this shell) early enough for a save: {grace:.0f} s and a margin.
#SBATCH --signal=USR1@{lead:d}
{exclude}
export CHRONICLE_SIGNAL_LEAD={lead:d}
# One supervisor per node; torchrun starts the ranks of its node.
srun --kill-on-bad-exit=1 --wait=60 --unbuffered \\
  chronicle run --run {run}{node_flag} --grace {grace:.0f} -- {command}
code=$?
# 138: saved on USR1, not finished. 78: the guard refused; a restart would be refused again.
if [ "$code" -eq 138 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def node_identity(environ: Mapping[str, str]) -> NodeIdentity | None:
    """Return launch key and node number from SLURM's variables; None outside a SLURM step."""
    job, node = environ.get("SLURM_JOB_ID"), environ.get("SLURM_NODEID", "")
    if not job or not node.isdigit():
        return None
    restart, step = environ.get("SLURM_RESTART_COUNT") or "0", environ.get("SLURM_STEP_ID") or "0"
    return f"{job}.{restart}.{step}", int(node)


def share_number(paths: RunPaths, key: str, take: Callable[[], int]) -> int:
    """Return one launch number for all nodes that share `key`: the first node links its number, the others read it.

    `link` succeeds for exactly one caller, also on network file systems. A number that was not needed is released.
    """
    paths.launches_dir.mkdir(parents=True, exist_ok=True)
    shared = paths.launches_dir / f".job-{key}"
    known = _read_number(shared)
    if known is not None:
        return known
    mine = take()
    try:
        write_atomic(shared, f"{mine}\n", durable=False, may_replace=False)
        return mine
    except FileExistsError:
        paths.launch_dir(mine).rmdir()
        number = _read_number(shared)
        assert number is not None, f"`{shared}` was linked into place with its number in it"
        return number


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def format_sbatch(
    run: str, command: Sequence[str], *, grace_seconds: float, nodes: int = 1, excluded: Sequence[str] = ()
) -> str:
    """Return a batch script for this run. SLURM sends its warning `grace + 30` seconds before the time limit."""
    return TEMPLATE.format(
        run=shlex.quote(run),
        nodes=nodes,
        grace=grace_seconds,
        lead=math.ceil(grace_seconds) + SIGNAL_MARGIN_SECONDS,
        exclude=f"#SBATCH --exclude={','.join(excluded)}\n" if excluded else "",
        node_flag=" --node" if nodes > 1 else "",
        command=shlex.join(command),
    )
