"""Directories of several torch files, each part in a file of its own: litgpt, OLMo-core, SpeechBrain, torchtune, and scripts.

A rollback moves them, and edits the LRs in each file. Where their launches take the LR from is in `rollback.lr.authority`.
Layouts:

    litgpt       step-N/lit_model.pth (a file, or DCP parts below it) beside hyperparameters.yaml, which holds the arguments
                 (litgpt/pretrain.py `save_checkpoint`)
    OLMo-core    stepN/model_and_optim (DCP), train/rankR.pt, .metadata.json, which is written last
                 (olmo_core/train/checkpoint.py `Checkpointer._save`)
    SpeechBrain  CKPT+NAME/CKPT.yaml beside one .ckpt for each part; brain.ckpt is YAML and has `optimizer_step`
                 (speechbrain/utils/checkpoints.py `Checkpointer.save_checkpoint`, core.py `Brain._save`)
    torchtune    epoch_N or step_N with the weights; recipe_state/recipe_state.pt beside them
                 (torchtune/training/checkpointing/_utils.py, `RECIPE_STATE_DIRNAME`)
    a script     step_N, checkpoint-N, epochN, N, … with torch files directly in it, named as the script likes

The name of a script's directory is no proof: its step is what the files in it count, and a directory that is a number alone
is a checkpoint only where they count to that number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rollback.checkpoint.formats.dcp import missing_in_dcp, read_dcp_state, role_in_dcp
from rollback.checkpoint.formats.format import RoleAndRank, missing_file
from rollback.checkpoint.formats.named import NamedFormat
from rollback.checkpoint.formats.torch_checkpoint import STEP_KEYS, holds_states, read_script_state, with_counted_step
from rollback.checkpoint.layout import (
    TORCH_ENDINGS,
    Checkpoint,
    DirectoryEntry,
    FileType,
    Role,
    StateFile,
    is_leftover,
    saved_numbers,
)
from rollback.checkpoint.state import CheckpointState, HintKind, LrHint, scheduler_state, scheduler_unit
from rollback.disk.content import read_bounded
from rollback.errors import Finding, UnknownFormat
from rollback.files.config_text import NotPlainConfig, numbers
from rollback.files.dcp_file import METADATA_NAME
from rollback.files.state_file import read_state_file

_MAX_TEXT = 1 << 20
_RUN = re.compile(r"(?i)(?:last|latest|newest|best|current|final)\b.*")


class FolderFormat(NamedFormat):
    """A directory whose torch files and DCP directories are read one after the other; `texts` are files in other forms."""

    editable = True
    torch_files: ClassVar[str] = r".*\.(?:pt|pth|ckpt)"
    texts: ClassVar[str] = ""

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """The states of all parts together, each named by its file."""
        folders = {f.folder for f in checkpoint.files if f.name == METADATA_NAME}
        parts = [read_dcp_state(checkpoint, folder, owner="app") for folder in sorted(folders)]
        for file in checkpoint.files:
            is_text = re.fullmatch(self.texts, file.path) is not None
            if not is_text and file.role is not Role.MODEL and self.holds_state(checkpoint, file):
                parts.append(_read_part(checkpoint, file))
        schedulers = tuple(s for part in parts for s in part.schedulers)
        return CheckpointState(
            checkpoint=checkpoint,
            schedulers=schedulers,
            optimizers=tuple(o for part in parts for o in part.optimizers),
            counters={key: value for part in parts for key, value in part.counters.items()},
            optimizer_step=max((p.optimizer_step or 0 for p in parts if p.optimizers), default=None),
            writer_step=next((p.writer_step for p in parts if p.writer_step is not None), None),
            scheduler_unit=1 if schedulers else None,
            rng_ranks=tuple(rank for part in parts for rank in part.rng_ranks),
            findings=tuple(finding for part in parts for finding in part.findings),
            located={key: name for part in parts for key, name in part.located.items()},
            lr_hints=tuple(hint for part in parts for hint in part.lr_hints),
        )

    def holds_state(self, checkpoint: Checkpoint, file: StateFile) -> bool:
        """Whether a file is read as state."""
        return re.fullmatch(self.torch_files, file.path) is not None

    def text_of(self, checkpoint: Checkpoint, name: str) -> str:
        """A small text file of the checkpoint; "" where it is not there."""
        path = checkpoint.path / name
        return read_bounded(path, _MAX_TEXT).decode("utf-8", "replace") if path.is_file() else ""


def _read_part(checkpoint: Checkpoint, file: StateFile) -> CheckpointState:
    """One torch file of the directory; a scheduler's file is one by its name too."""
    as_file = replace(checkpoint, path=checkpoint.path / file.path, single_file=True)
    content = read_state_file(as_file.path)
    state = read_script_state(as_file, content)
    if file.role is Role.SCHEDULER and not state.schedulers:
        return CheckpointState(
            checkpoint=checkpoint, schedulers=(scheduler_state(file.path, (), content.tree, owner="app"),)
        )
    folder = file.folder

    def at(name: str) -> str:
        return f"{folder}/{name}" if folder else name

    return replace(
        state,
        checkpoint=checkpoint,
        optimizers=tuple(replace(one, file=at(one.file)) for one in state.optimizers),
        schedulers=tuple(replace(one, file=at(one.file)) for one in state.schedulers),
        counters={at(name): value for name, value in state.counters.items()},
        lr_hints=tuple(replace(hint, file=at(hint.file)) for hint in state.lr_hints),
    )


