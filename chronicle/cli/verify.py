"""`chronicle verify`: checks checkpoints, records the verdict, names the newest whole one, and moves strays into quarantine.

Every byte is read unless `--quick` is given. The verdict on a run's own checkpoints is recorded in its journal.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chronicle.checkpoints import name_twins, record_verdicts, stamp_or_none
from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, ExitCode, YesOption
from chronicle.cli.transaction import agree, byte_progress
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.goback import open_run
from chronicle.goback.applying import uninterrupted
from chronicle.journal import read_journal
from chronicle.journal.events import Quarantined
from chronicle.latest import find_latest
from chronicle.settings import Settings
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import (
    directories_with_checkpoints,
    list_checkpoints,
    list_root_strays,
    list_unrecognised,
    refuse_strays,
)
from rollback.checkpoint.manifest import BY_HAND, MANIFEST_NAME, Manifest, OtherVersion, read_manifest, write_manifest
from rollback.checks.remnants import remnant_findings
from rollback.checks.verify import passes, root_stray_findings, unrecognised_findings, verify_checkpoint
from rollback.disk import remote
from rollback.errors import Finding, Severity, UnreadableFile
from rollback.transaction.cleanup import (
    KEEP_VERIFIED,
    apply_moves,
    plan_quarantine,
    quarantine_dir,
    refuse_mount_points,
)

Found = list[tuple[str, Checkpoint | None, list[Finding]]]


def verify_checkpoints(
    checkpoint: str | None = None,
    all_: bool = False,
    full: bool = True,
    quarantine: bool = False,
    write: bool = False,
    newest: bool = False,
    print_path: bool = False,
    yes: YesOption = False,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Verify checkpoints, or find the newest (exit 5 on findings).

    It checks for stray and missing files, checksums, and whether steps and LRs agree. With --all it also names what a
    save that was cut left among the checkpoints. The verdict on a run's own checkpoints is recorded in its journal, and
    is valid until one of their files changes.

    Example: chronicle verify --all

    The newest one that is whole: python train.py --resume "$(chronicle verify --newest --print-path)"

    Options:
      [CKPT]: A path, a step or STEP@LAUNCH. Without it, all checkpoints.
      --all: Verify all checkpoints of the run, also abandoned ones.
      --full, --verified/--quick: Read every byte, or only names and structure.
      --quarantine: Move strays to a directory that no loader reads.
      --write: Write the manifest of CKPT: names, sizes, and digests unless --quick.
      --newest: Name the newest checkpoint that is whole (exit 1 if there is none).
      --print-path: Print only the path of the newest one, for scripts.
    """
    if newest or print_path:
        if checkpoint or all_ or write or quarantine:
            raise UsageProblem("--newest finds the checkpoint by itself: expected no CKPT and no other action")
        return _newest(full, print_path, at)
    if write:
        if not checkpoint:
            raise UsageProblem("--write needs a checkpoint: expected CKPT", "as in `chronicle verify --write 30500`")
        return _write(at.checkpoint(checkpoint), full, at)
    stores = not quarantine  # which moves what it finds
    if checkpoint and not all_:
        root, checkpoint = None, checkpoint if quarantine else str(remote.local_path(checkpoint))
        chosen = [at.checkpoint(checkpoint, stores=stores)]
    else:
        root = at.settings(stores=stores).need_checkpoints()
        chosen = list_checkpoints(root)
    if quarantine:
        beside = list_root_strays(root) if root is not None else ()
        where = root or chosen[0].path.parent
        return move_strays(where, chosen, beside, at.settings(), yes=yes)
    found, stamps = _verified(chosen, full)
    talk = (*_remember(found, stamps, full, at), *name_twins(*chosen))
    if root is not None:
        beside_them = remnant_findings(root, chosen) + root_stray_findings(list_root_strays(root)) + _retention(found)
        told = {finding.path for finding in beside_them}
        beside_them += unrecognised_findings([name for name in list_unrecognised(root, chosen) if name not in told])
        if beside_them:
            found.append((str(root), None, beside_them))
    code = ExitCode.FINDINGS if any(_counts(f) for _, _, findings in found for f in findings) else ExitCode.DONE
    lines = list(_lines(found, full, brief=len(chosen) > 1)) if found else _none_in(root)
    return CommandResult(lines=lines, data=_data(found, full), exit_code=code, talk=talk)


