"""Whether the weights that a save wrote are those in memory: said at the save, and not weeks later.

A script saves its average in place of the raw weights, half a model, or a copy from another moment; every file is whole, and
nobody sees it before the resume. When memory is described, the first elements of some trained parameters are kept. Once the
save is written, a thread looks for each of them in the save's files, under any name. A parameter of whose shape and type there
are tensors, and none with its values, was saved as something else. Shards are not looked at, nor a save in another type.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.resume.envelope.replicas import is_whole
from chronicle.resume.rules import listed
from chronicle.resume.samples import first_bytes
from rollback.checkpoint.state import walk_states
from rollback.checkpoint.state_digest import NUM_ELEMENTS, bytes_of_first, evenly
from rollback.errors import RollbackError
from rollback.files.pickle_values import TensorRef
from rollback.files.safetensors_file import list_tensors
from rollback.files.state_file import read_state_file
from rollback.files.torch_file import open_state_file
from rollback.files.torch_tree import walk_leaves
from rollback.files.torch_zip import read_at

NUM_FILES = 64  # of one save
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # of safetensors


class Head(NamedTuple):
    """What a tensor is, and its first elements."""

    shape: tuple[int, ...]
    dtype: str
    first: bytes


def heads_of(models: Sequence[Any]) -> dict[str, Head]:
    """Those of at most 64 trained parameters that this rank holds whole, by name."""
    named = [one for model in models for one in model.named_parameters() if one[1].requires_grad and one[1].numel()]
    return {name: _head(param) for name, param in evenly(named) if is_whole(param)}


def _head(param: Any) -> Head:
    own = param.detach()
    return Head(tuple(own.shape), str(own.dtype).removeprefix("torch."), first_bytes(own))


def say_other_weights(root: Path, kept: Mapping[str, Head]) -> str:
    """Which of the kept parameters the save at `root`, a directory or a file, holds with other values; "" for none."""
    found = set(_heads_in(root))
    shapes = {(head.shape, head.dtype) for head in found}
    held = [name for name, head in kept.items() if (head.shape, head.dtype) in shapes]
    other = [name for name in held if kept[name] not in found]
    if not other:
        return ""
    return (
        f"`{root.name}` holds other values than memory for {len(other)} of {len(held)} sampled weights ({listed(other)}): "
        "an average was saved in place of the weights, or weights of another moment; a resume begins with those"
    )


def _heads_in(root: Path) -> Iterator[Head]:
    paths = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    for path in paths[:NUM_FILES]:
        try:
            yield from _in_safetensors(path) if path.suffix == ".safetensors" else _in_torch_file(path)
        except (RollbackError, OSError):
            continue  # no state file: what is wrong with one, `verify` says


def _in_safetensors(path: Path) -> Iterator[Head]:
    with open_state_file(path) as (fd, _):
        for _, dtype, shape, begin, num_bytes in list_tensors(path):
            count = min(NUM_ELEMENTS * num_bytes // max(1, math.prod(shape)), num_bytes)
            yield Head(shape, TYPES.get(dtype, dtype), read_at(fd, begin, count))


def _in_torch_file(path: Path) -> Iterator[Head]:
    """All tensors but those of an optimizer, whose moments have the shapes of the weights."""
    file = read_state_file(path)
    if not file.segments:
        return
    moments = [one.keys for one in walk_states(file.tree).found if one.kind in ("optimizer", "moments")]
    with open_state_file(path) as (fd, _):
        for leaf in walk_leaves(file.tree):
            tensor = leaf.value
            is_moment = any(leaf.keys[: len(keys)] == keys for keys in moments)
            if isinstance(tensor, TensorRef) and tensor.numel and not is_moment:
                first = bytes_of_first(fd, file.segments[0], tensor)
                if first is not None:
                    yield Head(tensor.shape, tensor.dtype, first)
