"""A training step of the bit transformer on a device, timed: what `gpu_evidence.py` calls MFU and peak memory.

Arithmetic is counted as the model needs it, without what is recomputed: 6 × matrix parameters a position, and of attention the
half that causality leaves. Peaks are the makers' figures for dense bf16.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses

_BITS = 2304
SHAPES = {
    "tiny": ModelConfig(d_model=32, num_heads=2, num_layers=2, d_ff=64, max_bits=144, norm="pre"),
    "85M": ModelConfig(d_model=768, num_heads=12, num_layers=12, d_ff=3072, max_bits=_BITS, norm="pre"),
    "680M": ModelConfig(d_model=1536, num_heads=24, num_layers=24, d_ff=6144, max_bits=_BITS, norm="pre"),
    "1.21B": ModelConfig(d_model=2048, num_heads=32, num_layers=24, d_ff=8192, max_bits=_BITS, norm="pre"),
}
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


def flops_per_symbol(config: ModelConfig, positions: int) -> float:
    """Return the FLOPs of training on one position, forward and backward; recomputation is not counted."""
    d = config.d_model
    matrices = config.num_layers * (4 * d * d + 2 * d * config.d_ff) + d * config.vocab
    return 6 * (matrices + config.num_layers * d * (positions + 1))


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
