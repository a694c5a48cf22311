"""The lineage: the steps of each launch that the present weights descend from. All other steps are abandoned.

A checkpoint carries its identity: run, launch and step. The guard records which one was loaded, and the launch's history is
that launch's history up to that step, whatever lies between them in the journal. A guarded launch that was refused, or
that ended before its first optimizer step, owns no step.

Where no guard said what was loaded, the parent is *inferred*: a launch that starts at step r cuts all earlier intervals to
steps <= r. Cutting only the launch before is wrong: exp2 of seed 003 goes back before the *start* of its predecessor
(journal_and_interface §1.5). What was inferred is marked so.

    launch 1  1 ────────── 10          kept   1..5
    launch 2        └ 6 ── 8           kept   6..8       headline: step 8 of launch 2

A launch that ended without completing a step changes nothing. Histories share their tails (a chain of immutable links), so
10^4 launches cost 10^4 links.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from chronicle.journal.entries import Entry
from chronicle.journal.events import (
    LAUNCHES,
    EntryKind,
    GuardAttached,
    GuardVerdict,
    LaunchEnd,
    RollbackReceipt,
    RunFork,
    read,
)

ABANDONED = re.compile(r"/abandoned/([0-9A-Z]{26})/")  # where a rollback puts later checkpoints, by the id of its intent
FIRST_STEP = "before the first step"  # the moment of a verdict after which training begins
APPLIED = frozenset((EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT))


class Interval(NamedTuple):
    """Steps `first..last` (both counted) of one launch."""

    launch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpan:
    """One launch: it resumed after `start_step` (0 = from scratch) and completed `last_step`, if any."""

    number: int
    start_step: int | None = None
    last_step: int | None = None
    parent: int | None = None  # the launch whose weights it continues, None for a start from scratch
    abandoned_after: int | None = None  # steps above this are no longer part of the lineage
    ended: bool = False
    inferred: bool = True  # its parent follows from step numbers: no guard said what was loaded
    refused: bool = False  # the guard refused it
    loaded: tuple[int, int] | None = None  # (launch, step) of the checkpoint of this run that was loaded
    parent_run: str | None = None  # id of the other run whose checkpoint was loaded
    attempts: tuple[tuple[int, int], ...] = ()  # first and last step of each start of its ranks; () for a single one

    @property
    def has_steps(self) -> bool:
        """Whether it is known to have completed a step."""
        return self.start_step is not None and self.last_step is not None and self.last_step > self.start_step

    @property
    def abandoned_steps(self) -> int:
        """How many of its steps the present weights do not descend from."""
        return 0 if self.abandoned_after is None or self.last_step is None else self.last_step - self.abandoned_after


class RollbackMark(NamedTuple):
    """An applied rollback: the head of the lineage (launch, step) before and after it."""

    entry_id: str
    from_launch: int | None
    from_step: int
    to_launch: int | None
    to_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """`kept` in step order, without overlaps; `launches` in launch order; `rollbacks` that were not undone."""

    kept: tuple[Interval, ...] = ()
    launches: tuple[LaunchSpan, ...] = ()
    rollbacks: tuple[RollbackMark, ...] = ()
    unsaid: bool = False  # it was set by a rollback whose target does not say which launch saved it

    @property
    def head_step(self) -> int:
        """The last step of the lineage; 0 when there is none."""
        return self.kept[-1].last if self.kept else 0

    @property
    def head_launch(self) -> int | None:
        """The launch that holds the last step."""
        return self.kept[-1].launch if self.kept else None

    @property
    def inferred(self) -> bool:
        """Whether a parent in it follows from step numbers alone, or its last rollback does not say whose target it took."""
        return self.unsaid or any(span.inferred for span in self._concerned)

    @property
    def guessed(self) -> tuple[int, ...]:
        """The launches of the lineage that loaded something, and no guard recorded what; newest last."""
        return tuple(span.number for span in self._concerned if self.is_guess(span))

    @property
    def _concerned(self) -> list[LaunchSpan]:
        """The launches of the lineage, and those after them."""
        kept = {interval.launch for interval in self.kept}
        newest = max(kept, default=0)
        return [span for span in self.launches if span.number in kept or span.number > newest]

    def is_guess(self, span: LaunchSpan) -> bool:
        """Whether the launch's parent is inferred; the first launch of all, from step 0, has none to infer."""
        return span.inferred and (span.number != self.launches[0].number or (span.start_step or 0) > 0)

    @property
    def doubt(self) -> str:
        """Why the lineage is inferred, for people; "" when a guard recorded it or there was nothing to tell apart."""
        if self.guessed:
            more = f" and {len(self.guessed) - 1} more" if len(self.guessed) > 1 else ""
            return f"inferred: no guard recorded what launch {self.guessed[-1]}{more} loaded"
        if self.unsaid and len(self.launches) > 1:
            return "inferred: the checkpoint of the last rollback does not say which launch saved it"
        return ""

    def owner(self, step: int) -> int | None:
        """The launch whose version of this step the present weights descend from."""
        place = bisect_left(self.kept, step, key=lambda interval: interval.last)
        return self.kept[place].launch if place < len(self.kept) and self.kept[place].first <= step else None

    def contains(self, launch: int, step: int) -> bool:
        """Whether this launch's version of this step is part of the lineage."""
        return self.owner(step) == launch


