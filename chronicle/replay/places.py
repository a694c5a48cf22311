"""Where a launch's checkpoints lie that nobody named, and what a directory holds that is the run's own.

The guard of a plain loop sees that state is taken, and not where the script writes it (`out/ckpt.pt`, `gan.pt`). Each such
state carries an identity, so its place is found again by looking for it near the working directory. Nothing is guessed: a
directory counts only where a checkpoint in it has an identity that the journal knows.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.checkpoints import NO_STATES, KnownStates, known_states
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import StateSaved, events_of
from chronicle.paths import RunPaths
from rollback.checkpoint.layout import Checkpoint, scan_entries
from rollback.checkpoint.listing import find_format, list_checkpoints, open_checkpoint
from rollback.errors import RollbackError

DEEPEST, MOST_DIRECTORIES, FEW_FILES = 3, 200, 4
PASSED = ("__pycache__", "site-packages", "node_modules", "abandoned")


def found_near(directory: Path, run_dir: Path, entries: Sequence[Entry]) -> tuple[Path, ...]:
    """Directories at or below this one that hold a state which the guard saw being taken."""
    wanted = {saved.identity for _, saved in events_of(entries, StateSaved) if saved.identity}
    states = known_states(entries)
    if not wanted:
        return ()
    return tuple(one for one in _directories(directory, run_dir) if any(_ids(one, wanted, states)))


def _ids(directory: Path, wanted: set[str], states: KnownStates) -> Iterator[bool]:
    try:
        listed = list_checkpoints(directory, include_abandoned=False)
    except (RollbackError, OSError):
        return
    yield from (identity_of(one, states).get("id") in wanted for one in listed)


def states_of(run_dir: Path) -> KnownStates:
    """The states that the journal of this run knows."""
    paths = RunPaths(run_dir)
    return known_states(read_journal(paths).entries) if paths.journal_dir.is_dir() else NO_STATES


def identity_of(one: Checkpoint, states: KnownStates) -> Mapping[str, Any]:
    """The identity of a checkpoint, or of the state file in its directory; empty where there is none to be read."""
    try:
        found = states.identity_in(one)
    except (RollbackError, OSError):
        return {}
    return found or (_identity_inside(one, states) if not one.single_file else {})


def _identity_inside(one: Checkpoint, states: KnownStates) -> Mapping[str, Any]:
    """Of a script's own directory for each save (`step-000008/lit_model.pth`): the guard saw the file alone."""
    for file in one.files if len(one.files) <= FEW_FILES else ():
        try:
            found = states.identity_in(open_checkpoint(one.path / file.path, count_steps=False))
        except (RollbackError, OSError):
            continue
        if found:
            return found
    return {}


def holder_of(root: Path) -> Path:
    """The root, or where it is a checkpoint itself, the directory that holds it and the others."""
    return root.parent if root.is_dir() and find_format(root.name, scan_entries(root, levels=2)) is not None else root


def _directories(top: Path, run_dir: Path) -> Iterator[Path]:
    """The directory and those below it, the nearest first; neither hidden ones, nor the run's own, nor too many."""
    level, seen = [top], 0
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for one in level:
            seen += 1
            if seen > MOST_DIRECTORIES:
                return
            yield one
            try:
                children = sorted(entry.path for entry in os.scandir(one) if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue
            paths = (Path(path) for path in children)
            below += [path for path in paths if not _is_passed(path, run_dir)]
        level = below


def _is_passed(path: Path, run_dir: Path) -> bool:
    return path.name.startswith(".") or path.name in PASSED or path.resolve() in (run_dir.resolve(), *run_dir.resolve().parents)


def is_wide(root: Path, directory: Path) -> bool:
    """Whether a checkpoint root holds the working directory: then most of what lies in it is no checkpoint."""
    return root.resolve() in (directory.resolve(), *directory.resolve().parents)


def own_places(run_dir: Path, roots: Iterable[Path], directory: Path) -> tuple[Path, ...]:
    """What is the run's own: its directory, its checkpoint roots, and of a wide root only the identified checkpoints."""
    found, states = [run_dir], states_of(run_dir)
    for root in roots:
        if not is_wide(root, directory):
            found.append(root)
            continue
        found += [one.path for one in list_checkpoints(root, include_abandoned=False) if identity_of(one, states)]
    return tuple(found)
