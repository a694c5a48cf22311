"""Whether an optimizer's moments are alive (F6): a sample of each file's second moments, read where they lie.

A state that was dropped and created again has all-zero second moments although its steps went on (KempnerForge #115);
a NaN in them never leaves. Only a few tens of kilobytes of a few tensors are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from rollback.errors import RollbackError
from rollback.findings import Finding, Severity
from rollback.checkpoint.torch_state import as_mapping
from rollback.checkpoint.layout import Checkpoint
from rollback.files.number_bytes import item_size
from rollback.files.pickle_values import TensorRef
from rollback.files.state_file import read_state_file
from rollback.checkpoint.state import OptimizerState
from rollback.files.torch_file import open_state_file
from rollback.files.torch_tree import Segment, TorchFile
from rollback.files.torch_zip import data_offset, read_at

SAMPLE_BYTES = 64 * 2**10
TENSORS_A_FILE = 4
SECOND_MOMENTS = ("exp_avg_sq", "v", "second_moment")
STEPS_BEFORE_ALIVE = 2


def check_moments(checkpoint: Checkpoint, optimizers: Sequence[OptimizerState], *, max_files: int) -> list[Finding]:
    """F6 findings for the first `max_files` optimizer files that are torch zips."""
    chosen = [o for o in optimizers if o.steps and o.steps[1] > STEPS_BEFORE_ALIVE and not o.file.endswith(".metadata")]
    return [finding for o in chosen[:max_files] for finding in _check(checkpoint, o)]


def _check(checkpoint: Checkpoint, optimizer: OptimizerState) -> list[Finding]:
    try:
        file = read_state_file(checkpoint.folder / optimizer.file)
        samples = list(_samples(file, optimizer))
    except RollbackError:
        return []  # what cannot be read has its own finding
    if not samples:
        return []
    found = []
    if not any(any(raw) for raw, _ in samples):
        steps = optimizer.steps[1] if optimizer.steps else 0
        found.append(f"second moments are all zero after {steps} steps: the state was dropped and created again")
    if any(dtype == "float32" and any(x != x for x in array("f", raw)) for raw, dtype in samples):
        found.append("second moments hold NaN")
    return [
        Finding(
            check="F6",
            severity=Severity.ERROR,
            path=optimizer.file,
            message=message,
            remedy="go back to a checkpoint before it happened",
        )
        for message in found
    ]


def _samples(file: TorchFile, optimizer: OptimizerState) -> Iterator[tuple[bytes, str]]:
    """(bytes, element type) of the beginning of a few second-moment tensors."""
    state = as_mapping(file.get((*optimizer.prefix, "state"))) or {}
    tensors = [
        moment
        for entry in state.values()
        for name in SECOND_MOMENTS
        if isinstance(moment := (as_mapping(entry) or {}).get(name), TensorRef) and moment.numel
    ]
    with open_state_file(file.path) as (fd, _):
        for tensor in tensors[:TENSORS_A_FILE]:
            place = _place(fd, file.segments[0], tensor)
            if place is not None:
                yield read_at(fd, *place), tensor.dtype


def _place(fd: int, segment: Segment, tensor: TensorRef) -> tuple[int, int] | None:
    size = item_size(tensor.dtype)
    if segment.layout is None or segment.record is None or tensor.storage is None or not size:
        return None
    record = segment.layout.find(f"{segment.record.name.removesuffix('data.pkl')}data/{tensor.storage.key}")
    start = tensor.storage_offset * size
    if record is None or not record.stored or start + tensor.numel * size > record.size_bytes:
        return None
    count = min(tensor.numel * size, SAMPLE_BYTES) // size * size
    return data_offset(fd, segment.layout, record) + start, count
