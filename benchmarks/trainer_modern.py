"""The modern recipe against the demo model: held-out bits per byte after equal CPU seconds on the same text.

    python benchmarks/trainer_modern.py [--steps 600] [--seeds 0] [--widths 64 128 256]

The demo recipe (its LR not raised) trains `--steps` steps; the modern recipe gets as many CPU seconds of training as that
took, and the number of its steps comes from the cost of 20 steps measured first. Both draw from the same training text and
mixture and are judged on the same held-out bytes, cut into windows of their own length. A third row stops the modern recipe
where it has read as many bytes as the demo model. gzip, xz and zstd see the held-out text alone; the order-3 mix is fitted on
the training text of its own source, once on 500,000 bytes, once on as many as the modern recipe read of both.

`--widths` shows how the LR carries over instead: at each width the same few LRs, each a short run, and the best one.
2026-11-23, widths 32, 64, 128, 200 steps, one seed: LR 0.04 is best at each, between 0.02 and 0.08 (3.336 3.297 3.332;
3.020 2.820 2.901; 2.827 2.682 2.846 bits per byte).
One process, one thread. CPU seconds are those of the training steps, without evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bit_transformer.data.corpora import read_corpus  # noqa: E402
from bit_transformer.data.loaders import StepDataset, open_stores, plan_data  # noqa: E402
from bit_transformer.evaluation.held_out import context_mix_bpb, evaluate, unigram_bpb, xz_bpb, zstd_bpb  # noqa: E402
from bit_transformer.model.transformer import BitTransformer, next_symbol_losses  # noqa: E402
from bit_transformer.modern import SOURCES, Modern, ModernConfig, build_optimizers, held_out_bits, next_losses  # noqa: E402
from bit_transformer.recipes import find_recipe  # noqa: E402
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule  # noqa: E402
from bit_transformer.training.setup import parameter_groups  # noqa: E402
from chronicle.data import Segments  # noqa: E402

DEMO_WINDOW, WINDOW, BATCH = 24, 256, 8
STRETCH = 768  # of held-out text: a multiple of both windows
HELD_OUT_BYTES = 96 * STRETCH
RATES = (0.01, 0.02, 0.04, 0.08, 0.16)


def held_out_text(source: str) -> bytes:
    """Return evenly spaced stretches of the held-out text of a source."""
    text = read_corpus(source).held_out
    stretches = [text[start : start + STRETCH] for start in range(0, len(text) - STRETCH + 1, STRETCH)]
    return b"".join(stretches[:: max(1, len(stretches) * STRETCH // HELD_OUT_BYTES)])


def windows(length: int) -> dict[str, torch.Tensor]:
    """Return the held-out bytes by source, cut into windows."""
    return {name: torch.frombuffer(bytearray(held_out_text(name)), dtype=torch.uint8).view(-1, length) for name in SOURCES}


def mix(values: dict[str, float]) -> float:
    """Return the mean over the sources, weighted as they are mixed."""
    return sum(values[name] * weight for name, weight in SOURCES.items()) / sum(SOURCES.values())


def steps_of(window: int, batch: int, seed: int, *, as_bytes: bool) -> StepDataset:
    """Return the batches of a seed."""
    stores = open_stores(SOURCES, window, data_dir=None)
    return StepDataset(plan_data(stores, SOURCES, batch_size=batch, seed=seed), Segments(), stores, rank=0, world_size=1,
                       as_bytes=as_bytes)  # fmt: skip


def run(model: torch.nn.Module, optimizers: list[Any], factor: Callable[[int], float], steps: int,
        losses: Callable[[Any, torch.Tensor], torch.Tensor], dataset: StepDataset) -> float:  # fmt: skip
    """Train; return the CPU seconds."""
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, factor) for one in optimizers]
    started = time.process_time()
    for step in range(steps):
        torch.autograd.backward(losses(model, dataset[step].bits_BT).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad(set_to_none=True)
    return time.process_time() - started


def train_demo(steps: int, seed: int) -> tuple[int, float, dict[str, float]]:
    """Train the demo model; return its parameters, CPU seconds and bits per byte by source."""
    recipe = find_recipe("demo")
    torch.manual_seed(seed)
    model = BitTransformer(recipe.model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=recipe.optimizer.lr, betas=(0.9, 0.95))
    factor = plan_schedule(ScheduleConfig(shape="wsd", warmup_steps=20, total_steps=steps, decay_steps=steps // 6))
    seconds = run(model, [optimizer], factor, steps, lambda m, bits: next_symbol_losses(m(bits).logits_BTV, bits),
                  steps_of(DEMO_WINDOW, recipe.data.batch_size, seed, as_bytes=False))  # fmt: skip
    found = evaluate(model, windows(DEMO_WINDOW), rank=0, world_size=1)
    return recipe.model.num_parameters, seconds, {name: one.bpb for name, one in found.items()}


def train_modern(steps: int, seed: int, *, width: int = 96, layers: int = 3, rate: float = 0.02,
                 judged: bool = True) -> tuple[int, float, dict[str, float]]:  # fmt: skip
    """Train the modern recipe; return its parameters, CPU seconds and bits per byte by source."""
    torch.manual_seed(seed)
    config = ModernConfig(width=width, layers=layers)
    model = Modern(config)
    factor = plan_schedule(ScheduleConfig(shape="wsd", warmup_steps=min(20, steps // 10), total_steps=steps,
                                          decay_steps=steps * 2 // 5, final_fraction=0.02))  # fmt: skip
    optimizers = build_optimizers(model, matrix_lr=rate, table_lr=rate / 2)
    seconds = run(model, optimizers, factor, steps, next_losses, steps_of(WINDOW, BATCH, seed, as_bytes=True))
    return config.num_parameters, seconds, held_out_bits(model, windows(WINDOW), 256) if judged else {}


def show(name: str, values: dict[str, float], parameters: str = "", text: str = "", seconds: str = "") -> None:
    """Print one row."""
    print(f"| {name} | {parameters} | {text} | {seconds} | "
          + " | ".join(f"{values[source]:.3f}" for source in SOURCES) + f" | {mix(values):.3f} |", flush=True)  # fmt: skip


def compare(steps: int, seed: int) -> None:
    """Print the table of one seed."""
    parameters, budget, demo = train_demo(steps, seed)
    demo_bytes = steps * 16 * DEMO_WINDOW
    show(f"demo model, seed {seed}", demo, f"{parameters:,}", f"{demo_bytes / 1e6:.2f} MB", f"{budget:.0f}")
    train_modern(5, seed, judged=False)
    _, cost, _ = train_modern(20, seed, judged=False)
    number = max(1, int(budget / (cost / 20)))
    parameters, used, modern = train_modern(number, seed)
    read = number * BATCH * WINDOW
    show(f"modern recipe, {number} steps", modern, f"{parameters:,}", f"{read / 1e6:.2f} MB", f"{used:.0f}")
    same = max(1, demo_bytes // (BATCH * WINDOW))
    parameters, seconds, equal = train_modern(same, seed)
    text = f"{demo_bytes / 1e6:.2f} MB"
    show(f"modern recipe, as many bytes, {same} steps", equal, f"{parameters:,}", text, f"{seconds:.0f}")
    texts = {name: (read_corpus(name).train, held_out_text(name)) for name in SOURCES}
    yardsticks: dict[str, Callable[[bytes, bytes], float]] = {
        "unigram": unigram_bpb, "gzip -9": lambda _, held: 8 * len(gzip.compress(held, 9)) / len(held),
        "xz": lambda _, held: xz_bpb(held), "zstd -19": lambda _, held: zstd_bpb(held), "order 3": context_mix_bpb,
        "order 3, fitted on as much": lambda train, held: context_mix_bpb(train, held, max_train_bytes=read)}  # fmt: skip
    for name, measure in yardsticks.items():
        show(name, {source: measure(*pair) for source, pair in texts.items()})
    order_3 = mix({source: context_mix_bpb(*pair) for source, pair in texts.items()})
    print(f"\nbits per byte, modern / demo = {mix(modern) / mix(demo):.3f} (CPU seconds × {used / budget:.2f}); "
          f"modern − order 3 = {mix(modern) - order_3:+.3f}\n", flush=True)  # fmt: skip


def transfer(widths: list[int], steps: int) -> None:
    """Print the mixture at every width and LR."""
    print("| width | parameters | " + " | ".join(f"LR {rate:g}" for rate in RATES) + " | best |\n|---|---|"
          + "---|" * (len(RATES) + 1))  # fmt: skip
    for width in widths:
        found = {}
        for rate in RATES:
            parameters, _, values = train_modern(steps, 0, width=width, layers=2, rate=rate)
            found[rate] = mix(values)
        best = min(found, key=lambda rate: found[rate])
        print(f"| {width} | {parameters:,} | " + " | ".join(f"{value:.3f}" for value in found.values()) + f" | {best:g} |",
              flush=True)  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of the demo model, or of every run of --widths")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--widths", type=int, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}; held out "
          + ", ".join(f"{len(held_out_text(name)):,} bytes of {name}" for name in SOURCES) + "\n")  # fmt: skip
    if options.widths:
        return transfer(options.widths, options.steps)
    print("| | parameters | text read | CPU s | " + " | ".join(SOURCES) + " | mixture |\n|---|---|---|---|"
          + "---|" * (len(SOURCES) + 1))  # fmt: skip
    for seed in options.seeds:
        compare(options.steps, seed)
    return None


if __name__ == "__main__":
    main()
