"""Reads from disk what a plan needs, and applies a plan.

`plan_from_disk` collects the inputs of a plan; `apply_plan` decides which bytes each file gets and checks that they are
the planned ones. State files are read and written through `rollback.files`. The crash-safe protocol is in
`rollback.transaction.protocol`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    format_of,
    list_checkpoints,
    list_elsewhere,
    list_rolling,
    list_unrecognised,
    say_unrecognised,
)
from rollback.checkpoint.manifest import MANIFEST_NAME, Manifest, digest_file
from rollback.checkpoint.state import CheckpointState
from rollback.checks.remnants import find_remnants
from rollback.disk import RemoteView
from rollback.disk.content import crc32_after, read_pointer, sha256_of, sha256_unchanged
from rollback.disk.durable import REAL_DISK, Attributes, BytePatch, Disk, is_there
from rollback.errors import PlanRefused, Refused, RollbackError
from rollback.files.config_text import ConfigFile, config_kind, replace_config_numbers
from rollback.files.edits import dotted
from rollback.files.json_file import Keys
from rollback.files.state_file import plan_patch, read_state_file, write_edited_copy
from rollback.files.torch_tree import Leaf, LeafKind, TorchFile
from rollback.lr.authority import Evidence
from rollback.lr.effect import FieldEdit, edits_by_file
from rollback.plan.plan import LAST, TRACKER, Plan, compose_plan, copied_from
from rollback.plan.request import Cost, InputFile, RollbackRequest
from rollback.transaction.change import Change, Copy, Receipt, Record
from rollback.transaction.protocol import apply_change
from rollback.transaction.staging import StagedFile, Writer

# From this size on a file is patched in place where its filesystem has no reflinks: copying it and proving the copy reads
# it five times to change eight bytes, which is most of the command's time.
PATCHED_BYTES = 32 << 20
# A larger file is never copied, and fingerprinted by size, time and inode: gigabytes are not even read.
LARGE_BYTES = 128 << 20
PLAN_AGAIN = "make a new plan with `chronicle rollback`"
# deepspeed/runtime/engine.py: a file naming a directory beside it
POINTER_NAMES = ("latest", "latest_universal", TRACKER, LAST)


def file_fingerprint(path: Path) -> str:
    """sha256 of a file, or size, time and inode of a large one (in a store: its ETag); it changes when the file does."""
    mark = None if RemoteView.opened is None else RemoteView.opened.mark(path)
    if mark is not None:
        return "object:" + " ".join(mark)
    found = path.stat()
    if found.st_size > LARGE_BYTES:
        return f"stat:{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"
    return f"sha256:{sha256_unchanged(path)}"


def plan_from_disk(
    request: RollbackRequest,
    chosen: Checkpoint,
    listed: Sequence[Checkpoint],
    state: CheckpointState,
    manifest: Manifest | None,
    *,
    root: Path,
    run: str,
    honours: frozenset[str] = frozenset(),
    config: ConfigFile | None = None,
    evidence: Evidence | None = None,
    cost: Cost | None = None,
    remarks: Sequence[str] = (),
) -> Plan:
    """Plan to go back to `chosen`, one of the `listed` checkpoints of `root`, whose state and manifest were read.

    Reads the fingerprints of the files to be edited, pointer files and symbolic links. Raises `PlanRefused`.
    """
    known = format_of(chosen)
    if not known.editable:
        raise PlanRefused(
            f"`{chosen.path}` is a checkpoint of {chosen.format}: such checkpoints are read and checked, a rollback does not "
            "move or edit them",
            remedy="start the launch from it by the trainer's own option, and change the LR there",
        )
    _refuse_parts(request, chosen)
    edited = {s.file for s in state.schedulers} | {o.file for o in state.optimizers} | set(state.located.values())
    edited |= set() if manifest is None else {MANIFEST_NAME}
    is_here = RemoteView.opened is None  # in a store nothing is moved
    is_loose = known.by_content and is_here
    remnants = find_remnants(root, listed, chosen) if is_here and not request.keep_later else {}
    plan = compose_plan(
        request,
        chosen,
        listed,
        state,
        run=run,
        root=str(root),
        inputs=read_inputs(chosen.folder, sorted(edited)),
        memory=None if manifest is None else manifest.memory,
        has_manifest=manifest is not None,
        pointers=_read_pointers(root),
        links={path.name: os.readlink(path) for path in root.iterdir() if path.is_symlink()},
        honours=honours,
        config=config,
        evidence=evidence,
        newest_copies=[one for one in list_rolling(root) if one.single_file == chosen.single_file] if is_here else (),
        remnants=remnants,
        cost=cost,
        remarks=remarks,
    )
    if is_loose:
        plan = replace(plan, notes=(*plan.notes, *_left_elsewhere(root, plan)))
    plan = replace(plan, notes=(*plan.notes, *_left_beside(root, listed, plan)))
    if not plan.config_edits:
        return plan
    configs = [edit.file for edit in plan.config_edits]
    return replace(plan, inputs=(*plan.inputs, *read_inputs(chosen.folder, configs)))


def _left_elsewhere(root: Path, plan: Plan) -> Iterator[str]:
    """What a script may load of the later steps though their files in `root` are gone: weights in a directory of their own."""
    for folder, names in list_elsewhere(root, [later.name for later in plan.abandon]).items():
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        yield (
            f"not moved: `{os.path.relpath(folder, root)}` holds files of the later steps too ({shown}); if the script takes "
            f"the newest there by itself, move them away: {folder}"
        )


def _left_beside(root: Path, listed: Sequence[Checkpoint], plan: Plan) -> Iterator[str]:
    """What stays in `root` and may be state: a script with one name for its newest state (`ckpt.pt`) may load it."""
    moved = {later.name for later in plan.abandon} | set(plan.copies)
    unknown = [name for name in list_unrecognised(root, listed) if name not in moved]
    if unknown:
        yield f"{say_unrecognised(unknown)}, and they stay: if the script loads one, move it away"


def _refuse_parts(request: RollbackRequest, chosen: Checkpoint) -> None:
    """A step that is several files side by side is moved and edited as a whole; not brought back, nor edited in a store."""
    parts = chosen.names[1:]
    if not parts:
        return
    whole = "let the script save each step in a directory of its own (`step-N/`): such a step is edited and brought back whole"
    if chosen.abandoned is not None:
        raise PlanRefused(
            f"`{chosen.path}` is one of {len(parts) + 1} files of its step, with {', '.join(parts)} beside it, and a rollback "
            "brings one file back",
            f"`chronicle undo` brings all of them back; or {whole}",
        )
    if request.lr_scale is None and request.lr is None and not request.sets:
        return
    if RemoteView.opened is not None:
        raise PlanRefused(
            f"`{chosen.path.name}` is one of {len(parts) + 1} files of its step: in a store the edited copy would lie "
            f"under a new name without {', '.join(parts)}",
            whole,
        )


def _read_pointers(root: Path) -> dict[str, str]:
    """The text of each pointer file in `root`, by name."""
    texts = {name: read_pointer(root / name) for name in POINTER_NAMES if not (root / name).is_symlink()}
    return {name: text for name, text in texts.items() if text is not None}


def newer_checkpoints(receipt: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what was saved after the rollback with this receipt, earliest step first, saves that were cut last.

    They make room for the checkpoints that an undo brings back. Nothing may be left under the name of one of these.
    """
    root = Path(receipt["root"])
    found = list_checkpoints(root, include_abandoned=False)
    whole = sorted(found, key=lambda c: (c.step is None, c.step or 0, c.path.name))
    names = [name for c in whole if c.path.name not in receipt["remaining"] for name in c.names]
    target = next((c for c in found if c.path.name == receipt["entry"]), None)
    names += sorted(find_remnants(root, found, target)) if target is not None else []
    names += [name for name in receipt["abandoned"] if os.path.lexists(root / name)]
    return tuple(name for name in dict.fromkeys(names) if name not in receipt["remaining"])


