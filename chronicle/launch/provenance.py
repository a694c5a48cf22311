"""Describe what a launch is started from: command, code, environment and machine. Credentials are replaced by `***`.

Environment variables pass an allow-list; `chronicle/credentials.py` says what is a credential. The environment
digest covers names and versions of the packages beside the launcher's executable, read from directory names without
importing them. Unknown values are None.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.credentials import holds_secret, looks_secret, redact_command
from chronicle.launch.processes import read_boot_id, read_process

__all__ = ["describe_launch", "host_name"]

GIT_SECONDS = 10.0
SOURCE_SUFFIXES = (".py", ".pyx", ".sh", ".sbatch", ".toml", ".yaml", ".yml", ".cu", ".cpp", ".c", ".h")
MOST_SOURCES = 2000
LARGEST_SOURCE_BYTES = 1 << 20
ALLOWED_VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|OMP_NUM_THREADS|MASTER_ADDR|MASTER_PORT|WORLD_SIZE|NNODES|NODE_RANK"
    r"|NCCL_[A-Z0-9_]+|TORCH_[A-Z0-9_]+|TORCHELASTIC_[A-Z0-9_]+|PYTORCH_[A-Z0-9_]+|ACCELERATE_[A-Z0-9_]+|DS_ACCELERATOR"
    r"|SLURM_(JOB_ID|JOB_NAME|JOB_NODELIST|JOB_PARTITION|NNODES|NTASKS|NODEID|RESTART_COUNT|STEP_ID|ARRAY_(JOB|TASK)_ID))"
)
PYTHON_DIRECTORY = re.compile(r"python3(\.\d+)?")


def host_name() -> str:
    """Return the short host name, as used in the names of journal files."""
    return socket.gethostname().split(".")[0]


def describe_launch(command: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of `launch.start` that describes code, command and machine."""
    me = read_process(os.getpid())
    commit, dirty = _describe_code(cwd)
    return {
        "argv": redact_command(command),
        "cwd": str(cwd),
        "git_commit": commit,
        "git_dirty_digest": dirty,
        "env_digest": _digest_packages(command[0], environ),
        "environment": {key: environ[key] for key in sorted(environ) if _may_record(key, environ[key])},
        "host": host_name(),
        "pid": os.getpid(),
        "start_ticks": me.start_ticks if me else None,
        "boot_id": read_boot_id(),
        "uid": os.getuid(),
        "python": platform.python_version(),
    }


def _may_record(key: str, value: str) -> bool:
    return (
        ALLOWED_VARIABLES.fullmatch(key) is not None
        and not looks_secret(key)
        and not holds_secret(value)
    )


def _describe_code(cwd: Path) -> tuple[str | None, str | None]:
    """Return the commit and a digest of the differences to it (None: clean or unknown)."""
    commit = _git(cwd, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    changed = _git(cwd, "status", "--porcelain=v1", "--untracked-files=normal")
    if not changed:
        return commit.decode("ascii", "replace").strip(), None
    diff = _git(cwd, "diff", "HEAD", "--binary") or b""
    digest = hashlib.sha256(changed + b"\0" + diff)
    for path in _untracked_sources(cwd):
        try:
            digest.update(os.fsencode(path) + b"\0" + path.read_bytes())
        except OSError:
            digest.update(os.fsencode(path) + b"\0unreadable")
    return commit.decode("ascii", "replace").strip(), digest.hexdigest()


def _untracked_sources(cwd: Path) -> list[Path]:
    """List untracked source files: `git diff` omits them, but the launch may run them."""
    listed = _git(cwd, "ls-files", "--others", "--exclude-standard", "-z") or b""
    paths = (cwd / os.fsdecode(name) for name in listed.split(b"\0") if name)
    sources = sorted(path for path in paths if path.suffix in SOURCE_SUFFIXES)[:MOST_SOURCES]
    return [path for path in sources if path.is_file() and path.stat().st_size <= LARGEST_SOURCE_BYTES]


def _git(cwd: Path, *words: str) -> bytes | None:
    # GIT_OPTIONAL_LOCKS=0: reading the status must not lock the index while somebody commits
    environ = dict(os.environ, GIT_OPTIONAL_LOCKS="0", LC_ALL="C")
    try:
        done = subprocess.run(
            ["git", "-C", str(cwd), *words], capture_output=True, timeout=GIT_SECONDS, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _digest_packages(executable: str, environ: Mapping[str, str]) -> str | None:
    found = shutil.which(executable, path=environ.get("PATH"))
    roots = [Path(found).parent.parent / "lib"] if found else []
    roots.append(Path(sys.prefix) / "lib")
    for root in roots:
        names = _list_packages(root)
        if names:
            return hashlib.sha256("\n".join(names).encode()).hexdigest()
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
