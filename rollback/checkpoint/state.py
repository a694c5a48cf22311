"""What a checkpoint says about how the run continues, as values: schedulers, optimizers, counters, RNG, topology.

Pure; `rollback.checkpoint.rollback_state` reads it through `rollback.checkpoint.formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollback.findings import Finding
from rollback.checkpoint.layout import Checkpoint

Prefix = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """One stored scheduler: the file, the key path of its state dict in it, the state itself.

    `owner` says who saved it ("prepared", "registered", "engine", "trainer", "app"); `authoritative` is False for a
    copy that a later load overwrites.
    """

    file: str
    prefix: Prefix
    state: Mapping[str, object]
    owner: str
    authoritative: bool = True
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """One stored optimizer (or one rank's part of it): `prefix` leads to the dict that holds `param_groups`.

    `steps` are the smallest and the largest per-parameter step counters, None when there are none. `num_states`
    counts parameters with state; `step_keys` are key paths of the counters, relative to the file.
    """

    file: str
    prefix: Prefix
    groups: tuple[Mapping[str, object], ...]
    steps: tuple[int, int] | None
    rank: int | None = None
    num_states: int = 0
    step_keys: tuple[Prefix, ...] = ()
    owner: str = "optimizer"
    moments: tuple[str, ...] = ()
    flat_names: tuple[tuple[str, ...], ...] = ()  # where keys are flattened: the parameters of each group

    def group_keys(self, index: int, field: str) -> tuple[Prefix, ...]:
        """Every key path at which a group's field is kept: one, or with flattened keys one a parameter."""
        if not self.flat_names:
            return ((*self.prefix, "param_groups", index, field),)
        return tuple((*self.prefix, f"param_groups.{name}.{field}") for name in self.flat_names[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Every number that decides how the run continues from a checkpoint.

    `scheduler_unit` is `last_epoch` per optimizer step (1, or the number of processes for a scheduler that went
    through `accelerator.prepare`), None when it cannot be told. `optimizer_step` is the optimizer's own count.
    `counters` are named by file and key path; `topology`, `config` and `data` hold what the writer recorded.
    `findings` are what reading itself showed to be wrong (F2, F4, F9). `located` belongs to `file_holding`.
    """

    checkpoint: Checkpoint
    schedulers: tuple[SchedulerState, ...] = ()
    optimizers: tuple[OptimizerState, ...] = ()
    counters: Mapping[str, int | float] = field(default_factory=dict)
    rng_ranks: tuple[int, ...] = ()
    world_size: int | None = None
    scheduler_unit: int | None = None
    optimizer_step: int | None = None
    notes: tuple[str, ...] = ()
    topology: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    rng_digests: Mapping[int, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    located: Mapping[tuple[str, Prefix], str] = field(default_factory=dict)

    def file_holding(self, file: str, keys: Prefix) -> str:
        """The file on disk that holds a field: `file` itself, or for an index of parts the part the field lies in."""
        for length in range(len(keys), 0, -1):
            part = self.located.get((file, keys[:length]))
            if part is not None:
                return part
        return file
