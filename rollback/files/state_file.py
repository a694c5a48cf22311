"""Reads any state file of a checkpoint and recognises its format by content: torch zip, pickle, JSON, DCP entries.

A safetensors file holds tensors only and is refused here; `rollback.files.safetensors_file` checks its header.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollback.errors import UnreadableFile
from rollback.files.dcp_file import read_distcp_file
from rollback.files.json_file import json_parts
from rollback.files.pickle_machine import Limits
from rollback.files.pickle_values import Encoding, Place
from rollback.files.torch_file import naming, open_state_file, read_torch_content, stored_number
from rollback.files.torch_tree import Container, TorchFile

_MAX_JSON_TREE_BYTES = 8 * 2**20  # in memory
_MAX_JSON_MEMBER = 4096  # bytes of text; numbers and names are what continues a run


def read_state_file(path: Path | str, *, limits: Limits | None = None) -> TorchFile:
    """Read the state file at `path`.

    Raises `UnreadableFile` for damage and for anything but a regular file, `UnknownFormat` for any other content.
    """
    path = Path(path)
    if path.suffix == ".distcp":
        return read_distcp_file(path)
    with open_state_file(path) as (fd, size_bytes), naming(path):
        if os.pread(fd, 1, 0) in (b"{", b"["):
            return _read_json(fd, path, size_bytes)
        return read_torch_content(fd, path, size_bytes, limits=limits)


def _read_json(fd: int, path: Path, size_bytes: int) -> TorchFile:
    """The members of the outermost object or list; long ones, such as the Trainer's `log_history`, are checked and dropped."""
    members: dict[str | int, object] = {}
    left = _MAX_JSON_TREE_BYTES
    for part in json_parts(fd, 0, size_bytes, wanted=lambda keys: len(keys) <= 1):
        length = part.end - part.start
        if not part.keys or length > _MAX_JSON_MEMBER:
            continue
        left -= 128 + part.num_bytes
        if left < 0:
            raise UnreadableFile(f"more than {len(members)} values at its top level: expected a file of counters")
        value = part.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = stored_number(value, Place(0, part.start, length, Encoding.JSON))
        members[part.keys[0]] = value
    tree = members if os.pread(fd, 1, 0) == b"{" else list(members.values())
    return TorchFile(path=path, container=Container.JSON, tree=tree, segments=(), size_bytes=size_bytes)
