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

from rollback.checkpoint.formats.format import CheckpointFormat, RoleAndRank, missing_file
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile, is_leftover, is_lookalike
from rollback.checkpoint.state import (
    CheckpointState,
    LrHint,
    OptimizerState,
    Prefix,
    SchedulerState,
    counters_in,
    find_states,
    hints_in,
    optimizer_state,
    scheduler_state,
    scheduler_unit,
)
from rollback.errors import Finding, RollbackError, Severity
from rollback.files.dcp_file import METADATA_NAME, missing_chunks, read_dcp_directory
from rollback.files.state_file import read_state_file

STEP_NAME = re.compile(r"step[-_]?(\d+)")
_PART = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")
STEMS = re.compile(r"\.distcp|^\.metadata")


def role_in_dcp(name: str, role: Role = Role.MODEL) -> RoleAndRank | None:
    """Role and rank of a file in a DCP directory that holds `role`."""
    if name == METADATA_NAME:
        return role, None
    found = _PART.fullmatch(name)
    return (role, int(found["rank"])) if found else None


def read_dcp_state(checkpoint: Checkpoint, folder: str, *, owner: str) -> CheckpointState:
    """The state in the DCP directory `folder` ("" for the checkpoint itself) of `checkpoint`."""
    directory = checkpoint.path / folder if folder else checkpoint.path
    index_name = f"{folder}/{METADATA_NAME}" if folder else METADATA_NAME
    file, located = read_dcp_directory(directory)
    found = find_states(file.tree)
    schedulers = tuple(
        scheduler_state(index_name, prefix, value, owner=owner) for prefix, value, kind in found if kind == "scheduler"
    )
    optimizers = tuple(
        optimizer_state(index_name, prefix, value, owner=owner) for prefix, value, kind in found if kind == "optimizer"
    )
    step = max((o.steps[1] for o in optimizers if o.steps), default=None)
    places: dict[tuple[str, Prefix], str] = {
        (index_name, keys): f"{folder}/{name}" if folder else name for keys, name in located.items()
    }
    inside = {prefix[:1] for prefix, _, _ in found if len(prefix) == 1}
    tree = file.tree if isinstance(file.tree, dict) else {}
    rest = {key: value for key, value in tree.items() if (key,) not in inside}
    counters = counters_in(index_name, rest, levels=3)
    return CheckpointState(
        checkpoint=checkpoint,
        schedulers=schedulers,
        optimizers=optimizers,
        counters=_without_states(counters, [prefix for prefix, _, _ in found]),
        optimizer_step=step,
        scheduler_unit=scheduler_unit(schedulers, step, None),
        located=places,
        findings=dcp_findings(directory, folder),
        lr_hints=hints_in(index_name, file.tree, [prefix for prefix, _, _ in found]),
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
            check="F2",
            severity=Severity.ERROR,
            path=f"{folder}/{name}" if folder else name,
            message=what,
            remedy="go back to a complete checkpoint, or restore the file",
        )
        for name, what in problems
    )


def missing_in_dcp(files: Sequence[StateFile], folder: str) -> list[Finding]:
    """F2 by names: the metadata is there, and at least one part."""
    names = {file.path.rpartition("/")[2] for file in files if file.path.rpartition("/")[0] == folder}
    found = []
    if METADATA_NAME not in names:
        found.append((METADATA_NAME, "it is written last, so the save was interrupted"))
    if not any(_PART.fullmatch(name) for name in names):
        found.append(("__0_0.distcp", "no part holds any data"))
    return [missing_file(name, why, f"{folder}/{name}" if folder else name) for name, why in found]


_MEGATRON_NAME = re.compile(r"iter_(\d{7,})")
_MEGATRON_FILE = re.compile(
    r"mp_rank_\d\d(?:_\d{3}){0,2}/(?P<stem>model_optim_rng|model_rng|optim|distrib_optim|model_optim_rng\.pt_optim)\.pt"
)
_MEGATRON_COMMON = "common.pt"


