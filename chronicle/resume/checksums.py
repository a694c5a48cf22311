"""Samples and checksums of which step prints are made: of tensors, micro-batches, random generators, and how models are set.

A sample is 32 elements of 8 tensors, other ones at every step; a checksum is of all bits. What lies on an accelerator is copied
to the host without waiting. Reading draws nothing and changes nothing.
"""

import ctypes
import functools
import hashlib
import random
import re
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from chronicle.resume.batches import is_call, tensors_of, yielded_lately
from chronicle.resume.envelope.samples import SampleCopy
from chronicle.resume.fingerprint import own_shard

ELEMENTS, TENSORS = 32, 8  # of one sample
LARGEST_WEIGHTED = 1 << 20  # elements of a tensor whose checksum knows their order within a row
LARGEST_OUTPUT = 1 << 24  # elements of an output that is looked at bit by bit
SPREAD = 0x2545F4914F6CDD1D  # an odd number without a pattern
EXACT = (1 << 52) - 1  # what a double holds
TARGET = re.compile(r"label|target|answer|reference", re.IGNORECASE)
WORD = struct.Struct("<Q")


def chosen(params: Sequence[Any], step: int) -> list[Any]:
    """The tensors that are looked at in this step: other ones at every step, and the same in a replay."""
    if len(params) <= TENSORS:
        return list(params)
    first = step * TENSORS % len(params)
    return [params[(first + i) % len(params)] for i in range(TENSORS)]


def sample_of(tensors: Sequence[Any], step: int) -> list[Any]:
    """Bytes of what is on the host, and copies on their way of what is not, in the order given."""
    found: list[Any] = []
    torch = sys.modules["torch"]
    parameter = torch.nn.Parameter
    afar: dict[Any, list[Any]] = {}
    for tensor in tensors:
        whole = tensor is None or type(tensor) is torch.Tensor or (type(tensor) is parameter and not vars(tensor))
        own = tensor if whole else own_shard(tensor)
        if own is None or own.is_sparse or own.is_meta:
            found.append(b"-")
        elif own.is_cpu:
            found.append(_bytes(own, step))
        elif own.numel():
            afar.setdefault((own.device, own.dtype), []).append(_part(own.detach(), step))
    for parts in afar.values():
        found.append(SampleCopy(torch.cat(parts)))
    return found


