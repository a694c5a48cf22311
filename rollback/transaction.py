"""Change a checkpoint so that a crash at any point leaves what was before or what was asked, and take it back.

    intent      journalled before anything is touched
    prepare     in `<parent>/.chronicle-<id>/`, where no loader looks: originals to the object store, the edited twin,
                new pointers, the list of moves; all durable, then `transaction.json`: from here on it will be finished
    moves       renames only, each atomic and durable before the next (`rollback.moves`)
    read back   the bytes on disk against the digests of the twin
    receipt     journalled; it holds what `undo` needs
    workspace   removed

Killed before `transaction.json` exists: `recover` removes the workspace, nothing had changed. Killed later: `recover`
makes the remaining moves. Knows no format: what a file becomes is decided by the `Writer` it is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollback.durable import REAL_DISK, Attributes, Disk
from rollback.errors import Refused, RollbackError, StoppedPartWay, UnreadableFile
from rollback.moves import HiddenExchange, Kind, Move, inode_of, run_moves
from rollback.objects import ObjectStore, sha256_of
from rollback.staging import StagedFile, Writer, build_twin, refuse_odd_entries

READY = "transaction.json"
VERSION = 1
ABANDONED = "abandoned"

Record = Callable[[str, dict[str, Any]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a transaction is to bring about. Names are relative to `root`, the directory a loader lists."""

    root: Path
    entry: str  # the checkpoint's name in `root`
    source: Path  # where it lies now: `root / entry`, or an abandoned one that is brought back
    writers: Mapping[str, Writer] = field(default_factory=dict)  # path in the checkpoint -> new content
    abandon: tuple[str, ...] = ()  # names in `root`, earliest step first
    pointers: Mapping[str, bytes] = field(default_factory=dict)  # path in `root` -> new content
    contract: tuple[Path, Callable[[str], bytes]] | None = None  # where, and its content for the rollback's id
    facts: Mapping[str, Any] = field(default_factory=dict)  # goes into intent and receipt as it is

    @property
    def place(self) -> Path:
        return self.root / self.entry

    @property
    def parent(self) -> Path:
        return self.root.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was done, with all that `undo` needs; `id` is the journal entry that holds it."""

    id: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The content of `transaction.json`: from here on the transaction only goes forward."""

    intent: str
    receipt_kind: str
    moves: tuple[Move, ...]
    checks: Mapping[str, str]  # absolute path -> sha256 that must be read back
    attributes: tuple[tuple[str, Attributes], ...]  # to set when the moves are made
    final_attributes: tuple[tuple[str, Attributes], ...]  # to set when the workspace is gone
    remove: tuple[str, ...]  # leftovers outside the workspace: files, or directories if empty
    receipt: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "v": VERSION,
            "intent": self.intent,
            "receipt_kind": self.receipt_kind,
            "moves": [move.to_json() for move in self.moves],
            "checks": dict(self.checks),
            "attributes": [[path, attributes.to_json()] for path, attributes in self.attributes],
            "final_attributes": [[path, attributes.to_json()] for path, attributes in self.final_attributes],
            "remove": list(self.remove),
            "receipt": dict(self.receipt),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> _Prepared:
        if record.get("v") != VERSION:
            raise UnreadableFile(f"{READY} has version {record.get('v')!r}: this program reads {VERSION}")
        return cls(
            intent=record["intent"],
            receipt_kind=record["receipt_kind"],
            moves=tuple(Move.from_json(move) for move in record["moves"]),
            checks=record["checks"],
            attributes=tuple((path, Attributes.from_json(values)) for path, values in record["attributes"]),
            final_attributes=tuple((path, Attributes.from_json(values)) for path, values in record["final_attributes"]),
            remove=tuple(record["remove"]),
            receipt=record["receipt"],
        )


def workspace_of(parent: Path, intent: str) -> Path:
    """Where a transaction prepares: beside the checkpoints root, on its filesystem, hidden from loaders."""
    return parent / f".chronicle-{intent}"


