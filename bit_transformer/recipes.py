"""Recipes: one function each, returning the whole configuration of a training run.

Recipes are frozen and checked when they are made; `with_settings` (`--set optimizer.lr=0.01`) returns a changed copy. A
field is explained where it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from bit_transformer.config import Amount, BelowOne, Count, Positive, Share, Size, require_fields
from bit_transformer.data.bits import BITS_PER_BYTE
from bit_transformer.errors import BadRecipe
from bit_transformer.evaluation.gate import GateConfig
from bit_transformer.model.transformer import ModelConfig
from bit_transformer.training.schedule import ScheduleConfig, cosine_ramp


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Mixture, window and batch. `batch_size` is the global batch of one optimizer step in windows.

    `data_dir` is a folder or URL of built sources (`chronicle data build`); None reads the texts into memory. A window that
    run-length coding makes longer stays as it is; with `compress_longer` it is coded and cut all the same.
    """

    sources: dict[str, Count]
    window_bytes: Count
    batch_size: Count
    seed: int = 0
    num_workers: Size = 0
    data_dir: str | None = None
    compress_end: Share = 0.0
    compress_ramp_steps: Size = 0
    compress_longer: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        if not self.sources:
            raise BadRecipe("sources is empty, expected one source or more, such as {'code': 7, 'reference': 3}")

    def compress_probability(self, step: int) -> float:
        """Return the share of windows fed in run-length form at `step`: a cosine ramp from 0 to `compress_end`."""
        return cosine_ramp(step, start=0.0, end=self.compress_end, total_steps=self.compress_ramp_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW; weight decay on matrices only; gradients clipped to `max_grad_norm`.

    With `muon_lr` above 0 the matrices of the blocks have Muon at that LR, and AdamW keeps the rest.
    """

    lr: Positive
    muon_lr: Amount = 0.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    weight_decay: Amount = 0.1
    max_grad_norm: Positive = 1.0

    def __post_init__(self) -> None:
        require_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run. Steps are optimizer steps."""

    name: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint_every: Count
    eval_every: Count
    eval_windows: Count
    log_every: Count = 10
    summary: bool = True
    compile: bool = False
    accumulation_steps: Count = 1
    mixed_precision: Literal["no", "bf16"] = "no"
    sharding: Literal["ddp", "zero1", "zero2", "zero3"] = "ddp"
    ponder_weight: Amount = 0.01
    device: Literal["cpu", "auto"] = "cpu"
    seed: int = 0
    gate: GateConfig = field(default_factory=GateConfig)
    growth: tuple[Literal["depth", "width"], ...] = ()
    qat_from_step: Size | None = None
    export: bool = False
    min_bytes_per_parameter: Amount = 0.0

    def __post_init__(self) -> None:
        require_fields(self)
        if self.window_symbols > self.model.max_bits:
            raise BadRecipe(f"a window of {self.data.window_bytes} bytes has {self.window_symbols} symbols, model.max_bits is "
                            f"{self.model.max_bits}")
        if self.model.vocab != 2 and self.data.compress_end:
            raise BadRecipe("compression works on bits, model.vocab is 256 (bytes)", "set data.compress_end=0")
        whole = (self.export, self.optimizer.muon_lr, self.qat_from_step is not None)
        if self.sharding != "ddp" and any(whole):
            raise BadRecipe(f"export, muon_lr, qat_from_step need whole parameters, sharding is `{self.sharding}`",
                            "set sharding=ddp")
        fits = self.schedule.shape == "plateau" and self.model.norm == "pre" and self.sharding == "ddp"
        others = (self.model.act, self.compile, self.optimizer.muon_lr, self.qat_from_step is not None)
        if self.growth and (not fits or any(others)):
            raise BadRecipe("growth needs a plateau to grow at and a model that can be rebuilt around its weights",
                            "set schedule.shape=plateau, model.norm=pre, model.act=false, sharding=ddp, "
                            "compile=false, optimizer.muon_lr=0 and no qat_from_step")

    @property
    def window_symbols(self) -> int:
        """Positions of one window: nine bits a byte, or bytes."""
        return self.data.window_bytes * (BITS_PER_BYTE if self.model.vocab == 2 else 1)

    def require_divisible(self, world_size: int) -> None:
        """Raise BadRecipe unless the batch divides by ranks × accumulation steps, and the held-out windows by ranks."""
        shares = world_size * self.accumulation_steps
        if self.data.batch_size % shares:
            raise BadRecipe(f"data.batch_size {self.data.batch_size} does not divide among {world_size} ranks "
                            f"× {self.accumulation_steps} accumulation steps", f"choose a multiple of {shares}")
        if self.eval_windows % world_size:
            raise BadRecipe(f"eval_windows {self.eval_windows} does not divide among {world_size} ranks")


PROSE_AND_CODE: dict[str, Count] = {"code": 7, "reference": 3}  # what every Python carries, with the weights of the mixture


def demo() -> Recipe:
    """The demonstration: about a minute on two CPU cores; it diverges because its LR is tripled at step 300.

    A post-norm transformer diverges at a sudden LR of 0.036 (from 0.012) and stays near the 8.85 bits per byte of a model
    that knows only the bit frequencies. With every LR halved (0.006, raised to 0.018) the loss rises briefly and recovers.
    Measured on 2026-11-21 with a rollback to step 200, mean training bits per byte over 25 steps:

        seed  ranks   before the raise   raised: 25 steps later, 100 later   halved: first 25 steps, 100 later
        0     2       5.16               9.10  8.86                          5.68  5.03
        1     2       5.02               8.81  8.85                          5.31  4.84
        2     2       5.05               8.65  8.85                          5.35  4.92
        3     2       5.10               8.85  8.85                          5.60  4.96
        4     2       5.21               8.17  8.00                          5.39  5.36
        0     1       5.13               8.45  8.86                          5.57  5.06
        1     1       5.05               8.80  8.85                          5.77  4.90
        5     1       5.31               8.74  8.88                          5.33  5.29

    Clipping and data are the same in both.
    """
    return Recipe(
        name="demo",
        model=ModelConfig(d_model=64, num_heads=4, num_layers=2, d_ff=256, max_bits=216),
        data=DataConfig(sources=PROSE_AND_CODE, window_bytes=24, batch_size=16),
        optimizer=OptimizerConfig(lr=12e-3),
        schedule=ScheduleConfig(shape="wsd", warmup_steps=20, total_steps=600, decay_steps=100,
                                raise_step=300, raise_factor=3.0),
        checkpoint_every=50, eval_every=50, eval_windows=64)


def baseline() -> Recipe:
    """Preset A: 8 layers of width 256 with ACT. 6,321,162 parameters; meant for a GPU."""
    return Recipe(
        name="baseline",
        model=ModelConfig(d_model=256, num_heads=8, num_layers=8, d_ff=1024, max_bits=1152, norm="pre", chunk=128,
                          overlap=64, act=True, reversible=True),
        data=DataConfig(sources=PROSE_AND_CODE, window_bytes=128, batch_size=128),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(shape="plateau", warmup_steps=200, total_steps=20_000),
        checkpoint_every=500, eval_every=250, eval_windows=128, accumulation_steps=2, mixed_precision="bf16",
        device="auto")


def cpu_int8() -> Recipe:
    """Preset B: 8 layers of width 128 for the CPU. 1,586,690 parameters; exported to int8 at the end.

    `--set qat_from_step=9000` trains the last tenth with four-bit weights and inputs.
    """
    larger = baseline()
    return replace(
        larger, name="cpu-int8", model=replace(larger.model, d_model=128, d_ff=512, act=False), accumulation_steps=1,
        schedule=ScheduleConfig(shape="cosine", warmup_steps=200, total_steps=10_000), export=True)


def scaleup() -> Recipe:
    """Preset C: preset A with twice the layers. 12,641,298 parameters; needs twenty bytes of training text for each."""
    smaller = baseline()
    return replace(
        smaller, name="scaleup", model=replace(smaller.model, num_layers=16), data=replace(smaller.data, batch_size=144),
        optimizer=OptimizerConfig(lr=7e-4),
        schedule=replace(smaller.schedule, warmup_steps=400, total_steps=40_000),
        accumulation_steps=3, min_bytes_per_parameter=20.0)



def modern() -> Recipe:
    """What people would compare with: bytes, rotary positions, normed queries and keys, Muon, warm-up / stable / decay."""
    return Recipe(
        name="modern",
        model=ModelConfig(d_model=96, num_heads=3, num_layers=3, d_ff=384, max_bits=256, vocab=256, norm="pre", rotary=True,
                          qk_norm=True),
        data=DataConfig(sources=PROSE_AND_CODE, window_bytes=256, batch_size=8),
        optimizer=OptimizerConfig(lr=0.003, muon_lr=0.02, weight_decay=0.0),
        schedule=ScheduleConfig(shape="wsd", warmup_steps=20, total_steps=600, decay_steps=240, final_fraction=0.02),
        checkpoint_every=200, eval_every=200, eval_windows=64)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo, "baseline": baseline, "cpu-int8": cpu_int8, "scaleup": scaleup, "modern": modern}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name. Raises BadRecipe listing the known ones."""
    if name not in RECIPES:
        raise BadRecipe(f"unknown recipe `{name}`, expected one of {', '.join(sorted(RECIPES))}")
    return RECIPES[name]()


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Return the recipe with all `key=value` applied; a key is a dotted path, or a field name that occurs once."""
    changes: dict[str, dict[str, Any]] = {"": {}}
    for setting in settings:
        key, found, text = setting.partition("=")
        if not found:
            raise BadRecipe(f"setting `{setting}` has no value, expected key=value")
        group, _, name = _path_of(recipe, key.strip()).rpartition(".")
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text.strip())
        changes.setdefault(group, {})[name] = value
    top = changes.pop("")
    return replace(recipe, **top, **{group: replace(getattr(recipe, group), **inner) for group, inner in changes.items()})


def _path_of(recipe: Recipe, key: str) -> str:
    known = []
    for one in fields(recipe):
        part = getattr(recipe, one.name)
        known += [f"{one.name}.{inner.name}" for inner in fields(part)] if is_dataclass(part) else [one.name]
    matches = [path for path in known if path.endswith(f".{key}")]
    if key in known:
        return key
    if len(matches) == 1:
        return matches[0]
    kind = "ambiguous" if matches else "unknown"
    raise BadRecipe(f"setting `{key}` is {kind}, expected one of {', '.join(matches or known)}")
