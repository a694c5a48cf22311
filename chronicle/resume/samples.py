"""Samples of tensors, and digests of values: a few elements of each tensor, read without waiting for the device.

A sum does not notice a permutation, and a full hash costs as much as a save. So elements at a fixed distance are hashed bit for
bit. On an accelerator a `Snapshot` is copied to pinned memory asynchronously and read at a later step. No element is read by
`.item()`, and no tensor is copied as a whole. No object is changed. torch is imported inside the functions.
"""

import functools
import hashlib
import math
import random
import sys
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rollback.checkpoint.state_digest import NUM_ELEMENTS

ELEMENTS = 16  # per tensor
SAMPLES = 64  # per tensor, of a digest


# ---- elements of one tensor ------------------------------------------------------------------------------------------


def own_shard(tensor: Any) -> Any:
    """This rank's part of a distributed tensor (DTensor, ZeRO-3 parameter), a packed one (torchao's moments of eight bits)
    unpacked; other tensors unchanged."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") and is_packed_tensor(tensor) else tensor


def is_packed_tensor(tensor: Any) -> bool:
    """Whether a tensor is of a class that keeps its values in others, and says how to unpack them."""
    kinds = [base for base in type(tensor).__mro__ if base.__module__.partition(".")[0] != "torch"]
    return hasattr(tensor, "__tensor_flatten__") and any("dequantize" in vars(kind) for kind in kinds)


def sample_of(tensor: Any, count: int = SAMPLES) -> Any:
    """Some elements of a tensor at a fixed stride, flat, where they lie."""
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // count)][:count]


def part_of(tensor: Any, elements: int = ELEMENTS, turn: int = 0) -> Any:
    """A view of at most `elements` elements, spread over the tensor; None where it has none (empty, sparse, meta).

    In each `turn` other ones, so that in many turns all are seen; those of a strided tensor are always the same.
    """
    own = own_shard(tensor)
    if own is None or own.is_sparse or own.is_meta or str(own.layout) != "torch.strided":
        return None
    own, size = own.detach(), own.numel()
    if size == 0:
        return None
    if size <= elements:
        return own.reshape(-1)
    if not own.is_contiguous():
        return _thinned(own, elements)
    distance = _distance(size, own.shape[-1], elements)
    begin = turn % (size - (elements - 1) * distance)
    return own.as_strided((elements,), (distance,), own.storage_offset() + begin)


@functools.lru_cache(maxsize=1024)
def _distance(size: int, width: int, elements: int) -> int:
    """The distance of the samples. It has no common factor with the rows: else only one column would be seen (`[CLS]`)."""
    distance = size // elements
    while math.gcd(distance, width) != 1:
        distance -= 1
    return distance


def _thinned(tensor: Any, elements: int) -> Any:
    """Every n-th index of each dimension, so that no copy of the whole is made."""
    left = elements
    steps: list[slice] = []
    for length in tensor.shape:
        kept = max(1, min(length, math.isqrt(left) if len(steps) < tensor.dim() - 1 else left))
        steps.append(slice(None, None, max(1, length // kept)))
        left = max(1, left // kept)
    return tensor[tuple(steps)].reshape(-1)[:elements]


def first_bytes(tensor: Any) -> bytes:
    """Its first elements, at most `NUM_ELEMENTS`, in the order of its indices."""
    first = tensor.reshape(-1) if tensor.is_contiguous() else tensor[(slice(0, NUM_ELEMENTS),) * tensor.dim()].reshape(-1)
    return raw_bytes(first[:NUM_ELEMENTS].cpu())


def raw_bytes(tensor: Any) -> bytes:
    """The bytes of a small tensor on the host."""
    import torch

    tensor = tensor.resolve_conj().resolve_neg()
    try:
        return bytes(tensor.numpy().tobytes())
    except TypeError:  # numpy has no bfloat16
        return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing may be read from the device then, and no generator."""
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# ---- many tensors, read later ----------------------------------------------------------------------------------------


class Snapshot:
    """Samples of some tensors as they are now: copies, one per device, in the order given. An absent tensor has none."""

    def __init__(self, tensors: Iterable[Any], elements: int = ELEMENTS, turn: int = 0) -> None:
        import torch

        self._slots: list[tuple[Any, int, int]] = []  # device, place in its copy, length
        parts: dict[Any, list[Any]] = defaultdict(list)
        ends: Counter[Any] = Counter()
        with torch.no_grad():
            for tensor in tensors:
                part = None if tensor is None else part_of(tensor, elements, turn)
                if part is None:
                    self._slots.append((None, 0, 0))
                    continue
                self._slots.append((part.device, ends[part.device], len(part)))
                ends[part.device] += len(part)
                parts[part.device].append(part)
            self._copies = {device: SampleCopy(torch.cat(some)) for device, some in parts.items()}

    @property
    def ready(self) -> bool:
        """Whether everything has arrived on the host."""
        return all(reading.ready for reading in self._copies.values())

    def rows(self) -> list[Any]:
        """One numpy array of float64 per tensor; waits for what has not arrived."""
        arrays = {device: reading.array() for device, reading in self._copies.items()}
        return [arrays[device][place : place + length] if length else None for device, place, length in self._slots]

    def bytes(self) -> bytes:
        """All samples as bytes, for a digest; waits for what has not arrived."""
        return b"".join(self._copies[device].bytes() for device in sorted(self._copies, key=str))


