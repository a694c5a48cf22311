"""Resumes with nothing wrong: every one that the guard stops is a false alarm."""

from benchmarks.planted_bugs.plan import Acts, Cause, Plan
from benchmarks.planted_bugs.schedulers import SCHEDULERS

__all__ = ["healthy_causes"]

HF_SCHEDULERS = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_restarts",
)


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
    return tuple(out)


def _healthy(rig: str, name: str, **options: object) -> Cause:
    def plant(plan: Plan) -> None:
        plan.first.update(options)

    return Cause(rig=rig, name=name, source="healthy", acts=Acts.NEVER_SEEN, alone=False, plant=plant)


def _accepted(name: str, **change: object) -> Cause:
    def plant(plan: Plan) -> None:
        reason = {"accumulation": "one node less", "batch_size": "bigger card", "data": "order follows the batch size"}
        plan.again.update(change, accept=reason)

    return Cause(rig="accelerate", name=name, source="healthy", acts=Acts.NEVER_SEEN, alone=False, plant=plant)
