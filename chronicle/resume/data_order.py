"""A data loader whose batches come as a rollback wants them: some left out, the rest of an epoch in another order.

Batches are not left out of one epoch, which would then be shorter than every counter believes: the whole stream moves up,
so that an epoch keeps its length and ends with the first batches of the next. However a trainer finds its place after a
later resume (by steps, by epochs, by counting), it finds the same batch there. That needs an order which is a function
of the epoch: samplers that are sequential or seeded by epoch.
"""

from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, islice
from typing import Any

__all__ = ["MovedBatches", "can_move", "can_reshuffle", "move_batches", "reads_from", "take_out"]

BY_EPOCH = ("SeedableRandomSampler", "DistributedSampler")
ADVANCES_ITSELF = "SeedableRandomSampler"  # Accelerate's: at the end of a pass it turns to the next epoch
BATCHES = ("BatchSampler", "BatchSamplerShard", "MovedBatches")


class MovedBatches:
    """In the place of a batch sampler: its stream without the next `skip` batches, and epoch `epoch` shuffled from `begin` on.

    `seed` names the order; "" leaves it as it is. Everything else that is asked of it is the inner one's.
    """

    def __init__(self, inner: Any, *, skip: int = 0, seed: str = "", epoch: int = 0, begin: int = 0) -> None:
        self.inner, self.skip = inner, skip
        self._seed, self._epoch, self._begin = seed, epoch, begin
        self.used = False  # whether anybody has begun to read

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self.used = True
        epoch = epoch_of(self.inner)
        whole, rest = divmod(self.skip, len(self.inner))
        batches: Iterator[Any] = chain(self._part(epoch, whole, rest, None), self._part(epoch, whole + 1, 0, rest))
        if self._seed and epoch == self._epoch:
            batches = iter(self._shuffled(list(batches)))
        yield from batches
        sampler = _sampler_of(self.inner)
        if epoch is not None and type(sampler).__name__ == ADVANCES_ITSELF:
            sampler.set_epoch(epoch + 1)

    def _part(self, epoch: int | None, ahead: int, begin: int, end: int | None) -> Iterator[Any]:
        """Batches `begin` to `end` of the epoch that lies `ahead`. The sampler says where the trainer is, but for a moment."""
        if begin == end:
            return
        now = epoch_of(self.inner)
        if epoch is not None:
            _sampler_of(self.inner).set_epoch(epoch + ahead)
        rows = islice(iter(self.inner), begin, end)
        first = next(rows, None)  # from here on the order is fixed
        if now is not None:
            _sampler_of(self.inner).set_epoch(now)
        if first is not None:
            yield first
            yield from rows
        if now is not None:
            _sampler_of(self.inner).set_epoch(now)

    def _shuffled(self, batches: list[Any]) -> list[Any]:
        """By digests and not by a generator: the same on every rank, in every version, without a draw."""
        places = range(self._begin, len(batches))
        order = sorted(places, key=lambda place: sha256(f"{self._seed}:{place}".encode()).digest())
        return [*batches[: self._begin], *(batches[place] for place in order)]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sampler":  # Accelerate puts a restored sampler into its place
            self.inner.sampler = value
        else:
            super().__setattr__(name, value)


def can_move(loader: Any, *, reshuffle: bool = False) -> bool:
    """Whether this loader's order is a function of the epoch alone; to `reshuffle`, its epochs must be told apart."""
    base = _base(loader)
    if type(base).__name__ != "DataLoader" or type(loader).__name__ == "DataLoaderDispatcher":
        return False
    if getattr(base, "batch_sampler", None) is None or hasattr(base.dataset, "set_epoch"):
        return False
    sampler = _sampler_of(base.batch_sampler)
    name = type(sampler).__name__
    if name == "SequentialSampler":
        return not reshuffle
    return name in BY_EPOCH and not getattr(sampler, "replacement", False)


def can_reshuffle(loader: Any, step: int | None, accumulation: int) -> bool:
    """Whether, besides, this loader stands in the epoch in which the steps say that it must be."""
    if step is None or not can_move(loader, reshuffle=True):
        return False
    epoch = epoch_of(_base(loader).batch_sampler) or 0
    by_steps, begin = place_of(loader, step, accumulation)
    return epoch == by_steps or (begin == 0 and epoch == by_steps - 1)


def place_of(loader: Any, step: int, accumulation: int) -> tuple[int, int]:
    """Epoch and batch in it after `step` optimizer steps; an epoch's last step takes what is left."""
    steps = max(1, -(-len(_base(loader).batch_sampler) // accumulation))
    return step // steps, step % steps * accumulation


def move_batches(loader: Any, *, skip: int, seed: str, step: int, accumulation: int) -> MovedBatches:
    """Put the change of order into `loader`: `skip` batches of its own are left out from `step` on, `seed` orders the rest."""
    base = _base(loader)
    epoch, begin = place_of(loader, step, accumulation)
    moved = MovedBatches(base.batch_sampler, skip=skip, seed=seed, epoch=epoch, begin=begin)
    object.__setattr__(base, "batch_sampler", moved)  # torch forbids it to scripts; the loader reads it at every pass
    return moved


def reads_from(loader: Any, other: Any) -> bool:
    """Whether `other` is `loader`, or made of it (Accelerate's `skip_first_batches`)."""
    batches, wanted = getattr(other, "batch_sampler", None), _base(loader).batch_sampler
    for _ in range(6):
        if batches is None or batches is wanted:
            break
        batches = getattr(batches, "batch_sampler", None)
    return other is loader or (batches is not None and batches is wanted)


def epoch_of(batches: Any) -> int | None:
    """The epoch its sampler is in; None where all epochs are the same."""
    sampler = _sampler_of(batches)
    return int(sampler.epoch) if type(sampler).__name__ in BY_EPOCH else None


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def _sampler_of(batches: Any) -> Any:
    """The sampler of single samples below batch samplers; None below one of an unknown kind."""
    for _ in range(8):
        if type(batches).__name__ not in BATCHES:
            return batches if type(batches).__name__ in ("SequentialSampler", *BY_EPOCH) else None
        if type(batches).__name__ == "MovedBatches":
            batches = batches.inner
        else:  # a shard of batches may hold a sampler, too, which it does not ask
            batches = getattr(batches, "batch_sampler", None) or getattr(batches, "sampler", None)
    return None


def take_out(loader: Any, moved: MovedBatches) -> None:
    """The order as it was before `move_batches`."""
    object.__setattr__(_base(loader), "batch_sampler", moved.inner)
