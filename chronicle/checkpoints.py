"""What the journal records about checkpoints: their paths, the launch that saved each, and the verdict of `verify`.

An entry of kind `verified` carries the checkpoint's stamp (`rollback.checkpoint.layout`): names, sizes, times and inodes of
its files. A verdict is valid while a checkpoint has that stamp, wherever a rollback moves it.

A checkpoint that was saved without a guard carries no identity. `chronicle run` compares the stamps below the checkpoint roots
before and after a launch: what is new was saved by this launch, and the entry `checkpoint.seen` says so. It also names the id
in a manifest that was left behind when its checkpoint was overwritten. A copy has another stamp, so it has no such identity.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from chronicle.errors import ChronicleError, JournalError
from chronicle.journal import Entry
from chronicle.journal.events import (
    NOTHING,
    CheckpointSeen,
    EntryKind,
    LaunchStart,
    RollbackReceipt,
    StateSaved,
    UndoReceipt,
    Verified,
    events_of,
    read,
)
from chronicle.journal.events import (
    CheckpointSaved as CheckpointSaved,
)
from chronicle.story.plain import format_when
from rollback.errors import RollbackError

if TYPE_CHECKING:
    from chronicle.settings import Settings
    from rollback.checkpoint.layout import Checkpoint
    from rollback.errors import Finding
    from rollback.files.config_text import ConfigFile
    from rollback.lr.authority import Evidence

BY_STAMP = "stamp:"  # how the id of such an identity begins
MAX_ERRORS = 5  # kept in the entry; `chronicle verify` prints all of them again


class CheckpointVerdict(NamedTuple):
    """What a verification found. `full`: every byte was read. `errors` are (check, path, message) of the first few."""

    entry_id: str
    ts: str
    stamp: str
    full: bool
    passes: bool
    errors: tuple[tuple[str, str, str], ...] = ()

    @property
    def when(self) -> str:
        """Day and minute with the offset from UTC, for messages."""
        return format_when(self.ts)

    @property
    def sound(self) -> bool:
        """Whether every byte was read and nothing forbids resuming from it."""
        return self.full and self.passes


def verdict_event(checkpoint: Checkpoint, findings: Sequence[Finding], *, full: bool, stamp: str) -> Verified:
    """The entry that records what `chronicle verify` found."""
    from rollback.disk import RemoteView

    errors = [finding for finding in findings if finding.severity.value == "error"]
    return Verified(
        path=str(checkpoint.path) if RemoteView.opened is None else RemoteView.opened.shown(str(checkpoint.path)),
        stamp=stamp,
        full=full,
        passes=not errors,
        files=len(checkpoint.files),
        bytes=checkpoint.size_bytes,
        errors=tuple([error.check, error.path, error.message] for error in errors[:MAX_ERRORS]),
        num_errors=len(errors),
    )


def find_verdict(path: Path, entries: Iterable[Entry]) -> CheckpointVerdict | None:
    """The newest verdict that is valid for the checkpoint at `path`, or None."""
    verdicts: dict[str, CheckpointVerdict] = {}
    for entry, found in events_of(entries, Verified):
        if found.stamp:
            verdicts[found.stamp] = _stronger(verdicts.get(found.stamp), _verdict(entry, found))
    if not verdicts:
        return None
    return verdicts.get(stamp_or_none(path) or "")


def stamp_or_none(path: Path) -> str | None:
    """The stamp of a checkpoint, None where its files cannot be listed: then nothing is recorded of it."""
    from rollback.checkpoint.layout import stamp_of  # most commands have no checkpoint to look at

    try:
        return stamp_of(path)
    except (RollbackError, OSError, ValueError):
        return None


def describe_verdict(verdict: CheckpointVerdict | None) -> str:
    """The verdict in a few words."""
    if verdict is None:
        return "not verified"
    if not verdict.passes:
        check, path, message = verdict.errors[0] if verdict.errors else ("", "", "see `chronicle verify`")
        return f"found unsound on {verdict.when}: {check} {path}: {message}"
    depth = "every byte read" if verdict.full else "names, structure and counters"
    return f"verified {verdict.when} ({depth})"


def _stronger(earlier: CheckpointVerdict | None, later: CheckpointVerdict) -> CheckpointVerdict:
    """The later verdict, except that a quick one that passes does not replace a full one of the same bytes."""
    if earlier is not None and earlier.full and not later.full and later.passes:
        return earlier
    return later


def _verdict(entry: Entry, found: Verified) -> CheckpointVerdict:
    kept = [row for row in found.errors if isinstance(row, list) and len(row) == 3]
    return CheckpointVerdict(
        entry_id=entry.id,
        ts=entry.ts,
        stamp=found.stamp,
        full=found.full,
        passes=found.passes,
        errors=tuple((str(check), str(path), str(message)) for check, path, message in kept),
    )


def find_checkpoint_roots(entries: Iterable[Entry], configured: Path | None, base: Path) -> tuple[Path, ...]:
    """Directories that hold this run's checkpoints: the configured one, else the parents of the recorded saves."""
    if configured is not None:
        return (configured,)
    return tuple(dict.fromkeys(path.parent for path in _recorded_saves(entries, base)))


