"""One tag directory of DeepSpeed: the engine's model states and every rank's optimizer states, read together.

File names after deepspeed/runtime/engine.py (0.19): `mp_rank_MM_model_states.pt` (ZeRO 3: one a rank,
`zero_pp_rank_R_mp_rank_MM_model_states.pt`) and `[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollback.findings import WRONG_FILE, Finding, Severity
from rollback.checkpoint.formats.format import RoleAndRank
from rollback.checkpoint.formats.missing import gaps, missing_file
from rollback.checkpoint.torch_state import as_mapping, find_states, optimizer_state, scheduler_state
from rollback.checkpoint.layout import Checkpoint, Role, StateFile
from rollback.disk.parallel import map_files
from rollback.files.state_file import read_state_file
from rollback.checkpoint.state import OptimizerState, SchedulerState
from rollback.files.torch_tree import plain_number

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d\d+)_model_states\.pt")
OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)|expp_rank_\d+)_mp_rank_(?P<mp>\d\d+)_optim_states\.pt"
)
EXPERT_STATES = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d\d_model_states\.pt|layer_\d+-model_\d\d-model_states\.pt"
)


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the files of one tag directory say together."""

    optimizers: tuple[OptimizerState, ...] = ()
    schedulers: tuple[SchedulerState, ...] = ()
    counters: Mapping[str, int | float] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


def role_in_tag(name: str) -> RoleAndRank | None:
    """Role and data-parallel rank of a file in a tag directory."""
    for pattern, role in ((MODEL_STATES, Role.MODEL), (OPTIM_STATES, Role.OPTIMIZER)):
        found = pattern.fullmatch(name)
        if found:
            rank = found.groupdict().get("rank")
            return role, int(rank) if rank is not None else None
    return (Role.MODEL, None) if EXPERT_STATES.fullmatch(name) else None


def read_engine(checkpoint: Checkpoint, files: Sequence[StateFile]) -> EngineState:
    """Read model states and every rank's optimizer states of one tag."""
    model_files = [file for file in files if file.role is Role.MODEL and MODEL_STATES.fullmatch(_name(file))]
    optim_files = [file for file in files if file.role is Role.OPTIMIZER]
    models = [_read_model_states(checkpoint.path, file) for file in model_files]
    parts = map_files(read_optim_states, [(checkpoint.path, file) for file in optim_files])
    first = models[0] if models else EngineState()
    findings = [finding for model in models for finding in model.findings]
    for model, file in zip(models[1:], model_files[1:], strict=True):
        findings += _other_step(first.counters, model.counters, file)
    findings += _rank_count(first.topology, model_files, optim_files)
    return replace(
        first,
        optimizers=tuple(o for model in models for o in model.optimizers) + tuple(o for part in parts for o in part),
        schedulers=tuple(s for model in models for s in model.schedulers),
        counters=_named(first.counters, model_files),
        findings=tuple(findings),
    )


def _name(file: StateFile) -> str:
    return file.path.rpartition("/")[2]


def _named(counters: Mapping[str, int | float], files: Sequence[StateFile]) -> dict[str, int | float]:
    return {f"{files[0].path}:{key}": value for key, value in counters.items()} if files else {}


def _read_model_states(root: Path, file: StateFile) -> EngineState:
    tree = as_mapping(read_state_file(root / file.path).tree) or {}
    counters: dict[str, int | float] = {}
    for key, value in tree.items():
        number = plain_number(value)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            counters[str(key)] = number
    worlds = {key: counters.pop(key, None) for key in ("dp_world_size", "mp_world_size")}
    schedulers = [
        scheduler_state(file.path, prefix, value, owner="engine", rank=file.rank)
        for prefix, value, kind in find_states({"lr_scheduler": tree.get("lr_scheduler")})
        if kind == "scheduler"
    ]
    optimizers = [
        optimizer_state(file.path, prefix, value, owner="engine", rank=file.rank)
        for prefix, value, kind in find_states({"optimizer": tree.get("optimizer")})
        if kind == "optimizer"
    ]
    config = as_mapping(tree.get("ds_config")) or {}
    version = tree.get("ds_version")
    zero = as_mapping(config.get("zero_optimization")) or {}
    topology = {**worlds, "zero_stage": plain_number(zero.get("stage")), "deepspeed": version}
    sampler = tree.get("data_sampler")
    return EngineState(
        optimizers=tuple(optimizers),
        schedulers=tuple(schedulers),
        counters=counters,
        topology={key: value for key, value in topology.items() if value is not None},
        config={key: config[key] for key in ("scheduler", "optimizer") if key in config},
        data={"data_sampler": "saved"} if sampler is not None else {},
    )


