"""The identity that a checkpoint carries: id, run and launch that saved it, and step. It is read and never inferred.

The guard writes it into its description of memory. That lies in the manifest of a directory, in the optimizer's state of a
file that a plain loop wrote (key `chronicle`), and among the callbacks of a Lightning checkpoint. Files are read by their
opcodes; nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollback.checkpoint.layout import Checkpoint, Role
from rollback.checkpoint.manifest import read_manifest
from rollback.checkpoint.state import as_mapping, find_states
from rollback.errors import UnknownFormat, UnreadableFile
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import plain_number

__all__ = ["read_identity"]

KEY = "chronicle"  # in the state dict of an optimizer (`chronicle.resume.adapters.torch`)
CALLBACK = "ChronicleCallback"  # start of the callback's name (`chronicle.resume.adapters.lightning`)
FIELDS = {"id": str, "run_id": str, "run": str, "launch": int, "step": int}


def read_identity(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the checkpoint says that it is; empty where it says nothing. Raises `UnreadableFile` for a damaged manifest."""
    if checkpoint.single_file:
        return _in_file(checkpoint.path)
    manifest = read_manifest(checkpoint.path)
    if manifest is not None:
        return _parsed((manifest.memory or {}).get("identity"))
    found = (_in_file(checkpoint.folder / file.path) for file in checkpoint.files if file.role is Role.OPTIMIZER)
    return next((identity for identity in found if identity), {})


def _in_file(path: Path) -> Mapping[str, Any]:
    try:
        tree = read_state_file(path).tree
    except (UnreadableFile, UnknownFormat):
        return {}  # `verify` reports what is wrong with it
    return next((identity for memory in _memories(tree) if (identity := _parsed(_part(memory, "identity")))), {})


def _memories(tree: object) -> Iterator[object]:
    """Descriptions of memory in the tree of a state file."""
    for name, state in (as_mapping(_part(tree, "callbacks")) or {}).items():
        if str(name).startswith(CALLBACK):
            yield _part(state, "memory")
    for _, value, kind in find_states(tree):
        if kind == "optimizer":
            yield _part(value, KEY)


def _part(value: object, key: str) -> object:
    return (as_mapping(value) or {}).get(key)


def _parsed(record: object) -> dict[str, Any]:
    """The known fields of an identity as plain values; empty unless it names a run."""
    given = {str(key): plain_number(value) for key, value in (as_mapping(record) or {}).items()}
    found = {key: kind(given[key]) for key, kind in FIELDS.items() if isinstance(given.get(key), kind)}
    return found if found.get("id") and found.get("run_id") else {}
