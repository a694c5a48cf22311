"""DeepSpeed ZeRO as an option of the same trainer: the configuration, and what must be said before starting.

Accelerate drives the engine. On a CPU gloo is named (without that each rank believes in a world of one) and torch's own
AdamW is used, so that the one thing DeepSpeed still compiles is `shm_comm`: it needs a C++ compiler and ninja, and takes
about two minutes the first time.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

from bit_transformer.errors import BadRecipe

if TYPE_CHECKING:
    from bit_transformer.recipes import Recipe

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

# Stage 3 keeps small parameters whole between steps: gathered in float32 after a step, but in bf16 when a module asks for
# them, and in the first pass after a start they are given back and asked for again. A resumed run would see other biases
# than one that never stopped; so none is kept.
ONE_WAY_TO_GATHER = {"stage3_param_persistence_threshold": 0}


def plan_zero(recipe: Recipe, *, cpu: bool) -> Any:
    """Return Accelerate's DeepSpeed plugin for the recipe, None without ZeRO. Raises BadRecipe where it cannot run."""
    if recipe.sharding not in STAGES:
        return None
    if importlib.util.find_spec("deepspeed") is None:
        raise BadRecipe(f"sharding `{recipe.sharding}` needs DeepSpeed", "pip install 'chronicle-ml[deepspeed]'")
    if cpu and not (shutil.which("c++") or shutil.which("g++")):
        raise BadRecipe(f"sharding `{recipe.sharding}` on a CPU needs a C++ compiler: DeepSpeed builds `shm_comm`",
                        "apt-get install g++, or use sharding=ddp")
    if cpu and not shutil.which("ninja"):
        raise BadRecipe(f"sharding `{recipe.sharding}` on a CPU needs ninja: DeepSpeed builds `shm_comm` with it",
                        "pip install ninja, or use sharding=ddp")
    if recipe.model.reversible:
        raise BadRecipe("reversible blocks cannot run under DeepSpeed: the backward pass needs whole parameters",
                        "set model.reversible=false and model.checkpointing=true")
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
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
