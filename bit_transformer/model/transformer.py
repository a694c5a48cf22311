"""The transformer over bits (or bytes): embedding, positions, blocks of causal attention, logits of what comes next.

Positions, the final norm and the norms of queries and keys have no parameters and no weights are tied, so
`ModelConfig.num_parameters` is an exact formula. Attention uses torch's fused kernel, over all earlier positions or over a
band of chunks. Shapes: B batch, T positions, D channels, V symbols, H heads, E channels a head; N chunks of C queries, each
with W = overlap + C keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bit_transformer.config import Count, Share, Size, require_fields
from bit_transformer.data.bits import BITS_PER_BYTE
from bit_transformer.errors import BadRecipe


class CausalSelfAttention(nn.Module):
    """Multi-head attention with biases: 4·D² + 4·D parameters. `chunk` 0 attends to everything before."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.d_model, 3 * config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend each position to itself and the earlier ones; same shape out."""
        config = self.config
        parts = self.in_proj(x_BTD).unflatten(-1, (3, config.num_heads, -1)).unbind(2)
        q_BHTE, k_BHTE, v_BHTE = (part.transpose(1, 2) for part in parts)
        if config.qk_norm:
            q_BHTE, k_BHTE = (F.rms_norm(part, part.shape[-1:]) for part in (q_BHTE, k_BHTE))
        if config.rotary:
            q_BHTE, k_BHTE = rotate(q_BHTE), rotate(k_BHTE)
        if config.chunk and x_BTD.shape[1] > config.chunk:
            y_BHTE = attend_in_chunks(q_BHTE, k_BHTE, v_BHTE, chunk=config.chunk, overlap=config.overlap)
        else:
            y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        y_BTD: Tensor = self.out_proj(y_BHTE.transpose(1, 2).flatten(2))
        return y_BTD


def rotate(x_BHTE: Tensor) -> Tensor:
    """Rotary positions: pairs (e, e + E/2) turned by position × 10000^(−2e/E)."""
    half, device = x_BHTE.shape[-1] // 2, x_BHTE.device
    rates = 10_000.0 ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
    angles_TE = torch.outer(torch.arange(x_BHTE.shape[2], device=device, dtype=torch.float32), rates)
    cos, sin = angles_TE.cos().to(x_BHTE.dtype), angles_TE.sin().to(x_BHTE.dtype)
    one, other = x_BHTE.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the model. `max_bits` bounds the window (positions); `vocab` is 2 (bits) or 256 (bytes).

    `rotary` turns queries and keys instead of adding sinusoids; the byte phase of bits is added all the same.
    """

    d_model: Count
    num_heads: Count
    num_layers: Count
    d_ff: Count
    max_bits: Count
    vocab: Literal[2, 256] = 2
    byte_phase: bool = True
    norm: Literal["pre", "post"] = "post"
    rotary: bool = False
    qk_norm: bool = False
    chunk: Size = 0
    overlap: Size = 0
    act: bool = False
    act_threshold: Share = 0.9
    reversible: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        if self.d_model % (2 * self.num_heads):
            raise BadRecipe(f"d_model {self.d_model} does not divide into {self.num_heads} heads of even width")
        if self.byte_phase and self.d_model <= PHASE_CHANNELS:
            raise BadRecipe(f"d_model {self.d_model} leaves no room beside {PHASE_CHANNELS} byte-phase channels")
        if self.vocab == 2 and self.max_bits % BITS_PER_BYTE:
            raise BadRecipe(f"max_bits {self.max_bits} is not a multiple of {BITS_PER_BYTE}")
        if self.reversible and (self.norm == "post" or self.checkpointing):
            raise BadRecipe("reversible blocks need norm=pre and no checkpointing: they recompute by themselves")

    @property
    def num_parameters(self) -> int:
        """Exact count: 2·V·d + V + L·(4d² + 9d + ff·(2d + 1)), with ACT + L·(d + 1); V = 2 gives 4·d + 2."""
        d, ff, v = self.d_model, self.d_ff, self.vocab
        layer = 4 * d * d + 9 * d + ff * (2 * d + 1) + (d + 1 if self.act else 0)
        return 2 * v * d + v + self.num_layers * layer


class Block(nn.Module):
    """Attention and feed-forward with one LayerNorm each: on the sum (post) or on the branch's input (pre)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.post = config.norm == "post"
        self.norm_attention = nn.LayerNorm(config.d_model)
        self.attention = CausalSelfAttention(config)
        self.norm_feedforward = nn.LayerNorm(config.d_model)
        self.feedforward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after this block."""
        if self.post:
            x_BTD = self.norm_attention(x_BTD + self.attention(x_BTD))
            y_BTD: Tensor = self.norm_feedforward(x_BTD + self.feedforward(x_BTD))
            return y_BTD
        x_BTD = x_BTD + self.attention_branch(x_BTD)
        return x_BTD + self.feedforward_branch(x_BTD)

    def attention_branch(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the attention branch (pre-norm)."""
        y_BTD: Tensor = self.attention(self.norm_attention(x_BTD))
        return y_BTD

    def feedforward_branch(self, x_BTD: Tensor) -> Tensor:
        """Return the output of the feed-forward branch (pre-norm)."""
        y_BTD: Tensor = self.feedforward(self.norm_feedforward(x_BTD))
        return y_BTD


