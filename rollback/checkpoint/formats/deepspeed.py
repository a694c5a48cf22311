"""DeepSpeed checkpoints: a tag directory of model and optimizer states, raw or below Accelerate, ZeRO 0 to 3.

Each rank loads its own groups, so an LR lives in all of them. DeepSpeed's own schedulers store `last_batch_iteration`
and take their LRs from the config of the next launch; the copy of it in the model states is never read back.
`latest` is written before the last rank has finished (engine.py `save_checkpoint`), so it does not prove a complete save.

File names after deepspeed/runtime/engine.py (0.19): `mp_rank_MM_model_states.pt` (ZeRO 3: one a rank,
`zero_pp_rank_R_mp_rank_MM_model_states.pt`) and `[bf16_|fp16_]zero_pp_rank_R_mp_rank_MM_optim_states.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollback.checkpoint.formats.accelerate import AccelerateFormat, read_accelerate_state
from rollback.checkpoint.formats.format import (
    CheckpointFormat,
    RoleAndRank,
    gaps,
    is_lookalike,
    missing_file,
    pointer_findings,
    role_by,
)
from rollback.checkpoint.layout import (
    ACCELERATE_STATE_DIR,
    Checkpoint,
    DirectoryEntry,
    Role,
    StateFile,
)
from rollback.checkpoint.state import (
    CheckpointState,
    OptimizerState,
    as_mapping,
    hints_in,
    last_epoch_of,
    newest_step,
    scheduler_unit,
    states_in,
)
from rollback.disk.content import map_files
from rollback.errors import WRONG_FILE, Finding, Severity
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import plain_number

_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d\d+)_model_states\.pt")
_OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(?P<rank>\d+)|expp_rank_\d+)_mp_rank_(?P<mp>\d\d+)_optim_states\.pt"
)
_EXPERT_STATES = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d\d_model_states\.pt|layer_\d+-model_\d\d-model_states\.pt"
)
_IN_TAG = ((_MODEL_STATES, Role.MODEL), (_OPTIM_STATES, Role.OPTIMIZER), (_EXPERT_STATES, Role.MODEL))


def role_in_tag(name: str) -> RoleAndRank | None:
    """Role and data-parallel rank of a file in a tag directory."""
    return role_by(_IN_TAG, name)


def read_engine(checkpoint: Checkpoint, files: Sequence[StateFile]) -> CheckpointState:
    """The state in all files of one tag: model states and every rank's optimizer states."""
    model_files = [file for file in files if file.role is Role.MODEL and _MODEL_STATES.fullmatch(file.name)]
    optim_files = [file for file in files if file.role is Role.OPTIMIZER]
    models = [_read_model_states(checkpoint, file) for file in model_files]
    parts = map_files(read_optim_states, [(checkpoint.path, file) for file in optim_files])
    first = models[0] if models else CheckpointState(checkpoint=checkpoint)
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


def _named(counters: Mapping[str, int | float], files: Sequence[StateFile]) -> dict[str, int | float]:
    return {f"{files[0].path}:{key}": value for key, value in counters.items()} if files else {}


def _read_model_states(checkpoint: Checkpoint, file: StateFile) -> CheckpointState:
    tree = as_mapping(read_state_file(checkpoint.path / file.path).tree) or {}
    counters: dict[str, int | float] = {}
    for key, value in tree.items():
        number = plain_number(value)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            counters[str(key)] = number
    worlds = {key: counters.pop(key, None) for key in ("dp_world_size", "mp_world_size")}
    parts = {name: tree.get(name) for name in ("lr_scheduler", "optimizer")}
    found = states_in(file.path, parts, owner="engine", rank=file.rank)
    config = as_mapping(tree.get("ds_config")) or {}
    version = tree.get("ds_version")
    zero = as_mapping(config.get("zero_optimization")) or {}
    topology = {**worlds, "zero_stage": plain_number(zero.get("stage")), "deepspeed": version}
    sampler = tree.get("data_sampler")
    own = {key: part for key, part in tree.items() if key not in ("module", "ds_config", "param_shapes")}
    return CheckpointState(
        checkpoint=checkpoint,
        optimizers=found.optimizers,
        schedulers=found.schedulers,
        counters=counters,
        topology={key: value for key, value in topology.items() if value is not None},
        config={key: config[key] for key in ("scheduler", "optimizer") if key in config},
        data={"data_sampler": "saved"} if sampler is not None else {},
        lr_hints=hints_in(file.path, own, found.prefixes),
    )


def read_optim_states(job: tuple[Path, StateFile]) -> tuple[OptimizerState, ...]:
    """The optimizers in one rank's file; `job` is (checkpoint directory, file)."""
    root, file = job
    tree = read_state_file(root / file.path).tree
    return states_in(file.path, tree, owner="engine", rank=file.rank).optimizers


def _other_step(first: Mapping[str, int | float], other: Mapping[str, int | float], file: StateFile) -> list[Finding]:
    if first.get("global_steps") == other.get("global_steps"):
        return []
    return [
        Finding(
            "F4",
            Severity.ERROR,
            file.path,
            f"global_steps is {other.get('global_steps')}, rank 0 has {first.get('global_steps')}: "
            "this file belongs to another checkpoint",
            WRONG_FILE,
        )
    ]


