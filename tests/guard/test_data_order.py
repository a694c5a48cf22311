"""Moved batches, alone: the same stream as the sampler's own, from another place; epochs keep their length."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.state import PartialState
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from chronicle.resume.honours import MovedBatches, WarmUp, can_move, can_reshuffle, move_batches, take_out
from chronicle.resume.learning_rate import warmed

LENGTH = 6  # batches an epoch


def sampler(kind: str) -> Any:
    numbers = range(4 * LENGTH)
    if kind == "sequential":
        return SequentialSampler(numbers)
    if kind == "distributed":
        return DistributedSampler(numbers, num_replicas=1, rank=0, seed=3)  # type: ignore[arg-type]
    return SeedableRandomSampler(numbers, data_seed=5)


def passes(batches: Any, kind: str, num_passes: int = 4) -> list[list[int]]:
    """All batches of some epochs, read as a trainer with this sampler does."""
    read = []
    for epoch in range(num_passes):
        if kind == "distributed":
            batches.sampler.set_epoch(epoch)
        one = list(batches)
        assert len(one) == len(batches) == LENGTH
        read += one
    return read


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 7, 13])
@pytest.mark.parametrize("kind", ["sequential", "seedable", "distributed"])
def test_stream_moves_up_and_epochs_keep_their_length(kind: str, skip: int) -> None:
    stream = passes(BatchSampler(sampler(kind), 4, False), kind, num_passes=8)
    moved = MovedBatches(BatchSampler(sampler(kind), 4, False), skip=skip)
    assert passes(moved, kind) == stream[skip : skip + 4 * LENGTH]


@pytest.mark.parametrize("kind", ["seedable", "distributed"])
def test_moves_on_moves_add_up(kind: str) -> None:
    stream = passes(BatchSampler(sampler(kind), 4, False), kind, num_passes=8)
    moved = MovedBatches(MovedBatches(BatchSampler(sampler(kind), 4, False), skip=4), skip=5)
    assert passes(moved, kind) == stream[9 : 9 + 4 * LENGTH]


def test_sampler_says_all_the_time_in_which_epoch_the_trainer_is() -> None:
    """A checkpoint may save it at any batch."""
    seedable = sampler("seedable")
    moved = MovedBatches(BatchSampler(seedable, 4, False), skip=LENGTH + 2)
    for epoch in range(3):
        for _ in moved:
            assert seedable.epoch == epoch
    assert seedable.epoch == 3


def test_reshuffle_permutes_what_is_left_of_one_epoch_and_nothing_else() -> None:
    stream = passes(BatchSampler(sampler("seedable"), 4, False), "seedable")
    arguments: Any = {"seed": "R1", "epoch": 1, "begin": 2}
    read = passes(MovedBatches(BatchSampler(sampler("seedable"), 4, False), **arguments), "seedable")
    rest = slice(LENGTH + 2, 2 * LENGTH)
    assert read[: LENGTH + 2] == stream[: LENGTH + 2] and read[2 * LENGTH :] == stream[2 * LENGTH :]
    assert read[rest] != stream[rest] and sorted(read[rest]) == sorted(stream[rest])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


class ByEpoch(Dataset[int]):
    """Another content in every epoch."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        pass


class OwnLoader(DataLoader[Any]):
    pass


def loaders() -> dict[str, tuple[Any, bool, bool]]:
    numbers: Any = range(24)
    twice = SeedableRandomSampler(numbers, replacement=True, num_samples=24, data_seed=1)
    PartialState()
    shuffled = DataLoader(numbers, 4, shuffle=True)
    return {
        "in order": (DataLoader(numbers, 4), True, False),
        "seeded by epoch": (DataLoader(numbers, 4, sampler=sampler("distributed")), True, True),
        "prepared, seedable": (prepare_data_loader(shuffled, use_seedable_sampler=True), True, True),
        "prepared, shuffled": (prepare_data_loader(DataLoader(numbers, 4, shuffle=True)), False, False),
        "dispatched": (prepare_data_loader(DataLoader(numbers, 4), dispatch_batches=True, put_on_device=True), False, False),
        "shuffled": (DataLoader(numbers, 4, shuffle=True), False, False),
        "own generator": (DataLoader(numbers, 4, shuffle=True, generator=torch.Generator()), False, False),
        "with replacement": (DataLoader(numbers, 4, sampler=twice), False, False),
        "iterable": (DataLoader(Stream(), 4), False, False),
        "data by epoch": (DataLoader(ByEpoch(), 4), False, False),
        "single samples": (DataLoader(numbers, None), False, False),
        "own class": (OwnLoader(numbers, 4), False, False),
        "own batches": (DataLoader(numbers, batch_sampler=[[0, 1], [2, 3]]), False, False),
        "no loader": ([1, 2, 3], False, False),
    }


def test_only_an_order_that_is_known_can_be_changed() -> None:
    for name, (loader, skips, reshuffles) in loaders().items():
        assert can_move(loader) is skips, name
        assert can_reshuffle(loader, 3, 1) is reshuffles, name


def test_no_reshuffle_where_steps_and_sampler_name_different_epochs() -> None:
    loader: Any = DataLoader(range(24), 4, sampler=sampler("distributed"))  # type: ignore[arg-type]
    assert can_reshuffle(loader, 5, 1) and can_reshuffle(loader, 6, 1) and not can_reshuffle(loader, 7, 1)
    assert can_reshuffle(loader, 2, 2) and not can_reshuffle(loader, 4, 2)


def test_moved_loader_is_as_before_when_taken_out() -> None:
    loader: Any = DataLoader(range(24), 4)  # type: ignore[arg-type]
    before = [batch.tolist() for batch in loader]
    moved = move_batches(loader, skip=2, seed="", step=1, accumulation=1)
    assert [batch.tolist() for batch in loader] == [*before[2:], *before[:2]] and moved.used
    take_out(loader, moved)
    assert [batch.tolist() for batch in loader] == before


def test_newest_warm_up_counts() -> None:
    assert [warmed(8.0, step, [(0, 100), (10, 4)]) for step in (9, 10, 13, 14, 60)] == [0.8, 2.0, 8.0, 8.0, 8.0]


def test_lr_is_put_back_after_a_step_that_raised() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    warm_up = WarmUp(optimizer, [(0, 4)], 0)

    def closure() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        optimizer.step(closure)
    warm_up.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_tensor_lr_stays_the_same_tensor() -> None:
    """What was captured once (a graph, a compiled step) goes on reading it."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [w], "lr": lr} for w in weights], lr=lr)
    warm_up = WarmUp(optimizer, [(0, 4)], 0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([float(group["lr"]) for group in optimizer.param_groups]))
    held = [group["lr"] for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()
    assert seen == [[0.125, 0.125]] and warm_up.used == 0.125
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, held, strict=True))
    assert [float(tensor) for tensor in held] == [0.5, 0.5] and float(weights[1].detach()) == -0.125


def test_reshuffled_batches_are_never_in_the_order_they_had() -> None:
    for number in range(50):
        moved = MovedBatches(None, seed=f"rollback {number}")
        order = moved._shuffled(["a", "b", "c"])
        assert order != ["a", "b", "c"] and sorted(order) == ["a", "b", "c"]
    assert MovedBatches(None, seed="x")._shuffled(["a"]) == ["a"]
