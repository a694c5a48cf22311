"""Estimates the memory and compute of a run: `python -m bit_transformer.footprint --recipe baseline`.

Counted per rank: weights, gradients, optimizer state, averaged weights, and what the forward pass keeps for the backward
pass. `measure_room` compares the sum with the free memory before the model is built; `Announcer` prints the size of data,
model and plan at the start of a launch.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from bit_transformer.data.bits import BITS_PER_BYTE
from bit_transformer.data.loaders import SampleStore
from bit_transformer.errors import BadRecipe, TrainerError, print_error
from bit_transformer.model.conversion import grown_config
from bit_transformer.model.transformer import ModelConfig
from bit_transformer.recipes import Recipe, find_recipe, with_settings
from chronicle.preflight import available_memory

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
DEVICES_GB = {"24 GB": 24, "40 GB": 40, "80 GB": 80, "141 GB": 141}
_USABLE = 0.9  # of a device; the rest is the driver, its libraries and fragmentation
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
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations

    def fits(self, gigabytes: float) -> bool:
        """Whether it fits a device of so many gigabytes (10⁹) with a tenth left free."""
        return self.total <= gigabytes * 1e9 * _USABLE


def footprint(config: ModelConfig, *, sharding: str, world_size: int, micro_batch: int, positions: int,
              bf16: bool, averaged: bool = False) -> Footprint:
    """Return what one rank of `world_size` holds while it trains on `micro_batch` windows of `positions` symbols."""
    if sharding not in SHARDINGS:
        raise BadRecipe(f"sharding is `{sharding}`, expected one of {', '.join(SHARDINGS)}")
    count = config.num_parameters
    part = -(-count // world_size)
    cut_weights, cut_gradients = sharding in ("zero3", "fsdp2"), sharding in ("zero2", "zero3", "fsdp2")
    own_copy = sharding in ("zero1", "zero2")  # DeepSpeed updates a copy of its part; stage 3 updates the part itself
    buffers = (2 * count if bf16 else 0) + (_FLOAT * count if sharding == "ddp" and world_size > 1 else 0)
    buffers += _FLOAT * count if averaged else 0
    if cut_weights:
        # a block's weights, and its gradients before they are sharded
        buffers = 2 * _FLOAT * (count // max(1, config.num_layers))
    return Footprint(
        weights=_FLOAT * (part if cut_weights else count), gradients=_FLOAT * (part if cut_gradients else count),
        optimizer=_FLOAT * ((2 + own_copy) * (count if sharding == "ddp" else part)), buffers=buffers,
        activations=activation_bytes(config, micro_batch=micro_batch, positions=positions, bf16=bf16))


def activation_bytes(config: ModelConfig, *, micro_batch: int, positions: int, bf16: bool) -> int:
    """Return the peak bytes kept for the backward pass; with recomputation, one layer on top of what is kept."""
    kept, small = config.num_layers, 2 if bf16 else _FLOAT
    d, ff = config.d_model, config.d_ff
    # a layer keeps: two streams, norm statistics and log-sum-exps in float32; two normed inputs, q, k, v and their mix,
    # the feed-forward before and after its non-linearity
    layer = _FLOAT * (2 * d + 4 + config.num_heads) + small * (6 * d + 2 * ff)
    ends = _FLOAT * (d + 2) + small * d + _FLOAT * (2 * config.vocab)
    stream = _FLOAT * d
    if config.reversible:
        pairs = kept if config.act else 1  # halting reads the streams after every layer
        layers = 2 * stream * pairs + 4 * stream + layer  # the rebuilt pair, its gradients, one active layer
    elif config.checkpointing:
        layers = stream * kept + layer
    else:
        layers = layer * kept
    halting = kept * (2 * stream + 8 * _FLOAT) if config.act else 0
    return micro_batch * positions * (layers + ends + halting)


def flops_per_symbol(config: ModelConfig, positions: int) -> float:
    """Return the FLOPs of training on one position, forward and backward: 6 × matrix elements plus causal attention.

    Recomputation is not counted.
    """
    d = config.d_model
    matrices = config.num_layers * (4 * d * d + 2 * d * config.d_ff) + d * config.vocab
    return 6 * (matrices + config.num_layers * d * (positions + 1))


def step_flops(recipe: Recipe) -> float:
    """Return the FLOPs of one optimizer step over all ranks."""
    symbols = recipe.data.window_bytes * (BITS_PER_BYTE if recipe.model.vocab == 2 else 1)
    return recipe.data.batch_size * symbols * flops_per_symbol(recipe.model, symbols)


def of_recipe(recipe: Recipe, world_size: int) -> Footprint:
    """Return the footprint of a rank of this recipe after all its growths."""
    symbols = recipe.data.window_bytes * (BITS_PER_BYTE if recipe.model.vocab == 2 else 1)
    micro_batch = -(-recipe.data.batch_size // (world_size * recipe.accumulation_steps))
    return footprint(grown_config(recipe.model, recipe.growth), sharding=recipe.sharding, world_size=world_size,
                     positions=symbols, micro_batch=micro_batch, bf16=recipe.mixed_precision == "bf16",
                     averaged=bool(recipe.ema_decay))


def format_footprint(rows: Iterable[tuple[str, Footprint]]) -> list[str]:
    """Return a table in gigabytes (10⁹), and on which devices each row fits."""
    lines = [f"{'':<22}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'buffers':>9}{'activations':>13}{'GB a rank':>11}"
             "  fits"]
    for name, one in rows:
        fits = [device for device, gigabytes in DEVICES_GB.items() if one.fits(gigabytes)]
        parts = (one.weights, one.gradients, one.optimizer, one.buffers, one.activations, one.total)
        numbers = "".join(f"{value / 1e9:>{width}.2f}" for value, width in zip(parts, (9, 11, 11, 9, 13, 11), strict=True))
        lines.append(f"{name:<22}{numbers}  {'from ' + fits[0] if fits else 'none of ' + ', '.join(DEVICES_GB)}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a recipe for every sharding and number of ranks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bit_transformer.footprint", allow_abbrev=False)
    parser.add_argument("--recipe", default="baseline", help="name of a recipe (a function in recipes.py)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one field of the recipe")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8], help="numbers of ranks to show")
    options = parser.parse_args(argv)
    try:
        recipe = with_settings(find_recipe(options.recipe), options.set)
        rows = [(f"{sharding}, {ranks} {'rank' if ranks == 1 else 'ranks'}",
                 of_recipe(with_settings(recipe, [f"sharding={sharding}", "ema_decay=0", "export=()", "qat_from_step=none",
                                                  "growth=()"]), ranks))
                for ranks in options.ranks for sharding in SHARDINGS if ranks > 1 or sharding == "ddp"]
    except TrainerError as problem:
        print_error(problem)
        return 1
    print(f"{recipe.name}: {recipe.model.num_parameters:,} parameters, batch {recipe.data.batch_size} windows of "
          f"{recipe.data.window_bytes} bytes in {recipe.accumulation_steps} parts, precision {recipe.mixed_precision}")
    print("\n".join(format_footprint(rows)))
    return 0


# --- Free memory, and the settings that would fit

_WHOLE = ("ema_decay=0", "export=()", "qat_from_step=none", "growth=()")  # features that need whole parameters
_MOST_RANKS, _MOST_WAYS = 64, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that a rank needs, the free memory of each rank, and settings that would fit."""

    needed: Footprint
    free_by_rank: tuple[int | None, ...]
    ways: tuple[str, ...]

    @property
    def parts(self) -> dict[str, int]:
        """The needed bytes by part; empty parts are left out."""
        return {name: size for name, size in asdict(self.needed).items() if size}


