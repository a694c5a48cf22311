"""FSDP2 through torch's own interface, checkpointed in the plain Accelerate layout.

Accelerate ignores FSDP on a CPU in silence (`accelerate/state.py` lists only the GPU kinds). Here `fully_shard` cuts the
parameters, and state dicts are gathered whole when saved and cut again when loaded, so that a checkpoint is the same
files whatever the number of ranks. Every rank must save and load together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

from bit_transformer.errors import BadRecipe
from bit_transformer.model.transformer import BitTransformer


def shard_model(model: BitTransformer, *, world_size: int, device: str, bf16: bool) -> None:
    """Cut every block and the rest over the ranks, in place. Raises BadRecipe for what cannot be cut."""
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
    """AdamW over sharded parameters whose state dict is whole."""

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
    """Return a plain model with the whole weights of a sharded one, a parameter at a time; None where not to `keep` it.

    FSDP2 and every stage of ZeRO. Every rank must call it.
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
    """Gather a sharded tensor; anything else is returned as it is."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def cut_like(value: Any, parameter: Any) -> Any:
    """Return this rank's part of a whole tensor, laid out as `parameter` is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
