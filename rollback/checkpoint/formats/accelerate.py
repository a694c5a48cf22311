"""Checkpoints of `Accelerator.save_state`: single process, DDP, FSDP, DeepSpeed underneath.

Names after accelerate/utils/constants.py and checkpointing.py (1.15). Two layouts: the state directory itself
(`checkpoint_7`, whose number counts saves and is no step) and the seed's `opt_step-<N>/accelerator_state/`.
The load order decides what is authoritative: model, optimizers, schedulers, RNG, and registered objects last
(accelerator.py `load_state`), so a registered scheduler overrides a prepared one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rollback.checkpoint.formats.dcp import dcp_findings, missing_in_dcp, read_dcp_state
from rollback.checkpoint.formats.format import (
    CheckpointFormat,
    RoleAndRank,
    gaps,
    is_lookalike,
    missing_file,
    rng_digest,
)
from rollback.checkpoint.layout import (
    ACCELERATE_STATE_DIR,
    Checkpoint,
    DirectoryEntry,
    Role,
    StateFile,
    is_leftover,
)
from rollback.checkpoint.state import (
    CheckpointState,
    LrHint,
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
)
from rollback.errors import Finding
from rollback.files.state_file import read_state_file

_INDEX = r"(?:_(?:[1-9]\d*))?"
_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (rf"optimizer{_INDEX}\.bin", Role.OPTIMIZER),
        (rf"scheduler{_INDEX}\.bin", Role.SCHEDULER),
        (r"custom_checkpoint_(?:0|[1-9]\d*)\.pkl", Role.CUSTOM),
        (r"random_states_(?P<rank>0|[1-9]\d*)\.pkl", Role.RNG),
        (rf"sampler{_INDEX}\.bin", Role.DATA),
        (rf"dl_state_dict{_INDEX}\.bin", Role.DATA),
        (r"scaler\.pt", Role.OTHER),
        (rf"pytorch_model_fsdp{_INDEX}\.bin", Role.MODEL),
        (r"pytorch_model_fsdp(?:_\d+)?_rank(?P<rank>\d+)\.bin", Role.MODEL),
        (r"optimizer(?:_\d+)?_rank(?P<rank>\d+)\.bin", Role.OPTIMIZER),
        (r"pytorch_model_fsdp_\d+/(?:\.metadata|__(?P<rank>\d+)_\d+\.distcp)", Role.MODEL),
        (r"optimizer_\d+/(?:\.metadata|__(?P<rank>\d+)_\d+\.distcp)", Role.OPTIMIZER),
        (r"(?:adapter_model|pytorch_lora_weights|diffusion_pytorch_model)\.safetensors", Role.MODEL),  # by save hooks
        (rf"(?:model{_INDEX}|model{_INDEX}-\d{{5}}-of-\d{{5}})\.safetensors(?:\.index\.json)?", Role.MODEL),
        (rf"(?:pytorch_model{_INDEX}|pytorch_model{_INDEX}-\d{{5}}-of-\d{{5}})\.bin(?:\.index\.json)?", Role.MODEL),
    )
)
_USUAL = (
    (Role.MODEL, "model.safetensors", "no model weights"),
    (Role.OPTIMIZER, "optimizer.bin", "no optimizer state"),
    (Role.RNG, "random_states_0.pkl", "no random states: Accelerate would continue with new ones"),
)
_FSDP_DIR = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")  # sharded state: a DCP directory each


class AccelerateFormat(CheckpointFormat):
    """`save_state` without an engine underneath: single process and DDP."""

    name = "accelerate"
    steps = r"opt_step-(\d+)|checkpoint_\d+"  # the number in `checkpoint_7` counts saves
    roles = _ROLES
    stems = r"custom_checkpoint|random_states|optimizer|scheduler|dl_state_dict|pytorch_model|model\.safetensors"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """RNG files of Accelerate, or one of its names with a file that it writes."""
        paths = {entry.path for entry in entries}
        inside = f"{ACCELERATE_STATE_DIR}/"
        names = {path.removeprefix(inside) for path in paths if path.startswith(inside)} or paths
        if any(re.fullmatch(r"random_states_\d+\.pkl", path) for path in names):
            return True
        return self.is_checkpoint_name(name) and any(map(super().role_of, names))

    def role_of(self, path: str) -> RoleAndRank | None:
        """By Accelerate's file names, in the directory itself or in `accelerator_state/`."""
        return super().role_of(path.removeprefix(f"{ACCELERATE_STATE_DIR}/"))

    def looks_like_state(self, path: str) -> bool:
        """Names like Accelerate's own, in the state directory or in a DCP directory of FSDP."""
        inside = path.removeprefix(f"{ACCELERATE_STATE_DIR}/")
        folder, _, name = inside.rpartition("/")
        if _FSDP_DIR.fullmatch(folder):
            return is_leftover(name) or ".distcp" in name or ".metadata" in name
        if folder or _FSDP_DIR.fullmatch(inside):
            return False  # `load_state` lists one directory; what lies below it was saved by a hook
        return is_lookalike(inside, self.stems)

    def loader_lists_siblings(self, name: str) -> bool:
        """With automatic naming `load_state()` takes the first number in each name, `checkpoint_2.orig` included."""
        return self.is_checkpoint_name(name) and name.startswith("checkpoint_")

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Gaps among RNG files and registered objects, and parts of sharded state."""
        found: list[Finding] = []
        for role, stem in ((Role.RNG, "random_states_{}.pkl"), (Role.CUSTOM, "custom_checkpoint_{}.pkl")):
            found += _gaps(files, role, stem)
        return found + [finding for folder in _dcp_folders(files) for finding in missing_in_dcp(files, folder)]

    def usual(self, files: Sequence[StateFile]) -> list[Finding]:
        """Weights, optimizer and random states."""
        held = {file.role for file in files}
        return [missing_file(name, why) for role, name, why in _USUAL if role not in held]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Accelerate's files, and the DCP directories of FSDP where there are any."""
        folders = _dcp_folders(checkpoint.files)
        of_optimizers = [f for f in folders if f.rpartition("/")[2].startswith("optimizer_")]
        parts = [read_dcp_state(checkpoint, folder, owner="fsdp") for folder in of_optimizers]
        weights = [f for folder in folders if folder not in of_optimizers
                   for f in dcp_findings(checkpoint.path / folder, folder)]  # fmt: skip
        state = read_accelerate_state(
            checkpoint, engine_optimizers=tuple(o for part in parts for o in part.optimizers), engine_schedulers=()
        )
        return replace(
            state,
            located={key: name for part in parts for key, name in part.located.items()},
            findings=(*(f for part in parts for f in part.findings), *weights),
            topology={**state.topology, **({"engine": "FSDP, sharded state"} if folders else {})},
        )


