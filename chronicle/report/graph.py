"""The terminal graph: the run drawn like `git log --graph`, newest first; readable without colour.

    *    launch 2 · steps 6–8 · inferred · ×0.5 · loss 8.2 · ended with code 0
    |    guard passed
    R    rollback to 5, LR ×0.5
    | x  launch 1 · steps 6–10 · abandoned · loss 100
    | !  divergence from step 8
    |/
    *    launch 1 · steps 1–5 · ×1

Lane 0 is the lineage. Every abandoned stretch has its own lane, which joins where it branched off, and so has a launch that
was refused or took no step. A stretch is the kept or the abandoned part of a launch; a launch from which a later one branched
off is cut there. `inferred`: no guard recorded what the launch loaded.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from chronicle.journal import Entry
from chronicle.journal.events import EntryKind, GuardVerdict, Incident, Preflight, RollbackReceipt, RunFork, words_of
from chronicle.journal.place import describe_parent
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.chapters import BOOKKEEPING
from chronicle.story.plain import format_factor, format_number, format_when

CHECKPOINTS_NAMED = 4
REASON = 48  # characters shown of why an LR follows no schedule
MARKS: dict[str, str] = {
    EntryKind.INCIDENT: "!",
    EntryKind.ROLLBACK_RECEIPT: "R",
    EntryKind.UNDO_RECEIPT: "U",
    EntryKind.NOTE: "·",
    EntryKind.AMEND: "·",
    EntryKind.CLOSE: "=",
    EntryKind.HARDWARE: "#",
    EntryKind.PROPOSAL: "?",
    EntryKind.REPLAY: "p",
    EntryKind.RETAKEN: "a",
    EntryKind.REHEARSAL: "h",
    EntryKind.GUARD_VERDICT: "g",
    EntryKind.RUN_FORK: "Y",
}
SAVES = frozenset((EntryKind.CHECKPOINT, EntryKind.CHECKPOINT_SEEN))
SILENT = BOOKKEEPING | SAVES | {EntryKind.LAUNCH_START, EntryKind.LAUNCH_END}
# Entries that belong to the end of a launch
LAST_PART = frozenset((EntryKind.LAUNCH_END, EntryKind.ROLLBACK_INTENT, EntryKind.ROLLBACK_RECEIPT))
AT_A_STEP = SAVES | {EntryKind.INCIDENT, EntryKind.PROPOSAL}


# --- the run as a tree of stretches -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps `first..last` of one launch. `after`: the stretch that it continues."""

    key: tuple[int, int]  # (launch, part)
    launch: LaunchStory
    first: int
    last: int | None
    abandoned: bool
    after: tuple[int, int] | None
    entries: tuple[Entry, ...] = field(default=())  # oldest first
    closing: bool = True  # holds the end of its launch
    aside: bool = False  # of a launch that was refused or took no step


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All stretches in the order of their beginnings. `before`: entries before the first launch. `after`: after the last."""

    stretches: tuple[Stretch, ...]
    before: tuple[Entry, ...]
    after: tuple[Entry, ...]
    head: tuple[int, int] | None  # the stretch that holds the lineage's last step


def tell_stretches(story: Story) -> Tree:
    """The run as a tree; every entry of the journal is in one place of it."""
    cuts: dict[int | None, set[int | None]] = defaultdict(set)  # launch -> the steps at which it is cut
    for launch in story.launches:
        cuts[launch.span.parent].add(launch.span.start_step)
        cuts[launch.number].add(launch.span.abandoned_after)
    stretches = [stretch for launch in story.launches for stretch in _parts(launch, cuts[launch.number], story)]
    tree = _with_entries(stretches, story.entries)
    return replace(tree, head=_holding(tree.stretches, story.headline.launch, story.headline.step))


def _is_aside(launch: LaunchStory, story: Story) -> bool:
    """Whether it moved nothing: without a step, unless it is the newest one and about to take its first."""
    span = launch.span
    if span.has_steps:
        return False
    may_come = launch is story.last_launch and not span.ended and not span.refused
    return not (may_come and (launch.alive or span.inferred))


def _parts(launch: LaunchStory, cuts: Iterable[int | None], story: Story) -> Iterator[Stretch]:
    start, last = launch.span.start_step or 0, launch.span.last_step
    limit = launch.span.abandoned_after
    inner = sorted(step for step in cuts if step is not None and start < step and (last is None or step < last))
    for part, (low, high) in enumerate(pairwise([start, *inner, last])):
        yield Stretch(
            key=(launch.number, part),
            launch=launch,
            first=(low or 0) + 1,
            last=high,
            abandoned=limit is not None and (low or 0) >= limit,
            after=(launch.number, part - 1) if part else None,
            closing=part == len(inner),
            aside=_is_aside(launch, story),
        )


def _with_entries(stretches: Sequence[Stretch], entries: Sequence[Entry]) -> Tree:
    """Assign the entries to stretches.

    Entries after a rollback belong to the next launch. A launch that was refused or ended before its first step does not
    count as the next one.
    """
    by_launch: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        by_launch.setdefault(stretch.launch.number, []).append(stretch)
    held: dict[tuple[int, int], list[Entry]] = {s.key: [] for s in stretches}
    before: list[Entry] = []
    waiting: list[Entry] | None = None
    open_to_waiting = False  # between a rollback and the next start
    part: dict[int, int] = {}
    current: int | None = None
    for entry in entries:
        if entry.kind == EntryKind.LAUNCH_START and entry.launch is not None and entry.launch in by_launch:
            current, open_to_waiting = entry.launch, False
            if not by_launch[current][0].aside:
                held[current, 0] += waiting or []
                waiting = None
        elif entry.kind == EntryKind.ROLLBACK_RECEIPT:
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
    """The part that an entry belongs to; after a border, entries about earlier steps stay in the later part."""
    if entry.kind in LAST_PART:
        return len(parts) - 1
    if entry.step is None or entry.kind not in AT_A_STEP:
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


# --- the drawing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLine:
    """One line: lanes with the mark, text, and the id of its entry. `style` names what the line is about, for colours."""

    lanes: str
    text: str = ""
    style: str = ""
    entry_id: str = ""


def draw_graph(story: Story, loss_at: Callable[[int, int], float | None]) -> Iterator[GraphLine]:
    """Newest first. `loss_at(launch, step)` is the loss logged at or before a step of a launch, or None."""
    tree, lanes = tell_stretches(story), _Lanes()
    first = {entry_id: matter.first_id for matter in story.matters for entry_id in matter.ids}
    lineage = None if tree.head is None else lanes.of(tree.head)
    waiting = list(tree.after)
    for stretch in reversed(tree.stretches):
        later = [entry for entry in waiting if not stretch.aside or entry.id > _begin(stretch)]
        waiting = waiting[: len(waiting) - len(later)]
        yield from (_event_line(entry, lanes, lineage, first) for entry in _told(later))
        off = stretch.abandoned or stretch.aside
        column = lanes.of(stretch.key, off=off)
        mark, style = ("x", "abandoned") if off else ("*", "kept")
        guess = stretch.key[1] == 0 and not stretch.aside and story.lineage.is_guess(stretch.launch.span)
        text = _headline(stretch, loss_at, "inferred" if guess else "")
        yield GraphLine(lanes=lanes.row(column, mark), text=text, style=style)
        yield from (_event_line(entry, lanes, column, first) for entry in _told(stretch.entries))
        saved = sorted({e.step for e in stretch.entries if e.kind in SAVES and e.step is not None})
        if saved:
            yield GraphLine(lanes=lanes.row(column, "o"), text=_checkpoints(saved), style="checkpoint")
        yield from lanes.join(stretch)
    for entry in _told(tree.before):
        yield _event_line(entry, lanes, None, first)
    if story.parent is not None:
        yield GraphLine(lanes="^", text=f"begins from {describe_parent(story.parent)}", style="parent")


def _begin(stretch: Stretch) -> str:
    return stretch.entries[0].id if stretch.entries else ""


def _told(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Newest first, without bookkeeping; of each incident only its newest entry."""
    seen: set[tuple[int | None, int]] = set()
    for entry in reversed(entries):
        if entry.kind in SILENT or (entry.kind == EntryKind.PREFLIGHT and Preflight.of(entry).verdict == "passed"):
            continue
        if entry.kind == EntryKind.RUN_FORK and not RunFork.of(entry).copied:
            continue  # the last line of the graph says it
        number = Incident.of(entry).id if entry.kind == EntryKind.INCIDENT else None
        if number is not None:
            if (entry.launch, number) in seen:
                continue
            seen.add((entry.launch, number))
        yield entry


