"""Shell completion: run names, steps of checkpoints and entry ids. Errors give no candidates and print nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.settings import Settings, load_settings

MOST = 50
VARIABLE = "_CHRONICLE_COMPLETE"


def enable() -> None:
    """Enable typer's answers to the shell's completion requests."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()


def complete_runs(incomplete: str) -> list[str]:
    """Names of runs in the logs directory."""
    try:
        logs = load_settings(Path.cwd(), os.environ, run="any").logs_dir
        names = sorted(path.parent.name for path in logs.glob("*/journal"))
    except (ChronicleError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)][:MOST]


def complete_steps(incomplete: str) -> list[str]:
    """Steps of checkpoints, newest first: from the journal and from the checkpoints directory."""
    settings = _settings()
    if settings is None:
        return []
    steps = {*_recorded_steps(settings.paths), *_steps_in(settings.checkpoints_dir)}
    texts = map(str, sorted(steps, reverse=True))
    return [text for text in texts if text.startswith(incomplete)][:MOST]


def complete_entries(incomplete: str) -> list[str]:
    """Ends of entry ids, newest first; those of open entries come before the others."""
    settings = _settings()
    if settings is None:
        return []
    try:
        from chronicle.story.read import read_story

        story = read_story(settings.paths)
    except (ChronicleError, OSError):
        return []
    rest = [entry.id for entry in reversed(story.entries)]
    ends = dict.fromkeys(entry_id[-8:] for entry_id in (*story.open_ids, *rest))
    return [end for end in ends if end.startswith(incomplete.upper())][:MOST]


def _settings() -> Settings | None:
    try:
        return load_settings(Path.cwd(), os.environ)
    except ChronicleError:
        return None


def _recorded_steps(paths: RunPaths) -> Iterator[int]:
    from chronicle.journal import read_journal
    from chronicle.journal.events import EntryKind

    for entry in read_journal(paths).of_kind(EntryKind.CHECKPOINT):
        if entry.step is not None:
            yield entry.step


def _steps_in(directory: Path | None) -> Iterator[int]:
    from rollback.checkpoint.listing import list_checkpoints
    from rollback.errors import RollbackError

    try:
        found = [] if directory is None else list_checkpoints(directory)
    except (RollbackError, OSError):
        return
    yield from (checkpoint.step for checkpoint in found if checkpoint.step is not None)
