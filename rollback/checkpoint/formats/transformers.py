"""`checkpoint-N` of transformers' Trainer.

Names after transformers/trainer.py and trainer_callback.py (5.23). N is `global_step`. If `scheduler.pt` or
`optimizer.pt` is missing the Trainer loads neither and says nothing (`_load_optimizer_and_scheduler` has no else).
A directory may also hold a DeepSpeed tag (`global_stepN`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from rollback.checkpoint.formats.deepspeed import read_engine, role_in_tag
from rollback.checkpoint.formats.format import (
    CheckpointFormat,
    RoleAndRank,
    gaps,
    missing_file,
    pointer_findings,
    rng_digest,
)
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile
from rollback.checkpoint.state import (
    CheckpointState,
    as_mapping,
    newest_step,
    optimizer_state,
    scheduler_state,
    scheduler_unit,
)
from rollback.errors import Finding
from rollback.files.state_file import read_state_file
from rollback.files.torch_tree import TorchFile

_ENGINE_FILE = re.compile(r"(global_step\d+)/([^/]+)")
_ROLES = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(?:model|(?:[^/]+/)?adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?", Role.MODEL),
        (r"(?:pytorch_model|(?:[^/]+/)?adapter_model)(?:-\d{5}-of-\d{5})?\.bin(?:\.index\.json)?", Role.MODEL),
        (r"optimizer\.(?:pt|bin)", Role.OPTIMIZER),
        (r"scheduler\.pt", Role.SCHEDULER),
        (r"trainer_state\.json", Role.COUNTERS),
        (r"rng_state(?:_(?P<rank>\d+))?\.pth", Role.RNG),
        (r"training_args\.bin|scaler\.pt", Role.OTHER),
        (r"latest", Role.POINTER),
    )
)
_OWN = re.compile(  # of a Trainer alone
    r"trainer_state\.json|training_args\.bin|rng_state(_\d+)?\.pth|global_step\d+|.*(?:pytorch_model|model).*\.(?:bin|safetensors)"
)
_FOREIGN = re.compile(r"[^/]+\.(?:pt|pth|ckpt|tar|pkl)")
_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "bf16",
    "fp16", "optim", "ignore_data_skip", "deepspeed", "load_best_model_at_end",
)  # fmt: skip


class TransformersFormat(CheckpointFormat):
    """transformers' Trainer."""

    name = "transformers"
    steps = r"checkpoint-(\d+)"  # the `global_step`
    roles = _ROLES
    stems = r"optimizer|scheduler|trainer_state|rng_state|model\.safetensors|pytorch_model"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """`checkpoint-N`, or a Trainer's optimizer or scheduler file beside what only a Trainer writes.

        A script may call its own files `optimizer.pt` and `scheduler.pt`, and its directory `checkpoint-N`.
        """
        paths = {entry.path for entry in entries}
        own = any(_OWN.fullmatch(path) for path in paths)
        named = self.is_checkpoint_name(name)
        if named and not any(_FOREIGN.fullmatch(path) and not self.role_of(path) for path in paths):
            own = own or any(self.role_of(path) for path in paths)
        # After training, `output_dir` itself holds a trainer_state.json beside its checkpoints: that is no checkpoint.
        return own and (named or bool({"optimizer.pt", "scheduler.pt"} & paths))

    def role_of(self, path: str) -> RoleAndRank | None:
        """By the Trainer's file names, and DeepSpeed's inside `global_stepN/`."""
        inside = _ENGINE_FILE.fullmatch(path)
        return role_in_tag(inside[2]) if inside else super().role_of(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Gaps among the random states of the ranks."""
        ranks = {file.rank for file in files if file.role is Role.RNG and file.rank is not None}
        highest = max(ranks, default=-1)
        return list(gaps(ranks, "rng_state_{}.pth".format, lambda rank: f"rank {rank} of 0–{highest}", highest))

    def usual(self, files: Sequence[StateFile]) -> list[Finding]:
        """Weights, trainer state, optimizer, scheduler and RNG files."""
        names = {file.path for file in files}
        engine = any(_ENGINE_FILE.fullmatch(name) for name in names)
        found = []
        if not any(file.role is Role.MODEL for file in files):
            found.append(("model.safetensors", "no model weights"))
        if "trainer_state.json" not in names:
            found.append(("trainer_state.json", "no global step: the Trainer stops"))
        if not engine and not any(file.role is Role.OPTIMIZER for file in files):
            found.append(("optimizer.pt", "the Trainer loads neither optimizer nor scheduler then, and says nothing"))
        if "scheduler.pt" not in names and not engine:
            found.append(("scheduler.pt", "the Trainer loads neither optimizer nor scheduler then, and says nothing"))
        if not any(file.role is Role.RNG for file in files):
            found.append(("rng_state.pth", "no random states: the Trainer starts new ones and says nothing"))
        return [missing_file(name, why) for name, why in found]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """The Trainer's files, its arguments, and DeepSpeed's where there are any."""
        here = {file.path for file in checkpoint.files}

        def read(name: str) -> TorchFile:
            return read_state_file(checkpoint.path / name)

        optimizers = tuple(optimizer_state(p, (), read(p).tree) for p in ("optimizer.pt", "optimizer.bin") if p in here)
        schedulers = tuple(
            scheduler_state(p, (), read(p).tree, owner="trainer") for p in ("scheduler.pt",) if p in here
        )
        in_tag = [file for file in checkpoint.files if _ENGINE_FILE.fullmatch(file.path)]
        engine = read_engine(checkpoint, in_tag)
        optimizers, schedulers = (*optimizers, *engine.optimizers), (*schedulers, *engine.schedulers)
        step = newest_step(optimizers)
        digests = {f.rank or 0: rng_digest(read(f.path)) for f in checkpoint.with_role(Role.RNG)}
        log = read("trainer_state.json").tree if "trainer_state.json" in here else {}
        pointers = pointer_findings(checkpoint.path, in_tag[0].path.partition("/")[0], "") if in_tag else []
        state = CheckpointState(
            checkpoint=checkpoint,
            schedulers=schedulers,
            optimizers=optimizers,
            counters={**_counters(log), **engine.counters},
            rng_ranks=tuple(sorted(digests)),
            rng_digests=digests,
            world_size=len(digests) or None,
            optimizer_step=step,
            writer_step=_global_step(log),
            scheduler_unit=scheduler_unit(schedulers, step, None),
            data=_data(log),
            config={**_arguments(checkpoint), **engine.config},
            topology=engine.topology,
            findings=(*engine.findings, *pointers),
            lr_hints=engine.lr_hints,
        )
        return replace(state, notes=tuple(_notes(state, log)))


def _global_step(log: object) -> int | None:
    step = (as_mapping(log) or {}).get("global_step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _counters(log: object) -> dict[str, int | float]:
    found = as_mapping(log) or {}
    names = ("global_step", "epoch", "max_steps", "num_train_epochs", "total_flos", "train_batch_size")
    return {
        f"trainer_state.json:{name}": value
        for name in names
        if isinstance(value := found.get(name), (int, float)) and not isinstance(value, bool)
    }


def _data(log: object) -> Mapping[str, object]:
    """The data position: the Trainer skips batches by epoch and step."""
    found = as_mapping(log) or {}
    if "epoch" not in found:
        return {}
    return {"position": f"recomputed by skipping batches: epoch {found['epoch']}, step {found.get('global_step')}"}


def _arguments(checkpoint: Checkpoint) -> dict[str, object]:
    """The arguments of `training_args.bin` that concern schedule, data and topology."""
    if not any(file.path == "training_args.bin" for file in checkpoint.files):
        return {}
    tree = as_mapping(read_state_file(checkpoint.path / "training_args.bin").tree) or {}
    found = {name: _plain(tree[name]) for name in _ARGUMENTS if name in tree and tree[name] is not None}
    if not isinstance(found.get("deepspeed"), str):
        found.pop("deepspeed", None)  # given as a dict, it is in the engine's own copy
    return found


def _plain(value: object) -> object:
    """The value of an enum member, which a pickle holds as its only argument; anything else as it is."""
    arguments = getattr(value, "args", None)
    return arguments[0] if isinstance(arguments, tuple) and len(arguments) == 1 else value


def _notes(state: CheckpointState, log: object) -> Iterator[str]:
    if state.config.get("ignore_data_skip"):
        yield "ignore_data_skip is set: after a resume the data starts from the beginning"
    best = (as_mapping(log) or {}).get("best_model_checkpoint")
    if isinstance(best, str) and best and state.checkpoint.abandoned is None:
        name = PurePath(best).name
        if not (state.checkpoint.path.parent / name).is_dir():
            yield (
                f"best_model_checkpoint names `{best}`, and there is no `{name}` beside this checkpoint (moved away or "
                "removed): at the end of the training `load_best_model_at_end` would find nothing there"
            )
