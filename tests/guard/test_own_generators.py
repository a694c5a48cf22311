"""Random generators that a script makes for itself are found where scripts keep them, and read without a draw."""

import functools
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from chronicle.resume.own_generators import Holder, find_generators, state_of


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

    held = (model.draws, data["train"][0].random, older, order, teacher, closed)
    return [model, data, older, loader, rows, teach, drawn], {id(one) for one in held}


def test_generators_are_found_in_variables_objects_and_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.resume.own_generators.MOST", 10_000)  # other tests of this process hold some, too
    monkeypatch.setattr("chronicle.resume.own_generators.MOST_OBJECTS", 10_000_000)

    def script() -> tuple[list[Any], set[int], list[Holder], Any]:  # pytest asks for `locals()` where something is asserted
        things, wanted = kept()
        secret = random.SystemRandom()
        return things, wanted, find_generators("/nowhere/"), secret

    things, wanted, found, secret = script()
    assert things[3].generator not in [holder.one for holder in found]  # a loader's
    assert wanted <= {id(holder.one) for holder in found} and things
    assert secret not in [holder.one for holder in found]


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

    def script() -> tuple[Holder, Any, list[Any]]:
        things, mine = [Lazy(), Proxy()], random.Random(1)
        return find_generators("/nowhere/")[0], mine, things

    found, mine, things = script()
    assert found.one is mine and things


def test_every_draw_and_no_reading_moves_them() -> None:
    generators: list[Any] = [torch.Generator(), np.random.default_rng(1), np.random.RandomState(2), random.Random(3)]
    holders = [Holder(one) for one in generators]
    before = state_of(holders)
    assert before == state_of(holders[::-1]) != 0 and state_of([]) == 0
    torch.rand(1, generator=generators[0])
    states = [before, state_of(holders)]
    for one in generators[1:]:
        one.random() if not isinstance(one, np.random.RandomState) else one.rand()
        states.append(state_of(holders))
    assert len(set(states)) == 5


class Epochs:
    def __init__(self) -> None:
        self.draws = np.random.default_rng(1)


def test_a_new_generator_in_the_same_variable_or_attribute_is_read_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops make one an epoch."""
    monkeypatch.setattr("chronicle.resume.own_generators.MOST", 10_000)
    monkeypatch.setattr("chronicle.resume.own_generators.MOST_OBJECTS", 10_000_000)

    def script() -> tuple[list[int], Any]:
        loop, order = Epochs(), torch.Generator().manual_seed(1)
        mine = {id(loop.draws), id(order)}
        found = [holder for holder in find_generators("/nowhere/") if id(holder.one) in mine]
        states = [len(found), state_of(found)]
        loop.draws = np.random.default_rng(2)
        states.append(state_of(found))
        order = torch.Generator().manual_seed(2)
        states.append(state_of(found))
        loop.draws = None  # type: ignore[assignment]
        return [*states, state_of(found)], order

    (num, *states), _ = script()
    assert num == 2 and len(set(states)) >= 3 and all(states)


def test_a_table_of_variables_that_a_script_keeps_is_as_it_was() -> None:
    """Until Python 3.12 all who ask for a frame's variables get one dictionary, and each asking brings it up to date."""

    def script(rate: float = 0.1) -> tuple[list[str], Any]:
        settings = locals()
        later = random.Random(1)
        find_generators("/nowhere/")
        return sorted(settings), later

    assert script()[0] == ["rate"]


def test_nothing_is_kept_of_what_a_function_had_in_its_variables() -> None:
    class Batch:
        pass

    def script() -> Any:
        batch, generator = Batch(), random.Random(1)
        find_generators("/nowhere/")
        left = weakref.ref(batch)
        del batch
        return left(), generator

    assert script()[0] is None
