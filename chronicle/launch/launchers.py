"""Settings for the launchers: environment variables and requested ranks.

Covers torchrun, accelerate, deepspeed, srun and mpirun. The variable names are the public interface to trainers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def build_environment(inherited: Mapping[str, str], ours: Mapping[str, object], grace_seconds: float) -> dict[str, str]:
    """Return the environment of the launcher and its descendants; of `ours` None is left out, also where it was inherited.

    The user's own torchrun signals and timeout are kept.
    """
    environment = {name: value for name, value in inherited.items() if name not in ours}
    environment |= {name: str(value) for name, value in ours.items() if value is not None}
    environment["PYTHONUNBUFFERED"] = "1"  # children of the launcher inherit this variable, but not `python -u`
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