class Output(NamedTuple):
    """Logits (B, T, V) in float32, position t predicting symbol t + 1; the ponder cost, 0 without ACT."""

    logits_BTV: Tensor
    ponder: Tensor


class BitTransformer(nn.Module):
    """Maps symbols (B, T) to the logits of the next symbol at every position."""

    positions: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.halting = nn.ModuleList(
            nn.Linear(config.d_model, 1) for _ in range(config.num_layers if config.act else 0))
        self.head = nn.Linear(config.d_model, config.vocab)
        has_phase = config.byte_phase and config.vocab == 2
        table = sinusoids(config.max_bits, config.d_model, byte_phase=has_phase)
        if config.rotary:
            table[:, : config.d_model - PHASE_CHANNELS * has_phase] = 0.0
        self.register_buffer("positions", table, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith(("out_proj", "feedforward.2"))
                nn.init.normal_(module.weight, std=residual_std if last else 0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=1.0)  # at 0.02 the positions would dominate the symbols
        for unit in self.halting:
            nn.init.constant_(unit.get_parameter("bias"), -1.0)  # p = 0.27: no position halts early before training

    def forward(self, symbols_BT: Tensor) -> Output:
        """Return logits for every position of (B, T) symbols, T at most `max_bits`."""
        x_BTD = self.embedding(symbols_BT)
        x_BTD = x_BTD + self.positions[: x_BTD.shape[1]].to(x_BTD.dtype)  # FSDP2 casts weights, and leaves buffers as they are
        if self.config.act:
            x_BTD, ponder = self._run_with_halting(x_BTD)
        else:
            x_BTD, ponder = self._run(x_BTD), x_BTD.new_zeros(())
        if self.config.norm == "pre":
            x_BTD = F.layer_norm(x_BTD, x_BTD.shape[-1:])
        return Output(self.head(x_BTD).float(), ponder)

    def _run(self, x_BTD: Tensor) -> Tensor:
        if self.config.reversible:
            x1_BTD, x2_BTD = run_reversibly(list(self.blocks), x_BTD, x_BTD)
            return (x1_BTD + x2_BTD) / 2
        for block in self.blocks:
            x_BTD = self._through(block, x_BTD)
        return x_BTD

    def _through(self, block: nn.Module, x_BTD: Tensor) -> Tensor:
        recomputes = self.config.checkpointing and torch.is_grad_enabled()
        y_BTD: Tensor = checkpoint(block, x_BTD, use_reentrant=False) if recomputes else block(x_BTD)
        return y_BTD

    def _run_with_halting(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        state = HaltingState(x_BTD, self.config.act_threshold, self.config.num_layers)
        streams = (x_BTD, x_BTD)
        for layer, (block, unit) in enumerate(zip(self.blocks, self.halting, strict=True)):
            keep = state.running_BT[..., None]
            if self.config.reversible:
                new = run_reversibly([block], *streams)
                streams = (torch.where(keep, new[0], streams[0]), torch.where(keep, new[1], streams[1]))
                x_BTD = (streams[0] + streams[1]) / 2
            else:
                x_BTD = torch.where(keep, self._through(block, x_BTD), x_BTD)
            state.take(layer, x_BTD, torch.sigmoid(unit(x_BTD).float()).squeeze(-1))
        return state.output_BTD, state.cost_BT.mean()  # its gradient reaches the halting units through the remainders


def next_symbol_losses(logits_BTV: Tensor, symbols_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every predicted symbol in nats, shape (B, T - 1), float32."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), symbols_BT[:, 1:].flatten(),
                           reduction="none").view(symbols_BT.shape[0], -1)


# --- Positions

PHASE_CHANNELS = 8


def sinusoids(num_positions: int, d_model: int, *, byte_phase: bool) -> Tensor:
    """Return the position table (num_positions, d_model) in float32; windows must begin on a byte boundary.

    With `byte_phase` the last eight channels hold sin and cos of 2πkt/9, k = 1…4: bits come in groups of nine, which a
    model without them has to learn first (6.7 against 4.6 held-out bits per byte after 700 steps of a 0.1M model).
    """
    t = torch.arange(num_positions, dtype=torch.float32)[:, None]
    width = d_model - PHASE_CHANNELS * byte_phase
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    parts = [torch.stack([torch.sin(t * rates), torch.cos(t * rates)], dim=-1).flatten(1)]
    if byte_phase:
        k = torch.arange(1, PHASE_CHANNELS // 2 + 1, dtype=torch.float32)
        angle = 2 * math.pi * k * (t % BITS_PER_BYTE) / BITS_PER_BYTE
        parts.append(torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1))
    return torch.cat(parts, dim=-1)


# --- Adaptive computation time


class HaltingState:
    """Adaptive computation time (Graves 2016) over the layers of one forward pass.

    A position halts when the sum of its halting probabilities reaches the threshold. The output is the mean of the
    layers' states weighted by their probabilities; the last layer gets the remainder.
    """

    def __init__(self, x_BTD: Tensor, threshold: float, num_layers: int) -> None:
        self.threshold, self.num_layers = threshold, num_layers
        self.output_BTD = torch.zeros_like(x_BTD, dtype=torch.float32)
        self.total_BT = x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.float32)
        self.running_BT = torch.ones_like(self.total_BT, dtype=torch.bool)
        self.cost_BT = torch.zeros_like(self.total_BT)  # layers run, and the remainder where it halted

    def take(self, layer: int, x_BTD: Tensor, probability_BT: Tensor) -> None:
        """Add the state after layer `layer` (from 0); `running_BT` then says which positions still run."""
        stops = self.running_BT & (self.total_BT + probability_BT >= self.threshold)
        if layer == self.num_layers - 1:
            stops = self.running_BT
        remainder_BT = 1.0 - self.total_BT
        weight_BT = torch.where(stops, remainder_BT, probability_BT) * self.running_BT
        self.output_BTD = self.output_BTD + weight_BT[..., None] * x_BTD
        self.cost_BT = self.cost_BT + self.running_BT + stops * remainder_BT
        self.total_BT = self.total_BT + weight_BT
        self.running_BT = self.running_BT & ~stops


# --- Reversible blocks


def run_reversibly(blocks: Sequence[nn.Module], x1_BTD: Tensor, x2_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Run two streams (at least float32) through the blocks; only the last pair is kept for the backward pass.

        y1 = x1 + attention(norm(x2))        x2 = y2 − feedforward(norm(y1))
        y2 = x2 + feedforward(norm(y1))      x1 = y1 − attention(norm(x2))
    """
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    dtype = torch.promote_types(x1_BTD.dtype, torch.float32)
    y1, y2 = _ReversibleStack.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        x1_BTD.to(dtype), x2_BTD.to(dtype), tuple(blocks), *parameters)
    return y1, y2


class _ReversibleStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, blocks: tuple[Any, ...], *parameters: Tensor) -> tuple[Tensor, Tensor]:
        device = x1.device.type
        ctx.blocks = blocks
        ctx.autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        with torch.no_grad():
            for block in blocks:
                x1 = x1 + block.attention_branch(x2)
                x2 = x2 + block.feedforward_branch(x1)
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y1: Tensor, grad_y2: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.saved_tensors
        device, enabled, dtype = ctx.autocast
        gradients: list[Tensor] = []
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            for block in reversed(ctx.blocks):
                y2, grad_y1, of_feedforward = _undo(block.feedforward_branch, block, y1, y2, grad_y1, grad_y2)
                y1, grad_y2, of_attention = _undo(block.attention_branch, block, y2, y1, grad_y2, grad_y1)
                gradients[:0] = [a + b for a, b in zip(of_attention, of_feedforward, strict=True)]
        return (grad_y1, grad_y2, None, *gradients)


def _undo(branch: Callable[[Tensor], Tensor], block: nn.Module, source: Tensor, target: Tensor, grad_source: Tensor,
          grad_target: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Undo one branch; return the old target, the gradient of the source, and those of the block's parameters (or 0)."""
    with torch.enable_grad():
        leaf = source.detach().requires_grad_()
        added = branch(leaf)
    found = torch.autograd.grad(added, [leaf, *block.parameters()], grad_target.to(added.dtype),
                                materialize_grads=True)
    return target - added.detach(), grad_source + found[0], found[1:]
