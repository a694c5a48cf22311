"""Which checkpoints to keep for a number of bytes, so that going back costs the fewest steps.

A rollback goes to the newest kept checkpoint at or before the onset of what went wrong, and loses the steps between the two.
What is known of the next onset: the incidents that are open, each with its onset, and how late troubles without a sign are
found: most within a few saves, some after a long time. So the onset has this distribution:

    open      half of it, where incidents are open: each of their onsets is as likely as the other; else nothing
    window    half of the rest: uniform over a quarter of the run, at least 20 saves and the longest delay that this run has had
    far       the other half: log-uniform over the whole run: each doubling of the age is as likely as the last

Removing one checkpoint costs (steps to its older neighbour) x (chance of an onset before its newer neighbour). The one that
costs least per byte goes first, until the rest fits. Recent checkpoints stay dense, older ones thin out.

Never removed: the newest two that are verified, the two before the onset of the newest incident, and whatever the caller pins.
Pure: reads no file. The window is twice the largest share of a run after which a public report found a trouble that had shown
no sign (BLOOM: replicas apart for an eighth of it).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import fmean, median

from rollback.checkpoint.layout import Checkpoint
from rollback.errors import Finding, Severity

WINDOW_SAVES = 20
WINDOW_RUN = 0.25  # of the run's steps
WINDOW_SHARE = 0.5
OPEN_SHARE = 0.5
RECENT_GAPS = 8  # older gaps are those that thinning left
SAFE = 2  # verified checkpoints that remain: the newest, and before the newest incident


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint: optimizer steps, bytes, and whether verification passes it. `name` is unique."""

    name: str
    step: int
    size_bytes: int
    verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays, oldest first, each with why; what goes; and the losses in steps, with all and with what stays."""

    keep: tuple[tuple[Save, str], ...]
    remove: tuple[Save, ...]
    expected_loss: float
    worst_loss: int
    expected_before: float
    worst_before: int
    window: int  # steps: the losses are those of an onset in the newest `window` steps (worst) or anywhere (expected)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what stays."""
        return sum(save.size_bytes for save, _ in self.keep)

    @property
    def removed_bytes(self) -> int:
        """Bytes of what goes."""
        return sum(save.size_bytes for save in self.remove)


def plan_retention(
    saves: Iterable[Save],
    *,
    budget_bytes: int,
    onsets: Sequence[int] = (),
    open_onsets: Sequence[int] = (),
    delays: Sequence[int] = (),
    pinned: Mapping[str, str] | Collection[str] = (),
) -> Retention:
    """Choose what stays within `budget_bytes`; more stays where the checkpoints that are never removed need more.

    `onsets` are the steps at which known incidents began, newest last; `open_onsets` those of them that nothing has answered
    yet; `delays` how many steps later they were found.
    `pinned` are names that stay, each with its reason where it is a mapping. A checkpoint that is not verified serves
    no rollback and goes first, except the newest of all.
    """
    listed = sorted(saves, key=lambda save: (save.step, save.name))
    good = [save for save in listed if save.verified]
    why = _never_removed(listed, good, onsets, pinned)
    head = listed[-1].step if listed else 0
    chances = _Chances(head, _window(good, delays), sorted(onset for onset in open_onsets if 0 <= onset < head))
    size = sum(save.size_bytes for save in listed)
    removed: set[str] = set()
    for save in listed:
        if size > budget_bytes and not save.verified and save.name not in why:
            removed.add(save.name)
            size -= save.size_bytes
    removed |= _thin_out(good, size - budget_bytes, why, chances)
    keep = tuple((save, why.get(save.name, "")) for save in listed if save.name not in removed)
    before, after = [save.step for save in good], [save.step for save, _ in keep if save.verified]
    return Retention(
        keep=keep,
        remove=tuple(save for save in listed if save.name in removed),
        expected_loss=chances.expected_loss(after),
        worst_loss=_worst(after, head, chances.window),
        expected_before=chances.expected_loss(before),
        worst_before=_worst(before, head, chances.window),
        window=chances.window,
    )


def loss_of(steps: Iterable[int], onset: int) -> int:
    """Steps lost by a rollback for this onset: back to the newest of `steps` at or before it, or to the start (step 0)."""
    return onset - max((step for step in steps if step <= onset), default=0)


def check_retention(
    checkpoint: Checkpoint, others: Sequence[Checkpoint], passing: Callable[[Checkpoint], bool]
) -> list[Finding]:
    """F10: whether at least two other checkpoints of the same root pass."""
    good = sum(1 for other in others if other.path != checkpoint.path and passing(other))
    if good >= SAFE:
        return []
    passed = f"{good} other checkpoint{'s pass' if good != 1 else ' passes'}"
    message = f"{passed}: expected at least {SAFE}; do not delete any"
    return [Finding("F10", Severity.INFO, ".", message)]


