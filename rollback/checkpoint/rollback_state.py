"""Reads what a checkpoint says about how the run continues; which file says it is the format's knowledge.

A checkpoint with strays is refused by their names before any of its files is opened.
"""

from __future__ import annotations

from rollback.errors import StrayFiles, UnknownFormat
from rollback.checkpoint.formats import format_named
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState

__all__ = ["CheckpointState", "OptimizerState", "SchedulerState", "read_state", "refuse_strays"]


def read_state(checkpoint: Checkpoint, *, allow_strays: bool = False) -> CheckpointState:
    """The counters, schedulers and optimizers of `checkpoint`.

    Raises StrayFiles before anything is read, UnreadableFile, Incomplete. `allow_strays` is for looking only.
    """
    if not allow_strays:
        refuse_strays(checkpoint)
    known = format_named(checkpoint.format)
    if known is None:
        raise UnknownFormat(f"`{checkpoint.path}`: no reader is called {checkpoint.format!r}")
    return known.read_state(checkpoint)


def refuse_strays(checkpoint: Checkpoint) -> None:
    """Raise StrayFiles naming every stray of the checkpoint and the way out."""
    if not checkpoint.strays:
        return
    names = ", ".join(f"`{name}`" for name in checkpoint.strays)
    noun = "stray" if len(checkpoint.strays) == 1 else "strays"
    raise StrayFiles(
        f"{noun} {names} in `{checkpoint.path}`: a loader could take it for state, expected only the files of "
        f"{checkpoint.format}",
        "move it out of the checkpoint, or let `chronicle verify --quarantine` do it",
    )
