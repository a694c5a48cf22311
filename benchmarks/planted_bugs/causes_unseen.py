"""Causes written after the guard was finished, from reports nobody had looked at before: what it catches at first sight.

The first try stands in docs/guard.md as it came out; what was missed then has been mended since.
"""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs.causes_accelerate import edited, reseal
from benchmarks.planted_bugs.causes_frameworks import in_ckpt
from benchmarks.planted_bugs.plan import Acts, Plan, cause

ACC, DDP, ZERO, HF, PL, PT, DS = "accelerate", "ddp", "zero", "transformers", "lightning", "torch", "deepspeed"
ORDER = "Lightning #17025"
FREEZE = "mlx-vlm #2178: the base of a LoRA run is not frozen"
OLDER = "litgpt #661: names sorted as text"


def _groups(launch: Any) -> Any:
    return getattr(launch, "engine", launch).optimizer.param_groups


def _set(**values: Any) -> Any:
    """A hook that sets fields of every parameter group, as a script does from its arguments."""

    def change(launch: Any) -> None:
        for group in _groups(launch):
            group.update(values)

    return change


def _same_shapes(plan: Plan) -> None:
    plan.first["model"] = "twins"
    plan.again["swapped"] = True


for rig in (ACC, PT, PL):

    @cause(rig, "layers change places in the optimizer, same shapes", ORDER)
    def _(plan: Plan) -> None:
        _same_shapes(plan)


@cause(ACC, "statistics of the batch norm start again", "sesemi #36")
def _(plan: Plan) -> None:
    plan.first["model"] = "norm"
    plan.after_load.append(lambda launch: launch.model[1].reset_running_stats())


@cause(ACC, "betas set again from the arguments", "ipex-llm #347")
def _(plan: Plan) -> None:
    plan.after_load.append(_set(betas=(0.9, 0.95)))


@cause(ACC, "weight decay set again from the arguments", "ipex-llm #347")
def _(plan: Plan) -> None:
    plan.after_load.append(_set(weight_decay=0.1))


@cause(ACC, "frozen layer becomes trainable", FREEZE)
def _(plan: Plan) -> None:
    plan.first["frozen"] = True
    plan.again["frozen"] = False


@cause(ACC, "model is left in evaluation mode", "ultralytics-style resume with a first validation")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: launch.model.eval())


@cause(ACC, "an adapter is wrapped anew after the load", "lerobot #3459")
def _(plan: Plan) -> None:
    def wrap(launch: Any) -> None:
        launch.model[3] = torch.nn.Linear(16, 1)

    plan.after_load.append(wrap)


@cause(ACC, "tied weights come apart", "M5")
def _(plan: Plan) -> None:
    plan.first["model"] = "tied"

    def untie(launch: Any) -> None:
        launch.model.second.weight = torch.nn.Parameter(launch.model.first.weight.detach().clone())

    plan.after_load.append(untie)


@cause(ACC, "a group is added once more", "dsve-loc #15")
def _(plan: Plan) -> None:
    def add(launch: Any) -> None:
        launch.optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    plan.after_load.append(add)


@cause(ACC, "decay of a warm-up-stable-decay schedule begins earlier", "transformers #34905", acts=Acts.LATER)
def _(plan: Plan) -> None:
    plan.first["scheduler"] = "decay after 300"
    plan.again["scheduler"] = "decay after 240"
    plan.num_steps = 240


@cause(ACC, "older checkpoint is loaded although a newer one is whole", OLDER, acts=Acts.ALLOWED)
def _(plan: Plan) -> None:
    plan.first["saves_again"] = True


@cause(ACC, "update counter of an average starts again", "lightly-train #892; ace #819")
def _(plan: Plan) -> None:
    plan.first["counter"] = True
    plan.after_load.append(lambda launch: setattr(launch.counter, "updates", 0))


@cause(ACC, "object of the script's own is not registered in this launch", "ace #819")
def _(plan: Plan) -> None:
    plan.first["counter"] = True
    plan.again["counter"] = False


@cause(ACC, "largest second moments of AMSGrad lost", "KempnerForge #115")
def _(plan: Plan) -> None:
    plan.first["optimizer"] = "AMSGrad"

    def lose(state: dict[str, Any]) -> None:
        for entry in state["state"].values():
            entry["max_exp_avg_sq"].zero_()

    plan.files.append(edited("optimizer.bin", lose))


@cause(ACC, "second moments alone lost", "pytorch #140898")
def _(plan: Plan) -> None:
    def lose(state: dict[str, Any]) -> None:
        for entry in state["state"].values():
            entry["exp_avg_sq"].fill_(1e-8)

    plan.files.append(edited("optimizer.bin", lose))


@cause(ACC, "Python's generator lost, torch's restored", "accelerate #4283")
def _(plan: Plan) -> None:
    import random

    plan.files.append(edited("random_states_0.pkl", lambda s: {**s, "random_state": random.Random(5).getstate()}))


@cause(DDP, "one rank begins its data again", "accelerate #2823, on one rank", alone=False)
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: setattr(launch, "skip", False) if launch.rank == 1 else None)


@cause(DDP, "model of one rank is left in evaluation mode", "as with one process")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: launch.model.eval() if launch.rank == 1 else None)