def _none_in(root: Path | None) -> list[str]:
    near = directories_with_checkpoints(root) if root is not None else []
    return [f"no checkpoints in {root}", *(f"{count} are in {folder}: --checkpoints {folder}" for folder, count in near)]


def _verified(chosen: Sequence[Checkpoint], full: bool) -> tuple[Found, list[str | None]]:
    """The findings of each checkpoint, and its stamp from before it was read."""
    found: Found = []
    stamps = []
    total = sum(checkpoint.size_bytes for checkpoint in chosen)
    with (
        ThreadPoolExecutor(max_workers=os.cpu_count()) as executor,
        byte_progress(total if full else 0, len(chosen)) as bar,
    ):
        for checkpoint in chosen:
            stamps.append(stamp_or_none(checkpoint.path))
            findings = verify_checkpoint(checkpoint, full=full, executor=executor, progress=bar)
            found.append((str(checkpoint.path), checkpoint, findings))
    return found, stamps


def _remember(found: Found, stamps: Sequence[str | None], full: bool, at: AtCheckpoints) -> tuple[str, ...]:
    try:
        settings = at.settings(stores=True)
    except ChronicleError:
        return ()  # a checkpoint named by its path needs no run
    looked = [(c, stamp, f) for (_, c, f), stamp in zip(found, stamps, strict=True) if c is not None]
    return record_verdicts(settings, looked, full=full)


def _retention(found: Found) -> list[Finding]:
    """F10 for the newest checkpoint: how many others there are to go back to."""
    standing = [(c, passes(findings)) for _, c, findings in found if c is not None and not c.abandoned]
    if not standing:
        return []
    good = sum(passed for _, passed in standing[:-1])
    if good >= KEEP_VERIFIED:
        return []
    passed = f"{good} other checkpoint{'s pass' if good != 1 else ' passes'}"
    return [Finding("F10", Severity.INFO, ".", f"{passed}: expected at least {KEEP_VERIFIED}; do not delete any")]


def _counts(finding: Finding) -> bool:
    return finding.severity is not Severity.INFO


def _lines(found: Found, full: bool, *, brief: bool) -> Iterator[str]:
    width = max(len(Path(path).name) for path, _, _ in found)
    for path, checkpoint, findings in found:
        yield f"{Path(path).name:<{width}}  {_about(checkpoint)}{_verdict(findings, full)}"
        for finding in findings:
            if brief and not _counts(finding):
                continue
            yield f"  {finding.severity.value:<5} {finding.check:<3} {finding.path}: {finding.message}"
            if finding.remedy and _counts(finding):
                yield f"            hint: {finding.remedy}"