class _Link(NamedTuple):
    """The newest kept interval and, behind it, everything older."""

    launch: int
    first: int
    last: int
    older: "_Link | None"


def compute_lineage(
    entries: Iterable[Entry], observed: Mapping[int, tuple[int, int]] | None = None
) -> Lineage:
    """Fold launches, rollbacks and undos in journal order.

    `observed` maps a launch to the first and last step in its per-step log, which completes launches that
    were killed or that log every tenth step.
    """
    reached: dict[int, int] = {}
    relevant: list[Entry] = []
    checkpoint = EntryKind.CHECKPOINT
    copied_from: dict[str, int] = {}  # id of a run whose journal was copied into this one -> its last launch here
    begins_at: int | None = None  # step of the other run's checkpoint from which this run was declared to begin
    for entry in entries:
        if entry.kind in APPLIED or (entry.launch is not None and entry.kind in LAUNCHES):
            relevant.append(entry)
        elif entry.kind == checkpoint and entry.launch is not None and entry.step is not None:
            reached[entry.launch] = max(entry.step, reached.get(entry.launch, entry.step))
        elif entry.kind == EntryKind.RUN_FORK:
            fork = RunFork.of(entry)
            copied_from |= _copied_from(fork)
            begins_at = begins_at if fork.copied else fork.parent.get("step")
    spans = _launch_facts(relevant, observed or {}, reached, copied_from)
    fold = _Fold(spans, begins_at if isinstance(begins_at, int) else None, observed or {})
    for entry in relevant:
        fold.take(entry)
    return fold.result()


@dataclass(slots=True)
class _Guarding:
    """What the guard of one launch recorded."""

    attached: bool = False
    refused: bool = False
    stepped: bool = False  # a verdict stands before its first optimizer step
    off: bool = False
    start_step: int | None = None
    run_id: str = ""
    loaded: Mapping[str, Any] | None = None
    fresh: bool = False

    def take(self, event: GuardVerdict, step: int | None, launch: int) -> None:
        """One verdict more. What the launch itself saved is loaded by a later attempt of it and is not where it comes from."""
        self.attached = True
        self.run_id = event.run_id or self.run_id
        own = event.loaded.get("launch") == launch and event.loaded.get("run_id") == self.run_id
        if event.loaded and not own:
            self.loaded = event.loaded
        if event.verdict == "refused":
            self.refused = True
            return
        if self.start_step is None:
            self.start_step = step
        if event.moment in ("", FIRST_STEP):
            self.stepped = True
            self.off = event.verdict == "off"
            self.fresh = event.basis == "fresh"


def _copied_from(fork: RunFork) -> dict[str, int]:
    last = fork.parent.get("last_launch")
    return {str(fork.parent.get("run_id")): last} if fork.copied and isinstance(last, int) else {}


def _launch_facts(
    entries: Iterable[Entry],
    seen: Mapping[int, tuple[int, int]],
    reached: Mapping[int, int],
    copied_from: Mapping[str, int],
) -> dict[int, LaunchSpan]:
    """First and last step of each launch, from all entries and the per-step log together."""
    spans: dict[int, LaunchSpan] = {}
    guards: dict[int, _Guarding] = {}
    for entry in entries:
        if entry.launch is None or entry.kind not in LAUNCHES:
            continue
        span, event = spans.get(entry.launch) or LaunchSpan(number=entry.launch), read(entry)
        start = getattr(event, "start_step", None)
        if start is not None and span.start_step is None:
            span = replace(span, start_step=max(start, -1))  # -1: its first step was 0
        if isinstance(event, GuardVerdict):
            guards.setdefault(entry.launch, _Guarding()).take(event, entry.step, entry.launch)
        elif isinstance(event, GuardAttached):
            guards.setdefault(entry.launch, _Guarding()).attached = True
        if isinstance(event, LaunchEnd):
            span = replace(span, ended=True, last_step=event.last_step, attempts=_attempts(event) or span.attempts)
        spans[entry.launch] = span
    return {n: _observe(span, guards.get(n), seen.get(n), reached.get(n), copied_from) for n, span in spans.items()}


