"""The memory and arithmetic that a rank of a recipe needs, and the free memory it finds, before the model is built.

Counted per rank: weights, gradients, optimizer state, averaged weights, and what the forward pass keeps for the backward
pass. The formula for activations was compared with autograd (a test), the sum with the peak on a GPU (docs/results).
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from bit_transformer.model.conversion import grown_config
from bit_transformer.model.transformer import ModelConfig
from bit_transformer.recipes import Recipe
from chronicle.preflight import available_memory

_FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank. `buffers` are DDP's copy of the gradients, autocast's copy of the weights and the averaged
    weights; with sharded weights, the one block that is gathered at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())


def footprint(config: ModelConfig, *, sharding: str, world_size: int, micro_batch: int, positions: int,
              bf16: bool, averaged: bool = False) -> Footprint:
    """Return what one rank of `world_size` holds while it trains on `micro_batch` windows of `positions` symbols."""
    count = config.num_parameters
    part = math.ceil(count / world_size)
    weights = gradients = moments = count
    num_moments, buffers = 2, 0
    if bf16:
        buffers += 2 * count
    if averaged:
        buffers += _FLOAT * count
    if sharding == "ddp" and world_size > 1:
        buffers += _FLOAT * count
    if sharding != "ddp":
        moments = part
    if sharding in ("zero1", "zero2"):
        num_moments = 3  # DeepSpeed updates a copy of its part; stage 3 updates the part itself
    if sharding in ("zero2", "zero3", "fsdp2"):
        gradients = part
    if sharding in ("zero3", "fsdp2"):
        weights = part
        buffers = 2 * _FLOAT * (count // config.num_layers)  # a block's weights, and its gradients before they are sharded
    activations = activation_bytes(config, micro_batch=micro_batch, positions=positions, bf16=bf16)
    return Footprint(weights=_FLOAT * weights, gradients=_FLOAT * gradients, optimizer=_FLOAT * num_moments * moments,
                     buffers=buffers, activations=activations)


def activation_bytes(config: ModelConfig, *, micro_batch: int, positions: int, bf16: bool) -> int:
    """Return the peak bytes kept for the backward pass; with recomputation, one layer on top of what is kept."""
    num_layers, small = config.num_layers, 2 if bf16 else _FLOAT
    d, ff = config.d_model, config.d_ff
    # a layer keeps: two streams, norm statistics and log-sum-exps in float32; two normed inputs, q, k, v and their mix,
    # the feed-forward before and after its non-linearity
    layer = _FLOAT * (2 * d + 4 + config.num_heads) + small * (6 * d + 2 * ff)
    ends = _FLOAT * (d + 2) + small * d + _FLOAT * (2 * config.vocab)
    stream = _FLOAT * d
    if config.reversible:
        pairs = num_layers if config.act else 1  # halting reads the streams after every layer
        layers = 2 * stream * pairs + 4 * stream + layer  # the rebuilt pair, its gradients, one active layer
    elif config.checkpointing:
        layers = stream * num_layers + layer
    else:
        layers = layer * num_layers
    halting = num_layers * (2 * stream + 8 * _FLOAT) if config.act else 0
    return micro_batch * positions * (layers + ends + halting)


def of_recipe(recipe: Recipe, world_size: int) -> Footprint:
    """Return the footprint of a rank of this recipe after all its growths."""
    micro_batch = math.ceil(recipe.data.batch_size / (world_size * recipe.accumulation_steps))
    return footprint(grown_config(recipe.model, recipe.growth), sharding=recipe.sharding, world_size=world_size,
                     positions=recipe.window_symbols, micro_batch=micro_batch, bf16=recipe.mixed_precision == "bf16",
                     averaged=bool(recipe.ema_decay))


def step_flops(recipe: Recipe) -> float:
    """Return the FLOPs of one optimizer step over all ranks: 6 × matrix elements plus causal attention, nothing twice."""
    d, num_layers, symbols = recipe.model.d_model, recipe.model.num_layers, recipe.window_symbols
    matrices = num_layers * (4 * d * d + 2 * d * recipe.model.d_ff) + d * recipe.model.vocab
    return recipe.data.batch_size * symbols * 6 * (matrices + num_layers * d * (symbols + 1))


# --- Free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that a rank needs, and the free memory of each rank."""

    needed: Footprint
    free_by_rank: tuple[int | None, ...]

    @property
    def parts(self) -> dict[str, int]:
        """The needed bytes by part; empty parts are left out."""
        return {name: size for name, size in asdict(self.needed).items() if size}


def measure_room(accelerator: Any, recipe: Recipe) -> Room:
    """Gather the free memory of every rank; CPU ranks of one host share its memory equally. Collective."""
    device = accelerator.device
    is_cpu = device.type != "cuda"
    own = available_memory() if is_cpu else int(torch.cuda.mem_get_info(device)[0])
    told = gather_object([(socket.gethostname(), own)])
    sharers = Counter(host for host, _ in told)
    free = [size if size is None or not is_cpu else size // sharers[host] for host, size in told]
    return Room(needed=of_recipe(recipe, len(told)), free_by_rank=tuple(free))
