"""A launch in a scratch directory: a copy of a directory, a port of its own, and no tracker that is told."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection
from math import inf
from pathlib import Path

from chronicle.errors import UsageProblem

MOST_COPIED_BYTES = 256 << 20
MOST_ENTRIES = 20_000
NO_TRACKERS = {
    "CHRONICLE_MLFLOW_URI": "off",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "MLFLOW_TRACKING_URI": "file:{scratch}/mlflow",
    "CLEARML_OFFLINE_MODE": "1",
    "TRACKIO_DIR": "{scratch}/trackio",
}
LEFT_OUT = (".git", ".venv", "venv", "__pycache__", "node_modules", "logs", "wandb", "mlruns")


def copy_tree(
    source: Path, target: Path, without: Collection[Path], *, remedy: str, linked_bytes: float = inf
) -> None:
    """A directory without repositories, environments, caches and `without`; a file of `linked_bytes` or more is a link to it.

    Raises `UsageProblem` with the remedy where it would be too large.
    """

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name in LEFT_OUT or Path(folder, name) in without]

    def copy(one: str, other: str) -> None:
        if os.path.getsize(one) < linked_bytes:
            shutil.copy2(one, other)
        else:
            os.symlink(one, other)

    sizes = [path.lstat().st_size for path in files_below(source, without)]
    if sum(size for size in sizes if size < linked_bytes) > MOST_COPIED_BYTES:
        raise UsageProblem(f"`{source}` is too large to be copied for each launch", remedy)
    shutil.copytree(source, target, symlinks=True, ignore=left_out, copy_function=copy, dirs_exist_ok=True)


def files_below(root: Path, without: Collection[Path] = ()) -> list[Path]:
    """The file, or those below a directory without what is left out of copies; some `MOST_ENTRIES` at most."""
    found = [] if root.is_dir() else [root]
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT and Path(folder, name) not in without]
        found += [path for name in files if (path := Path(folder, name)) not in without]
        if len(found) > MOST_ENTRIES:
            break
    return sorted(found)


def silent(scratch: Path) -> dict[str, str]:
    """What tells no tracker: what these libraries read for "do nothing", or write into the scratch directory."""
    return {name: value.format(scratch=scratch) for name, value in NO_TRACKERS.items()}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
