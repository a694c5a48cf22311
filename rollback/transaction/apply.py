"""Applies a plan: which bytes each file gets, and the check that they are the planned ones.

State files are read and written through `rollback.files`. The crash-safe protocol is in
`rollback.transaction.protocol`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollback.checkpoint.formats.format import read_pointer
from rollback.checkpoint.manifest import MANIFEST_NAME, digest_file
from rollback.disk.checksums import crc32_after
from rollback.disk.durable import REAL_DISK, Attributes, Disk, is_there
from rollback.disk.objects import sha256_of
from rollback.errors import PlanRefused, Refused, RollbackError
from rollback.files.json_file import replace_numbers
from rollback.files.state_file import read_state_file
from rollback.files.torch_edit import plan_patch, write_edited_copy
from rollback.files.torch_tree import TorchFile
from rollback.lr.effect import FieldEdit
from rollback.plan.plan import Plan
from rollback.plan.request import InputFile
from rollback.transaction.change import Change, Patch, Receipt
from rollback.transaction.protocol import Record, apply_change
from rollback.transaction.staging import StagedFile, Writer

# Above this a file is patched in place where its filesystem has no reflinks, and told apart by size, time and inode:
# copying or reading gigabytes for the sake of eight bytes is what this library is there to avoid.
LARGE_BYTES = 128 << 20


def file_fingerprint(path: Path) -> str:
    """What tells whether a file is still the one a plan was made from."""
    found = path.stat()
    if found.st_size > LARGE_BYTES:
        return f"stat:{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"
    return f"sha256:{sha256_of(path)}"


def read_inputs(folder: Path, files: Sequence[str]) -> tuple[InputFile, ...]:
    """Fingerprints of the files a plan edits or was made from."""
    return tuple(InputFile(path=name, fingerprint=file_fingerprint(folder / name)) for name in sorted(set(files)))


def apply_plan(
    plan: Plan,
    *,
    objects_dir: Path,
    record: Record,
    contract_path: Path | None = None,
    disk: Disk = REAL_DISK,
) -> Receipt:
    """Carry out `plan`, and nothing else.

    Raises `PlanRefused` when a file changed since the plan was made; otherwise as `transaction.apply_change`.
    """
    source = Path(plan.source)
    folder = source.parent if plan.single_file else source
    refuse_stale(plan, folder)
    by_file: dict[str, list[FieldEdit]] = {}
    for edit in plan.edits:
        by_file.setdefault(edit.file, []).append(edit)
    root = Path(plan.root)
    patches = plan_patches(folder, by_file, reflinks=lambda: _has_reflinks(root.parent, disk))
    copied = {name: edits for name, edits in by_file.items() if name not in patches}
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
        copies={name: _editor(plan.edits) for name in plan.copies},
        configs=dict(_edited_configs(plan)),
        links={pointer.path: pointer.after for pointer in plan.pointers if pointer.is_link},
        contract=None
        if contract_path is None
        else (contract_path, lambda rollback: json.dumps(plan.contract(rollback), indent=1).encode() + b"\n"),
        facts=facts_of(plan),
    )
    return apply_change(change, objects_dir=objects_dir, record=record, disk=disk)


def plan_patches(
    folder: Path, by_file: Mapping[str, Sequence[FieldEdit]], *, reflinks: Callable[[], bool]
) -> dict[str, tuple[Patch, ...]]:
    """The files that are patched in place rather than copied, with their bytes."""
    large = [name for name in by_file if (folder / name).stat().st_size >= LARGE_BYTES]
    if not large or reflinks():
        return {}
    found = {}
    for name in large:
        file = read_state_file(folder / name)
        pieces = plan_patch(file, {edit.keys: edit.after for edit in by_file[name]})
        found[name] = tuple(Patch(offset=p.offset, old=p.old, new=p.new) for p in pieces)
    return found


def _has_reflinks(directory: Path, disk: Disk) -> bool:
    probe, attributes = directory / f".chronicle-probe-{os.getpid()}", Attributes.of(directory)
    try:
        disk.point("mkdir", probe)
        probe.mkdir()
        return disk.can_reflink(probe)
    except OSError:
        return False  # the preconditions will say what is wrong with this directory
    finally:
        if probe.is_dir():
            disk.remove_tree(probe)
            disk.set_attributes(directory, attributes)


def facts_of(plan: Plan) -> dict[str, Any]:
    """What journal, lineage and LR ledger need to know of a plan."""
    return {
        "step": plan.step,
        "launch": plan.launch,
        "parent_launch": plan.parent_launch,
        "plan": plan.digest,
        "lr_ratio": plan.expected.ratio,
        "sets": dict(plan.request.sets),
        **_base_lr(plan),
        "lrs": list(plan.expected.lrs),
        "edited_fields": len(plan.edits) + len(plan.config_edits),
        "lost_steps": plan.cost.steps,
        "lost_hours": plan.cost.hours,
        "warmup_steps": plan.request.warmup_steps,
        "skip_batches": plan.request.skip_batches,
        "reshuffle": plan.request.reshuffle,
    }


def _base_lr(plan: Plan) -> dict[str, float]:
    """The first group's base LR before and after, where the plan edits one: an anchor that no ratio gives."""
    for edit in plan.edits:
        names = [key for key in edit.keys if isinstance(key, str)]
        if names and names[-1] in ("base_lrs", "initial_lr"):
            return {"base_lr_before": float(edit.before), "base_lr_after": float(edit.after)}
    return {}