def _rank_count(
    topology: Mapping[str, object], models: Sequence[StateFile], optims: Sequence[StateFile]
) -> list[Finding]:
    """F2: one optimizer part per rank that the model states record; ZeRO 0 keeps no parts."""
    dp, mp, stage = (topology.get(key) for key in ("dp_world_size", "mp_world_size", "zero_stage"))
    if not isinstance(dp, int) or not isinstance(mp, int) or not stage:
        return []
    found = []
    if len(optims) != dp * mp:
        found.append((f"{len(optims)} optimizer parts", f"{dp} data-parallel × {mp} model-parallel ranks ran"))
    expected = dp * mp if stage == 3 else mp
    if len(models) != expected:
        found.append((f"{len(models)} model states", f"{dp}×{mp} ranks write {expected}"))
    return [
        Finding(
            "F2",
            Severity.ERROR,
            (optims or models)[0].folder or ".",
            f"{what} where {why}",
            "go back to a complete checkpoint: the loader would stop, or read the first parts only",
        )
        for what, why in found
    ]


def missing_in_tag(files: Sequence[StateFile]) -> list[Finding]:
    """F2 by names alone: model states are there, and the ranks are contiguous from 0."""
    named = [(_MODEL_STATES.fullmatch(f.name) or _OPTIM_STATES.fullmatch(f.name), f) for f in files]
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


# --- DeepSpeed checkpoints: a tag directory of model and optimizer states, raw or below Accelerate, ZeRO 0 to 3.

_ENGINE_DIR = re.compile(rf"(?:{ACCELERATE_STATE_DIR}/)?pytorch_model(?:_[1-9]\d*)?/([^/]+)")
STEMS = r"mp_rank_\d|_optim_states|_model_states"
SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}


class AccelerateDeepSpeedFormat(AccelerateFormat):
    """`save_state` with DeepSpeed underneath: Accelerate's files, and a tag directory `pytorch_model` beside them."""

    name = "accelerate+deepspeed"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A DeepSpeed file in a directory `pytorch_model/`."""
        return any((found := _ENGINE_DIR.fullmatch(entry.path)) and role_in_tag(found[1]) for entry in entries)

    def role_of(self, path: str) -> RoleAndRank | None:
        """DeepSpeed's names inside the tag directory, Accelerate's outside."""
        inside = _ENGINE_DIR.fullmatch(path)
        if inside:
            return role_in_tag(inside[1])
        name = path.removeprefix(f"{ACCELERATE_STATE_DIR}/")
        if name == "latest":
            return Role.POINTER, None
        return (Role.OTHER, None) if name in SCRIPTS else super().role_of(path)

    def looks_like_state(self, path: str) -> bool:
        """Names like DeepSpeed's inside the tag directory, like Accelerate's outside."""
        inside = _ENGINE_DIR.fullmatch(path)
        if inside:
            return is_lookalike(inside[1], STEMS)
        if re.fullmatch(rf"(?:{ACCELERATE_STATE_DIR}/)?pytorch_model(?:_[1-9]\d*)?", path):
            return False
        return super().looks_like_state(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """As for Accelerate, but weights and optimizer are in the tag directory."""
        tags = sorted({f.folder for f in files if _ENGINE_DIR.fullmatch(f.path)})
        found = [f for tag in tags for f in missing_in_tag([x for x in files if x.folder == tag])]
        return found + super().missing([f for f in files if not _ENGINE_DIR.fullmatch(f.path)])

    def usual(self, files: Sequence[StateFile]) -> list[Finding]:
        """Random states: weights and optimizer are in the tag directory."""
        own = [f for f in files if not _ENGINE_DIR.fullmatch(f.path)]
        return [f for f in super().usual(own) if f.path not in ("model.safetensors", "optimizer.bin")]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Accelerate's files and the engine's, read together."""
        in_tags = [file for file in checkpoint.files if _ENGINE_DIR.fullmatch(file.path)]
        tags = sorted({file.folder for file in in_tags})
        engines = [read_engine(checkpoint, [f for f in in_tags if f.folder == tag]) for tag in tags]
        own = replace(checkpoint, files=tuple(f for f in checkpoint.files if f not in in_tags))
        state = read_accelerate_state(
            own,
            engine_optimizers=tuple(o for engine in engines for o in engine.optimizers),
            engine_schedulers=tuple(s for engine in engines for s in engine.schedulers),
        )
        folder = checkpoint.path / (tags[0].rpartition("/")[0] if tags else "")
        pointers = pointer_findings(folder, tags[0].rpartition("/")[2], "") if tags else []
        return _with_engines(replace(state, checkpoint=checkpoint), engines, pointers)