def _recorded_saves(entries: Iterable[Entry], base: Path) -> list[Path]:
    """Where the journal says that checkpoints were saved, in its order."""
    events = (read(entry) for entry in entries if entry.kind in (EntryKind.CHECKPOINT, EntryKind.CHECKPOINT_SEEN))
    saved = (event.path for event in events if isinstance(event, CheckpointSaved | CheckpointSeen))
    return [base / path for path in saved if path]


def find_present_roots(settings: Settings, entries: Sequence[Entry]) -> tuple[Path, ...]:
    """Where this run's checkpoints are: the directory that is set, else `checkpoints` here, and those of recorded saves."""
    found = dict.fromkeys(find_checkpoint_roots(entries, None, settings.paths.run_dir))
    own = settings.checkpoints_dir
    if own is None and settings.origin.get("checkpoints", "default") == "default":
        own = Path.cwd() / "checkpoints"  # it may not have been there when the first launch began
    if own is not None:
        found = {own: None} | found
    by_inode = {(state.st_dev, state.st_ino): root for root in reversed(found) if root.is_dir() and (state := root.stat())}
    return tuple(reversed(by_inode.values()))


def find_lost_saves(settings: Settings, entries: Sequence[Entry]) -> list[Path]:
    """The recorded saves, where none of them is there any more and no directory of the run holds another checkpoint.

    What was saved before a launch that was begun afresh on purpose does not count.
    """
    from rollback.checkpoint.listing import list_checkpoints  # nearly always a recorded save is there

    begun = max((at for at, entry in enumerate(entries) if _begins_afresh(entry)), default=0)
    saved = _recorded_saves(entries[begun:], settings.paths.run_dir)
    if any(path.exists() for path in saved):
        return []
    roots = find_present_roots(settings, entries) if saved else ()
    return [] if any(list_checkpoints(root, include_abandoned=False) for root in roots) else saved


def _begins_afresh(entry: Entry) -> bool:
    return entry.kind == EntryKind.LAUNCH_START and bool(entry.data.get("fresh"))


def with_launches(checkpoints: Iterable[Checkpoint], entries: Iterable[Entry]) -> list[Checkpoint]:
    """The checkpoints with the launch that saved each, taken from the journal where the manifest does not name it."""
    present: dict[str, int] = {}  # name in the root -> launch that saved it last
    abandoned: dict[tuple[str, str], int] = {}
    entries = tuple(entries)
    kinds = frozenset((EntryKind.CHECKPOINT, EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT))
    for entry in entries:
        if entry.kind not in kinds:
            continue
        event = read(entry)
        if isinstance(event, CheckpointSaved) and entry.launch is not None and event.path:
            present[_name_in_root(event.path)] = entry.launch
        elif isinstance(event, RollbackReceipt | UndoReceipt):
            for name in event.abandoned:
                if name in present:
                    abandoned[str(event.intent), name] = present.pop(name)
        if isinstance(event, UndoReceipt):
            for name in event.returned:
                launch = abandoned.get((event.undoes_intent, name))
                if launch is not None:
                    present[name] = launch
    states = known_states(entries)
    return [_with_launch(checkpoint, present, abandoned, states) for checkpoint in checkpoints]


def name_twins(*chosen: Checkpoint) -> tuple[str, ...]:
    """One line for each abandoned checkpoint of the same step: the step alone meant the one of the present lineage."""
    return tuple(f"step {one.step} was also abandoned: {twin}" for one in chosen for twin in one.twins)


