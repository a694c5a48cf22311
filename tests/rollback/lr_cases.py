"""The scheduler families of torch and transformers that the LR tests run through, with the optimizer they act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as L

NUM_STEPS = 100
SchedulerCase = Callable[[torch.optim.Optimizer], Any]


def _linear(optimizer: torch.optim.Optimizer) -> L.LinearLR:
    return L.LinearLR(optimizer, 0.1, 1.0, 20)


# What the oracle computes from state and groups alone.
COMPUTED: dict[str, SchedulerCase] = {
    "step": lambda o: L.StepLR(o, 12, 0.3),
    "multi_step": lambda o: L.MultiStepLR(o, [5, 12, 12, 40], 0.3),
    "constant": lambda o: L.ConstantLR(o, 0.3, 12),
    "linear": lambda o: L.LinearLR(o, 1.0, 0.1, 50),
    "exponential": lambda o: L.ExponentialLR(o, 0.97),
    "polynomial": lambda o: L.PolynomialLR(o, NUM_STEPS, 2.0),
    "cosine": lambda o: L.CosineAnnealingLR(o, 60),
    "cosine_with_floor": lambda o: L.CosineAnnealingLR(o, 37, eta_min=1e-4),
    "warm_restarts": lambda o: L.CosineAnnealingWarmRestarts(o, 12, 2, eta_min=1e-5),
    "one_cycle": lambda o: L.OneCycleLR(o, max_lr=[1e-3, 2e-3], total_steps=130),
    "one_cycle_linear_three_phase": lambda o: L.OneCycleLR(
        o, max_lr=1e-3, total_steps=130, anneal_strategy="linear", three_phase=True
    ),
    "cyclic_triangular": lambda o: L.CyclicLR(o, 1e-4, 1e-3, 6, 9, cycle_momentum=False),
    "cyclic_triangular2": lambda o: L.CyclicLR(o, 1e-4, 1e-3, 6, mode="triangular2", cycle_momentum=False),
    "cyclic_exp_range": lambda o: L.CyclicLR(o, 1e-4, 1e-3, 6, mode="exp_range", gamma=0.99, cycle_momentum=False),
    "sequential_past": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 5), L.CosineAnnealingLR(o, 60)], [5]),
    "sequential_before": lambda o: L.SequentialLR(o, [_linear(o), L.CosineAnnealingLR(o, 60, 1e-5)], [12]),
    "sequential_three": lambda o: L.SequentialLR(
        o, [_linear(o), L.StepLR(o, 7, 0.5), L.CosineAnnealingWarmRestarts(o, 9)], [12, 40]
    ),
    "chained": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.3, 12), L.ExponentialLR(o, 0.97)]),
    "chained_with_floor": lambda o: L.ChainedScheduler([_linear(o), L.CosineAnnealingLR(o, 60, eta_min=1e-5)]),
}

# Their function is not in the checkpoint: only the ratio can be proved.
FUNCTIONS: dict[str, SchedulerCase] = {
    "lambda": lambda o: L.LambdaLR(o, lambda s: min(1.0, (s + 1) / 5) * max(0.0, (NUM_STEPS - s) / NUM_STEPS)),
    "multiplicative": lambda o: L.MultiplicativeLR(o, lambda s: 0.97),
    "sequential_into_lambda": lambda o: L.SequentialLR(o, [_linear(o), L.LambdaLR(o, lambda s: 0.99**s)], [12]),
}


def hugging_face_cases() -> dict[str, SchedulerCase]:
    """The schedules of `transformers.optimization`: all of them LambdaLR over a partial."""
    import transformers.optimization as hf

    return {
        "hf_cosine": lambda o: hf.get_cosine_schedule_with_warmup(o, 5, NUM_STEPS),
        "hf_linear": lambda o: hf.get_linear_schedule_with_warmup(o, 5, NUM_STEPS),
        "hf_constant": lambda o: hf.get_constant_schedule_with_warmup(o, 5),
        "hf_polynomial": lambda o: hf.get_polynomial_decay_schedule_with_warmup(o, 5, NUM_STEPS, lr_end=1e-4),
        "hf_inverse_sqrt": lambda o: hf.get_inverse_sqrt_schedule(o, 5),
        "hf_min_lr_rate": lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, 5, NUM_STEPS, min_lr_rate=0.1),
        "hf_min_lr": lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, 5, NUM_STEPS, min_lr=1e-4),
        "hf_wsd": lambda o: hf.get_wsd_schedule(o, 5, 80, num_training_steps=NUM_STEPS),
    }


def plateau(optimizer: torch.optim.Optimizer) -> L.ReduceLROnPlateau:
    return L.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, cooldown=1, min_lr=[1e-5, 2e-5])


def build(case: SchedulerCase) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Model, AdamW with two groups (1e-3, 5e-4) and the scheduler of `case`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return model, optimizer, case(optimizer)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *metric: float) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step(*metric)


def lrs(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups)
