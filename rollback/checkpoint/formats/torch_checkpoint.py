"""Checkpoints that are one file: Lightning's `.ckpt`, and whatever a script saved with one `torch.save`.

Lightning stores `optimizer_states[i]`, `lr_schedulers[i]`, `global_step` and its loops' counters
(trainer/connectors/checkpoint_connector.py, 2.6); no RNG, no data position. A script's dict is searched for what looks
like an optimizer and a scheduler. `last.ckpt` is a copy that Lightning overwrites, so its step is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollback.checkpoint.formats.format import RoleAndRank
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, EntryKind, Role, StateFile
from rollback.checkpoint.state import (
    CheckpointState,
    OptimizerState,
    SchedulerState,
    as_mapping,
    counters_in,
    find_states,
    is_optimizer,
    is_scheduler,
    optimizer_state,
    scheduler_state,
    scheduler_unit,
)
from rollback.errors import RollbackError, UnknownFormat
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import TorchFile
from rollback.findings import Finding

LIGHTNING_NAME = re.compile(r"(?:.*-)?step=(\d+)(?:-v\d+)?\.ckpt")
SUFFIX = re.compile(r".+\.(?:pt|pth|ckpt|pkl|bin|tar)")
LIGHTNING_KEY = "pytorch-lightning_version"
STEP_KEYS = ("global_step", "step", "iteration", "iter", "num_updates", "global_steps", "train_step")


class _OneFile:
    """What one-file checkpoints share: there is nothing beside the state, so nothing can be missing or stray."""

    def role_of(self, path: str) -> RoleAndRank | None:
        return (Role.CUSTOM, None) if SUFFIX.fullmatch(path) else None

    def looks_like_state(self, path: str) -> bool:
        return False

    def loader_lists_siblings(self, name: str) -> bool:
        return False

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        return []


class LightningFormat(_OneFile):
    """Lightning's `epoch=E-step=N.ckpt` and `last.ckpt`."""

    name = "lightning"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        return len(entries) == 1 and entries[0].kind is not EntryKind.DIRECTORY and name.endswith(".ckpt")

    def step_in_name(self, name: str) -> int | None:
        found = LIGHTNING_NAME.fullmatch(name)
        return int(found[1]) if found else None

    def is_checkpoint_name(self, name: str) -> bool:
        return name.endswith(".ckpt")

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        file = read_state_file(checkpoint.path)
        tree = as_mapping(file.tree) or {}
        if LIGHTNING_KEY not in tree:
            return read_script_state(checkpoint, file)
        name = checkpoint.path.name
        optimizers = tuple(
            optimizer_state(name, ("optimizer_states", index), value, owner="trainer")
            for index, value in enumerate(_listed(tree.get("optimizer_states")))
            if is_optimizer(value)
        )
        schedulers = tuple(
            scheduler_state(name, ("lr_schedulers", index), value, owner="trainer")
            for index, value in enumerate(_listed(tree.get("lr_schedulers")))
            if is_scheduler(value)
        )
        counters = counters_in(name, {key: tree[key] for key in ("epoch", "global_step") if key in tree})
        loops = as_mapping(tree.get("loops")) or {}
        counters.update(counters_in(name, {"fit_loop": loops.get("fit_loop")}, levels=6))
        version = str(tree[LIGHTNING_KEY])
        return _state(checkpoint, optimizers, schedulers, counters, {"lightning": version})


class TorchFormat(_OneFile):
    """One `torch.save` of a dict, in any container: the script's own names."""

    name = "torch"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        one = len(entries) == 1 and entries[0].path == name and entries[0].kind is not EntryKind.DIRECTORY
        return one and SUFFIX.fullmatch(name) is not None

    def step_in_name(self, name: str) -> int | None:
        return None  # who wrote it, and what the number counts, is not known

    def is_checkpoint_name(self, name: str) -> bool:
        return SUFFIX.fullmatch(name) is not None

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        return read_script_state(checkpoint, read_state_file(checkpoint.path))


def read_script_state(checkpoint: Checkpoint, file: TorchFile) -> CheckpointState:
    """Whatever looks like an optimizer or a scheduler in a script's own dict, and the numbers at its top."""
    name = checkpoint.path.name
    found = find_states(file.tree)
    optimizers = tuple(optimizer_state(name, p, value, owner="app") for p, value, kind in found if kind == "optimizer")
    schedulers = tuple(scheduler_state(name, p, value, owner="app") for p, value, kind in found if kind == "scheduler")
    return _state(checkpoint, optimizers, schedulers, counters_in(name, file.tree, levels=1), {})


def has_training_state(checkpoint: Checkpoint) -> bool:
    """Whether a one-file candidate holds an optimizer or a step; a bare state dict of weights is no checkpoint."""
    try:
        state = read_script_state(checkpoint, read_state_file(checkpoint.path))
    except (RollbackError, UnknownFormat):
        return False
    return bool(state.optimizers or state.schedulers)


def _state(
    checkpoint: Checkpoint,
    optimizers: tuple[OptimizerState, ...],
    schedulers: tuple[SchedulerState, ...],
    counters: dict[str, int | float],
    topology: dict[str, object],
) -> CheckpointState:
    step = max((o.steps[1] for o in optimizers if o.steps), default=None)
    if step is None:
        step = next((int(counters[k]) for n in STEP_KEYS for k in counters if k.endswith(f":{n}")), None)
    return CheckpointState(
        checkpoint=checkpoint,
        schedulers=schedulers,
        optimizers=optimizers,
        counters=counters,
        optimizer_step=step,
        scheduler_unit=scheduler_unit(schedulers, step, None),
        topology=topology,
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
