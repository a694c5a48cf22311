"""A short text that changes whenever a file of a checkpoint does: names, sizes, modification times and inodes, no content.

What was found out about a checkpoint holds as long as its stamp is the same. Moving it on its filesystem keeps the stamp;
a copy has another one, and so has a checkpoint that an edit has touched.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollback.checkpoint.layout import ACCELERATE_STATE_DIR, scan_entries


def stamp_of(path: Path) -> str:
    """The stamp of the checkpoint at `path`, a directory or a file; raises RollbackError or OSError when it is not there."""
    import hashlib  # 5 ms that not every reader needs

    if path.name == ACCELERATE_STATE_DIR:
        path = path.parent  # both name the same checkpoint
    names = [entry.path for entry in scan_entries(path)] if path.is_dir() else [""]
    digest = hashlib.sha256()
    for name in names:
        found = os.lstat(path / name)
        values = (found.st_size, found.st_mtime_ns, found.st_ino) if not os.path.isdir(path / name) else ()
        digest.update(repr((name, *values)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]
