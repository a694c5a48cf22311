"""The paths of a transaction that was prepared before the run was moved or copied, as they are today.

An intent recorded the directories of its time (`anchors`); a copy would otherwise finish or tidy up what lies in the original.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.journal.place import Anchors
from rollback.transaction.change import hidden_root, workspace_of


def moved(intent: Entry | None, now: Anchors, value: Any) -> Any:
    """A value with the absolute paths of the time when a transaction was prepared replaced by those of today."""
    recorded = None if intent is None else intent.data.get("anchors")
    if intent is None or not isinstance(recorded, Mapping):
        return value
    then = Anchors(run=str(recorded.get("run") or ""), roots=tuple(str(root) for root in recorded.get("roots") or ()))
    beside: list[tuple[str, str]] = []  # they lie beside a root: no anchor of the journal holds them
    for one, other in zip(then.roots, now.roots, strict=False):
        beside += zip(_beside(one, intent.id), _beside(other, intent.id), strict=True)

    def today(text: str) -> str:
        for old, new in beside:
            if text == old or text.startswith(old + "/"):
                return new + text[len(old) :]
        return str(now.resolve(then.store(text)))

    return _each_text(value, today)


def _beside(root: str, intent: str) -> tuple[str, str]:
    """Where a transaction works beside a checkpoint root: its workspace, and the root's name while it is hidden."""
    return str(workspace_of(Path(root).parent, intent)), str(hidden_root(Path(root), intent))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text changed, keys of mappings included: what must be read back is listed by path."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return value
