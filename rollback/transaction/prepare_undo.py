"""The way back of a rollback, prepared where no loader looks: `rollback.transaction.prepare` says the order of the moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollback.transaction.change import ABANDONED, PatchedFile, Prepared, config_part, contract_part
from rollback.disk.durable import Attributes, Disk
from rollback.transaction.making_moves import (
    discard_move,
    move_of,
    relinking_move,
    replacement_move,
    stamp_of,
    swap_moves,
)
from rollback.transaction.moves import Kind, Move, inode_of
from rollback.disk.objects import ObjectStore
from rollback.transaction.staging import StagedFile, Writer, build_twin


def prepare_undo(
    data: Mapping[str, Any],
    facts: Mapping[str, Any],
    newer: tuple[str, ...],
    intent: str,
    workspace: Path,
    store: ObjectStore,
    disk: Disk,
) -> Prepared:
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
            moves += swap_moves(root, back_dir / name, root / name, workspace, disk, leftover=own_dir / name)
        else:
            moves.append(move_of(back_dir / name, root / name))
    moves += [move_of(root / name, own_dir / name) for name in newer if name not in data["abandoned"]]
    moves += _pointers_back(data, root, workspace, store, disk)
    overwritten = [copy["name"] for copy in data.get("copies") or () if stamp_of(root / copy["name"]) != copy["stamp"]]
    for copy in data.get("copies") or ():
        name = copy["name"]
        leftover = own_dir / name if name in overwritten else workspace / "trash" / name
        disk.make_directory(leftover.parent)
        moves += swap_moves(root, back_dir / name, root / name, workspace, disk, leftover=leftover)
    if source != place or files:
        moves += _reinstall(data, root, twin, place, source, back_dir, workspace, disk)
    if newer:
        disk.make_directory(own_dir)
    configs = data.get("configs") or ()
    for config in configs:
        path = Path(config["path"])
        moves.append(replacement_move(disk, config_part(path, intent), path, store.find(config["before"]).read_bytes()))
        disk.set_attributes(moves[-1].source, Attributes.from_json(config["attributes"]))
    if source != place:
        disk.make_directory(source.parent)
    remove = [str(back_dir), str(back_dir.parent)]
    if data.get("contract"):
        moves.append(_contract_back(data["contract"], intent, store, disk))
        remove.append(str(moves[-1].source if data["contract"]["before"] else moves[-1].target))
    restored = source if source != place else place
    attributes = [(str(restored / f.path if f.path else restored), f.attributes) for f in patched]
    if not newer and not overwritten:
        attributes.append((str(root), Attributes.from_json(data["attributes"]["root"])))
    return Prepared(
        intent=intent,
        receipt_kind="undo.receipt",
        moves=tuple(moves),
        patched=tuple(file.backwards() for file in patched),
        hides_root=bool(patched or configs),
        place=str(place),
        final=str(restored),
        twin=str(twin),
        checks={str(restored / file.path if file.path else restored): file.before for file in files},
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
        return swap_moves(root, twin, place, workspace, disk, leftover=None)
    edited = twin != place
    trash = workspace / "trash" / place.name
    if edited:
        disk.make_directory(trash.parent)
    away = trash if edited else source
    if data["displaced"]:
        moves = swap_moves(root, back_dir / place.name, place, workspace, disk, leftover=away)
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
            content = store.find(pointer["before"]).read_bytes()
            move = replacement_move(disk, workspace / f"pointer-{number}", path, content)
            disk.set_attributes(move.source, Attributes.from_json(pointer["attributes"]))
            moves.append(move)
    return moves


def _contract_back(contract: Mapping[str, Any], intent: str, store: ObjectStore, disk: Disk) -> Move:
    path = Path(contract["path"])
    aside = contract_part(path, intent)
    if contract["before"] is None:
        return Move(kind=Kind.DISCARD, source=path, target=aside, inode=inode_of(path) or -1)
    move = replacement_move(disk, aside, path, store.find(contract["before"]).read_bytes())
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
