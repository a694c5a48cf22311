"""Which abandoned checkpoints may be deleted for good, and their deletion. Nothing else in this package deletes state.

Kept whatever is asked: what the last standing rollback moved away (its undo needs it), and so many that two verified
checkpoints remain in all. Deciding is pure; `apply_prune` acts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollback.transaction.change import workspace_of
from rollback.disk.durable import REAL_DISK, Disk
from rollback.checkpoint.layout import Checkpoint

KEEP_VERIFIED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Checkpoints to delete, earliest step first, and those kept with the reason."""

    delete: tuple[Checkpoint, ...]
    kept: tuple[tuple[Checkpoint, str], ...]

    @property
    def size_bytes(self) -> int:
        return sum(checkpoint.size_bytes for checkpoint in self.delete)


def plan_prune(checkpoints: Sequence[Checkpoint], verified: Collection[Path], pinned: Collection[str]) -> PrunePlan:
    """`verified` are paths of checkpoints that passed; `pinned` ids of rollbacks that can still be undone."""
    abandoned = sorted((c for c in checkpoints if c.abandoned is not None), key=_order)
    reasons: dict[Path, str] = {
        c.path: f"undo of rollback {c.abandoned} needs it" for c in abandoned if c.abandoned in pinned
    }
    safe = sum(1 for c in checkpoints if c.path in verified and (c.abandoned is None or c.path in reasons))
    for checkpoint in reversed(abandoned):
        if safe >= KEEP_VERIFIED:
            break
        if checkpoint.path in verified and checkpoint.path not in reasons:
            reasons[checkpoint.path] = f"one of the last {KEEP_VERIFIED} verified checkpoints"
            safe += 1
    return PrunePlan(
        delete=tuple(c for c in abandoned if c.path not in reasons),
        kept=tuple((c, reasons[c.path]) for c in abandoned if c.path in reasons),
    )


def apply_prune(plan: PrunePlan, objects: Sequence[Path], *, parent: Path, id_: str, disk: Disk = REAL_DISK) -> None:
    """Delete what the plan names, and the objects. Each goes out of sight whole before a file of it is removed."""
    workspace = workspace_of(parent, id_)
    disk.make_directory(workspace)
    for number, checkpoint in enumerate(plan.delete):
        disk.move(checkpoint.path, workspace / f"{number}-{checkpoint.path.name}")
        disk.sync_directory(checkpoint.path.parent)
    for folder in sorted({checkpoint.path.parent for checkpoint in plan.delete}):
        if not any(folder.iterdir()):
            disk.remove_tree(folder)
    disk.remove_tree(workspace)
    disk.sync_directory(parent)
    for path in objects:
        if path.is_file():
            disk.unlink(path)


def _order(checkpoint: Checkpoint) -> tuple[int, str]:
    return checkpoint.step if checkpoint.step is not None else -1, str(checkpoint.path)
