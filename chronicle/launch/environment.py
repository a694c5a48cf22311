"""The environment a launch gets: who it is, unbuffered output, and launchers that wait long enough for a save.

Names are the product's public interface to trainers. Pure: takes a mapping, returns a mapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from chronicle.launch.containment import TOKEN_VARIABLE

__all__ = ["build_environment"]

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
    if checkpoints_dir is not None:
        environment["CHRONICLE_CHECKPOINTS"] = str(checkpoints_dir)
    # torchrun sends SIGKILL 30 s after a signal unless told otherwise: a longer save would be cut in half
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_seconds)))
    environment.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)
    environment.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS_TO_HANDLE)  # torchrun's flag, as a variable
    environment.setdefault("SRUN_LABELIO", "1")  # `srun` then says which task printed a line
    return environment