class LitgptFormat(FolderFormat):
    """litgpt's `step-N`, and `final`."""

    name = "litgpt"
    needs = (frozenset({"lit_model.pth", "hyperparameters.yaml"}), frozenset({"lit_model.pth", "model_config.yaml"}))
    steps = r"step-(\d+)"
    stems = r"lit_model"

    def role_of(self, path: str) -> RoleAndRank | None:
        """One file, or DCP parts; what else is there describes model and tokenizer."""
        if path == "lit_model.pth":
            return Role.CUSTOM, None
        return role_in_dcp(path.removeprefix("lit_model.pth/")) if path.startswith("lit_model.pth/") else None

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Optimizer and counters, and the LRs of the arguments."""
        state = super().read_state(checkpoint)
        try:
            given = numbers(self.text_of(checkpoint, "hyperparameters.yaml"), "yaml")
        except NotPlainConfig:
            given = {}
        values = {".".join(map(str, keys)): number.value for keys, number in given.items()}
        hint = LrHint(file="hyperparameters.yaml", keys=(), kind=HintKind.ARGUMENTS, values=values)
        steps = [value for name, value in state.counters.items() if name.endswith(":step_count")]
        return replace(
            state,
            lr_hints=(*state.lr_hints, hint) if values else state.lr_hints,
            writer_step=int(steps[0]) if steps else state.writer_step,
        )


class OlmoCoreFormat(FolderFormat):
    """OLMo-core's `stepN`."""

    name = "olmo-core"
    steps = r"step(\d+)"
    _RANK = re.compile(r"train/rank(\d+)\.pt")

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """The model's folder beside the trainer's."""
        present = {entry.path for entry in entries}
        return "model_and_optim" in present and any(self._RANK.fullmatch(path) or path == ".metadata.json" for path in present)

    def role_of(self, path: str) -> RoleAndRank | None:
        """DCP parts, and the trainer's counters of each rank."""
        rank = self._RANK.fullmatch(path)
        if rank:
            return Role.COUNTERS, int(rank[1])
        folder, _, name = path.rpartition("/")
        return role_in_dcp(name) if folder == "model_and_optim" else (Role.OTHER, None) if path == ".metadata.json" else None

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """Weights and optimizer, the trainer's counters, and what is written last."""
        paths = {file.path for file in files}
        found = missing_in_dcp(files, "model_and_optim")
        if not any(self._RANK.fullmatch(path) for path in paths):
            found.append(missing_file("train/rank0.pt", "no counters of the trainer"))
        if ".metadata.json" not in paths:
            found.append(missing_file(".metadata.json", "it is written last, so the save was interrupted"))
        return found

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """`global_step` of the trainer is the step."""
        state = super().read_state(checkpoint)
        steps = [value for name, value in state.counters.items() if name.endswith(":global_step")]
        return replace(state, writer_step=int(steps[0]) if steps else state.writer_step)


class SpeechBrainFormat(FolderFormat):
    """SpeechBrain's `CKPT+NAME`."""

    name = "speechbrain"
    needs = (frozenset({"CKPT.yaml"}),)
    roles = (
        (r"CKPT\.yaml", Role.MANIFEST),
        (r"(?i:.*(?:sched|anneal|noam|newbob|lr_).*)\.ckpt", Role.SCHEDULER),
        (r"(?i:.*opt.*)\.ckpt", Role.OPTIMIZER),
        (r"[^/]*\.ckpt", Role.MODEL),
    )
    texts = r"(?:brain|counter|dataloader.*|.*tokenizer.*)\.ckpt"
    steps = r"(?s)CKPT\+.*"  # `CKPT_PREFIX`

    def role_of(self, path: str) -> RoleAndRank | None:
        """By its name, which the script chose; none for the parts that are YAML or text."""
        return None if re.fullmatch(self.texts, path) else super().role_of(path)

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """At least one part."""
        return [] if any(f.path.endswith(".ckpt") for f in files) else [missing_file("model.ckpt", "no part was saved")]

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """`optimizer_step` of the Brain is the step, where one was saved."""
        state = super().read_state(checkpoint)
        found = re.search(r"(?m)^optimizer_step: (\d{1,15})$", self.text_of(checkpoint, "brain.ckpt"))
        return replace(state, writer_step=int(found[1]) if found else state.writer_step)


