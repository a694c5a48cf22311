"""Verifies a checkpoint: checks F1 to F11. Each check returns all of its findings.

    F1  closed inventory: no stray, nothing missing from or beyond the manifest
    F2  complete: what its own save wrote is there (F1), and what those files call for; without a manifest, the usual layout
    F3  intact: file structure; with `full` the checksums of every record and of the manifest
    F4  steps, schedulers and shards agree        F5  LRs agree          F6  the optimizer has its state
    F7  random states, one per rank               F8  data position      F9  pointers name a checkpoint
    F10 retention: at least two other checkpoints that pass
    F11 sound: no NaN in weights and moments, by the guard's word in the manifest; with `full` by reading them (`values`)

F1 and F2 look at names and sizes only. The state of a checkpoint with strays is not read, because it is unclear which
file a loader would take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollback.checkpoint.formats.format import CheckpointFormat
from rollback.checkpoint.layout import Checkpoint, Role, StateFile
from rollback.checkpoint.listing import format_of, read_state
from rollback.checkpoint.manifest import (
    Manifest,
    ManifestFile,
    OtherVersion,
    digest_file,
    listed_entries,
    read_manifest,
)
from rollback.checkpoint.state import CheckpointState
from rollback.checks.files import check_moments, checksum_findings, damage, examine_file
from rollback.checks.state import check_state
from rollback.checks.values import check_values
from rollback.disk.content import ByteProgress, ChecksumTarget, wrong_checksums
from rollback.errors import (
    WRONG_FILE,
    Finding,
    Incomplete,
    Refused,
    RollbackError,
    Severity,
    UnknownFormat,
    UnreadableFile,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

FATAL = ("F1", "F2", "F3", "F11")  # an ERROR of these checks makes a checkpoint unusable
MOMENT_FILES = 8  # sampled without `full`
QUARANTINE = "move it out of the checkpoint, or let `chronicle verify --quarantine` do it"


@dataclass(frozen=True, slots=True)
class Verification:
    """What a verification found, and the state it read on the way: None where strays or damage forbid reading it."""

    findings: list[Finding]
    state: CheckpointState | None


def verify_checkpoint(
    checkpoint: Checkpoint,
    *,
    full: bool = False,
    executor: Executor | None = None,
    progress: ByteProgress | None = None,
) -> list[Finding]:
    """The findings about `checkpoint`, worst first.

    `full` reads every byte and compares checksums, on several cores with an `executor`; `progress` gets the number of
    bytes read. Raises `UnknownFormat`.
    """
    return verify_and_read(checkpoint, full=full, executor=executor, progress=progress).findings


def verify_and_read(
    checkpoint: Checkpoint,
    *,
    full: bool = False,
    executor: Executor | None = None,
    progress: ByteProgress | None = None,
) -> Verification:
    """As `verify_checkpoint`; the state is returned too, so that a caller who needs it does not read the files again."""
    findings = check_names(checkpoint)
    manifest, problem = _manifest_of(checkpoint)
    findings += problem
    if manifest is not None:
        findings += check_sound(manifest)
        findings += compare_manifest(checkpoint.folder, manifest, full=full, executor=executor, progress=progress)
    covered = full and manifest is not None and manifest.digests == "complete"
    findings += _check_files(checkpoint.files, checkpoint, full and not covered, executor, progress)
    state = None
    if not checkpoint.strays:
        state, more = _check_contents(checkpoint, findings, full)
        findings += more
    return Verification(sorted(findings, key=lambda f: (_ORDER[f.severity], f.check, f.path)), state)


_ORDER = {Severity.ERROR: 0, Severity.WARN: 1, Severity.INFO: 2}


def passes(findings: Sequence[Finding]) -> bool:
    """Whether none of `findings` is an ERROR, which forbids resuming from the checkpoint."""
    return not any(finding.severity is Severity.ERROR for finding in findings)


def refuse_unusable(checkpoint: Checkpoint, findings: Sequence[Finding]) -> None:
    """Raise `Incomplete` for an ERROR that a rollback cannot repair: F1 to F3, or a file of another step."""
    errors = [f for f in findings if f.severity is Severity.ERROR and (f.check in FATAL or f.remedy == WRONG_FILE)]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        named = "" if errors[0].message.startswith(f"`{errors[0].path}`") else f"`{errors[0].path}`: "
        raise Incomplete(
            f"checkpoint `{checkpoint.path}`: {named}{errors[0].message}{more}",
            remedy=errors[0].remedy or "`chronicle verify` lists all findings; go back to another checkpoint",
        )


def check_names(checkpoint: Checkpoint) -> list[Finding]:
    """F1 and F2 from names alone: strays and missing files."""
    known = format_of(checkpoint)
    strays = [
        Finding(
            "F1",
            Severity.ERROR,
            path,
            f"stray file: a loader could load it as state, but {known.name} writes no file of this name",
            QUARANTINE,
        )
        for path in checkpoint.strays
    ]
    return strays + known.missing(checkpoint.files) + _against_layout(known, checkpoint)


STATE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".distcp", ".npz", ".h5", ".msgpack")
HELD_ELSEWHERE = ("model.safetensors", "optimizer.bin", "optimizer.pt")  # what hooks of a script save under other names


def _against_layout(known: CheckpointFormat, checkpoint: Checkpoint) -> list[Finding]:
    """F2 where files of the usual layout are not there.

    What a complete checkpoint is, its own save has shown: then this is only said. Where no save told, a file of an unknown
    name may hold what is missing; only without such a file is it missing at all.
    """
    absent = known.usual(checkpoint.files)
    if checkpoint.written is not None:
        said = "is usual here, and this checkpoint's own save wrote none: the script saves it under another name, or not at all"
        return [f._replace(severity=Severity.INFO, message=f"`{f.path}` {said}", remedy=None) for f in absent]
    others = [f.path for f in checkpoint.files if f.path.endswith(STATE_SUFFIXES) and known.role_of(f.path) is None]
    if not others:
        return absent
    maybe = f"; `{others[0]}` may hold it, which {known.name} does not write"
    return [
        f._replace(severity=Severity.WARN, message=f.message + maybe, remedy=None) if f.path in HELD_ELSEWHERE else f
        for f in absent
    ]


def root_stray_findings(names: Sequence[str]) -> list[Finding]:
    """F1 for files beside the checkpoints, which a loader that looks for the latest may take."""
    return [
        Finding(
            "F1",
            Severity.WARN,
            name,
            "stray file among the checkpoints: a loader that looks for the latest may load it or fail on it",
            "move it elsewhere, or let `chronicle verify --all --quarantine` do it",
        )
        for name in names
    ]


def unrecognised_findings(names: Sequence[str]) -> list[Finding]:
    """F1 for what lies among the checkpoints, is no text, and is not recognised: it may be a save."""
    message = "not recognised as a checkpoint, and no text: if it is a save, nothing here reads it"
    return [Finding("F1", Severity.WARN, name, message, "move it elsewhere, or name it by its path") for name in names]


def spoilt_words(memory: Mapping[str, object] | None) -> str:
    """Why the guard marked this state as spoilt when it was saved; "" when it did not."""
    words = (memory or {}).get("spoilt")
    return words if isinstance(words, str) else ""


def check_sound(manifest: Manifest) -> list[Finding]:
    """F11: NaN in the weights, or replicas that differ, as the guard saw it at the save: no target of a rollback."""
    words = spoilt_words(manifest.memory)
    if not words:
        return []
    message = f"spoilt when it was saved: {words}"
    remedy = "go back to an earlier checkpoint: `chronicle watch --once` names one"
    return [Finding("F11", Severity.ERROR, "chronicle-manifest.json", message, remedy)]


def _manifest_of(checkpoint: Checkpoint) -> tuple[Manifest | None, list[Finding]]:
    if checkpoint.single_file:
        return None, []
    try:
        manifest = read_manifest(checkpoint.path)
    except OtherVersion as problem:  # intact, and not for this program: unknown, so the files are not compared with it
        unknown = _from_error("F1", problem, "chronicle-manifest.json")
        return None, [unknown._replace(severity=Severity.WARN, message=f"not compared: {problem.message}")]
    except UnreadableFile as problem:
        return None, [_from_error("F1", problem, "chronicle-manifest.json")]
    if manifest is None:
        return None, []
    if manifest.step is not None and checkpoint.step is not None and manifest.step != checkpoint.step:
        own = f"the checkpoint for step {checkpoint.step} by its {checkpoint.step_source}"
        message = f"the manifest is for step {manifest.step}, {own}"
        other = _from_error("F4", RollbackError(message), "chronicle-manifest.json")
        # a script may count epochs or micro-steps in its names; a manifest made by hand knows no more than the name
        return manifest, [other if manifest.written is None else other._replace(severity=Severity.WARN)]
    return manifest, []


def _check_files(
    files: Sequence[StateFile], checkpoint: Checkpoint, full: bool, executor: Executor | None, progress: ByteProgress | None
) -> list[Finding]:
    findings: list[Finding] = []
    targets: list[ChecksumTarget] = []
    writer = format_of(checkpoint)
    for file in files:
        if file.role is not Role.MANIFEST:
            known = writer.role_of(file.path) is not None
            found, more = examine_file(checkpoint.folder / file.path, file.path, full=full, known=known)
            findings += found
            targets += more
    try:
        return findings + checksum_findings(targets, executor, progress)
    except UnreadableFile as problem:
        return [*findings, damage(".", problem.message, problem.remedy)]


def _check_contents(
    checkpoint: Checkpoint, so_far: Sequence[Finding], full: bool
) -> tuple[CheckpointState | None, list[Finding]]:
    try:
        state = read_state(checkpoint)
        moments = check_moments(checkpoint, state.optimizers, max_files=len(state.optimizers) if full else MOMENT_FILES)
        if full:
            moments = [one for one in moments if one.check != "F11"] + check_values(checkpoint, state.optimizers)
        return state, check_state(state) + moments
    except (UnreadableFile, UnknownFormat, Refused) as problem:
        if any(finding.severity is Severity.ERROR for finding in so_far):
            return None, []  # a missing or damaged file has its own finding already
        return None, [_from_error("F3", problem, ".")]


def _from_error(check: str, problem: RollbackError, path: str) -> Finding:
    return Finding(check, Severity.ERROR, path, problem.message, problem.remedy)


# --- F1 and F3: the files against the manifest

_RESTORE = "restore it, or go back to a complete checkpoint"
_TAKE_IN = "move it out of the checkpoint, or run `chronicle verify --write` to take it in"
_GO_TO_INTACT = "go back to an intact checkpoint; if you changed the file on purpose, run `chronicle verify --write`"


def compare_manifest(
    directory: Path,
    manifest: Manifest,
    *,
    full: bool,
    executor: Executor | None = None,
    progress: ByteProgress | None = None,
) -> list[Finding]:
    """Compare a directory with its manifest: names and sizes (F1), with `full` also contents (F3)."""
    entries = {entry.path: entry for entry in listed_entries(directory)}
    listed = {file.path: file for file in manifest.files}
    findings = [
        Finding("F1", Severity.ERROR, path, "missing: the manifest lists this file", _RESTORE)
        for path in sorted(listed.keys() - entries.keys())
    ]
    for path in sorted(entries.keys() - listed.keys()):
        said = f"this file of {entries[path].size_bytes} bytes is not in the manifest: it was added after the save"
        findings.append(Finding("F1", Severity.WARN, path, said, _TAKE_IN))
    same_size = []
    for path in sorted(listed.keys() & entries.keys()):
        found, expected = entries[path].size_bytes, listed[path].size_bytes
        if found == expected:
            same_size.append(listed[path])
        else:
            findings.append(
                Finding("F1", Severity.ERROR, path, f"{found} bytes, the manifest says {expected}", _GO_TO_INTACT)
            )
    if full:
        findings += _compare_contents(directory, same_size, executor, progress)
    return findings


def _compare_contents(
    directory: Path, files: Sequence[ManifestFile], executor: Executor | None, progress: ByteProgress | None
) -> list[Finding]:
    """F3, by CRC-32 where the manifest has one: three times as fast as SHA-256 and sufficient against bit rot."""
    targets = [
        ChecksumTarget(
            path=directory / file.path,
            name=file.path,
            label="content",
            offset=0,
            length=file.size_bytes,
            expected=int(file.crc32, 16),
        )
        for file in files
        if file.crc32 and _is_hex(file.crc32)
    ]
    wrong = [
        (target.name, f"{crc:08x}", f"{target.expected:08x}")
        for target, crc in wrong_checksums(targets, executor, progress)
    ]
    for file in files:
        if file.sha256 and not (file.crc32 and _is_hex(file.crc32)):
            digest = digest_file(directory / file.path)[0]
            if digest != file.sha256:
                wrong.append((file.path, digest[:12], file.sha256[:12]))
    return [
        Finding(
            "F3",
            Severity.ERROR,
            name,
            f"content changed since it was saved: digest {found}, the manifest says {expected}",
            _GO_TO_INTACT,
        )
        for name, found, expected in wrong
    ]


def _is_hex(text: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{8}", text) is not None
