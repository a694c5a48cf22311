"""What the next launch of a run resumes from: the newest verified checkpoint, and saves that were cut moved out of its way.

`hand_over` decides under the run's admission, so that no launch begins meanwhile. It never guesses: where a person has to
choose it raises `NotResumable` with the way out. What it moves `chronicle undo` brings back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from chronicle.checkpoints import find_present_roots
from chronicle.errors import ChronicleError
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.entries import Entry
from chronicle.journal.events import CheckpointSaved, CheckpointSeen, EntryKind, Verified, events_of
from chronicle.journal.place import anchors_of
from chronicle.latest import Latest, PassedOver, Why, find_latest, set_aside
from chronicle.launch.admission import NotResumable, hold_admission
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints
from rollback.checks.remnants import find_remnants
from rollback.disk.durable import is_mount_point
from rollback.errors import RollbackError

RESUME_FROM, RESUME_STEP = "CHRONICLE_RESUME_FROM", "CHRONICLE_RESUME_STEP"


class HandedOver(NamedTuple):
    """The checkpoint that a launch is told to resume from; no path: from scratch, nothing was saved yet."""

    path: str = ""
    step: int | None = None

    def environment(self) -> dict[str, str]:
        """What the trainer is told."""
        if not self.path:
            return {}
        return {RESUME_FROM: self.path, RESUME_STEP: "" if self.step is None else str(self.step)}

    def to_json(self) -> dict[str, object]:
        """The form in `launch.start`."""
        return {"path": self.path, "step": self.step} if self.path else {}


def hand_over(settings: Settings, say: Callable[[str], None]) -> HandedOver:
    """Find the newest verified checkpoint and move half-written newer ones aside.

    Raises `NotResumable` where a person has to choose: spoilt weights, a store that fails, or no checkpoint that passes
    although saves were completed.
    """
    paths = settings.paths
    with hold_admission(paths):
        entries = read_journal(paths).entries if paths.journal_dir.is_dir() else ()
        if not any(entry.kind in (EntryKind.LAUNCH_START, EntryKind.RUN_FORK) for entry in entries):
            return HandedOver()  # nothing was trained yet: what lies there is of another run, or nobody knows whose
        _refuse_another_tasks(settings, find_present_roots(settings, entries))
        for root in find_present_roots(settings, entries):
            try:
                found = find_latest(root, entries, full=True, settings=settings)
                if found.unrecognised:
                    say(f"in `{root}`: {found.words()}")
                handed = _clear_the_way(settings, root, found, entries, say)
            except (RollbackError, OSError) as problem:
                raise NotResumable(f"checkpoints in `{root}` cannot be looked at: {problem}", LOOK) from problem
            if handed is not None:
                return handed
        left = _recorded_and_there(entries)
        if left is not None:
            raise NotResumable(f"`{left}` was saved, and no reader takes it for a checkpoint now", LOOK)
    return HandedOver()


def _refuse_another_tasks(settings: Settings, roots: Sequence[Path]) -> None:
    """Raise `NotResumable` where another task of this SLURM array saves into the same directory."""
    task, run_dir = os.environ.get("SLURM_ARRAY_TASK_ID", ""), settings.paths.run_dir
    if not task or not run_dir.name.endswith(f"-{task}"):
        return
    name = re.compile(re.escape(run_dir.name.removesuffix(task)) + r"\d+")
    for other in run_dir.parent.iterdir():
        if other == run_dir or name.fullmatch(other.name) is None:
            continue
        try:
            theirs = anchors_of(RunPaths(other)).roots
        except ChronicleError:
            continue  # its own commands say what is wrong with it
        if shared := {*map(os.path.realpath, theirs)} & {*map(os.path.realpath, roots)}:
            what = f"run `{other.name}` saves into `{min(shared)}` too: nobody knows whose checkpoint is whose"
            raise NotResumable(what, "give each task a directory: --checkpoints 'checkpoints/$SLURM_ARRAY_TASK_ID'")


BELOW_A_MOUNT_POINT = "with checkpoints in a directory below the mount point (--checkpoints) it is done for you"


def _recorded_and_there(entries: Sequence[Entry]) -> Path | None:
    """A checkpoint that the journal knows and that still lies where it was."""
    said = [saved.path for _, saved in events_of(entries, CheckpointSaved)]
    said += [seen.path for _, seen in events_of(entries, CheckpointSeen)]
    said += [event.path for _, event in events_of(entries, Verified) if event.passes]
    return next((Path(path) for path in dict.fromkeys(said) if path and Path(path).exists()), None)


LOOK = "`chronicle verify --all` says what is wrong; `chronicle rollback --to STEP` chooses"


def _clear_the_way(
    settings: Settings, root: Path, found: Latest, entries: Sequence[Entry], say: Callable[[str], None]
) -> HandedOver | None:
    """Move half-written newer checkpoints of `root` aside; what to resume from, None where `root` holds none."""
    for one in found.passed_over:
        if one.why is Why.SPOILT:
            raise NotResumable(f"the newest checkpoint, {_shown(one)}, is poisoned: {one.reason}", LOOK)
        if one.why is Why.UNREADABLE:
            raise NotResumable(f"{_shown(one)}: {one.reason}", LOOK)
    cut = [one for one in found.passed_over if one.why is Why.UNSOUND]
    newest = found.checkpoint
    if newest is None:
        if not cut:
            return None
        if _has_saved(entries):
            raise NotResumable(f"no checkpoint in `{root}` passes verification: {_shown(cut[0])}: {cut[0].reason}", LOOK)
        why = "a save that was cut, and none was completed"
        _move(settings, root, [one.checkpoint for one in cut], (), None, why, say)
        return None
    remnants = find_remnants(root, list_checkpoints(root, include_abandoned=False), newest)
    _move(settings, root, [one.checkpoint for one in cut], remnants, newest, "saves that were cut", say)
    return HandedOver(str(newest.path), newest.step)


def _has_saved(entries: Sequence[Entry]) -> bool:
    """Whether the journal knows of a save that was completed."""
    kinds = (EntryKind.CHECKPOINT, EntryKind.CHECKPOINT_SEEN, EntryKind.GUARD_SAVED)
    return any(entry.kind in kinds for entry in entries) or any(event.passes for _, event in events_of(entries, Verified))


def _shown(one: PassedOver) -> str:
    return f"`{one.checkpoint.path.name}`"


def _move(
    settings: Settings, root: Path, cut: Sequence[Checkpoint], remnants: Collection[str], newest: Checkpoint | None, why: str,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    names = sorted({os.path.relpath(one.path, root).split(os.sep)[0] for one in cut} | set(remnants))
    if names and is_mount_point(root):
        raise NotResumable(
            f"{', '.join(names)} in `{root}`: {why}; it has to be moved aside, and nothing can be renamed out of a mount point",
            f"move it away yourself and start again; {BELOW_A_MOUNT_POINT}",
        )
    with JournalWriter(settings.paths) as writer:
        entry = set_aside(root, names, newest, writer, why=why)
    if entry is not None:
        say(f"set aside, {why}: {', '.join(names)}; undo it with `chronicle undo {entry.id[-8:]}`")
