"""Where this run's checkpoints lie, when nobody said: the directory that the journal's own checkpoint entries name."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from chronicle.cli.options import settings_from
from chronicle.errors import ChronicleError
from chronicle.journal import Entry
from chronicle.paths import RunPaths
from chronicle.settings import Settings

__all__ = ["settings_with_checkpoints"]

NEWEST = 2000  # saves looked at; a run that moved its checkpoints is older than that, or is asked


def settings_with_checkpoints(run: str | None, logs: Path | None, checkpoints: Path | None) -> Settings:
    """Settings of a command that works on checkpoints.

    A directory that was set wins; then the one recorded at the saves, when it is exactly one of those that still exist;
    then `checkpoints` here. Several recorded ones are not chosen between: they are named in `origin`.
    """
    settings = settings_from(run, logs, checkpoints)
    if settings.checkpoints_dir is not None and settings.origin.get("checkpoints") != "default":
        return settings
    roots = _recorded_roots(settings.paths)
    standing = [root for root in roots if root.is_dir()]
    if len(standing) == 1:
        return _with(settings, standing[0], "the journal's checkpoints")
    if not roots or settings.checkpoints_dir in standing:
        return settings
    words = "several in the journal: " if standing else "not there any more: "
    return _with(settings, None, words + ", ".join(f"`{root}`" for root in (standing or roots)[:4]))


def _with(settings: Settings, root: Path | None, origin: str) -> Settings:
    return replace(settings, checkpoints_dir=root, origin={**settings.origin, "checkpoints": origin})


def _recorded_roots(paths: RunPaths) -> list[Path]:
    if not paths.journal_dir.is_dir():
        return []
    from chronicle.watch.facts import find_checkpoint_roots

    try:
        roots = find_checkpoint_roots(_newest_saves(paths), None, Path.cwd())
    except (ChronicleError, OSError):
        return []  # whoever needs the journal will say what is wrong with it
    return list(dict.fromkeys(Path(os.path.abspath(root)) for root in roots))


def _newest_saves(paths: RunPaths) -> Iterable[Entry]:
    from chronicle.journal import read_journal
    from chronicle.journal.index import open_index

    index = open_index(paths)
    if index is None:
        return read_journal(paths).of_kind("checkpoint")
    try:
        return index.newest(NEWEST, kinds=["checkpoint"])
    finally:
        index.close()
