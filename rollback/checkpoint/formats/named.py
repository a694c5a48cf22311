"""Checkpoints that are read and named, and whose LR is not edited: Keras, Orbax, PEFT adapters, NeMo, nanochat,
and safetensors files of their own.

`inspect` shows what they say of themselves, `verify` checks their files as far as their layout tells; what is not read is
named in the notes. Layouts:

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
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from rollback.checkpoint.formats.format import CheckpointFormat, FileFormat, missing_file
from rollback.checkpoint.formats.torch_checkpoint import read_script_state
from rollback.checkpoint.layout import Checkpoint, DirectoryEntry, Role, StateFile, is_leftover
from rollback.checkpoint.state import CheckpointState
from rollback.disk.content import read_bounded
from rollback.errors import Finding, UnreadableFile
from rollback.files.safetensors_file import read_safetensors_header
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import naming, open_state_file
from rollback.files.torch_zip import read_layout, read_record

_MAX_JSON = 1 << 20
_MAX_TAR_NAMES = 64
_NO_EDIT = "its LR is not edited"


class NamedFormat(CheckpointFormat):
    """A directory known by the names in `needs`; `roles` gives the role of each file by a pattern."""

    editable = False
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


class KerasFormat(FileFormat):
    """Keras 3's `.keras` file; the number in its name counts epochs, by `ModelCheckpoint`."""

    name = "keras"
    editable = False
    steps = r"(?s).*\.keras"
    role = Role.CUSTOM

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """The version, and the optimizer as it was compiled; its variables lie in HDF5, which is not read."""
        parts: dict[str, dict[str, Any]] = {}
        with open_state_file(checkpoint.path) as (fd, size_bytes), naming(checkpoint.path):
            layout = read_layout(fd, 0, size_bytes)
            for name in ("metadata.json", "config.json"):
                record = layout.find(name)
                if record is None:
                    raise UnreadableFile(f"no `{name}` in it: it is not what `model.save` writes")
                try:
                    parts[name] = json.loads(read_record(fd, layout, record, max_bytes=32 << 20))
                except (ValueError, RecursionError) as problem:
                    raise UnreadableFile(f"its `{name}` is not valid JSON: {problem}") from None
        config = parts["config.json"]
        compiled = config.get("compile_config")
        optimizer = compiled.get("optimizer") if isinstance(compiled, dict) else None
        shown = {**_plain(config, ("class_name",)), **_keras_optimizer(optimizer)}
        return CheckpointState(
            checkpoint=checkpoint,
            config=shown,
            topology=_plain(parts["metadata.json"], ("keras_version", "date_saved")),
            unread="the values in model.weights.h5 (weights and optimizer) were",
            notes=(
                "weights and the optimizer's variables are in model.weights.h5: their checksums are compared, their values "
                f"are not read, and {_NO_EDIT}",
            ),
        )


def _keras_optimizer(optimizer: object) -> dict[str, object]:
    """Class and LR of the compiled optimizer; a schedule is named with its numbers."""
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("config"), dict):
        return {}
    lr = optimizer["config"].get("learning_rate")
    if isinstance(lr, dict):
        numbers = _plain(lr["config"], tuple(lr["config"])) if isinstance(lr.get("config"), dict) else {}
        lr = f"{lr.get('class_name')} {json.dumps(numbers)[:200]}"
    return {"optimizer": str(optimizer.get("class_name")), "learning_rate": lr}


class OrbaxFormat(NamedFormat):
    """A step directory of Orbax (JAX)."""

    name = "orbax"
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

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """When the save was committed, its items and the names of its trees; arrays are not read."""
        path = checkpoint.path / "_CHECKPOINT_METADATA"
        metadata = _read_json(path) if path.is_file() else {}
        notes = [f"arrays are in OCDBT, which is not read: names and sizes are checked, and {_NO_EDIT}"]
        if path.is_file() and not metadata.get("commit_timestamp_nsecs"):
            notes.append("it holds no `commit_timestamp_nsecs`: the save may not have been finished")
        trees = {
            file.path.removesuffix("/_METADATA"): len(_read_json(checkpoint.path / file.path).get("tree_metadata") or {})
            for file in checkpoint.files
            if file.path.endswith("_METADATA") and not file.path.endswith("_CHECKPOINT_METADATA")
        }
        return CheckpointState(
            checkpoint=checkpoint,
            config={**_plain(metadata, ("init_timestamp_nsecs", "commit_timestamp_nsecs")),
                    **{f"{name or '.'} arrays": count for name, count in trees.items()}},
            unread="the arrays (OCDBT) were",
            notes=tuple(notes),
        )