class MegatronFormat(CheckpointFormat):
    """`iter_NNNNNNN` of Megatron-LM and what is built on it: one file a rank (`torch`), or DCP and `common.pt`."""

    name = "megatron"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A rank's file, or `common.pt` beside the parts, in a directory of that name."""
        paths = {entry.path for entry in entries}
        files = any(_MEGATRON_FILE.fullmatch(path) for path in paths)
        return self.is_checkpoint_name(name) and (files or _MEGATRON_COMMON in paths)

    def step_in_name(self, name: str) -> int | None:
        """N in `iter_N`: the iterations done, which are optimizer steps."""
        found = _MEGATRON_NAME.fullmatch(name)
        return int(found[1]) if found else None

    def role_of(self, path: str) -> RoleAndRank | None:
        """Ranks' files, `common.pt`, and the parts of the DCP layout."""
        found = _MEGATRON_FILE.fullmatch(path)
        if found:
            return (Role.OPTIMIZER if "optim" in found["stem"] else Role.MODEL), None
        if path == _MEGATRON_COMMON:
            return Role.OPTIMIZER, None
        return (Role.OTHER, None) if path in ("metadata.json", "modelopt_state") else role_in_dcp(path)

    def looks_like_state(self, path: str) -> bool:
        """Leftovers among the parts."""
        return "/" not in path and (is_leftover(path) or is_lookalike(path, STEMS))

    def is_checkpoint_name(self, name: str) -> bool:
        """`iter_N` with at least seven digits."""
        return _MEGATRON_NAME.fullmatch(name) is not None

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
            found = find_states(tree)
            optimizers += [optimizer_state(file, p, v, rank=rank) for p, v, kind in found if kind == "optimizer"]
            schedulers += [scheduler_state(file, p, v, owner="app", rank=rank) for p, v, kind in found if kind == "scheduler"]
            counters.update(counters_in(file, tree, levels=1) if not counters else {})
            hints += hints_in(file, tree, [prefix for prefix, _, _ in found])
        iterations = [int(value) for name, value in counters.items() if name.endswith(":iteration")]
        sharded = any(file.path == METADATA_NAME for file in checkpoint.files)
        return CheckpointState(
            checkpoint=checkpoint,
            schedulers=tuple(schedulers),
            optimizers=tuple(optimizers),
            counters=counters,
            optimizer_step=max((o.steps[1] for o in optimizers if o.steps), default=None),
            writer_step=iterations[0] if iterations else None,
            scheduler_unit=1 if schedulers else None,
            findings=dcp_findings(checkpoint.path, "") if sharded else (),
            lr_hints=hints,
        )


class DcpFormat(CheckpointFormat):
    """A directory written by `torch.distributed.checkpoint.save`."""

    name = "dcp"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A `__R_0.distcp` file directly inside."""
        return any(_PART.fullmatch(entry.path) for entry in entries)

    def step_in_name(self, name: str) -> int | None:
        """N in `step-N`."""
        found = STEP_NAME.fullmatch(name)
        return int(found[1]) if found else None

    def role_of(self, path: str) -> RoleAndRank | None:
        """Metadata and parts are one model state, whatever the app put into them."""
        return role_in_dcp(path)

    def looks_like_state(self, path: str) -> bool:
        """Names like `.metadata` or `.distcp`, directly inside."""
        return "/" not in path and (is_leftover(path) or is_lookalike(path, STEMS))

    def is_checkpoint_name(self, name: str) -> bool:
        """`step-N`."""
        return STEP_NAME.fullmatch(name) is not None

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """The metadata, and at least one part."""
        return missing_in_dcp(files, "")

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Optimizers, schedulers and counters found in the tree by their keys."""
        state = read_dcp_state(checkpoint, "", owner="app")
        data = {k: v for k, v in state.counters.items() if "dataloader" in k or "data_loader" in k}
        return replace(state, data=data)
