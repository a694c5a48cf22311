"""Smaller models for the CPU: INT8 linear layers, and 4-bit training that knows it will be quantised.

INT8: weights are stored as int8 with one scale a row; activations are quantised per row at run time, products add up in
int32 (`torch._int_mm` where it exists for the device). Own code, because torch's `quantize_dynamic` says of itself that
it will be removed. Four bits: two weights in a byte. QAT: weights and activations pass through a 4-bit fake quantiser
with a straight-through gradient (0…15, one affine scale a tensor), so that what is exported has been trained for it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bit_transformer.model.transformer import BitTransformer

_MIN_INT_MM_ROWS = 17  # torch._int_mm wants more than 16


class Int8Linear(nn.Module):
    """`y = x Wᵀ + b` with W in int8: a quarter of the bytes, inference only."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=1e-8) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in float32."""
        rows = x.float().flatten(0, -2)
        row_scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        quantised = (rows / row_scale).round().to(torch.int8)
        if len(rows) >= _MIN_INT_MM_ROWS:
            product = torch._int_mm(quantised, self.weight.t()).float()
        else:
            product = quantised.float() @ self.weight.float().t()
        y = product * row_scale * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1)


class FakeQuantise4(torch.autograd.Function):
    """Round to sixteen levels between the tensor's least and greatest value; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        low, high = x.detach().amin(), x.detach().amax()
        scale = ((high - low) / 15).clamp(min=1e-8)
        return ((x - low) / scale).round().clamp(0, 15) * scale + low

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Int4Linear(nn.Module):
    """What a `QatLinear` computes, with two weights in a byte: an eighth of the bytes, inference only."""

    packed: Tensor
    scale: Tensor
    low: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        weight = linear.weight.detach().float()
        low = weight.amin()
        scale = ((weight.amax() - low) / 15).clamp(min=1e-8)
        levels = ((weight - low) / scale).round().clamp(0, 15).to(torch.uint8).flatten()
        levels = F.pad(levels, (0, levels.numel() % 2))
        self.register_buffer("packed", levels[::2] << 4 | levels[1::2])
        self.register_buffer("scale", scale)
        self.register_buffer("low", low)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of the unpacked weights with the input in sixteen levels, in float32."""
        levels = torch.stack([self.packed >> 4, self.packed & 15], 1).flatten()[: self.shape[0] * self.shape[1]]
        weight = levels.view(self.shape).float() * self.scale + self.low
        return F.linear(FakeQuantise4.apply(x.float()), weight, self.bias)  # type: ignore[no-untyped-call]


class QatLinear(nn.Linear):
    """A linear layer that trains with its weight and its input quantised to four bits while `active`."""

    active = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of the quantised values."""
        if not self.active:
            return super().forward(x)
        weight = FakeQuantise4.apply(self.weight)  # type: ignore[no-untyped-call]
        return F.linear(FakeQuantise4.apply(x), weight, self.bias)  # type: ignore[no-untyped-call]


def prepare_qat(model: BitTransformer) -> BitTransformer:
    """Return a copy whose linear layers train with four-bit fake quantisation; the head stays exact."""
    result = copy.deepcopy(model)
    for parent, name, linear in _linears(result):
        if linear is result.head:
            continue
        layer = QatLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.load_state_dict(linear.state_dict())
        setattr(parent, name, layer)
    return result


def set_qat(model: nn.Module, active: bool) -> None:
    """Switch the fake quantisers of a prepared model on or off: weights and names stay what they are."""
    for layer in model.modules():
        if isinstance(layer, QatLinear):
            layer.active = active


def convert_qat(model: BitTransformer) -> BitTransformer:
    """Return a copy whose four-bit layers hold the rounded weights, as ordinary layers to be exported to INT8."""
    result = copy.deepcopy(model)
    for parent, name, layer in _linears(result):
        if isinstance(layer, QatLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            rounded = FakeQuantise4.apply(layer.weight.detach())  # type: ignore[no-untyped-call]
            linear.load_state_dict({**layer.state_dict(), "weight": rounded})
            setattr(parent, name, linear)
    return result


def export_int8(model: BitTransformer) -> BitTransformer:
    """Return a copy for inference whose linear layers, the head excepted, are `Int8Linear`. Reversible blocks run plainly."""
    result = copy.deepcopy(model).eval()
    for parent, name, linear in _linears(result):
        if linear is not result.head:
            setattr(parent, name, Int8Linear(linear))
    return result


def export_int4(model: BitTransformer) -> BitTransformer:
    """Return a copy for inference whose linear layers, the head excepted, are `Int4Linear`."""
    result = copy.deepcopy(model).eval()
    for parent, name, linear in _linears(result):
        if linear is not result.head:
            setattr(parent, name, Int4Linear(linear))
    return result


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and saved buffers."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values() if isinstance(value, Tensor))


def _linears(model: BitTransformer) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
            if isinstance(child, nn.Linear)]
