"""The LR ledger: the factor between the run's first LR schedule and the schedule of each launch.

Computed from entries. The authors of seed 003 lost count ("25 %" was 18.75 %, "the original LR" was ×0.75), because each
factor was given relative to the last one. Here each rollback multiplies the factor *of the launch whose weights it goes back
to*. A launch whose LR did not follow (found by the guard or the LR tripwire) has an unknown factor, and so has everything
that continues from it, until a rollback states base LRs.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from chronicle.journal.entries import Entry
from chronicle.journal.events import EntryKind, GuardVerdict, Incident, LaunchStart, RollbackReceipt
from chronicle.journal.lineage import LaunchSpan, Lineage

FOLDED = frozenset((EntryKind.LAUNCH_START, EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT))
FINDINGS = frozenset((EntryKind.INCIDENT, EntryKind.GUARD_VERDICT))
LR_WORD = re.compile(r"(?<![a-z])lrs?(?![a-z])|learning rate")  # `lr.group0`, `next_lrs`, not `lrelu`

LR_EVENTS = ("lr-bug", "lr-mismatch")  # classes of the detector
FIRST_STEPS = 20  # after a resume a wrong LR shows in the first steps; a later jump belongs to the schedule


class LedgerLine(NamedTuple):
    """The LR of one launch. `factor` None: it does not follow a known schedule, see `reason`."""

    launch: int
    factor: float | None
    asked: float | None  # the factor it should have, where the LR is known to be wrong
    reason: str


class LrLedger(NamedTuple):
    """One line a launch, in launch order; `pending` is the factor of the next launch after an open rollback."""

    lines: tuple[LedgerLine, ...] = ()
    pending: float | None = None

    def line(self, launch: int | None) -> LedgerLine | None:
        """The line of this launch."""
        return next((line for line in self.lines if line.launch == launch), None)


def compute_lr_ledger(entries: Iterable[Entry], lineage: Lineage) -> LrLedger:
    """Fold rollbacks and verdicts in journal order."""
    entries = tuple(entries)
    fold = _Fold(lineage, broken=_broken_launches(entries, lineage))
    for entry in entries:
        fold.take(entry)
    return LrLedger(lines=tuple(fold.lines.values()), pending=None if fold.pending is None else fold.pending[0])


_Place = tuple[int | None, int]  # launch, step
_Told = tuple[float | None, str]  # factor, reason


class _Fold:
    """Walks the entries once. `edited`: factors of checkpoints that a rollback changed, inherited by restarts from them."""

    def __init__(self, lineage: Lineage, broken: Mapping[int, str]) -> None:
        self.spans = {span.number: span for span in lineage.launches}
        self.targets = {mark.entry_id: mark.to_launch for mark in lineage.rollbacks}
        self.broken = broken
        self.lines: dict[int, LedgerLine] = {}
        self.edited: dict[_Place, _Told] = {}
        self.tip: int | None = None  # the launch whose weights are the present ones
        self.pending: _Told | None = None
        self.first_base: float | None = None
        self.before: list[tuple[str, int | None, dict[_Place, _Told]]] = []  # of each rollback: the tip and what was edited

    def take(self, entry: Entry) -> None:
        if entry.kind not in FOLDED:
            return
        if entry.kind == EntryKind.UNDO_RECEIPT:
            self._undo(set(entry.refs))
        elif entry.kind == EntryKind.ROLLBACK_RECEIPT and entry.step is not None:
            self._rollback(entry.id, RollbackReceipt.of(entry), entry.step)
        elif entry.kind == EntryKind.LAUNCH_START and entry.launch is not None and entry.launch not in self.lines:
            self._launch(entry.launch, LaunchStart.of(entry).base_lr)

    def _launch(self, number: int, base_lr: float | None) -> None:
        span = self.spans.get(number)
        factor, reason = self._inherited(span)
        if self.first_base is None and base_lr is not None and factor:
            self.first_base = base_lr / factor
        asked = None
        if number in self.broken:
            asked, factor, reason = factor, None, self.broken[number]
        self.lines[number] = LedgerLine(launch=number, factor=factor, asked=asked, reason=reason)
        if span is None or span.has_steps or span.start_step is None:
            self.tip, self.pending = number, None

    def _inherited(self, span: LaunchSpan | None) -> tuple[float | None, str]:
        if span is None or span.start_step is None:  # where it began is not known: what comes next in the story
            if self.pending is not None:
                return self.pending
            line = self.lines.get(self.tip) if self.tip is not None else None
            return (1.0, "start") if line is None else (line.factor, "restart")
        edited = self.edited.get((span.parent, span.start_step))
        if edited is not None:
            return edited
        parent = None if span.parent is None else self.lines.get(span.parent)
        return (1.0, "start") if parent is None else (parent.factor, "restart")

    def _rollback(self, entry_id: str, receipt: RollbackReceipt, step: int) -> None:
        source = self._source(self.targets.get(entry_id, receipt.parent_launch), step)
        self.before.append((entry_id, self.tip, dict(self.edited)))
        line = None if source is None else self.lines.get(source)
        inside = self.edited.get((source, step), (1.0 if line is None else line.factor, ""))[0]
        self.pending = self._changed(receipt, inside)
        self.edited[source, step] = self.pending
        self.tip = source

    def _changed(self, receipt: RollbackReceipt, old: float | None) -> tuple[float | None, str]:
        """The factor after this rollback: from the base LRs it states, else the old factor times its ratio."""
        before, after = receipt.base_lr_before, receipt.base_lr_after
        if self.first_base is None and before is not None and old:
            self.first_base = before / old
        if after is not None and self.first_base:
            return _tidy(after / self.first_base), "rollback"
        ratio = receipt.lr_ratio
        if ratio is None and receipt.sets:
            return None, "fields set by hand"
        factor = None if old is None else _tidy(old * (1.0 if ratio is None else ratio))
        return factor, "rollback" if ratio not in (None, 1.0) else "rollback, LR kept"

    def _source(self, named: int | None, step: int) -> int | None:
        """The launch whose version of the target step is taken: the named one, or the newest of the lineage that reached it."""
        if named is not None and named in self.lines:
            return named
        number = self.tip
        while number is not None:
            span = self.spans.get(number)
            if span is None or (span.start_step or 0) < step:
                return number
            number = span.parent
        return None

    def _undo(self, undone: set[str]) -> None:
        for place, (receipt, tip, edited) in enumerate(self.before):
            if receipt in undone:
                self.tip, self.edited, self.pending = tip, edited, None
                del self.before[place:]
                return


def _broken_launches(entries: Iterable[Entry], lineage: Lineage) -> dict[int, str]:
    """Launches whose LR was found to be wrong, each with the words of the finding."""
    broken: dict[int, str] = {}
    starts = {span.number: span.start_step or 0 for span in lineage.launches}
    for entry in entries:
        if entry.launch is None or entry.kind not in FINDINGS:
            continue
        if entry.kind == EntryKind.GUARD_VERDICT:
            verdict = GuardVerdict.of(entry)
            names = [str(check.get("name", "")) for check in verdict.checks if _failed(check)]
            if verdict.verdict in ("refused", "warned") and any(LR_WORD.search(name.lower()) for name in names):
                broken.setdefault(entry.launch, f"{verdict.verdict} by the guard")
        elif _is_wrong_at_the_start(entry, starts.get(entry.launch, 0)):
            broken.setdefault(entry.launch, entry.title or "LR does not follow")
    return broken


def _is_wrong_at_the_start(entry: Entry, start_step: int) -> bool:
    incident = Incident.of(entry)
    onset = entry.step if incident.onset_step is None else incident.onset_step
    return incident.kind in LR_EVENTS and (onset is None or onset <= start_step + FIRST_STEPS)


def _failed(check: Mapping[str, Any]) -> bool:
    if "ok" in check:
        return not check["ok"]
    return check.get("expected") != check.get("found")


def _tidy(factor: float) -> float:
    """Rounded to 12 digits, so that 0.1 × 3 is shown as 0.3."""
    return float(f"{factor:.12g}")