def _with_launch(
    checkpoint: Checkpoint,
    present: dict[str, int],
    abandoned: dict[tuple[str, str], int],
    states: KnownStates,
) -> Checkpoint:
    seen = states.identity_of(checkpoint.path, {})
    if seen:
        return replace(checkpoint, launch=seen["launch"])
    if checkpoint.launch is not None:
        return checkpoint
    name = checkpoint.path.name
    launch = present.get(name) if checkpoint.abandoned is None else abandoned.get((checkpoint.abandoned, name))
    return checkpoint if launch is None else replace(checkpoint, launch=launch)


def _name_in_root(path: str) -> str:
    """`…/opt_step-500/accelerator_state` and `…/opt_step-500` are the same checkpoint."""
    pure = PurePath(path)
    return pure.parent.name if pure.name == "accelerator_state" else pure.name


# --- recording what was found

def record_verdicts(
    settings: Settings, looked: Sequence[tuple[Checkpoint, str | None, Sequence[Finding]]], *, full: bool
) -> tuple[str, ...]:
    """Record the verdict on each checkpoint of this run if it is new; returns messages about what was not recorded.

    `looked`: checkpoint, its stamp from before it was read, and the findings. Outside a run, and for checkpoints of other
    runs, nothing is written.
    """
    from chronicle.journal import JournalWriter, read_journal  # `status` imports this file and writes nothing

    if settings.logs_url is not None:
        return ("not recorded: the journal is in an object store, which is only read",)
    if not settings.paths.journal_dir.is_dir():
        return ()
    try:
        entries = read_journal(settings.paths).entries
    except ChronicleError as problem:
        return (f"not recorded: {problem.message}",)
    roots = {
        Path(os.path.abspath(root)) for root in find_checkpoint_roots(entries, settings.checkpoints_dir, Path.cwd())
    }
    launches = {c.path: c.launch for c in with_launches([c for c, _, _ in looked], entries)}
    changed, writer = [], JournalWriter(settings.paths)
    try:
        for checkpoint, stamp, findings in looked:
            if not _is_below(checkpoint, roots):
                continue
            if stamp is None or stamp_or_none(checkpoint.path) != stamp:
                changed.append(checkpoint.path.name)
                continue
            event = verdict_event(checkpoint, findings, full=full, stamp=stamp)
            if not _is_known(checkpoint.path, event, entries):
                title = f"{checkpoint.path.name} {_words(event)}"
                writer.write(event, step=checkpoint.step, launch=launches[checkpoint.path], title=title)
    except JournalError as problem:
        return (f"not recorded: {problem.message}",)
    finally:
        writer.close()
    return (f"not recorded, files changed while they were read: {', '.join(changed)}",) if changed else ()


def _is_below(checkpoint: Checkpoint, roots: set[Path]) -> bool:
    from rollback.checkpoint.layout import ACCELERATE_STATE_DIR

    path = Path(os.path.abspath(checkpoint.path))
    path = path.parent if path.name == ACCELERATE_STATE_DIR else path
    if checkpoint.abandoned is not None:
        return any(path.parents[2] == root.parent for root in roots)
    return path.parent in roots


def _is_known(path: Path, event: Verified, entries: Sequence[Entry]) -> bool:
    """Whether the journal already holds this verdict, or a stronger one."""
    verdict = find_verdict(path, entries)
    if verdict is None or verdict.passes != event.passes:
        return False
    if not verdict.passes and verdict.full == event.full:
        return [list(error) for error in verdict.errors] == [list(error) for error in event.errors]
    return verdict.full or not event.full


def _words(event: Verified) -> str:
    if not event.passes:
        return f"does not pass: {event.num_errors} errors"
    return "verified: every byte was read" if event.full else "verified: names, structure and counters"


# --- checkpoints that were saved without a guard


LR_NOT_AS_PROMISED = "lr-not-as-promised"  # the incident of a launch whose log does not have the LR of a rollback


# --- where the launch that follows a rollback takes its LR from


