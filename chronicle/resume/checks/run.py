"""Checks that are not about memory: files, the objects in use, the journal, the data, and whether anything was loaded.

Codes: F1…F10 files and pointers, M4 data, M5 object identity, L2 a start from scratch, PF04 ranks. `check_files` and
`check_digest` read the checkpoint; the others are pure.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from chronicle.resume.checks.check import Check, failed, not_compared, noted
from chronicle.resume.contract import Contract, same_checkpoint
from chronicle.resume.fingerprint import LiveState, params_of
from chronicle.resume.journal import GuardHistory
from chronicle.resume.memory import Memory
from chronicle.resume.rules import show_row
from chronicle.settings import is_url
from rollback.checkpoint.listing import open_checkpoint
from rollback.checkpoint.manifest import digest_file
from rollback.checks.verify import verify_checkpoint
from rollback.errors import CheckpointNotFound, RollbackError, Severity, UnknownFormat, UnreadableFile


def check_files(root: Path) -> list[Check]:
    """F1 to F10: names, sizes, contents and counters. A finding of severity ERROR forbids the resume."""
    try:
        findings = verify_checkpoint(open_checkpoint(root), full=True)
    except UnknownFormat:
        return []  # a writer `rollback` does not know: memory is still compared
    except CheckpointNotFound as problem:  # the framework loads from elsewhere: a remote path, or a name of its own
        return [not_compared("checkpoint files", "F2", problem.message, where=str(root))]
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


def check_unspoilt(memory: Memory | None, root: Path | None) -> list[Check]:
    """F11: the guard saw nothing wrong with the weights when this state was saved."""
    if memory is None or not memory.spoilt:
        return []
    cause = "the weights were spoilt before this save: go back to an earlier one (`chronicle watch --once`)"
    where = "the loaded state" if root is None else str(root)
    return [failed("sound weights", "F11", expected="a sound state", found=memory.spoilt, where=where, cause=cause)]


def check_digest(path: Path, expected: str | None) -> list[Check]:
    """F3: a checkpoint that is one file, against the SHA-256 in the journal; None: not known (yet)."""
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


def check_run_state(root: Path, sealed: bool, history: GuardHistory) -> list[Check]:
    """F1: a checkpoint that the journal knows has its manifest (it is `sealed`), and no transaction is open."""
    checks = []
    if not sealed and any(Path(path) == root for _, path in history.checkpoints):
        checks.append(
            failed(
                "manifest",
                "F1",
                expected="the manifest that is written at the end of every save",
                found="none",
                where=str(root),
                cause="the save was interrupted, or the manifest was removed",
            )
        )
    if history.open_intent:
        checks.append(
            failed(
                "open transaction",
                "F1",
                expected="every rollback finished or reverted",
                found=f"intent {history.open_intent} is open",
                where="journal",
                cause="a rollback stopped part-way",
            )
        )
    return checks


def check_contract(
    contract: Contract | None, root: Path, memory: Memory | None, history: GuardHistory
) -> list[Check]:
    """F9: after a rollback, the next load must be of its checkpoint."""
    if contract is None or contract.rollback in history.fulfilled or same_checkpoint(contract, root, memory):
        return []
    if is_url(contract.checkpoint) and not (contract.identity and memory is not None and memory.identity.get("id")):
        return []  # it was copied from a store to a name of its own, and carries no identity: nothing can be compared
    return [
        failed(
            "checkpoint of the rollback",
            "F9",
            expected=contract.checkpoint,
            found=str(root),
            where=f"contract of rollback {contract.rollback}",
            cause="the launch resumes from a checkpoint that is not the target of the rollback",
        )
    ]


def check_newest(memory: Memory | None, root: Path, history: GuardHistory, contract: Contract | None) -> list[Check]:
    """F9: whether a newer checkpoint of the same weights exists that no rollback left behind.

    A person may go back on purpose, and a stale pointer looks the same: it is said with both steps, and not refused.
    """
    step = memory.step if memory else None
    if step is None or (contract is not None and same_checkpoint(contract, root, memory)):
        return []
    newer = [
        (saved, path) for saved, path in history.kept if saved is not None and saved > step and Path(path).exists()
    ]
    if not newer:
        return []
    saved, path = max(newer)
    return [
        noted(
            "newest checkpoint",
            "F9",
            expected=f"step {saved}: {path}",
            found=f"step {step}: {root}",
            where="checkpoints in the journal",
            cause=f"step {step} was loaded, and step {saved} exists (`{path}`): on purpose, or a stale pointer",
        )
    ]


def check_fresh_start(found: Memory, history: GuardHistory, pending: Contract | None) -> list[Check]:
    """L2: failed, because the launch loaded nothing although the run has checkpoints or a `pending` rollback."""
    step = found.optimizer_steps[1] if found.optimizer_steps else 0
    if pending is not None:
        expected = f"checkpoint {pending.checkpoint} of rollback {pending.rollback}"
    else:
        expected = f"a resume: the run has checkpoints up to step {history.last_step}"
    lr = show_row([group.lr for group in found.groups[:1]]) or "unknown"
    cause = "training would start from scratch in a run that has checkpoints"
    if state := next((history.taken.get(digest.weights) for digest in found.ranks if digest.weights), None):
        cause = f"the weights of step {state.step} were loaded, and the optimizer's state of that step was not"
    return [
        failed(
            "resume",
            "L2",
            expected=expected,
            found=f"no optimizer state was loaded; the optimizer is at step {step}, LR {lr}",
            where="this launch",
            cause=cause,
        )
    ]


def check_trained_numbers(found: Memory, saved: Memory | None) -> list[Check]:
    """M3: a launch that loaded no optimizer trains as many numbers as the newest save: an adapter's base may not be frozen."""
    before, after = (sum(group.num_elements for group in one.groups) if one else 0 for one in (saved, found))
    if not before or before == after:
        return []
    cause = "a part of the model that was frozen is trained now, or one that was trained is frozen"
    expected, now = f"{before:,} numbers, as at the newest save", f"{after:,} numbers"
    where = "optimizer param_groups"
    return [failed("trained parameters", "M3", expected=expected, found=now, where=where, cause=cause)]