class SampleCopy:
    """One tensor on its way to the host."""

    def __init__(self, tensor: Any) -> None:
        import torch

        self._event: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        if tensor.device.type != "cuda":
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def ready(self) -> bool:
        """Whether `array` returns at once."""
        return self._event is None or bool(self._event.query())

    def array(self) -> Any:
        """The values as float64."""
        return self._arrived().double().numpy()

    def bytes(self) -> bytes:
        """The values bit for bit."""
        return raw_bytes(self._arrived())

    def _arrived(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


class DelayedReads:
    """Work that waits for its samples: done in order, as soon as they have arrived."""

    def __init__(self) -> None:
        self.waiting: list[tuple[tuple[Snapshot, ...], Callable[[], None]]] = []

    def add(self, snapshots: tuple[Snapshot, ...], work: Callable[[], None]) -> None:
        """Do `work` once these snapshots are there: now, where they are."""
        self.waiting.append((snapshots, work))
        self.run()

    def run(self, *, wait: bool = False) -> None:
        """Do what can be done; with `wait` everything."""
        while self.waiting and (wait or all(snapshot.ready for snapshot in self.waiting[0][0])):
            self.waiting.pop(0)[1]()


# ---- digests ---------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    """The first 64 bits of SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of(parts: Iterable[Any]) -> int:
    """64 bits of bytes and samples in their order; waits for those that are on their way."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.bytes())
    return int.from_bytes(digest.digest(), "little")


def tensor_digest(tensors: Iterable[Any], types: Iterable[Any] = ()) -> str:
    """Hash of a strided sample of every tensor, bit for bit, with shapes and dtypes; "" for no tensors.

    `types`: the dtype as which each tensor counts, where that is not its own.
    """
    return digest_and_each(tensors, types)[0]


def digest_and_each(tensors: Iterable[Any], types: Iterable[Any] = ()) -> tuple[str, str]:
    """The same, and 16 bits of each tensor's sample alone, in hex, in their order: they tell which tensors differ."""
    import torch

    shapes: list[str] = []
    samples: dict[tuple[Any, Any], tuple[list[int], list[Any]]] = {}
    for tensor, given in zip_longest(tensors, types):
        dtype = given or tensor.dtype
        if tensor.numel():
            places, parts = samples.setdefault((tensor.device, dtype), ([], []))
            places.append(len(shapes))
            parts.append(sample_of(tensor).to(dtype))
        shapes.append(f"{tuple(tensor.shape)}{dtype}")
    if not shapes:
        return "", ""
    each = ["0000"] * len(shapes)
    total = hashlib.sha256("|".join(shapes).encode())
    for places, parts in samples.values():
        content = raw_bytes(torch.cat(parts).cpu())
        total.update(content)
        begin = 0
        for place, part in zip(places, parts, strict=True):
            end = begin + part.numel() * part.element_size()
            each[place] = f"{zlib.crc32(content[begin:end]) & 0xFFFF:04x}"
            begin = end
    return total.hexdigest()[:16], "".join(each)


def apart(each: str, now: str) -> list[int]:
    """Places of the tensors whose 16 bits are others now; [] where there are other tensors, or nothing is known."""
    if len(each) != len(now):
        return []
    return [at // 4 for at in range(0, len(each), 4) if each[at : at + 4] != now[at : at + 4]]


def is_array(thing: Any) -> bool:
    """Whether it is a tensor, or an array of another library."""
    return hasattr(thing, "shape") and hasattr(thing, "dtype") and not isinstance(thing, type)


def is_generator(thing: Any) -> bool:
    """Whether it draws random numbers: Python's, NumPy's or torch's own class."""
    return isinstance(thing, random.Random) or type(thing).__name__ == "Generator"


def plain_bytes(thing: Any, most: int | None = None) -> bytes:
    """A value as bytes that are equal for equal ones: plain values, tensors, arrays, generators and collections of them.

    Of other objects by their type. `most`: of a larger collection its ends alone, and its length.
    """
    if isinstance(thing, Mapping | tuple | list | deque):
        size = b"" if most is None else b"%d" % len(thing)
        return size + _bytes_of_many(thing, ends_of(thing, most), most)
    if hasattr(thing, "numel") and hasattr(thing, "detach"):
        return tensor_digest((own_shard(thing),)).encode()
    if is_array(thing):
        return array_bytes(thing)
    if is_generator(thing):
        return _generator_bytes(thing)
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        return repr(thing).encode()
    return type(thing).__name__.encode()


def _bytes_of_many(things: Any, some: Sequence[Any], most: int | None) -> bytes:
    if not isinstance(things, Mapping):
        return b"[" + b",".join(plain_bytes(item, most) for item in some) + b"]"
    parts = []
    for key in sorted(some, key=repr):
        parts.append(repr(key).encode() + b":" + plain_bytes(things[key], most))
    return b"{" + b",".join(parts) + b"}"


def ends_of(things: Iterable[Any], most: int | None) -> Sequence[Any]:
    """The members of a collection; where there are more than `most`, the first and the last of them."""
    every = list(things)
    return every if most is None or len(every) <= most else [*every[: most // 2], *every[-most // 2 :]]


def array_bytes(thing: Any) -> bytes:
    """A sample of an array that is no tensor. What an object is called may be an address, so its class stands for it."""
    array = thing.__array__()
    flat = array.reshape(-1)[:: max(1, array.size // SAMPLES)][:SAMPLES]
    head = f"{array.shape}{array.dtype}".encode()
    if array.dtype.hasobject:
        plain = (str, bytes, int, float)
        return head + repr([item if isinstance(item, plain) else type(item).__name__ for item in flat.tolist()]).encode()
    return head + bytes((flat.astype("f8") if array.dtype.kind == "f" else flat).tobytes())


def _generator_bytes(thing: Any) -> bytes:
    if isinstance(thing, random.Random):
        return repr(thing.getstate()).encode()
    return raw_bytes(thing.get_state()) if hasattr(thing, "get_state") else repr(thing.bit_generator.state).encode()
