"""What fits where, asked of this machine: the ways that are named really fit, and nothing is named where it fits already."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bit_transformer.footprint import list_ways, measure_room, of_recipe
from bit_transformer.recipes import Recipe, find_recipe, with_settings
from tests.bit_transformer.references import count_on_meta_device

GB = 10**9
LARGE = ("model.d_model=2048", "num_heads=32", "num_layers=24", "d_ff=8192", "max_bits=2304", "norm=pre", "window_bytes=256",
         "batch_size=64", "mixed_precision=bf16")


@pytest.fixture(scope="module")
def large() -> Recipe:
    """1,208,606,722 parameters, counted on the meta device: nothing of it is in memory."""
    recipe = with_settings(find_recipe("demo"), LARGE)
    assert count_on_meta_device(recipe.model) == recipe.model.num_parameters == 1_208_606_722
    return recipe


@pytest.mark.parametrize(("gigabytes", "ranks", "ways"), [
    (24, 8, ["--set sharding=zero2", "--set sharding=fsdp2"]),
    (40, 8, ["--set model.checkpointing=true", "--set accumulation_steps=8"]),
    (80, 1, ["--set model.checkpointing=true", "--set accumulation_steps=64"]),
])
def test_named_ways_are_those_of_the_arithmetic(large: Recipe, gigabytes: int, ranks: int, ways: list[str]) -> None:
    """For the usual devices: recomputing or smaller micro-batches where that is enough, sharding where it is not."""
    named = list(list_ways(large, ranks, gigabytes * GB))
    assert 1 <= len(named) <= 3
    for way in ways:
        assert any(way in one for one in named), named
    for one in named:
        settings = [word for word in one.split() if word != "--set"]
        assert of_recipe(with_settings(large, settings), ranks).fits(gigabytes * GB)


def test_nothing_is_named_where_it_fits_or_nothing_helps(large: Recipe) -> None:
    """A small recipe anywhere; the large one in a gigabyte."""
    assert not list(list_ways(find_recipe("demo"), 1, 4 * GB))
    assert not list(list_ways(large, 1, GB))


def test_averaged_weights_and_growth_are_counted() -> None:
    """Four bytes a parameter for the average; a recipe that grows needs the room of what it grows to."""
    plain = find_recipe("demo")
    averaged = of_recipe(with_settings(plain, ["ema_decay=0.9"]), 1)
    assert averaged.buffers - of_recipe(plain, 1).buffers == 4 * plain.model.num_parameters
    grown = with_settings(plain, ["shape=plateau", "norm=pre", "growth=('depth', 'width')", "raise_step=none"])
    assert of_recipe(grown, 1).weights == of_recipe(
        replace(plain, model=replace(plain.model, num_layers=4, d_model=128, num_heads=8, d_ff=512)), 1).weights


def test_this_host_is_measured() -> None:
    """One CPU rank has the whole of what the host can give."""
    room = measure_room(SimpleNamespace(device=torch.device("cpu")), find_recipe("demo"))
    assert room.free_by_rank[0] is not None and room.free_by_rank[0] > 10**7
    assert room.parts.keys() == {"weights", "gradients", "optimizer", "activations"} and not room.ways
