"""All causes of the benchmark: the planted bugs of `causes_*.py`, and healthy resumes, where a stop is a false alarm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs import (  # noqa: F401 register
    causes_accelerate,
    causes_frameworks,
    causes_ranks,
    causes_trained,
    causes_unseen,
)
from benchmarks.planted_bugs.plan import Acts, Cause, Plan, registered
from benchmarks.planted_bugs.schedulers import SCHEDULERS

__all__ = ["causes", "healthy_causes"]

HF_SCHEDULERS = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)


def causes() -> tuple[Cause, ...]:
    """Return all planted bugs, in the order they are written."""
    return registered()


def healthy_causes() -> tuple[Cause, ...]:
    """All healthy resumes, as causes that plant nothing."""
    out: list[Cause] = []
    for scheduler in SCHEDULERS:
        out.append(_healthy("accelerate", f"{scheduler}, prepared", scheduler=scheduler))
        out.append(_healthy("torch", scheduler, scheduler=scheduler))
    for scheduler in ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR", "StepLR", "ChainedScheduler"):
        out.append(
            _healthy("accelerate", f"{scheduler}, registered", scheduler=scheduler, prepare=False, register=True)
        )
        out.append(_healthy("lightning", scheduler, scheduler=scheduler))
    for scheduler in ("LambdaLR", "CosineAnnealingLR", "OneCycleLR", "LinearLR"):
        out.append(_healthy("ddp", f"{scheduler}, prepared", scheduler=scheduler))
        out.append(_healthy("deepspeed", scheduler, scheduler=scheduler))
    out += [_healthy("transformers", name, lr_scheduler_type=name) for name in HF_SCHEDULERS]
    out += [
        _healthy("accelerate", "LambdaLR, prepared and registered", register=True),
        _healthy("accelerate", "no scheduler", scheduler=None),
        _healthy("accelerate", "SGD with momentum", optimizer="SGD"),
        _healthy("accelerate", "accumulation 2", accumulation=2),
        _healthy("accelerate", "batch size 8, unshuffled", batch=8, shuffle=False),
        _healthy("torch", "SGD", optimizer="SGD"),
        _healthy("torch", "with an average", ema=True),
        _healthy("torch", "with a loss scaler", scaler=True),
        _healthy("transformers", "accumulation 2", gradient_accumulation_steps=2),
        _healthy("transformers", "epoch boundary", per_device_train_batch_size=4, max_steps=120),
        _healthy("lightning", "gradient clipping", clip=1.0),
        _healthy("ddp", "LambdaLR, registered", prepare=False, register=True),
        _healthy("ddp", "accumulation 2", accumulation=2),
        _healthy("zero", "ZeRO 1", zero=1),
        _healthy("zero", "ZeRO 2", zero=2),
        _healthy("zero", "ZeRO 3", zero=3),
        _healthy("deepspeed", "ZeRO 2", zero=2),
        _healthy("deepspeed", "without a scheduler", scheduler=None),
        _accepted("accumulation doubled, accepted with a reason", accumulation=2),
        _accepted("batch size doubled, accepted with a reason", batch=8),
    ]
    return (*out, *unseen_healthy())


def unseen_healthy() -> tuple[Cause, ...]:
    """Resumes in which something else changed: written after the guard was finished, as `causes_unseen`."""
    moved = [_healthy(rig, "moved to another directory", moved=True) for rig in
             ("accelerate", "ddp", "transformers", "lightning", "torch", "deepspeed")]  # fmt: skip
    extended = {"lr_scheduler_type": "constant", "max_steps": 40}
    return (
        *moved,
        _healthy("accelerate", "two loader workers instead of none", {"workers": 2}),
        _healthy("accelerate", "a new evaluation set, prepared first", {"evaluation": True}),
        _healthy("accelerate", "torch.compile on", {"compiled": True}),
        _healthy("accelerate", "torch.compile off", {"compiled": False}, compiled=True),
        _healthy("accelerate", "batch norm", model="norm"),
        _healthy("accelerate", "tied weights", model="tied"),
        _healthy("accelerate", "frozen layer", frozen=True),
        _healthy("accelerate", "AMSGrad", optimizer="AMSGrad"),
        _healthy("accelerate", "an object of the script's own", counter=True),
        _healthy("accelerate", "evaluation between load and first step", after_load=_evaluate),
        _healthy("accelerate", "files are read-only", files=_read_only),
        _healthy("ddp", "two loader workers instead of none", {"workers": 2}),
        _healthy("transformers", "another logging interval", {"logging_steps": 5}),
        _healthy("transformers", "a new evaluation set", {"evaluation": True, "eval_strategy": "steps", "eval_steps": 5}),
        _healthy("transformers", "evaluation before the first step",
                 {"evaluation": True, "eval_strategy": "steps", "eval_on_start": True}),
        _healthy("transformers", "longer run, constant LR", {"max_steps": 80}, **extended),
        _healthy("transformers", "two loader workers", {"dataloader_num_workers": 2}),
        _healthy("transformers", "saves twice as often", {"save_steps": 6}),
        _healthy("lightning", "a new evaluation set", {"evaluation": True}),
        _healthy("lightning", "another logging interval", {"trainer": {"log_every_n_steps": 7}}),
        _healthy("lightning", "two loader workers", {"workers": 2}),
        _healthy("lightning", "frozen layer", model="plain", frozen=True),
        _healthy("torch", "torch.compile on", {"compiled": True}),
        _healthy("torch", "fused AdamW on", {"fused": True}),
        _healthy("torch", "SGD with momentum", optimizer="SGD", momentum=0.9),
        _healthy("torch", "batch norm", model="norm"),
        *(_healthy(rig, "a model that counts, caches and anneals", model="counting") for rig in
          ("accelerate", "torch", "lightning", "ddp")),
        _healthy("lightning", "the same global batch in another split", {"batch": 4, "accumulation": 2}, batch=8),
        _healthy("accelerate", "the same global batch in another split",
                 {"batch": 4, "accumulation": 2, "accept": {"data": "smaller batches"}}, batch=8),
        _healthy("lightning", "dropout off, accepted by name",
                 {"model": "dropout off", "accept": {"model": "the last epochs are without dropout"}}, model="dropout"),
        _healthy("torch", "gradients that the script clears before its first step", after_load=_leave_gradients),
    )  # fmt: skip


def _evaluate(launch: Any) -> None:
    launch.model.eval()
    with torch.no_grad():
        launch.model(torch.randn(16, 8))
    launch.model.train()


def _leave_gradients(launch: Any) -> None:
    launch.model.eval()
    launch.model(torch.randn(4, 8)).square().mean().backward()
    launch.model.train()


def _read_only(checkpoint: Path) -> None:
    for path in (*checkpoint.rglob("*"), checkpoint):
        path.chmod(0o555 if path.is_dir() else 0o444)


def _healthy(
    rig: str,
    name: str,
    again: dict[str, object] | None = None,
    *,
    moved: bool = False,
    after_load: Callable[[Any], object] | None = None,
    files: Callable[[Path], object] | None = None,
    **options: object,
) -> Cause:
    """`options` of both launches, `again` of the one that resumes."""

    def plant(plan: Plan) -> None:
        plan.first.update(options)
        plan.again.update(again or {})
        plan.moved = moved
        plan.after_load += [after_load] if after_load else []
        plan.files += [files] if files else []

    return Cause(rig=rig, name=name, source="healthy", acts=Acts.NEVER_SEEN, alone=False, plant=plant)


def _accepted(name: str, **change: object) -> Cause:
    def plant(plan: Plan) -> None:
        reason = {"accumulation": "one node less", "batch_size": "bigger card", "data": "order follows the batch size"}
        plan.again.update(change, accept=reason)

    return Cause(rig="accelerate", name=name, source="healthy", acts=Acts.NEVER_SEEN, alone=False, plant=plant)