def _attempts(end: LaunchEnd) -> tuple[tuple[int, int], ...]:
    pairs = ((row.get("first_step"), row.get("last_step")) for row in end.attempts)
    return tuple((first, last) for first, last in pairs if isinstance(first, int) and isinstance(last, int))


def _observe(
    span: LaunchSpan,
    guard: _Guarding | None,
    seen: tuple[int, int] | None,
    saved: int | None,
    copied_from: Mapping[str, int],
) -> LaunchSpan:
    """An explicit start beats the guard's step, which beats the first logged step; the furthest last step counts."""
    first, last = seen if seen is not None else (None, None)
    if span.start_step is None:
        known = None if guard is None else guard.start_step
        span = replace(span, start_step=known if known is not None else None if first is None else first - 1)
    lasts = [step for step in (span.last_step, last, saved) if step is not None]
    span = replace(span, last_step=max(lasts) if lasts else None)
    return span if guard is None else _as_guarded(span, guard, saved, copied_from)


def _as_guarded(
    span: LaunchSpan, guard: _Guarding, saved: int | None, copied_from: Mapping[str, int]
) -> LaunchSpan:
    """What the guard recorded decides: which checkpoint was loaded, and whether a step was taken."""
    span = replace(span, refused=guard.refused)
    if not guard.stepped or (guard.refused and saved is None):  # its log may say otherwise: a row is written before the step
        return replace(span, last_step=None, inferred=False)
    if guard.off:
        return span
    if guard.loaded:
        launch, step = guard.loaded.get("launch"), guard.loaded.get("step")
        saved_by = str(guard.loaded.get("run_id") or "")
        if saved_by != guard.run_id and not (isinstance(launch, int) and launch <= copied_from.get(saved_by, 0)):
            return replace(span, inferred=False, parent_run=saved_by)
        if isinstance(launch, int) and isinstance(step, int):
            return replace(span, inferred=False, loaded=(launch, step))
    return replace(span, inferred=not guard.fresh)


