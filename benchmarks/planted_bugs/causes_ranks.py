"""Causes that need two ranks: DDP under Accelerate, and Accelerate with DeepSpeed ZeRO."""

import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs.causes_accelerate import reseal
from benchmarks.planted_bugs.plan import Plan, cause

DDP, ZERO = "ddp", "zero"


def _on_rank(rank: int, change: Any) -> Any:
    return lambda launch: change(launch) if launch.rank == rank else None


@cause(DDP, "scheduler neither prepared nor registered", "seed exp9")
def _(plan: Plan) -> None:
    plan.again["prepare"] = False


@cause(DDP, "rank 0's generators on every rank", "miles PR #3187")
def _(plan: Plan) -> None:
    def copy(checkpoint: Path) -> None:
        shutil.copy(checkpoint / "random_states_0.pkl", checkpoint / "random_states_1.pkl")
        reseal(checkpoint)

    plan.files.append(copy)


@cause(DDP, "random state of one rank missing", "accelerate #4283")
def _(plan: Plan) -> None:
    def remove(checkpoint: Path) -> None:
        (checkpoint / "random_states_1.pkl").unlink()
        reseal(checkpoint)

    plan.files.append(remove)


@cause(DDP, "prepared scheduler registered as well, stepped in another unit", "accelerate #2773")
def _(plan: Plan) -> None:
    plan.again.update(prepare=False, register=True)
    plan.files.append(lambda c: shutil.copy(c / "scheduler.bin", c / "custom_checkpoint_0.pkl"))


@cause(DDP, "weights of one rank differ", "verl; DDP does not look again")
def _(plan: Plan) -> None:
    def change(launch: Any) -> None:
        with torch.no_grad():
            next(launch.model.parameters()).add_(0.1)

    plan.after_load.append(_on_rank(1, change))


@cause(DDP, "moments of one rank lost", "pytorch #140898")
def _(plan: Plan) -> None:
    plan.after_load.append(_on_rank(1, lambda launch: launch.optimizer.optimizer.state.clear()))


@cause(DDP, "one rank loads another checkpoint", "OpenTau PR #396")
def _(plan: Plan) -> None:
    plan.after_load.append(_on_rank(1, lambda launch: launch.scheduler.scheduler.step()))


@cause(DDP, "nothing loaded", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(DDP, "data starts again", "accelerate #2823")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda launch: setattr(launch, "skip", False))


@cause(ZERO, "scheduler not restored", "accelerate #1673")
def _(plan: Plan) -> None:
    def begin_again(checkpoint: Path) -> None:
        state = torch.load(checkpoint / "scheduler.bin", weights_only=False)
        torch.save({**state, "last_epoch": 0, "_step_count": 1}, checkpoint / "scheduler.bin")
        reseal(checkpoint)

    plan.files.append(begin_again)


@cause(ZERO, "one ZeRO shard missing", "DeepSpeed 0.19.8", alone=True)
def _(plan: Plan) -> None:
    plan.files.append(lambda c: max((c / "pytorch_model").glob("*_optim_states.pt")).unlink())


@cause(ZERO, "two ZeRO shards swapped", "launch_resume_evidence; hand-made loaders")
def _(plan: Plan) -> None:
    def swap(checkpoint: Path) -> None:
        one, two = sorted((checkpoint / "pytorch_model").glob("*_optim_states.pt"))
        spare = one.with_name("spare")
        one.rename(spare)
        two.rename(one)
        spare.rename(two)
        reseal(checkpoint)

    plan.files.append(swap)


@cause(ZERO, "shard of one rank truncated", "pytorch #10577", alone=True)
def _(plan: Plan) -> None:
    def cut(checkpoint: Path) -> None:
        path = max((checkpoint / "pytorch_model").glob("*_optim_states.pt"))
        path.write_bytes(path.read_bytes()[:-200])

    plan.files.append(cut)


@cause(ZERO, "random states missing", "accelerate #4283")
def _(plan: Plan) -> None:
    def remove(checkpoint: Path) -> None:
        for path in checkpoint.glob("random_states_*.pkl"):
            path.unlink()
        reseal(checkpoint)

    plan.files.append(remove)


@cause(ZERO, "nothing loaded", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(ZERO, "LR set again after the load", "transformers #27710")
def _(plan: Plan) -> None:
    def reset(launch: Any) -> None:
        for group in launch.optimizer.param_groups:
            group["lr"] = 1e-2

    plan.after_load.append(reset)


@cause(ZERO, "accumulation doubled", "transformers PR #43718")
def _(plan: Plan) -> None:
    plan.again["accumulation"] = 2
