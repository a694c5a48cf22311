"""torch Distributed Checkpoint directories: `step-N` of torchtitan, `iter_N` of Megatron-LM, those of other programs.

The app decides the structure of the state, so schedulers and optimizers are found by their keys. Numbers may be spread
over several `.distcp` files; `located` says which file holds a field. `.metadata` is written last: without it the save
was cut off (planner and filesystem writer, torch 2.13). Megatron's older layout has one file for each model-parallel rank
instead; both keep scheduler, arguments and the optimizer's groups in torch files (`megatron/training/checkpointing.py`,
`get_checkpoint_name`; `megatron/core/dist_checkpointing/strategies/common.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.formats.format import CheckpointFormat, RoleAndRank, missing_file, role_by
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile
from rollback.checkpoint.state import (
    CheckpointState,
    LrHint,
    OptimizerState,
    Prefix,
    SchedulerState,
    counters_in,
    hints_in,
    newest_step,
    scheduler_unit,
    states_in,
)
from rollback.errors import Finding, RollbackError, Severity
from rollback.files.dcp_file import METADATA_NAME, missing_chunks, read_dcp_directory
from rollback.files.state_file import read_state_file

_PART = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")
STEMS = r"\.distcp|^\.metadata"


_ROLES = ((re.escape(METADATA_NAME), Role.MODEL), (_PART, Role.MODEL))


def role_in_dcp(name: str) -> RoleAndRank | None:
    """Role and rank of a file in a DCP directory: one model state, whatever the app put into it."""
    return role_by(_ROLES, name)


def read_dcp_state(checkpoint: Checkpoint, folder: str, *, owner: str) -> CheckpointState:
    """The state in the DCP directory `folder` ("" for the checkpoint itself) of `checkpoint`."""
    directory = checkpoint.path / folder if folder else checkpoint.path
    index_name = f"{folder}/{METADATA_NAME}" if folder else METADATA_NAME
    file, located = read_dcp_directory(directory)
    found = states_in(index_name, file.tree, owner=owner)
    step = newest_step(found.optimizers)
    places: dict[tuple[str, Prefix], str] = {
        (index_name, keys): f"{folder}/{name}" if folder else name for keys, name in located.items()
    }
    inside = {prefix for prefix in found.prefixes if len(prefix) == 1}
    tree = file.tree if isinstance(file.tree, dict) else {}
    rest = {key: value for key, value in tree.items() if (key,) not in inside}
    counters = counters_in(index_name, rest, levels=3)
    return CheckpointState(
        checkpoint=checkpoint,
        schedulers=found.schedulers,
        optimizers=found.optimizers,
        counters=_without_states(counters, found.prefixes),
        optimizer_step=step,
        scheduler_unit=scheduler_unit(found.schedulers, step, None),
        located=places,
        findings=dcp_findings(directory, folder),
        lr_hints=hints_in(index_name, file.tree, found.prefixes),
    )


def _without_states(counters: dict[str, int | float], prefixes: Sequence[Prefix]) -> dict[str, int | float]:
    """Counters that are not part of a scheduler or optimizer that is shown anyway."""
    starts = tuple(".".join(map(str, prefix)) + "." for prefix in prefixes)
    return {name: value for name, value in counters.items() if not name.partition(":")[2].startswith(starts)}


def dcp_findings(directory: Path, folder: str) -> tuple[Finding, ...]:
    """F2: every part that the metadata names is there and long enough."""
    try:
        problems = missing_chunks(directory)
    except RollbackError as problem:
        problems = [(METADATA_NAME, problem.message)]
    return tuple(
        Finding(
            "F2",
            Severity.ERROR,
            f"{folder}/{name}" if folder else name,
            what,
            "go back to a complete checkpoint, or restore the file",
        )
        for name, what in problems
    )


def missing_in_dcp(files: Sequence[StateFile], folder: str) -> list[Finding]:
    """F2 by names: the metadata is there, and at least one part."""
    names = {file.name for file in files if file.folder == folder}
    found = []
    if METADATA_NAME not in names:
        found.append((METADATA_NAME, "it is written last, so the save was interrupted"))
    if not any(_PART.fullmatch(name) for name in names):
        found.append(("__0_0.distcp", "no part holds any data"))
    return [missing_file(name, why, f"{folder}/{name}" if folder else name) for name, why in found]


_MEGATRON_FILE = re.compile(
    r"mp_rank_\d\d(?:_\d{3}){0,2}/(?P<stem>model_optim_rng|model_rng|optim|distrib_optim|model_optim_rng\.pt_optim)\.pt"
)
_MEGATRON_COMMON = "common.pt"


class MegatronFormat(CheckpointFormat):
    """`iter_NNNNNNN` of Megatron-LM and what is built on it: one file a rank (`torch`), or DCP and `common.pt`."""

    name = "megatron"
    steps = r"iter_(\d{7,})"  # the iterations done, which are optimizer steps
    stems = STEMS

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A rank's file, or `common.pt` beside the parts, in a directory of that name."""
        paths = {entry.path for entry in entries}
        files = any(_MEGATRON_FILE.fullmatch(path) for path in paths)
        return self.is_checkpoint_name(name) and (files or _MEGATRON_COMMON in paths)

    def role_of(self, path: str) -> RoleAndRank | None:
        """Ranks' files, `common.pt`, and the parts of the DCP layout."""
        found = _MEGATRON_FILE.fullmatch(path)
        if found:
            return (Role.OPTIMIZER if "optim" in found["stem"] else Role.MODEL), None
        if path == _MEGATRON_COMMON:
            return Role.OPTIMIZER, None
        return (Role.OTHER, None) if path in ("metadata.json", "modelopt_state") else role_in_dcp(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """The metadata and a part, where the DCP layout was used."""
        return missing_in_dcp(files, "") if any(file.path == _MEGATRON_COMMON for file in files) else []

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Groups, scheduler, arguments and `iteration` of every rank's file, or of `common.pt`."""
        optimizers: list[OptimizerState] = []
        schedulers: list[SchedulerState] = []
        counters: dict[str, int | float] = {}
        hints: tuple[LrHint, ...] = ()
        for rank, file in enumerate(sorted(f.path for f in checkpoint.with_role(Role.OPTIMIZER))):
            tree = read_state_file(checkpoint.path / file).tree
            found = states_in(file, tree, owner="app", rank=rank)
            optimizers += found.optimizers
            schedulers += found.schedulers
            hints += hints_in(file, tree, found.prefixes)
            counters.update(counters_in(file, tree, levels=1) if not counters else {})
        iterations = [int(value) for name, value in counters.items() if name.endswith(":iteration")]
        sharded = any(file.path == METADATA_NAME for file in checkpoint.files)
        return CheckpointState(
            checkpoint=checkpoint,
            schedulers=tuple(schedulers),
            optimizers=tuple(optimizers),
            counters=counters,
            optimizer_step=newest_step(optimizers),
            writer_step=iterations[0] if iterations else None,
            scheduler_unit=1 if schedulers else None,
            findings=dcp_findings(checkpoint.path, "") if sharded else (),
            lr_hints=hints,
        )


class DcpFormat(CheckpointFormat):
    """A directory written by `torch.distributed.checkpoint.save`."""

    name = "dcp"
    steps = r"step[-_]?(\d+)"
    roles = _ROLES
    stems = STEMS

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A `__R_0.distcp` file directly inside."""
        return any(_PART.fullmatch(entry.path) for entry in entries)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """The metadata, and at least one part."""
        return missing_in_dcp(files, "")

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Optimizers, schedulers and counters found in the tree by their keys."""
        state = read_dcp_state(checkpoint, "", owner="app")
        data = {k: v for k, v in state.counters.items() if "dataloader" in k or "data_loader" in k}
        return replace(state, data=data)