def read_optim_states(job: tuple[Path, StateFile]) -> tuple[OptimizerState, ...]:
    root, file = job
    tree = read_state_file(root / file.path).tree
    return tuple(
        optimizer_state(file.path, prefix, value, owner="engine", rank=file.rank)
        for prefix, value, kind in find_states(tree)
        if kind == "optimizer"
    )


def _other_step(first: Mapping[str, int | float], other: Mapping[str, int | float], file: StateFile) -> list[Finding]:
    if first.get("global_steps") == other.get("global_steps"):
        return []
    return [
        Finding(
            check="F4",
            severity=Severity.ERROR,
            path=file.path,
            message=f"global_steps is {other.get('global_steps')}, rank 0 says {first.get('global_steps')}: "
            "a part of another checkpoint",
            remedy=WRONG_FILE,
        )
    ]


def _rank_count(
    topology: Mapping[str, object], models: Sequence[StateFile], optims: Sequence[StateFile]
) -> list[Finding]:
    """F2: one optimizer part a rank, as many as the model states say ran (ZeRO 0 keeps none apart)."""
    dp, mp, stage = (topology.get(key) for key in ("dp_world_size", "mp_world_size", "zero_stage"))
    if not isinstance(dp, int) or not isinstance(mp, int) or not stage:
        return []
    found = []
    if len(optims) != dp * mp:
        found.append((f"{len(optims)} optimizer parts", f"{dp} data-parallel × {mp} model-parallel ranks ran"))
    expected = dp * mp if stage == 3 else mp
    if len(models) != expected:
        found.append((f"{len(models)} model states", f"{expected} were expected from {dp}×{mp} ranks"))
    return [
        Finding(
            check="F2",
            severity=Severity.ERROR,
            path=(optims or models)[0].path.rpartition("/")[0] or ".",
            message=f"{what} where {why}",
            remedy="go back to a complete checkpoint: the loader would stop, or read the first parts only",
        )
        for what, why in found
    ]


def missing_in_tag(files: Sequence[StateFile]) -> list[Finding]:
    """F2 by names alone: model states are there, and the ranks are contiguous from 0."""
    named = [(MODEL_STATES.fullmatch(_name(f)) or OPTIM_STATES.fullmatch(_name(f)), f) for f in files]
    found: list[Finding] = []
    if not any(match and "model_states" in match[0] for match, _ in named):
        found.append(missing_file("mp_rank_00_model_states.pt", "no model states"))
    for kind in ("model_states", "optim_states"):
        parts = [m for m, _ in named if m is not None and m[0].endswith(f"{kind}.pt") and m["rank"] is not None]
        highest = max((int(part["rank"]) for part in parts), default=-1)
        for mp in sorted({part["mp"] for part in parts}):
            found += _missing_ranks([part for part in parts if part["mp"] == mp], highest)
    return found


def _missing_ranks(parts: Sequence[re.Match[str]], highest: int) -> Iterator[Finding]:
    """The gaps among the data-parallel ranks of one model-parallel rank, named after a part that is there."""
    name, start, end = parts[0][0], *parts[0].span("rank")
    ranks = {int(part["rank"]) for part in parts}
    return gaps(
        ranks, lambda rank: f"{name[:start]}{rank}{name[end:]}", lambda rank: f"rank {rank} of 0–{highest}", highest
    )
