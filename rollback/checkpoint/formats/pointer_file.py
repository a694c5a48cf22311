"""`latest` and its like: a small text file, or a symbolic link, beside the checkpoints that names one of them."""

from __future__ import annotations

import os
from pathlib import Path

from rollback.disk.reading import read_bounded
from rollback.errors import UnreadableFile

MAX_POINTER_BYTES = 4096  # a name in a directory has at most 255
REMEDY = "write the name of a checkpoint into it, or remove it"


def read_pointer(path: Path) -> str | None:
    """What a pointer file or a symbolic link says, None when there is none; UnreadableFile when it is no such thing."""
    return os.readlink(path) if path.is_symlink() else pointer_text(path)


def pointer_text(path: Path) -> str | None:
    """What stands in the file; as `read_pointer`, but a link is followed."""
    if not path.is_file():
        return None
    try:
        text = read_bounded(path, MAX_POINTER_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableFile(f"pointer `{path}` is no text", REMEDY) from None
    if not text.strip().isprintable():
        raise UnreadableFile(f"pointer `{path}` has characters that no name has", REMEDY)
    return text
