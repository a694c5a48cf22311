"""M4: which data a launch really begins with, seen where it enters the model.

Three batches after every save and the first three of every launch are hashed (a strided sample of each tensor); they
stand in the journal as `guard.batches`. A resume whose first batch is the one that followed the checkpoint continues
the data; one that begins like a launch from scratch starts the data again. Anything else is another order: said in the
verdict, refused only where the trainer promised the same order. Outside these windows there is no hook.
"""

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from chronicle.resume.checks.check import Check, failed
from chronicle.resume.checks.run import check_next_batch
from chronicle.resume.contract import Expectation, Options
from chronicle.resume.journal import GuardJournal
from chronicle.resume.memory import RankDigest
from chronicle.resume.save import Sealer
from chronicle.resume.verdict import Beginning

__all__ = [
    "BatchWitness",
    "DataWatch",
    "batch_digest",
]

NUM_BATCHES = 3
SAMPLES = 64


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
        self.first: tuple[str, ...] = ()  # of this launch

    def watch(self, model: Any) -> None:
        """Look at what goes into this model in training mode; a compiled one is left alone (a hook would recompile it)."""
        if self._model is None and not hasattr(model, "_orig_mod"):
            self._model = weakref.ref(model)
            _witnesses[model] = self
            self._open()

    def after_save(self, key: str) -> None:
        """Begin a window: the next batches are those that follow this checkpoint."""
        self.flush()
        self._key, self._digests = key, []
        self._open()

    def flush(self) -> None:
        """Report a window that did not get full."""
        if self._key is not None and self._digests:
            self._close()

    def see(self, args: Any, kwargs: Any) -> None:
        """One batch enters the model."""
        if self._key is None:
            return
        if self._key == "start" and not self._digests:
            self._first_batch()
        self._digests.append(batch_digest(args, kwargs))
        if self._key == "start":
            self.first = tuple(self._digests)
        if len(self._digests) >= NUM_BATCHES:
            self._close()

    def _open(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None and self._handle is None and self._key is not None:
            self._handle = model.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def _close(self) -> None:
        key, digests = self._key, tuple(self._digests)
        self._key, self._digests = None, []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if key is not None:
            self._report(key, digests)


# A plain function on the module and the rest beside it: a model under guard can still be deep-copied and pickled,
# and what is copied is not watched.
_witnesses: "weakref.WeakKeyDictionary[Any, BatchWitness]" = weakref.WeakKeyDictionary()


def _before_forward(module: Any, args: Any, kwargs: Any) -> None:
    witness = _witnesses.get(module)
    if witness is not None and module.training:
        witness.see(args, kwargs)


def batch_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Hash of a strided sample of all tensors among a model's inputs, with their shapes."""
    digest = hashlib.sha256()
    for tensor in _tensors((args, dict(kwargs))):
        flat = tensor.detach().reshape(-1)
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
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


# --- Data position and first batches of every rank

NUM_RANKS_RECORDED = 64  # a line of the journal for every save must stay small; beyond, rank 0 alone


class DataWatch:
    """What data this launch begins with, and what followed its saves."""

    def __init__(
        self,
        options: Options,
        story: GuardJournal,
        sealer: Sealer,
        begun: Beginning,
        step: Callable[[], int | None],
        first_batch: Callable[[], None],
    ) -> None:
        self._options, self._story, self._sealer, self._begun, self._step = options, story, sealer, begun, step
        self.batches = BatchWitness(self._record, first_batch)
        self._met = False
        self.mid_epoch: bool | None = None  # whether the checkpoint lies inside an epoch, where the adapter can tell

    def loaded(self, data: Any) -> None:
        """The framework has loaded; `data` is the trainer's position now."""
        self._met = self._is_equal(data)

    def check(self, data: Any, first_batches: Mapping[int, str]) -> list[Check]:
        """Right before the first step; `first_batches`: digest of each rank's first one (the main process judges)."""
        checks = [] if self._met or self._is_equal(data) else [self._wrong_position(data)]
        expectation = self._begun.expectation
        if (
            not self.batches.first
            or expectation is None
            or self._sealer.ranks.rank != 0
            or self._may_differ(expectation)
        ):
            return checks
        history = self._story.read()
        step = expectation.memory.step if expectation.memory else None
        key = str(self._begun.loaded_from) if self._begun.loaded_from else f"step {step}"
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
        expectation = self._begun.expectation
        if self._options.data_state is None or expectation is None or expectation.memory is None:
            return True
        if expectation.memory.data is None or self._may_differ(expectation):
            return True
        return _plain(expectation.memory.data) == _plain(data)

    def _wrong_position(self, data: Any) -> Check:
        memory = self._begun.expectation.memory if self._begun.expectation else None
        return failed(
            "data position",
            "M4",
            expected=str(memory.data if memory else None)[:160],
            found=str(data)[:160],
            where="data_state()",
            cause="the data position was not restored: samples would be repeated or left out",
        )

    def _record(self, key: str, digests: tuple[str, ...]) -> None:
        """A window is full: the main process writes it down, with the first batch of the other ranks."""
        after = None if key == "start" else key
        if after is None and (self._begun.loaded_from is not None or self._begun.state_loaded):
            return
        step = self._step() if after else self._begun.start_step
        data: dict[str, Any] = {"digests": list(digests)} | ({"after": after} if after else {})

        def write(firsts: Sequence[RankDigest]) -> None:
            others = {str(first.rank): first.data for first in firsts if first.rank != 0}
            known = data | ({"ranks": others} if others else {})
            self._story.write("guard.batches", step=step, title="batches seen", data=known)

        self._sealer.share(f"batches {key}", digests[0], write, at_most=NUM_RANKS_RECORDED)


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)