def check_ranks(asked: int | None, world_size: int) -> list[Check]:
    """PF04: as many ranks train together as requested from the launcher.

    `accelerate launch --cpu --num_processes 2` silently starts one.
    """
    if asked is None or asked == world_size:
        return []
    return [
        failed(
            "ranks",
            "PF04",
            expected=f"{asked}, as requested from the launcher",
            found=f"{world_size} in the process group",
            where="this launch",
            cause='the launcher started fewer, or the process group was never formed; --accept-change "world_size: why"',
        )
    ]


def check_identity(live: LiveState, optimizer: Any, others: Collection[str] | None = ()) -> list[Check]:
    """M5: the optimizer that steps, and the one each scheduler drives, are those whose state was loaded.

    `others`: classes of further optimizers that stepped the same parameters before the save; None: nothing was loaded, so
    a second optimizer is what the script wants.
    """
    ours = live.optimizers
    checks = []
    stranger = optimizer is not None and not any(drives(optimizer, known) for known in ours)
    # in a GAN each optimizer has its own parameters
    if stranger and not set(map(id, params_of(*ours))).isdisjoint(map(id, params_of(optimizer))):
        intended = others is None or type(optimizer).__name__ in others
        cause = "a second optimizer was built after the load, or the wrong one is stepped"
        checks.append(
            (noted if intended else failed)(
                "optimizer identity",
                "M5",
                expected="the optimizer that was prepared and restored",
                found=f"another {type(optimizer).__name__} steps the same parameters",
                where="optimizer.step()",
                cause="two optimizers step the same parameters" if intended else cause,
            )
        )
    for bound in live.schedulers:
        owner = getattr(bound.scheduler, "optimizer", None)
        if hasattr(owner, "param_groups") and ours and not any(drives(owner, known) for known in ours):
            checks.append(
                failed(
                    "scheduler binding",
                    "M5",
                    expected="a scheduler that drives the optimizer that is stepped",
                    found=f"{type(bound.scheduler).__name__} drives another optimizer object",
                    where="scheduler.optimizer",
                    cause="the LR would stay constant: build the scheduler on the optimizer that is trained",
                )
            )
    return checks


def shares_parameters(optimizer: Any, models: Sequence[Any]) -> bool:
    """Whether an optimizer would change parameters of these models."""
    ours = {id(p) for model in models for p in model.parameters()}
    return not ours.isdisjoint(map(id, params_of(optimizer)))


def drives(owner: Any, optimizer: Any) -> bool:
    """Whether an optimizer, or a scheduler's, writes into this one's groups (wrappers and copies may share them)."""
    if owner is optimizer or owner.param_groups is optimizer.param_groups:
        return True
    pairs = zip(owner.param_groups, optimizer.param_groups, strict=False)
    return len(owner.param_groups) == len(optimizer.param_groups) and all(a is b for a, b in pairs)
