"""Step time of the trainer against a bare single-file loop of the same shape: what Accelerate, the plan, the guard, the
log and the tally cost. Same seed, same batches: the losses must be equal, or the comparison is between two things.

    python benchmarks/trainer_step_time.py [--steps 300] [--profile] [--device auto]

Both loops live in one process and take turns of five steps, so that a neighbour on the machine disturbs both alike; each
pair of turns gives one ratio of CPU seconds, and the median of all pairs is reported with its quartiles. The trainer is
the real one, started through its own `main` with guard, journal and metrics; only the iterator that hands it batches is
wrapped, to let the bare loop in between two steps. The bare loop pays no data, the trainer does. `--device auto` takes a GPU
where there is one, and the clock on the wall after all its work is done.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_TURN, _WARM_TURNS = 5, 4


class BareLoop:
    """Everything in one place: no Accelerate, no plan object in the loop, no journal."""

    def __init__(self, steps: int, device: str) -> None:
        import torch

        from bit_transformer.data.loaders import StepDataset, open_stores, plan_data
        from bit_transformer.model.transformer import BitTransformer
        from bit_transformer.recipes import demo
        from bit_transformer.training.schedule import plan_schedule
        from bit_transformer.training.setup import parameter_groups
        from chronicle.data import Segments

        recipe = self.recipe = demo()
        torch.manual_seed(recipe.seed)
        self.device = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu")
        self.model = BitTransformer(recipe.model).to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, recipe.optimizer.weight_decay), lr=recipe.optimizer.lr,
            betas=(recipe.optimizer.beta1, recipe.optimizer.beta2))
        stores = open_stores(recipe.data.sources, recipe.data.window_bytes, data_dir=None)
        plan = plan_data(stores, recipe.data.sources, batch_size=recipe.data.batch_size, seed=recipe.data.seed)
        dataset = StepDataset(plan, Segments(), stores, rank=0, world_size=1)
        self.batches = [dataset[step].bits_BT for step in range(steps)]
        self.factor = plan_schedule(recipe.schedule)
        self.losses: list[float] = []

    def turn(self) -> float:
        """Make five steps; return their CPU seconds."""
        import torch

        from bit_transformer.model.transformer import next_symbol_losses

        started = self.now()
        for _ in range(_TURN):
            step = len(self.losses)
            bits = self.batches[step].to(self.device)
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.optimizer.lr * self.factor(step)
            loss = next_symbol_losses(self.model(bits).logits_BTV, bits).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self.now() - started

    def now(self) -> float:
        """CPU seconds of this process; on a GPU seconds on the wall, once it has done what it was given."""
        import torch

        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def measure(steps: int, directory: Path, *, device: str,
            profile: bool) -> tuple[list[tuple[float, float]], BareLoop, list[float]]:
    """Run both in turns; return (trainer, bare) seconds of each pair, the bare loop, the trainer's losses."""
    os.environ.update({"CHRONICLE_RUN_DIR": str(directory / "run"), "CHRONICLE_LAUNCH_DIR": str(directory / "launch")})
    from bit_transformer import train as trainer

    bare, pairs = BareLoop(steps, device), []
    original, profiler = trainer.load_steps, cProfile.Profile()

    def in_turns(*arguments: Any, **options: Any) -> Iterator[Any]:
        batches = original(*arguments, **options)
        for _ in range(steps // _TURN):
            if profile:
                profiler.enable()
            started = bare.now()
            for _ in range(_TURN):
                yield next(batches)  # between two yields the trainer makes its step
            mine = bare.now() - started
            profiler.disable()
            pairs.append((mine, bare.turn()))

    trainer.load_steps = in_turns  # type: ignore[assignment]
    code = trainer.main(["--recipe", "demo", "--checkpoints", str(directory / "checkpoints"), "--resume", "fresh",
                         f"--set=device={device}",
                         *(f"--set={name}=100000" for name in ("eval_every", "checkpoint_every", "log_every"))])
    if code:
        raise SystemExit(code)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    lines = [json.loads(line) for line in (directory / "launch/metrics.jsonl").read_text().splitlines()]
    return pairs[_WARM_TURNS:], bare, [line["loss"] for line in lines]


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 5")
    parser.add_argument("--profile", action="store_true", help="say on stderr what the trainer spends its time with")
    parser.add_argument("--device", choices=("cpu", "auto"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pairs, bare, losses = measure(options.steps, Path(directory), device=options.device,
                                      profile=options.profile)
    ratios = [mine / other for mine, other in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    print(json.dumps({
        "benchmark": f"step time, demo recipe, one process, one thread, {bare.device.type}",
        "unit": f"{'CPU seconds' if bare.device.type == 'cpu' else 'seconds'}, turns of five steps",
        "ratio": round(median, 3), "quartiles": [round(low, 3), round(high, 3)], "pairs": len(ratios),
        "trainer_ms": round(statistics.median(mine for mine, _ in pairs) / _TURN * 1e3, 2),
        "bare_ms": round(statistics.median(other for _, other in pairs) / _TURN * 1e3, 2),
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(losses, bare.losses, strict=False)),
        "steps_compared": min(len(losses), len(bare.losses)), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