@dataclass(frozen=True, slots=True)
class _Chances:
    """Where the onset of the next rollback lies, among the steps from 0 to `head`."""

    head: int
    window: int
    open_onsets: Sequence[int]  # in order

    def between(self, step: int, upto: int) -> float:
        """The chance of an onset from `step` on and before `upto`."""
        unseen = self._within(self.head - step) - self._within(self.head - upto)
        if not self.open_onsets:
            return unseen
        seen = (bisect_left(self.open_onsets, upto) - bisect_left(self.open_onsets, step)) / len(self.open_onsets)
        return OPEN_SHARE * seen + (1 - OPEN_SHARE) * unseen

    def _within(self, age: int) -> float:
        """The chance that an onset without a sign lies at most `age` steps before the newest checkpoint."""
        longest = max(self.head, self.window, 1)
        recent = min(max(age, 0), self.window) / self.window
        return WINDOW_SHARE * recent + (1 - WINDOW_SHARE) * log(1 + min(max(age, 0), longest)) / log(1 + longest)

    def expected_loss(self, steps: Sequence[int]) -> float:
        """Mean loss in steps with these checkpoints; an onset without a sign is taken as uniform within a gap of two."""
        edges = [0, *[step for step in steps if step > 0], self.head]
        unseen = sum(
            (later - earlier) / 2 * (self._within(self.head - earlier) - self._within(self.head - later))
            for earlier, later in pairwise(edges)
        )
        if not self.open_onsets:
            return unseen
        return OPEN_SHARE * fmean(loss_of(steps, onset) for onset in self.open_onsets) + (1 - OPEN_SHARE) * unseen


def _never_removed(
    listed: Sequence[Save], good: Sequence[Save], onsets: Sequence[int], pinned: Mapping[str, str] | Collection[str]
) -> dict[str, str]:
    reasons = pinned if isinstance(pinned, Mapping) else dict.fromkeys(pinned, "pinned")
    why = {save.name: reasons[save.name] for save in listed if save.name in reasons}
    if onsets:
        before = [save for save in good if save.step <= onsets[-1]]
        why |= {save.name: f"before the incident at step {onsets[-1]}" for save in before[-SAFE:]}
    why |= {save.name: f"one of the newest {SAFE} verified" for save in good[-SAFE:]}
    if listed:
        why.setdefault(listed[-1].name, "the newest")
    return why


def _window(good: Sequence[Save], delays: Sequence[int]) -> int:
    gaps = [later.step - earlier.step for earlier, later in pairwise(good) if later.step > earlier.step]
    interval = median(gaps[-RECENT_GAPS:]) if gaps else 1
    return max(round(WINDOW_SAVES * interval), round(WINDOW_RUN * (good[-1].step if good else 0)), max(delays, default=0), 1)


def _thin_out(good: Sequence[Save], excess: int, why: Collection[str], chances: _Chances) -> set[str]:
    """Names to remove, the cheapest first, until `excess` bytes are gone or nothing more may go."""
    older = {save.name: good[at - 1] if at else None for at, save in enumerate(good)}
    newer = {save.name: good[at + 1] if at + 1 < len(good) else None for at, save in enumerate(good)}
    removed: set[str] = set()

    def cost(save: Save) -> float:
        before, after = older[save.name], newer[save.name]
        lost = save.step - (before.step if before else 0)
        return lost * chances.between(save.step, after.step if after else chances.head) / max(save.size_bytes, 1)

    heap = [(cost(save), save.step, save.name, save) for save in good if save.name not in why]
    heapq.heapify(heap)
    while heap and excess > 0:
        was, _, name, save = heapq.heappop(heap)
        if name in removed:
            continue
        now = cost(save)
        if now > was:  # a neighbour has gone since
            heapq.heappush(heap, (now, save.step, name, save))
            continue
        removed.add(name)
        excess -= save.size_bytes
        before, after = older[name], newer[name]
        if before:
            newer[before.name] = after
        if after:
            older[after.name] = before
    return removed


def _worst(steps: Sequence[int], head: int, window: int) -> int:
    """The largest loss for an onset in the newest `window` steps."""
    edges = [0, *[step for step in steps if step > 0], head]
    reached = [(earlier, later) for earlier, later in pairwise(edges) if later > head - window]
    return max((later - earlier for earlier, later in reached), default=0)
