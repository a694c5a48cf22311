"""What a checkpoint format has to answer. One module a writer implements it; `rollback.checkpoint.formats` lists them.

A format judges by names first (`claims`, `role_of`, `missing`), so that a refusal can happen before a byte is read,
and reads second (`read_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollback.findings import Finding
from rollback.checkpoint.layout import Checkpoint, Entry, Role, StateFile
from rollback.checkpoint.state import CheckpointState

RoleAndRank = tuple[Role, int | None]


class CheckpointFormat(Protocol):
    """One writer's layout."""

    @property
    def name(self) -> str:
        """The format's name as shown and stored, e.g. "accelerate"."""

    def claims(self, name: str, entries: Sequence[Entry]) -> bool:
        """Whether a directory (or file) called `name` with these entries below it is of this writer."""

    def step_in_name(self, name: str) -> int | None:
        """The optimizer step that the writer puts into the name, or None where it does not."""

    def role_of(self, path: str) -> RoleAndRank | None:
        """Role and rank of a file with this exact relative path, None when the writer makes no such file."""

    def looks_like_state(self, path: str) -> bool:
        """Whether a name that is not this writer's could be taken for its state by a loader or by a person."""

    def loader_lists_siblings(self, name: str) -> bool:
        """Whether the writer's own loader, resuming without a path, looks at everything beside `name`."""

    def is_checkpoint_name(self, name: str) -> bool:
        """Whether a sibling's name is exactly one that this writer gives to checkpoints."""

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """What the names alone show to be incomplete (F2)."""

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Read counters, schedulers and optimizers; raises UnreadableFile or Incomplete."""