class _Fold:
    """Walks the entries once. `kept` is the lineage before the current launch."""

    def __init__(
        self, spans: dict[int, LaunchSpan], begins_at: int | None, observed: Mapping[int, tuple[int, int]]
    ) -> None:
        self.spans, self.begins_at, self.observed = spans, begins_at, observed
        self.kept: _Link | None = None
        self.current: int | None = None
        self.histories: dict[int, _Link | None] = {}  # what each launch's weights descend from, itself not included
        self.rollbacks: list[tuple[str, _Link | None]] = []  # what undo brings back: (receipt id, kept before)
        self.marks: list[RollbackMark] = []
        self.doubt = False  # the lineage was set by a rollback whose target did not say which launch saved it
        self.aside: dict[str, _Link | None] = {}  # id of a rollback or its intent -> the lineage that it put aside

    def take(self, entry: Entry) -> None:
        if entry.kind == EntryKind.ROLLBACK_RECEIPT:
            self._rollback(entry)
        elif entry.kind == EntryKind.UNDO_RECEIPT:
            self._undo(set(entry.refs))
        elif entry.launch is not None and entry.launch not in self.histories:
            self._start(entry.launch)

    def _start(self, number: int) -> None:
        self._finish()
        span = self._from_declared_parent(self.spans[number])
        base = self._parent_of(span)
        self.histories[number] = base
        self.spans[number] = replace(span, parent=None if base is None else base.launch)
        self.current = number

    def _from_declared_parent(self, span: LaunchSpan) -> LaunchSpan:
        """A child's first launch without a guard begins at the parent's step, however rarely it logs one."""
        first = self.observed.get(span.number, (None, None))[0]
        if self.kept is not None or self.begins_at is None or not span.inferred or first is None or first <= self.begins_at:
            return span
        return replace(span, start_step=self.begins_at)

    def _parent_of(self, span: LaunchSpan) -> _Link | None:
        """What the launch's weights descend from: the checkpoint that was loaded, else what step numbers suggest."""
        if span.loaded is not None and span.loaded[0] in self.histories:
            return _truncate(self._through(span.loaded[0]), span.loaded[1])
        if span.parent_run is not None or (not span.inferred and span.start_step == 0):
            return None
        return self.kept if span.start_step is None else _truncate(self.kept, span.start_step)

    def _rollback(self, entry: Entry) -> None:
        self._finish()
        self.rollbacks.append((entry.id, self.kept))
        base, before = self._base(entry), self.kept
        for name in (entry.id, *entry.refs):
            self.aside[name] = before
        if entry.step is not None:
            self.kept = _truncate(base, entry.step)
            self.marks.append(_mark(entry.id, before, self.kept, entry.step))

    def _base(self, entry: Entry) -> _Link | None:
        """What the target's weights descend from: the launch that the target itself names, a named one, or the lineage."""
        receipt = RollbackReceipt.of(entry)
        saved_by = receipt.identity.get("launch")
        self.doubt = not (isinstance(saved_by, int) and saved_by in self.histories)
        if isinstance(saved_by, int) and not self.doubt:
            return self._through(saved_by)
        if receipt.parent_launch is not None and receipt.parent_launch in self.histories:
            return self._through(receipt.parent_launch)
        brought_back = ABANDONED.search(receipt.source)
        if brought_back and brought_back[1] in self.aside:
            return self.aside[brought_back[1]]
        beyond = self._beyond(entry.step)
        return self.kept if beyond is None else self._through(beyond)

    def _beyond(self, step: int | None) -> int | None:
        """The newest launch that ran through a step ahead of the lineage: only that launch can have saved it."""
        if step is None or step <= (0 if self.kept is None else self.kept.last):
            return None
        spans = (self.spans[number] for number in reversed(self.histories))
        return next((s.number for s in spans if s.has_steps and (s.start_step or 0) < step <= (s.last_step or 0)), None)

    def _undo(self, undone: set[str]) -> None:
        for place, (receipt, kept) in enumerate(self.rollbacks):
            if receipt in undone:
                self.kept, self.current = kept, None
                gone = {one for one, _ in self.rollbacks[place:]}
                self.marks = [mark for mark in self.marks if mark.entry_id not in gone]
                del self.rollbacks[place:]
                return

    def _finish(self) -> None:
        """The current launch is over: its steps join the lineage."""
        if self.current is not None and self.spans[self.current].has_steps:
            self.kept, self.doubt = self._through(self.current), False
        self.current = None

    def _through(self, number: int) -> _Link | None:
        """A launch's ancestors and the launch itself."""
        span, base = self.spans[number], self.histories[number]
        if span.start_step is None or span.last_step is None or span.last_step <= span.start_step:
            return base
        return _Link(number, span.start_step + 1, span.last_step, base)

    def result(self) -> Lineage:
        kept = self.kept
        if self.current is not None and self._counts(self.spans[self.current]):
            kept, self.doubt = self._through(self.current), False
        intervals: list[Interval] = []
        while kept is not None:
            intervals.append(Interval(launch=kept.launch, first=kept.first, last=kept.last))
            kept = kept.older
        intervals.reverse()
        launches = tuple(_mark_abandoned(self.spans, intervals))
        return Lineage(kept=tuple(intervals), launches=launches, rollbacks=tuple(self.marks), unsaid=self.doubt)

    def _counts(self, span: LaunchSpan) -> bool:
        """Whether the newest launch's weights are the present ones: alive, they are what it loaded, even before a step."""
        return span.has_steps or (not span.ended and span.inferred)


def _mark(entry_id: str, before: _Link | None, after: _Link | None, step: int) -> RollbackMark:
    return RollbackMark(
        entry_id=entry_id,
        from_launch=None if before is None else before.launch,
        from_step=step if before is None else before.last,
        to_launch=None if after is None else after.launch,
        to_step=step,
    )


def _truncate(kept: _Link | None, step: int) -> _Link | None:
    while kept is not None and kept.first > step:
        kept = kept.older
    return kept._replace(last=step) if kept is not None and kept.last > step else kept


def _mark_abandoned(spans: Mapping[int, LaunchSpan], kept: Iterable[Interval]) -> Iterable[LaunchSpan]:
    last_kept = {interval.launch: interval.last for interval in kept}
    for number in sorted(spans):
        span = spans[number]
        if span.start_step is None or span.last_step is None or not span.has_steps:
            yield span
            continue
        alive_until = last_kept.get(number, span.start_step)
        yield replace(span, abandoned_after=alive_until) if alive_until < span.last_step else span

