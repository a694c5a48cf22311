"""Builds what a launch needs before its first step: ranks, data, model, optimizer, schedule, restored state.

The loop in `train.py` and the trial of `chronicle preflight --full` both start from here, so that they train alike.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from bit_transformer.data.bits import encode_bytes, share_made_shorter
from bit_transformer.data.loaders import SampleStore, StepDataset, open_held_out, open_stores, plan_data, spread_windows
from bit_transformer.errors import BadRecipe
from bit_transformer.evaluation.gate import Monitor
from bit_transformer.footprint import Announcer, Room
from bit_transformer.model.conversion import LR_FACTOR as GROWTH_LR_FACTOR
from bit_transformer.model.conversion import WARMUP_STEPS as GROWTH_WARMUP
from bit_transformer.model.conversion import build_grown, grow, prepare_qat
from bit_transformer.model.transformer import BitTransformer, count_model_parameters
from bit_transformer.recipes import Recipe
from bit_transformer.training.distributed import (
    ShardedAdamW,
    Topology,
    compile_where_possible,
    measure_topology,
    plan_zero,
    require_all_ranks,
    shard_model,
)
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.schedule import plan_schedule, with_plateaus, with_rewarms
from bit_transformer.training.state import Ema, TrainingProgress, saved_growths
from chronicle.data import DataPlan
from chronicle.launch.processes import read_environment


def catch_stop_signals() -> list[int]:
    """Catch SIGTERM and SIGUSR1 (a scheduler's warning before its time limit); return the list that collects them."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def start_ranks(recipe: Recipe) -> Accelerator:
    """Return Accelerate for this rank. Raises TopologyMismatch or BadRecipe where the recipe cannot run on these ranks."""
    torch.set_num_threads(1)  # two torch threads on a shared machine measured 2-7x slower than one
    require_all_ranks(os.environ, read_environment(os.getppid()))
    cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    backend = [InitProcessGroupKwargs(backend="gloo" if cpu else "nccl")] if "WORLD_SIZE" in os.environ else []
    zero = plan_zero(recipe, cpu=cpu)
    # With cpu=True Accelerate ignores its DeepSpeed plugin silently and trains with DDP. With mixed_precision="bf16"
    # beside DeepSpeed it casts the weights: there the engine's own autocast does it (`plan_zero`).
    accelerator = Accelerator(cpu=cpu and zero is None, kwargs_handlers=backend,
                              mixed_precision=recipe.mixed_precision if zero is None else "no",
                              gradient_accumulation_steps=recipe.accumulation_steps,
                              deepspeed_plugin=zero)
    recipe.require_divisible(accelerator.num_processes)
    return accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The open sources of a run, its held-out windows, and the plan that says which sample is read at which step."""

    recipe: Recipe
    stores: tuple[SampleStore, ...]
    held_out: Mapping[str, Tensor]
    plan: DataPlan

    def steps(self, progress: TrainingProgress, accelerator: Accelerator) -> StepDataset:
        """Return this rank's batches by step, with the skips and reshuffles of `progress`."""
        return StepDataset(self.plan, progress.segments, self.stores, rank=accelerator.process_index,
                           world_size=accelerator.num_processes, compress=self.recipe.data.compress_probability,
                           compress_longer=self.recipe.data.compress_longer,
                           as_bytes=self.recipe.model.vocab == 256)


def open_data(recipe: Recipe, announcer: Announcer) -> TrainingData:
    """Open the sources of the recipe. Raises BadRecipe where the recipe asks for more data than there is."""
    data = recipe.data
    stores = open_stores(data.sources, data.window_bytes, data_dir=data.data_dir)
    held_out = open_held_out(data.sources, data.window_bytes, recipe.eval_windows, data_dir=data.data_dir)
    announcer.data(recipe, stores)
    if data.compress_end and not data.compress_longer:
        require_compressible(spread_windows(stores, data.sources, 256))
    run_dir = os.environ.get("CHRONICLE_RUN_DIR")
    recipe.require_evidence(sum(store.num_samples for store in stores) * data.window_bytes,
                            Path(run_dir).parent if run_dir else Path("logs"))
    return TrainingData(recipe=recipe, stores=stores, held_out=held_out,
                        plan=plan_data(stores, data.sources, batch_size=data.batch_size, seed=data.seed))


def require_compressible(windows: Tensor) -> None:
    """Raise BadRecipe where run-length coding makes none of these windows (bytes) shorter: they would only be cut."""
    share, length = share_made_shorter(encode_bytes(windows))
    if not share:
        raise BadRecipe(f"compression makes 0 of {len(windows)} windows of this data shorter: they become {length:.1f} "
                        "times as long on average, and training would see their beginnings only",
                        "set data.compress_end=0; data.compress_longer=true trains on cut windows all the same")


def start_progress(recipe: Recipe, data: TrainingData) -> TrainingProgress:
    """Return the progress of a run at step 0; loading a checkpoint overwrites it."""
    windows = recipe.telemetry_windows if recipe.model.vocab == 2 else 0
    return TrainingProgress(data.plan, Monitor(recipe.gate, windows=windows))


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """All objects of a run in memory. `model` is wrapped for the ranks, `bare_model` is the same model without wrapper.

    `counted` is the number of parameters before wrapping; a rank of a sharded model sees only its part.
    """

    recipe: Recipe
    accelerator: Accelerator
    data: TrainingData
    progress: TrainingProgress
    model: Any
    bare_model: BitTransformer
    counted: int
    not_compiled: str | None
    optimizer: Any
    scheduler: LambdaLR
    lr_factor: Callable[[int], float]
    ema: Ema | None
    topology: Topology
    room: Room

    def learning_rate_at(self, step: int) -> float:
        """Return the LR that the schedule plans for `step`."""
        return float(self.scheduler.base_lrs[0]) * self.lr_factor(step)

    def grow(self, kind: str) -> None:
        """Replace the model by one of twice the depth or width that computes the same function.

        The optimizer stays the same object and starts without moments; the LR is lowered and warmed up again.
        """
        self.bare_model = grow(self.bare_model, kind)
        self.model, self.optimizer = rewrap(self.accelerator, self.bare_model, self.optimizer, self.recipe)
        self.progress.growths += ((self.progress.step, kind),)
        self.progress.rewarms += ((self.progress.step, GROWTH_WARMUP),)

    def apply_schedule(self) -> None:
        """Give the optimizer the LR of its step, after the schedule was changed at a resume or a plateau."""
        for group, base, factor in zip(self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas,
                                       strict=True):
            group["lr"] = base * factor(self.scheduler.last_epoch)
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def build_run(recipe: Recipe, accelerator: Accelerator, data: TrainingData, progress: TrainingProgress, room: Room,
              announcer: Announcer, *, start: Path | None) -> TrainingRun:
    """Build model, optimizer and schedule, in the shape that the checkpoint `start` has (None: the recipe's own).

    Raises TopologyMismatch where the ranks or the wrapper are not what was asked for.
    """
    set_seed(recipe.seed)
    world_size, device = accelerator.num_processes, accelerator.device
    model: Any = build_grown(recipe.model, saved_growths(start))
    if recipe.qat_from_step is not None:
        model = prepare_qat(model)
    bare_model = model
    counted = count_model_parameters(model)
    not_compiled = compile_where_possible(model, device) if recipe.compile else None
    sharded = recipe.sharding == "fsdp2"
    if sharded:
        shard_model(model, world_size=world_size, device=device.type, bf16=recipe.mixed_precision == "bf16")
    optimizer: Any = (ShardedAdamW if sharded else AdamW)(
        parameter_groups(model, recipe.optimizer.weight_decay), lr=recipe.optimizer.lr,
        betas=(recipe.optimizer.beta1, recipe.optimizer.beta2))
    if sharded:  # evaluation_mode: already wrapped, no DDP around it
        model, optimizer = accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    factor = with_plateaus(plan_schedule(recipe.schedule), lambda: progress.plateau.decays, recipe.schedule.plateau_ratio)
    factor = with_plateaus(factor, lambda: [step for step, _ in progress.growths], GROWTH_LR_FACTOR)
    factor = with_rewarms(factor, lambda: progress.rewarms)
    # Registered, not prepared: a prepared scheduler counts step × num_processes. last_epoch == optimizer step.
    scheduler = LambdaLR(optimizer, factor)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_for_checkpointing(progress)
    ema = Ema(bare_model, recipe.ema_decay) if recipe.ema_decay else None
    if ema is not None:
        accelerator.register_for_checkpointing(ema)
    topology = measure_topology(accelerator, model, os.environ, recipe)
    topology.require_agreement()
    announcer.plan(recipe, world_size, device.type)
    set_seed(recipe.seed, device_specific=True)
    return TrainingRun(recipe=recipe, accelerator=accelerator, data=data, progress=progress, model=model,
                       bare_model=bare_model, counted=counted, not_compiled=not_compiled, optimizer=optimizer,
                       scheduler=scheduler, lr_factor=factor, ema=ema, topology=topology, room=room)


def load_checkpoint(run: TrainingRun, point: ResumePoint, *, accident: str | None = None) -> None:
    """Load the checkpoint of `point`, if it names one, and apply what a rollback asked of LR and data.

    `accident` breaks the schedule on purpose after the load, for demonstrations of the guard.
    """
    if point.path is None:
        return
    run.accelerator.load_state(str(point.path))
    if accident == "schedule-restarts":  # as in exp9: a schedule built after the load starts at step 0
        run.scheduler.last_epoch = 0
        run.apply_schedule()
    progress = run.progress
    if point.warmup_steps:
        progress.rewarms += ((progress.step, point.warmup_steps),)
        run.apply_schedule()
    progress.segments = progress.segments.resumed(
        progress.step, skip_batches=point.skip_batches, reshuffle=point.reshuffle)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def rewrap(accelerator: Accelerator, grown: BitTransformer, optimizer: AcceleratedOptimizer,
           recipe: Recipe) -> tuple[Any, AcceleratedOptimizer]:
    """Wrap a grown model in place of the old one. The optimizer stays the same object and starts without moments."""
    inner = optimizer.optimizer
    inner.state.clear()
    for group, fresh in zip(inner.param_groups, parameter_groups(grown, recipe.optimizer.weight_decay), strict=True):
        group["params"] = fresh["params"]
    accelerator.free_memory()
    model, wrapped = accelerator.prepare(grown.train(), inner)
    return model, wrapped
