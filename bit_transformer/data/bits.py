"""Text as bits: UTF-8 bytes, eight data bits (most significant first) and one parity bit each.

Parity is the sum of the eight data bits modulo 2. Run-length compression of bits is here as well: a run of 1 to 255 equal
bits becomes the bit and its length in eight bits, so nine bits a run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chronicle.data.plan import derive_key

BITS_PER_BYTE = 9


_DATA = torch.arange(256)[:, None] >> torch.arange(7, -1, -1) & 1
_ENCODE = torch.cat([_DATA, _DATA.sum(1, keepdim=True) % 2], 1)  # 256 bytes, nine bits each


def encode_bytes(bytes_BN: Tensor) -> Tensor:
    """Expand uint8 bytes (…, n) into bits 0/1 (…, 9·n), int64."""
    return _ENCODE.to(bytes_BN.device)[bytes_BN.long()].flatten(-2)


# --- Run-length compression

MAX_RUN = 255
_LENGTH_BITS = 8


def compress_runs(bits_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bits, lengths) of the runs, int64; runs longer than 255 are split."""
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
