"""What DeepSpeed is asked for, and what is refused before anything is started."""

from dataclasses import replace

import pytest

from bit_transformer.errors import BadRecipe, TopologyMismatch
from bit_transformer.recipes import find_recipe, with_settings
from bit_transformer.topology import Topology
from bit_transformer.zero import plan_zero

DDP = Topology(
    launcher_world_size=2, torch_world_size=2, accelerate_num_processes=2, expected_world_size=None,
    distributed_type="MULTI_CPU", backend="gloo", asked_sharding="ddp", sharding="DistributedDataParallel", device="cpu",
)  # fmt: skip


@pytest.mark.parametrize("settings", [["sharding=zero3"], ["sharding=zero2", "mixed_precision=bf16"]])
def test_a_zero_that_does_not_run_is_refused_with_the_way_out(settings: list[str]) -> None:
    recipe = with_settings(find_recipe("demo"), settings)
    with pytest.raises(BadRecipe, match="does not run yet"):
        plan_zero(recipe, cpu=True)


@pytest.mark.parametrize("asked", ["zero1", "zero2", "fsdp2"])
def test_a_sharding_that_silently_became_ddp_is_refused(asked: str) -> None:
    """Accelerate(cpu=True) leaves its DeepSpeed plugin aside and trains with DDP, without a word."""
    DDP.require_agreement()
    with pytest.raises(TopologyMismatch, match=f"sharding `{asked}` was asked for, the model is wrapped by Distributed"):
        replace(DDP, asked_sharding=asked).require_agreement()
