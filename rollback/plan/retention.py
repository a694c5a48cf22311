"""Which checkpoints to keep for a number of bytes, so that going back costs the fewest steps.

A rollback goes to the newest kept checkpoint at or before the onset of what went wrong, and loses the steps between the two.
Nobody knows the next onset. What is known is how late troubles are found: most within a few saves, some after a long time.
So the age of the onset, counted back from the newest checkpoint, has this distribution:

    half      uniform over a recent window: 40 saves, or twice the longest delay that this run has had
    half      log-uniform over the whole run: each doubling of the age is as likely as the last

Removing one checkpoint costs (steps to its older neighbour) x (chance of an onset before its newer neighbour). The one that
costs least per byte goes first, until the rest fits. Recent checkpoints stay dense, older ones thin out.

Never removed: the newest two that are verified, the two before the onset of the newest incident, and whatever the caller pins.
Pure: reads no file. The window comes from public cases: a spike that lasted 34 saves (K2-65B).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import median

from rollback.checkpoint.layout import Checkpoint
from rollback.errors import Finding, Severity

__all__ = ["Retention", "Save", "check_retention", "loss_of", "plan_retention"]

WINDOW_SAVES = 40
WINDOW_SHARE = 0.5
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
    delays: Sequence[int] = (),
    pinned: Mapping[str, str] | Collection[str] = (),
) -> Retention:
    """Choose what stays within `budget_bytes`; more stays where the checkpoints that are never removed need more.

    `onsets` are the steps at which known incidents began, newest last; `delays` how many steps later they were found.
    `pinned` are names that stay, each with its reason where it is a mapping. A checkpoint that is not verified serves
    no rollback and goes first, except the newest of all.
    """
    listed = sorted(saves, key=lambda save: (save.step, save.name))
    good = [save for save in listed if save.verified]
    why = _never_removed(listed, good, onsets, pinned)
    window = _window(good, delays)
    head = listed[-1].step if listed else 0
    size = sum(save.size_bytes for save in listed)
    removed: set[str] = set()
    for save in listed:
        if size > budget_bytes and not save.verified and save.name not in why:
            removed.add(save.name)
            size -= save.size_bytes
    removed |= _thin_out(good, size - budget_bytes, why, head=head, window=window)
    keep = tuple((save, why.get(save.name, "")) for save in listed if save.name not in removed)
    before, after = [save.step for save in good], [save.step for save, _ in keep if save.verified]
    return Retention(
        keep=keep,
        remove=tuple(save for save in listed if save.name in removed),
        expected_loss=_expected(after, head, window),
        worst_loss=_worst(after, head, window),
        expected_before=_expected(before, head, window),
        worst_before=_worst(before, head, window),
        window=window,
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
    return [Finding(check="F10", severity=Severity.INFO, path=".", message=message)]


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
    return max(round(WINDOW_SAVES * (median(gaps) if gaps else 1)), 2 * max(delays, default=0), 1)


def _thin_out(good: Sequence[Save], excess: int, why: Collection[str], *, head: int, window: int) -> set[str]:
    """Names to remove, the cheapest first, until `excess` bytes are gone or nothing more may go."""
    older = {save.name: good[at - 1] if at else None for at, save in enumerate(good)}
    newer = {save.name: good[at + 1] if at + 1 < len(good) else None for at, save in enumerate(good)}
    removed: set[str] = set()

    def cost(save: Save) -> float:
        before, after = older[save.name], newer[save.name]
        lost = save.step - (before.step if before else 0)
        upto = after.step if after else head
        return lost * (_chance(head - save.step, head, window) - _chance(head - upto, head, window)) / max(save.size_bytes, 1)

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


def _chance(age: int, head: int, window: int) -> float:
    """The chance that the onset lies at most `age` steps before the newest checkpoint."""
    longest = max(head, window, 1)
    recent = min(max(age, 0), window) / window
    return WINDOW_SHARE * recent + (1 - WINDOW_SHARE) * log(1 + min(max(age, 0), longest)) / log(1 + longest)


def _expected(steps: Sequence[int], head: int, window: int) -> float:
    """Mean loss over onsets; within a gap between two checkpoints the onset is taken as uniform."""
    total, edges = 0.0, [0, *[step for step in steps if step > 0], head]
    for earlier, later in pairwise(edges):
        total += (later - earlier) / 2 * (_chance(head - earlier, head, window) - _chance(head - later, head, window))
    return total


def _worst(steps: Sequence[int], head: int, window: int) -> int:
    """The largest loss for an onset in the newest `window` steps."""
    edges = [0, *[step for step in steps if step > 0], head]
    reached = [(earlier, later) for earlier, later in pairwise(edges) if later > head - window]
    return max((later - earlier for earlier, later in reached), default=0)