def _about(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return ""
    step = "step ?" if checkpoint.step is None else f"step {checkpoint.step}"
    return f"{checkpoint.format} · {step}{' · abandoned' if checkpoint.abandoned else ''} · "


def _verdict(findings: Sequence[Finding], full: bool) -> str:
    count = sum(map(_counts, findings))
    if count:
        return f"{count} finding{'s' if count > 1 else ''}"
    return "intact" if full else "complete; contents not read"


def _data(found: Found, full: bool) -> Mapping[str, Any]:
    return {
        "full": full,
        "checkpoints": [
            {
                "path": path,
                "format": checkpoint.format if checkpoint else None,
                "step": checkpoint.step if checkpoint else None,
                "passes": not any(finding.severity is Severity.ERROR for finding in findings),
                "findings": [finding.to_json() for finding in findings],
            }
            for path, checkpoint, findings in found
        ],
    }


# --- The newest that a launch can resume from: restarts and trainers ask the same function


def _newest(full: bool, print_path: bool, at: AtCheckpoints) -> CommandResult:
    """What is incomplete, damaged, spoilt or of a side try is passed over, with the reason."""
    settings = at.settings(stores=True)
    root = settings.need_checkpoints()
    found = find_latest(root, read_journal(settings.paths).entries, full=full, settings=settings)
    said = [f"passed over: {_named(one.checkpoint)}: {one.reason}" for one in found.passed_over]
    said += filter(None, [found.words()])
    chosen = found.checkpoint
    if chosen is None:
        what = "every byte of which can be verified" if full else "that is whole"
        first = f"; {said[0]}" if said else ""
        raise ChronicleError(f"no checkpoint {what} in `{root}`{first}", "`chronicle verify --all` says what is wrong")
    depth = "verified (every byte read)" if found.verified else "whole (names, structure and counters; not every byte was read)"
    passed_over = [
        {"path": str(one.path), "step": one.step, "launch": one.launch, "reason": reason}
        for one, reason, _ in found.passed_over
    ]
    data = {"path": str(chosen.path), "step": chosen.step, "launch": chosen.launch, "format": chosen.format}
    return CommandResult(
        lines=[f"{_named(chosen)} · {depth}", str(chosen.path)],
        raw=str(chosen.path) if print_path else "",
        data=data | {"every_byte_read": found.verified, "passed_over": passed_over},
        talk=said,
    )


def _named(one: Checkpoint) -> str:
    launch = "" if one.launch is None else f" (launch {one.launch})"
    return f"step {one.step}{launch} {one.path.name}"


# --- Quarantine of strays


def move_strays(
    root: Path, chosen: Sequence[Checkpoint], beside: Sequence[str], settings: Settings, *, yes: bool
) -> CommandResult:
    """Move the strays below `root` out of it, after an entry in the journal. Raises `UsageProblem` without a terminal."""
    moves = plan_quarantine(root, chosen, beside)
    if not moves:
        return CommandResult(lines=f"no strays in {root}", data={"changed": False, "moved": []})
    refuse_mount_points(root)
    lines = ["strays to move out of the checkpoints:", *(f"  {move.path}" for move in moves)]
    agree("Move them?", lines, yes=yes)
    with open_run(settings) as opened, uninterrupted():
        event = Quarantined(root=str(root), moves=tuple(move.to_json() for move in moves))
        entry = opened.writer.write(event, title=f"{len(moves)} strays moved out of the checkpoints")
        where = quarantine_dir(root, entry.id)
        apply_moves(root, where, moves)
    return CommandResult(
        lines=[*lines, "", f"done: moved to {where}"],
        data={"changed": True, "id": entry.id, "moved": [move.path for move in moves], "directory": str(where)},
        talk=(f"undo it with `chronicle undo {entry.id[-8:]}`",),
    )


# --- The manifest


def _write(chosen: Checkpoint, full: bool, at: AtCheckpoints) -> CommandResult:
    """Write the manifest of a checkpoint. What the run recorded in the present one is kept."""
    if chosen.single_file:
        raise ChronicleError(f"`{chosen.path}` is a single file: expected a directory, which holds the manifest")
    refuse_strays(chosen)
    old, talk = _old_manifest(chosen)
    new = write_manifest(
        chosen.path,
        step=old.step if old and old.step is not None else chosen.step,
        memory=old.memory if old else None,
        run=old.run if old else at.run,
        launch=old.launch if old else None,
        digests=full,
        more={**(old.more if old else {}), "made": BY_HAND},
    )
    verb = "replaced" if old or talk else "written"
    text = f"{verb} {chosen.path / MANIFEST_NAME}: {len(new.files)} files, digests {new.digests}"
    return CommandResult(lines=text, data=new.to_json(), talk=(*talk, *name_twins(chosen)))


def _old_manifest(chosen: Checkpoint) -> tuple[Manifest | None, tuple[str, ...]]:
    """The present manifest, and a message if it cannot be read. Raises `OtherVersion` instead of replacing a newer one."""
    try:
        return read_manifest(chosen.path), ()
    except OtherVersion:
        raise
    except UnreadableFile as problem:
        return None, (f"the old manifest is lost, with what the run recorded in it: {problem.message}",)
