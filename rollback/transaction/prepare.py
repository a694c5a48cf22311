"""Everything a transaction will bring into sight, prepared where no loader looks, and the list of moves that does it.

Durable when it returns; nothing visible has changed. The order of the moves is part of the promise: at every point a
loader that takes the newest checkpoint, one that follows a pointer and one that is given a path see before or after.

    rollback   the twin takes its place, its copies, pointers, later checkpoints away (earliest first), configs, contract
    undo       later checkpoints back (latest first), newer ones away, pointers, copies, the original takes its place,
               configs, contract
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollback.transaction.change import ABANDONED, Change, PatchedFile, Prepared, config_part, contract_part
from rollback.disk.durable import Attributes, Disk, is_there
from rollback.transaction.making_moves import (
    discard_move,
    kept_for_undo,
    move_of,
    relinking_move,
    replacement_move,
    stamp_of,
    swap_moves,
)
from rollback.transaction.moves import Move
from rollback.disk.objects import ObjectStore, sha256_of
from rollback.transaction.staging import StagedFile, Writer, build_twin


def prepare_rollback(
    change: Change,
    intent: str,
    workspace: Path,
    store: ObjectStore,
    check_twin: Callable[[Path], None],
    disk: Disk,
) -> Prepared:
    attributes = {"root": Attributes.of(change.root).to_json(), "parent": Attributes.of(change.parent).to_json()}
    abandoned_dir = change.parent / ABANDONED / intent
    place, source, twin = change.place, change.source, change.source
    displaced = source != place and is_there(place)
    directories = _directory_attributes(source)
    disk.make_directory(workspace)
    files: tuple[StagedFile, ...] = ()
    patched = _patched_files(change, store)
    if change.writers:  # else there is no twin: a patched file stays the inode it is
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
        path = change.root / name
        moves.append(replacement_move(disk, workspace / f"pointer-{number}", path, content))
        if path.is_file():
            disk.set_attributes(
                moves[-1].source, replace(Attributes.of(path), mtime_ns=moves[-1].source.lstat().st_mtime_ns)
            )
        pointers.append({"path": name, "link": None} | kept_for_undo(path, store))
    for number, (name, points_to) in enumerate(change.links.items()):
        path = change.root / name
        pointers.append(
            {"path": name, "link": os.readlink(path), "before": None, "attributes": Attributes.of(path).to_json()}
        )
        moves.append(relinking_move(disk, workspace / f"link-{number}", path, points_to))
    copies = []
    for number, (name, writer) in enumerate(change.copies.items()):
        made = _copy(disk, writer, change, workspace / f"copy-{number}", change.root / name)
        moves += swap_moves(change.root, made, change.root / name, workspace, disk, leftover=abandoned_dir / name)
        copies.append({"name": name, "stamp": stamp_of(made)})
    moves += [move_of(change.root / name, abandoned_dir / name) for name in change.abandon]
    if any(move.target.parent == abandoned_dir for move in moves):
        disk.make_directory(abandoned_dir)
    configs = []
    for path, content in change.configs.items():
        kept = kept_for_undo(path, store) | {"folder": Attributes.of(path.parent).to_json()}
        configs.append({"path": str(path), "after": store.add_bytes(content)} | kept)
        moves.append(replacement_move(disk, config_part(path, intent), path, content))
        disk.set_attributes(
            moves[-1].source, replace(Attributes.of(path), mtime_ns=moves[-1].source.lstat().st_mtime_ns)
        )
    contract: dict[str, Any] | None = None
    if change.contract is not None:
        path, render = change.contract
        contract = {"path": str(path)} | kept_for_undo(path, store)
        disk.make_directory(path.parent)
        moves.append(replacement_move(disk, contract_part(path, intent), path, render(intent)))
    return Prepared(
        intent=intent,
        receipt_kind="rollback.receipt",
        moves=tuple(moves),
        patched=patched,
        hides_root=bool(patched or configs),
        place=str(place),
        final=str(place),
        twin=str(twin),
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
    root: Path, twin: Path, place: Path, source: Path, abandoned_dir: Path | None, workspace: Path, disk: Disk
) -> list[Move]:
    """Bring the twin (or an abandoned checkpoint itself) to its place; what was there goes where it belongs."""
    if not is_there(place):
        moves = [move_of(twin, place)]
    else:
        leftover = None if abandoned_dir is None else abandoned_dir / place.name
        moves = swap_moves(root, twin, place, workspace, disk, leftover=leftover)
    if source not in (place, twin):
        moves.append(discard_move(source, workspace / "trash" / source.name, disk))
    return moves


def _directory_attributes(source: Path) -> list[tuple[str, list[int]]]:
    """Attributes of every directory of the checkpoint, innermost first, so that setting them keeps the outer times."""
    if not source.is_dir():
        return []
    found = [path for path in source.rglob("*") if path.is_dir() and not path.is_symlink()]
    ordered = [*sorted(found, key=lambda path: -len(path.parts)), source]
    return [(path.relative_to(source).as_posix(), Attributes.of(path).to_json()) for path in ordered]


def _patched_files(change: Change, store: ObjectStore) -> tuple[PatchedFile, ...]:
    """The patches with what undoing them needs; the old bytes also go into the store, as the originals of others do."""
    files = []
    for name, patches in change.patches.items():
        path = change.source / name if name else change.source
        files.append(PatchedFile(path=name, patches=patches, attributes=Attributes.of(path)))
        store.add_bytes(json.dumps(files[-1].to_json()).encode())
    return tuple(files)


def _copy(disk: Disk, writer: Writer, change: Change, made: Path, present: Path) -> Path:
    """A further copy of the checkpoint, with the mode and owner of the one that it is to replace."""
    disk.point("open", made)
    writer(change.source, made, ())
    attributes = Attributes.of(made)
    disk.set_attributes(
        made, replace(Attributes.of(present), atime_ns=attributes.atime_ns, mtime_ns=attributes.mtime_ns)
    )
    disk.sync_file(made)
    disk.sync_directory(made.parent)
    return made
