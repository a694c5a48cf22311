"""A plain torch loop that saves one file with model, optimizer, scheduler, generators and its own step."""

from pathlib import Path
from typing import Any

import torch

import chronicle
from benchmarks.planted_bugs.models import MODELS, split_parameters
from benchmarks.planted_bugs.plan import Plan, Row
from benchmarks.planted_bugs.schedulers import SCHEDULERS

__all__ = ["first", "resume"]

SAVED_AT = 12
NUM_FIRST = 40


class Loop:
    """One start of the script."""

    def __init__(self, run_dir: Path | None, options: dict[str, Any]) -> None:
        self.options = o = {"scheduler": "StepLR", "optimizer": "AdamW", "ema": False, "model": "plain", **options}
        torch.manual_seed(o.get("seed", 0))
        self.model: Any = MODELS[o["model"]]()
        self.average = MODELS[o["model"]]()
        self.average.load_state_dict(self.model.state_dict())
        self.scaler = torch.amp.GradScaler("cpu", enabled=True, growth_interval=5) if o.get("scaler") else None
        body, head = split_parameters(self.model, swapped=o.get("swapped", False))
        if o["optimizer"] == "SGD":
            self.optimizer: Any = torch.optim.SGD([*body, *head], lr=1e-2, momentum=o.get("momentum", 0.0))
        else:
            self.optimizer = torch.optim.AdamW([*body, *head], lr=1e-2, fused=o.get("fused", False))
        if o.get("compiled"):
            self.model.compile(backend="eager")
        self.scheduler: Any = SCHEDULERS[o["scheduler"]](self.optimizer)
        self.parts = [
            "model",
            "optimizer",
            "scheduler",
            *(["average"] if o["ema"] else []),
            *(["scaler"] if self.scaler else []),
        ]
        self.step = 0
        self.first_sample = 0
        self.run = None
        if run_dir is not None:
            averages = {"ema": self.average} if o["ema"] else None
            self.run = chronicle.attach(
                run_dir,
                self.model,
                self.optimizer,
                self.scheduler,
                step=lambda: self.step,
                same_data=True,
                averages=averages,
                scaler=self.scaler,
            )

    def train(self, num_steps: int, rows: list[Row], plan: Plan | None = None) -> None:
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 + self.first_sample + self.step)
            x = torch.randn(4, 8, generator=generator)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if plan is not None and len(rows) + 1 in plan.at_step:
                plan.at_step[len(rows) + 1](self)
            lr = float(self.optimizer.param_groups[0]["lr"])
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.scheduler.step()
            with torch.no_grad():
                for mean, own in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(own, 0.05)
            self.step += 1
            rows.append((self.step, {"lr": lr, "loss": float(loss.detach())}))

    def save(self, path: Path) -> None:
        torch.save({"step": self.step, **{part: getattr(self, part).state_dict() for part in self.parts}}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        for part in self.parts:
            if part == "model" and "prefix" in self.options:  # saved from inside a wrapper, loaded without a look
                prefixed = {self.options["prefix"] + name: value for name, value in state[part].items()}
                self.model.load_state_dict(prefixed, strict=False)
            elif part not in self.options.get("leave_out", ()):
                getattr(self, part).load_state_dict(state[part])
        if "step" not in self.options.get("leave_out", ()):
            self.step = int(state["step"])


def first(folder: Path, run_dir: Path | None, plan: Plan) -> tuple[Path, list[Row]]:
    """Save at step 12, go on to step 40."""
    loop, rows = Loop(run_dir, plan.first), []
    loop.train(SAVED_AT, rows)
    path = folder / f"step-{SAVED_AT}.pt"
    loop.save(path)
    loop.train(NUM_FIRST - SAVED_AT, rows)
    return path, rows


def resume(path: Path, run_dir: Path | None, plan: Plan, rows: list[Row]) -> None:
    """The launch that resumes."""
    loop = Loop(run_dir, {**plan.first, **plan.again})
    if plan.again.get("load", True):
        loop.load(path)
    for hook in plan.after_load:
        hook(loop)
    loop.train(plan.num_steps, rows, plan)
