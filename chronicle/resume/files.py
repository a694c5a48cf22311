"""The guard's files: the manifest it writes into a checkpoint, and the checks of `rollback` turned into the guard's own.

Everything about formats is `rollback`'s; this module only decides which findings forbid a resume. A checkpoint may be
one level above what the framework was told to write (`opt_step-30500/accelerator_state`): the manifest lies where
`rollback` lists checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume.memory import Memory
from chronicle.resume.checks.check import Check, failed
from rollback.checkpoint.listing import open_checkpoint
from rollback.errors import RollbackError, UnknownFormat, UnreadableFile
from rollback.findings import Severity
from rollback.checkpoint.layout import ACCELERATE_STATE_DIR
from rollback.checkpoint.manifest import ManifestFile, digest_file, read_manifest, replace_manifest, write_manifest
from rollback.checks.verify import verify_checkpoint

__all__ = ["check_digest", "check_files", "checkpoint_root", "read_memory", "write_digests", "write_first_manifest"]


def checkpoint_root(directory: Path) -> Path:
    """The checkpoint that a saved or loaded directory belongs to: itself, or the directory above `accelerator_state`."""
    absolute = Path(directory).absolute()
    return absolute.parent if absolute.name == ACCELERATE_STATE_DIR else absolute


def write_first_manifest(
    root: Path, *, step: int | None, memory: Mapping[str, Any] | None, run: str | None, launch: int | None
) -> None:
    """Seal a checkpoint right after its save: names, sizes and memory now, file digests later (`digests: pending`)."""
    write_manifest(root, step=_step_in_name(root, step), memory=memory, run=run, launch=launch, digests=False)


def _step_in_name(root: Path, counted: int | None) -> int | None:
    """The step the checkpoint's name says, where it is the counted one or its neighbour; else the counted one.

    Some trainers name a checkpoint by a counter that is one behind the optimizer's (the seed's): that is a layout.
    """
    try:
        named = open_checkpoint(root)
    except RollbackError:
        return counted
    if named.step is None or named.step_source != "name":
        return counted
    return named.step if counted is None or abs(named.step - counted) <= 1 else counted


def write_digests(root: Path) -> None:
    """Complete the manifest with digests of the files it lists; nothing is written when the checkpoint is already gone."""
    manifest = read_manifest(root)
    if manifest is None:
        return
    files: list[ManifestFile] = []
    for file in manifest.files:
        try:
            sha256, crc32 = digest_file(root / file.path)
        except UnreadableFile:
            return  # rotated away in the meantime
        files.append(replace(file, sha256=sha256, crc32=crc32))
    replace_manifest(root, replace(manifest, files=tuple(files), digests="complete"))


def read_memory(root: Path) -> Memory | None:
    """The memory a checkpoint was saved with; None without manifest or memory. Raises `RollbackError` when damaged."""
    manifest = read_manifest(root)
    if manifest is None or manifest.memory is None:
        return None
    return Memory.from_json(manifest.memory)


def check_digest(path: Path, expected: str | None) -> list[Check]:
    """A checkpoint that is one file against the digest in the journal; None: it is not known (yet)."""
    if expected is None or not path.is_file():
        return []
    try:
        found, _ = digest_file(path)
    except UnreadableFile as problem:
        return [failed("checkpoint files", "F2", found=problem.message, where=str(path), cause=problem.remedy or "")]
    if found == expected:
        return []
    cause = "the file was changed after it was saved, and by no rollback"
    return [failed("checkpoint file", "F3", expected=expected[:16], found=found[:16], where=str(path), cause=cause)]


def check_files(root: Path) -> list[Check]:
    """F1–F10 over names, sizes, contents and counters; ERROR findings forbid the resume, and so does a stray."""
    try:
        checkpoint = open_checkpoint(root)
        findings = verify_checkpoint(checkpoint, full=True)
    except UnknownFormat:
        return []  # a writer `rollback` does not know: memory is still compared
    except RollbackError as problem:
        cause = problem.remedy or ""
        return [failed("checkpoint files", "F2", found=problem.message, where=str(root), cause=cause)]
    return [
        failed(
            f"checkpoint file {finding.path}",
            finding.check,
            found=finding.message,
            where=str(root),
            cause=finding.remedy or "",
        )
        for finding in findings
        if finding.severity is Severity.ERROR
    ]
