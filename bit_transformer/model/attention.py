"""Causal self-attention through torch's fused kernel, over all earlier positions or over a band of chunks.

Shapes: B batch, T positions, D channels, H heads, E channels a head; N chunks of C queries, each with W = overlap + C
keys. Only `attention_map` builds a T × T map.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """Multi-head attention with biases: 4·D² + 4·D parameters. `chunk` 0 attends to everything before."""

    def __init__(self, d_model: int, num_heads: int, *, chunk: int = 0, overlap: int = 0) -> None:
        super().__init__()
        self.num_heads, self.chunk, self.overlap = num_heads, chunk, overlap
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend each position to itself and the earlier ones; same shape out."""
        q_BHTE, k_BHTE, v_BHTE = self._heads(x_BTD)
        if self.chunk and x_BTD.shape[1] > self.chunk:
            y_BHTE = attend_in_chunks(q_BHTE, k_BHTE, v_BHTE, chunk=self.chunk, overlap=self.overlap)
        else:
            y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        y_BTD: Tensor = self.out_proj(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD

    def attention_map(self, x_BTD: Tensor) -> Tensor:
        """Return the attention weights (B, H, T, T), for inspection; needs T² memory."""
        q_BHTE, k_BHTE, _ = self._heads(x_BTD)
        num_positions = x_BTD.shape[1]
        allowed = band_mask(num_positions, self.chunk or num_positions, self.overlap, x_BTD.device)
        return _weights(q_BHTE, k_BHTE, allowed)

    def _heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                   for part in self.in_proj(x_BTD).chunk(3, dim=-1))
        return q, k, v


def attend_in_chunks(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, *, chunk: int, overlap: int) -> Tensor:
    """Attend from each chunk of queries to itself and `overlap` positions before it: O(T · (chunk + overlap)) memory.

    Equal to dense attention with `band_mask` for every T, chunk and overlap. The last chunk is padded and cut again.
    """
    num_positions = q_BHTE.shape[2]
    padding = -num_positions % chunk
    num_chunks = (num_positions + padding) // chunk
    q_BHNCE = F.pad(q_BHTE, (0, 0, 0, padding)).view(*q_BHTE.shape[:2], num_chunks, chunk, -1)
    k_BHNWE, v_BHNWE = (F.pad(part, (0, 0, overlap, padding)).unfold(2, overlap + chunk, chunk).transpose(-1, -2)
                        for part in (k_BHTE, v_BHTE))
    mask_NCW = chunk_masks(num_chunks, chunk, overlap, q_BHTE.device)
    y_BHNCE = F.scaled_dot_product_attention(q_BHNCE, k_BHNWE, v_BHNWE, attn_mask=mask_NCW)
    return y_BHNCE.flatten(2, 3)[:, :, :num_positions]


def _weights(q_BHTE: Tensor, k_BHTE: Tensor, allowed_TT: Tensor) -> Tensor:
    scores = q_BHTE @ k_BHTE.transpose(-1, -2) / q_BHTE.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~allowed_TT, float("-inf")), dim=-1)


# --- Attention masks, cached by shape and device


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
    """Return the same rule as one dense (T, T) mask."""
    query = torch.arange(num_positions, device=device)[:, None]
    key = torch.arange(num_positions, device=device)[None, :]
    return (key <= query) & (key >= query // chunk * chunk - overlap)
