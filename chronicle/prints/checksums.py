"""Checksums of which step prints are made: of micro-batches, of weights and gradients, of random generators.

A checksum is of all bits. Of a micro-batch it knows the order of its values; of weights and gradients it is a sum, which one
flipped bit always changes, at the speed of memory. What lies on an accelerator is copied to the host without waiting. Reading
draws nothing and changes nothing.
"""

import random
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from chronicle.resume.batches import is_call, tensors_of, yielded_lately
from chronicle.resume.samples import SampleCopy, own_shard

LARGEST_WEIGHTED = 1 << 20  # elements of a tensor whose checksum knows their order within a row
SPREAD = 0x2545F4914F6CDD1D  # an odd number without a pattern
EXACT = (1 << 52) - 1
TARGET = re.compile(r"label|target|answer|reference", re.IGNORECASE)
WHOLE_NUMBERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by their size in bytes


class Contents(NamedTuple):
    """Checksums of what is in a micro-batch, and of its labels; none where nobody knows them. Whether they have their name."""

    inputs: list[Any]
    labels: list[Any]
    are_named: bool = False


def contents_of(batch: Any) -> Contents:
    """What is in a micro-batch.

    Labels are in it where the model takes them, and where an adapter hands over what the loader yielded. Else, where inputs lie
    in the memory of a batch that a loader yielded, or are its values in another dtype (on a CPU), all of that batch is what the
    labels are known by, if it holds more than these inputs.
    """
    leaves = tensors_of(batch)
    found = [checksum(tensor) for tensor in leaves]
    names = batch[1] if is_call(batch) else batch if isinstance(batch, Mapping) else ()
    are_named = any(TARGET.search(str(name)) for name in names)
    if are_named or not is_call(batch):
        return Contents(found, found, are_named)
    for are_same in (_share_memory, _is_cast):
        for own in reversed(yielded_lately()):
            if any(are_same(tensor, leaf) for tensor in own for leaf in leaves):
                return Contents(found, [*map(checksum, own)] if _holds_more(own, leaves, are_same) else [])
    return Contents(found, [])


def _holds_more(own: Sequence[Any], leaves: Sequence[Any], are_same: Callable[[Any, Any], bool]) -> bool:
    """Whether a tensor of a loader's batch is none of these inputs as a whole."""
    entered = [one for one in own if any(one.shape == leaf.shape and are_same(one, leaf) for leaf in leaves)]
    return len(entered) < len(own)


def _share_memory(tensor: Any, leaf: Any) -> bool:
    if leaf.is_meta or not leaf.numel() or tensor.device.type != leaf.device.type:
        return False
    return bool(tensor.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr())


def _is_cast(tensor: Any, leaf: Any) -> bool:
    """Whether a tensor of a loader's batch entered the model in another dtype (a precision plugin's, a `.half()`)."""
    if tensor.shape != leaf.shape or tensor.dtype == leaf.dtype or not (tensor.is_cpu and leaf.is_cpu):
        return False
    small = 1 < leaf.numel() <= LARGEST_WEIGHTED and tensor.is_floating_point() and leaf.is_floating_point()
    return small and bool(sys.modules["torch"].equal(tensor.to(leaf.dtype), leaf))


def checksum(tensor: Any) -> Any:
    """Of all bits of a tensor: bytes, or on a device a copy of numbers on its way, one a row.

    There a sum alone will not do: values that are turned by one place have the same where the last one is the mean. Of a large
    tensor the rows are summed.
    """
    torch = sys.modules["torch"]
    own = own_shard(tensor).detach()
    if own.is_sparse or own.is_meta or own.numel() == 0:
        return b"-"
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    own = own.contiguous().view(getattr(torch, WHOLE_NUMBERS[own.element_size()]))
    rows = own.reshape(own.shape[0], -1) if own.dim() > 1 else own.reshape(1, -1)
    if own.is_cpu:
        return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(rows.numpy())}".encode()
    if rows.numel() <= LARGEST_WEIGHTED:
        rows = (rows.long() + SPREAD) * torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)
        rows = (rows ^ (rows >> 15)) * SPREAD
    return SampleCopy(rows.sum(1, dtype=torch.int64) & EXACT)


def sums_of(tensors: Iterable[Any]) -> list[Any]:
    """The sum of all bits of each tensor, as 64-bit numbers: a copy a device, on its way. What holds no values is left out."""
    torch = sys.modules["torch"]
    found: dict[Any, list[Any]] = defaultdict(list)
    for tensor in tensors:
        own = None if tensor is None else own_shard(tensor)
        if own is not None and not own.is_sparse and not own.is_meta and own.numel():
            found[own.device].append(_sum_of(own.detach()))
    return [SampleCopy(torch.stack(sums)) for _, sums in sorted(found.items(), key=lambda item: str(item[0]))]


def _sum_of(tensor: Any) -> Any:
    """All bits of a tensor as one number, modulo 2**64; eight bytes are added at a time where they lie so."""
    torch = sys.modules["torch"]
    own = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = own.contiguous().view(-1)
    in_a_word = 8 // flat.element_size()
    if flat.numel() % in_a_word == 0 and flat.storage_offset() % in_a_word == 0:
        return flat.view(torch.int64).sum()
    return flat.view(getattr(torch, WHOLE_NUMBERS[flat.element_size()])).sum(dtype=torch.int64)


def global_generators() -> dict[str, int]:
    """Checksums of torch's generators, of Python's and of NumPy's (16 bits each); reading draws nothing."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    of_torch = zlib.crc32(torch.get_rng_state().numpy())
    if torch.cuda.is_initialized():
        of_torch = zlib.crc32(torch.cuda.get_rng_state().numpy(), of_torch)
    _, keys, gauss = random.getstate()
    python = zlib.crc32(repr(gauss).encode(), hash(keys) & 0xFFFFFFFF)  # the hash of integers is equal in every process
    of_numpy = 0
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)["state"]
        key = state["key"] if "key" in state else repr(state).encode()  # that of a Mersenne twister, or another generator's
        of_numpy = zlib.crc32(key, state.get("pos", 0))
    return {"torch": of_torch, "python": python & 0xFFFF, "numpy": of_numpy & 0xFFFF}
