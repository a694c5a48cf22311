"""What a recipe needs, and what this machine has."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bit_transformer.footprint import measure_room, of_recipe
from bit_transformer.recipes import Recipe, find_recipe, with_settings
from tests.bit_transformer.references import count_on_meta_device

LARGE = ("model.d_model=2048", "num_heads=32", "num_layers=24", "d_ff=8192", "max_bits=2304", "norm=pre", "window_bytes=256",
         "batch_size=64", "mixed_precision=bf16")


@pytest.fixture(scope="module")
def large() -> Recipe:
    """1,208,606,722 parameters, counted on the meta device: nothing of it is in memory."""
    recipe = with_settings(find_recipe("demo"), LARGE)
    assert count_on_meta_device(recipe.model) == recipe.model.num_parameters == 1_208_606_722
    return recipe


def test_recomputing_and_sharding_save_what_they_promise(large: Recipe) -> None:
    """What a refusal names: recomputed activations, smaller parts, sharding over more ranks."""
    whole = of_recipe(large, 1).total
    for settings, ranks, share in ((["model.checkpointing=true"], 1, 0.5), (["accumulation_steps=64"], 1, 0.5),
                                   (["sharding=fsdp2", "model.checkpointing=true"], 8, 0.2)):
        assert of_recipe(with_settings(large, settings), ranks).total < share * whole


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
    assert room.parts.keys() == {"weights", "gradients", "optimizer", "activations"}