def apply_change(
    change: Change,
    *,
    objects_dir: Path,
    record: Record,
    check_twin: Callable[[Path], None] = lambda _: None,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Bring `change` about. `record` journals an entry durably and returns its id.

    Raises `Refused` before anything is touched, any other `RollbackError` with everything as it was, and
    `StoppedPartWay` when `recover` has to finish.
    """
    check_ground(change)
    store = ObjectStore(objects_dir, disk)
    contract_path = None if change.contract is None else str(change.contract[0])
    intent_data = _intent_data(change.root, change.entry, contract_path)
    intent = record("rollback.intent", intent_data | dict(change.facts))

    def prepare(workspace: Path) -> _Prepared:
        return _prepare_rollback(change, intent, workspace, store, check_twin, disk)

    return _carry_out(intent, "rollback", _Traces.of(intent, intent_data), prepare, record, disk)


def undo(
    receipt: Receipt,
    *,
    newer: tuple[str, ...] = (),
    objects_dir: Path,
    record: Record,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Take back what `receipt` did: every byte, mode and time of every touched thing.

    `newer` names the entries of the root that a later launch saved, earliest first; they are abandoned under the
    undo's own id, nothing is overwritten. Raises as `apply_change`.
    """
    data = receipt.data
    root = Path(data["root"])
    _check_undo(data, root)
    store = ObjectStore(objects_dir, disk)
    for sha256 in _originals(data):
        store.find(sha256)
    facts = {"undoes": receipt.id, "undoes_intent": data["intent"], "step": data.get("step")}
    contract_path = data["contract"]["path"] if data.get("contract") else None
    intent_data = _intent_data(root, data["entry"], contract_path)
    intent = record("undo.intent", intent_data | facts)

    def prepare(workspace: Path) -> _Prepared:
        return _prepare_undo(data, facts, newer, intent, workspace, store, disk)

    return _carry_out(intent, "undo", _Traces.of(intent, intent_data), prepare, record, disk)


def recover(intent: str, data: Mapping[str, Any], *, record: Record, disk: Disk = REAL_DISK) -> Receipt | None:
    """Finish or revert the transaction that the journalled `intent` began.

    Returns the receipt when it was finished, `None` when it was reverted. May itself be interrupted and repeated.
    """
    traces = _Traces.of(intent, data)
    ready = traces.workspace / READY
    if not ready.is_file():
        traces.remove(disk)
        record("recover.receipt", {"intent": intent, "outcome": "reverted"})
        return None
    prepared = _Prepared.from_json(json.loads(ready.read_bytes()))
    receipt = _finish(prepared, traces.workspace, record, disk)
    record("recover.receipt", {"intent": intent, "outcome": "finished", "receipt": receipt.id})
    return receipt


def remove_leftovers(root: Path, closed: Iterable[str], disk: Disk = REAL_DISK) -> int:
    """Remove the workspaces of finished transactions that were killed before they could do it; returns how many."""
    removed = 0
    for intent in closed:
        workspace = workspace_of(root.parent, intent)
        if (workspace / READY).is_file():
            _clean(_Prepared.from_json(json.loads((workspace / READY).read_bytes())), workspace, disk)
            removed += 1
        elif workspace.is_dir():
            _remove_workspace(workspace, disk)
            removed += 1
    return removed


# --- before anything is touched --------------------------------------------------------------------------------------


def check_ground(change: Change) -> None:
    """Refuse what could not be done whole: another filesystem, a mount point, a read-only parent, odd entries."""
    for path in (change.root, change.place, change.source):
        if os.path.lexists(path) and os.path.ismount(path):
            raise Refused(
                f"`{path}` is a mount point: checkpoints cannot be moved aside on their own filesystem",
                remedy="let the setting `checkpoints` name a directory below the mount point",
            )
    if change.place.is_symlink():
        raise Refused(f"`{change.place}` is a symbolic link: expected a checkpoint", remedy="name the real directory")
    device = change.root.stat().st_dev
    for path in (change.parent, change.source, *(change.root / name for name in change.abandon)):
        if path.lstat().st_dev != device:
            raise Refused(
                f"`{path}` lies on another filesystem than `{change.root}`: it could not be moved in one piece",
                remedy="let the setting `checkpoints` name a directory whose parent is on the same filesystem",
            )
    for path in (change.parent, change.root, change.source.parent):
        if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
            raise Refused(
                f"`{path}` is not writable: the edited checkpoint is built and moved there",
                remedy="run as the user who owns the checkpoints, or make the directory writable",
            )
    for name in change.pointers:
        if (change.root / name).is_symlink():
            raise Refused(f"pointer `{change.root / name}` is a symbolic link: expected a small text file")
    refuse_odd_entries(change.source, change.writers)


def _check_undo(data: Mapping[str, Any], root: Path) -> None:
    place = root / data["entry"]
    if not os.path.lexists(place):
        raise Refused(
            f"`{place}` is gone: its edited files could be given back, the rest of it could not",
            remedy="the originals of the edited files are in the run's objects directory",
        )
    if inode_of(place) != data["inode"]:
        raise Refused(
            f"`{place}` was replaced after the rollback: what is there now is another checkpoint",
            remedy="abandon it and go back to another one with `chronicle rollback --to`",
        )
    for file in map(StagedFile.from_json, data["files"]):
        path = place / file.path if file.path else place
        if not path.is_file() or sha256_of(path) != file.after:
            raise Refused(
                f"`{path}` was changed after the rollback: expected the bytes that the rollback wrote",
                remedy="abandon this checkpoint and go back to another one with `chronicle rollback --to`",
            )
    if not os.access(root.parent, os.W_OK | os.X_OK) or not os.access(root, os.W_OK | os.X_OK):
        raise Refused(f"`{root}` or its parent is not writable", remedy="run as the user who owns the checkpoints")


def _originals(data: Mapping[str, Any]) -> Iterable[str]:
    yield from (file["before"] for file in data["files"])
    yield from (pointer["before"] for pointer in data["pointers"] if pointer["before"] is not None)
    if data.get("contract") and data["contract"]["before"] is not None:
        yield data["contract"]["before"]


# --- prepare ---------------------------------------------------------------------------------------------------------


def _prepare_rollback(
    change: Change,
    intent: str,
    workspace: Path,
    store: ObjectStore,
    check_twin: Callable[[Path], None],
    disk: Disk,
) -> _Prepared:
    attributes = {"root": Attributes.of(change.root).to_json(), "parent": Attributes.of(change.parent).to_json()}
    abandoned_dir = change.parent / ABANDONED / intent
    place, source, twin = change.place, change.source, change.source
    displaced = source != place and os.path.lexists(place)
    directories = _directory_attributes(source)
    disk.make_directory(workspace)
    files: tuple[StagedFile, ...] = ()
    if change.writers:
        for name in change.writers:
            original = source / name if name else source
            store.add_file(original, sha256_of(original))
        twin = workspace / "twin" / change.entry
        disk.make_directory(twin.parent)
        files = build_twin(disk, source, twin, change.writers)
        check_twin(twin)
    moves: list[Move] = []
    if source != place or change.writers:
        moves += _install(change.root, twin, place, source, abandoned_dir if displaced else None, workspace, disk)
    pointers = []
    for number, (name, content) in enumerate(change.pointers.items()):
        moves.append(_replacement(disk, workspace / f"pointer-{number}", change.root / name, content))
        pointers.append({"path": name} | _kept(change.root / name, store))
    moves += [_move(change.root / name, abandoned_dir / name) for name in change.abandon]
    if any(move.target.parent == abandoned_dir for move in moves):
        disk.make_directory(abandoned_dir)
    contract: dict[str, Any] | None = None
    if change.contract is not None:
        path, render = change.contract
        contract = {"path": str(path)} | _kept(path, store)
        disk.make_directory(path.parent)
        moves.append(_replacement(disk, _contract_part(path, intent), path, render(intent)))
    return _Prepared(
        intent=intent,
        receipt_kind="rollback.receipt",
        moves=tuple(moves),
        checks={str(place / file.path if file.path else place): file.after for file in files},
        attributes=(),
        final_attributes=(),
        remove=(),
        receipt={
            **change.facts,
            "intent": intent,
            "root": str(change.root),
            "entry": change.entry,
            "source": str(source),
            "displaced": displaced,
            "inode": inode_of(twin),
            "files": [file.to_json() for file in files],
            "directories": directories,
            "abandoned": list(change.abandon),
            "abandoned_dir": str(abandoned_dir),
            "pointers": pointers,
            "contract": contract,
            "remaining": sorted(set(os.listdir(change.root)) - set(change.abandon) | {change.entry}),
            "attributes": attributes,
        },
    )


def _prepare_undo(
    data: Mapping[str, Any],
    facts: Mapping[str, Any],
    newer: tuple[str, ...],
    intent: str,
    workspace: Path,
    store: ObjectStore,
    disk: Disk,
) -> _Prepared:
    root, place = Path(data["root"]), Path(data["root"]) / data["entry"]
    source, back_dir = Path(data["source"]), Path(data["abandoned_dir"])
    own_dir = root.parent / ABANDONED / intent
    files = tuple(map(StagedFile.from_json, data["files"]))
    disk.make_directory(workspace)
    twin = place
    if files:
        twin = workspace / "twin" / data["entry"]
        disk.make_directory(twin.parent)
        build_twin(disk, place, twin, {file.path: _restorer(store, file, disk) for file in files})
        _restore_attributes(disk, twin, files, data["directories"])
    moves: list[Move] = []
    for name in reversed(data["abandoned"]):
        if name in newer:
            moves += _swap(root, back_dir / name, root / name, workspace, disk, leftover=own_dir / name)
        else:
            moves.append(_move(back_dir / name, root / name))
    moves += [_move(root / name, own_dir / name) for name in newer if name not in data["abandoned"]]
    moves += _pointers_back(data, root, workspace, store, disk)
    if source != place or files:
        moves += _reinstall(data, root, twin, place, source, back_dir, workspace, disk)
    if newer:
        disk.make_directory(own_dir)
    if source != place:
        disk.make_directory(source.parent)
    remove = [str(back_dir), str(back_dir.parent)]
    if data.get("contract"):
        moves.append(_contract_back(data["contract"], intent, store, disk))
        remove.append(str(moves[-1].source if data["contract"]["before"] else moves[-1].target))
    restored = source if source != place else place
    final = [(str(root.parent), Attributes.from_json(data["attributes"]["parent"]))]
    if not newer:
        final.insert(0, (str(root), Attributes.from_json(data["attributes"]["root"])))
    return _Prepared(
        intent=intent,
        receipt_kind="undo.receipt",
        moves=tuple(moves),
        checks={str(restored / file.path if file.path else restored): file.before for file in files},
        attributes=(),
        final_attributes=tuple(final),
        remove=tuple(remove),
        receipt={
            **facts,
            "intent": intent,
            "root": str(root),
            "entry": data["entry"],
            "returned": list(data["abandoned"]),
            "abandoned": list(newer),
            "abandoned_dir": str(own_dir),
            "restored": [file.path for file in files],
        },
    )


def _install(
    root: Path, twin: Path, place: Path, source: Path, abandoned_dir: Path | None, workspace: Path, disk: Disk
) -> list[Move]:
    """Bring the twin (or an abandoned checkpoint itself) to its place; what was there goes where it belongs."""
    if not os.path.lexists(place):
        moves = [_move(twin, place)]
    else:
        leftover = None if abandoned_dir is None else abandoned_dir / place.name
        moves = _swap(root, twin, place, workspace, disk, leftover=leftover)
    if source not in (place, twin):
        moves.append(_discard(source, workspace / "trash" / source.name, disk))
    return moves


def _reinstall(
    data: Mapping[str, Any],
    root: Path,
    twin: Path,
    place: Path,
    source: Path,
    back_dir: Path,
    workspace: Path,
    disk: Disk,
) -> list[Move]:
    """The way back of `_install`."""
    if source == place:
        return _swap(root, twin, place, workspace, disk, leftover=None)
    edited = twin != place
    trash = workspace / "trash" / place.name
    if edited:
        disk.make_directory(trash.parent)
    away = trash if edited else source
    if data["displaced"]:
        moves = _swap(root, back_dir / place.name, place, workspace, disk, leftover=away)
    else:
        moves = [_move(place, away)]
    return [*moves, _move(twin, source)] if edited else moves


def _swap(root: Path, one: Path, place: Path, workspace: Path, disk: Disk, *, leftover: Path | None) -> list[Move]:
    """Moves that put `one` at `place` and what was there at `leftover` (`None`: left in the workspace).

    Where the filesystem cannot exchange two names, the whole root goes out of sight for two renames.
    """
    there = inode_of(place)
    assert there is not None
    if disk.can_exchange(workspace):
        moves = [_move(one, place, Kind.EXCHANGE)]
        return moves if leftover is None else [*moves, Move(kind=Kind.MOVE, source=one, target=leftover, inode=there)]
    parked = leftover or workspace / "parked" / place.name
    disk.make_directory(parked.parent)
    way = HiddenExchange(hidden=root.with_name(f"{root.name}{workspace.name}"), parked=parked, displaced_inode=there)
    return [replace(_move(one, place, Kind.HIDDEN), hidden=way)]


def _pointers_back(data: Mapping[str, Any], root: Path, workspace: Path, store: ObjectStore, disk: Disk) -> list[Move]:
    moves = []
    for number, pointer in enumerate(data["pointers"]):
        path = root / pointer["path"]
        if pointer["before"] is None:
            moves.append(_discard(path, workspace / "trash" / f"pointer-{number}", disk))
        else:
            content = store.find(pointer["before"]).read_bytes()
            move = _replacement(disk, workspace / f"pointer-{number}", path, content)
            disk.set_attributes(move.source, Attributes.from_json(pointer["attributes"]))
            moves.append(move)
    return moves


def _contract_back(contract: Mapping[str, Any], intent: str, store: ObjectStore, disk: Disk) -> Move:
    path = Path(contract["path"])
    aside = _contract_part(path, intent)
    if contract["before"] is None:
        return Move(kind=Kind.DISCARD, source=path, target=aside, inode=inode_of(path) or -1)
    move = _replacement(disk, aside, path, store.find(contract["before"]).read_bytes())
    disk.set_attributes(move.source, Attributes.from_json(contract["attributes"]))
    return move


def _restorer(store: ObjectStore, file: StagedFile, disk: Disk) -> Writer:
    def write(_source: Path, target: Path, _changed: object) -> None:
        disk.copy_new(store.find(file.before), target)

    return write


def _restore_attributes(
    disk: Disk, twin: Path, files: Iterable[StagedFile], directories: Iterable[tuple[str, list[int]]]
) -> None:
    for file in files:
        disk.set_attributes(twin / file.path if file.path else twin, file.attributes)
    for relative, values in directories:
        path = twin / relative
        if path.is_dir():
            disk.set_attributes(path, Attributes.from_json(values))


def _directory_attributes(source: Path) -> list[tuple[str, list[int]]]:
    """Attributes of every directory of the checkpoint, innermost first, so that setting them keeps the outer times."""
    if not source.is_dir():
        return []
    found = [path for path in source.rglob("*") if path.is_dir() and not path.is_symlink()]
    ordered = [*sorted(found, key=lambda path: -len(path.parts)), source]
    return [(path.relative_to(source).as_posix(), Attributes.of(path).to_json()) for path in ordered]


def _kept(path: Path, store: ObjectStore) -> dict[str, Any]:
    """Put the present content of a small file into the store; what `undo` needs to bring it back."""
    if not os.path.lexists(path):
        return {"before": None, "attributes": None}
    return {"before": store.add_bytes(path.read_bytes()), "attributes": Attributes.of(path).to_json()}


def _move(source: Path, target: Path, kind: Kind = Kind.MOVE) -> Move:
    inode = inode_of(source)
    if inode is None:
        raise Refused(f"`{source}` is not there any more", remedy="plan again with `chronicle rollback --dry-run`")
    return Move(kind=kind, source=source, target=target, inode=inode)


def _discard(source: Path, trash: Path, disk: Disk) -> Move:
    disk.make_directory(trash.parent)
    return _move(source, trash, Kind.DISCARD)


def _replacement(disk: Disk, prepared: Path, target: Path, content: bytes) -> Move:
    disk.write_new(prepared, content)
    disk.sync_directory(prepared.parent)
    return _move(prepared, target, Kind.REPLACE)


# --- carry out -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """Everything an unfinished transaction may have left on disk; nothing of it is in a loader's sight."""

    workspace: Path
    abandoned_dir: Path
    contract_part: Path | None
    parent_attributes: Attributes | None

    @classmethod
    def of(cls, intent: str, data: Mapping[str, Any]) -> _Traces:
        root, contract_path, attributes = Path(data["root"]), data.get("contract_path"), data.get("parent_attributes")
        return cls(
            workspace=workspace_of(root.parent, intent),
            abandoned_dir=root.parent / ABANDONED / intent,
            contract_part=None if contract_path is None else _contract_part(Path(contract_path), intent),
            parent_attributes=None if attributes is None else Attributes.from_json(attributes),
        )

    def remove(self, disk: Disk) -> None:
        """As if it had never begun, the parent's times included."""
        if self.contract_part is not None:
            disk.remove_tree(self.contract_part)
        for directory in (self.abandoned_dir, self.abandoned_dir.parent):
            _remove_if_empty(directory, disk)
        _remove_workspace(self.workspace, disk)
        if self.parent_attributes is not None:
            disk.set_attributes(self.workspace.parent, self.parent_attributes)


def _intent_data(root: Path, entry: str, contract_path: str | None) -> dict[str, Any]:
    return {
        "root": str(root),
        "entry": entry,
        "contract_path": contract_path,
        "parent_attributes": Attributes.of(root.parent).to_json(),
    }


def _contract_part(path: Path, intent: str) -> Path:
    return path.with_name(f".contract-{intent}.json")


def _carry_out(
    intent: str,
    verb: str,
    traces: _Traces,
    prepare: Callable[[Path], _Prepared],
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
        if not any(move.is_done() for move in prepared.moves):
            _revert(traces, intent, record, disk, problem)
            raise _named(problem, f"{verb} could not be begun; nothing was changed") from problem
        raise StoppedPartWay(
            f"{verb} stopped part-way: {_words(problem)}",
            remedy="remove the cause, then finish it with `chronicle recover`",
        ) from problem


def _publish_ready(prepared: _Prepared, workspace: Path, disk: Disk) -> None:
    temporary = workspace / f"{READY}.part"
    disk.write_new(temporary, json.dumps(prepared.to_json(), indent=1).encode())
    disk.replace(temporary, workspace / READY)
    disk.sync_directory(workspace)


def _finish(prepared: _Prepared, workspace: Path, record: Record, disk: Disk) -> Receipt:
    run_moves(disk, prepared.moves)
    for path, attributes in prepared.attributes:
        disk.set_attributes(Path(path), attributes)
    _read_back(prepared)
    receipt = Receipt(id=record(prepared.receipt_kind, dict(prepared.receipt)), data=prepared.receipt)
    _clean(prepared, workspace, disk)
    return receipt


def _read_back(prepared: _Prepared) -> None:
    for path, expected in prepared.checks.items():
        found = sha256_of(Path(path))
        if found != expected:
            raise StoppedPartWay(
                f"`{path}` reads back with digest {found[:12]}…, expected {expected[:12]}…: the disk returned other bytes",
                remedy="check the disk; `chronicle recover` tries again",
            )


def _clean(prepared: _Prepared, workspace: Path, disk: Disk) -> None:
    """Tidy up after the receipt. A failure here changes nothing that matters: the next command tries again."""
    try:
        for leftover in map(Path, prepared.remove):
            if leftover.is_dir():
                _remove_if_empty(leftover, disk)
            elif leftover.is_file():
                disk.unlink(leftover)
        _remove_workspace(workspace, disk)
        for path, attributes in prepared.final_attributes:
            disk.set_attributes(Path(path), attributes)
    except OSError:
        pass


def _remove_workspace(workspace: Path, disk: Disk) -> None:
    """Remove a workspace, `transaction.json` last: without it what is left looks never begun."""
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
    """Nothing is in sight yet: remove what was prepared and close the intent."""
    try:
        traces.remove(disk)
        record("recover.receipt", {"intent": intent, "outcome": "reverted", "cause": str(cause)})
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
