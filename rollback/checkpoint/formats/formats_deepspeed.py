"""DeepSpeed checkpoints: a tag directory of model and optimizer states, raw or below Accelerate, ZeRO 0 to 3.

Each rank loads its own groups, so an LR lives in all of them. DeepSpeed's own schedulers store `last_batch_iteration`
and take their LRs from the config of the next launch; the copy of it in the model states is never read back.
`latest` is written before the last rank has finished (engine.py `save_checkpoint`): it proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollback.findings import Finding
from rollback.checkpoint.formats.accelerate import AccelerateFormat, read_accelerate_state
from rollback.checkpoint.formats.deepspeed import (
    MODEL_STATES,
    EngineState,
    missing_in_tag,
    read_engine,
    read_optim_states,
    role_in_tag,
)
from rollback.checkpoint.formats.format import RoleAndRank
from rollback.checkpoint.formats.missing import missing_file
from rollback.checkpoint.formats.pointers import pointer_findings
from rollback.checkpoint.torch_state import last_epoch_of, scheduler_unit
from rollback.checkpoint.layout import ACCELERATE_STATE_DIR, Checkpoint, Entry, Role, StateFile
from rollback.disk.parallel import map_files
from rollback.files.state_file import read_state_file
from rollback.checkpoint.state import CheckpointState
from rollback.checkpoint.strays import is_leftover, is_lookalike
from rollback.files.torch_tree import plain_number

ENGINE_DIR = re.compile(rf"(?:{ACCELERATE_STATE_DIR}/)?pytorch_model(?:_[1-9]\d*)?/([^/]+)")
TAG_NAME = re.compile(r"global_step(\d+)")
UNIVERSAL_NAME = re.compile(r"global_step(\d+)_universal")
STEMS = re.compile(r"mp_rank_\d|_optim_states|_model_states")
SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}


class AccelerateDeepSpeedFormat(AccelerateFormat):
    """`save_state` with DeepSpeed underneath: Accelerate's files, and a tag directory `pytorch_model` beside them."""

    name = "accelerate+deepspeed"

    def claims(self, name: str, entries: Sequence[Entry]) -> bool:
        return any((found := ENGINE_DIR.fullmatch(entry.path)) and role_in_tag(found[1]) for entry in entries)

    def role_of(self, path: str) -> RoleAndRank | None:
        inside = ENGINE_DIR.fullmatch(path)
        if inside:
            return role_in_tag(inside[1])
        name = path.removeprefix(f"{ACCELERATE_STATE_DIR}/")
        if name == "latest":
            return Role.POINTER, None
        return (Role.OTHER, None) if name in SCRIPTS else super().role_of(path)

    def looks_like_state(self, path: str) -> bool:
        inside = ENGINE_DIR.fullmatch(path)
        if inside:
            return is_leftover(inside[1]) or is_lookalike(inside[1], STEMS)
        if re.fullmatch(rf"(?:{ACCELERATE_STATE_DIR}/)?pytorch_model(?:_[1-9]\d*)?", path):
            return False
        return super().looks_like_state(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        tags = sorted({f.path.rpartition("/")[0] for f in files if ENGINE_DIR.fullmatch(f.path)})
        found = [f for tag in tags for f in missing_in_tag([x for x in files if x.path.rpartition("/")[0] == tag])]
        own = [f for f in files if not ENGINE_DIR.fullmatch(f.path)]
        wanted = {"model.safetensors", "optimizer.bin"}  # the engine keeps these
        return found + [f for f in super().missing(own) if f.path not in wanted]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        in_tags = [file for file in checkpoint.files if ENGINE_DIR.fullmatch(file.path)]
        tags = sorted({file.path.rpartition("/")[0] for file in in_tags})
        engines = [read_engine(checkpoint, [f for f in in_tags if f.path.rpartition("/")[0] == tag]) for tag in tags]
        own = replace(checkpoint, files=tuple(f for f in checkpoint.files if f not in in_tags))
        state = read_accelerate_state(
            own,
            engine_optimizers=tuple(o for engine in engines for o in engine.optimizers),
            engine_schedulers=tuple(s for engine in engines for s in engine.schedulers),
        )
        folder = checkpoint.path / (tags[0].rpartition("/")[0] if tags else "")
        pointers = pointer_findings(folder, tags[0].rpartition("/")[2], "") if tags else []
        return _with_engines(replace(state, checkpoint=checkpoint), engines, pointers)


class DeepSpeedFormat:
    """`engine.save_checkpoint`: a tag directory, `latest` beside it."""

    name = "deepspeed"

    def claims(self, name: str, entries: Sequence[Entry]) -> bool:
        return any(role_in_tag(entry.path) for entry in entries)

    def step_in_name(self, name: str) -> int | None:
        found = TAG_NAME.fullmatch(name)
        return int(found[1]) if found else None

    def role_of(self, path: str) -> RoleAndRank | None:
        return role_in_tag(path)

    def looks_like_state(self, path: str) -> bool:
        return "/" not in path and (is_leftover(path) or is_lookalike(path, STEMS))

    def loader_lists_siblings(self, name: str) -> bool:
        return False  # it follows `latest`

    def is_checkpoint_name(self, name: str) -> bool:
        return TAG_NAME.fullmatch(name) is not None

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        return missing_in_tag(files)

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        engine = read_engine(checkpoint, checkpoint.files)
        step = max((o.steps[1] for o in engine.optimizers if o.steps), default=None)
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

    def claims(self, name: str, entries: Sequence[Entry]) -> bool:
        paths = {entry.path for entry in entries}
        return "zero/optimizer_state.pt" in paths or (
            any(path.startswith("zero/") and path.endswith("/fp32.pt") for path in paths)
        )

    def step_in_name(self, name: str) -> int | None:
        found = UNIVERSAL_NAME.fullmatch(name)
        return int(found[1]) if found else None

    def is_checkpoint_name(self, name: str) -> bool:
        return UNIVERSAL_NAME.fullmatch(name) is not None

    def role_of(self, path: str) -> RoleAndRank | None:
        if path == "zero/optimizer_state.pt" or re.fullmatch(r"zero/.+/(?:exp_avg|exp_avg_sq|step|[a-z_]+)\.pt", path):
            return (Role.MODEL if path.endswith("/fp32.pt") else Role.OPTIMIZER), None
        return role_in_tag(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
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
        models = [f for f in checkpoint.files if MODEL_STATES.fullmatch(f.path)]
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
        # The ranks that saved are history: any number may load.
        loose = [finding for finding in engine.findings if finding.check != "F2"]
        above = checkpoint.path.parent
        pointers = pointer_findings(above, checkpoint.path.name, "../", "latest_universal")
        return _with_engines(state, [replace(engine, findings=tuple(loose))], [] if checkpoint.abandoned else pointers)


def _read_step(job: tuple[Path, StateFile]) -> int | None:
    root, file = job
    number = plain_number(read_state_file(root / file.path).tree)
    return int(number) if isinstance(number, (int, float)) else None


def _with_engines(
    state: CheckpointState, engines: Sequence[EngineState], pointers: Sequence[Finding]
) -> CheckpointState:
    first = engines[0] if engines else EngineState()
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
        findings=(*state.findings, *(f for engine in engines for f in engine.findings), *pointers),
    )
