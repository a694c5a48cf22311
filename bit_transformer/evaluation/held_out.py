"""Held-out bits per byte, per source.

bits per byte = sum of the losses over *all* positions of a byte / ln 2 / bytes: the only number that compares bit, byte
and BPE models. The first symbol of a window is predicted by nothing and counts as a coin flip. Parity is free once the
eight data bits are known, so it is reported apart and flatters no headline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.model.transformer import BitTransformer, next_symbol_losses

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Bits per byte of one source, all bits; `parity_bpb` is the parity bits' part of it."""

    bpb: float
    parity_bpb: float


@torch.no_grad()
def evaluate(model: BitTransformer, windows: Mapping[str, Tensor], *, rank: int, world_size: int) -> dict[str, HeldOut]:
    """Return held-out figures per source; each rank computes its share, all ranks get the result."""
    device = next(model.parameters()).device
    sums = torch.zeros(len(windows), 2, dtype=torch.float64, device=device)
    as_bytes = model.config.vocab == 256
    was_training = model.training
    model.eval()
    for row, windows_BN in enumerate(windows.values()):
        for bytes_BN in windows_BN[rank::world_size].to(device).split(_BATCH):  # type: ignore[no-untyped-call]
            symbols_BT = bytes_BN.long() if as_bytes else encode_bytes(bytes_BN)
            losses = next_symbol_losses(model(symbols_BT).logits_BTV, symbols_BT).double()
            unpredicted = math.log(256 if as_bytes else 2) * len(symbols_BT)
            # position t predicts bit t + 1, the ninth of a byte is its parity
            parity = losses.new_zeros(()) if as_bytes else losses[:, BITS_PER_BYTE - 2::BITS_PER_BYTE].sum()
            sums[row] += torch.stack([losses.sum() + unpredicted, parity])
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(sums)
    found = {}
    for (name, windows_BN), (total, parity_total) in zip(windows.items(), sums.tolist(), strict=True):
        nats_per_bpb = math.log(2) * windows_BN.numel()
        found[name] = HeldOut(bpb=total / nats_per_bpb, parity_bpb=parity_total / nats_per_bpb)
    return found
