"""Checkpoints that are named, and whose LR is not edited: Keras, Orbax, PEFT adapters, NeMo, nanochat, and safetensors files
of their own.

A row says what they are and what is not read; `verify` checks their files as far as their layout tells. Layouts:

    Keras       a zip of metadata.json, config.json, model.weights.h5 (keras/src/saving/saving_lib.py `save_model`)
    Orbax       a directory with _CHECKPOINT_METADATA; a save in progress ends in .orbax-checkpoint-tmp
                (orbax/checkpoint/_src/metadata/checkpoint.py, step_metadata_serialization.py, _src/path/atomicity.py)
    PEFT        adapter_config.json beside adapter_model.safetensors or .bin (peft/utils/constants.py)
    NeMo        `.nemo`: a tar of model_config.yaml and model_weights.ckpt (nemo/core/connectors/save_restore_connector.py);
                NeMo 2: a directory with context/ and weights/ (nemo/lightning/ckpt_utils.py)
    nanochat    model_N.pt, meta_N.json, optim_N_rankR.pt side by side (nanochat/checkpoint_manager.py `save_checkpoint`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rollback.checkpoint.formats.format import CheckpointFormat, FileFormat, missing_file
from rollback.checkpoint.formats.torch_checkpoint import read_script_state
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile, is_leftover
from rollback.checkpoint.state import CheckpointState
from rollback.disk.content import read_bounded
from rollback.errors import Finding, UnreadableFile
from rollback.files.state_file import read_state_file

_MAX_JSON = 1 << 20
_NO_EDIT = "its LR is not edited"


class Unread(CheckpointFormat):
    """A format of which nothing but names and sizes is read; a row of this file."""

    editable = False
    note: ClassVar[str] = ""
    unread: ClassVar[str] = ""  # what of it holds state

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """What it is, and what was not read."""
        return CheckpointState(checkpoint=checkpoint, unread=self.unread, notes=(f"{self.note}, and {_NO_EDIT}",))


class NamedFormat(Unread):
    """A directory known by the names in `needs`; `roles` gives the role of each file by a pattern."""

    needs: ClassVar[tuple[frozenset[str], ...]] = ()  # one of these sets of relative paths must be there
    steps = r"(?:[A-Za-z][A-Za-z_-]*[-_])?(\d+)"

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """Whether one set of the needed paths is there."""
        present = {entry.path for entry in entries}
        return any(needed <= present for needed in self.needs)

    def looks_like_state(self, path: str) -> bool:
        """A leftover of one of its files."""
        return bool(self.stems) and is_leftover(path.rpartition("/")[2]) and re.search(self.stems, path) is not None


def _plain(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, object]:
    """The named fields that are text, numbers or short lists."""
    kinds = (str, int, float, bool, list)
    return {name: fields[name] for name in names if isinstance(fields.get(name), kinds) and len(str(fields[name])) < 400}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(path, _MAX_JSON))
    except OSError as problem:
        raise UnreadableFile(f"`{path.name}` cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UnreadableFile(f"`{path.name}` is not valid JSON: {problem}") from None
    if not isinstance(found, dict):
        raise UnreadableFile(f"`{path.name}` is not a JSON object")
    return found


class KerasFormat(Unread, FileFormat):
    """Keras 3's `.keras` file; the number in its name counts epochs, by `ModelCheckpoint`."""

    name = "keras"
    steps = r"(?s).*\.keras"
    role = Role.CUSTOM
    unread = "the values in model.weights.h5 (weights and optimizer) were"
    note = "weights and the optimizer's variables are in model.weights.h5: checksums are compared, values are not read"


class OrbaxFormat(NamedFormat):
    """A step directory of Orbax (JAX)."""

    name = "orbax"
    unread = "the arrays (OCDBT) were"
    note = "arrays are in OCDBT, which is not read: names and sizes are checked"
    needs = (frozenset({"_CHECKPOINT_METADATA"}), frozenset({"manifest.ocdbt", "_METADATA"}))
    roles = (
        (r"(?:.*/)?_CHECKPOINT_METADATA", Role.MANIFEST),
        (r"(?:.*/)?(?:_METADATA|_sharding|array_metadatas/.*|manifest\.ocdbt)", Role.OTHER),
        (r"(?:.*/)?(?:d|ocdbt\.process_\d+)/.*", Role.MODEL),
        (r"(?:.*/)?metadata", Role.COUNTERS),
    )

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """An item without its array data or its index (F2)."""
        paths = {file.path for file in files}
        items = {path.rpartition("_METADATA")[0] for path in paths if path.endswith("_METADATA") and "CHECKPOINT" not in path}
        return [
            missing_file(f"{item}manifest.ocdbt", "the arrays of this item cannot be found")
            for item in sorted(items)
            if f"{item}manifest.ocdbt" not in paths and not any(p.startswith(item) and p.endswith(".zarray") for p in paths)
        ]