class PeftFormat(NamedFormat):
    """An adapter that PEFT saved alone; inside a Trainer's checkpoint it belongs to that."""

    name = "peft adapter"
    needs = (
        frozenset({"adapter_config.json", "adapter_model.safetensors"}),
        frozenset({"adapter_config.json", "adapter_model.bin"}),
    )
    roles = ((r"adapter_model\.(?:safetensors|bin)", Role.MODEL), (r"adapter_config\.json", Role.OTHER))
    stems = r"adapter_(?:model|config)"

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """What the adapter is and what it is for."""
        config = _read_json(checkpoint.path / "adapter_config.json")
        names = ("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "peft_version")
        weights = checkpoint.path / "adapter_model.safetensors"
        return CheckpointState(
            checkpoint=checkpoint,
            config=_plain(config, names),
            topology=_header_facts(weights) if weights.is_file() else {},
            notes=(f"weights alone: no optimizer was saved beside them, and {_NO_EDIT}",),
        )


class NemoFormat(FileFormat):
    """NeMo: a `.nemo` archive, the end of a training."""

    name = "nemo"
    editable = False
    steps = r"(?s).*\.nemo"

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """The members of the archive; `UnreadableFile` where it is cut short or holds no model."""
        import tarfile

        try:
            with tarfile.open(checkpoint.path) as archive:
                names = [f"{one.name.removeprefix('./')} {one.size}" for one in islice(archive, _MAX_TAR_NAMES)]
        except (tarfile.TarError, OSError, EOFError) as problem:
            raise UnreadableFile(f"`{checkpoint.path.name}` is not a whole tar archive: {problem}") from None
        if not any(name.startswith("model_config.yaml ") for name in names):
            raise UnreadableFile(f"`{checkpoint.path.name}` holds no model_config.yaml: it is not what `save_to` writes")
        return CheckpointState(
            checkpoint=checkpoint,
            config={"members": names},
            notes=(f"an archive of weights and config: no optimizer, and {_NO_EDIT}",),
        )


class Nemo2Format(NamedFormat):
    """NeMo 2: `weights/` in torch's or Megatron's distributed form, `context/` with the config."""

    name = "nemo 2"
    needs = (frozenset({"weights", "context"}),)
    roles = ((r"weights/.*", Role.MODEL), (r"context/.*", Role.OTHER))
    steps = r".*step=(\d{1,15})(?:-.*)?"

    def missing(self, files: Sequence[StateFile]) -> list[Finding]:
        """A distributed form without its index (F2)."""
        paths = {file.path for file in files}
        shards = any(path.startswith("weights/") and path.endswith(".distcp") for path in paths)
        cut = shards and "weights/.metadata" not in paths
        return [missing_file("weights/.metadata", "the save was cut off")] if cut else []

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Names alone: scheduler and optimizer are pickled in parts that NeMo joins by its context."""
        return CheckpointState(
            checkpoint=checkpoint,
            unread="weights/ and context/ were",
            notes=(f"weights and context are named and checked as files, and {_NO_EDIT}",),
        )


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


class SafetensorsFormat(FileFormat):
    """A single safetensors file of its own; who wrote it is unknown."""

    name = "safetensors"
    editable = False
    steps = r"(?s).*\.safetensors"

    def read_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Its header: tensors hold values, not an LR."""
        return CheckpointState(
            checkpoint=checkpoint,
            topology=_header_facts(checkpoint.path),
            notes=(f"tensors alone, and no LR among them that a loader would read as a number: {_NO_EDIT}",),
        )


def _header_facts(path: Path) -> dict[str, object]:
    header = read_safetensors_header(path)
    facts = {"tensors": header.num_tensors, "elements": header.num_elements, "dtypes": list(header.dtypes)}
    return {**facts, "holds": header.holds}


NAMED: tuple[CheckpointFormat, ...] = (
    OrbaxFormat(),
    Nemo2Format(),
    NanochatFormat(),
    PeftFormat(),
    KerasFormat(),
    NemoFormat(),
    SafetensorsFormat(),
)
