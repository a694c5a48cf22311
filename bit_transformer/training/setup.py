"""Builds what a launch needs before its first step: ranks, data, model, optimizers, schedule, restored state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bit_transformer.data.bits import encode_bytes, share_made_shorter
from bit_transformer.data.loaders import SampleStore, open_held_out, open_stores, plan_data, spread_windows
from bit_transformer.errors import BadRecipe
from bit_transformer.model.conversion import LR_FACTOR as GROWTH_LR_FACTOR
from bit_transformer.model.conversion import WARMUP_STEPS as GROWTH_WARMUP
from bit_transformer.model.conversion import build_grown, grow, prepare_qat
from bit_transformer.model.transformer import BitTransformer
from bit_transformer.recipes import OptimizerConfig, Recipe
from bit_transformer.training.distributed import (
    compile_where_possible,
    measure_sizes,
    plan_zero,
    require_agreement,
)
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.schedule import plan_schedule, with_plateaus, with_rewarms
from bit_transformer.training.state import STATE_FILE, TrainingProgress, saved_growths
from chronicle.data import DataPlan


def catch_stop_signals() -> list[int]:
    """Catch SIGTERM and SIGUSR1 (a scheduler's warning before its time limit); return the list that collects them."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def start_ranks(recipe: Recipe) -> Accelerator:
    """Return Accelerate for this rank. Raises BadRecipe where the recipe cannot run on these ranks."""
    torch.set_num_threads(1)  # two torch threads on a shared machine measured 2-7x slower than one
    is_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    backend = [InitProcessGroupKwargs(backend="gloo" if is_cpu else "nccl")] if "WORLD_SIZE" in os.environ else []
    zero = plan_zero(recipe, cpu=is_cpu)
    # With cpu=True Accelerate ignores its DeepSpeed plugin silently and trains with DDP. With mixed_precision="bf16"
    # beside DeepSpeed it casts the weights: there the engine's own autocast does it (`plan_zero`).
    accelerator = Accelerator(cpu=is_cpu and zero is None, kwargs_handlers=backend,
                              mixed_precision=recipe.mixed_precision if zero is None else "no",
                              gradient_accumulation_steps=recipe.accumulation_steps, deepspeed_plugin=zero)
    recipe.require_divisible(accelerator.num_processes)
    return accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The open sources of a run, its held-out windows, and the plan that says which sample is read at which step."""

    stores: tuple[SampleStore, ...]
    held_out: Mapping[str, Tensor]
    plan: DataPlan


def open_data(recipe: Recipe) -> TrainingData:
    """Open the sources of the recipe. Raises BadRecipe where the recipe asks for more data than there is."""
    data = recipe.data
    stores = open_stores(data.sources, data.window_bytes, data_dir=data.data_dir)
    held_out = open_held_out(data.sources, data.window_bytes, recipe.eval_windows, data_dir=data.data_dir)
    if data.compress_end and not data.compress_longer:
        require_compressible(torch.cat([spread_windows(store, 256) for store in stores]))
    num_bytes = sum(store.num_samples for store in stores) * data.window_bytes
    needed = int(recipe.min_bytes_per_parameter * recipe.model.num_parameters)
    if num_bytes < needed:
        raise BadRecipe(f"recipe `{recipe.name}` has {num_bytes:,} bytes of training text, expected {needed:,} or more "
                        f"({recipe.min_bytes_per_parameter:g} a parameter)", "add sources: `chronicle data build`")
    plan = plan_data(stores, data.sources, batch_size=data.batch_size, seed=data.seed)
    return TrainingData(stores=stores, held_out=held_out, plan=plan)


def require_compressible(windows: Tensor) -> None:
    """Raise BadRecipe where run-length coding makes none of these windows (bytes) shorter: they would only be cut."""
    share, length = share_made_shorter(encode_bytes(windows))
    if not share:
        raise BadRecipe(f"compression makes 0 of {len(windows)} windows of this data shorter: they become {length:.1f} "
                        "times as long on average, and training would see their beginnings only",
                        "set data.compress_end=0; data.compress_longer=true trains on cut windows all the same")


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """All objects of a run in memory. `model` is wrapped for the ranks, `bare_model` is the same model without wrapper.

    With Muon there are two optimizers and schedulers, AdamW's first.
    """

    recipe: Recipe
    accelerator: Accelerator
    progress: TrainingProgress
    model: Any
    bare_model: BitTransformer
    not_compiled: str | None
    optimizers: tuple[Any, ...]
    schedulers: tuple[LambdaLR, ...]
    lr_factor: Callable[[int], float]

    @property
    def learning_rate(self) -> float:
        """The LR of the next step, of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def update(self) -> None:
        """Take one step of every optimizer and scheduler."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def grow(self, kind: str) -> None:
        """Replace the model by one of twice the depth or width that computes the same function.

        The optimizer stays the same object and starts without moments; the LR is lowered and warmed up again.
        """
        self.bare_model = grow(self.bare_model, kind)
        inner = self.optimizers[0].optimizer
        inner.state.clear()
        for group, fresh in zip(inner.param_groups, parameter_groups(self.bare_model, self.recipe.optimizer), strict=True):
            group["params"] = fresh["params"]
        self.accelerator.free_memory()
        self.model, optimizer = self.accelerator.prepare(self.bare_model.train(), inner)
        self.optimizers = (optimizer,)
        self.progress.growths += ((self.progress.step, kind),)
        self.progress.rewarms += ((self.progress.step, GROWTH_WARMUP),)

    def apply_schedule(self) -> None:
        """Give the optimizers the LR of their step, after the schedule was changed at a resume or a plateau."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            factor = self.lr_factor(scheduler.last_epoch)
            for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = base * factor
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def build_run(recipe: Recipe, accelerator: Accelerator, progress: TrainingProgress, *, start: Path | None) -> TrainingRun:
    """Build model, optimizers and schedule, in the shape that the checkpoint `start` has (None: the recipe's own).

    Raises TopologyMismatch where the ranks or the wrapper are not what was asked for.
    """
    set_seed(recipe.seed)
    device = accelerator.device
    bare_model = build_grown(recipe.model, saved_growths(start))
    if recipe.qat_from_step is not None:
        bare_model = prepare_qat(bare_model)
    not_compiled = compile_where_possible(bare_model, device) if recipe.compile else None
    model, *optimizers = accelerator.prepare(bare_model, *build_optimizers(bare_model, recipe.optimizer))
    factor = with_plateaus(plan_schedule(recipe.schedule), lambda: progress.decays, recipe.schedule.plateau_ratio)
    factor = with_plateaus(factor, lambda: [step for step, _ in progress.growths], GROWTH_LR_FACTOR)
    factor = with_rewarms(factor, lambda: progress.rewarms)
    # Registered, not prepared: a prepared scheduler counts step × num_processes. last_epoch == optimizer step.
    schedulers = tuple(LambdaLR(optimizer, factor) for optimizer in optimizers)
    accelerator.register_for_checkpointing(schedulers[0], progress, *schedulers[1:])
    require_agreement(measure_sizes(accelerator), recipe.sharding, type(model).__name__)
    set_seed(recipe.seed, device_specific=True)
    return TrainingRun(recipe=recipe, accelerator=accelerator, progress=progress, model=model, bare_model=bare_model,
                       not_compiled=not_compiled, optimizers=tuple(optimizers), schedulers=schedulers, lr_factor=factor)


def load_checkpoint(run: TrainingRun, point: ResumePoint, *, accident: str = "none") -> None:
    """Load the checkpoint of `point`, if it names one, and apply what a rollback asked of LR and data.

    `accident` loses state on purpose after the load, for demonstrations of the guard and for studies.
    """
    if point.path is None:
        return
    state = point.path / STATE_FILE
    if state.is_file():  # another trainer's checkpoint is said before its weights do not fit
        run.progress.plan.require_same(torch.load(state, weights_only=True)["data"]["plan"])
    run.accelerator.load_state(str(point.path))
    if accident == "schedule-restarts":  # as in exp9: a schedule built after the load starts at step 0
        for scheduler in run.schedulers:
            scheduler.last_epoch = 0
        run.apply_schedule()
    elif accident == "moments-lost":
        for optimizer in run.optimizers:
            optimizer.optimizer.state.clear()
    progress = run.progress
    if point.warmup_steps:
        progress.rewarms += ((progress.step, point.warmup_steps),)
        run.apply_schedule()
    progress.segments = progress.segments.resumed(
        progress.step, skip_batches=point.skip_batches, reshuffle=point.reshuffle)


def build_optimizers(model: BitTransformer, config: OptimizerConfig) -> list[Optimizer]:
    """Return AdamW, and with `muon_lr` Muon for the matrices of the blocks."""
    groups = parameter_groups(model, config)
    optimizers: list[Optimizer] = [AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))]
    if config.muon_lr:
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1]
        optimizers.append(Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay))
    return optimizers


def parameter_groups(model: BitTransformer, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return AdamW's two groups: matrices with weight decay, vectors without. What Muon has is in neither."""
    with_muon = set(map(id, model.blocks.parameters())) if config.muon_lr else set()
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1 and id(p) not in with_muon]
    vectors = [p for p in parameters if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