class TorchtuneFormat(FolderFormat):
    """torchtune: weights of an epoch, with the recipe's state in or beside them."""

    name = "torchtune"
    needs = (frozenset({"recipe_state/recipe_state.pt"}), frozenset({"recipe_state.pt"}))
    roles = (
        (r"(?:recipe_state/)?recipe_state\.pt", Role.OPTIMIZER),
        (r"(?:(?:epoch|step)_\d+/)?(?:model|ft-model|adapter|hf_model)[-_.\w]*\.(?:safetensors|bin|pt)", Role.MODEL),
        (r"(?:.*/)?.*\.(?:json|txt|model|md)", Role.OTHER),
    )
    steps = r"(?:[A-Za-z][A-Za-z_-]*[-_])?\d+"  # of epochs, or what the recipe's state counts
    stems = r"recipe_state"


class ScriptFolder(FolderFormat):
    """A directory that a script made for one save, with torch files of its own names; the last format that is asked."""

    name = "folder"
    by_content = True
    steps = r"(?i)(?:.*[-_.])?(?:global_?step|step|iter|iteration|it|update|checkpoint|ckpt|epoch|ep)[-_=]?\d+|\d+"
    stems = r"."
    torch_files = rf"(?:[^/]+/)?[^/]+\.(?:{TORCH_ENDINGS})"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Torch files of one save, whatever the directory is called; several numbers in their names make it a run's."""
        files = [e.path for e in entries if e.kind is not FileType.DIRECTORY and re.fullmatch(self.torch_files, e.path)]
        return self.is_one_save(name, [path for path in files if not is_leftover(path)])

    def is_one_save(self, name: str, files: Sequence[str]) -> bool:
        """Whether these files in a directory of this name are of one save."""
        numbers = {saved_numbers(part)[-1:] for path in files for part in path.split("/")} - {()}
        mine = saved_numbers(name)
        is_one_save = not numbers or (len(numbers) == 1 and mine[-1:] in numbers)
        newest = any(_RUN.fullmatch(path.rpartition("/")[2]) for path in files) and len(files) > 1
        return bool(files) and is_one_save and not newest

    def holds_state(self, checkpoint: Checkpoint, file: StateFile) -> bool:
        """Any file that is read as state, whatever it is called."""
        if re.fullmatch(self.torch_files, file.path):
            return True
        return file.role is not Role.MANIFEST and holds_states(checkpoint.folder / file.path)

    def role_of(self, path: str) -> RoleAndRank | None:
        """A torch file by its ending; weights by theirs."""
        if is_leftover(path):
            return None
        rank = re.search(r"(?i)rank[-_=]?(\d{1,9})", path)
        if re.fullmatch(self.torch_files, path):
            return Role.CUSTOM, int(rank[1]) if rank else None
        return (Role.MODEL, None) if path.endswith(".safetensors") else None

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """All parts together; the step where two voices agree, as for a single file. `UnknownFormat`: see above."""
        state = super().read_state(checkpoint)
        counters = [value for name, value in state.counters.items() if name.rpartition(":")[2] in STEP_KEYS]
        step = state.optimizer_step or next((value for value in counters if isinstance(value, int)), None)
        unit = scheduler_unit(state.schedulers, step, None)
        name = checkpoint.path.name
        state = with_counted_step(replace(state, optimizer_step=step, scheduler_unit=unit), name)
        if name.isdigit() and int(name) not in (state.writer_step, step):
            said = "count no steps" if step is None else f"count {step} steps"
            raise UnknownFormat(
                f"`{checkpoint.path}` holds torch files that {said}, not {name}: whether it is a checkpoint is unknown",
                "name a file in it, or let the script call the directory step-N",
            )
        return state


FOLDERS: tuple[FolderFormat, ...] = (LitgptFormat(), OlmoCoreFormat(), SpeechBrainFormat(), TorchtuneFormat())