def measure_room(accelerator: Any, recipe: Recipe) -> Room:
    """Gather the free memory of every rank; CPU ranks of one host share its memory equally. Collective."""
    device, host = accelerator.device, socket.gethostname()
    told = gather_object([(host, device.type, _free(device))])
    sharers = Counter(where for where, kind, _ in told if kind == "cpu")
    free = tuple(bytes_free // sharers[where] if bytes_free is not None and kind == "cpu" else bytes_free
                 for where, kind, bytes_free in told)
    known = [one for one in free if one is not None]
    ways = tuple(list_ways(recipe, len(told), min(known), own_memory=device.type != "cpu")) if known else ()
    return Room(needed=of_recipe(recipe, len(told)), free_by_rank=free, ways=ways)


def list_ways(recipe: Recipe, world_size: int, free: int, *, own_memory: bool) -> Iterator[str]:
    """Yield up to three changes of settings with which a rank fits `free` bytes; none where it fits already.

    `own_memory` is True where another rank brings its own memory, as a GPU does.
    """
    if of_recipe(recipe, world_size).fits(free / 1e9):
        return
    found = 0
    for settings, ranks in _candidates(recipe, world_size, own_memory):
        try:
            changed = with_settings(recipe, settings)
            changed.require_divisible(ranks)
        except BadRecipe:
            continue
        if of_recipe(changed, ranks).fits(free / 1e9):
            words = " ".join(f"--set {one}" for one in settings if one not in _WHOLE)
            yield words + (f" on {ranks} ranks" if ranks != world_size else "")
            found += 1
        if found == _MOST_WAYS:
            return