def _event_line(entry: Entry, lanes: "_Lanes", column: int | None, first: Mapping[str, str]) -> GraphLine:
    """The line of one entry. `first`: the id of an incident's first entry, by which the incident is known."""
    about_hardware = entry.kind == EntryKind.NOTE and "hardware" in words_of(entry).tags
    mark = MARKS.get(EntryKind.HARDWARE if about_hardware else entry.kind, "·")
    drawn = mark if column is None else lanes.row(column, mark)
    return GraphLine(lanes=drawn, text=_event_text(entry), style=entry.kind, entry_id=first.get(entry.id, entry.id))


class _Lanes:
    """The column of each stretch; columns are taken from the left and freed when they join."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int] | None] = []  # column -> the stretch it will continue into

    def of(self, key: tuple[int, int], *, off: bool = False) -> int:
        """The column of a stretch: one that waits for it, or the first free one; the first of all is the lineage's."""
        if key in self.waiting:
            return self.waiting.index(key)
        if off and not self.waiting:
            self.waiting.append(None)
        if None in self.waiting[off:]:
            column = self.waiting.index(None, off)
            self.waiting[column] = key
            return column
        self.waiting.append(key)
        return len(self.waiting) - 1

    def row(self, column: int, mark: str) -> str:
        """All columns with the mark in one of them."""
        return " ".join(mark if i == column else "|" if w is not None else " " for i, w in enumerate(self.waiting)).rstrip()

    def join(self, stretch: Stretch) -> Iterator[GraphLine]:
        """After a stretch's last row: its column continues into its parent, or merges into the column that does."""
        column = self.waiting.index(stretch.key)
        target = stretch.after
        if target is not None and target in self.waiting:
            into = self.waiting.index(target)
            left, right = min(into, column), max(into, column)
            drawn = ["|" if w is not None else " " for w in self.waiting]
            picture = "".join(drawn[i] + ("_" if left < i < right - 1 else " ") for i in range(right))
            yield GraphLine(lanes=(picture[:-1] + "/" + self._rest(right)).rstrip())
            self.waiting[right] = None
            self.waiting[left] = target
        else:
            self.waiting[column] = target
        while self.waiting and self.waiting[-1] is None:
            self.waiting.pop()

    def _rest(self, right: int) -> str:
        return "".join(" |" if w is not None else "  " for w in self.waiting[right + 1 :])


