"""Attention masks that are needed again and again: a small cache, bounded, keyed by shape and device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def chunk_masks(num_chunks: int, chunk: int, overlap: int, device: torch.device) -> Tensor:
    """Return which keys each query of each chunk may see: (num_chunks, chunk, overlap + chunk), bool.

    Query i of chunk c sits at c·chunk + i; key j of its window at c·chunk − overlap + j. Keys before the sequence
    (the first window's padding) and after the query are hidden.
    """
    first = torch.arange(num_chunks, device=device)[:, None, None] * chunk
    query = first + torch.arange(chunk, device=device)[None, :, None]
    key = first - overlap + torch.arange(overlap + chunk, device=device)[None, None, :]
    return (key >= 0) & (key <= query)


@lru_cache(maxsize=16)
def band_mask(num_positions: int, chunk: int, overlap: int, device: torch.device) -> Tensor:
    """Return the same rule as one dense (T, T) mask: what chunked attention must equal."""
    query = torch.arange(num_positions, device=device)[:, None]
    key = torch.arange(num_positions, device=device)[None, :]
    return (key <= query) & (key >= query // chunk * chunk - overlap)