class PeftFormat(NamedFormat):
    """An adapter that PEFT saved alone; inside a Trainer's checkpoint it belongs to that."""

    name = "peft adapter"
    needs = (
        frozenset({"adapter_config.json", "adapter_model.safetensors"}),
        frozenset({"adapter_config.json", "adapter_model.bin"}),
    )
    roles = ((r"adapter_model\.(?:safetensors|bin)", Role.MODEL), (r"adapter_config\.json", Role.OTHER))
    stems = r"adapter_(?:model|config)"
    note = "weights alone: no optimizer was saved beside them"


class NemoFormat(Unread, FileFormat):
    """NeMo: a `.nemo` archive, the end of a training."""

    name = "nemo"
    steps = r"(?s).*\.nemo"
    unread = "the archive was"
    note = "an archive of weights and config, which is not read"


class Nemo2Format(NamedFormat):
    """NeMo 2: `weights/` in torch's or Megatron's distributed form, `context/` with the config."""

    name = "nemo 2"
    unread = "weights/ and context/ were"
    note = "weights and context are named and checked as files"
    needs = (frozenset({"weights", "context"}),)
    roles = ((r"weights/.*", Role.MODEL), (r"context/.*", Role.OTHER))
    steps = r".*step=(\d{1,15})(?:-.*)?"

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """A distributed form without its index (F2)."""
        paths = {file.path for file in files}
        shards = any(path.startswith("weights/") and path.endswith(".distcp") for path in paths)
        cut = shards and "weights/.metadata" not in paths
        return [missing_file("weights/.metadata", "the save was cut off")] if cut else []


class NanochatFormat(NamedFormat):
    """nanochat: the files of one step side by side; one checkpoint is the newest step of the directory."""

    name = "nanochat"
    roles = (
        (r"model_\d+\.pt", Role.MODEL),
        (r"meta_\d+\.json", Role.COUNTERS),
        (r"optim_\d+(?:_rank\d+)?\.pt", Role.OPTIMIZER),
    )
    _META = re.compile(r"meta_(\d{1,15})\.json")
    steps = ""

    def claims(self, name: str, entries: Sequence[DirectoryEntry]) -> bool:
        """A model and its meta of one step."""
        present = {entry.path for entry in entries}
        return any(f"model_{found[1]}.pt" in present for path in present if (found := self._META.fullmatch(path)))

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """A step without its model or its optimizer (F2)."""
        paths = {file.path for file in files}
        found = []
        for number in sorted(match[1] for path in paths if (match := self._META.fullmatch(path))):
            if f"model_{number}.pt" not in paths:
                found.append(missing_file(f"model_{number}.pt", f"step {int(number)} has no weights"))
            if not any(path.startswith((f"optim_{number}.", f"optim_{number}_")) for path in paths):
                found.append(missing_file(f"optim_{number}_rank0.pt", f"step {int(number)} cannot be resumed"))
        return found

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Counters and arguments of the newest step, and its optimizers of the first rank."""
        numbers = sorted(match[1] for file in checkpoint.files if (match := self._META.fullmatch(file.path)))
        newest = numbers[-1]
        meta = _read_json(checkpoint.path / f"meta_{newest}.json")
        optimizer = next((f for f in checkpoint.files if re.fullmatch(rf"optim_{newest}(?:_rank0+)?\.pt", f.path)), None)
        state = CheckpointState(checkpoint=checkpoint)
        if optimizer is not None:
            as_file = replace(checkpoint, path=checkpoint.path / optimizer.path, single_file=True)
            state = replace(read_script_state(as_file, read_state_file(as_file.path)), checkpoint=checkpoint)
        arguments = meta.get("user_config")
        step = meta.get("step")
        return replace(
            state,
            counters={f"meta_{newest}.json:{k}": v for k, v in meta.items() if type(v) in (int, float)},
            writer_step=step if isinstance(step, int) else int(newest),
            config=_plain(arguments, tuple(arguments)) if isinstance(arguments, dict) else {},
            notes=(
                f"steps in this directory: {', '.join(str(int(number)) for number in numbers)}; shown is the newest",
                f"a step is several files of one directory, so a rollback cannot move it, and {_NO_EDIT}",
            ),
        )


class SafetensorsFormat(Unread, FileFormat):
    """A single safetensors file of its own; who wrote it is unknown."""

    name = "safetensors"
    steps = r"(?s).*\.safetensors"
    note = "tensors alone, and no LR among them that a loader would read as a number"


NAMED: tuple[CheckpointFormat, ...] = (
    OrbaxFormat(),
    Nemo2Format(),
    NanochatFormat(),
    PeftFormat(),
    KerasFormat(),
    NemoFormat(),
    SafetensorsFormat(),
)
