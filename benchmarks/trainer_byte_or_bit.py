"""The same blocks on bits and on bytes: bits per byte after the same compute, on the same held-out bytes.

    python benchmarks/trainer_byte_or_bit.py [--steps 800] [--rates 0.002 0.006]

Same compute means the same blocks, the same number of positions a window, of windows a step and of steps; the byte arm
therefore reads nine times the text, which is the point. Each arm is trained once a learning rate and the better one is
reported. The yardsticks (coin flip, unigram, xz, zstd) see the same held-out bytes. One process, one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bit_transformer.data.bits import BITS_PER_BYTE  # noqa: E402
from bit_transformer.data.corpora import read_corpus  # noqa: E402
from bit_transformer.data.loaders import StepDataset, open_stores, plan_data  # noqa: E402
from bit_transformer.evaluation.held_out import baselines, evaluate  # noqa: E402
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses  # noqa: E402
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule  # noqa: E402
from bit_transformer.training.setup import parameter_groups  # noqa: E402
from chronicle.data import Segments  # noqa: E402

SOURCES = {"code": 7, "reference": 3}
POSITIONS, BATCH, HELD_OUT_WINDOWS = 216, 16, 400
ARMS = {"bits": (2, POSITIONS // BITS_PER_BYTE), "bytes": (256, POSITIONS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One training of one arm; `bpb` by source."""

    rate: float
    parameters: int
    cpu_seconds: float
    bpb: dict[str, float]

    @property
    def mixture(self) -> float:
        """Bits per byte over the sources as they are mixed."""
        return sum(self.bpb[name] * weight for name, weight in SOURCES.items()) / sum(SOURCES.values())


def held_out_text(source: str) -> bytes:
    """Return stretches of 216 bytes, evenly spread over what the source holds out."""
    text = read_corpus(source).held_out
    stretches = [text[start:start + POSITIONS] for start in range(0, len(text) - POSITIONS + 1, POSITIONS)]
    every = max(1, len(stretches) // HELD_OUT_WINDOWS)
    return b"".join(stretches[::every][:HELD_OUT_WINDOWS])


def held_out(window_bytes: int) -> dict[str, torch.Tensor]:
    """Return the same bytes for every arm, cut into windows of its length."""
    return {name: torch.frombuffer(bytearray(held_out_text(name)), dtype=torch.uint8).view(-1, window_bytes)
            for name in SOURCES}


def train(arm: str, steps: int, rate: float) -> Result:
    """Train one arm and evaluate it."""
    vocab, window_bytes = ARMS[arm]
    config = ModelConfig(d_model=64, num_heads=4, num_layers=2, d_ff=256, max_bits=POSITIONS, norm="pre", vocab=vocab)
    factor = plan_schedule(ScheduleConfig(shape="wsd", warmup_steps=20, total_steps=steps, decay_steps=steps // 3))
    torch.manual_seed(0)
    model = BitTransformer(config)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=rate, betas=(0.9, 0.95))
    stores = open_stores(SOURCES, window_bytes, data_dir=None)
    plan = plan_data(stores, SOURCES, batch_size=BATCH, seed=0)
    dataset = StepDataset(plan, Segments(), stores, rank=0, world_size=1, as_bytes=vocab == 256)
    started = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(step)
        symbols_BT = dataset[step].bits_BT
        next_symbol_losses(model(symbols_BT).logits_BTV, symbols_BT).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.process_time() - started
    found = evaluate(model, held_out(window_bytes), rank=0, world_size=1)
    return Result(rate=rate, parameters=config.num_parameters, cpu_seconds=seconds,
                  bpb={name: one.bpb for name, one in found.items()})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.002, 0.006])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.steps} steps of {BATCH} windows of {POSITIONS} positions, two layers of width 64; held out: "
          f"{', '.join(f'{len(held_out_text(name)):,} bytes of {name}' for name in SOURCES)}; load {os.getloadavg()[0]:.1f}\n")
    print("| | parameters | text read | LR | CPU s | " + " | ".join(SOURCES) + " | mixture |")
    print("|---|---|---|---|---|" + "---|" * (len(SOURCES) + 1))
    for arm, (_, window_bytes) in ARMS.items():
        best = min((train(arm, options.steps, rate) for rate in options.rates), key=lambda one: one.mixture)
        text = options.steps * BATCH * window_bytes
        print(f"| {arm} | {best.parameters:,} | {text / 1e6:.2f} MB | {best.rate:g} | {best.cpu_seconds:.0f} | "
              + " | ".join(f"{value:.3f}" for value in best.bpb.values()) + f" | {best.mixture:.3f} |", flush=True)
    yardsticks: dict[str, dict[str, float]] = {}
    for source in SOURCES:
        corpus = read_corpus(source)
        for name, value in baselines(corpus.train, held_out_text(source)).items():
            yardsticks.setdefault(name, {})[source] = value
    for name, values in yardsticks.items():
        mixture = sum(values[source] * weight for source, weight in SOURCES.items()) / sum(SOURCES.values())
        print(f"| {name} | | | | | " + " | ".join(f"{value:.3f}" for value in values.values()) + f" | {mixture:.3f} |")


if __name__ == "__main__":
    main()
