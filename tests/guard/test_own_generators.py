"""Random generators that a script makes for itself are found where scripts keep them, and read without a draw."""

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chronicle.resume.own_generators import find_generators, state_of


class Noise(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.draws = torch.Generator().manual_seed(4)


class Data:
    def __init__(self) -> None:
        self.random = np.random.default_rng(5)


def batches(order: np.random.Generator) -> Iterator[Any]:
    while True:
        yield order.permutation(3)


def kept() -> tuple[list[Any], set[int]]:
    """Things of a script that hold generators, and the `id` of each of these."""
    model, data, older = Noise(), {"train": [Data()]}, np.random.RandomState(6)
    loader = torch.utils.data.DataLoader([1, 2], generator=torch.Generator().manual_seed(7))  # type: ignore[arg-type]
    order, teacher, closed = np.random.default_rng(8), random.Random(9), random.Random(10)
    rows, teach = batches(order), functools.partial(teacher.random)
    next(rows)

    def drawn() -> float:
        return closed.random()

    held = (model.draws, data["train"][0].random, older, loader.generator, order, teacher, closed)
    return [model, data, older, loader, rows, teach, drawn], {id(one) for one in held}


def test_generators_are_found_in_variables_objects_and_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.resume.own_generators.MOST", 10_000)  # other tests of this process hold some, too
    monkeypatch.setattr("chronicle.resume.own_generators.MOST_OBJECTS", 10_000_000)
    things, wanted = kept()
    secret = random.SystemRandom()
    found = find_generators("/nowhere/")
    assert wanted <= {id(one) for one in found} and things
    assert secret not in found


def test_an_object_that_loads_itself_when_it_is_looked_at_is_left_alone() -> None:
    class Lazy:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    class Proxy:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("outside of its context")

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("its class was asked for")

    things, mine = [Lazy(), Proxy()], random.Random(1)
    assert find_generators("/nowhere/")[0] is mine and things


def test_every_draw_and_no_reading_moves_them() -> None:
    generators: list[Any] = [torch.Generator(), np.random.default_rng(1), np.random.RandomState(2), random.Random(3)]
    before = state_of(generators)
    assert before == state_of(generators[::-1]) != 0 and state_of([]) == 0
    torch.rand(1, generator=generators[0])
    states = [before, state_of(generators)]
    for one in generators[1:]:
        one.random() if not isinstance(one, np.random.RandomState) else one.rand()
        states.append(state_of(generators))
    assert len(set(states)) == 5
