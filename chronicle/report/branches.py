"""The run as a tree of stretches: each launch is one stretch, or two where a later launch branched off it. Pure.

A stretch is a launch's kept part or its abandoned part (a launch abandoned whole is one abandoned stretch). What came
after a fork is younger than everything before it, so a run drawn newest first nests like `git log --graph`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from chronicle.journal import Entry
from chronicle.story.assemble import Story
from chronicle.story.launches import LaunchStory

__all__ = ["Stretch", "Tree", "tell_stretches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps `first..last` of one launch; `after` is the stretch whose last step it continues."""

    key: tuple[int, int]  # (launch, part)
    launch: LaunchStory
    first: int
    last: int | None
    abandoned: bool
    after: tuple[int, int] | None
    entries: tuple[Entry, ...] = field(default=())  # oldest first
    closing: bool = True  # holds the end of its launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All stretches in the order in which they began. `before` the first launch, `after` a rollback that none followed."""

    stretches: tuple[Stretch, ...]
    before: tuple[Entry, ...]
    after: tuple[Entry, ...]
    head: tuple[int, int] | None  # the stretch that holds the lineage's last step


def tell_stretches(story: Story) -> Tree:
    """Every entry of the journal lies in exactly one place of the tree."""
    cuts: dict[int, set[int]] = {}
    for launch in story.launches:
        parent, start = launch.span.parent, launch.span.start_step
        source = story.launch(parent)
        if source is not None and start is not None and (source.span.last_step or 0) > start:
            cuts.setdefault(source.number, set()).add(start)
    for launch in story.launches:
        after = launch.span.abandoned_after
        if after is not None and after > (launch.span.start_step or 0):
            cuts.setdefault(launch.number, set()).add(after)
    stretches = [s for launch in story.launches for s in _parts(launch, cuts.get(launch.number, set()))]
    tree = _with_entries(stretches, story.entries)
    return replace(tree, head=_holding(tree.stretches, story.headline.launch, story.headline.step))


def _parts(launch: LaunchStory, cuts: set[int]) -> list[Stretch]:
    start, last = launch.span.start_step or 0, launch.span.last_step
    inner = sorted(s for s in cuts if start < s and (last is None or s < last))
    borders = [start, *inner]
    limit = launch.span.abandoned_after
    out: list[Stretch] = []
    for part, low in enumerate(borders):
        closing = part == len(borders) - 1
        out.append(
            Stretch(
                key=(launch.number, part),
                launch=launch,
                first=low + 1,
                last=last if closing else borders[part + 1],
                abandoned=limit is not None and low >= limit,
                after=(launch.number, part - 1) if part else None,
                closing=closing,
            )
        )
    return out


def _with_entries(stretches: Sequence[Stretch], entries: Sequence[Entry]) -> Tree:
    """Hand out the entries. What follows a rollback belongs to the launch that it prepares, not to the one it ends; a
    launch that was refused, or died before its first step, prepared nothing: the rollback waits for the next one.
    """
    by_launch: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        by_launch.setdefault(stretch.launch.number, []).append(stretch)
    last = max(by_launch, default=None)
    held: dict[tuple[int, int], list[Entry]] = {s.key: [] for s in stretches}
    before: list[Entry] = []
    waiting: list[Entry] | None = None
    open_to_waiting = False  # between a rollback and the next start
    part: dict[int, int] = {}
    current: int | None = None
    for entry in entries:
        if entry.kind == "launch.start" and entry.launch is not None and entry.launch in by_launch:
            current, open_to_waiting = entry.launch, False
            if by_launch[current][0].launch.span.has_steps or current == last:
                held[current, 0] += waiting or []
                waiting = None
        elif entry.kind == "rollback.receipt":
            waiting, open_to_waiting = [] if waiting is None else waiting, True
        if waiting is not None and open_to_waiting:
            waiting.append(entry)
        elif current is None:
            before.append(entry)
        else:
            part[current] = _advance(entry, by_launch[current], part.get(current, 0))
            held[current, part[current]].append(entry)
    linked = (replace(s, after=s.after or _parent(s, by_launch), entries=tuple(held[s.key])) for s in stretches)
    return Tree(stretches=tuple(linked), before=tuple(before), after=tuple(waiting or ()), head=None)


def _advance(entry: Entry, parts: Sequence[Stretch], now: int) -> int:
    """Time runs one way: once past a border, an entry about an earlier step still stands where it was written."""
    if entry.kind in ("launch.end", "rollback.intent", "rollback.receipt"):
        return len(parts) - 1
    if entry.step is None or entry.kind not in ("checkpoint", "incident", "proposal"):
        return now
    while now < len(parts) - 1 and (parts[now].last or 0) < entry.step:
        now += 1
    return now


def _parent(stretch: Stretch, by_launch: Mapping[int, Sequence[Stretch]]) -> tuple[int, int] | None:
    parent, start = stretch.launch.span.parent, stretch.launch.span.start_step
    if start is None and stretch.launch.verdict_entry is not None:
        start = stretch.launch.verdict_entry.step  # refused: where it would have resumed
    return None if parent is None else _holding(by_launch.get(parent, ()), parent, start)


def _holding(stretches: Sequence[Stretch], launch: int | None, step: int | None) -> tuple[int, int] | None:
    """The stretch of this launch in which this step lies."""
    for part in stretches:
        if part.launch.number != launch or step is None:
            continue
        if part.first <= step and (part.last is None or step <= part.last):
            return part.key
    return None