def _dcp_folders(files: Sequence[StateFile]) -> list[str]:
    """The DCP directories of an FSDP checkpoint, relative to it."""
    folders = {file.folder for file in files}
    return sorted(folder for folder in folders if _FSDP_DIR.fullmatch(folder.rpartition("/")[2]))


def _gaps(files: Sequence[StateFile], role: Role, stem: str) -> list[Finding]:
    """Numbered files must be contiguous from 0: Accelerate loads by count and index."""
    pattern = re.compile(re.escape(stem).replace(r"\{\}", r"(\d+)"))
    numbers = {int(found[1]) for file in files if (found := pattern.fullmatch(file.name))}
    highest = max(numbers, default=-1)
    what = f"it is number {{}} of 0–{highest}, and only {len(numbers)} exist"
    return list(gaps(numbers, stem.format, what.format, highest))


def read_accelerate_state(
    checkpoint: Checkpoint,
    *,
    engine_optimizers: tuple[OptimizerState, ...],
    engine_schedulers: tuple[SchedulerState, ...],
) -> CheckpointState:
    """The state without the weights, with the optimizers and schedulers of an engine underneath (DeepSpeed, FSDP)."""
    optimizers = [
        optimizer_state(file.path, (), read_state_file(checkpoint.path / file.path).tree, rank=file.rank)
        for file in checkpoint.with_role(Role.OPTIMIZER)
        if file.path.endswith(".bin")
    ]
    schedulers, counters, hints = _schedulers_and_counters(checkpoint)
    digests: dict[int, str] = {}
    for file in checkpoint.with_role(Role.RNG):
        content = read_state_file(checkpoint.path / file.path)
        digests[file.rank or 0] = rng_digest(content)
        if file.rank == 0:
            counters.update(counters_in(file.path, {"step": (as_mapping(content.tree) or {}).get("step")}))
    ranks = tuple(sorted(digests))
    world_size = len(ranks) or None
    all_optimizers = (*optimizers, *engine_optimizers)
    step = newest_step(all_optimizers)
    all_schedulers = (*schedulers, *engine_schedulers)
    return CheckpointState(
        checkpoint=checkpoint,
        schedulers=all_schedulers,
        optimizers=all_optimizers,
        counters=counters,
        rng_ranks=ranks,
        rng_digests=digests,
        world_size=world_size,
        scheduler_unit=scheduler_unit(all_schedulers, step, world_size),
        optimizer_step=step,
        notes=_notes(all_schedulers, all_optimizers),
        topology={"world_size": world_size} if world_size else {},
        data={file.path: file.size_bytes for file in checkpoint.with_role(Role.DATA)},
        lr_hints=hints,
    )


def _schedulers_and_counters(
    checkpoint: Checkpoint,
) -> tuple[list[SchedulerState], dict[str, int | float], tuple[LrHint, ...]]:
    prepared: list[SchedulerState] = []
    hints: tuple[LrHint, ...] = ()
    registered: list[SchedulerState] = []
    counters: dict[str, int | float] = {}
    for file in checkpoint.with_role(Role.SCHEDULER):
        tree = read_state_file(checkpoint.path / file.path).tree
        prepared.append(scheduler_state(file.path, (), tree, owner="prepared"))
    for file in checkpoint.with_role(Role.CUSTOM):
        tree = read_state_file(checkpoint.path / file.path).tree
        if is_scheduler(tree):
            registered.append(scheduler_state(file.path, (), tree, owner="registered"))
        elif not is_optimizer(tree):
            counters.update(counters_in(file.path, tree))
            hints += hints_in(file.path, tree, [prefix for prefix, _, _ in find_states(tree)])
    if registered:
        prepared = [replace(s, authoritative=not _overridden(s, registered)) for s in prepared]
    return [*prepared, *registered], counters, hints


def _overridden(prepared: SchedulerState, registered: list[SchedulerState]) -> bool:
    """Whether a registered scheduler has the same fields: then it is the same object, and it is loaded last."""
    return any(prepared.state.keys() == other.state.keys() for other in registered)


def _notes(schedulers: tuple[SchedulerState, ...], optimizers: tuple[OptimizerState, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if not schedulers:
        notes.append("no scheduler was saved: after a resume the LR starts from the beginning of its schedule")
    for scheduler in schedulers:
        if not scheduler.authoritative:
            notes.append(f"{scheduler.file} is overridden: the registered scheduler is loaded after it")
        elif last_epoch_of(scheduler.state) is None:
            notes.append(f"{scheduler.file} holds no counter")
    notes += [f"{o.file} holds no per-parameter state" for o in optimizers if not o.num_states]
    return tuple(notes)
