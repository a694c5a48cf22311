"""Replicas: ranks that hold the same weights must hold the same bits, at every save and every few dozen steps.

The digests travel through the process group's key-value store, as at a save; no collective is added and no rank waits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from chronicle.resume.envelope.samples import Later, Snapshot
from chronicle.resume.memory import RankDigest

__all__ = ["Replicas", "are_replicas", "differing_ranks", "say_difference"]

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
        later: Later,
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
