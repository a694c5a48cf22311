"""Small samples of many tensors, read without waiting for the device: a few elements of each at a fixed stride.

On an accelerator the sample is copied to pinned memory asynchronously and read at a later step. No element is read by
`.item()`, and no tensor is copied as a whole.

Replicas: ranks that hold the same weights must hold the same bits, at every save and every few dozen steps.

The digests travel through the process group's key-value store, as at a save; no collective is added and no rank waits.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from chronicle.resume.fingerprint import own_shard
from chronicle.resume.memory import RankDigest

ELEMENTS = 16  # per tensor


def part_of(tensor: Any, elements: int = ELEMENTS) -> Any:
    """A view of at most `elements` elements, spread over the tensor; None where it has none (empty, sparse, meta)."""
    own = own_shard(tensor)
    if own is None or own.is_sparse or own.is_meta or str(own.layout) != "torch.strided":
        return None
    own, size = own.detach(), own.numel()
    if size == 0:
        return None
    if size <= elements:
        return own.reshape(-1)
    if own.is_contiguous():
        return own.as_strided((elements,), (size // elements,), own.storage_offset())
    return _thinned(own, elements)


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
    """Samples of some tensors as they are now: copies, one per device, in the order given. An absent tensor has length 0."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        import torch

        self.lengths: list[int] = []
        self._slots: list[tuple[Any, int]] = []  # device and place in its copy
        self._copies: dict[Any, Any] = {}
        parts: dict[Any, list[Any]] = {}
        places: dict[Any, int] = {}
        with torch.no_grad():
            for tensor in tensors:
                part = None if tensor is None else part_of(tensor)
                if part is None:
                    self.lengths.append(0)
                    self._slots.append((None, 0))
                    continue
                device = part.device
                self.lengths.append(len(part))
                self._slots.append((device, places.get(device, 0)))
                places[device] = places.get(device, 0) + len(part)
                parts.setdefault(device, []).append(part)
            for device, some in parts.items():
                self._copies[device] = SampleCopy(torch.cat(some))

    @property
    def ready(self) -> bool:
        """Whether everything has arrived on the host."""
        return all(reading.ready for reading in self._copies.values())

    def rows(self) -> list[Any]:
        """One numpy array of float64 per tensor; waits for what has not arrived."""
        arrays = {device: reading.array() for device, reading in self._copies.items()}
        return [
            arrays[device][place : place + length] if length else None
            for (device, place), length in zip(self._slots, self.lengths, strict=True)
        ]

    def bytes(self) -> bytes:
        """All samples as bytes, for a digest; waits for what has not arrived."""
        return b"".join(reading.array().tobytes() for _, reading in sorted(self._copies.items(), key=lambda one: str(one[0])))


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
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host.double().numpy()


class DelayedReads:
    """Work that waits for its samples: done in order, as soon as they have arrived."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[Snapshot, ...], Callable[[], None]]] = []

    def add(self, snapshots: tuple[Snapshot, ...], work: Callable[[], None]) -> None:
        """Do `work` once these snapshots are there: now, where they are."""
        self._waiting.append((snapshots, work))
        self.run()

    def run(self, *, wait: bool = False) -> None:
        """Do what can be done; with `wait` everything."""
        while self._waiting and (wait or all(snapshot.ready for snapshot in self._waiting[0][0])):
            self._waiting.pop(0)[1]()


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
    """Compares ranks at the first steps of a launch and every `STEPS`. `tell(ranks, num_ranks, step, name)` on rank 0,
    with no ranks where all are equal.

    `share(topic, value, write)` brings one value of every rank to the main process without waiting.
    """

    def __init__(
        self,
        share: Callable[[str, str, Callable[[Sequence[RankDigest]], None]], None],
        later: DelayedReads,
        tell: Callable[[Sequence[int], int, int | None, str], None],
    ) -> None:
        self._share, self._later, self._tell = share, later, tell
        self._steps = self._rounds = self._equal = 0
        self._next = 1

    def due(self) -> bool:
        """Count a step; all ranks count the same steps."""
        self._steps += 1
        return self._steps >= self._next

    def send(self, models: Sequence[Any], topology: Mapping[str, Any], step: int | None, num_ranks: int) -> None:
        """Send digests of this rank's whole parameters; the main process compares them when they are there."""
        self._rounds += 1
        self._next = self._steps + (1 if self._steps < FIRST else STEPS)
        named = [(name, p) for model in models for name, p in model.named_parameters() if is_whole(p)]
        begin = (self._rounds - 1) * TENSORS % max(1, len(named)) if len(named) > TENSORS else 0
        chosen = (named[begin:] + named[:begin])[:TENSORS]
        if not chosen or topology.get("sharding") == "fsdp":
            return
        names, topic = [name for name, _ in chosen], f"replicas {self._rounds}"
        promised = topology.get("sharding") in REPLICATED or are_replicas(models, topology)
        snapshot = Snapshot([p for _, p in chosen])
        self._later.add((snapshot,), lambda: self._send(snapshot, names, topic, promised, step, num_ranks))

    def _send(
        self, snapshot: Snapshot, names: Sequence[str], topic: str, promised: bool, step: int | None, num_ranks: int
    ) -> None:
        words = [b"" if row is None else row.tobytes() for row in snapshot.rows()]
        value = "".join(sha256(word).hexdigest()[:SPARSE_WORDS] for word in words)
        self._share(topic, value, lambda digests: self._compare(digests, names, promised, step, num_ranks))

    def _compare(
        self, digests: Sequence[RankDigest], names: Sequence[str], promised: bool, step: int | None, num_ranks: int
    ) -> None:
        weights = [RankDigest(rank=digest.rank, weights=digest.data) for digest in digests]
        if len({len(digest.weights) for digest in weights}) > 1:
            return  # other tensors on other ranks: a pipeline, nothing that could be equal
        ranks = differing_ranks(weights)
        if not ranks:
            self._equal += 1
            self._tell((), num_ranks, step, "")
            return
        if not promised and self._equal < EQUAL_ROUNDS:
            return
        usual = next(digest.weights for digest in weights if digest.rank not in ranks)
        odd = next(digest.weights for digest in weights if digest.rank in ranks)
        width = SPARSE_WORDS
        place = next(i for i in range(len(names)) if usual[i * width : (i + 1) * width] != odd[i * width : (i + 1) * width])
        self._tell(ranks, num_ranks, step, names[place])
