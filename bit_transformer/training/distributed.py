"""How many ranks there really are and what wraps the model: all who know must say the same, and what was asked for.

`accelerate launch --cpu --num_processes 2` starts one process in silence; Accelerate with DeepSpeed on a CPU believes
in a world of one unless gloo is named; FSDP on a CPU becomes DDP. Believing any one of them has cost people runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bit_transformer.errors import TopologyMismatch
from bit_transformer.recipes import Recipe

# what a model is wrapped by when the sharding that was asked for is really there
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"} | dict.fromkeys(
    ("zero1", "zero2", "zero3"), "DeepSpeedEngine")

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What each part believes; `sharding` is the class of the wrapped model."""

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
        """Raise TopologyMismatch unless all that are known are equal."""
        sizes = {"launcher": self.launcher_world_size, "torch.distributed": self.torch_world_size,
                 "Accelerate": self.accelerate_num_processes}
        if self.expected_world_size is not None:
            sizes["recipe"] = self.expected_world_size
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{who} says {size}" for who, size in sizes.items())
            raise TopologyMismatch(f"the world size is not agreed: {said}",
                                   "start with `torchrun --nproc_per_node N -m bit_transformer.train …`")
        wrapper = self.expected_wrapper
        if wrapper is not None and self.sharding != wrapper:
            raise TopologyMismatch(f"sharding `{self.asked_sharding}` was asked for, the model is wrapped by {self.sharding}, "
                                   f"expected {wrapper}", "set sharding to what this machine can do")

    @property
    def expected_wrapper(self) -> str | None:
        """The class around the model that was asked for; None for one replica, which needs none."""
        return WRAPPERS[self.asked_sharding] if self.torch_world_size > 1 or self.asked_sharding != "ddp" else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def require_all_ranks(environ: Mapping[str, str], parent_environ: Mapping[str, str] | None) -> None:
    """Raise TopologyMismatch where `accelerate launch` was asked for more processes than this one and started no other.

    With `--cpu` it starts one process whatever `--num_processes` says, and gives it an address to meet others at, which
    it does not do where one process was asked for.
    """
    alone = not any(name in environ for name in ("WORLD_SIZE", *MPI_SIZES))
    met = parent_environ is not None and "MASTER_ADDR" in environ and "MASTER_ADDR" not in parent_environ
    if alone and met and "ACCELERATE_USE_CPU" in environ:
        raise TopologyMismatch(
            "`accelerate launch` was asked for more than one process and has started this one alone: with --cpu it does so",
            "start with `torchrun --nproc_per_node N -m bit_transformer.train …`, or leave out --cpu: "
            "`accelerate launch --multi_gpu --num_processes N` starts N, also on a machine without a GPU")


def measure_topology(accelerator: Any, model: Any, environ: Mapping[str, str], recipe: Recipe) -> Topology:
    """Ask every part, in this process."""
    running = dist.is_available() and dist.is_initialized()
    return Topology(
        launcher_world_size=int(environ.get("WORLD_SIZE", "1")),
        torch_world_size=dist.get_world_size() if running else 1,
        accelerate_num_processes=int(accelerator.num_processes), expected_world_size=recipe.world_size,
        distributed_type=str(accelerator.distributed_type.value), backend=dist.get_backend() if running else None,
        asked_sharding=recipe.sharding,
        sharding="FSDPModule" if isinstance(model, FSDPModule) else type(model).__name__, device=str(accelerator.device))
