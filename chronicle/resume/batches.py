"""M4: observes the first batches that enter the model, and the data position that the trainer reports.

The three batches after every save and the first three of every launch are hashed (a strided sample of each tensor) and
written to the journal as `guard.batches`. A resume whose first batch is the one that followed the checkpoint continues the
data; one that begins like a launch from scratch starts the data again. Any other order is recorded, and refused only
where the trainer promised the same order. Outside these windows the model has no hook.

At a save the first batch of each rank goes through the process group's store to the main process, so that no collective is
added to training. At a first step the first batches are gathered and compared by rank.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chronicle.journal.events import BatchesSeen
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.checks.run import check_next_batch
from chronicle.resume.compiled import compiled_part, outside_graphs, see_compiled_calls
from chronicle.resume.contract import Expectation, Options
from chronicle.resume.faults import shield
from chronicle.resume.feed import Shapes
from chronicle.resume.journal import GuardJournal
from chronicle.resume.memory import RankDigest
from chronicle.resume.save import Sealer
from chronicle.resume.verdict import StartingPoint

__all__ = ["BatchWitness", "DataWatch", "batch_digest", "digest_of", "sample_batch"]

NUM_BATCHES = 3
SAMPLES = 64  # elements per tensor
NUM_RANKS_RECORDED = 64  # an entry for every save must stay small; with more ranks, rank 0 alone is recorded


class BatchWitness:
    """Collects digests of model inputs in short windows; `report(key, digests)` gets each full window.

    `first_batch()` is called when the first batch of the launch is about to enter the model.
    """

    def __init__(
        self, report: Callable[[str, tuple[str, ...]], None], first_batch: Callable[[], None] = lambda: None
    ) -> None:
        self._report, self._first_batch = report, first_batch
        self._key: str | None = "start"
        self._digests: list[str] = []
        self._model: weakref.ref[Any] | None = None
        self._handle: Any = None
        self._compiled = False
        self.first: tuple[str, ...] = ()  # of this launch
        self.lost: Callable[[Exception], None] = lambda problem: None  # told of an error of the guard itself
        self.shapes: Shapes | None = None  # told of every batch that is seen
        self.look: Callable[[Any, Any], None] = lambda args, kwargs: None  # at the first inputs of this launch

    def watch(self, model: Any) -> None:
        """Observe the inputs of this model in training mode; a compiled one is looked at from outside its graph."""
        if self._model is None:
            model = compiled_part(model)
            self._model = weakref.ref(model)
            _witnesses[model] = self
            see_compiled_calls(model, shield(self._before_compiled, self.failed))
            self._open()

    def _before_compiled(self, args: Any, kwargs: Any) -> None:
        """The compiled model is called: a hook inside it would see nothing, so there is none from now on."""
        self._compiled = True
        self._unhook()
        model = self._model() if self._model is not None else None
        if model is not None:
            _before_forward(model, args, kwargs)

    def failed(self, problem: Exception) -> None:
        """Looking at a batch failed: no more batches are looked at until the next save."""
        self._key, self._digests = None, []
        self._unhook()
        self.lost(problem)

    def after_save(self, key: str) -> None:
        """Begin a window: the next batches are those that follow this checkpoint."""
        self.flush()
        self._key, self._digests = key, []
        self._open()

    def restart(self) -> None:
        """Training begins again in this process, after a reload: the next batches are the first ones."""
        self.flush()
        self._key, self._digests, self.first = "start", [], ()
        self._open()

    def flush(self) -> None:
        """Report a window that is not full yet."""
        if self._key is not None and self._digests:
            self._close()

    def see(self, args: Any, kwargs: Any) -> None:
        """One batch enters the model."""
        if self._key is None:
            return
        if self._key == "start" and not self._digests:
            self._first_batch()
        if self._key == "start":
            self.look(args, kwargs)
        self._digests.append(batch_digest(args, kwargs))
        if self.shapes is not None:
            self.shapes.see((args, kwargs))
        if self._key == "start":
            self.first = tuple(self._digests)
        if len(self._digests) >= NUM_BATCHES:
            self._close()

    def _open(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None and self._handle is None and self._key is not None and not self._compiled:
            self._handle = model.register_forward_pre_hook(_forward_hook(), with_kwargs=True)

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _close(self) -> None:
        key, digests = self._key, tuple(self._digests)
        self._key, self._digests = None, []
        self._unhook()
        if key is not None:
            self._report(key, digests)


# The hook is a plain function and the witness is kept outside the module: a guarded model can still be deep-copied and
# pickled, and a copy is not observed.
_witnesses: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _before_forward(module: Any, args: Any, kwargs: Any) -> None:
    witness = _witnesses.get(module)
    if witness is not None and module.training:
        witness.see(args, kwargs)


def _failed(problem: Exception) -> None:
    for witness in tuple(_witnesses.values()):
        witness.failed(problem)


def _forward_hook() -> Callable[..., None]:
    """The hook that is registered. It takes the function's name, because a pickled model finds its hooks by name."""
    global _before_forward
    if not hasattr(_before_forward, "__wrapped__"):
        _before_forward = outside_graphs(shield(_before_forward, _failed))
    return _before_forward


