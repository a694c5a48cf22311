"""How a model is placed on the ranks: the measured world, DeepSpeed ZeRO, and `torch.compile`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bit_transformer.errors import BadRecipe, TopologyMismatch
from bit_transformer.model.transformer import BitTransformer, ModelConfig
from bit_transformer.recipes import Recipe

# the class around the model when the requested sharding is active
WRAPPERS = {"ddp": "DistributedDataParallel", "zero1": "DeepSpeedEngine", "zero2": "DeepSpeedEngine",
            "zero3": "DeepSpeedEngine"}


def require_agreement(sizes: Mapping[str, int], sharding: str, wrapper: str) -> None:
    """Raise TopologyMismatch unless all reported world sizes are equal and the model is wrapped as the recipe asks.

    Accelerate leaves its DeepSpeed plugin aside on a CPU, and trains with DDP, without a word.
    """
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who} says {size}" for who, size in sizes.items())
        raise TopologyMismatch(f"launcher, process group and framework disagree on the world size: {said}",
                               "start with `torchrun --nproc_per_node N -m bit_transformer.train …`")
    needs_none = sharding == "ddp" and set(sizes.values()) == {1}
    if wrapper != WRAPPERS[sharding] and not needs_none:
        raise TopologyMismatch(f"sharding `{sharding}` was requested, the model is wrapped by {wrapper}, expected "
                               f"{WRAPPERS[sharding]}", "choose a sharding that works on this machine")


def measure_sizes(accelerator: Any) -> dict[str, int]:
    """Return the world size as the launcher, torch and Accelerate report it."""
    running = dist.is_available() and dist.is_initialized()
    return {"launcher": int(os.environ.get("WORLD_SIZE", "1")), "torch": dist.get_world_size() if running else 1,
            "accelerate": int(accelerator.num_processes)}


def gather_whole(model: BitTransformer, *, keep: bool) -> BitTransformer | None:
    """Gather the weights of a model under any stage of ZeRO into a plain one, a parameter at a time; None unless `keep`.

    Collective: every rank must call it.
    """
    from deepspeed.runtime.zero import GatheredParameters

    state = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]) if hasattr(parameter, "ds_tensor") else nullcontext():
            if keep:
                state[name] = parameter.detach().clone()
    if not keep:
        return None
    result = BitTransformer(model.config).to(next(iter(state.values())).device)
    result.load_state_dict(state)
    return result


# --- DeepSpeed ZeRO

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

# Stage 3 keeps small parameters whole between steps. It gathers them in float32 after a step, but in bf16 when a module
# asks for them, which happens once more in the first pass after a start. A resumed run would see other biases than an
# uninterrupted one, so no parameter is kept whole.
ONE_WAY_TO_GATHER = {"stage3_param_persistence_threshold": 0}


def plan_zero(recipe: Recipe, *, cpu: bool) -> Any:
    """Return Accelerate's DeepSpeed plugin for the recipe, None without ZeRO. Raises BadRecipe where it cannot run."""
    if recipe.sharding not in STAGES:
        return None
    if importlib.util.find_spec("deepspeed") is None:
        raise BadRecipe(f"sharding `{recipe.sharding}` needs DeepSpeed", "pip install 'chronicle-ml[deepspeed]'")
    if recipe.model.reversible:
        raise BadRecipe("reversible blocks cannot run under DeepSpeed: the backward pass needs whole parameters",
                        "set model.reversible=false and model.checkpointing=true")
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _build_nothing()
    from accelerate.utils import DeepSpeedPlugin

    stage, bf16 = STAGES[recipe.sharding], recipe.mixed_precision == "bf16"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return DeepSpeedPlugin(hf_ds_config={
        "train_micro_batch_size_per_gpu": recipe.data.batch_size // world_size // recipe.accumulation_steps,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "gradient_clipping": recipe.optimizer.max_grad_norm,
        # torch's autocast inside the engine: weights, gradients and moments stay float32 (`bf16` would cast the weights)
        "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
        "zero_optimization": {"stage": stage, **(ONE_WAY_TO_GATHER if stage == 3 and bf16 else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    })


def _build_nothing() -> None:
    """Keep DeepSpeed from building `shm_comm` at its start on a CPU; only its collectives for inference would use it.

    The build is silent, takes a minute, and waits for ever on the lock of a build that was killed (torch's FileBaton).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# --- torch.compile


def why_not_compile(config: ModelConfig, device: torch.device) -> str | None:
    """Return None where a one-layer model of this shape compiles and runs on this device, else the reason in one line.

    Trying is the only test: which versions and compilers work is not known in advance.
    """
    if config.reversible:
        return "reversible blocks have their own backward pass"
    small = replace(config, num_layers=1)
    try:
        with torch.random.fork_rng(), torch.enable_grad():  # building draws random numbers: the run's stay unchanged
            compiled = torch.compile(BitTransformer(small).to(device))
            compiled(torch.zeros(1, config.max_bits, dtype=torch.long, device=device)).logits_BTV.sum().backward()
    except Exception as problem:  # noqa: BLE001 any error of the compiler means that it does not work here
        first_line = next(iter(str(problem).strip().splitlines()), "")
        return f"{type(problem).__name__}: {first_line[:200]}"
    return None


def compile_where_possible(model: BitTransformer, device: torch.device) -> str | None:
    """Compile the blocks in place, or return the reason why that is not possible."""
    reason = why_not_compile(model.config, device)
    if reason is None:
        for block in model.blocks:
            block.compile()
    return reason
