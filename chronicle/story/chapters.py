"""The story as chapters, oldest first: one chapter per event of the run, even if it has several entries.

A launch is one chapter (start, guard, end), a rollback is one (intent and receipt), an incident is one. Outcomes and
amendments belong to the chapter that they are about. Checkpoints and bookkeeping have no chapters. An entry of an unknown
kind has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.journal import Entry, RollbackMark
from chronicle.journal.events import Close, EntryKind, FirstBatchSeen, GuardVerdict, RollbackReceipt, Words, words_of
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.matters import Matter

# Bookkeeping of programs: `chronicle log --kind …` shows it, the story does not.
BOOKKEEPING: frozenset[str] = frozenset(
    (
        *(EntryKind.RUN_INIT, EntryKind.LAUNCH_STEP, EntryKind.ROLLBACK_INTENT, EntryKind.UNDO_INTENT, EntryKind.PLAN),
        *(EntryKind.GUARD_DIGEST, EntryKind.DATA_START, EntryKind.VERIFIED),
        *(EntryKind.EVIDENCE, EntryKind.GUARD_ATTACHED, EntryKind.RUN_PLACE),
    )
)
FOLDED = BOOKKEEPING | frozenset(
    (
        *(EntryKind.RESTART, EntryKind.LAUNCH_END, EntryKind.CHECKPOINT, EntryKind.CHECKPOINT_SEEN),
        *(EntryKind.CLOSE, EntryKind.AMEND),
    )
)
VERDICTS = frozenset((EntryKind.GUARD_VERDICT, EntryKind.GUARD_LOG, EntryKind.PREFLIGHT))  # a chapter unless they passed
MARGINS = frozenset((EntryKind.CLOSE, EntryKind.AMEND, EntryKind.UNDO_RECEIPT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One chapter. `number` counts from 0 in order; `entry.id` is its stable anchor."""

    number: int
    entry: Entry
    title: str
    action: str = ""
    to: int | None = None
    changes: tuple[tuple[str, str, str], ...] = ()  # (field, before, after)
    outcome: str = ""
    outcome_text: str = ""
    closed_by: str = ""
    launch: LaunchStory | None = None
    mark: RollbackMark | None = None
    amendments: tuple[Entry, ...] = field(default=())
    rules: tuple[str, ...] = ()

    @property
    def data(self) -> Mapping[str, Any]:
        """The entry's fields, replaced by those of later amendments."""
        merged = dict(self.entry.data)
        for amendment in self.amendments:
            merged |= amendment.data
        return merged

    @property
    def words(self) -> Words:
        """What people said in it, amendments included."""
        return Words.view(self.data)


def tell_chapters(story: Story) -> tuple[Chapter, ...]:
    """All chapters, oldest first."""
    notes = _Margins(story.entries)
    matters = {m.first_id: m for m in story.matters}
    repeated = {i for m in story.matters for i in m.ids if i != m.first_id}
    marks = {mark.entry_id: mark for mark in story.lineage.rollbacks}
    told = [e for e in story.entries if _is_chapter(e) and e.id not in repeated]
    return tuple(
        _chapter(number, entry, matters.get(entry.id), notes, marks.get(entry.id), story)
        for number, entry in enumerate(told)
    )


def _is_chapter(entry: Entry) -> bool:
    if entry.kind in VERDICTS:
        return GuardVerdict.view(entry.data).verdict != "passed"
    if entry.kind == EntryKind.GUARD_FIRST_BATCH:  # a resume's only where something is wrong with it
        return not entry.step or bool(FirstBatchSeen.view(entry.data).findings)
    return entry.kind not in FOLDED


class _Margins:
    """What later entries say about earlier ones."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.closes: dict[str, Entry] = {}
        self.amends: dict[str, list[Entry]] = {}
        self.undone: set[str] = set()
        for entry in entries:
            for ref in entry.refs if entry.kind in MARGINS else ():
                if entry.kind == EntryKind.CLOSE:
                    self.closes[ref] = entry
                elif entry.kind == EntryKind.AMEND:
                    self.amends.setdefault(ref, []).append(entry)
                else:
                    self.undone.add(ref)


def _chapter(
    number: int, entry: Entry, matter: Matter | None, notes: _Margins, mark: RollbackMark | None, story: Story
) -> Chapter:
    latest = entry if matter is None else matter.entry
    launch = story.launch(entry.launch) if entry.kind == EntryKind.LAUNCH_START else None
    amendments = tuple(notes.amends.get(entry.id, ()))
    outcome, words, closed_by = _outcome(entry, matter, notes, launch)
    verb, target = _action(entry)
    titles = [a.title for a in amendments if a.title]
    return Chapter(
        number=number,
        entry=latest,
        title=titles[-1] if titles else latest.title or _default_title(entry),
        action=verb,
        to=target,
        changes=_changes(entry),
        outcome=outcome,
        outcome_text=words,
        closed_by=closed_by,
        launch=launch,
        mark=mark,
        amendments=amendments,
        rules=_rules(entry, notes.closes.get(entry.id), amendments),
    )


def _default_title(entry: Entry) -> str:
    if entry.kind == EntryKind.GUARD_VERDICT:
        verdict = GuardVerdict.of(entry).verdict
        return "resume not verified by the guard" if verdict == "unverified" else f"resume {verdict} by the guard"
    if entry.kind == EntryKind.ROLLBACK_RECEIPT:
        return f"rollback to {entry.step}"
    return entry.kind


def _outcome(entry: Entry, matter: Matter | None, notes: _Margins, launch: LaunchStory | None) -> tuple[str, str, str]:
    closed_by = notes.closes.get(entry.id)
    if closed_by is not None:
        close = Close.of(closed_by)
        return close.outcome or "closed", close.text, closed_by.id
    told = words_of(entry).outcome
    if isinstance(told, Mapping):
        return str(told.get("status") or ""), str(told.get("text") or ""), str(told.get("closed_by") or "")
    if entry.id in notes.undone:
        return "undone", "", ""
    if launch is not None:
        return launch.outcome, "", ""
    if matter is not None:
        return matter.standing, "", ""
    return "", "", ""


def _action(entry: Entry) -> tuple[str, int | None]:
    if entry.kind == EntryKind.ROLLBACK_RECEIPT:
        return "rollback", entry.step
    if entry.kind == EntryKind.UNDO_RECEIPT:
        return "undo", None
    action = words_of(entry).action
    if action is not None:
        target = action.get("to")
        return str(action.get("verb") or ""), target if isinstance(target, int) else None
    return "", None


def _changes(entry: Entry) -> tuple[tuple[str, str, str], ...]:
    if entry.kind == EntryKind.ROLLBACK_RECEIPT:
        ratio = RollbackReceipt.of(entry).lr_ratio
        return () if ratio is None or ratio == 1 else (("lr", "×1", f"×{ratio:g}"),)
    listed = (words_of(entry).action or {}).get("changes")
    rows = [c for c in listed if isinstance(c, Mapping)] if isinstance(listed, list | tuple) else []
    return tuple((str(c.get("field", "")), str(c.get("before", "")), str(c.get("after", ""))) for c in rows)


def _rules(entry: Entry, close: Entry | None, amendments: Sequence[Entry]) -> tuple[str, ...]:
    sources = [entry, *amendments, *([] if close is None else [close])]
    return tuple(rule for source in sources if (rule := words_of(source).rule))
