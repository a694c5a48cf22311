"""Checkpoints that are one file: Lightning's `.ckpt`, and a dict that a script saved with one `torch.save`.

Lightning stores `optimizer_states[i]`, `lr_schedulers[i]`, its loops' counters and `global_step`, the steps of all optimizers
together (trainer/connectors/checkpoint_connector.py, 2.6), but no RNG and no data position. A script's dict is searched for
optimizers and schedulers by their keys. `last.ckpt` is a copy that Lightning overwrites; its step is read from its counters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.formats.format import FileFormat, RoleAndRank, rng_digest
from rollback.checkpoint.layout import TORCH_ENDINGS, Checkpoint, Role
from rollback.checkpoint.state import (
    CheckpointState,
    OptimizerState,
    SchedulerState,
    as_mapping,
    counters_in,
    find_states,
    hints_in,
    is_optimizer,
    is_scheduler,
    last_epoch_of,
    newest_step,
    optimizer_state,
    scheduler_state,
    scheduler_unit,
    states_in,
)
from rollback.errors import RollbackError
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import TorchFile

TORCH_FILE = re.compile(rf".+\.(?:{TORCH_ENDINGS}|model)")
_LIGHTNING_KEY = "pytorch-lightning_version"
_EIGHT_BIT = "moments quantised by bitsandbytes (state1, absmax1, qmap1); the LR is a plain number of the groups"
# of `accelerator.save_state` (accelerate/checkpointing.py) and of the Trainer (`_save_rng_state`)
_RANDOM = ({"random_state", "torch_manual_seed"}, {"python", "numpy", "cpu"})
_NO_STATE = ("state_dict", "loops", "callbacks")  # of Lightning: weights, counters, and what monitors
# `meta.iter`: mmengine/runner/runner.py `save_checkpoint`
STEP_KEYS = ("global_step", "step", "iteration", "iter", "num_updates", "global_steps", "train_step", "meta.iter")


class TorchFormat(FileFormat):
    """One `torch.save` of a dict, in any container: the script's own names, of which no number says what it counts."""

    name = "torch"
    steps = TORCH_FILE.pattern

    def role_of(self, path: str) -> RoleAndRank | None:
        """The one file holds everything, and so may each part beside it."""
        return (Role.CUSTOM, None) if TORCH_FILE.fullmatch(path) else None

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Optimizers and schedulers found by their keys."""
        return _read_with_parts(checkpoint, read_state_file(checkpoint.path))


class LightningFormat(TorchFormat):
    """Lightning's `epoch=E-step=N.ckpt` and `last.ckpt`."""

    name = "lightning"
    steps = r"(?s)(?:(?:.*-)?step=(\d+)(?:-v\d+)?|.*)\.ckpt"

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Lightning's own layout; a `.ckpt` without its version is read as a script's."""
        file = read_state_file(checkpoint.path)
        tree = as_mapping(file.tree) or {}
        if _LIGHTNING_KEY not in tree:
            return _read_with_parts(checkpoint, file)
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
        version = str(tree[_LIGHTNING_KEY])
        state = _state(checkpoint, optimizers, schedulers, counters, {"lightning": version})
        step = tree.get("global_step")
        known = [*(o.prefix for o in optimizers), *(s.prefix for s in schedulers)]
        hints = hints_in(name, {key: part for key, part in tree.items() if key not in _NO_STATE}, known)
        return replace(state, writer_step=step if isinstance(step, int) else None, lr_hints=hints)


def _read_with_parts(checkpoint: Checkpoint, file: TorchFile) -> CheckpointState:
    """The state of a script's file, with the optimizers and schedulers of the parts beside it; the step is the file's own."""
    state = read_script_state(checkpoint, file)
    for part in checkpoint.names[1:]:
        if TORCH_FILE.fullmatch(part):
            path = checkpoint.folder / part
            found = read_script_state(replace(checkpoint, path=path), read_state_file(path))
            state = replace(state, schedulers=(*state.schedulers, *found.schedulers),
                            optimizers=(*state.optimizers, *found.optimizers))  # fmt: skip
            unit = state.scheduler_unit or scheduler_unit(state.schedulers, state.writer_step or state.optimizer_step, None)
            state = replace(state, scheduler_unit=unit)
    return state


def read_script_state(checkpoint: Checkpoint, file: TorchFile) -> CheckpointState:
    """Optimizers and schedulers found in a script's own dict by their keys, and the numbers at its top level."""
    name = checkpoint.path.name
    found = states_in(name, file.tree, owner="app")
    counters = counters_in(name, file.tree, levels=1)
    counters |= counters_in(name, {"meta": (as_mapping(file.tree) or {}).get("meta")})
    state = _state(checkpoint, found.optimizers, found.schedulers, counters, {})
    if any(keys <= (as_mapping(file.tree) or {}).keys() for keys in _RANDOM):  # a random state alone, of one rank
        rank = int(found_rank[1]) if (found_rank := re.search(r"_(\d{1,9})\.\w+$", name)) else 0
        state = replace(state, rng_ranks=(rank,), rng_digests={rank: rng_digest(file)})
    return replace(with_counted_step(state, name), lr_hints=hints_in(name, file.tree, found.prefixes))


def holds_states(path: Path) -> bool:
    """Whether a file of any name is read as a tree with an optimizer or a scheduler in it."""
    try:
        return bool(find_states(read_state_file(path).tree))
    except (RollbackError, OSError):
        return False


def with_counted_step(state: CheckpointState, name: str) -> CheckpointState:
    """The state with the writer's step, where two voices agree on one, and what a scheduler counts a step.

    `name` is the file's, or that of the directory that a script made for its files.
    """
    count, schedulers = state.optimizer_step, state.schedulers
    step = _step_said_twice(name, state.counters, [last_epoch_of(s.state) for s in schedulers], count)
    unit = state.scheduler_unit
    if step not in (None, count) and unit != 1:  # made anew, or several batches a step? Only a remainder tells
        unit = None if count and step % count == 0 else scheduler_unit(schedulers, step, None)
    return replace(state, writer_step=step, scheduler_unit=unit)


def _step_said_twice(
    name: str, counters: Mapping[str, int | float], epochs: Sequence[int | None], count: int | None
) -> int | None:
    """The step that the file holds at its top level and that its name or every scheduler holds too; None where none agrees.

    The optimizer counts its own steps, `count`, and begins again where a script makes it anew. One voice alone may be an
    epoch. A scheduler's may count batches: then the step is a multiple of the optimizer's, and nothing is concluded.
    """
    in_name = {int(found) for found in re.findall(r"\d{1,18}", name)}
    said = [counters[key] for step in STEP_KEYS for key in counters if key.endswith(f":{step}")]
    steps = [value for value in said if isinstance(value, int)]
    stepped = [step for step in steps if epochs and set(epochs) == {step} and (not count or step % count)]
    return next((step for step in steps if step in in_name), next(iter(stepped), None))


def _state(
    checkpoint: Checkpoint,
    optimizers: tuple[OptimizerState, ...],
    schedulers: tuple[SchedulerState, ...],
    counters: dict[str, int | float],
    topology: dict[str, object],
) -> CheckpointState:
    step = newest_step(optimizers)
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
        notes=tuple(f"`{o.file}`: {_EIGHT_BIT}" for o in optimizers if {"absmax1", "qmap1"} <= set(o.moments)),
    )


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
