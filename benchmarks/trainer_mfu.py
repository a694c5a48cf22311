"""On a GPU: share of its peak arithmetic, bits a second and peak memory of the 85M, 680M and 1.21B models, in bf16.

    python benchmarks/trainer_mfu.py [--shape 85M 680M 1.21B] [--recompute checkpointing reversible] [--peak-tflops 989]

A step is forward, backward, clipping and fused AdamW over windows of 2,304 bits. Arithmetic is counted as the model needs
it, without what is recomputed: 6 × matrix parameters a position, and of attention the half that causality leaves. Peaks are
the makers' figures for dense bf16; another device's is given by `--peak-tflops`. Without a GPU it says so and ends well.
`--device cpu --shape tiny` runs the same code on a CPU, as a trial of this program: its numbers are labelled as such.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bit_transformer.footprint import flops_per_symbol  # noqa: E402
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses  # noqa: E402

_BITS = 2304
SHAPES = {
    "tiny": ModelConfig(d_model=32, num_heads=2, num_layers=2, d_ff=64, max_bits=144, norm="pre"),
    "85M": ModelConfig(d_model=768, num_heads=12, num_layers=12, d_ff=3072, max_bits=_BITS, norm="pre"),
    "680M": ModelConfig(d_model=1536, num_heads=24, num_layers=24, d_ff=6144, max_bits=_BITS, norm="pre"),
    "1.21B": ModelConfig(d_model=2048, num_heads=32, num_layers=24, d_ff=8192, max_bits=_BITS, norm="pre"),
}
RECOMPUTE = ("none", "checkpointing", "reversible")
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One shape on one device; `peak_bytes` is None where the device keeps no count."""

    parameters: int
    seconds_a_step: float
    bits_a_second: float
    flops_a_second: float
    peak_bytes: int | None


def measure(config: ModelConfig, *, device: torch.device, batch: int, steps: int) -> Measured:
    """Train a few steps on random bits and time them, the first two left out."""
    torch.manual_seed(0)
    model = BitTransformer(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    bits_BT = torch.randint(0, 2, (batch, config.max_bits), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 2):
        _wait(device)
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits_BTV = model(bits_BT).logits_BTV
        next_symbol_losses(logits_BTV, bits_BT).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[2:])
    bits = bits_BT.numel() / seconds
    return Measured(parameters=config.num_parameters, seconds_a_step=seconds, bits_a_second=bits,
                    flops_a_second=bits * flops_per_symbol(config, config.max_bits),
                    peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def largest_batch(config: ModelConfig, device: torch.device, first: int) -> int:
    """Return the largest of `first`, its half, … for which a step fits into memory; 1 is not tried."""
    while first > 1 and not fits(config, device, first):
        first //= 2
    return first


def fits(config: ModelConfig, device: torch.device, batch: int) -> bool:
    """Try one step; what it allocated is given back, also after it failed."""
    try:
        measure(config, device=device, batch=batch, steps=1)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["checkpointing", "reversible"])
    parser.add_argument("--batch", type=int, default=32, help="windows a step; halved until a step fits")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the device, where it is not known here")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured (`--device cpu --shape tiny` tries the program)")
        return 0
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    peak = options.peak_tflops or next((value for kind, value in PEAK_TFLOPS.items() if kind in name), None)
    print(f"{name}, torch {torch.__version__}, {datetime.datetime.now(tz=datetime.UTC).date()}, bf16 autocast, windows of "
          f"{', '.join(sorted({f'{SHAPES[shape].max_bits:,}' for shape in options.shape}))} bits, "
          f"peak {f'{peak:g} TFLOP/s' if peak else 'unknown: give --peak-tflops'}")
    print("" if device.type == "cuda" else "on a CPU: a trial of this program, no figure of a GPU\n")
    print("| shape | parameters | recompute | batch | ms a step | bits a second | TFLOP/s | MFU | peak memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in options.shape:
        for recompute in options.recompute:
            config = replace(SHAPES[shape], reversible=recompute == "reversible", checkpointing=recompute == "checkpointing")
            batch = largest_batch(config, device, options.batch)
            found = measure(config, device=device, batch=batch, steps=options.steps)
            share = f"{found.flops_a_second / peak / 1e12:.1%}" if peak else "?"
            memory = "?" if found.peak_bytes is None else f"{found.peak_bytes / 1e9:.1f} GB"
            print(f"| {shape} | {found.parameters:,} | {recompute} | {batch} | {found.seconds_a_step * 1e3:.0f} | "
                  f"{found.bits_a_second:,.0f} | {found.flops_a_second / 1e12:.3g} | {share} | {memory} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
