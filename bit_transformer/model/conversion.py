"""Models made from a trained one: quantised to eight bits, trained for four, or grown in depth or width."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bit_transformer.errors import BadRecipe
from bit_transformer.model.transformer import BitTransformer, ModelConfig


class Int8Linear(nn.Module):
    """`y = x Wᵀ + b` with W in int8 and one scale per row: a quarter of the bytes, inference only.

    Activations are quantised per row at run time; products are summed in int32.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        if isinstance(linear, QatLinear) and linear.active:  # it was trained with this rounding
            weight = quantise_4(weight)
        scale = weight.abs().amax(1).clamp(min=1e-8) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in float32."""
        rows = x.float().flatten(0, -2)
        row_scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        quantised = (rows / row_scale).round().to(torch.int8)
        few = max(0, 17 - len(rows))  # the kernel needs more than 16 rows
        product = torch._int_mm(F.pad(quantised, (0, 0, 0, few)), self.weight.t())[:len(rows)]
        y = product * row_scale * self.scale + self.bias
        return y.view(*x.shape[:-1], -1)


@torch.no_grad()
def quantise_4(x: Tensor, dim: int | None = None) -> Tensor:
    """Round to sixteen levels between minimum and maximum: of the whole tensor, or of each position along `dim`."""
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8)
    return ((x - low) / scale).round().clamp(0, 15) * scale + low


class QatLinear(nn.Linear):
    """A linear layer that trains with its weight and its input quantised to four bits while `active`.

    The gradient passes unchanged. Inputs have a range for each position: one over the whole tensor would tell a position
    what comes after it, and what else is in the batch.
    """

    active = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of the quantised values."""
        if not self.active:
            return super().forward(x)
        rounded = x + (quantise_4(x, -1) - x).detach()
        return F.linear(rounded, self.weight + (quantise_4(self.weight) - self.weight).detach(), self.bias)


def prepare_qat(model: BitTransformer) -> BitTransformer:
    """Return a copy whose linear layers train with four-bit fake quantisation; the head stays exact."""

    def layer_of(linear: nn.Linear) -> QatLinear:
        layer = QatLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.load_state_dict(linear.state_dict())
        return layer

    return _with_layers(model, layer_of)


def set_qat(model: nn.Module, active: bool) -> None:
    """Switch the fake quantisers of a prepared model on or off; weights and names do not change."""
    for layer in model.modules():
        if isinstance(layer, QatLinear):
            layer.active = active


def export_int8(model: BitTransformer) -> BitTransformer:
    """Return a copy for inference whose linear layers, the head excepted, are `Int8Linear`."""
    return _with_layers(model, Int8Linear).eval()


def _with_layers(model: BitTransformer, layer_of: Callable[[nn.Linear], nn.Module]) -> BitTransformer:
    result = copy.deepcopy(model)
    found = [(parent, name, child) for parent in result.modules() for name, child in parent.named_children()]
    for parent, name, child in found:
        if isinstance(child, nn.Linear) and child is not result.head:
            setattr(parent, name, layer_of(child))
    return result


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and saved buffers."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


# --- Growth in depth and width

GROWTH_LR_FACTOR = 1 / math.sqrt(2)
GROWTH_WARMUP_STEPS = 100


def grown_config(config: ModelConfig, kinds: Sequence[str]) -> ModelConfig:
    """Return the shape after these growths."""
    for kind in kinds:
        if kind == "depth":
            config = replace(config, num_layers=2 * config.num_layers)
        else:
            config = replace(config, d_model=2 * config.d_model, num_heads=2 * config.num_heads, d_ff=2 * config.d_ff)
    return config


def build_grown(config: ModelConfig, kinds: Sequence[str]) -> BitTransformer:
    """Return an untrained model of the shape after these growths, to load a checkpoint into.

    Positions are not saved; a doubled width repeats the positions of the first shape.
    """
    model = BitTransformer(grown_config(config, kinds))
    table = BitTransformer(config).positions if kinds else model.positions
    model.positions.copy_(table.repeat(1, model.config.d_model // config.d_model))
    return model


@torch.no_grad()
def grow(model: BitTransformer, kind: str) -> BitTransformer:
    """Return the model with twice the layers (`depth`) or twice the channels, heads and hidden units (`width`).

    It computes the same function: new blocks end in zeros. In width every channel, head and hidden unit appears twice, and a
    matrix reads both copies: one through W/2 + E, the other through W/2 − E, with E drawn once for each row. E cancels while
    the copies are equal, and gives them different gradients, so that they part in the first step; with equal halves they would
    stay equal for ever. The draws are the same on every rank and after a restart. Raises BadRecipe for a model that is
    post-norm or uses ACT.
    """
    if model.config.norm != "pre" or model.config.act:
        raise BadRecipe(f"cannot grow in {kind}: expected norm=pre and no ACT")
    result = BitTransformer(grown_config(model.config, (kind,))).to(next(model.parameters()).device)
    result.positions.copy_(model.positions.repeat(1, result.config.d_model // model.config.d_model))
    if kind == "width":
        result.load_state_dict(_widened(model.state_dict(), result.config.d_model))
        return result
    result.load_state_dict(model.state_dict(), strict=False)
    for block in list(result.blocks)[model.config.num_layers:]:
        for name, value in block.named_parameters():
            if name.startswith(("attention.out_proj", "feedforward.2")):
                value.zero_()
    return result


def _widened(old: dict[str, Tensor], d_model: int) -> dict[str, Tensor]:
    new: dict[str, Tensor] = {}
    draws = torch.Generator().manual_seed(d_model)
    for name, value in old.items():
        if name == "embedding.weight":
            new[name] = torch.cat([value, value], 1)
        elif name == "head.weight":
            new[name] = _read_both(value, draws)
        elif name == "head.bias":
            new[name] = value
        elif "in_proj" in name:  # query, key and value each twice, so that the first half of the heads are the old ones
            parts = [torch.cat([part, part]) for part in value.chunk(3)]
            if value.dim() == 2:
                parts = [_read_both(part, draws) for part in parts]
            new[name] = torch.cat(parts)
        elif value.dim() == 2:
            new[name] = _read_both(torch.cat([value, value]), draws)
        else:
            new[name] = torch.cat([value, value])
    return new


def _read_both(weight: Tensor, draws: torch.Generator) -> Tensor:
    """Return a matrix that reads two equal copies of its input: [W/2 + E, W/2 − E], E as large as W/2."""
    noise = torch.randn(weight.shape, generator=draws).to(weight) * (weight.std() / 2)
    return torch.cat([weight / 2 + noise, weight / 2 - noise], 1)
