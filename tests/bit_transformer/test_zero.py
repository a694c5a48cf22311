"""What DeepSpeed is asked for, and what is refused before anything is started."""

import shutil

import pytest

from bit_transformer.errors import TopologyMismatch
from bit_transformer.recipes import find_recipe, with_settings
from bit_transformer.training.setup import plan_zero, require_agreement

TWO = {"launcher": 2, "torch": 2, "accelerate": 2}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_stay_float32_and_bf16_is_an_autocast(stage: int) -> None:
    """DeepSpeed's own `bf16` casts the weights, which a model with float32 positions cannot bear."""
    recipe = with_settings(find_recipe("demo"), [f"sharding=zero{stage}", "mixed_precision=bf16", "accumulation_steps=2"])
    plugin = plan_zero(recipe, cpu=True)
    config = plugin.deepspeed_config
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"} and not config.get("bf16", {}).get("enabled")
    assert config["zero_optimization"]["stage"] == stage and config["gradient_accumulation_steps"] == 2


def test_under_an_autocast_no_parameter_is_gathered_in_two_precisions() -> None:
    """Stage 3 keeps small ones in float32 between steps and fetches them in bf16 after a start: a resume would see others."""
    def kept(precision: str) -> int | None:
        plugin = plan_zero(with_settings(find_recipe("demo"), ["sharding=zero3", f"mixed_precision={precision}"]), cpu=True)
        found: int | None = plugin.deepspeed_config["zero_optimization"].get("stage3_param_persistence_threshold")
        return found

    assert kept("bf16") == 0 and kept("no") is None


def test_on_a_cpu_deepspeed_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is needed: what it would build at its start serves inference only."""
    import deepspeed

    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(shutil, "which", lambda name, *rest, **more: None)
    assert plan_zero(with_settings(find_recipe("demo"), ["sharding=zero2"]), cpu=True) is not None
    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


@pytest.mark.parametrize("asked", ["zero1", "zero2"])
def test_a_sharding_that_silently_became_ddp_is_refused(asked: str) -> None:
    """Accelerate(cpu=True) leaves its DeepSpeed plugin aside and trains with DDP, without a word."""
    require_agreement(TWO, "ddp", "DistributedDataParallel")
    with pytest.raises(TopologyMismatch, match=f"sharding `{asked}` was requested, the model is wrapped by Distributed"):
        require_agreement(TWO, asked, "DistributedDataParallel")


def test_ranks_that_do_not_know_of_each_other_are_refused() -> None:
    """A launcher that started two processes, each of which trains alone."""
    with pytest.raises(TopologyMismatch, match="launcher says 2, torch says 1, accelerate says 1"):
        require_agreement({"launcher": 2, "torch": 1, "accelerate": 1}, "ddp", "BitTransformer")
    require_agreement(dict.fromkeys(TWO, 1), "ddp", "BitTransformer")
