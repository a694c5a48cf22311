"""A checkpoint's state as it will be read once edits are made, and which scheduler governs which optimizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollback.lr.effect import edited_tree
from rollback.lr.fields import FieldEdit
from rollback.checkpoint.state import CheckpointState, OptimizerState, SchedulerState


def edited_state(state: CheckpointState, edits: Sequence[FieldEdit]) -> CheckpointState:
    """The state as it will be read from the edited files."""
    by_file: dict[str, list[FieldEdit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    schedulers = [replace(s, state=edited_tree(s.state, s.prefix, by_file.get(s.file, ()))) for s in state.schedulers]
    optimizers = []
    for o in state.optimizers:
        made = {edit.keys: edit.after for edit in by_file.get(o.file, ())}
        groups = [
            {name: made.get(o.group_keys(index, name)[0], value) for name, value in group.items()}
            for index, group in enumerate(o.groups)
        ]
        optimizers.append(replace(o, groups=tuple(groups)))
    return replace(state, schedulers=tuple(schedulers), optimizers=tuple(optimizers))


def of_first_rank(optimizers: Sequence[OptimizerState]) -> list[OptimizerState]:
    """Every rank's shard repeats the same groups: one rank speaks for all."""
    ranks = [o.rank for o in optimizers if o.rank is not None]
    return [o for o in optimizers if o.rank is None or o.rank == min(ranks)]


def governed_by(
    scheduler: SchedulerState, pairs: Sequence[tuple[OptimizerState, OptimizerState]]
) -> list[tuple[OptimizerState, OptimizerState]]:
    """The optimizers (all rank shards of one) whose LRs this scheduler last wrote; by number of groups if none match."""
    last = scheduler.state.get("_last_lr")
    exact = [pair for pair in pairs if [group.get("lr") for group in pair[0].groups] == last]
    sized = [pair for pair in pairs if isinstance(last, list) and len(pair[0].groups) == len(last)]
    return exact or sized or list(pairs)
