"""The trainer of the replay: a small regression under Accelerate, saved and resumed as the 80B run was.

Same layout (`opt_step-N/accelerator_state`, the scheduler registered, so it lies in `custom_checkpoint_0.pkl`), same schedule
(base LR 5e-5, 2000 steps of warm-up, linear to zero at 500,000), same step numbers. Data differs in every launch, as
WebDataset reshuffled on every restart. Two things go wrong on request, both really:

    --poison N   from step N on the targets get noisier and noisier: the loss that rises is the loss of the model
    --forget     load no registered object: what Accelerate of that day did in silence when a stray file lay beside them
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator

import chronicle
from chronicle.metrics import MetricsWriter

BASE_LR, WARMUP_STEPS, ALL_STEPS = 5e-5, 2000, 500_000
BATCH, WIDTH = 256, 16
FLOOR = 1.6  # variance of the noise on the targets: the loss cannot fall below
EVERY = 250  # steps between checkpoints
LOG_EVERY = 5


def schedule(step: int) -> float:
    """Fraction of the base LR after `step` optimizer steps."""
    if step < WARMUP_STEPS:
        return step / WARMUP_STEPS
    return max(0.0, (ALL_STEPS - step) / (ALL_STEPS - WARMUP_STEPS))


def make_batch(teacher: torch.nn.Module, seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and noisy targets of one step, fixed by the seed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    with torch.no_grad():
        clean = teacher(inputs)
    return inputs, clean + noise * torch.randn(clean.shape, generator=generator)


def network() -> torch.nn.Module:
    """Student and teacher have one shape."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def main() -> None:
    """Train from `--resume` (or from nothing) to step `--to`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--poison", type=int, default=None)
    parser.add_argument("--also-save", type=int, nargs="*", default=[])
    parser.add_argument("--forget", action="store_true")
    options = parser.parse_args()
    root = Path(os.environ["CHRONICLE_CHECKPOINTS"])
    launch = int(os.environ["CHRONICLE_LAUNCH"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    teacher = network()
    for weight in teacher.parameters():
        weight.data *= 3
    torch.manual_seed(2)
    accelerator = chronicle.guard(Accelerator(cpu=True))
    optimizer = torch.optim.AdamW((model := network()).parameters(), lr=BASE_LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    if options.resume:
        if options.forget:  # the accident: the file is read, and nothing of it arrives
            scheduler.load_state_dict = lambda state: None
        accelerator.load_state(str(root / f"opt_step-{options.resume}" / "accelerator_state"))
        vars(scheduler).pop("load_state_dict", None)
    with MetricsWriter(Path(os.environ["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl") as log:
        for step in range(options.resume + 1, options.to + 1):
            worse = max(0, step - options.poison) / 150 if options.poison is not None else 0.0
            inputs, targets = make_batch(teacher, launch * 1_000_003 + step, (FLOOR**0.5) * (1 + worse))
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0 or step == options.resume + 1:
                log.write(step, {"loss": loss.item(), "lr": lr, "grad_norm": float(norm)})
            if step % EVERY == 0 or step in options.also_save:
                accelerator.save_state(str(root / f"opt_step-{step}" / "accelerator_state"))


if __name__ == "__main__":
    main()
