"""The bit transformer: embedding of 0 and 1, sinusoidal positions, blocks, two logits a position.

Positions have no parameters, there is no final norm with parameters and nothing is tied, so that the number of
parameters is the closed formula of `ModelConfig.num_parameters`. Shapes: B batch, T bits, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bit_transformer.attention import CausalSelfAttention
from bit_transformer.bits import BITS_PER_BYTE
from bit_transformer.errors import BadRecipe
from bit_transformer.positions import PHASE_CHANNELS, sinusoids


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model; `max_bits` bounds the window."""

    d_model: int
    num_heads: int
    num_layers: int
    d_ff: int
    max_bits: int
    byte_phase: bool = True
    norm: str = "post"

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads or self.d_model % 2:
            raise BadRecipe(f"d_model {self.d_model} does not divide into {self.num_heads} heads of even width")
        if self.byte_phase and self.d_model <= PHASE_CHANNELS:
            raise BadRecipe(f"d_model {self.d_model} leaves no room beside {PHASE_CHANNELS} byte-phase channels")
        if self.norm not in ("pre", "post"):
            raise BadRecipe(f"norm is `{self.norm}`, expected pre or post")
        if self.max_bits % BITS_PER_BYTE:
            raise BadRecipe(f"max_bits {self.max_bits} is not a multiple of {BITS_PER_BYTE}")

    @property
    def num_parameters(self) -> int:
        """Exact count: 4·d + 2 + L·(4d² + 9d + ff·(2d + 1))."""
        d, ff = self.d_model, self.d_ff
        return 4 * d + 2 + self.num_layers * (4 * d * d + 9 * d + ff * (2 * d + 1))


class Block(nn.Module):
    """Attention and feed-forward with one LayerNorm each: on the sum (post) or on the branch's input (pre)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.post = config.norm == "post"
        self.norm_attention = nn.LayerNorm(config.d_model)
        self.attention = CausalSelfAttention(config.d_model, config.num_heads)
        self.norm_feedforward = nn.LayerNorm(config.d_model)
        self.feedforward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after this block."""
        if self.post:
            x_BTD = self.norm_attention(x_BTD + self.attention(x_BTD))
            z_BTD: Tensor = self.norm_feedforward(x_BTD + self.feedforward(x_BTD))
            return z_BTD
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        y_BTD: Tensor = x_BTD + self.feedforward(self.norm_feedforward(x_BTD))
        return y_BTD


class BitTransformer(nn.Module):
    """Bits in, for every position the logits of the next bit out."""

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(2, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.d_model, 2)
        self.register_buffer("positions", sinusoids(config.max_bits, config.d_model, byte_phase=config.byte_phase),
                             persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith(("out_proj", "feedforward.2"))
                nn.init.normal_(module.weight, std=residual_std if last else 0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=1.0)  # at 0.02 the positions drown the bits

    def forward(self, bits_BT: Tensor) -> Tensor:
        """Return logits (B, T, 2) in float32; position t predicts bit t + 1."""
        x_BTD = self.embedding(bits_BT) + self.positions[: bits_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        if self.config.norm == "pre":
            x_BTD = F.layer_norm(x_BTD, x_BTD.shape[-1:])
        logits_BT2: Tensor = self.head(x_BTD)
        return logits_BT2.float()


def next_bit_losses(logits_BT2: Tensor, bits_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every predicted bit in nats, shape (B, T - 1), float32."""
    return F.cross_entropy(logits_BT2[:, :-1].flatten(0, 1).float(), bits_BT[:, 1:].flatten(),
                           reduction="none").view(bits_BT.shape[0], -1)


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable elements this process holds (after sharding: its part only)."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_on_meta_device(config: ModelConfig) -> int:
    """Build the model without memory and count it: what `num_parameters` must equal."""
    with torch.device("meta"):
        return count_parameters(BitTransformer(config))
