"""Step time of the trainer against a bare single-file loop of the same shape: what Accelerate, the plan, the guard, the
log and the tally cost. Same seed, same batches: the losses must be equal, or the comparison is between two things.

    python benchmarks/trainer_step_time.py [--steps 120] [--rounds 3]

Measured in CPU seconds of one thread, because wall time on a shared machine says little. The trainer runs in fresh
processes, once for 20 steps and once for 20 + `steps`; the difference is the steps alone, without start and save.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WARM_STEPS = 20
ROOT = Path(__file__).resolve().parents[1]


def bare_loop(steps: int) -> tuple[list[float], list[float]]:
    """Everything in one function: no Accelerate, no plan object in the loop, no journal. Returns losses and seconds."""
    import torch

    from bit_transformer.loaders import StepDataset, open_stores, plan_data
    from bit_transformer.model import BitTransformer, next_symbol_losses
    from bit_transformer.recipes import demo
    from bit_transformer.schedule import plan_schedule
    from bit_transformer.train import parameter_groups
    from chronicle.data import Segments

    recipe = demo()
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    model = BitTransformer(recipe.model)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.optimizer.weight_decay),
        lr=recipe.optimizer.lr,
        betas=(recipe.optimizer.beta1, recipe.optimizer.beta2),
    )
    stores = open_stores(recipe.data.sources, recipe.data.window_bytes, data_dir=None)
    plan = plan_data(stores, recipe.data.sources, batch_size=recipe.data.batch_size, seed=recipe.data.seed)
    dataset = StepDataset(plan, Segments(), stores, rank=0, world_size=1)
    batches = [dataset[step].bits_BT for step in range(steps)]  # prepared beforehand: the bare loop pays no data
    factor = plan_schedule(recipe.schedule)
    losses, seconds = [], []
    for step, bits in enumerate(batches):
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = recipe.optimizer.lr * factor(step)
        loss = next_symbol_losses(model(bits).logits_BTV, bits).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.process_time() - started)
    return losses, seconds


def trainer(steps: int, directory: Path) -> tuple[list[float], float]:
    """The real trainer, guard and metrics on, in a fresh process. Returns losses and the process's CPU seconds."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CHRONICLE_RUN_DIR": str(directory / "run"), "OMP_NUM_THREADS": "1",
               "CHRONICLE_LAUNCH_DIR": str(directory / "launch")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "bit_transformer.train", "--recipe", "demo", "--stop-at", str(steps),
                    "--checkpoints", str(directory / "checkpoints"), "--set", "eval_every=100000",
                    "--set", "checkpoint_every=100000"], check=True, env=environ, cwd=directory, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (directory / "launch/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure both in turn and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ratios, equal = [], True
    for _ in range(options.rounds):
        found = {}
        for steps in (_WARM_STEPS, _WARM_STEPS + options.steps):
            with tempfile.TemporaryDirectory() as directory:
                losses, found[steps] = trainer(steps, Path(directory))
        mine = (found[_WARM_STEPS + options.steps] - found[_WARM_STEPS]) / options.steps
        own_losses, seconds = bare_loop(_WARM_STEPS + options.steps)
        bare = statistics.mean(seconds[_WARM_STEPS:])
        ratios.append(mine / bare)
        equal &= all(abs(one - other) < 1e-5 for one, other in zip(losses, own_losses, strict=True))
        print(f"trainer {mine * 1e3:.1f} ms, bare {bare * 1e3:.1f} ms, ratio {ratios[-1]:.3f}", file=sys.stderr)
    print(json.dumps({"benchmark": "step time, demo recipe, one process, one thread", "unit": "CPU seconds",
                      "ratio": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
                      "losses_equal_within_1e-5": equal, "steps": options.steps}))


if __name__ == "__main__":
    main()
