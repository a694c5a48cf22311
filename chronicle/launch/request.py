"""What a launch is asked to be, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.launch.output import ROTATE_BYTES
from chronicle.launch.slurm import NodeIdentity
from chronicle.paths import RunPaths

__all__ = ["LaunchEnd", "LaunchRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What to start and how to end it."""

    command: tuple[str, ...]
    paths: RunPaths
    checkpoints_dir: Path | None
    cwd: Path
    environ: Mapping[str, str]
    grace_seconds: float
    stop_on_proposal: bool = False
    force: str | None = None  # reason for starting although a launch seems alive elsewhere
    recorded: Mapping[str, Any] = field(default_factory=dict)  # goes into `launch.start` as it is
    rotate_bytes: int = ROTATE_BYTES
    node: NodeIdentity | None = None  # one of several nodes of one launch


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnd:
    """The number of the launch, its exit code, and the `data` of its `launch.end`."""

    launch: int
    exit_code: int
    data: Mapping[str, Any]
