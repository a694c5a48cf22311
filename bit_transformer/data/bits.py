"""Text as bits: UTF-8 bytes, eight data bits (most significant first) and one parity bit each.

Parity is the sum of the eight data bits modulo 2. Run-length compression of bits is here as well: a run of 1 to 255 equal
bits becomes the bit and its length in eight bits, so nine bits a run.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chronicle.data.plan import derive_key

BITS_PER_BYTE = 9
COIN_FLIP_BITS_PER_BYTE = 9.0  # loss of a model that always predicts 0.5, parity included


def _encode_table() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    data = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([data, data.sum(axis=1, keepdims=True, dtype=np.uint8) % 2], axis=1)


_ENCODE = torch.from_numpy(_encode_table())


def encode_bytes(bytes_BN: Tensor) -> Tensor:
    """Expand uint8 bytes (…, n) into bits 0/1 (…, 9·n), int64."""
    table = _ENCODE.to(bytes_BN.device)
    return table[bytes_BN.long()].flatten(-2).long()


# --- Run-length compression

MAX_RUN = 255
_LENGTH_BITS = 8


def cosine_ramp(step: int, *, start: float, end: float, total_steps: int) -> float:
    """Return start + (end − start) · ½(1 − cos(π · min(1, step / total)))."""
    progress = min(1.0, step / total_steps) if total_steps else 1.0
    return start + (end - start) * 0.5 * (1 - math.cos(math.pi * progress))


def compress_runs(bits_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bits, lengths) of the runs, int64; runs longer than 255 are split."""
    if not bits_T.numel():
        return bits_T.long(), bits_T.long()
    values, counts = torch.unique_consecutive(bits_T.long(), return_counts=True)
    pieces = (counts + MAX_RUN - 1) // MAX_RUN
    repeated = values.repeat_interleave(pieces)
    lengths = torch.full_like(repeated, MAX_RUN)
    lengths[pieces.cumsum(0) - 1] = counts - (pieces - 1) * MAX_RUN
    return repeated, lengths


def runs_to_bits(values: Tensor, lengths: Tensor) -> Tensor:
    """Encode the runs as bits, nine each: the bit, then its length, most significant bit first."""
    places = torch.arange(_LENGTH_BITS - 1, -1, -1)
    return torch.cat([values[:, None], (lengths[:, None] >> places) & 1], dim=1).flatten()


def compressed_rows(*, seed: int, position: int, num_rows: int, probability: float) -> NDArray[np.bool_]:
    """Return which rows of the global batch at this data position are compressed; drawn from the seed of the data plan."""
    draws = [derive_key(seed, "compress", position, row) / 2**64 for row in range(num_rows)]
    return np.array(draws) < probability


def compress_window(bits_T: Tensor) -> tuple[Tensor, int]:
    """Return the run-length form of a window, cut or padded to the window's length, and its length before padding."""
    coded = runs_to_bits(*compress_runs(bits_T))[: bits_T.numel()]
    return torch.cat([coded, coded.new_zeros(bits_T.numel() - coded.numel())]), coded.numel()


def share_made_shorter(windows_BT: Tensor) -> tuple[float, float]:
    """Return the share of windows (bits) that their run-length form is shorter than, and its mean relative length."""
    lengths = torch.tensor([BITS_PER_BYTE * len(compress_runs(bits_T)[0]) for bits_T in windows_BT], dtype=torch.float64)
    return float((lengths < windows_BT.shape[1]).double().mean()), float(lengths.mean() / windows_BT.shape[1])