def launch_evidence(checkpoint: Checkpoint, entries: Sequence[Entry]) -> Evidence:
    """The newest recorded command with its configs, and by how much rollbacks have changed this checkpoint's LR since then."""
    from rollback.files.config_text import files_named_by  # only where an LR is to be changed
    from rollback.lr.authority import Evidence

    undone = {ref for entry in entries if entry.kind == EntryKind.UNDO_RECEIPT for ref in entry.refs}
    argv: tuple[str, ...] = ()
    files: tuple[ConfigFile, ...] = ()
    pending = 1.0
    for entry in reversed(entries):
        if entry.kind == EntryKind.ROLLBACK_RECEIPT and entry.id not in undone:
            receipt = RollbackReceipt.of(entry)
            if receipt.entry == checkpoint.path.name:
                pending *= receipt.lr_ratio or 1.0
        elif entry.kind == EntryKind.LAUNCH_START and (start := LaunchStart.of(entry)).argv:
            argv = tuple(map(str, start.argv))
            files = files_named_by(argv, Path(start.cwd or "/"), f"from the command of launch {entry.launch}")
            break
    broken, broken_id = _broken_promise(entries)
    return Evidence(argv=argv, files=files, pending=pending, broken=broken, broken_id=broken_id)


def _broken_promise(entries: Sequence[Entry]) -> tuple[str, str]:
    """(what a launch logged instead of the LR of a rollback, id of that incident); empty where none is open."""
    closed = {ref for entry in entries if entry.kind == EntryKind.CLOSE for ref in entry.refs}
    for entry in reversed(entries):
        if entry.kind == EntryKind.INCIDENT and entry.data.get("kind") == LR_NOT_AS_PROMISED and entry.id not in closed:
            return str(entry.data.get("text") or entry.title), entry.id
    return "", ""


class KnownStates(NamedTuple):
    """What the journal knows of states that were saved without a guard."""

    stamps: Mapping[str, Mapping[str, Any]] = NOTHING  # stamp -> identity: id, run_id, run, launch, step
    stale: frozenset[str] = frozenset()  # ids in manifests that were left behind when their checkpoint was overwritten
    taken: Mapping[str, Mapping[str, Any]] = NOTHING  # digest of an optimizer's state -> identity, as the guard saw it saved

    def identity_of(self, path: Path, carried: Mapping[str, Any]) -> Mapping[str, Any]:
        """The identity of the checkpoint at `path`, which carries this one; empty where neither names its launch."""
        seen = self.stamps.get(stamp_or_none(path) or "") if self.stamps else None
        return seen or ({} if carried.get("id") in self.stale else carried)

    def identity_in(self, checkpoint: Checkpoint) -> Mapping[str, Any]:
        """The identity of a checkpoint on disk: what it carries, what its content was known as, or its stamp."""
        from rollback.checkpoint.identity import read_identity, read_state_digests

        carried = read_identity(checkpoint)
        if not carried and self.taken:
            known = (self.taken.get(digest, NOTHING) for digest in read_state_digests(checkpoint))
            carried = next(filter(None, known), carried)
        return self.identity_of(checkpoint.path, carried)


NO_STATES = KnownStates()


def known_states(entries: Iterable[Entry]) -> KnownStates:
    """Fold the entries about checkpoints that a launch left without an identity of their own. Pure."""
    found: dict[str, Mapping[str, Any]] = {}
    stale: set[str] = set()
    taken: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        if entry.kind == EntryKind.GUARD_SAVED:
            saved = StateSaved.of(entry)
            if saved.state and saved.identity:
                named = {"id": saved.identity, "run_id": saved.run_id, "run": entry.run}
                taken[saved.state] = named | {"launch": entry.launch, "step": saved.step}
        elif entry.kind == EntryKind.CHECKPOINT_SEEN:
            seen = CheckpointSeen.of(entry)
            stale.add(seen.replaces)
            if seen.stamp and entry.launch is not None and entry.step is not None:
                named = {"id": BY_STAMP + seen.stamp, "run_id": seen.run_id, "run": entry.run}
                found[seen.stamp] = named | {"launch": entry.launch, "step": entry.step}
        elif entry.kind in (EntryKind.ROLLBACK_RECEIPT, EntryKind.UNDO_RECEIPT):
            event = read(entry)
            if isinstance(event, RollbackReceipt | UndoReceipt) and event.stamp and is_by_stamp(event.identity):
                found[event.stamp] = dict(event.identity) | {"id": BY_STAMP + event.stamp}
    return KnownStates(found, frozenset(stale - {""}), taken)


def is_by_stamp(identity: Mapping[str, Any]) -> bool:
    """Whether an identity is known by the checkpoint's stamp alone."""
    return str(identity.get("id") or "").startswith(BY_STAMP)


class Stamped(NamedTuple):
    """A checkpoint on disk at one moment."""

    stamp: str
    manifest: str | None  # stamp of its manifest alone; None without one


