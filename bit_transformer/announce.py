"""One line each for data, model and plan, before anything that takes long: nobody waits in the dark."""

from __future__ import annotations

from collections.abc import Sequence

from bit_transformer.footprint import of_recipe, step_flops
from bit_transformer.data.loaders import SampleStore
from bit_transformer.recipes import Recipe

_CPU_FLOPS = 3e10  # of one core in float32, at best: an order of magnitude, to tell seconds from hours
_LONG_SECONDS = 10


class Announcer:
    """Talks on the main rank only."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main

    def data(self, recipe: Recipe, stores: Sequence[SampleStore]) -> None:
        """The texts are open."""
        told = ", ".join(f"{store.name} {store.num_samples:,} windows" for store in stores)
        self._say(f"data: {told} of {recipe.data.window_bytes} bytes, from {recipe.data.data_dir or 'memory'}")

    def model(self, recipe: Recipe, world_size: int, device: str) -> None:
        """The model is about to be built."""
        gigabytes = of_recipe(recipe, world_size).total / 1e9
        self._say(f"model: building {recipe.model.num_parameters:,} parameters on {device}, {recipe.mixed_precision} "
                  f"autocast, {recipe.sharding}; a rank will need about {gigabytes:.1f} GB")

    def plan(self, recipe: Recipe, world_size: int, device: str) -> None:
        """The model is there; what a step will cost."""
        flops = step_flops(recipe) / world_size
        line = (f"plan: {recipe.schedule.total_steps:,} steps of {recipe.data.batch_size} windows, "
                f"{flops / 1e12:.2g} TFLOP a step and rank")
        if device == "cpu" and flops / _CPU_FLOPS > _LONG_SECONDS:
            line += (f": one CPU core needs {_duration(flops / _CPU_FLOPS)} or more for each. A GPU, or a smaller batch "
                     f"(--set batch_size={world_size * recipe.accumulation_steps}), is the way out")
        self._say(line)

    def _say(self, line: str) -> None:
        if self._is_main:
            print(line)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
