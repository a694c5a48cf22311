"""A launch on several nodes has one start and one end for readers, whatever number of supervisors wrote them. Pure.

The first node's start stands for all. Of the ends the first that is not well does (a rank that failed on one node is how
the launch failed), else the last. Starts made only for `preflight --full` are no launches of the run's story of costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chronicle.journal.entries import Entry

__all__ = ["drop_preflights", "end_is_well", "merge_nodes"]


def merge_nodes(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries with one `launch.start` and one `launch.end` a launch; a launch of one node is left as it is."""
    kept = tuple(entries)
    chosen: dict[tuple[str, int], Entry] = {}
    for entry in kept:
        if entry.launch is None or entry.kind not in ("launch.start", "launch.end"):
            continue
        key = entry.kind, entry.launch
        before = chosen.get(key)
        if before is None or (entry.kind == "launch.end" and end_is_well(before)):
            chosen[key] = entry
    ids = {entry.id for entry in chosen.values()}
    return tuple(
        entry
        for entry in kept
        if entry.kind not in ("launch.start", "launch.end") or entry.launch is None or entry.id in ids
    )


def end_is_well(end: Entry) -> bool:
    """Whether a node ended with code 0; an inferred end has no code and is not well."""
    return end.data.get("exit_code") == 0


def drop_preflights(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Without the launches that only made experiments before the first step."""
    preflights = {
        entry.launch for entry in entries if entry.kind == "launch.start" and entry.data.get("purpose") == "preflight"
    }
    return tuple(entry for entry in entries if entry.launch is None or entry.launch not in preflights)
