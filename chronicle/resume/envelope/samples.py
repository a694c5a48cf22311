"""Small samples of many tensors, read without waiting for the device: a few elements of each at a fixed distance.

On an accelerator the sample is copied to pinned memory asynchronously and read at a later step. No element is read by
`.item()`, and no tensor is copied as a whole.

Replicas: ranks that hold the same weights must hold the same bits, at every save and every few dozen steps. The digests travel
through the process group's key-value store, as at a save; no collective is added and no rank waits.
"""

import functools
import hashlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from chronicle.resume.fingerprint import own_shard
from chronicle.resume.memory import RankDigest

ELEMENTS = 16  # per tensor


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


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing may be read from the device then, and no generator."""
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


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


def raw_bytes(tensor: Any) -> bytes:
    """The bytes of a small tensor on the host."""
    import torch

    tensor = tensor.resolve_conj().resolve_neg()
    try:
        return bytes(tensor.numpy().tobytes())
    except TypeError:  # numpy has no bfloat16
        return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def digest_of(parts: Iterable[Any]) -> int:
    """64 bits of bytes and samples in their order; waits for those that are on their way."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.bytes())
    return int.from_bytes(digest.digest(), "little")


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


# ---- replicas ----------------------------------------------------------------------------------------------------------


REPLICATED = frozenset(
    ("replicated", "zero0", "zero1", "zero2", "DDPStrategy", "SingleDeviceStrategy")
)  # as adapters name the way in which weights are held
FIRST, STEPS = 3, 50  # steps compared at the start of a launch, and between two comparisons later
TENSORS = 512  # per comparison, in turn
EQUAL_ROUNDS = 3  # comparisons that were equal, after which ranks of an unknown layout count as replicas
SPARSE_WORDS = 8  # hexadecimal digits per tensor


def are_replicas(models: Sequence[Any], topology: Mapping[str, Any]) -> bool:
    """Whether every rank promises to hold the same weights: by the adapter's word, or a DistributedDataParallel."""
    if any(not is_whole(p) for model in models for p in model.parameters()):
        return False
    if topology.get("sharding") in REPLICATED:
        return True
    wrappers = {base.__name__ for model in models for base in type(model).__mro__}
    return "sharding" not in topology and "DistributedDataParallel" in wrappers


def differing_ranks(digests: Iterable[RankDigest]) -> tuple[int, ...]:
    """The ranks whose weights are not those of most ranks (of as many: of rank 0's); empty when all are equal."""
    known = [digest for digest in digests if digest.weights]
    counts = Counter(digest.weights for digest in known)
    if len(counts) < 2:
        return ()
    first = min(known, key=lambda digest: digest.rank).weights
    usual = max(counts, key=lambda weights: (counts[weights], weights == first))
    return tuple(digest.rank for digest in known if digest.weights != usual)


def say_difference(ranks: Sequence[int], num_ranks: int) -> str:
    """The difference in words."""
    named = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank {named} of {num_ranks} holds other weights than the rest: replicas have drifted apart"


def is_whole(param: Any) -> bool:
    """Whether a parameter is the same on every rank by its own word: no shard, no part of a tensor-parallel layer."""
    if hasattr(param, "ds_tensor") or hasattr(param, "to_local"):
        return False
    return not getattr(param, "tensor_model_parallel", False) and getattr(param, "allreduce", True) is not False


class Replicas:
    """Compares ranks at the first steps of a launch and every `STEPS`. `tell(ranks, step, name)` on rank 0, with no ranks where
    all are equal.

    `share(topic, value, write)` brings one value of every rank to the main process without waiting.
    """

    def __init__(
        self,
        share: Callable[[str, str, Callable[[Sequence[RankDigest]], None]], None],
        later: DelayedReads,
        tell: Callable[[Sequence[int], int | None, str], None],
    ) -> None:
        self._share, self._later, self._tell = share, later, tell
        self._steps = self._rounds = self._equal = 0
        self._next = 1

    def due(self) -> bool:
        """Count a step; all ranks count the same steps."""
        self._steps += 1
        return self._steps >= self._next

    def send(self, models: Sequence[Any], topology: Mapping[str, Any], step: int | None) -> None:
        """Send digests of this rank's whole parameters; the main process compares them when they are there."""
        self._rounds += 1
        self._next = self._steps + (1 if self._steps < FIRST else STEPS)
        named = [(name, p) for model in models for name, p in model.named_parameters() if is_whole(p)]
        begin = (self._rounds - 1) * TENSORS % max(1, len(named)) if len(named) > TENSORS else 0
        chosen = (named[begin:] + named[:begin])[:TENSORS]
        if not chosen or topology.get("sharding") == "fsdp":
            return
        topic, names = f"replicas {self._rounds}", [name for name, _ in chosen]
        promised = topology.get("sharding") in REPLICATED or are_replicas(models, topology)
        snapshot = Snapshot([p for _, p in chosen])

        def send() -> None:
            words = [b"" if row is None else row.tobytes() for row in snapshot.rows()]
            value = "".join(hashlib.sha256(word).hexdigest()[:SPARSE_WORDS] for word in words)
            self._share(topic, value, lambda digests: self._compare(digests, names, promised, step))

        self._later.add((snapshot,), send)

    def _compare(self, digests: Sequence[RankDigest], names: Sequence[str], promised: bool, step: int | None) -> None:
        weights = [RankDigest(rank=digest.rank, weights=digest.data) for digest in digests]
        if len({len(digest.weights) for digest in weights}) > 1:
            return  # other tensors on other ranks: a pipeline, nothing that could be equal
        ranks = differing_ranks(weights)
        if not ranks:
            self._equal += 1
            self._tell((), step, "")
        elif promised or self._equal >= EQUAL_ROUNDS:
            usual = next(digest.weights for digest in weights if digest.rank not in ranks)
            odd = next(digest.weights for digest in weights if digest.rank in ranks)
            place = next(place for place, (one, other) in enumerate(zip(usual, odd, strict=True)) if one != other)
            self._tell(ranks, step, names[place // SPARSE_WORDS])