@cause(DDP, "statistics of the batch norm start again on one rank", "sesemi #36")
def _(plan: Plan) -> None:
    plan.first["model"] = "norm"
    plan.after_load.append(lambda launch: launch.model.module[1].reset_running_stats() if launch.rank == 1 else None)


@cause(ZERO, "shard of one rank is of another step", "launch_resume_evidence; a save cut short between two ranks")
def _(plan: Plan) -> None:
    def older(checkpoint: Path) -> None:
        path = max((checkpoint / "pytorch_model").glob("*_optim_states.pt"))
        state = torch.load(path, weights_only=False)
        for entry in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["exp_avg"] *= 0.7
        torch.save(state, path)
        reseal(checkpoint)

    plan.files.append(older)


@cause(HF, "older checkpoint is loaded although a newer one is whole", "transformers PR #9822", acts=Acts.ALLOWED)
def _(plan: Plan) -> None:
    plan.first["saves_again"] = True


@cause(HF, "order of the data of another seed", "transgenic #59")
def _(plan: Plan) -> None:
    plan.again["data_seed"] = 7


@cause(HF, "batch size doubled", "virtex #18")
def _(plan: Plan) -> None:
    plan.again["per_device_train_batch_size"] = 8


@cause(HF, "trainer_state.json of another step", "transformers PR #9822")
def _(plan: Plan) -> None:
    def later(checkpoint: Path) -> None:
        path = checkpoint / "trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 20}))
        reseal(checkpoint)

    plan.files.append(later)


@cause(HF, "another optimizer", "ipex-llm #1460")
def _(plan: Plan) -> None:
    plan.again["optim"] = "sgd"


@cause(HF, "decay of a warm-up-stable-decay schedule is twice as long", "transformers #34905", acts=Acts.LATER)
def _(plan: Plan) -> None:
    stable = {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 300, "logging_steps": 1}
    plan.first.update(stable, lr_scheduler_kwargs={"num_decay_steps": 40})
    plan.again["lr_scheduler_kwargs"] = {"num_decay_steps": 80}
    plan.num_steps = 270


@cause(HF, "weight decay set again when training begins", "ipex-llm #347")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda parts: parts["optimizer"].param_groups[0].update(weight_decay=0.3))


@cause(PL, "statistics of the batch norm start again", "sesemi #36")
def _(plan: Plan) -> None:
    plan.first["model"] = "norm"
    plan.after_load.append(lambda trainer: trainer.lightning_module.layer[1].reset_running_stats())


@cause(PL, "bfloat16 instead of float32", "OpenTau #185")
def _(plan: Plan) -> None:
    plan.again["trainer"] = {"precision": "bf16-true"}


@cause(PL, "one byte of a weight damaged in the file", "safetensors and zip: read without a check")
def _(plan: Plan) -> None:
    plan.first["model"] = "wide"

    def damage(path: Path) -> None:
        weight = torch.load(path, weights_only=False)["state_dict"]["layer.0.weight"].numpy().tobytes()
        data = bytearray(path.read_bytes())
        data[data.index(weight) + 4 * 13 + 2] ^= 0x30  # the 14th number: no sample falls there
        path.write_bytes(data)

    plan.files.append(damage)


@cause(PL, "frozen layer becomes trainable", FREEZE)
def _(plan: Plan) -> None:
    plan.first.update(model="plain", frozen=True)
    plan.again["frozen"] = False


@cause(PL, "moments of the file cast to bfloat16", "OpenTau #185")
def _(plan: Plan) -> None:
    def cast(state: Any) -> None:
        for entry in state["optimizer_states"][0]["state"].values():
            entry["exp_avg"] = entry["exp_avg"].bfloat16()

    plan.files.append(in_ckpt(cast))


for prefix, source in (("module.", "DDP's prefix"), ("_orig_mod.", "torch.compile's prefix")):

    @cause(PT, f"keys begin with `{prefix}`, loaded with strict=False", source)
    def _(plan: Plan, prefix: str = prefix) -> None:
        plan.again["prefix"] = prefix


@cause(PT, "momentum set again from the arguments", "darknet #6720")
def _(plan: Plan) -> None:
    plan.first.update(optimizer="SGD", momentum=0.9)
    plan.after_load.append(_set(momentum=0.5))


@cause(PT, "growth counter of the loss scaler lost", "metaseq #3")
def _(plan: Plan) -> None:
    plan.first["scaler"] = True
    plan.after_load.append(lambda loop: setattr(loop.scaler, "_init_growth_tracker", 0))


@cause(PT, "frozen layer becomes trainable", FREEZE)
def _(plan: Plan) -> None:
    plan.after_load.append(lambda loop: next(loop.model.parameters()).requires_grad_(False))


@cause(DS, "`latest` names an older checkpoint", "stale pointer", acts=Acts.ALLOWED)
def _(plan: Plan) -> None:
    plan.first["saves_again"] = True
    plan.files.append(lambda c: (c.parent / "latest").write_text(c.name))


@cause(DS, "ZeRO stage changed", "formats §4")
def _(plan: Plan) -> None:
    plan.again["zero"] = 2


@cause(DS, "weight decay set again from the arguments", "ipex-llm #347")
def _(plan: Plan) -> None:
    plan.after_load.append(_set(weight_decay=0.3))
