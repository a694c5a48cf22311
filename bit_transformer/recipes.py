"""Recipes: one function each, returning the whole configuration of a training run.

Recipes are frozen and checked when they are made; `with_settings` (`--set optimizer.lr=0.01`) returns a changed copy. A
field is explained where it is used.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from bit_transformer.data.bits import BITS_PER_BYTE, cosine_ramp
from bit_transformer.errors import BadRecipe
from bit_transformer.evaluation.gate import GateConfig
from bit_transformer.model.transformer import ModelConfig
from bit_transformer.training.schedule import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Mixture, window and batch. `batch_size` is the global batch of one optimizer step in windows.

    `data_dir` is a folder or URL of built sources (`chronicle data build`); None reads the texts into memory. A window that
    run-length coding makes longer stays as it is; with `compress_longer` it is coded and cut all the same.
    """

    sources: dict[str, int]
    window_bytes: int
    batch_size: int
    seed: int = 0
    num_workers: int = 0
    data_dir: str | None = None
    compress_end: float = 0.0
    compress_ramp_steps: int = 0
    compress_longer: bool = False

    def compress_probability(self, step: int) -> float:
        """Return the share of windows fed in run-length form at `step`: a cosine ramp from 0 to `compress_end`."""
        return cosine_ramp(step, start=0.0, end=self.compress_end, total_steps=self.compress_ramp_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW; weight decay on matrices only; gradients clipped to `max_grad_norm`.

    With `muon_lr` above 0 the matrices of the blocks have Muon at that LR, and AdamW keeps the rest.
    """

    lr: float
    muon_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run. Steps are optimizer steps; `world_size` None accepts any number of ranks."""

    name: str
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    checkpoint_every: int
    eval_every: int
    eval_windows: int
    log_every: int = 10
    summary: bool = True
    compile: bool = False
    accumulation_steps: int = 1
    mixed_precision: str = "no"
    sharding: str = "ddp"
    ema_decay: float = 0.0
    ponder_weight: float = 0.01
    device: str = "cpu"
    seed: int = 0
    world_size: int | None = None
    gate: GateConfig = field(default_factory=GateConfig)
    telemetry_windows: int = 2
    growth: tuple[str, ...] = ()
    qat_from_step: int | None = None
    export: bool = False
    min_bytes_per_parameter: float = 0.0
    baseline_run: str | None = None

    def __post_init__(self) -> None:
        require_bounds(self)
        self._require_choices()
        if self.window_symbols > self.model.max_bits:
            raise BadRecipe(f"a window of {self.data.window_bytes} bytes has {self.window_symbols} symbols, model.max_bits is "
                            f"{self.model.max_bits}")
        if self.model.vocab != 2 and self.data.compress_end:
            raise BadRecipe("compression works on bits, model.vocab is 256 (bytes)", "set data.compress_end=0")
        if self.sharding != "ddp":
            self._require_whole_parameters()
        if self.growth:
            self._require_growable()

    def _require_choices(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            unknown = [one for one in value if one not in choices] if isinstance(value, tuple) else []
            if unknown:
                expected = f"{' and '.join(choices)}, such as ('{choices[0]}',)"
                raise BadRecipe(f"{name} names {', '.join(unknown)}, expected {expected}")
            if isinstance(value, str) and value not in choices:
                raise BadRecipe(f"{name} is `{value}`, expected {' or '.join(choices)}")

    def _require_whole_parameters(self) -> None:
        asked = {"ema_decay": self.ema_decay, "export": self.export, "optimizer.muon_lr": self.optimizer.muon_lr}
        names = [name for name, value in asked.items() if value]
        if self.qat_from_step is not None:
            names.append("qat_from_step")
        if names:
            raise BadRecipe(f"{' and '.join(names)} need whole parameters, sharding is `{self.sharding}`", "set sharding=ddp")

    def _require_growable(self) -> None:
        fits = self.schedule.shape == "plateau" and self.model.norm == "pre" and self.sharding == "ddp"
        others = (self.model.act, self.compile, self.ema_decay, self.optimizer.muon_lr, self.qat_from_step is not None)
        if not fits or any(others):
            raise BadRecipe("growth needs a plateau to grow at and a model that can be rebuilt around its weights",
                            "set schedule.shape=plateau, model.norm=pre, model.act=false, sharding=ddp, ema_decay=0, "
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

    def require_evidence(self, num_bytes: int, logs: Path) -> None:
        """Raise BadRecipe where the preset needs more training text, or a baseline run that does not exist."""
        needed = int(self.min_bytes_per_parameter * self.model.num_parameters)
        if num_bytes < needed:
            raise BadRecipe(f"recipe `{self.name}` has {num_bytes:,} bytes of training text, expected {needed:,} or more "
                            f"({self.min_bytes_per_parameter:g} a parameter)", "add sources: `chronicle data build`")
        if needed and (self.baseline_run is None or not (logs / self.baseline_run / "journal").is_dir()):
            raise BadRecipe(f"recipe `{self.name}` needs the run of the baseline it grows from, found {self.baseline_run}",
                            "train `--recipe baseline` first and name it with --set baseline_run=NAME")

    def to_json(self) -> dict[str, Any]:
        """Return plain nested values, as JSON has them."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


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
        data=DataConfig(sources={"code": 7, "reference": 3}, window_bytes=24, batch_size=16),
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
        data=DataConfig(sources={"code": 7, "reference": 3}, window_bytes=128, batch_size=128),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(shape="plateau", warmup_steps=200, total_steps=20_000),
        checkpoint_every=500, eval_every=250, eval_windows=128, accumulation_steps=2, mixed_precision="bf16",
        device="auto", ema_decay=0.99)


def cpu_int8() -> Recipe:
    """Preset B: 8 layers of width 128 for the CPU. 1,586,690 parameters; exported to int8 at the end.

    `--set qat_from_step=9000` trains the last tenth with four-bit weights and inputs.
    """
    return Recipe(
        name="cpu-int8",
        model=ModelConfig(d_model=128, num_heads=8, num_layers=8, d_ff=512, max_bits=1152, norm="pre", chunk=128,
                          overlap=64, reversible=True),
        data=DataConfig(sources={"code": 7, "reference": 3}, window_bytes=128, batch_size=128),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(shape="cosine", warmup_steps=200, total_steps=10_000),
        checkpoint_every=500, eval_every=250, eval_windows=128, mixed_precision="bf16", device="auto",
        export=True)


def scaleup() -> Recipe:
    """Preset C: preset A with twice the layers. 12,641,298 parameters; needs more data than preset A.

    The training text must have twenty bytes per parameter or more, and `baseline_run` must name a run of preset A whose
    journal is beside this run's.
    """
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
        data=DataConfig(sources={"code": 7, "reference": 3}, window_bytes=256, batch_size=8),
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
        *group, name = _path_of(recipe, key.strip())
        owner = getattr(recipe, group[0]) if group else recipe
        changes.setdefault(group[0] if group else "", {})[name] = _parse_value(owner, name, text.strip(), key)
    top = changes.pop("")
    return replace(recipe, **top, **{group: replace(getattr(recipe, group), **inner) for group, inner in changes.items()})


def _path_of(recipe: Recipe, key: str) -> tuple[str, ...]:
    known: list[tuple[str, ...]] = []
    for one in fields(recipe):
        known.append((one.name,))
        part = getattr(recipe, one.name)
        if is_dataclass(part):
            known += [(one.name, inner.name) for inner in fields(part)]
    wanted = tuple(key.split("."))
    if wanted in known:
        return wanted
    matches = [path for path in known if path[-1:] == wanted]
    if len(matches) == 1:
        return matches[0]
    choices = ", ".join(".".join(path) for path in matches or known)
    raise BadRecipe(f"setting `{key}` is {'ambiguous' if matches else 'unknown'}, expected one of {choices}")


def _parse_value(owner: Any, name: str, text: str, key: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    present = getattr(owner, name)
    if is_dataclass(present):
        raise BadRecipe(f"setting `{key}` names a group of fields, expected one field of it")
    allowed = _types_of(type(owner), name)
    if float in allowed and type(value) is int:
        value = float(value)
    if type(value) not in allowed:
        expected = " or ".join(kind.__name__ for kind in allowed)
        raise BadRecipe(f"setting `{key}` is `{text}`, expected {expected} such as {present!r}")
    return value


def _types_of(owner: type, name: str) -> tuple[type, ...]:
    hint = get_type_hints(owner)[name]
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


_CHOICES: dict[str, tuple[str, ...]] = {
    "mixed_precision": ("no", "bf16"), "sharding": ("ddp", "fsdp2", "zero1", "zero2", "zero3"), "device": ("cpu", "auto"),
    "growth": ("depth", "width")}


# --- Bounds of the numbers in a recipe

_ONE_OR_MORE = (
    "checkpoint_every", "eval_every", "eval_windows", "log_every", "accumulation_steps", "data.window_bytes", "data.batch_size",
    "model.d_model", "model.num_heads", "model.num_layers", "model.d_ff", "model.max_bits", "schedule.plateau_patience")
_ZERO_OR_MORE = (
    "telemetry_windows", "qat_from_step", "ponder_weight", "min_bytes_per_parameter", "data.num_workers",
    "data.compress_ramp_steps", "optimizer.weight_decay", "model.chunk", "model.overlap", "schedule.warmup_steps",
    "schedule.decay_steps", "schedule.final_fraction", "schedule.raise_step", "schedule.plateau_min_gain", "optimizer.muon_lr")
_ABOVE_ZERO = ("optimizer.lr", "optimizer.max_grad_norm", "schedule.raise_factor", "schedule.plateau_ratio")
_BELOW_ONE = ("ema_decay", "optimizer.beta1", "optimizer.beta2")
_SHARES = ("data.compress_end",)
_BOUNDS: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (_ONE_OR_MORE, "1 or more", lambda value: value >= 1),
    (_ZERO_OR_MORE, "0 or more", lambda value: value >= 0),
    (_ABOVE_ZERO, "a number above 0", lambda value: value > 0),
    (_BELOW_ONE, "from 0 to below 1", lambda value: 0 <= value < 1),
    (_SHARES, "from 0 to 1", lambda value: 0 <= value <= 1))


def require_bounds(recipe: Any) -> None:
    """Raise BadRecipe for the first number outside its bounds. None is accepted."""
    for names, expected, holds in _BOUNDS:
        for name in names:
            value = attrgetter(name)(recipe)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise BadRecipe(f"{name} is {value}, expected {expected}")
    for source, weight in recipe.data.sources.items():
        if type(weight) is not int or weight < 1:
            raise BadRecipe(f"source `{source}` has weight {weight!r}, expected a whole number above 0")
    if not recipe.data.sources:
        raise BadRecipe("data.sources is empty, expected one source or more, such as {'code': 7, 'reference': 3}")
