"""A tiny FSDP run under Accelerate on CPU ranks that saves one checkpoint.

Usage: fsdp_run.py OUT '{"version": 2, "state_dict": "SHARDED_STATE_DICT", "steps": 10}'. With `resume` it loads that
checkpoint instead and writes the LRs of the next steps beside OUT, in used.json.
Accelerate silently ignores FSDP on a CPU (state.py lists only MULTI_GPU and the like) and makes DDP files instead;
here it is told that the CPU is one of them, and the run stops unless it ends up with FSDP.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType, InitProcessGroupKwargs, save_fsdp_model, save_fsdp_optimizer

from chronicle.launch.ranks import leave_group


def admit_cpu() -> None:
    """Let Accelerate use FSDP with gloo ranks: it decides by `distributed_type`, set where the plugin is looked at."""
    original = accelerate_state.AcceleratorState.__init__

    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            accelerate_state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin

    accelerate_state.AcceleratorState.__init__ = patched  # type: ignore[method-assign]


def let_full_states_leave_the_cpu() -> None:
    """Let FSDP1 gather a full state dict on a CPU: it moves the gathered parameter "to the CPU" and frees the original.

    Where it lies on the CPU already, `to` copies nothing, and what is freed is what is to be saved ("setStorage … out of
    bounds for storage of size 0"). A copy before the move is what happens on a GPU.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    original = FlatParamHandle.flat_param_to

    def copied(self: Any, *args: Any, **kwargs: Any) -> None:
        self.flat_param.data = self.flat_param.data.clone()
        original(self, *args, **kwargs)

    FlatParamHandle.flat_param_to = copied  # type: ignore[method-assign]


def fsdp_accelerator(options: dict[str, Any]) -> Accelerator:
    """An Accelerator that really shards, or no run at all."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.get("version", 2),
        state_dict_type=options.get("state_dict", "SHARDED_STATE_DICT"),
        auto_wrap_policy="no_wrap",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    if accelerator.distributed_type is not DistributedType.FSDP or accelerator.num_processes != options["processes"]:
        raise SystemExit(f"{accelerator.distributed_type} on {accelerator.num_processes} ranks is no FSDP run")
    accelerator.state.device = torch.device("cpu")  # "cpu:0" is refused by FSDP1
    return accelerator


def save_per_rank(accelerator: Accelerator, model: Any, optimizer: Any, state: Path) -> None:
    """What a script with thousands of ranks does instead: Accelerate's own functions, one file a rank."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
            shutil.rmtree(state / folder)
    accelerator.wait_for_everyone()
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, str(state), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(state), use_dcp=False)


def main(out: Path, options: dict[str, Any]) -> None:
    admit_cpu()
    let_full_states_leave_the_cpu()
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    torch.manual_seed(0)
    accelerator = fsdp_accelerator(options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    if options.get("version", 2) == 1:  # FSDP1 replaces the parameters: the optimizer is made from the new ones
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 100))
    scheduler = accelerator.prepare(scheduler)
    state = out / f"opt_step-{options.get('steps', 10)}" / "accelerator_state"
    if options.get("resume"):
        accelerator.load_state(str(state))
    used = []
    for _ in range(4 if options.get("resume") else options.get("steps", 10)):
        used.append([group["lr"] for group in optimizer.param_groups])
        accelerator.backward(model(torch.randn(3, 4)).pow(2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if not options.get("resume"):
        accelerator.save_state(str(state))
        if options.get("per_rank"):
            save_per_rank(accelerator, model, optimizer, state)
    elif accelerator.is_main_process:
        (out.parent / "used.json").write_text(json.dumps(used))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    if torch.distributed.is_initialized():  # ranks that just leave may abort while gloo's threads still run
        leave_group()