def batch_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Hash of a strided sample of all tensors among a model's inputs, with their shapes."""
    return digest_of(sample_batch(args, kwargs))


def sample_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Shape and strided sample of every tensor, still on its device: no transfer."""
    samples = []
    for tensor in _tensors((args, dict(kwargs))):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        samples.append((f"{tuple(tensor.shape)}{tensor.dtype}", sample))
    return samples


def digest_of(samples: Sequence[tuple[str, Any]]) -> str:
    """Hash of what `sample_batch` returned."""
    digest = hashlib.sha256()
    for shape, sample in samples:
        digest.update(shape.encode())
        digest.update(repr(sample.tolist()).encode())
    return digest.hexdigest()[:16]


def _tensors(thing: Any) -> Iterator[Any]:
    if hasattr(thing, "numel") and hasattr(thing, "detach"):
        yield thing
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            yield from _tensors(thing[key])
    elif isinstance(thing, (tuple, list)):
        for item in thing:
            yield from _tensors(item)


# ---- data position and first batches of every rank -------------------------------------------------------------------


class DataWatch:
    """The data this launch begins with, and the batches that followed its saves."""

    def __init__(
        self,
        options: Options,
        journal: GuardJournal,
        sealer: Sealer,
        start: StartingPoint,
        step: Callable[[], int | None],
        first_batch: Callable[[], None],
    ) -> None:
        self._options, self._journal, self._sealer, self._start, self._step = options, journal, sealer, start, step
        self.batches = BatchWitness(self._record, first_batch)
        self._was_equal = False
        self.mid_epoch: bool | None = None  # whether the checkpoint lies inside an epoch, where the adapter can tell

    def loaded(self, data: Any) -> None:
        """The framework has loaded; `data` is the trainer's position now."""
        self._was_equal = self._is_equal(data)

    def check(self, data: Any, first_batches: Mapping[int, str]) -> list[Check]:
        """Right before the first step; `first_batches`: rank -> digest of its first batch (the main process judges)."""
        checks = [] if self._was_equal or self._is_equal(data) else [self._wrong_position(data)]
        expectation = self._start.expectation
        if (
            not self.batches.first
            or expectation is None
            or self._sealer.ranks.rank != 0
            or self._may_differ(expectation)
        ):
            return checks
        history = self._journal.read()
        step = expectation.memory.step if expectation.memory else None
        key = str(self._start.loaded_from) if self._start.loaded_from else f"step {step}"
        followed, starts = history.followed.get(key, {}), history.starts
        for rank, first in sorted(first_batches.items()):
            if rank == 0 or rank in followed:
                checks += check_next_batch(
                    first,
                    followed.get(rank),
                    starts.get(rank, frozenset()),
                    promised=self._options.same_data,
                    mid_epoch=self.mid_epoch,
                    rank=rank,
                )
        return checks

    def gather_first(self) -> dict[int, str]:
        """The first batch of every rank; each rank must call this."""
        ranks = self._sealer.ranks
        if ranks.world_size > NUM_RANKS_RECORDED:
            return {ranks.rank: self.batches.first[0]} if self.batches.first else {}
        reports = ranks.gather({"rank": ranks.rank, "first": list(self.batches.first[:1])})
        return {int(report["rank"]): str(report["first"][0]) for report in reports if report["first"]}

    def _may_differ(self, expectation: Expectation) -> bool:
        return expectation.accepts("data") or (expectation.contract is not None and expectation.contract.moves_data)

    def _is_equal(self, data: Any) -> bool:
        expectation = self._start.expectation
        if self._options.data_state is None or expectation is None or expectation.memory is None:
            return True
        if expectation.memory.data is None or self._may_differ(expectation):
            return True
        return _plain(expectation.memory.data) == _plain(data)

    def _wrong_position(self, data: Any) -> Check:
        memory = self._start.expectation.memory if self._start.expectation else None
        return failed(
            "data position",
            "M4",
            expected=str(memory.data if memory else None)[:160],
            found=str(data)[:160],
            where="data_state()",
            cause="the data position was not restored: samples would be repeated or left out",
        )

    def _record(self, key: str, digests: tuple[str, ...]) -> None:
        """A window is full: the main process records it, with the first batch of the other ranks."""
        after = "" if key == "start" else key
        if not after and (self._start.loaded_from is not None or self._start.state_loaded):
            return
        step = self._step() if after else self._start.start_step

        def write(firsts: Sequence[RankDigest]) -> None:
            others = {str(first.rank): first.data for first in firsts if first.rank != 0}
            seen = BatchesSeen(digests=digests, after=after, ranks=others)
            self._journal.write(seen, step=step, title="batches seen")

        self._sealer.share(f"batches {key}", digests[0], write, at_most=NUM_RANKS_RECORDED)


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)
