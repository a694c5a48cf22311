"""Causal self-attention through torch's fused kernel.

Shapes: B batch, T positions, D channels, H heads, E channels a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """Multi-head attention with biases: 4·D² + 4·D parameters."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend each position to itself and the earlier ones; same shape out."""
        q_BHTE, k_BHTE, v_BHTE = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.in_proj(x_BTD).chunk(3, dim=-1))
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        y_BTD: Tensor = self.out_proj(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD


def attend_explicitly(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, allowed_TT: Tensor) -> Tensor:
    """Softmax attention with a boolean mask, written out: the reference that the fast paths are tested against."""
    scores = q_BHTE @ k_BHTE.transpose(-1, -2) / q_BHTE.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~allowed_TT, float("-inf")), dim=-1) @ v_BHTE
