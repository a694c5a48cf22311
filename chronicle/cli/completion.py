"""Shell completion: run names, steps of checkpoints and entry ids. Errors give no candidates and print nothing."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from chronicle.errors import ChronicleError
from chronicle.settings import load_settings

if TYPE_CHECKING:
    from chronicle.story import Story

MOST = 50


def enable() -> None:
    """Enable typer's answers to the shell's completion requests."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()


def complete_runs(incomplete: str) -> list[str]:
    """Names of runs in the logs directory."""
    try:
        logs = load_settings(Path.cwd(), os.environ, run="any").logs_dir
        return _fitting(sorted(path.parent.name for path in logs.glob("*/journal")), incomplete)
    except (ChronicleError, OSError):
        return []


def complete_steps(incomplete: str) -> list[str]:
    """Steps of the checkpoints in the journal, newest first."""
    story = _story()
    saved = {one.step for launch in story.launches for one in launch.checkpoints} if story is not None else ()
    return _fitting(map(str, sorted(saved, reverse=True)), incomplete)


def complete_entries(incomplete: str) -> list[str]:
    """Ends of entry ids, newest first; those of open entries come before the others."""
    story = _story()
    ids = () if story is None else (*story.open_ids, *(entry.id for entry in reversed(story.entries)))
    return _fitting(dict.fromkeys(entry_id[-8:] for entry_id in ids), incomplete.upper())


def _story() -> "Story | None":
    from chronicle.story.read import read_story

    try:
        return read_story(load_settings(Path.cwd(), os.environ).paths)
    except (ChronicleError, OSError):
        return None


def _fitting(texts: Iterable[str], incomplete: str) -> list[str]:
    return [text for text in texts if text.startswith(incomplete)][:MOST]
