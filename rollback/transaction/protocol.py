"""The crash-safe protocol: apply a change to a checkpoint, undo it, or recover it after an interruption.

    intent      journalled before anything is touched
    prepare     in `<parent>/.chronicle-<id>/`, where no loader looks: originals go to the object store, the edited copy,
                new pointers and the list of moves are written; when all are durable, `transaction.json` is written
    moves       renames only, each atomic and durable before the next (`rollback.transaction.moves`)
    read back   the bytes on disk are compared with the digests of the edited copy
    receipt     journalled; it holds what `undo` needs
    workspace   removed

After a crash before `transaction.json` exists, `recover` removes the workspace: nothing had changed. After a later
crash, `recover` makes the remaining moves. This module knows no file format: a `Writer` makes each new file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollback.disk.content import ObjectStore, sha256_of
from rollback.disk.durable import REAL_DISK, Attributes, Disk, is_mount_point, is_there
from rollback.errors import Refused, RollbackError, StoppedPartWay
from rollback.transaction.change import (
    ABANDONED,
    READY,
    RECEIPT_VERSION,
    Change,
    PatchedFile,
    Prepared,
    Receipt,
    Record,
    Verb,
    config_part,
    contract_part,
    is_patched,
    originals_of,
    patched_at,
    run_steps,
    workspace_of,
)
from rollback.transaction.moves import inode_of
from rollback.transaction.prepare import prepare_rollback, prepare_undo
from rollback.transaction.staging import StagedFile, inside, refuse_odd_entries


def apply_change(
    change: Change,
    *,
    objects_dir: Path,
    record: Record,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Apply `change`. `record` journals an entry durably and returns its id.

    Raises `Refused` before anything is touched, `StoppedPartWay` when `recover` has to finish, and any other
    `RollbackError` after everything was put back.
    """
    check_change(change)
    store = ObjectStore(objects_dir, disk)
    contract_path = None if change.contract is None else str(change.contract[0])
    intent_data = _intent_data(change.root, change.entry, contract_path, [str(path) for path in change.configs])
    intent = record(Verb.ROLLBACK.intent, intent_data | dict(change.facts))

    def prepare(workspace: Path) -> Prepared:
        return prepare_rollback(change, intent, workspace, store, disk)

    return _run(intent, Verb.ROLLBACK, _Traces.of(intent, intent_data), prepare, record, disk)


