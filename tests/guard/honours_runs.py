"""Small real trainings that tell, step by step, the LR that moved the weights and the samples that were read.

`python -m tests.guard.honours_runs RUN_DIR FOLDER ACT …` is one rank of the Accelerate one, under torchrun.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs
from torch.utils.data import DataLoader, TensorDataset

import chronicle
from chronicle.launch.ranks import leave_group

LR, GAMMA, BATCHES = 0.5, 0.9, 8
Told = list[tuple[float, list[int]]]  # LR used, samples read


class Weight(torch.nn.Module):
    """Two numbers whose gradient is 1: a step of plain SGD moves them by the LR that was really used."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self.other = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.value.sum() + self.other.sum() + 0.0 * ids.to(self.value.dtype).sum()

    def groups(self, ratio: float = 0.5) -> list[dict[str, Any]]:
        """Two, of which the second has half the LR."""
        return [{"params": [self.value]}, {"params": [self.other], "lr": LR * ratio}]

    def moved(self, before: list[float]) -> float:
        """The LR of the first group, when that of the second is half of it."""
        value, other = (b - now for b, now in zip(before, self.now(), strict=True))
        return value if abs(other - value / 2) < 1e-6 else float("nan")

    def now(self) -> list[float]:
        """Where both stand."""
        if hasattr(self.value, "ds_id"):  # ZeRO 3: each rank holds a part
            from deepspeed.utils import safe_get_full_fp32_param

            return [float(safe_get_full_fp32_param(p)) for p in (self.value, self.other)]
        return [float(self.value.detach()), float(self.other.detach())]


def samples(num_ranks: int = 1) -> TensorDataset:
    return TensorDataset(torch.arange(4 * BATCHES * num_ranks))


class OnAccelerate:
    """One launch. It finds its place in the data by its own step count, as scripts do."""

    def __init__(self, run_dir: Path | None, *, accumulation: int = 1, shuffle: bool = True, seedable: bool = True,
                 zero: int = 0, late: bool = False, **options: Any) -> None:  # fmt: skip
        for state in (AcceleratorState._reset_state, GradientState._reset_state, PartialState._reset_state):
            state()
        torch.manual_seed(0)
        config = DataLoaderConfiguration(use_seedable_sampler=seedable)
        with_zero = {"deepspeed_plugin": zero_plugin(zero, accumulation)} if zero else {}
        self.accelerator: Any = Accelerator(
            cpu=not zero, dataloader_config=config, gradient_accumulation_steps=accumulation, **with_zero,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if "WORLD_SIZE" in os.environ else None,
        )  # fmt: skip
        if run_dir is not None:
            chronicle.guard(self.accelerator, run_dir=run_dir, **options)
        self.weight = Weight(torch.float32 if zero else torch.float64)
        optimizer = torch.optim.SGD(self.weight.groups(), lr=LR)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        ranks = self.accelerator.num_processes
        loader = DataLoader(samples(ranks), batch_size=4, shuffle=shuffle)
        held_out = DataLoader(samples(ranks), batch_size=4)
        parts = self.accelerator.prepare(self.weight, optimizer, held_out, *([] if late else [loader]))
        self.model, self.optimizer, self.held_out, *prepared = parts
        self.loader: Any = loader if late else prepared[0]
        self.accelerator.register_for_checkpointing(scheduler)  # unprepared: it counts optimizer steps on any ranks
        self.scheduler, self.accumulation = scheduler, accumulation

    def load(self, checkpoint: Path) -> "OnAccelerate":
        self.accelerator.load_state(str(checkpoint))
        if type(self.loader) is DataLoader:
            self.loader = self.accelerator.prepare(self.loader)
        return self

    def train(self, begin: int, num_steps: int, checkpoint: Path | None = None) -> Told:
        """Steps `begin` to `begin + num_steps` of the run; `checkpoint` is saved after them, inside the loop."""
        told: Told = []
        read: list[int] = []
        steps_per_epoch = BATCHES // self.accumulation
        for epoch in range(begin // steps_per_epoch, 10**6):
            done = begin % steps_per_epoch * self.accumulation if epoch == begin // steps_per_epoch else 0
            loader = self.accelerator.skip_first_batches(self.loader, done) if done else self.loader
            loader.set_epoch(epoch)
            self.loader.set_epoch(epoch)
            for (ids,) in loader:
                read += ids.tolist()
                with self.accelerator.accumulate(self.model):
                    before = self.weight.now()
                    self.accelerator.backward(self.model(ids))
                    self.optimizer.step()
                    if not self.accelerator.sync_gradients:
                        self.optimizer.zero_grad()
                        continue
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                told.append((self.weight.moved(before), read))
                read = []
                if len(told) == num_steps:
                    if checkpoint is not None:
                        self.accelerator.save_state(str(checkpoint))
                        self.accelerator.chronicle.sealer.finish()
                    return told
        raise AssertionError


def zero_plugin(stage: int, accumulation: int) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1e9,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    )


def main() -> None:
    """Acts in order, each a launch: `stream` (without a guard), `save`, `resume`; every rank tells what it did."""
    run_dir, folder, zero = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for act in sys.argv[4:]:
        if act == "stream":
            told = OnAccelerate(None, zero=zero).train(0, 20)
        elif act == "save":
            told = OnAccelerate(run_dir, zero=zero).train(0, 5, folder / "opt_step-5")
        else:
            told = OnAccelerate(run_dir, zero=zero).load(folder / "opt_step-5").train(5, 2, folder / "opt_step-7")
            told += OnAccelerate(run_dir, zero=zero).load(folder / "opt_step-7").train(7, 6)
        line = {"rank": int(os.environ["RANK"]), "act": act, "told": told}
        os.write(1, (json.dumps(line) + "\n").encode())  # one write: ranks share this pipe


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():  # ranks that just leave may abort while gloo's threads still run
        leave_group()