def _headline(stretch: Stretch, loss_at: Callable[[int, int], float | None], origin: str) -> str:
    launch = stretch.launch
    parts = [f"launch {launch.number}", _steps(stretch), origin]
    if stretch.abandoned:
        parts.append("abandoned")
    if launch.lr is not None:
        parts.append("LR " + format_factor(launch.lr.factor) + _reason(launch.lr.factor, launch.lr.reason))
    loss = None if stretch.last is None else loss_at(launch.number, stretch.last)
    if loss is not None:
        parts.append(f"loss {format_number(loss)}")
    if stretch.closing:
        parts.append(launch.outcome)
        parts.append(format_when(launch.ended or launch.started))
    return " · ".join(part for part in parts if part)


def _reason(factor: float | None, reason: str) -> str:
    return f" ({reason[:REASON]}{'…' if len(reason) > REASON else ''})" if factor is None else ""


def _steps(stretch: Stretch) -> str:
    if stretch.last is None or stretch.last < stretch.first:
        return "no step" if stretch.launch.verdict is not None else "no step recorded"
    return f"step {stretch.first}" if stretch.first == stretch.last else f"steps {stretch.first}–{stretch.last}"


def _checkpoints(steps: Sequence[int]) -> str:
    if len(steps) <= CHECKPOINTS_NAMED:
        return ("checkpoint " if len(steps) == 1 else "checkpoints ") + ", ".join(map(str, steps))
    return f"{len(steps)} checkpoints {steps[0]}, {steps[1]}, … {steps[-1]}"


KNOWN = frozenset(kind.value for kind in EntryKind)


def _event_text(entry: Entry) -> str:
    title = entry.title
    if entry.kind == EntryKind.GUARD_VERDICT:
        verdict = f"guard {GuardVerdict.of(entry).verdict}"
        title = title.replace("guard: ", "guard ", 1)
        title = title if title.startswith(verdict) else verdict + (f": {title}" if title else "")
    elif entry.kind == EntryKind.ROLLBACK_RECEIPT:
        title = _rollback(entry)
    elif entry.kind == EntryKind.CLOSE:
        title = f"closed {entry.refs[0][-8:] if entry.refs else ''} {title}"
    elif entry.kind not in MARKS:
        name = entry.kind
        if name in KNOWN:  # an entry of a later version keeps the name of its kind
            name = name.replace("_", " ").replace(".", " ")
        named = title.startswith((name, name.partition(" ")[2] or name))
        title = title if named else f"{name}: {title}" if title else name
    step = f" (step {entry.step})" if entry.step is not None and str(entry.step) not in title else ""
    return f"{title or entry.kind}{step}"


def _rollback(entry: Entry) -> str:
    ratio = RollbackReceipt.of(entry).lr_ratio
    lr = "" if ratio is None or ratio == 1 else f", LR {format_factor(ratio)}"
    return f"rollback to {entry.step}{lr}"
