"""Reversible blocks against ordinary and checkpointed ones: bytes kept for the backward pass by depth, and step time.

    python benchmarks/trainer_reversible.py [--turns 8] [--width 128]

The three take turns, one step each, in one process with one thread; every turn gives a ratio of CPU seconds, and the median
is reported with its quartiles. A step is forward, backward and AdamW. Recomputing costs about a third more arithmetic, for
checkpointing and for reversible blocks alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses  # noqa: E402

KINDS = {"plain": {}, "checkpointed": {"checkpointing": True}, "reversible": {"reversible": True}}
DEPTHS = (4, 8, 16)
_BATCH, _BITS = 4, 576


def saved_bytes(config: ModelConfig) -> int:
    """Return what one forward pass keeps for the backward one, weights left out."""
    model, bits_BT = BitTransformer(config), torch.randint(0, 2, (_BATCH, _BITS))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        next_symbol_losses(model(bits_BT).logits_BTV, bits_BT).mean()
    return sum(size for pointer, (size, _) in saved.items() if pointer not in own)


class Arm:
    """One kind of model with its optimizer."""

    def __init__(self, config: ModelConfig) -> None:
        torch.manual_seed(0)
        self.model = BitTransformer(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, bits_BT: torch.Tensor) -> float:
        """Make one step; return its CPU seconds."""
        started = time.process_time()
        next_symbol_losses(self.model(bits_BT).logits_BTV, bits_BT).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - started


def step_times(config: ModelConfig, turns: int) -> dict[str, list[float]]:
    """Return the CPU seconds of every turn of every kind, the first turn left out."""
    arms = {name: Arm(dataclasses.replace(config, **change)) for name, change in KINDS.items()}
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        bits_BT = torch.randint(0, 2, (_BATCH, _BITS))
        for name, arm in arms.items():
            seconds = arm.step(bits_BT)
            if turn:
                found[name].append(seconds)
    return found


def main() -> None:
    """Print one line of JSON a depth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for depth in DEPTHS:
        config = ModelConfig(d_model=options.width, num_heads=8, num_layers=depth, d_ff=4 * options.width, max_bits=_BITS,
                             norm="pre")
        kept = {name: saved_bytes(dataclasses.replace(config, **change)) for name, change in KINDS.items()}
        times = step_times(config, options.turns)

        def ratio(name: str, other: str, times: dict[str, list[float]] = times) -> list[float]:
            turns = [mine / theirs for mine, theirs in zip(times[name], times[other], strict=True)]
            low, median, high = statistics.quantiles(turns, n=4)
            return [round(low, 3), round(median, 3), round(high, 3)]

        print(json.dumps({
            "benchmark": "reversible blocks", "layers": depth, "width": options.width, "batch": _BATCH, "bits": _BITS,
            "kept_megabytes": {name: round(value / 1e6, 2) for name, value in kept.items()},
            "cpu_seconds_a_step": {name: round(statistics.median(values), 3) for name, values in times.items()},
            "reversible_to_plain": ratio("reversible", "plain"),
            "reversible_to_checkpointed": ratio("reversible", "checkpointed"),
            "checkpointed_to_plain": ratio("checkpointed", "plain"), "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