def stamps_below(roots: Iterable[str]) -> dict[Path, Stamped]:
    """What lies in the checkpoint roots and among their abandoned checkpoints; what cannot be read is left out."""
    from rollback.checkpoint.manifest import MANIFEST_NAME

    found: dict[Path, Stamped] = {}
    for root in map(Path, roots):
        folders = [root, *_folders(root.parent / "abandoned")]
        for path in [root, *(child for folder in folders for child in _children(folder))]:
            with contextlib.suppress(RollbackError, OSError, ValueError):
                stamp = stamp_or_none(path) if _may_be_checkpoint(path) else None
                if stamp is not None:
                    found[path] = Stamped(stamp, stamp_or_none(path / MANIFEST_NAME))
    return found


def checkpoints_left(
    roots: Iterable[str], before: Mapping[Path, Stamped], entries: Iterable[Entry], run_id: str
) -> Iterator[tuple[int, CheckpointSeen]]:
    """(step, event) for each checkpoint in the roots that the launch which has just ended left without an identity.

    `before` is what lay there before the launch. A manifest that is older than the files beside it was left behind by an
    earlier save. Left out are checkpoints whose step is unknown, and what `chronicle` itself wrote since then.
    """
    states = known_states(entries)
    known = {found.stamp for found in before.values()} | states.stamps.keys()
    yield from _without_identity(stamps_below(roots), before, known, states, run_id)


class SaveWatch:
    """Checkpoints without an identity, told while their launch runs: each when two looks in a row found it unchanged.

    A look costs one listing of the roots while nothing is new in them. What is replaced under its old name in a
    subdirectory is told by `checkpoints_left`, after the launch.
    """

    def __init__(
        self, roots: Callable[[], Iterable[str]], entries: Callable[[], Iterable[Entry]], run_id: str
    ) -> None:
        self._roots, self._entries, self._run_id = roots, entries, run_id
        self.before = stamps_below(roots())
        self._seen = self.before
        self._told = {found.stamp for found in self.before.values()}
        self._names = _names_below(roots())
        self._unsettled = False

    def look(self) -> list[tuple[int, CheckpointSeen]]:
        """What has appeared and is whole."""
        names = _names_below(self._roots())
        if names == self._names and not self._unsettled:
            return []
        now = stamps_below(self._roots())
        same = {path: found for path, found in now.items() if self._seen.get(path) == found}
        self._names, self._seen, self._unsettled = names, now, len(same) < len(now)
        states = known_states(self._entries())
        told = list(_without_identity(same, self.before, self._told, states, self._run_id))
        self._told |= {found.stamp for found in same.values()}
        return told


def _names_below(roots: Iterable[str]) -> list[tuple[str, int, int]]:
    found = []
    for path in (child for root in roots for child in _children(Path(root))):
        with contextlib.suppress(OSError):
            state = path.lstat()
            found.append((str(path), state.st_ino, state.st_mtime_ns))
    return found


def _without_identity(
    found_now: Mapping[Path, Stamped],
    before: Mapping[Path, Stamped],
    known: Set[str],
    states: KnownStates,
    run_id: str,
) -> Iterator[tuple[int, CheckpointSeen]]:
    for path, found in sorted(found_now.items()):
        if found.stamp in known:
            continue
        from rollback.checkpoint.listing import open_checkpoint

        with contextlib.suppress(RollbackError, OSError, ValueError):
            checkpoint = open_checkpoint(path)
            carried = str(states.identity_in(checkpoint).get("id") or "")
            left_behind = found.manifest is not None and path in before and before[path].manifest == found.manifest
            if checkpoint.step is not None and checkpoint.abandoned is None and (left_behind or not carried):
                seen = CheckpointSeen(path=str(path), stamp=found.stamp, run_id=run_id, replaces=carried)
                yield checkpoint.step, seen


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a format claims the name and the first entries: a data set beside the checkpoints is not walked."""
    from rollback.checkpoint.layout import DirectoryEntry, FileType, scan_entries
    from rollback.checkpoint.listing import find_format

    if path.is_dir():
        return find_format(path.name, scan_entries(path, levels=2)) is not None
    return find_format(path.name, (DirectoryEntry(path.name, FileType.FILE, path.stat().st_size),)) is not None


def _folders(path: Path) -> list[Path]:
    return [child for child in _children(path) if child.is_dir()]


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