class DeepSpeedFormat(CheckpointFormat):
    """`engine.save_checkpoint`: a tag directory, `latest` beside it."""

    name = "deepspeed"
    steps = r"global_step(\d+)"
    roles = _IN_TAG
    stems = STEMS

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Model or optimizer states of the engine directly inside."""
        return any(role_in_tag(entry.path) for entry in entries)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Model states, and ranks without gaps."""
        return missing_in_tag(files)

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """The engine's files, and `latest` beside the tag directory."""
        engine = read_engine(checkpoint, checkpoint.files)
        step = newest_step(engine.optimizers)
        pointers = [] if checkpoint.abandoned else pointer_findings(checkpoint.path.parent, checkpoint.path.name, "../")
        state = CheckpointState(
            checkpoint=checkpoint,
            schedulers=engine.schedulers,
            optimizers=engine.optimizers,
            optimizer_step=step,
            scheduler_unit=scheduler_unit(engine.schedulers, step, None),
        )
        return _with_engines(state, [engine], pointers)


class UniversalFormat(DeepSpeedFormat):
    """What `ds_to_universal` makes: one directory a parameter, loadable on any number of ranks."""

    name = "deepspeed universal"
    steps = r"global_step(\d+)_universal"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A `zero/` directory with one directory a parameter."""
        paths = {entry.path for entry in entries}
        return "zero/optimizer_state.pt" in paths or (
            any(path.startswith("zero/") and path.endswith("/fp32.pt") for path in paths)
        )

    def role_of(self, path: str) -> RoleAndRank | None:
        """Files below `zero/` by their names, else the engine's."""
        if path == "zero/optimizer_state.pt" or re.fullmatch(r"zero/.+/(?:exp_avg|exp_avg_sq|step|[a-z_]+)\.pt", path):
            return (Role.MODEL if path.endswith("/fp32.pt") else Role.OPTIMIZER), None
        return role_in_tag(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Files that other parameters have."""
        paths = {file.path for file in files}
        names = {path.rpartition("/")[0] for path in paths if path.endswith("/fp32.pt")}
        kinds = {path.rpartition("/")[2] for path in paths if path.rpartition("/")[0] in names}
        return missing_in_tag(files) + [
            missing_file(f"{name}/{kind}", "the other parameters have it")
            for name in sorted(names)
            for kind in sorted(kinds)
            if f"{name}/{kind}" not in paths
        ]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Counters from the files below `zero/`, schedulers from the model states."""
        models = [f for f in checkpoint.files if _MODEL_STATES.fullmatch(f.path)]
        engine = read_engine(checkpoint, models)
        shared = [f for f in checkpoint.files if f.path == "zero/optimizer_state.pt"]
        counts = [f for f in checkpoint.files if f.path.endswith("/step.pt")]
        steps = [value for value in map_files(_read_step, [(checkpoint.path, f) for f in counts]) if value is not None]
        optimizers = [o for f in shared for o in read_optim_states((checkpoint.path, f))]
        span = (min(steps), max(steps)) if steps else None
        optimizers = [replace(o, steps=o.steps or span, num_states=o.num_states or len(counts)) for o in optimizers]
        step = span[1] if span else None
        state = CheckpointState(
            checkpoint=checkpoint,
            schedulers=engine.schedulers,
            optimizers=tuple(optimizers),
            optimizer_step=step,
            scheduler_unit=scheduler_unit(engine.schedulers, step, None),
        )
        # Any number of ranks may load: how many saved does not matter.
        loose = [finding for finding in engine.findings if finding.check != "F2"]
        above = checkpoint.path.parent
        pointers = pointer_findings(above, checkpoint.path.name, "../", "latest_universal")
        return _with_engines(state, [replace(engine, findings=tuple(loose))], [] if checkpoint.abandoned else pointers)


def _read_step(job: tuple[Path, StateFile]) -> int | None:
    root, file = job
    number = plain_number(read_state_file(root / file.path).tree)
    return int(number) if isinstance(number, (int, float)) else None


def _with_engines(
    state: CheckpointState, engines: Sequence[CheckpointState], pointers: Sequence[Finding]
) -> CheckpointState:
    first = engines[0] if engines else CheckpointState(checkpoint=state.checkpoint)
    dp, mp = first.topology.get("dp_world_size"), first.topology.get("mp_world_size")
    world = dp * mp if isinstance(dp, int) and isinstance(mp, int) else None
    notes = list(state.notes)
    own = [s for s in state.schedulers if "last_batch_iteration" in s.state]
    if own:
        notes.append(
            "DeepSpeed's own scheduler: its LRs come from the config of the next launch (scheduler.params, or "
            "optimizer.params.lr for WarmupCosineLR); no edit of the checkpoint changes them"
        )
        counts = {last_epoch_of(s.state) for s in own}
        notes += [f"its ranks disagree: last_batch_iteration {sorted(map(str, counts))}"] if len(counts) > 1 else []
    counters = {**state.counters, **{k: v for engine in engines for k, v in engine.counters.items()}}
    return replace(
        state,
        counters=counters,
        topology={**state.topology, **first.topology, **({"world_size": world} if world else {})},
        world_size=world or state.world_size,
        config=first.config,
        data={**state.data, **first.data},
        notes=tuple(notes),
        lr_hints=(*state.lr_hints, *first.lr_hints),
        findings=(*state.findings, *(f for engine in engines for f in engine.findings), *pointers),
    )
