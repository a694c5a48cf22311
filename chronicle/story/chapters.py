"""The story as chapters, oldest first: what a person would write down, folded out of many entries. Pure.

A launch is one chapter (start, guard, end together), a rollback one (intent and receipt together), an incident one
however often it was written; outcomes and amendments go to the chapter they are about. Single checkpoints, closes and
amends are no chapters of their own. An unknown kind is a chapter: it is shown, never dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chronicle.journal import Entry, RollbackMark
from chronicle.story.assemble import LaunchStory, Story
from chronicle.story.matters import Matter

__all__ = ["BOOKKEEPING", "Chapter", "tell_chapters"]

# Bookkeeping between machines: in the journal for whoever asks (`chronicle log --kind …`), no part of a person's story.
BOOKKEEPING = frozenset(
    (
        *("run.init", "launch.step", "rollback.intent", "undo.intent", "plan"),
        *("guard.batches", "guard.digest", "data.start", "evidence", "evidence.sealed", "verified"),
    )
)
FOLDED = BOOKKEEPING | {"launch.end", "checkpoint", "close", "amend"}


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
        """The entry's own fields, amended ones replaced."""
        merged = dict(self.entry.data)
        for amendment in self.amendments:
            merged |= amendment.data
        return merged


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
    if entry.kind in ("guard.verdict", "guard.log", "preflight"):
        return entry.data.get("verdict") != "passed"
    return entry.kind not in FOLDED


class _Margins:
    """What later entries say about earlier ones."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.closes: dict[str, Entry] = {}
        self.amends: dict[str, list[Entry]] = {}
        self.undone: set[str] = set()
        for entry in entries:
            for ref in entry.refs:
                if entry.kind == "close":
                    self.closes[ref] = entry
                elif entry.kind == "amend":
                    self.amends.setdefault(ref, []).append(entry)
                elif entry.kind == "undo.receipt":
                    self.undone.add(ref)


def _chapter(
    number: int, entry: Entry, matter: Matter | None, notes: _Margins, mark: RollbackMark | None, story: Story
) -> Chapter:
    latest = entry if matter is None else matter.entry
    launch = story.launch(entry.launch) if entry.kind == "launch.start" else None
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
    if entry.kind == "guard.verdict":
        return f"resume {entry.data.get('verdict', '')} by the guard"
    if entry.kind == "rollback.receipt":
        return f"rollback to {entry.step}"
    return entry.kind


def _outcome(entry: Entry, matter: Matter | None, notes: _Margins, launch: LaunchStory | None) -> tuple[str, str, str]:
    close = notes.closes.get(entry.id)
    if close is not None:
        return str(close.data.get("outcome") or "closed"), str(close.data.get("text") or ""), close.id
    told = entry.data.get("outcome")
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
    if entry.kind == "rollback.receipt":
        return "rollback", entry.step
    if entry.kind == "undo.receipt":
        return "undo", None
    action = entry.data.get("action")
    if isinstance(action, Mapping):
        target = action.get("to")
        return str(action.get("verb") or ""), target if isinstance(target, int) else None
    return "", None


def _changes(entry: Entry) -> tuple[tuple[str, str, str], ...]:
    if entry.kind == "rollback.receipt":
        ratio = entry.data.get("lr_ratio", entry.data.get("lr_scale"))
        return (("lr", "×1", f"×{ratio:g}"),) if isinstance(ratio, int | float) and ratio != 1 else ()
    action = entry.data.get("action")
    listed = action.get("changes") if isinstance(action, Mapping) else None
    rows = [c for c in listed if isinstance(c, Mapping)] if isinstance(listed, list | tuple) else []
    return tuple((str(c.get("field", "")), str(c.get("before", "")), str(c.get("after", ""))) for c in rows)


def _rules(entry: Entry, close: Entry | None, amendments: Sequence[Entry]) -> tuple[str, ...]:
    sources = [entry, *amendments, *([] if close is None else [close])]
    return tuple(str(source.data["rule"]) for source in sources if source.data.get("rule"))
