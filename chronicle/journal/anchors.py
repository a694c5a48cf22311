"""Heads of other writers' chains, written into entries now and then: what no chain of its own can show.

A chain per writer shows edits in its middle. That its last lines were cut off or rewritten, or that a whole file is gone,
shows only where somebody else wrote down what its last line was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from chronicle.journal.reader import Journal
from chronicle.paths import RunPaths

__all__ = ["anchor_heads", "check_anchors"]

MOST_WRITERS = 64
DIGITS = 16


def anchor_heads(journal: Journal) -> dict[str, str]:
    """Writer -> first digits of its last line's digest, for the newest writers (their names begin with their time)."""
    newest = sorted(journal.heads)[-MOST_WRITERS:]
    return {writer: digest[:DIGITS] for writer, digest in newest}


def check_anchors(paths: RunPaths, journal: Journal) -> Iterator[tuple[str, str]]:
    """(file, sentence) for every head that was written down and is no line of its writer's file now."""
    anchors: dict[str, dict[str, str]] = {}
    for entry in journal.entries:
        heads = entry.data.get("journal_heads")
        for writer, digest in heads.items() if isinstance(heads, Mapping) else ():
            anchors.setdefault(str(writer), {}).setdefault(str(digest), entry.id)
    for writer, expected in anchors.items():
        path = paths.journal_dir / f"{writer}.jsonl"
        where = path.relative_to(paths.run_dir).as_posix()
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            yield where, f"the file is gone; entry {next(iter(expected.values()))} saw it"
            continue
        found = {hashlib.sha256(line).hexdigest()[:DIGITS] for line in lines}
        for digest, entry_id in expected.items():
            if digest not in found:
                yield where, f"a line that entry {entry_id} saw as its last has been changed or cut off"
