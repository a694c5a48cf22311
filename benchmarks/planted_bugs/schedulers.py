"""The schedulers of the healthy resumes and of the rigs: every family, small enough to move within 40 steps."""

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler as lr

__all__ = ["SCHEDULERS", "warm_up"]


def warm_up(step: int) -> float:
    """Linear over 30 steps, then inverse square root."""
    return min((step + 1) / 30, (30 / (step + 1)) ** 0.5)


def stable_until(last: int) -> Callable[[Any], Any]:
    """Constant up to a step, then down to zero within forty."""
    return lambda o: lr.LambdaLR(o, lambda step: min(1.0, max(0.0, (last + 40 - step) / 40)))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, warm_up),
    "decay after 240": stable_until(240),
    "decay after 300": stable_until(300),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.98),
    "StepLR": lambda o: lr.StepLR(o, 5, 0.7),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [6, 14, 22], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 16),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 40),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.97),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 400, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 100, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 15, 2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 1e-2, total_steps=400),
    "CyclicLR": lambda o: lr.CyclicLR(o, 1e-3, 1e-2, step_size_up=10, cycle_momentum=False),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 1.0, 10), lr.CosineAnnealingLR(o, 90)], milestones=[10]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 8), lr.ExponentialLR(o, 0.98)]),
}