def read_inputs(folder: Path, files: Sequence[str]) -> tuple[InputFile, ...]:
    """Fingerprints of the files that a plan edits or was made from."""
    return tuple(InputFile(path=name, fingerprint=file_fingerprint(folder / name)) for name in sorted(set(files)))


def apply_plan(
    plan: Plan,
    *,
    objects_dir: Path,
    record: Record,
    contract_path: Path | None = None,
    contract_form: Callable[[dict[str, Any]], dict[str, Any]] = lambda contract: contract,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Apply `plan`. `record` journals an entry durably and returns its id.

    Raises `PlanRefused` when a file changed since the plan was made; otherwise as `protocol.apply_change`.
    """
    source = Path(plan.source)
    folder = source.parent if plan.single_file else source
    refuse_stale(plan, folder)
    by_file = edits_by_file(plan.edits)
    root = Path(plan.root)
    whole = {name: edits for name, edits in by_file.items() if name not in plan.parts}
    patches = plan_patches(folder, whole, reflinks=lambda: disk.can_reflink(root.parent))
    copied = {name: edits for name, edits in by_file.items() if name not in patches and name not in plan.parts}
    writers: dict[str, Writer] = {
        "" if plan.single_file else name: _editor(edits) for name, edits in copied.items()
    }
    if plan.has_manifest and by_file:
        writers[MANIFEST_NAME] = _manifest_writer(plan, patches)
    change = Change(
        root=root,
        entry=plan.entry,
        source=source,
        writers=writers,
        patches={"" if plan.single_file else name: pieces for name, pieces in patches.items()},
        abandon=tuple(later.name for later in plan.abandon),
        pointers={pointer.path: pointer.after.encode() for pointer in plan.pointers if not pointer.is_link},
        copies=_copies(plan, source, by_file),
        configs=dict(_edited_configs(plan)),
        links={pointer.path: pointer.after for pointer in plan.pointers if pointer.is_link},
        contract=None
        if contract_path is None
        else (contract_path, lambda rollback: json.dumps(contract_form(plan.contract(rollback)), indent=1).encode() + b"\n"),
        facts=facts_of(plan),
    )
    return apply_change(change, objects_dir=objects_dir, record=record, disk=disk)


def _copies(plan: Plan, source: Path, by_file: Mapping[str, Sequence[FieldEdit]]) -> dict[str, Copy]:
    """Other names in the root and their new content: parts of the save, edited, and copies of the save, edited or not."""
    made = {name: Copy(source.with_name(name), {"": _editor(by_file[name])}) for name in plan.parts}
    for name in plan.copies:
        if plan.single_file:
            file = copied_from(name, (source.name, *plan.parts))
            made[name] = Copy(source.with_name(file), {"": _editor(by_file.get(file, ()))})
        else:
            writers = {file: _editor(edits) for file, edits in by_file.items()}
            if plan.has_manifest and writers:
                writers[MANIFEST_NAME] = _manifest_writer(plan, {})
            made[name] = Copy(source, writers)
    return made


def edited_copies(plan: Plan, source: Path, target: Path) -> tuple[StagedFile, ...]:
    """Write the edited files of a plan, and their manifest, from the directory `source` to `target`; each is checked."""
    changed: list[StagedFile] = []
    writers = {name: _editor(edits) for name, edits in edits_by_file(plan.edits).items()}
    if plan.has_manifest and writers:
        writers[MANIFEST_NAME] = _manifest_writer(plan, {})  # last: it holds the digests of the others
    for name, writer in writers.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        writer(source / name, target / name, changed)
        before, after = sha256_of(source / name), sha256_of(target / name)
        changed.append(StagedFile(path=name, before=before, after=after, attributes=Attributes.of(source / name)))
    return tuple(changed)


def plan_patches(
    folder: Path, by_file: Mapping[str, Sequence[FieldEdit]], *, reflinks: Callable[[], bool]
) -> dict[str, tuple[BytePatch, ...]]:
    """The files that are patched in place instead of copied, with the bytes of each patch.

    A file below `LARGE_BYTES` is copied where a patch will not do: its new numbers need more bytes, it is text, it has a
    second name, or it may not be written. A larger one is then refused, here or by the preconditions.
    """
    sizes = {name: (folder / name).stat().st_size for name in by_file}
    large = [name for name, size_bytes in sizes.items() if size_bytes >= PATCHED_BYTES]
    if not large or reflinks():
        return {}
    found = {}
    for name in large:
        copied = sizes[name] < LARGE_BYTES
        if copied and ((folder / name).stat().st_nlink > 1 or not os.access(folder / name, os.W_OK)):
            continue
        file = read_state_file(folder / name)
        try:
            found[name] = plan_patch(file, {edit.keys: edit.after for edit in by_file[name]})
        except PlanRefused:
            if not copied:
                raise
    return found


def facts_of(plan: Plan) -> dict[str, Any]:
    """What the journal records of a plan; lineage and LR ledger are computed from it."""
    return {
        "step": plan.step,
        "launch": plan.launch,
        "parent_launch": plan.parent_launch,
        "plan": plan.digest,
        "lr_ratio": plan.expected.ratio,
        "sets": dict(plan.request.sets),
        **_base_lr(plan),
        "lrs": list(plan.expected.lrs),
        **({"accept_unproved": plan.request.accept_unproved} if plan.request.accept_unproved else {}),
        **({"lr_in": list(plan.request.lr_in)} if plan.request.lr_in else {}),
        "edited_fields": len(plan.edits) + len(plan.config_edits),
        "lost_steps": plan.cost.steps,
        "lost_hours": plan.cost.hours,
        "warmup_steps": plan.request.warmup_steps,
        "skip_batches": plan.request.skip_batches,
        "reshuffle": plan.request.reshuffle,
    }


def _base_lr(plan: Plan) -> dict[str, float]:
    """The first group's base LR before and after, where the plan edits one; the LR ledger starts from it."""
    for edit in plan.edits:
        names = [key for key in edit.keys if isinstance(key, str)]
        if names and names[-1] in ("base_lrs", "initial_lr"):
            return {"base_lr_before": float(edit.before), "base_lr_after": float(edit.after)}
    return {}


def refuse_stale(plan: Plan, folder: Path) -> None:
    """Raise `PlanRefused` when a file, pointer or checkpoint changed since the plan was made."""
    for file in plan.inputs:
        path = folder / file.path
        if not path.is_file():
            raise PlanRefused(f"`{path}` was removed after the plan was made", PLAN_AGAIN)
        if file_fingerprint(path) != file.fingerprint:
            raise PlanRefused(f"`{path}` was changed after the plan was made", PLAN_AGAIN)
    root = Path(plan.root)
    for pointer in plan.pointers:
        text = read_pointer(root / pointer.path)
        if text != pointer.before:
            raise PlanRefused(
                f"pointer `{root / pointer.path}` holds {text!r}: the plan expects {pointer.before!r}", PLAN_AGAIN
            )
    for later in plan.abandon:
        if not is_there(root / later.name):
            raise PlanRefused(f"`{root / later.name}` was removed after the plan was made", PLAN_AGAIN)


def _edited_configs(plan: Plan) -> Iterator[tuple[Path, bytes]]:
    """The new text of each config file; `refuse_stale` has checked that its old text is the planned one."""
    for name, edits in edits_by_file(plan.config_edits).items():
        text = Path(name).read_bytes().decode("utf-8")  # line ends as they are
        values = {edit.keys: edit.after for edit in edits}
        yield Path(name), replace_config_numbers(text, config_kind(name) or "json", values).encode()


def _editor(edits: Sequence[FieldEdit]) -> Writer:
    """Writes the edited copy of one file and checks it; the original is read once for both."""

    def write(source: Path, target: Path, _changed: Sequence[StagedFile]) -> None:
        if not edits:
            shutil.copyfile(source, target)
            return
        original = read_state_file(source)
        for edit in edits:
            found = original.get(edit.keys)
            if found != edit.before:
                raise PlanRefused(f"`{source}`: {edit.field} is {found!r}, planned: {edit.before!r}", PLAN_AGAIN)
        write_edited_copy(original, {edit.keys: edit.after for edit in edits}, target)
        _check_edited(original, target, edits)

    return write


_NOT_AS_PLANNED = (
    "nothing was changed; `chronicle verify --full` tells whether the file or the disk is damaged, else go back without "
    "changing the LR and report this file"
)


def _check_edited(original: TorchFile, edited: Path, edits: Sequence[FieldEdit]) -> None:
    """Read the new file and compare every number: only the planned ones may differ."""
    wanted = {edit.keys: edit.after for edit in edits}
    for before, after in zip(original.leaves(), read_state_file(edited).leaves(), strict=True):
        if before.keys != after.keys or (before.kind != after.kind and not _now_float(before, after, wanted)):
            raise RollbackError(
                f"`{edited.name}` reads back with another structure: expected that of `{original.path}`", _NOT_AS_PLANNED
            )
        if before.keys in wanted:
            if not _stored_as(wanted[before.keys], after.value):
                raise RollbackError(
                    f"`{edited.name}`: {dotted(before.keys)} reads back as {after.value!r}: expected {wanted[before.keys]!r}",
                    _NOT_AS_PLANNED,
                )
        elif (
            isinstance(before.value, int | float | str) and before.value != after.value and before.value == before.value
        ):
            raise RollbackError(
                f"`{edited.name}`: {dotted(before.keys)} changed: it is not part of the plan", _NOT_AS_PLANNED
            )


def _now_float(before: Leaf, after: Leaf, wanted: Mapping[Keys, float | int]) -> bool:
    """Whether an LR that was saved as an integer is a float now, as planned."""
    return before.keys in wanted and (before.kind, after.kind) == (LeafKind.INT, LeafKind.FLOAT)


def _stored_as(wanted: float | int, found: object) -> bool:
    """Whether two numbers are equal, up to the precision of a float32 tensor."""
    return isinstance(found, int | float) and (found == wanted or abs(found - wanted) <= 1e-6 * abs(wanted))


def _manifest_writer(plan: Plan, patches: Mapping[str, Sequence[BytePatch]]) -> Writer:
    def write(source: Path, target: Path, changed: Sequence[StagedFile]) -> None:
        record = json.loads(source.read_bytes())
        if not isinstance(record, dict):
            raise Refused(
                f"`{source}` is not a manifest: expected a JSON object", remedy="write it again with `chronicle verify --write`"
            )
        digests: dict[str, tuple[str | None, str | None]] = {}
        for file in changed:
            digests[file.path] = digest_file(target.parent / file.path)
        sizes = {name: (target.parent / name).stat().st_size for name in (*digests, *patches)}
        for name, pieces in patches.items():
            digests[name] = None, _crc_after(record, name, sizes[name], pieces)
        text = json.dumps(manifest_after(record, plan, digests, sizes), indent=1, default=float) + "\n"
        target.write_text(text, encoding="utf-8")

    return write


def _crc_after(record: Mapping[str, Any], name: str, size_bytes: int, pieces: Sequence[BytePatch]) -> str | None:
    old = next((file.get("crc32") for file in record.get("files", ()) if file.get("path") == name), None)
    if old is None:
        return None
    return f"{crc32_after(int(old, 16), size_bytes, [(p.offset, p.old, p.new) for p in pieces]):08x}"


def manifest_after(
    record: Mapping[str, Any],
    plan: Plan,
    digests: Mapping[str, tuple[str | None, str | None]],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """The manifest of the edited checkpoint: updated are the digests of the edited files and the expected LRs. Pure.

    A patched file loses its sha256, because a new one would need all of its bytes; its CRC-32 follows from the patch.
    """
    files = [
        file | {"size": sizes[file["path"]], "sha256": digests[file["path"]][0], "crc32": digests[file["path"]][1]}
        if file.get("path") in digests
        else file
        for file in record.get("files", ())
    ]
    memory = record.get("memory")
    return {**record, "files": files, "memory": memory if memory is None else memory_after(memory, plan)}


def memory_after(memory: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What the guard recorded at save, with the edited LRs in place of the old ones. Pure."""
    expected, ratio = plan.expected, plan.expected.ratio
    after = dict(memory)
    groups = [dict(group) for group in memory.get("groups") or ()]
    if len(groups) == len(expected.lrs):
        for group, lr, initial in zip(groups, expected.lrs, expected.initial_lrs, strict=True):
            group["lr"], group["initial_lr"] = lr, initial
            for name in ("max_lr", "min_lr"):
                if group.get(name) is not None and ratio is not None:
                    group[name] *= ratio
        after["groups"] = groups
    schedulers = [dict(scheduler) for scheduler in memory.get("schedulers") or ()]
    for scheduler, planned in zip(schedulers, plan.schedulers, strict=False):
        if ratio is not None:
            scheduler["last_lr"] = [lr * ratio for lr in scheduler.get("last_lr") or ()]
        elif plan.request.sets:
            scheduler["last_epoch"], scheduler["step_count"] = planned["last_epoch"], planned["step_count"]
            scheduler["last_lr"] = list(expected.lrs)
    if schedulers:
        after["schedulers"] = schedulers
    rows = memory.get("next_lrs")
    if rows is not None and ratio != 1.0:
        keeps = ratio is not None and memory.get("lr_source") != "manual"
        after["next_lrs"] = [[lr * ratio for lr in row] for row in rows] if keeps else None
    return after