def undo_change(
    receipt: Receipt,
    *,
    newer: tuple[str, ...] = (),
    objects_dir: Path,
    record: Record,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Undo what `receipt` did: every byte, mode and time of every touched file.

    `newer` names the entries of the root that a later launch saved, earliest first. They are moved to `abandoned/`
    under the undo's own id; nothing is overwritten. Raises as `apply_change`.
    """
    data = receipt.data
    root = Path(data["root"])
    check_undo(data, root)
    store = ObjectStore(objects_dir, disk)
    for sha256 in originals_of(data):
        store.find(sha256)
    facts = {"undoes": receipt.id, "undoes_intent": data["intent"], "step": data.get("step")}
    contract_path = data["contract"]["path"] if data.get("contract") else None
    configs = [str(config["path"]) for config in data.get("configs") or ()]
    intent_data = _intent_data(root, data["entry"], contract_path, configs)
    intent = record(Verb.UNDO.intent, intent_data | facts)

    def prepare(workspace: Path) -> Prepared:
        return prepare_undo(data, facts, newer, intent, workspace, store, disk)

    return _run(intent, Verb.UNDO, _Traces.of(intent, intent_data), prepare, record, disk)



def recover_change(
    intent: str,
    data: Mapping[str, Any],
    *,
    record: Record,
    disk: Disk = REAL_DISK,
) -> Receipt | None:
    """Finish or revert the transaction that the journalled `intent` began.

    Returns the receipt when it was finished, None when it was reverted. It may be interrupted and repeated. Raises
    `StoppedPartWay` where its directories were moved or copied since.
    """
    traces = _Traces.of(intent, data)
    try:
        if not (traces.workspace / READY).is_file():
            traces.remove(disk)
            record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "reverted"})
            return None
        prepared = _read_ready(traces.workspace)
        _refuse_elsewhere(prepared, traces.workspace)
        receipt = _finish(prepared, traces.workspace, record, disk)
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "finished", "receipt": receipt.id})
    except OSError as problem:
        raise StoppedPartWay(
            f"recovery stopped: {_words(problem)}", remedy="fix the cause, then run `chronicle recover` again"
        ) from problem
    return receipt


def _read_ready(workspace: Path) -> Prepared:
    return Prepared.from_json(json.loads((workspace / READY).read_bytes()))


def _is_elsewhere(prepared: Prepared, workspace: Path) -> bool:
    """Whether the directories were moved or copied since: then its paths are not those here, nor in a copy its inodes."""
    return Path(prepared.place).parent.parent != workspace.parent


def _refuse_elsewhere(prepared: Prepared, workspace: Path) -> None:
    if _is_elsewhere(prepared, workspace):
        root = Path(prepared.place).parent
        raise StoppedPartWay(
            f"{prepared.intent} was begun in `{root}`, and only there can it be told how far it had come: nothing was changed",
            remedy="what was moved: move it back, `chronicle recover`, move it again; a copy: `chronicle recover` in the "
            f"original, copy it again; where that is gone, make the moves listed in `{workspace / READY}` by hand, delete "
            f"`{workspace}`, and run `chronicle recover`",
        )


def remove_leftovers(root: Path, closed: Iterable[str], disk: Disk = REAL_DISK) -> int:
    """Remove workspaces that closed transactions left behind when they were killed; returns how many."""
    removed = 0
    for intent in closed:
        workspace = workspace_of(root.parent, intent)
        prepared = _read_ready(workspace) if (workspace / READY).is_file() else None
        if prepared is not None and not _is_elsewhere(prepared, workspace):
            _clean(prepared, workspace, disk)
            removed += 1
        elif workspace.is_dir():
            _remove_workspace(workspace, disk)
            removed += 1
    return removed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """The paths that an unfinished transaction may have created. No loader lists any of them."""

    workspace: Path
    abandoned_dir: Path
    contract_part: Path | None
    config_parts: tuple[Path, ...]
    parent_attributes: Attributes | None

    @classmethod
    def of(cls, intent: str, data: Mapping[str, Any]) -> _Traces:
        root, contract_path, attributes = Path(data["root"]), data.get("contract_path"), data.get("parent_attributes")
        return cls(
            workspace=workspace_of(root.parent, intent),
            abandoned_dir=root.parent / ABANDONED / intent,
            contract_part=None if contract_path is None else contract_part(Path(contract_path), intent),
            config_parts=tuple(config_part(Path(path), intent) for path in data.get("config_paths") or ()),
            parent_attributes=None if attributes is None else Attributes.from_json(attributes),
        )

    def remove(self, disk: Disk) -> None:
        """Remove them all and restore the parent's times. `transaction.json` goes first, so that nobody finishes it."""
        if (self.workspace / READY).is_file():
            disk.unlink(self.workspace / READY)
            disk.sync_directory(self.workspace)
        for part in (*self.config_parts, *([] if self.contract_part is None else [self.contract_part])):
            disk.remove_tree(part)
        for directory in (self.abandoned_dir, self.abandoned_dir.parent):
            _remove_if_empty(directory, disk)
        _remove_workspace(self.workspace, disk)
        if self.parent_attributes is not None:
            disk.set_attributes(self.workspace.parent, self.parent_attributes)


def _intent_data(root: Path, entry: str, contract_path: str | None, config_paths: list[str]) -> dict[str, Any]:
    return {
        "root": str(root),
        "entry": entry,
        "contract_path": contract_path,
        "config_paths": config_paths,
        "parent_attributes": Attributes.of(root.parent).to_json(),
    }


def _run(
    intent: str,
    verb: Verb,
    traces: _Traces,
    prepare: Callable[[Path], Prepared],
    record: Record,
    disk: Disk,
) -> Receipt:
    try:
        prepared = prepare(traces.workspace)
        _publish_ready(prepared, traces.workspace, disk)
    except (OSError, RollbackError, KeyboardInterrupt) as problem:
        _revert(traces, intent, record, disk, problem)
        if isinstance(problem, OSError):
            raise _named(problem, f"{verb} could not be prepared; nothing was changed") from problem
        raise
    try:
        return _finish(prepared, traces.workspace, record, disk)
    except StoppedPartWay:
        raise
    except (OSError, RollbackError) as problem:
        if not _is_begun(prepared):
            _revert(traces, intent, record, disk, problem)
            raise _named(problem, f"{verb} could not be begun; nothing was changed") from problem
        raise StoppedPartWay(
            f"{verb} stopped part-way: {_words(problem)}",
            remedy="fix the cause, then finish it with `chronicle recover`",
        ) from problem


def _is_begun(prepared: Prepared) -> bool:
    """Whether something visible has changed, so that the transaction can only be finished."""
    if prepared.patched and patched_at(Path(prepared.final), prepared):
        return True
    return any(move.is_done() for move in prepared.moves)


def _publish_ready(prepared: Prepared, workspace: Path, disk: Disk) -> None:
    disk.write_atomic(workspace / READY, json.dumps(prepared.to_json(), indent=1))


def _finish(prepared: Prepared, workspace: Path, record: Record, disk: Disk) -> Receipt:
    run_steps(disk, prepared, workspace)
    for path, attributes in prepared.attributes:
        disk.set_attributes(Path(path), attributes)
    _read_back(prepared)
    id_ = record(prepared.receipt_kind, dict(prepared.receipt))
    return Receipt(id=id_, data=prepared.receipt, left_over=_clean(prepared, workspace, disk))


def _read_back(prepared: Prepared) -> None:
    if not patched_at(Path(prepared.final), prepared):
        raise StoppedPartWay(
            f"`{prepared.final}` does not hold the new bytes after the write",
            remedy="check the disk; then run `chronicle recover`",
        )
    for path, expected in prepared.checks.items():
        found = sha256_of(Path(path))
        if found != expected:
            raise StoppedPartWay(
                f"`{path}` reads back with digest {found[:12]}…: expected {expected[:12]}…, the digest of what was written",
                remedy="check the disk; `chronicle recover` tries again",
            )


def _clean(prepared: Prepared, workspace: Path, disk: Disk) -> str | None:
    """Remove leftovers after the receipt. A failure is returned as a message; the next command tries again."""
    try:
        for leftover in map(Path, prepared.remove):
            if leftover.is_dir():
                _remove_if_empty(leftover, disk)
            elif leftover.is_file():
                disk.unlink(leftover)
                disk.sync_directory(leftover.parent)  # before the workspace goes, which is what remembers it
        _remove_workspace(workspace, disk)
        for path, attributes in prepared.final_attributes:
            disk.set_attributes(Path(path), attributes)
    except OSError as problem:
        return f"`{workspace}` could not be removed: {_words(problem)}; no loader lists it, the next command tries again"
    return None


def _remove_workspace(workspace: Path, disk: Disk) -> None:
    """Remove a workspace. `transaction.json` goes last: without it, the rest looks like a transaction never begun."""
    if not workspace.is_dir():
        return
    for entry in sorted(workspace.iterdir(), key=lambda path: path.name == READY):
        disk.remove_tree(entry)
    disk.remove_tree(workspace)
    disk.sync_directory(workspace.parent)


def _remove_if_empty(directory: Path, disk: Disk) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        disk.point("rmdir", directory)
        directory.rmdir()
        disk.sync_directory(directory.parent)


def _revert(traces: _Traces, intent: str, record: Record, disk: Disk, cause: BaseException) -> None:
    """Remove what was prepared and close the intent. Nothing visible has changed yet."""
    try:
        traces.remove(disk)
        record(Verb.RECOVER.receipt, {"intent": intent, "outcome": "reverted", "cause": str(cause)})
    except (OSError, RollbackError) as problem:
        raise StoppedPartWay(
            f"nothing was changed, but the transaction could not be closed: {problem}",
            remedy="run `chronicle recover`",
        ) from cause


def _named(problem: OSError | RollbackError, what: str) -> RollbackError:
    return RollbackError(f"{what}: {_words(problem)}", remedy="free space or fix permissions, then repeat")


def _words(problem: OSError | RollbackError) -> str:
    if isinstance(problem, RollbackError):
        return problem.message
    where = problem.filename2 or problem.filename
    return f"{problem.strerror or problem}" + (f" `{where}`" if where else "")


# --- Preconditions: checked before anything is touched


def check_change(change: Change) -> None:
    """Raise `Refused` for a change that cannot be atomic: other filesystem, mount point, read-only parent, odd files."""
    for path in (change.root, change.place, change.source):
        if is_there(path) and is_mount_point(path):
            raise Refused(
                f"`{path}` is a mount point: checkpoints cannot be renamed out of it",
                remedy="set `checkpoints` to a directory below the mount point",
            )
    if change.place.is_symlink():
        raise Refused(f"`{change.place}` is a symbolic link: expected a checkpoint", remedy="name the real directory")
    device = change.root.stat().st_dev
    for path in (change.parent, change.source, *(change.root / name for name in change.abandon)):
        if path.lstat().st_dev != device:
            raise Refused(
                f"`{path}` is on another filesystem than `{change.root}`: it cannot be moved by one rename",
                remedy="set `checkpoints` to a directory whose parent is on the same filesystem",
            )
    for path in (change.parent, change.root, change.source.parent):
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise Refused(
                f"`{path}` is not writable: the edited checkpoint is built and moved in this directory",
                remedy="run as the user who owns the checkpoints, or make the directory writable",
            )
    for path in change.configs:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise Refused(
                f"`{path.parent}` is not writable: `{path.name}` in it must change together with the checkpoint",
                remedy="run as the user who owns it, or make the directory writable",
            )
    for name in change.copies:
        if not is_there(change.root / name) or (change.root / name).is_symlink():
            raise Refused(f"`{change.root / name}` is a link, or gone: expected a copy of a checkpoint")
    for name in change.pointers:
        if (change.root / name).is_symlink():
            raise Refused(f"pointer `{change.root / name}` is a symbolic link: expected a small text file")
    refuse_odd_entries(change.source, {**change.writers, **change.patches})
    for name in change.patches:
        refuse_shared(inside(change.source, name))


def refuse_shared(path: Path) -> None:
    """Raise `Refused` for a file with several hard links: patched in place, it would change under all of its names."""
    found = path.lstat()
    if found.st_nlink != 1:
        raise Refused(
            f"`{path}` has {found.st_nlink} hard links: a patch in place would change the file under all of its names",
            remedy="give it its own copy first: `cp FILE FILE.part && mv FILE.part FILE`",
        )
    if not os.access(path, os.W_OK):
        raise Refused(f"`{path}` is not writable", remedy="run as the user who owns the checkpoints")


_CHANGED = "`{}` was changed after the rollback: expected the bytes that the rollback wrote"
_GO_TO_ANOTHER = "abandon this checkpoint and go back to another one with `chronicle rollback --to`"


def check_undo(data: Mapping[str, Any], root: Path) -> None:
    """Raise `Refused` when the rollback with this receipt cannot be undone: a file is gone or was changed since."""
    version = data.get("v", RECEIPT_VERSION)
    if version != RECEIPT_VERSION:
        raise Refused(
            f"the receipt of this rollback has version {version!r}: expected version {RECEIPT_VERSION}",
            remedy="a newer program wrote it: undo with that program",
        )
    place = root / data["entry"]
    if not is_there(place):
        raise Refused(
            f"`{place}` is gone: only the originals of its edited files are kept",
            remedy="restore the checkpoint from a copy; the originals are in the run's `objects` directory",
        )
    for name in data["abandoned"]:
        if inode_of(Path(data["abandoned_dir"]) / name) is None:
            raise Refused(
                f"`{Path(data['abandoned_dir']) / name}` is gone: the rollback moved this checkpoint there, and undo needs it",
                remedy="move it back if you moved it by hand, or keep the rollback",
            )
    for config in data.get("configs") or ():
        path = Path(config["path"])
        if not path.is_file() or sha256_of(path) != config["after"]:
            restore = "restore what the rollback wrote (kept in the run's objects directory), or keep the rollback"
            raise Refused(_CHANGED.format(path), restore)
    for file in map(StagedFile.from_json, data["files"]):
        path = inside(place, file.path)
        if not path.is_file() or sha256_of(path) != file.after:
            raise Refused(_CHANGED.format(path), _GO_TO_ANOTHER)
    for patched in map(PatchedFile.from_json, data["patched"]):
        path = inside(place, patched.path)
        if not is_patched(path, patched):
            raise Refused(_CHANGED.format(path), _GO_TO_ANOTHER)
        refuse_shared(path)
    if not os.access(root.parent, os.W_OK | os.X_OK) or not os.access(root, os.W_OK | os.X_OK):
        raise Refused(f"`{root}` or its parent is not writable", remedy="run as the user who owns the checkpoints")
