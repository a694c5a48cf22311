"""Growing a trained model without losing what it knows.

Depth: new blocks whose branches end in zeros, so that they add nothing at first (pre-norm). Width: channels doubled so
that every activation appears twice: what reads two copies is halved, what a normalisation sees has the same mean and
variance, hence the same function up to rounding. Both need the pre-norm model. After each growth the LR is multiplied by
1/√2 and warmed up over 100 steps; the optimizer starts anew, and that is said. The training loop grows at a plateau
(`Recipe.growth` names what, one after the other), and a resume builds the model as grown as its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bit_transformer.errors import BadRecipe
from bit_transformer.model.transformer import BitTransformer, Block, ModelConfig, copy_model

LR_FACTOR = 1 / math.sqrt(2)
WARMUP_STEPS = 100


KINDS = ("depth", "width")


def grow(model: BitTransformer, kind: str) -> BitTransformer:
    """Return the model with twice the layers (`depth`) or twice the channels, heads and hidden units (`width`)."""
    return grow_depth(model, 2 * model.config.num_layers) if kind == "depth" else grow_width(model)


def grown_config(config: ModelConfig, kinds: Sequence[str]) -> ModelConfig:
    """Return the shape after these growths."""
    for kind in kinds:
        config = (replace(config, num_layers=2 * config.num_layers) if kind == "depth" else
                  replace(config, d_model=2 * config.d_model, num_heads=2 * config.num_heads, d_ff=2 * config.d_ff))
    return config


def build_grown(config: ModelConfig, kinds: Sequence[str]) -> BitTransformer:
    """Return an untrained model of the shape after these growths, to load a checkpoint into.

    Positions are no parameters and are not saved: a doubled width repeats those of the first shape.
    """
    model = BitTransformer(grown_config(config, kinds))
    table = BitTransformer(config).positions if kinds else model.positions
    model.positions.copy_(table.repeat(1, model.config.d_model // config.d_model))
    return model


def grow_depth(model: BitTransformer, num_layers: int) -> BitTransformer:
    """Return the model with new blocks at the end that add nothing yet. Raises BadRecipe where that is not possible."""
    config = model.config
    if config.norm != "pre" or config.act or num_layers < config.num_layers:
        raise BadRecipe(f"cannot grow from {config.num_layers} to {num_layers} layers: expected more layers, norm=pre, no ACT")
    result = copy_model(model)
    result.config = replace(config, num_layers=num_layers)
    for _ in range(num_layers - config.num_layers):
        block = Block(result.config)
        for last in (block.attention.out_proj, block.feedforward[2]):
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        result.blocks.append(block.to(next(model.parameters()).device))
    return result


@torch.no_grad()
def grow_width(model: BitTransformer) -> BitTransformer:
    """Return the model with twice the channels, heads and feed-forward width, computing the same function.

    Every channel appears twice in the stream, every head twice, every hidden unit twice. Positions stay what they were.
    """
    config = model.config
    if config.norm != "pre" or config.act:
        raise BadRecipe("cannot grow in width: expected norm=pre and no ACT")
    wide = replace(config, d_model=2 * config.d_model, num_heads=2 * config.num_heads, d_ff=2 * config.d_ff)
    result = BitTransformer(wide).to(next(model.parameters()).device)
    result.positions.copy_(torch.cat([model.positions] * 2, -1))
    old = model.state_dict()
    new: dict[str, Tensor] = {}
    for name, value in old.items():
        if name == "embedding.weight":
            new[name] = torch.cat([value, value], 1)
        elif name == "head.weight":
            new[name] = torch.cat([value, value], 1) / 2
        elif name == "head.bias":
            new[name] = value
        elif "in_proj" in name:  # query, key and value each twice, so that the first half of the heads is the old ones
            parts = [torch.cat([part, part]) for part in value.chunk(3)]
            new[name] = torch.cat([torch.cat([part, part], 1) / 2 if value.dim() == 2 else part for part in parts])
        elif value.dim() == 2:
            new[name] = torch.cat([torch.cat([value, value]), torch.cat([value, value])], 1) / 2
        else:
            new[name] = torch.cat([value, value])
    result.load_state_dict(new)
    return result
