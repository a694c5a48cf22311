"""Checkpoints that are named, and whose LR is not edited: Keras, Orbax, PEFT adapters, NeMo, and safetensors files of their
own.

A row says what they are and what is not read; `verify` checks their files as far as their layout tells. Layouts:

    Keras       a zip of metadata.json, config.json, model.weights.h5 (keras/src/saving/saving_lib.py `save_model`)
    Orbax       a directory with _CHECKPOINT_METADATA; a save in progress ends in .orbax-checkpoint-tmp
                (orbax/checkpoint/_src/metadata/checkpoint.py, step_metadata_serialization.py, _src/path/atomicity.py)
    PEFT        adapter_config.json beside adapter_model.safetensors or .bin (peft/utils/constants.py)
    NeMo        `.nemo`: a tar of model_config.yaml and model_weights.ckpt (nemo/core/connectors/save_restore_connector.py);
                NeMo 2: a directory with context/ and weights/ (nemo/lightning/ckpt_utils.py)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rollback.checkpoint.formats.format import CheckpointFormat, FileFormat, missing_file
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile, is_leftover
from rollback.checkpoint.state import CheckpointState
from rollback.errors import Finding

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


class SafetensorsFormat(Unread, FileFormat):
    """A single safetensors file of its own; who wrote it is unknown."""

    name = "safetensors"
    steps = r"(?s).*\.safetensors"
    note = "tensors alone, and no LR among them that a loader would read as a number"


NAMED: tuple[CheckpointFormat, ...] = (
    OrbaxFormat(),
    Nemo2Format(),
    PeftFormat(),
    KerasFormat(),
    NemoFormat(),
    SafetensorsFormat(),
)
