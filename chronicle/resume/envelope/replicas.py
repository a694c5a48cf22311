"""Replicas: ranks that hold the same weights must hold the same bits, at every save and every few dozen steps.

The digests travel through the process group's key-value store, as at a save; no collective is added and no rank waits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from chronicle.resume.envelope.breach import BreachKind, BreachLog
from chronicle.resume.memory import RankDigest
from chronicle.resume.samples import DelayedReads, Snapshot, apart, digest
from chronicle.resume.training import Training

REPLICATED = frozenset(
    ("replicated", "zero0", "zero1", "zero2", "DDPStrategy", "SingleDeviceStrategy")
)  # as adapters name the way in which weights are held
FIRST, STEPS = 3, 50  # steps compared at the start of a launch, and between two comparisons later
TENSORS = 512  # per comparison, in turn
EQUAL_ROUNDS = 3  # comparisons that were equal, after which ranks of an unknown layout count as replicas

Share = Callable[[str, str, Callable[[Sequence[RankDigest]], None]], None]


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


def is_whole(param: Any) -> bool:
    """Whether a parameter is the same on every rank by its own word: no shard, no part of a tensor-parallel layer."""
    if hasattr(param, "ds_tensor") or hasattr(param, "to_local"):
        return False
    return not getattr(param, "tensor_model_parallel", False) and getattr(param, "allreduce", True) is not False


class Replicas:
    """Compares the ranks of one training, and tells which differ."""

    def __init__(self, training: Training, log: BreachLog) -> None:
        self._training, self._log = training, log
        self._equal_at: int | None = None  # the last step after which the ranks were equal
        self.begin()

    def begin(self) -> None:
        """The first steps of a launch, or after a load, are to come."""
        self._steps = self._rounds = self._equal = 0
        self._next = 1

    def due(self) -> bool:
        """Count a step; all ranks count the same steps."""
        self._steps += 1
        return self._steps >= self._next

    def at_save(self, digests: Sequence[RankDigest], topology: Mapping[str, Any], step: int | None) -> str:
        """The main process has the digests of the ranks at a save: which differ, in words; "" when none does."""
        if len(digests) < 2:
            return ""
        alike = are_replicas(self._training.observe().models, topology)
        return self._tell(differing_ranks(digests) if alike else (), len(digests), step)

    def send(
        self, models: Sequence[Any], topology: Mapping[str, Any], step: int | None, share: Share, later: DelayedReads
    ) -> None:
        """Send digests of this rank's whole parameters; the main process compares them when they are there.

        `share(topic, value, write)` brings one value of every rank to the main process without waiting.
        """
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
            each = "".join(digest(b"" if row is None else row.tobytes())[:4] for row in snapshot.rows())
            share(topic, each, lambda digests: self._compare(digests, names, promised, step))

        later.add((snapshot,), send)

    def _compare(self, digests: Sequence[RankDigest], names: Sequence[str], promised: bool, step: int | None) -> None:
        held = {one.rank: RankDigest(rank=one.rank, weights=one.data) for one in digests}
        if len({len(one.weights) for one in held.values()}) > 1:
            return  # other tensors on other ranks: a pipeline, nothing that could be equal
        ranks = differing_ranks(held.values())
        if not ranks:
            self._equal += 1
            self._tell((), len(held), step)
        elif promised or self._equal >= EQUAL_ROUNDS:
            usual = next(one.weights for rank, one in held.items() if rank not in ranks)
            place = apart(usual, held[ranks[0]].weights)[0]
            self._tell(ranks, len(held), step, f" (`{names[place]}`)")

    def _tell(self, ranks: Sequence[int], num_ranks: int, step: int | None, name: str = "") -> str:
        if not ranks:
            self._equal_at = step
            return ""
        named = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
        words = f"rank {named} of {num_ranks} holds other weights than the rest: replicas have drifted apart{name}"
        told = self._log.tell(BreachKind.REPLICAS, words, step=step, low=self._equal_at)
        return f"{told.kind.value} {told.since}: {words}"
