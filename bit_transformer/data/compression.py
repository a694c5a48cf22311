"""Run-length compression of bits, and the ramp that brings it in slowly.

A run of 1 to 255 equal bits becomes (bit, length); as a sequence of bits: the bit, then the length in eight bits, most
significant first, nine bits a run like a byte with its parity. What a batch compresses is drawn from the data plan's
key, not from a random generator, so that a resume draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bit_transformer.data.bits import BITS_PER_BYTE
from chronicle.data.order import derive_key

T = TypeVar("T")

MAX_RUN = 255
_LENGTH_BITS = 8


def cosine_ramp(step: int, *, start: float, end: float, total_steps: int) -> float:
    """Return start + (end − start) · ½(1 − cos(π · min(1, step / total))): slow at both ends."""
    progress = min(1.0, step / total_steps) if total_steps else 1.0
    return start + (end - start) * 0.5 * (1 - math.cos(math.pi * progress))


def compress_runs(bits_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bits, lengths) of the runs, int64; longer runs than 255 are cut."""
    if not bits_T.numel():
        return bits_T.long(), bits_T.long()
    values, counts = torch.unique_consecutive(bits_T.long(), return_counts=True)
    pieces = (counts + MAX_RUN - 1) // MAX_RUN
    repeated = values.repeat_interleave(pieces)
    lengths = torch.full_like(repeated, MAX_RUN)
    lengths[pieces.cumsum(0) - 1] = counts - (pieces - 1) * MAX_RUN
    return repeated, lengths


def expand_runs(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the bits of the runs. Raises ValueError for a length outside 1…255."""
    if lengths.numel() and not (int(lengths.min()) >= 1 and int(lengths.max()) <= MAX_RUN):
        raise ValueError(f"run lengths from {int(lengths.min())} to {int(lengths.max())}, expected 1 to {MAX_RUN}")
    return values.repeat_interleave(lengths)


def runs_to_bits(values: Tensor, lengths: Tensor) -> Tensor:
    """Write the runs as bits, nine each."""
    places = torch.arange(_LENGTH_BITS - 1, -1, -1)
    return torch.cat([values[:, None], (lengths[:, None] >> places) & 1], dim=1).flatten()


def bits_to_runs(bits_T: Tensor) -> tuple[Tensor, Tensor]:
    """Read what `runs_to_bits` wrote; an incomplete last run is left out."""
    rows = bits_T[: bits_T.numel() // BITS_PER_BYTE * BITS_PER_BYTE].view(-1, BITS_PER_BYTE)
    places = torch.arange(_LENGTH_BITS - 1, -1, -1)
    return rows[:, 0], (rows[:, 1:] << places).sum(1)


def compressed_rows(*, seed: int, position: int, num_rows: int, probability: float) -> NDArray[np.bool_]:
    """Return which rows of the global batch at this data position are fed compressed: drawn from the plan's key."""
    draws = [derive_key(seed, "compress", position, row) / 2**64 for row in range(num_rows)]
    return np.array(draws) < probability


def compress_window(bits_T: Tensor) -> tuple[Tensor, int]:
    """Return the run-length form of a window, cut or padded to the window's own length, and its length before padding."""
    coded = runs_to_bits(*compress_runs(bits_T))[: bits_T.numel()]
    return torch.cat([coded, coded.new_zeros(bits_T.numel() - coded.numel())]), coded.numel()


def forward_compressed(model: Callable[[Tensor], T], values: Tensor, lengths: Tensor) -> T:
    """Run the model on the bits that the runs stand for: equal to `model` on the decompressed bits."""
    return model(expand_runs(values, lengths)[None])
