"""The environment a launch gets: who it is, unbuffered output, and launchers that wait long enough for a save.

Names are the product's public interface to trainers. Pure: takes a mapping, returns a mapping.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from chronicle.launch.containment import TOKEN_VARIABLE

__all__ = ["REQUESTED_VARIABLE", "build_environment", "count_requested_ranks"]

REQUESTED_VARIABLE = "CHRONICLE_REQUESTED_RANKS"
PER_NODE_FLAGS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
NODE_FLAGS = ("--nnodes", "--num_nodes", "-N", "--nodes")
TOTAL_FLAGS = ("--num_processes", "--num-processes", "-n", "-np", "--ntasks")

# torchrun's own default leaves USR1 out: its agent then dies of it and its workers live on (measured).
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
    """Environment of the launcher and all below it. What the user set for torchrun's signals and timeout is kept."""
    environment = dict(inherited)
    environment.update(
        CHRONICLE_RUN=run,
        CHRONICLE_RUN_DIR=str(run_dir),
        CHRONICLE_LAUNCH=str(launch),
        CHRONICLE_LAUNCH_DIR=str(launch_dir),
        # `-u` on the launcher's command line is not inherited by its children, the variable is
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
    # torchrun sends SIGKILL 30 s after a signal unless told otherwise: a longer save would be cut in half
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_seconds)))
    environment.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)
    environment.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)  # torchrun's flag, as a variable
    environment.setdefault("SRUN_LABELIO", "1")  # `srun` then says which task printed a line
    return environment


def count_requested_ranks(command: Sequence[str]) -> int | None:
    """How many ranks the launchers' own words ask for; None where they leave it open (`auto`, a config file, a wrapper).

    Asked is not got: `accelerate launch --cpu --num_processes 2` starts one process without a word about it. Only words
    before the script or module count; what follows is the trainer's. `srun -n 2 torchrun --nproc_per_node 4` asks for 8.
    """
    asked: dict[str, int] = {}
    for index, word in enumerate(command):
        if Path(word).name in SHELLS or word.endswith(".sh"):
            return None  # what it starts is its own affair
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


LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "srun", "mpirun", "mpiexec")
SHELLS = ("bash", "sh", "zsh")
PROGRAM = re.compile(r"(?:.*/)?(?:accelerate|torchrun|deepspeed|srun|mpirun|mpiexec|python[\d.]*)")
MODULE_FLAGS = ("-m", "--module")
FLAGS: Mapping[str, Sequence[str]] = {"total": TOTAL_FLAGS, "per node": PER_NODE_FLAGS, "nodes": NODE_FLAGS}
