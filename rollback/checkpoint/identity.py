"""What a checkpoint says that it is: id, run, launch and step that saved it. Never inferred.

The guard writes it into its description of memory: in the manifest of a directory, in the optimizer's state of a file that a
plain loop wrote, and among the callbacks of a Lightning checkpoint. Of one that says nothing, the digests of its optimizers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollback.checkpoint.layout import Checkpoint, Role
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.state import as_mapping, find_states
from rollback.checkpoint.state_digest import digest_in_file
from rollback.errors import UnknownFormat, UnreadableFile
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import plain_number

IDENTITY_KEY = "chronicle"  # in the state dict of an optimizer, written before 2026-11-28
IDENTITY_CALLBACK = "ChronicleCallback"  # start of the callback's name (`chronicle.resume.adapters.lightning`)
IDENTITY_FIELDS = {"id": str, "run_id": str, "run": str, "launch": int, "step": int}
_MOST_STATES = 8  # files of a directory


def read_identity(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the checkpoint says that it is; empty where it says nothing. Raises `UnreadableFile` for a damaged manifest."""
    if checkpoint.single_file:
        return identity_in_file(checkpoint.path)
    manifest = read_manifest(checkpoint.path)
    if manifest is not None:
        return _parse_identity((manifest.memory or {}).get("identity"))
    found = (identity_in_file(checkpoint.folder / file.path) for file in checkpoint.files if file.role is Role.OPTIMIZER)
    return next((identity for identity in found if identity), {})


def read_state_digests(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Digests of the optimizers' states in a checkpoint that says nothing of itself: a plain file, or a directory of them."""
    if not checkpoint.single_file and read_manifest(checkpoint.path) is not None:
        return ()
    own = [checkpoint.path] if checkpoint.single_file else []
    held = own or [checkpoint.folder / file.path for file in checkpoint.files if file.role is Role.OPTIMIZER]
    found = []
    for path in held[:_MOST_STATES]:
        with contextlib.suppress(UnreadableFile, UnknownFormat):
            file = read_state_file(path)
            found += [digest_in_file(file, value) for _, value, kind in find_states(file.tree) if kind == "optimizer"]
    return tuple(filter(None, found))


def identity_in_file(path: Path) -> Mapping[str, Any]:
    """What a state file says that it is; empty where it says nothing."""
    try:
        tree = read_state_file(path).tree
    except (UnreadableFile, UnknownFormat):
        return {}  # `verify` reports what is wrong with it
    return next((identity for memory in _memories_in(tree) if (identity := _parse_identity(_part(memory, "identity")))), {})


def _memories_in(tree: object) -> Iterator[object]:
    """Descriptions of memory in the tree of a state file."""
    for name, state in (as_mapping(_part(tree, "callbacks")) or {}).items():
        if str(name).startswith(IDENTITY_CALLBACK):
            yield _part(state, "memory")
    for _, value, kind in find_states(tree):
        if kind == "optimizer":
            yield _part(value, IDENTITY_KEY)


def _part(value: object, key: str) -> object:
    return (as_mapping(value) or {}).get(key)


def _parse_identity(record: object) -> dict[str, Any]:
    """The known fields of an identity as plain values; empty unless it names a run."""
    given = {str(key): plain_number(value) for key, value in (as_mapping(record) or {}).items()}
    found = {key: kind(given[key]) for key, kind in IDENTITY_FIELDS.items() if isinstance(given.get(key), kind)}
    return found if found.get("id") and found.get("run_id") else {}