def refuse_stale(plan: Plan, folder: Path) -> None:
    """Raise `PlanRefused` when what the plan was made from is not what lies there now."""
    for file in plan.inputs:
        path = folder / file.path
        if not path.is_file():
            raise PlanRefused(f"`{path}` is gone since the plan was made", remedy="plan again")
        if file_fingerprint(path) != file.fingerprint:
            raise PlanRefused(f"`{path}` changed since the plan was made", remedy="plan again")
    root = Path(plan.root)
    for pointer in plan.pointers:
        text = read_pointer(root / pointer.path)
        if text != pointer.before:
            raise PlanRefused(
                f"pointer `{root / pointer.path}` says {text!r}, planned: {pointer.before!r}", "plan again"
            )
    for later in plan.abandon:
        if not is_there(root / later.name):
            raise PlanRefused(f"`{root / later.name}` is gone since the plan was made", remedy="plan again")


def _edited_configs(plan: Plan) -> Iterator[tuple[Path, bytes]]:
    """The text of every config with its numbers replaced; `refuse_stale` has seen that it is the planned one."""
    for name in dict.fromkeys(edit.file for edit in plan.config_edits):
        text = Path(name).read_text(encoding="utf-8")
        values = {edit.keys: edit.after for edit in plan.config_edits if edit.file == name}
        yield Path(name), replace_numbers(text, values).encode()


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
                raise PlanRefused(
                    f"`{source}`: {'.'.join(map(str, edit.keys))} is {found!r}, planned: {edit.before!r}", "plan again"
                )
        write_edited_copy(original, {edit.keys: edit.after for edit in edits}, target)
        _check_edited(original, target, edits)

    return write


def _check_edited(original: TorchFile, edited: Path, edits: Sequence[FieldEdit]) -> None:
    """Read the new file and compare every number: the planned ones changed, no other did."""
    wanted = {edit.keys: edit.after for edit in edits}
    for before, after in zip(original.leaves(), read_state_file(edited).leaves(), strict=True):
        if before.keys != after.keys or before.kind != after.kind:
            raise RollbackError(f"`{edited.name}` reads back with another structure than `{original.path}`")
        if before.keys in wanted:
            if not _stored_as(wanted[before.keys], after.value):
                raise RollbackError(f"`{edited.name}`: {before.keys} reads back as {after.value!r}")
        elif (
            isinstance(before.value, int | float | str) and before.value != after.value and before.value == before.value
        ):
            raise RollbackError(f"`{edited.name}`: {before.keys} changed and was not planned to")


def _stored_as(wanted: float | int, found: object) -> bool:
    """Equal, or equal up to the precision of a narrower storage (an LR kept as a float32 tensor)."""
    return isinstance(found, int | float) and (found == wanted or abs(found - wanted) <= 1e-6 * abs(wanted))


def _manifest_writer(plan: Plan, patches: Mapping[str, Sequence[Patch]]) -> Writer:
    def write(source: Path, target: Path, changed: Sequence[StagedFile]) -> None:
        record = json.loads(source.read_bytes())
        if not isinstance(record, dict):
            raise Refused(f"`{source}` is no manifest", remedy="write it anew with `chronicle manifest`")
        digests: dict[str, tuple[str | None, str | None]] = {}
        for file in changed:
            digests[file.path] = digest_file(target.parent / file.path)
        sizes = {name: (target.parent / name).stat().st_size for name in (*digests, *patches)}
        for name, pieces in patches.items():
            digests[name] = None, _crc_after(record, name, sizes[name], pieces)
        text = json.dumps(manifest_after(record, plan, digests, sizes), indent=1, default=float) + "\n"
        target.write_text(text, encoding="utf-8")

    return write


def _crc_after(record: Mapping[str, Any], name: str, size_bytes: int, pieces: Sequence[Patch]) -> str | None:
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
    """The manifest that belongs to the edited checkpoint: new digests, and the LRs that memory will have. Pure.

    A patched file has no new sha256, that would mean reading it; its CRC-32 follows from the change alone.
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
    """What the guard recorded, as if the run had had the edited LRs all along. Pure."""
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
