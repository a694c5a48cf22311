"""A data plan over indexed shards for any training script: every sample once, in one order, however the run is restarted.

    data = PlanDataset({"data/web.index": 7, "data/code.index": 3}, seed=1, decode=lambda sample: …)
    loader = data.loader(batch_size=16, num_workers=4)       # this rank's batches, a torch DataLoader inside
    for batch in loader:
        …
        torch.save({…, "data": loader.state_dict()}, path)   # and loader.load_state_dict(saved["data"]) after a restart

There is one global sequence of samples: sample n is a function of plan, seed and n. A global batch is the next `batch_size ×
world_size` samples, and a rank takes its slice. The state is how many samples all ranks have read, so batch size, world size
and number of workers may change at any restart, and the sequence goes on where it was.

Who keeps the place decides what a restart is worth. `PlanLoader` keeps it: in a loop of one's own, under Accelerate
(registered for checkpointing), in Lightning (its checkpoints hold the state of such loaders) and in the HF Trainer (`attach`).
`PlanBatches` is a batch sampler for torchdata's StatefulDataLoader, which keeps it. Any other loader that does not shuffle
reads the plan's order through `data[n]`, but finds its place by counting its own batches: that holds for the same ranks and
batch size alone. One that shuffles is refused at its first batch.

The plan is `DataPlan` with blocks of samples in place of batches: mixture, epochs, skips and reshuffles are the same. A
reshuffle begins with the next block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from chronicle.data.plan import DataPlan, SampleIds, Segments, SourceSpec
from chronicle.data.shard_index import Rows, Sample, SourceIndex, SourceReader, read_source_index
from chronicle.errors import DataError

STATE_VERSION = 1
BLOCK_SAMPLES = 1024
POLICIES = ("stop", "skip")
Source = str | Path | SourceIndex | Rows


class PlanDataset:
    """Sample n of a plan over indexed sources, by number.

    `sources` maps an index file (an open index, or `Rows`) to its whole-number weight in the mixture; `epochs` in place of
    weights reads every source so many times while the others are read theirs. `on_error` says what happens where `decode`
    raises: "stop", or "skip": the sample is left out of its batch and named on stderr. A sample whose bytes are
    not the indexed ones always stops. Raises DataError or ShardProblem for what cannot be opened.
    """

    def __init__(self, sources: Mapping[Source, int] | Sequence[Source], *, seed: int = 0,
                 epochs: Sequence[int] | None = None, decode: Callable[[Sample], Any] | None = None, on_error: str = "stop",
                 roots: Mapping[str, str | Path] | None = None) -> None:
        if on_error not in POLICIES:
            raise DataError(f"on_error is `{on_error}`, expected one of {', '.join(POLICIES)}")
        opened = [read_source_index(one) if isinstance(one, str | Path) else one for one in sources]
        weights = list(sources.values()) if isinstance(sources, Mapping) else [index.num_samples for index in opened]
        if epochs is not None:
            if len(epochs) != len(opened):
                raise DataError(f"{len(epochs)} numbers of epochs for {len(opened)} sources")
            weights = [index.num_samples * count for index, count in zip(opened, epochs, strict=True)]
        self.plan: DataPlan = DataPlan(seed=seed, batch_size=BLOCK_SAMPLES, sources=tuple(
            SourceSpec(name=index.source, num_samples=index.num_samples, digest=index.digest, weight=weight)
            for index, weight in zip(opened, weights, strict=True)))
        places = roots or {}
        self._readers = [one if isinstance(one, Rows) else SourceReader(one, places.get(one.source)) for one in opened]
        self._decode, self._on_error = decode, on_error
        self.segments = Segments()
        self._block: tuple[int, Segments, SampleIds] | None = None
        self._first, self._last = sys.maxsize, -1  # the smallest and the last number of batches in this process

    def __len__(self) -> int:
        """The samples of all sources: as many as one reading of each holds. Numbers beyond it are the next epochs."""
        return sum(source.num_samples for source in self.plan.sources)

    def __iter__(self) -> Iterator[Any]:
        """Yield as many samples as `len` says; numbers have no end by themselves."""
        return (self[number] for number in range(len(self)))

    def ids(self, first: int, count: int) -> SampleIds:
        """Return (source number, sample number) of `count` samples of the sequence, shape (count, 2)."""
        found = []
        while count > 0:
            block, offset = divmod(first, BLOCK_SAMPLES)
            rows = self._rows(block)[offset:offset + count]
            found.append(rows)
            first, count = first + len(rows), count - len(rows)
        return np.concatenate(found) if found else np.empty((0, 2), np.int64)

    def __getitem__(self, number: int) -> Any:
        """Return sample `number` of the sequence, decoded. A decoder's error passes, whatever the policy."""
        return self._read(*self.ids(number, 1)[0])

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return the samples of a batch; with on_error="skip" without those that cannot be decoded.

        Raises DataError where numbers go back, unless to the beginning of another pass: then a loader shuffles.
        """
        if not isinstance(numbers, range):  # a range is ours
            self._watch(numbers)
        found = []
        for number in numbers:
            try:
                found.append(self[number])
            except DataError:
                raise
            except Exception as problem:  # a decoder may raise anything
                if self._on_error == "stop":
                    raise
                self._skip(number, problem)
        return found

    def loader(self, batch_size: int, *, rank: int | None = None, world_size: int | None = None, num_samples: int | None = None,
               **options: Any) -> PlanLoader:
        """Return this rank's batches of `batch_size` samples; further options are torch's DataLoader's.

        Rank and world size come from torch.distributed or the launcher's variables when the first batch is read. Each pass
        is an epoch of `len(data)` samples; a global batch that begins in it belongs to it, so nothing is dropped between two.
        With `num_samples` there is one pass, to that sample of the sequence, without a last incomplete global batch.
        """
        return PlanLoader(self, batch_size, rank, world_size, num_samples, options)

    def reshuffled(self, position: int) -> int:
        """Read the rest of the epoch in a new order from the next block after `position` samples; none repeats.

        Returns the number from which on the order is another.
        """
        block = -(-position // BLOCK_SAMPLES)
        self.segments, self._block = self.segments.resumed(block, reshuffle=True), None
        return block * BLOCK_SAMPLES

    def _rows(self, block: int) -> SampleIds:
        if self._block is None or self._block[0] != block or self._block[1] is not self.segments:
            self._block = block, self.segments, self.plan.batch_ids(block, self.segments)
        return self._block[2]

    def _read(self, source: int, number: int) -> Any:
        sample = self._readers[int(source)].read(int(number))
        return sample if self._decode is None else self._decode(sample)

    def _watch(self, numbers: Sequence[int]) -> None:
        """Batches of other samplers: several may take turns, so of batches of one sample alone the last is compared."""
        last = -1 if len(numbers) > 1 else self._last
        for number in numbers:
            if self._first < number <= last:
                raise DataError(f"a loader asked for sample {number} after sample {last}: it shuffles, and the plan's order "
                                "would be lost", "read through `data.loader(batch_size)`, or without shuffling")
            self._first, last = min(self._first, number), number
        self._last = last

    def _skip(self, number: int, problem: Exception) -> None:
        source, index = self.ids(number, 1)[0]
        name = self.plan.sources[int(source)].name
        error = f"{type(problem).__name__}: {problem}"[:300]
        print(f"chronicle: sample {number} ({name} {int(index)}) left out: {error}", file=sys.stderr)


class PlanBatches:
    """The numbers of this rank's batches from `position` on, epoch after epoch: a batch sampler that has a state.

    `position` counts the samples of all ranks. Iterating again goes on where it stopped, in the next epoch at its end.
    """

    def __init__(self, data: PlanDataset, batch_size: int, *, rank: int | None = None, world_size: int | None = None,
                 num_samples: int | None = None) -> None:
        if (rank is None) != (world_size is None):
            raise DataError("a rank without a world size, or the other way round", "give both, or none")
        if batch_size < 1 or not 0 <= (rank or 0) < (1 if world_size is None else world_size):
            raise DataError(f"batch size {batch_size}, rank {rank} of {world_size}: expected a batch and a rank of the world")
        self.data, self.batch_size, self.num_samples = data, batch_size, num_samples
        self._given = None if rank is None or world_size is None else (rank, world_size)
        self.position = 0
        self._end = 0  # of this pass

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self._ranks()[1]

    @property
    def epoch(self) -> int:
        """Passes over `len(data)` samples that are behind."""
        return self.position // len(self.data)

    def __len__(self) -> int:
        """Batches of a whole pass, wherever the position is: what trainers divide their steps by."""
        return -(-len(self.data) // self.global_batch) if self.num_samples is None else self.num_samples // self.global_batch

    def __iter__(self) -> PlanBatches:
        self._end = (self.epoch + 1) * len(self.data) if self.num_samples is None else self.num_samples - self.global_batch + 1
        return self

    def __next__(self) -> range:
        if self.position >= self._end:
            raise StopIteration
        rank, world_size = self._ranks()
        first = self.position + rank * self.batch_size
        self.position += self.batch_size * world_size
        return range(first, first + self.batch_size)

    def skip(self, num_samples: int) -> None:
        """Leave out the next samples of the sequence."""
        if num_samples < 0:
            raise DataError(f"skip of {num_samples} samples, expected 0 or more")
        self.position += num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return what a later launch needs: the plan, the samples read, the reshuffles."""
        return {"v": STATE_VERSION, "plan": self.data.plan.to_json(), "plan_hash": self.data.plan.plan_hash,
                "position": self.position, "segments": self.data.segments.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks. Raises PlanChanged for another plan, naming what differs."""
        if state.get("v") != STATE_VERSION:
            raise DataError(f"data state has version {state.get('v')}, this program reads {STATE_VERSION}")
        self.data.plan.require_same(state["plan"])
        segments = Segments.from_json(state["segments"])
        if segments != self.data.segments:  # else workers that hold these go on
            self.data.segments = segments
        self.position = int(state["position"])

    def _ranks(self) -> tuple[int, int]:
        return self._given or _ranks()


@dataclass(slots=True, eq=False)
class PlanChange:
    """What a rollback asks of the order: `batches` left out, or the rest reshuffled. `used`: the loader was read since."""

    name: str
    batches: int = 0
    reshuffle: bool = False
    used: bool = False


class PlanLoader(PlanBatches):
    """This rank's batches; a batch counts as read when it is handed out, whatever workers have read ahead."""

    def __init__(self, data: PlanDataset, batch_size: int, rank: int | None, world_size: int | None, num_samples: int | None,
                 options: Mapping[str, Any]) -> None:
        taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if taken:
            raise DataError(f"the plan decides {', '.join(sorted(taken))}", "leave it out of the loader's options")
        super().__init__(data, batch_size, rank=rank, world_size=world_size, num_samples=num_samples)
        self._options = dict(options)
        self._inner: tuple[Segments, PlanBatches, Any] | None = None  # kept, so that persistent workers are
        self._asked: list[PlanChange] = []
        self._changed: list[list[Any]] = []  # name, sample before, sample after of every change that the weights descend from

    def change_when_read(self, name: str, *, batches: int = 0, reshuffle: bool = False) -> PlanChange:
        """Leave out the next global batches, or reshuffle the rest, when the loader is read next.

        So the guard applies `chronicle rollback --skip-batches` and `--reshuffle`. The state keeps the name (the rollback's),
        and a change that a loaded state has already is not made again.
        """
        change = PlanChange(name, batches, reshuffle)
        self._asked.append(change)
        return change

    def forget_change(self, change: PlanChange) -> None:
        """Take back a change that was not read yet."""
        self._asked = [one for one in self._asked if one is not change]

    def state_dict(self) -> dict[str, Any]:
        """Return what a later launch needs: the plan, the samples read, the reshuffles, the rollbacks' changes."""
        return {**super().state_dict(), **({"changed": self._changed} if self._changed else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks. Raises PlanChanged for another plan, naming what differs."""
        super().load_state_dict(state)
        self._changed = [list(change) for change in state.get("changed", ())]

    def _change(self) -> None:
        """Make the changes that were asked for since the last pass."""
        for change in self._asked:
            change.used = True
            if change.name in (name for name, _, _ in self._changed):
                continue
            before = self.position
            self.skip(change.batches * self.global_batch)
            begins = f"the next is {self.position}"
            if change.reshuffle:
                begins += f", reshuffled from {self.data.reshuffled(self.position)} on"
            self._changed = [*self._changed, [change.name, before, self.position]]
            if self._ranks()[0] == 0:
                print(f"chronicle: rollback {change.name}: {self.position - before} samples of the plan are left out after "
                      f"sample {before}; {begins}", file=sys.stderr)
        self._asked = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # batches in place of their numbers
        """Yield the batches of this pass."""
        self._change()
        ahead, loader = self._loader()
        ahead.position = self.position
        for batch in loader:
            self.position += self.global_batch
            yield batch

    def _loader(self) -> tuple[PlanBatches, Any]:
        """Return torch's loader and the numbers it reads; workers hold a copy of the segments, so others need other workers."""
        if self._inner is None or self._inner[0] is not self.data.segments:
            rank, world_size = self._ranks()
            ahead = PlanBatches(self.data, self.batch_size, rank=rank, world_size=world_size, num_samples=self.num_samples)
            options = {"generator": import_module("torch").Generator(), **self._options}  # torch's own one stays untouched
            loader = import_module("torch.utils.data").DataLoader(self.data, batch_sampler=ahead, **options)
            self._inner = self.data.segments, ahead, loader
        return self._inner[1:]

    def attach(self, trainer: Any) -> None:
        """Feed a transformers Trainer: it trains on these batches, and its checkpoints hold the state.

        The Trainer's own way back, skipping as many batches as it had counted, is turned off (`ignore_data_skip`): it is wrong
        on other ranks. A checkpoint without a state is told on stderr, and the data go on where they are.
        """
        loader = self
        callbacks: Any = import_module("transformers.trainer_callback")

        class PlanState(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc]
            def state(self) -> dict[str, Any]:
                return {"args": {}, "attributes": {"plan": loader.state_dict()}}

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                held = state.stateful_callbacks.get("PlanState")
                if held is None:  # the Trainer asks for the entry at its next save
                    state.stateful_callbacks["PlanState"] = self.state()
                    print(f"chronicle: the checkpoint of step {state.global_step} holds no place in the data plan: the data go "
                          f"on at sample {loader.position}", file=sys.stderr)
                else:
                    loader.load_state_dict(held["attributes"]["plan"])

        trainer.args.ignore_data_skip = True
        trainer.add_callback(PlanState())
        parts = int(trainer.args.gradient_accumulation_steps)
        trainer.get_train_dataloader = lambda: _Endless(loader, parts) if loader.num_samples is None else loader


class _Endless:
    """A loader for a trainer that counts its own epochs: it takes `len` batches from each, wherever the plan's epochs end.

    `len` is a multiple of the accumulated `parts`: the Trainer ends an epoch with a step of what is left, and its epochs begin
    at a resume, so that step would lie elsewhere than without the resume.
    """

    def __init__(self, loader: PlanLoader, parts: int) -> None:
        self._loader, self.dataset, self._parts = loader, loader.data, parts
        self.change_when_read, self.forget_change = loader.change_when_read, loader.forget_change

    def __len__(self) -> int:
        return -(-len(self._loader) // self._parts) * self._parts

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


def _ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, world size): of torch.distributed where it runs, else of the launcher's variables."""
    running = sys.modules.get("torch.distributed")
    if running is not None and running.is_available() and running.is_initialized():
        return int(running.get_rank()), int(running.get_world_size())
    rank, world_size = environ.get("RANK", "0"), environ.get("WORLD_SIZE", "1")
    return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else (0, 1)