def _bytes(own: Any, step: int) -> bytes:
    """At most `ELEMENTS` elements, spread over a tensor on the host; other ones at other steps."""
    own = own.detach()
    try:
        values = own.numpy()  # several times as fast as torch's own
    except TypeError:  # numpy has no bfloat16
        values = own.view(sys.modules["torch"].uint8 if own.element_size() == 1 else sys.modules["torch"].int16).numpy()
    if values.size <= ELEMENTS:
        return bytes(values.tobytes())
    if not values.flags.c_contiguous:
        thinned = tuple(slice(None, None, max(1, length // 6)) for length in values.shape)
        values = values.T if values.flags.f_contiguous else values[thinned]
    values = values.reshape(-1)
    stride = max(1, values.size // ELEMENTS)
    return bytes(values[step % stride :: stride][:ELEMENTS].tobytes())


def _part(own: Any, step: int) -> Any:
    """The same of a tensor on a device, as a view."""
    size = own.numel()
    if size <= ELEMENTS:
        return own.reshape(-1)
    stride = size // ELEMENTS
    if not own.is_contiguous():
        own = own.transpose(0, -1)
    if not own.is_contiguous():
        return own[tuple(slice(None, None, max(1, length // 6)) for length in own.shape)].reshape(-1)[:ELEMENTS]
    return own.as_strided((ELEMENTS,), (stride,), own.storage_offset() + step % stride)


def is_ready(sample: "list[Any] | None") -> bool:
    """Whether all of a sample has arrived on the host."""
    return sample is None or all(isinstance(part, bytes) or part.ready for part in sample)


def digest_of_all(sample: "list[Any] | None") -> int:
    """64 bits of all parts in their order; waits for those that are on their way. 0 for None."""
    if sample is None:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for part in sample:
        digest.update(part if isinstance(part, bytes) else part.array().tobytes())
    return int(WORD.unpack(digest.digest())[0])


def digest_of_batches(batches: "Sequence[Sequence[Any]]") -> int:
    """64 bits of what a step's micro-batches hold."""
    parts: list[Any] = []
    for one in batches:
        parts += [*one, b"|"]
    return digest_of_all(parts)


def short_digest(parts: "list[Any]") -> int:
    """32 bits of it, 0 for nothing."""
    if not parts:
        return 0
    return (digest_of_all(parts) & 0xFFFFFFFF) or 1


# ---- a batch as a whole ------------------------------------------------------------------------------------------------


def contents_of(batch: Any) -> tuple[list[Any], bool]:
    """Checksums of all that is in a micro-batch, and whether what the loss is computed from is in it.

    That is so where the model takes the labels, where an adapter hands over what the loader yielded, and where the inputs lie
    in the memory of a batch that a `DataLoader` yielded, on a CPU (or are its values in another dtype), or that Accelerate's
    loader handed over, on any device: then the rest of that batch counts, too.
    """
    leaves = tensors_of(batch)
    found = [checksum(tensor) for tensor in leaves]
    if not is_call(batch) or _has_named_labels(batch):
        return found, bool(found)
    places = {_place(tensor) for tensor in leaves if tensor.numel() and not tensor.is_meta}
    for own in reversed(yielded_lately()):
        if any(_place(tensor) in places for tensor in own):
            return [*found, *(checksum(tensor) for tensor in own)], True
    for own in reversed(yielded_lately()):
        if any(_is_cast(tensor, leaf) for tensor in own for leaf in leaves):
            return [*found, *(checksum(tensor) for tensor in own)], True
    return found, False


def _has_named_labels(batch: Any) -> bool:
    """Whether a model is called with labels by their name."""
    return is_call(batch) and any(TARGET.search(name) for name in batch[1])


def _is_cast(tensor: Any, leaf: Any) -> bool:
    """Whether a tensor of a loader's batch entered the model in another dtype (a precision plugin's, a `.half()`)."""
    if tensor.shape != leaf.shape or tensor.dtype == leaf.dtype or not (tensor.is_cpu and leaf.is_cpu):
        return False
    small = 1 < leaf.numel() <= LARGEST_WEIGHTED and tensor.is_floating_point() and leaf.is_floating_point()
    return small and bool(sys.modules["torch"].equal(tensor.to(leaf.dtype), leaf))


def _place(tensor: Any) -> tuple[str, int]:
    return tensor.device.type, tensor.untyped_storage().data_ptr()


def checksum(tensor: Any) -> Any:
    """Of all bits of a tensor: bytes, or on a device a copy of numbers on its way, one a row.

    A sum alone will not do: values that are turned by one place have the same where the last one is the mean. Of a large tensor
    the rows are summed.
    """
    torch = sys.modules["torch"]
    own = own_shard(tensor).detach()
    if own.is_sparse or own.is_meta or own.numel() == 0:
        return b"-"
    size = own.element_size()
    own = own.contiguous()
    own = own.view(torch.float32) if own.is_complex() and size == 8 else own
    own = own.view(_kinds(torch)[min(8, own.element_size())])
    rows = own.reshape(own.shape[0], -1) if own.dim() > 1 else own.reshape(1, -1)
    is_small = rows.numel() <= LARGEST_WEIGHTED
    if own.is_cpu:
        values = rows.numpy()
        found = zlib.crc32(values).to_bytes(4, "little") if is_small else values.sum(1, dtype="int64").tobytes()
        return str((tuple(tensor.shape), str(tensor.dtype))).encode() + found
    if is_small:
        rows = (rows.long() + SPREAD) * torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)
        rows = (rows ^ (rows >> 15)) * SPREAD
    return SampleCopy(rows.sum(1, dtype=torch.int64) & EXACT)


def checksum_of_output(tensor: Any) -> Any:
    """The same of what a model gives; of a large one (logits of a language model) the norms of its rows: nothing is copied."""
    if tensor.numel() <= LARGEST_OUTPUT or not tensor.is_floating_point() or tensor.dim() < 2:
        return checksum(tensor)
    torch = sys.modules["torch"]
    return checksum(torch.linalg.vector_norm(own_shard(tensor).detach(), dim=-1, dtype=torch.float32))


@functools.lru_cache(maxsize=1)
def _kinds(torch: Any) -> dict[int, Any]:
    """Whole numbers by their size in bytes."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def global_generators() -> tuple[int, int, int]:
    """Checksums of torch's generators, of Python's and of NumPy's (16 bits each); reading draws nothing."""
    torch = sys.modules["torch"]
    found = zlib.crc32(torch.get_rng_state().numpy())
    if torch.cuda.is_initialized():
        found = zlib.crc32(torch.cuda.get_rng_state().numpy(), found)
    _, keys, gauss = random.getstate()
    python = zlib.crc32(repr(gauss).encode(), hash(keys) & 0xFFFFFFFF)  # the hash of integers is equal in every process
    numpy = sys.modules.get("numpy")
    return found, python & 0xFFFF, 0 if numpy is None else zlib.crc32(_numpy_state(numpy)) & 0xFFFF


def _numpy_state(numpy: Any) -> bytes:
    """Key and position of NumPy's global generator, read where they lie: its own function takes 25 µs."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return repr(numpy.random.get_state()).encode()
    return ctypes.string_at(generator.ctypes.state_address, 4 * 625)


# ---- how the models are set --------------------------------------------------------------------------------------------


class SetParts(NamedTuple):
    """What has a mode of its own: modules (training or not), those that drop out (how much), weights (trained or frozen)."""

    modules: Sequence[Any] = ()
    dropouts: Sequence[Any] = ()
    weights: Sequence[Any] = ()
    arithmetic: tuple[Any, ...] = ()  # how torch computes, when these were found


def set_parts(models: Sequence[Any]) -> SetParts:
    """What is looked at of these models at every print."""
    modules = [part for model in models for part in model.modules()]
    weights = [weight for model in models for weight in model.parameters()]
    dropouts = [part for part in modules if isinstance(vars(part).get("p"), int | float)]
    return SetParts(modules, dropouts, weights, _arithmetic())


def _arithmetic() -> tuple[Any, ...]:
    """What a script may set at any time, and what changes the last digits."""
    torch = sys.modules["torch"]
    cudnn = torch.backends.cudnn
    chosen = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) if torch.cuda.is_initialized() else ()
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), *chosen


def modes_of(parts: SetParts) -> int:
    """16 bits of how the models and the arithmetic are set now: training or evaluation, dropout, frozen weights, autocast.

    0 for no models.
    """
    if not parts.modules:
        return 0
    torch = sys.modules["torch"]
    found = zlib.crc32(bytes([part.training for part in parts.modules]))
    found = zlib.crc32(bytes([weight.requires_grad for weight in parts.weights]), found)
    device = parts.weights[0].device.type if parts.weights else "cpu"
    try:
        autocast = torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device))
    except RuntimeError:
        autocast = None  # a device that knows none
    how = [part.p for part in parts.dropouts], autocast, torch.get_default_dtype(), torch.get_float32_matmul_precision()
    found = zlib.crc32(repr(how).encode(), found)
    if (now := _arithmetic()) != parts.arithmetic:  # else it is as the launch's facts say
        found = zlib.crc32(repr(now).encode(), found)
    return (found & 0xFFFF) or 1
