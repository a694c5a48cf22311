"""Describe what a launch is started from: command, code, environment and machine. Credentials are replaced by `***`.

Environment variables pass an allow-list; `chronicle/credentials.py` says what is a credential. The list of packages
holds names and versions of those beside the launcher's executable, read from directory names without importing them; its
digest is that of the text, which the launch keeps as an object. Unknown values are None.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.credentials import holds_secret, looks_secret, redact_command
from chronicle.launch.code import CodeState, read_code
from chronicle.launch.processes import read_boot_id, read_process

MOST_FILES, MOST_FILE_BYTES = 20, 65_536

ALLOWED_VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|OMP_NUM_THREADS|MASTER_ADDR|MASTER_PORT|WORLD_SIZE|NNODES|NODE_RANK"
    r"|NCCL_[A-Z0-9_]+|TORCH_[A-Z0-9_]+|TORCHELASTIC_[A-Z0-9_]+|PYTORCH_[A-Z0-9_]+|ACCELERATE_[A-Z0-9_]+|DS_ACCELERATOR"
    r"|SLURM_(JOB_ID|JOB_NAME|JOB_NODELIST|JOB_PARTITION|NNODES|NTASKS|NODEID|RESTART_COUNT|STEP_ID|ARRAY_(JOB|TASK)_ID)"
    r"|JOB_COMPLETION_INDEX|PET_NNODES|PET_NODE_RANK|CHRONICLE_(JOB|NODE))"
)
PYTHON_DIRECTORY = re.compile(r"python3(\.\d+)?")


def host_name() -> str:
    """Return the short host name, as used in the names of journal files."""
    return socket.gethostname().split(".")[0]


def describe_launch(
    command: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    code: CodeState | None = None,
    packages: bytes | None = None,
) -> dict[str, Any]:
    """Return the part of `launch.start` that describes code, command and machine; `packages`: as `read_packages` found them."""
    me = read_process(os.getpid())
    if code is None:
        code = read_code(cwd, with_patch=False)
    if packages is None:
        packages = read_packages(command, environ)
    return {
        "argv": redact_command(command),
        "cwd": str(cwd),
        "git_commit": code.commit,
        "git_dirty_digest": code.digest,
        "env_digest": None if packages is None else hashlib.sha256(packages).hexdigest(),
        "environment": {key: environ[key] for key in sorted(environ) if _may_record(key, environ[key])},
        "host": host_name(),
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else None,
        "boot_id": read_boot_id(),
        "uid": os.getuid(),
        "python": platform.python_version(),
    }


def read_settings_files(command: Sequence[str], cwd: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the config files say that the command names. What Hydra composes is told by its callback (`hydra_callback`).

    YAML is read whole where pyyaml is installed beside chronicle; else its numbers. A file that cannot be read as settings is
    left out: it may be data.
    """
    from rollback.files.config_text import config_kind, files_named_by  # only a launch asks

    configs = [file for file in files_named_by(command, cwd, "the command") if config_kind(file.path)]
    for file in configs[:MOST_FILES]:
        values = _settings_in(file.text, str(config_kind(file.path))) if len(file.text) <= MOST_FILE_BYTES else None
        if values:
            yield os.path.relpath(file.path, cwd), values


def _settings_in(text: str, kind: str) -> Mapping[str, Any] | None:
    import json
    import tomllib

    try:
        if kind == "yaml":
            try:
                import yaml  # only where a launch has such a file
            except ImportError:
                return _numbers(text)
            found = yaml.safe_load(text)
        else:
            found = json.loads(text) if kind == "json" else tomllib.loads(text)
    except Exception:  # noqa: BLE001 a file that no parser takes is no settings
        return None
    return found if isinstance(found, Mapping) else None


def _numbers(text: str) -> Mapping[str, Any]:
    """The numbers of a YAML text by their keys; of lists none."""
    from rollback.files.config_text import numbers

    found = numbers(text, "yaml")
    return {".".join(map(str, keys)): one.value for keys, one in found.items() if all(isinstance(key, str) for key in keys)}


def _may_record(key: str, value: str) -> bool:
    return (
        ALLOWED_VARIABLES.fullmatch(key) is not None
        and not looks_secret(key)
        and not holds_secret(value)
    )


def read_packages(command: Sequence[str], environ: Mapping[str, str]) -> bytes | None:
    """`name-version` of each package beside the launcher's executable, a line each; None where none is found."""
    found = shutil.which(command[0], path=environ.get("PATH"))
    roots = [Path(found).parent.parent / "lib"] if found else []
    roots.append(Path(sys.prefix) / "lib")
    for root in roots:
        names = _list_packages(root)
        if names:
            return "\n".join(names).encode()
    return None


def _list_packages(lib: Path) -> list[str]:
    """List `name-version` of every installed distribution below a `lib` directory, sorted."""
    try:
        versions = [d for d in lib.iterdir() if PYTHON_DIRECTORY.fullmatch(d.name)]
        sites = [site for d in versions for site in (d / "site-packages", d / "dist-packages") if site.is_dir()]
        return sorted(
            entry.name.rsplit(".", 1)[0] for site in sites for entry in site.iterdir() if entry.name.endswith("-info")
        )
    except OSError:
        return []
