"""Whether a rank has the memory that its recipe needs, asked before the model is built, and what would fit instead."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from bit_transformer.errors import BadRecipe
from bit_transformer.footprint import Footprint, of_recipe
from bit_transformer.recipes import Recipe, with_settings
from chronicle.preflight import available_memory

_WHOLE = ("ema_decay=0", "export=()", "qat_from_step=none", "growth=()")  # what sharded parameters cannot do
_MOST_RANKS, _MOST_WAYS = 64, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a rank will need by the footprint's arithmetic, what each rank has, and the changes that would fit."""

    needed: Footprint
    free_by_rank: tuple[int | None, ...]
    ways: tuple[str, ...]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for; nothing where a part is nothing."""
        return {name: size for name, size in asdict(self.needed).items() if size}


def measure_room(accelerator: Any, recipe: Recipe) -> Room:
    """Ask every rank; the ranks of a host that train on its CPUs share its memory equally."""
    device, host = accelerator.device, socket.gethostname()
    told = gather_object([(host, device.type, _free(device))])
    sharers = Counter(where for where, kind, _ in told if kind == "cpu")
    free = tuple(bytes_free // sharers[where] if bytes_free is not None and kind == "cpu" else bytes_free
                 for where, kind, bytes_free in told)
    known = [one for one in free if one is not None]
    ways = tuple(list_ways(recipe, len(told), min(known), own_memory=device.type != "cpu")) if known else ()
    return Room(needed=of_recipe(recipe, len(told)), free_by_rank=free, ways=ways)


def list_ways(recipe: Recipe, world_size: int, free: int, *, own_memory: bool) -> Iterator[str]:
    """Yield up to three changes with which a rank fits into `free` bytes, a tenth left; nothing where it fits as it is.

    `own_memory`: another rank brings memory of its own, as a GPU does.
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
