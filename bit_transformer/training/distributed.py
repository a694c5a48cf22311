"""How a model is placed on the ranks: the measured topology, FSDP2, DeepSpeed ZeRO, and `torch.compile`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from bit_transformer.errors import BadRecipe, TopologyMismatch
from bit_transformer.model.transformer import BitTransformer, ModelConfig
from bit_transformer.recipes import Recipe

# the class around the model when the requested sharding is active
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"} | dict.fromkeys(
    ("zero1", "zero2", "zero3"), "DeepSpeedEngine")

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The world size as each part reports it; `sharding` is the class of the wrapped model."""

    launcher_world_size: int
    torch_world_size: int
    accelerate_num_processes: int
    expected_world_size: int | None
    distributed_type: str
    backend: str | None
    asked_sharding: str
    sharding: str
    device: str

    def require_agreement(self) -> None:
        """Raise TopologyMismatch unless all reported world sizes are equal and the wrapper is the requested one."""
        sizes = self.world_sizes
        if self.expected_world_size is not None:
            sizes["recipe"] = self.expected_world_size
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{who} says {size}" for who, size in sizes.items())
            raise TopologyMismatch(f"launcher, process group and framework disagree on the world size: {said}",
                                   "start with `torchrun --nproc_per_node N -m bit_transformer.train …`")
        wrapper = self.expected_wrapper
        if wrapper is not None and self.sharding != wrapper:
            raise TopologyMismatch(f"sharding `{self.asked_sharding}` was requested, the model is wrapped by {self.sharding}, "
                                   f"expected {wrapper}", "choose a sharding that works on this machine")

    @property
    def world_sizes(self) -> dict[str, int]:
        """The world size by who reports it."""
        return {"launcher": self.launcher_world_size, "torch": self.torch_world_size,
                "accelerate": self.accelerate_num_processes}

    @property
    def expected_wrapper(self) -> str | None:
        """The requested class around the model; None for one replica, which needs no wrapper."""
        return WRAPPERS[self.asked_sharding] if self.torch_world_size > 1 or self.asked_sharding != "ddp" else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def require_all_ranks(environ: Mapping[str, str], parent_environ: Mapping[str, str] | None) -> None:
    """Raise TopologyMismatch where `accelerate launch` was asked for several processes and started only this one.

    With `--cpu` it starts one process whatever `--num_processes` says. It sets MASTER_ADDR then, which it does not do
    where one process was requested: that is how the case is recognised.
    """
    alone = not any(name in environ for name in ("WORLD_SIZE", *MPI_SIZES))
    met = parent_environ is not None and "MASTER_ADDR" in environ and "MASTER_ADDR" not in parent_environ
    if alone and met and "ACCELERATE_USE_CPU" in environ:
        raise TopologyMismatch(
            "`accelerate launch --cpu` started one process although several were requested",
            "start with `torchrun --nproc_per_node N -m bit_transformer.train …`, or without --cpu: "
            "`accelerate launch --multi_gpu --num_processes N` starts N processes, also on a machine without a GPU")


def measure_topology(accelerator: Any, model: Any, environ: Mapping[str, str], recipe: Recipe) -> Topology:
    """Return the topology as this process sees it."""
    running = dist.is_available() and dist.is_initialized()
    return Topology(
        launcher_world_size=int(environ.get("WORLD_SIZE", "1")),
        torch_world_size=dist.get_world_size() if running else 1,
        accelerate_num_processes=int(accelerator.num_processes), expected_world_size=recipe.world_size,
        distributed_type=str(accelerator.distributed_type.value), backend=dist.get_backend() if running else None,
        asked_sharding=recipe.sharding,
        sharding="FSDPModule" if isinstance(model, FSDPModule) else type(model).__name__, device=str(accelerator.device))


# --- FSDP2


def shard_model(model: BitTransformer, *, world_size: int, device: str, bf16: bool) -> None:
    """Shard every block and the rest of the model over the ranks, in place. Raises BadRecipe for reversible blocks.

    The state dict of the sharded model is gathered, so that its checkpoint has the plain Accelerate layout. Accelerate
    ignores FSDP on a CPU silently; this works there as well.
    """
    if model.config.reversible:
        raise BadRecipe("reversible blocks cannot be sharded: the backward pass needs whole parameters outside FSDP's hooks",
                        "set model.reversible=false and model.checkpointing=true")
    mesh = init_device_mesh(device, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 and device == "cuda" else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.register_state_dict_post_hook(_gather_after)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    model.register_load_state_dict_pre_hook(_cut_before)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _gather_after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if prefix == "":
        state.update({name: whole(value) for name, value in state.items()})


def _cut_before(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    if prefix == "":
        targets = dict(module.named_parameters())
        state.update({name: cut_like(value, targets[name]) for name, value in state.items() if name in targets})


class ShardedAdamW(AdamW):
    """AdamW over sharded parameters with a gathered state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with every tensor gathered. Collective."""
        state: dict[str, Any] = dict(super().state_dict())
        state["state"] = {index: {name: whole(value) for name, value in moments.items()}
                          for index, moments in state["state"].items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole state, each rank its part."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        cut = {index: {name: cut_like(value, parameters[index]) if name != "step" else value
                       for name, value in moments.items()} for index, moments in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": cut})


def gather_whole(model: BitTransformer, *, keep: bool) -> BitTransformer | None:
    """Gather the weights of a sharded model into a plain one, a parameter at a time; None where `keep` is False.

    For FSDP2 and every stage of ZeRO. Collective: every rank must call it.
    """
    state = {}
    for name, parameter in model.named_parameters():
        with _gathered(parameter):
            value = whole(parameter).detach()
            if keep:
                state[name] = value.clone()
    if not keep:
        return None
    result = BitTransformer(model.config).to(next(iter(state.values())).device)
    result.load_state_dict(state)
    return result


def _gathered(parameter: Tensor) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_tensor"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters([parameter])
    return context


def whole(value: Any) -> Any:
    """Return the gathered tensor of a sharded one; any other value unchanged."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def cut_like(value: Any, parameter: Any) -> Any:
    """Return this rank's part of a whole tensor, with the layout of `parameter`."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


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
