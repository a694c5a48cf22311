"""Nodes taken out of use and brought back, folded from the journal. Pure.

Seed 003, exp3: Xid 64 came back because the bad node had not been removed from the pool.
"""

from __future__ import annotations

from collections.abc import Iterable

from chronicle.journal import Entry

__all__ = ["EXCLUDE", "READMIT", "find_excluded"]

EXCLUDE = "exclude-node"
READMIT = "readmit-node"


def find_excluded(entries: Iterable[Entry]) -> dict[str, str]:
    """Excluded nodes in the order they were excluded, each with its reason."""
    excluded: dict[str, str] = {}
    for entry in entries:
        if entry.kind != "hardware":
            continue
        host, action = entry.data.get("host"), entry.data.get("action")
        if isinstance(host, str) and action == EXCLUDE:
            excluded[host] = str(entry.data.get("reason") or entry.title)
        elif isinstance(host, str) and action == READMIT:
            excluded.pop(host, None)
    return excluded
