"""Builds the new files of a rollback or an undo, and the ordered list of moves that puts them in place.

All of it is written and fsynced outside the directories that loaders list; nothing visible has changed yet. The order
of the moves matters: at every point, a loader that takes the newest checkpoint, one that follows a pointer and one that
is given a path each see the state before or the state after.

    rollback   the edited checkpoint takes its place (with its configs), pointers, its copies, later checkpoints away
               (earliest first), contract
    undo       later checkpoints back (latest first), newer ones away, pointers, copies, the original takes its place
               (with its configs), contract
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollback.disk.content import ObjectStore, sha256_unchanged
from rollback.disk.durable import Attributes, Disk, is_there
from rollback.errors import Refused
from rollback.transaction.change import (
    ABANDONED,
    Change,
    Copy,
    PatchedFile,
    Prepared,
    Verb,
    config_part,
    contract_part,
    parked_at,
)
from rollback.transaction.moves import Move, MoveKind, inode_of
from rollback.transaction.staging import StagedFile, Writer, build_twin, inside


def prepare_rollback(
    change: Change,
    intent: str,
    workspace: Path,
    store: ObjectStore,
    disk: Disk,
) -> Prepared:
    """Prepare `change` in `workspace`; `check_twin` verifies the edited copy before anything is moved."""
    attributes = {"root": Attributes.of(change.root).to_json(), "parent": Attributes.of(change.parent).to_json()}
    abandoned_dir = change.parent / ABANDONED / intent
    place, source, twin = change.place, change.source, change.source
    displaced = source != place and is_there(place)
    directories = _directory_attributes(source)
    disk.make_directory(workspace)
    files: tuple[StagedFile, ...] = ()
    patched = _patched_files(change, store)
    if change.writers:  # without writers there is no twin: a patched file keeps its inode
        for name in change.writers:
            original = inside(source, name)
            store.add_file(original, sha256_unchanged(original))
        twin = workspace / "twin" / change.entry
        disk.make_directory(twin.parent)
        files = build_twin(disk, source, twin, change.writers)
    configs = []
    together: list[Move] = []
    for path, content in change.configs.items():
        kept = kept_for_undo(path, store) | {"folder": Attributes.of(path.parent).to_json()}
        configs.append({"path": str(path), "after": store.add_bytes(content)} | kept)
        together.append(replacement_move(disk, config_part(path, intent), path, content))
        _take_attributes(disk, together[-1])
    moves: list[Move] = []
    if source == place and (patched or together):
        moves += _out_of_sight(place, twin, together, workspace, abandoned_dir, disk)
    else:
        moves += together
        if source != place or change.writers:
            moves += _install(twin, place, source, abandoned_dir if displaced else None, workspace, disk)
    pointers = []
    for number, (name, content) in enumerate(change.pointers.items()):
        path = change.root / name
        moves.append(replacement_move(disk, workspace / f"pointer-{number}", path, content))
        if path.is_file():
            _take_attributes(disk, moves[-1])
        pointers.append({"path": name, "link": None} | kept_for_undo(path, store))
    for number, (name, points_to) in enumerate(change.links.items()):
        path = change.root / name
        pointers.append(
            {"path": name, "link": os.readlink(path), "before": None, "attributes": Attributes.of(path).to_json()}
        )
        moves.append(relinking_move(disk, workspace / f"link-{number}", path, points_to))
    copies = []
    for number, (name, copy) in enumerate(change.copies.items()):
        made = _copy(disk, copy, workspace / f"copy-{number}" / name, change.root / name)
        moves += swap_moves(made, change.root / name, workspace, disk, leftover=abandoned_dir / name)
        copies.append({"name": name, "stamp": size_and_mtime(made)})
    moves += [move_of(change.root / name, abandoned_dir / name) for name in change.abandon]
    if any(move.target.parent == abandoned_dir for move in moves):
        disk.make_directory(abandoned_dir)
    contract: dict[str, Any] | None = None
    if change.contract is not None:
        path, render = change.contract
        contract = {"path": str(path)} | kept_for_undo(path, store)
        disk.make_directory(path.parent)
        moves.append(replacement_move(disk, contract_part(path, intent), path, render(intent)))
    return Prepared(
        intent=intent,
        receipt_kind=Verb.ROLLBACK.receipt,
        moves=tuple(moves),
        patched=patched,
        place=str(place),
        final=str(place),
        twin=str(twin),
        checks={str(inside(place, file.path)): file.after for file in files},
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
            "files": [file.to_json() for file in files],
            "patched": [file.to_json() for file in patched],
            "directories": directories,
            "abandoned": list(change.abandon),
            "abandoned_dir": str(abandoned_dir),
            "pointers": pointers,
            "copies": copies,
            "configs": configs,
            "contract": contract,
            "remaining": sorted(set(os.listdir(change.root)) - set(change.abandon) | {change.entry}),
            "attributes": attributes,
        },
    )


def _install(
    twin: Path, place: Path, source: Path, abandoned_dir: Path | None, workspace: Path, disk: Disk
) -> list[Move]:
    """Move the twin, or an abandoned checkpoint itself, to `place`; what was there goes to `abandoned_dir`."""
    if not is_there(place):
        moves = [move_of(twin, place)]
    else:
        leftover = None if abandoned_dir is None else abandoned_dir / place.name
        moves = swap_moves(twin, place, workspace, disk, leftover=leftover)
    if source not in (place, twin):
        moves.append(discard_move(source, workspace / "trash" / source.name, disk))
    return moves


def _out_of_sight(
    place: Path, twin: Path, together: Sequence[Move], workspace: Path, aside_dir: Path, disk: Disk
) -> list[Move]:
    """The checkpoint is parked while its files are patched and other files change; then it, or its twin, is back."""
    parked = parked_at(workspace, place.name)
    disk.make_directory(parked.parent)
    park = move_of(place, parked, MoveKind.PARK)
    source, inode = (parked, park.inode) if twin == place else (twin, move_of(twin, place).inode)
    aside = aside_dir / f"saved-meanwhile-{place.name}"
    return [park, *together, Move(kind=MoveKind.MOVE, source=source, target=place, inode=inode, aside=aside)]


def _directory_attributes(source: Path) -> list[tuple[str, list[int]]]:
    """Attributes of each directory of the checkpoint, innermost first: setting them in this order keeps all times."""
    if not source.is_dir():
        return []
    found = [path for path in source.rglob("*") if path.is_dir() and not path.is_symlink()]
    ordered = [*sorted(found, key=lambda path: -len(path.parts)), source]
    return [(path.relative_to(source).as_posix(), Attributes.of(path).to_json()) for path in ordered]


def _patched_files(change: Change, store: ObjectStore) -> tuple[PatchedFile, ...]:
    """The patches with the attributes that undo needs. The old bytes are also kept in the object store."""
    files = []
    for name, patches in change.patches.items():
        path = inside(change.source, name)
        files.append(PatchedFile(path=name, patches=patches, attributes=Attributes.of(path)))
        store.add_bytes(json.dumps(files[-1].to_json()).encode())
    return tuple(files)


def _copy(disk: Disk, copy: Copy, made: Path, present: Path) -> Path:
    """A copy that shares no bytes with its source, with the mode and owner of what it replaces."""
    disk.make_directory(made.parent)
    build_twin(disk, copy.source, made, copy.writers, linked=False)
    attributes = Attributes.of(made)
    disk.set_attributes(
        made, replace(Attributes.of(present), atime_ns=attributes.atime_ns, mtime_ns=attributes.mtime_ns)
    )
    return made


# --- Constructors for `Move`; each writes and fsyncs its source file first


def swap_moves(one: Path, place: Path, workspace: Path, disk: Disk, *, leftover: Path | None) -> list[Move]:
    """Moves that put `one` at `place`, and what was there at `leftover` (None: it stays in the workspace).

    Where the filesystem cannot exchange two names, a file gets a second name before it is replaced, and a directory is parked
    first: between two renames this one is absent.
    """
    there = inode_of(place)
    assert there is not None
    if disk.can_exchange(workspace):
        moves = [move_of(one, place, MoveKind.EXCHANGE)]
        return moves if leftover is None else [*moves, Move(kind=MoveKind.MOVE, source=one, target=leftover, inode=there)]
    parked = leftover or parked_at(workspace, place.name)
    disk.make_directory(parked.parent)
    if place.is_file() and disk.can_link(workspace):
        kept = Move(kind=MoveKind.KEEP, source=place, target=parked, inode=there)
        return [kept, move_of(one, place, MoveKind.REPLACE)]
    return [Move(kind=MoveKind.PARK, source=place, target=parked, inode=there), move_of(one, place)]


def relinking_move(disk: Disk, prepared: Path, path: Path, points_to: str) -> Move:
    """Replaces the symbolic link at `path` by one that points to `points_to`."""
    disk.symlink(points_to, prepared)
    disk.sync_directory(prepared.parent)
    return move_of(prepared, path, MoveKind.REPLACE)


def move_of(source: Path, target: Path, kind: MoveKind = MoveKind.MOVE) -> Move:
    """Moves what is at `source` now; raises `Refused` when nothing is there."""
    inode = inode_of(source)
    if inode is None:
        raise Refused(f"`{source}` was removed after the plan was made", remedy="make a new plan with `chronicle rollback`")
    return Move(kind=kind, source=source, target=target, inode=inode)


def discard_move(source: Path, trash: Path, disk: Disk) -> Move:
    """Moves `source` into the workspace, with which it is deleted."""
    disk.make_directory(trash.parent)
    return move_of(source, trash, MoveKind.DISCARD)


def replacement_move(disk: Disk, prepared: Path, target: Path, content: bytes) -> Move:
    """Replaces the small file `target` by one with `content`."""
    disk.write_new(prepared, content)
    disk.sync_directory(prepared.parent)
    return move_of(prepared, target, MoveKind.REPLACE)


def _take_attributes(disk: Disk, move: Move) -> None:
    """Give the new file the attributes of the one that it replaces, but for the time."""
    disk.set_attributes(move.source, replace(Attributes.of(move.target), mtime_ns=move.source.lstat().st_mtime_ns))


def _put_back(disk: Disk, prepared: Path, path: Path, kept: Mapping[str, Any], store: ObjectStore) -> Move:
    """The inverse of `kept_for_undo` for a file that was there: its content and attributes of before."""
    move = replacement_move(disk, prepared, path, store.find(kept["before"]).read_bytes())
    disk.set_attributes(move.source, Attributes.from_json(kept["attributes"]))
    return move


def kept_for_undo(path: Path, store: ObjectStore) -> dict[str, Any]:
    """Keep the present content of a small file in the store; returns what undo needs to restore it."""
    if not is_there(path):
        return {"before": None, "attributes": None}
    return {"before": store.add_bytes(path.read_bytes()), "attributes": Attributes.of(path).to_json()}


def size_and_mtime(path: Path) -> list[int] | None:
    """Size and modification time: whether a file is still the one that was written, without reading it."""
    found = path.lstat() if is_there(path) else None
    return None if found is None else [found.st_size, found.st_mtime_ns]


# --- Undo


def prepare_undo(
    data: Mapping[str, Any],
    facts: Mapping[str, Any],
    newer: tuple[str, ...],
    intent: str,
    workspace: Path,
    store: ObjectStore,
    disk: Disk,
) -> Prepared:
    """Prepare the undo of the rollback whose receipt is `data`; `newer` names checkpoints saved after it."""
    root, place = Path(data["root"]), Path(data["root"]) / data["entry"]
    source, back_dir = Path(data["source"]), Path(data["abandoned_dir"])
    own_dir = root.parent / ABANDONED / intent
    files = tuple(map(StagedFile.from_json, data["files"]))
    disk.make_directory(workspace)
    patched = tuple(PatchedFile.from_json(file) for file in data["patched"])
    twin = place
    if files:
        twin = workspace / "twin" / data["entry"]
        disk.make_directory(twin.parent)
        build_twin(disk, place, twin, {file.path: _restorer(store, file, disk) for file in files})
        _restore_attributes(disk, twin, files, data["directories"])
    moves: list[Move] = []
    for name in reversed(data["abandoned"]):
        if name in newer:
            moves += swap_moves(back_dir / name, root / name, workspace, disk, leftover=own_dir / name)
        else:
            moves.append(move_of(back_dir / name, root / name))
    moves += [move_of(root / name, own_dir / name) for name in newer if name not in data["abandoned"]]
    moves += _pointers_back(data, root, workspace, store, disk)
    overwritten = [copy["name"] for copy in data.get("copies") or () if size_and_mtime(root / copy["name"]) != copy["stamp"]]
    for copy in data.get("copies") or ():
        name = copy["name"]
        leftover = own_dir / name if name in overwritten else workspace / "trash" / name
        disk.make_directory(leftover.parent)
        moves += swap_moves(back_dir / name, root / name, workspace, disk, leftover=leftover)
    together: list[Move] = []
    configs = data.get("configs") or ()
    for config in configs:
        path = Path(config["path"])
        together.append(_put_back(disk, config_part(path, intent), path, config, store))
    if source == place and (patched or together):
        moves += _out_of_sight(place, twin, together, workspace, own_dir, disk)
    else:
        moves += together
        if source != place or files:
            moves += _reinstall(data, twin, place, source, back_dir, workspace, disk)
    if newer:
        disk.make_directory(own_dir)
    if source != place:
        disk.make_directory(source.parent)
    remove = [str(back_dir), str(back_dir.parent)]
    if data.get("contract"):
        moves.append(_contract_back(data["contract"], intent, store, disk))
        remove.append(str(moves[-1].source if data["contract"]["before"] else moves[-1].target))
    restored = source if source != place else place
    attributes = [(str(inside(restored, f.path)), f.attributes) for f in patched]
    if not newer and not overwritten:
        attributes.append((str(root), Attributes.from_json(data["attributes"]["root"])))
    return Prepared(
        intent=intent,
        receipt_kind=Verb.UNDO.receipt,
        moves=tuple(moves),
        patched=tuple(file.backwards() for file in patched),
        place=str(place),
        final=str(restored),
        twin=str(twin),
        checks={str(inside(restored, file.path)): file.before for file in files},
        attributes=tuple(attributes),
        final_attributes=(
            *((str(Path(c["path"]).parent), Attributes.from_json(c["folder"])) for c in configs),
            (str(root.parent), Attributes.from_json(data["attributes"]["parent"])),
        ),
        remove=tuple(remove),
        receipt={
            **facts,
            "intent": intent,
            "root": str(root),
            "entry": data["entry"],
            "returned": list(data["abandoned"]),
            "abandoned": [*newer, *overwritten],
            "abandoned_dir": str(own_dir),
            "restored": [*(f.path for f in files), *(f.path for f in patched), *(c["path"] for c in configs)],
        },
    )


def _reinstall(
    data: Mapping[str, Any],
    twin: Path,
    place: Path,
    source: Path,
    back_dir: Path,
    workspace: Path,
    disk: Disk,
) -> list[Move]:
    """Undo `_install`."""
    if source == place:
        return swap_moves(twin, place, workspace, disk, leftover=None)
    edited = twin != place
    trash = workspace / "trash" / place.name
    if edited:
        disk.make_directory(trash.parent)
    away = trash if edited else source
    if data["displaced"]:
        moves = swap_moves(back_dir / place.name, place, workspace, disk, leftover=away)
    else:
        moves = [move_of(place, away)]
    return [*moves, move_of(twin, source)] if edited else moves


def _pointers_back(data: Mapping[str, Any], root: Path, workspace: Path, store: ObjectStore, disk: Disk) -> list[Move]:
    moves = []
    for number, pointer in enumerate(data["pointers"]):
        path = root / pointer["path"]
        if pointer["link"] is not None:
            move = relinking_move(disk, workspace / f"link-{number}", path, pointer["link"])
            disk.set_attributes(move.source, Attributes.from_json(pointer["attributes"]))
            moves.append(move)
        elif pointer["before"] is None:
            moves.append(discard_move(path, workspace / "trash" / f"pointer-{number}", disk))
        else:
            moves.append(_put_back(disk, workspace / f"pointer-{number}", path, pointer, store))
    return moves


def _contract_back(contract: Mapping[str, Any], intent: str, store: ObjectStore, disk: Disk) -> Move:
    path = Path(contract["path"])
    aside = contract_part(path, intent)
    if contract["before"] is None:
        return Move(kind=MoveKind.DISCARD, source=path, target=aside, inode=inode_of(path) or -1)
    return _put_back(disk, aside, path, contract, store)


def _restorer(store: ObjectStore, file: StagedFile, disk: Disk) -> Writer:
    def write(_source: Path, target: Path, _changed: object) -> None:
        disk.copy_new(store.find(file.before), target)

    return write


def _restore_attributes(
    disk: Disk, twin: Path, files: Iterable[StagedFile], directories: Iterable[tuple[str, list[int]]]
) -> None:
    for file in files:
        disk.set_attributes(inside(twin, file.path), file.attributes)
    for relative, values in directories:
        path = twin / relative
        if path.is_dir():
            disk.set_attributes(path, Attributes.from_json(values))
