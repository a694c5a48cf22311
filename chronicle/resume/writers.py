"""Who writes a run and its checkpoints right now: a lock that says so, and never blocks.

Every launch under guard holds a POSIX record lock on `<run>/writer.lock` while its process lives. The kernel releases it when
the process ends, in whatever way; workers made by `fork` do not inherit it, so an orphan cannot keep it. The file names the
holder. A second launch trains on: it is only told, because the other one may be about to end. A filesystem without locks, or
a full disk, means that nothing is known.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import read_manifest
from rollback.errors import RollbackError

TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_held: dict[str, int] = {}  # path -> descriptor, for the life of this process: closing any descriptor would release the lock


def claim_run(paths: RunPaths, launch: int | None) -> str:
    """Hold the run's lock until this process ends; returns the other living writer in words, "" when there is none."""
    path = paths.run_dir / "writer.lock"
    if str(path) in _held:
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return ""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        holder = _read(descriptor) if problem.errno in TAKEN else ""
        os.close(descriptor)
        return holder
    _held[str(path)] = descriptor
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "launch": launch}).encode(), 0)
    return ""


def release_run(paths: RunPaths) -> None:
    """Let go of the run's lock, for a process that trains several runs one after another."""
    descriptor = _held.pop(str(paths.run_dir / "writer.lock"), None)
    if descriptor is not None:
        os.close(descriptor)


def _read(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        launch = "" if record.get("launch") is None else f", launch {record['launch']}"
        return f"process {record['pid']} on `{record['host']}`{launch}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another process"


def foreign_owner(root: Path, identity: Mapping[str, Any]) -> str:
    """The other run whose checkpoint was in this directory until now, in words; "" when it was ours or there was none."""
    try:
        manifest = read_manifest(root)
    except (RollbackError, OSError):
        return ""
    memory = manifest.memory if manifest is not None else None
    owner: Any = (memory or {}).get("identity") or {}
    if not owner.get("run_id") or not identity.get("run_id") or owner["run_id"] == identity["run_id"]:
        return ""
    return f"run {owner.get('run') or owner['run_id']} (launch {owner.get('launch')}, step {owner.get('step')})"
