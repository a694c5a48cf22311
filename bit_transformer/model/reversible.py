"""Reversible blocks: two full-width streams, nothing kept for the backward pass but the last pair.

    y1 = x1 + attention(norm(x2))        x2 = y2 − feedforward(norm(y1))
    y2 = x2 + feedforward(norm(y1))      x1 = y1 − attention(norm(x2))

Gomez et al. 2017 (RevNet), Kitaev et al. 2020 (Reformer). The backward pass rebuilds each block's input from its output
and differentiates the block alone. Streams stay in float32: rebuilding in bf16 costs 2e-2 relative gradient error.
Parameters are arguments of the function, so that DDP sees their gradients like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class ReversibleBlock(Protocol):
    """What a block must offer: its two branches, each from one stream to what is added to the other."""

    def attention_branch(self, x_BTD: Tensor) -> Tensor:
        """Return what is added to the first stream."""

    def feedforward_branch(self, x_BTD: Tensor) -> Tensor:
        """Return what is added to the second stream."""


def run_reversibly(blocks: Sequence[nn.Module], x1_BTD: Tensor, x2_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Run the streams (at least float32) through the blocks, keeping one pair of tensors whatever the depth."""
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
        gradients: list[tuple[Tensor | None, ...]] = []
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            for block in reversed(ctx.blocks):
                y2, grad_y1, of_feedforward = _undo(block.feedforward_branch, block, y1, y2, grad_y1, grad_y2)
                y1, grad_y2, of_attention = _undo(block.attention_branch, block, y2, y1, grad_y2, grad_y1)
                gradients.append(tuple(_add(a, b) for a, b in zip(of_attention, of_feedforward, strict=True)))
        return (grad_y1, grad_y2, None, *(g for block in reversed(gradients) for g in block))


def _undo(branch: Callable[[Tensor], Tensor], block: nn.Module, source: Tensor, target: Tensor, grad_source: Tensor,
          grad_target: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Take the branch of `source` out of `target`; return the old target, the source's gradient, the parameters'."""
    with torch.enable_grad():
        leaf = source.detach().requires_grad_()
        added = branch(leaf)
    found = torch.autograd.grad(added, [leaf, *block.parameters()], grad_target.to(added.dtype), allow_unused=True)
    return target - added.detach(), grad_source + found[0], found[1:]


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other