def _candidates(recipe: Recipe, world_size: int, own_memory: bool) -> Iterator[tuple[tuple[str, ...], int]]:
    recompute = () if recipe.model.reversible or recipe.model.checkpointing else ("model.checkpointing=true",)
    smallest = (f"accumulation_steps={max(1, recipe.data.batch_size // world_size)}",)
    yield recompute, world_size
    yield smallest, world_size
    yield (*recompute, *smallest), world_size
    sizes = [world_size] if world_size > 1 else []
    while own_memory and (not sizes or sizes[-1] < _MOST_RANKS):
        sizes.append(2 * (sizes[-1] if sizes else world_size))
    sharded = (*_WHOLE, "model.reversible=false", "model.checkpointing=true")
    for ranks in sizes:
        for sharding in ("zero2", "fsdp2", "zero3"):
            yield (f"sharding={sharding}", *sharded), ranks


def _free(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


# --- Lines printed before the first step

_CPU_FLOPS = 3e10  # of one core in float32 at best: enough to tell seconds from hours
_LONG_SECONDS = 10


class Announcer:
    """Prints one line each on data, model and plan before anything slow starts. Only the main rank prints."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main

    def data(self, recipe: Recipe, stores: Sequence[SampleStore]) -> None:
        """Print the sizes of the opened sources."""
        told = ", ".join(f"{store.name} {store.num_samples:,} windows" for store in stores)
        self._say(f"data: {told} of {recipe.data.window_bytes} bytes, from {recipe.data.data_dir or 'memory'}")

    def model(self, recipe: Recipe, world_size: int, device: str) -> None:
        """Print the size of the model that is about to be built."""
        gigabytes = of_recipe(recipe, world_size).total / 1e9
        self._say(f"model: building {recipe.model.num_parameters:,} parameters on {device}, {recipe.mixed_precision} "
                  f"autocast, {recipe.sharding}; a rank will need about {gigabytes:.1f} GB")

    def plan(self, recipe: Recipe, world_size: int, device: str) -> None:
        """Print what a step will cost."""
        flops = step_flops(recipe) / world_size
        line = (f"plan: {recipe.schedule.total_steps:,} steps of {recipe.data.batch_size} windows, "
                f"{flops / 1e12:.2g} TFLOP a step and rank")
        if device == "cpu" and flops / _CPU_FLOPS > _LONG_SECONDS:
            line += (f": one CPU core needs {_duration(flops / _CPU_FLOPS)} or more for each. Use a GPU or a smaller batch "
                     f"(--set batch_size={world_size * recipe.accumulation_steps})")
        self._say(line)

    def _say(self, line: str) -> None:
        if self._is_main:
            print(line)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
