"""Lineage: which (launch, step interval) pairs the present weights descend from; everything else is abandoned.

Pure over entries. A launch that starts at step r truncates *all* earlier kept intervals to steps <= r; an explicit parent
(`rollback --to N@LAUNCH`) beats inference and takes that launch's own history instead (`docs/design.md` §5.2).
Pairwise cutting is wrong: exp2 of the seed goes back before the *start* of its predecessor (journal_and_interface §1.5).

    launch 1  1 ────────── 10          kept   1..5
    launch 2        └ 6 ── 8           kept   6..8       headline: step 8 of launch 2
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from chronicle.journal.entries import Entry

__all__ = ["Interval", "LaunchSpan", "Lineage", "compute_lineage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
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
    parent: int | None = None  # explicit parent launch
    abandoned_after: int | None = None  # steps above this are no longer part of the lineage
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """`kept` in step order, without overlaps; `launches` in launch order."""

    kept: tuple[Interval, ...] = ()
    launches: tuple[LaunchSpan, ...] = ()

    @property
    def head_step(self) -> int:
        """The last step of the lineage; 0 when there is none."""
        return self.kept[-1].last if self.kept else 0

    @property
    def head_launch(self) -> int | None:
        """The launch that holds the last step."""
        return self.kept[-1].launch if self.kept else None

    def owner(self, step: int) -> int | None:
        """The launch whose version of this step the present weights descend from."""
        for interval in self.kept:
            if interval.first <= step <= interval.last:
                return interval.launch
        return None

    def contains(self, launch: int, step: int) -> bool:
        """Whether this launch's version of this step is part of the lineage."""
        return self.owner(step) == launch


def compute_lineage(
    entries: Iterable[Entry], observed: Mapping[int, tuple[int, int]] | None = None
) -> Lineage:
    """Fold launches, rollbacks and undos, in journal order.

    `observed` maps a launch to the first and last step in its per-step log; it fills in what a killed launch could not say.
    """
    seen = observed or {}
    spans: dict[int, LaunchSpan] = {}
    histories: dict[int, tuple[Interval, ...]] = {}  # a launch's ancestors: what was kept when it started
    branch: list[tuple[str, tuple[Interval, ...]]] = []  # what undo of a rollback brings back: (receipt id, kept before)
    kept: tuple[Interval, ...] = ()
    current: int | None = None
    parent: int | None = None
    for entry in entries:
        if entry.launch is not None and entry.kind in ("launch.start", "launch.step", "guard.verdict", "launch.end"):
            number = entry.launch
            if number not in spans:
                kept = _close(kept, spans, seen, current)
                spans[number] = LaunchSpan(number=number, parent=parent, last_step=seen.get(number, (None, None))[1])
                current, parent = number, None
            span = _learn(spans[number], entry, seen.get(number))
            if span.start_step is not None and spans[number].start_step is None:
                kept = _truncate(_base(kept, histories, spans, span), span.start_step)
                histories[number] = kept
            spans[number] = span
        elif entry.kind == "rollback.receipt" and entry.step is not None:
            kept = _close(kept, spans, seen, current)
            current = None
            branch.append((entry.id, kept))
            parent = _as_launch(entry.data.get("parent_launch"))
            base = kept if parent is None else _close(histories.get(parent, ()), spans, seen, parent)
            kept = _truncate(base, entry.step)
        elif entry.kind == "undo.receipt":
            undone = set(entry.refs)
            for index in range(len(branch) - 1, -1, -1):
                if branch[index][0] in undone:
                    kept, current, parent = branch[index][1], None, None
                    del branch[index:]
                    break
    kept = _close(kept, spans, seen, current)
    return Lineage(kept=kept, launches=tuple(_mark_abandoned(spans, kept)))


def _learn(span: LaunchSpan, entry: Entry, seen: tuple[int, int] | None) -> LaunchSpan:
    """What this entry says about its launch."""
    start = entry.data.get("start_step")
    if start is None and entry.kind == "guard.verdict" and entry.data.get("verdict") != "refused":
        start = entry.step
    if span.start_step is None and start is None and entry.kind == "launch.end" and seen is not None:
        start = seen[0] - 1
    if span.start_step is None and isinstance(start, int):
        span = replace(span, start_step=start)
    if entry.kind == "launch.end":
        last = entry.data.get("last_step")
        span = replace(span, ended=True, last_step=last if isinstance(last, int) else span.last_step)
    return span


def _base(
    kept: tuple[Interval, ...],
    histories: Mapping[int, tuple[Interval, ...]],
    spans: Mapping[int, LaunchSpan],
    span: LaunchSpan,
) -> tuple[Interval, ...]:
    if span.parent is None or span.parent not in histories:
        return kept
    return _close(histories[span.parent], spans, {}, span.parent)


def _close(
    kept: tuple[Interval, ...],
    spans: Mapping[int, LaunchSpan],
    seen: Mapping[int, tuple[int, int]],
    number: int | None,
) -> tuple[Interval, ...]:
    """Add the steps that launch `number` completed to what was kept when it started."""
    if number is None or number not in spans:
        return kept
    span = spans[number]
    last = span.last_step if span.last_step is not None else seen.get(number, (None, None))[1]
    start = span.start_step if span.start_step is not None else _start_from(seen.get(number))
    if last is None or start is None or last <= start:
        return kept
    return (*_truncate(kept, start), Interval(launch=number, first=start + 1, last=last))


def _start_from(observed: tuple[int, int] | None) -> int | None:
    return None if observed is None else observed[0] - 1


def _truncate(kept: tuple[Interval, ...], step: int) -> tuple[Interval, ...]:
    return tuple(replace(i, last=min(i.last, step)) for i in kept if i.first <= step)


def _mark_abandoned(spans: Mapping[int, LaunchSpan], kept: tuple[Interval, ...]) -> Iterable[LaunchSpan]:
    last_kept = {interval.launch: interval.last for interval in kept}
    for number in sorted(spans):
        span = spans[number]
        if span.last_step is None or span.start_step is None or span.last_step <= span.start_step:
            yield span
            continue
        alive_until = last_kept.get(number, span.start_step)
        yield replace(span, abandoned_after=alive_until) if alive_until < span.last_step else span


def _as_launch(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
