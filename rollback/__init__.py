"""Reads, verifies, edits and rolls back the checkpoints that training frameworks write, without importing torch.

    from rollback import list_checkpoints, read_state, verify, plan_rollback, apply, undo, recover

Nothing in a checkpoint is executed: pickles are read by their opcodes, zip records by their headers. This package knows no
journal, no command line and no trainer; `chronicle` is built on it. `docs/library.md` is a tour of these functions.
"""

from typing import TYPE_CHECKING, Any

from rollback.errors import Finding, RollbackError, Severity

if TYPE_CHECKING:
    from rollback.api import apply, plan_rollback, recover, undo, verify
    from rollback.checkpoint.layout import Checkpoint
    from rollback.checkpoint.listing import list_checkpoints, read_state
    from rollback.checkpoint.state import CheckpointState
    from rollback.plan.plan import Plan
    from rollback.transaction.change import Receipt

__all__ = [
    "Checkpoint",
    "CheckpointState",
    "Finding",
    "Plan",
    "Receipt",
    "RollbackError",
    "Severity",
    "apply",
    "list_checkpoints",
    "plan_rollback",
    "read_state",
    "recover",
    "undo",
    "verify",
]

# Loaded when first used, so that `import rollback.errors` stays fast.
_PLACES = {
    "Checkpoint": "rollback.checkpoint.layout",
    "CheckpointState": "rollback.checkpoint.state",
    "Plan": "rollback.plan.plan",
    "Receipt": "rollback.transaction.change",
    "list_checkpoints": "rollback.checkpoint.listing",
    "read_state": "rollback.checkpoint.listing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollback' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(_PLACES.get(name, "rollback.api")), name)
    globals()[name] = found
    return found
