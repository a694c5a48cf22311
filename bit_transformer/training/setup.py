"""Builds what a launch needs before its first step: ranks, data, model, optimizers, schedule, restored state.

How the model lies on the ranks is here as well: the measured world, DeepSpeed ZeRO, `torch.compile`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bit_transformer.data.bits import compress_runs, encode_bytes, runs_to_bits
from bit_transformer.data.loaders import SampleStore, open_held_out, open_store, plan_data, spread_windows
from bit_transformer.errors import BadRecipe, TopologyMismatch
from bit_transformer.model.conversion import GROWTH_WARMUP_STEPS, build_grown, grow, prepare_qat, set_qat
from bit_transformer.model.transformer import BitTransformer
from bit_transformer.recipes import OptimizerConfig, Recipe
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.state import TrainingProgress, read_progress
from chronicle.data import DataPlan
from chronicle.journal.events import Growth


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
    stores = tuple(open_store(name, data.window_bytes, split="train", data_dir=data.data_dir) for name in data.sources)
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
    bits_BT = encode_bytes(windows)
    lengths = [runs_to_bits(*compress_runs(bits_T)).numel() / bits_T.numel() for bits_T in bits_BT]
    if min(lengths) >= 1:
        raise BadRecipe(f"compression makes 0 of {len(windows)} windows of this data shorter: they become "
                        f"{fmean(lengths):.1f} times as long on average, and training would see their beginnings only",
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

    def whole_model(self) -> BitTransformer | None:
        """Return a plain copy of the model on the main rank, None on others. Collective."""
        state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        result = build_model(self.recipe, self.progress.growths)
        result.load_state_dict(state)
        if self.recipe.qat_from_step is not None:  # it rounds where the last step did
            set_qat(result, self.progress.step > self.recipe.qat_from_step)
        return result.to(self.accelerator.device)

    def grow(self, kind: str) -> Growth:
        """Replace the model by one of twice the depth or width that computes the same function; return what to record.

        The optimizer stays the same object and starts without moments; the LR is lowered and warmed up again.
        """
        before = self.bare_model.config.num_parameters
        self.bare_model = grow(self.bare_model, kind)
        inner = self.optimizers[0].optimizer
        inner.state.clear()
        for group, fresh in zip(inner.param_groups, split_parameters(self.bare_model, self.recipe.optimizer), strict=False):
            group["params"] = fresh
        self.accelerator.free_memory()
        self.model, optimizer = self.accelerator.prepare(self.bare_model.train(), inner)
        self.optimizers = (optimizer,)
        self.progress.growths += ((self.progress.step, kind),)
        self.progress.rewarms += ((self.progress.step, GROWTH_WARMUP_STEPS),)
        return Growth(kind=kind, before=before, after=self.bare_model.config.num_parameters)

    def apply_schedule(self) -> None:
        """Give the optimizers the LR of their step, after the schedule was changed at a resume or a plateau."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
            for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = base * factor
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def build_run(recipe: Recipe, accelerator: Accelerator, progress: TrainingProgress, *, start: Path | None) -> TrainingRun:
    """Build model, optimizers and schedule, in the shape that the checkpoint `start` has (None: the recipe's own).

    Raises TopologyMismatch where the ranks or the wrapper are not what was asked for.
    """
    set_seed(recipe.seed)
    device = accelerator.device
    bare_model = build_model(recipe, read_progress(start).get("growths", ()))
    not_compiled = compile_where_possible(bare_model, device) if recipe.compile else None
    model, *optimizers = accelerator.prepare(bare_model, *build_optimizers(bare_model, recipe.optimizer))
    factor = progress.planned_factor(recipe.schedule)
    # Registered, not prepared: a prepared scheduler counts step × num_processes. last_epoch == optimizer step.
    schedulers = tuple(LambdaLR(optimizer, factor) for optimizer in optimizers)
    accelerator.register_for_checkpointing(schedulers[0], progress, *schedulers[1:])
    require_agreement(measure_sizes(accelerator), recipe.sharding, type(model).__name__)
    set_seed(recipe.seed, device_specific=True)
    return TrainingRun(recipe=recipe, accelerator=accelerator, progress=progress, model=model, bare_model=bare_model,
                       not_compiled=not_compiled, optimizers=tuple(optimizers), schedulers=schedulers)


def build_model(recipe: Recipe, growths: Iterable[tuple[int, str]]) -> BitTransformer:
    """Return an untrained model of the recipe after these growths, ready to train for four bits where that is asked for."""
    model = build_grown(recipe.model, [kind for _, kind in growths])
    return model if recipe.qat_from_step is None else prepare_qat(model)


def load_checkpoint(run: TrainingRun, point: ResumePoint, *, accident: str) -> None:
    """Load the checkpoint of `point`, if it names one, and apply what a rollback asked of LR and data.

    `accident` loses state on purpose after the load, for demonstrations of the guard and for studies.
    """
    if point.path is None:
        return
    if saved := read_progress(point.path):  # another trainer's checkpoint is said before its weights do not fit
        run.progress.plan.require_same(saved["data"]["plan"])
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
    matrices, vectors, for_muon = split_parameters(model, config)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[Optimizer] = [AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))]
    if for_muon:
        optimizers.append(Muon(for_muon, lr=config.muon_lr, weight_decay=config.weight_decay))
    return optimizers


def split_parameters(model: BitTransformer, config: OptimizerConfig) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return AdamW's matrices (weight decay), its vectors (none), and with `muon_lr` the matrices of the blocks, for Muon."""
    matrices, vectors, for_muon = list[Tensor](), list[Tensor](), list[Tensor]()
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1:
            vectors.append(parameter)
        elif config.muon_lr and name.startswith("blocks."):
            for_muon.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, vectors, for_muon


# --- The model on the ranks


def require_agreement(sizes: Mapping[str, int], sharding: str, wrapper: str) -> None:
    """Raise TopologyMismatch unless all reported world sizes are equal and the model is wrapped as the recipe asks.

    Accelerate leaves its DeepSpeed plugin aside on a CPU, and trains with DDP, without a word.
    """
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who} says {size}" for who, size in sizes.items())
        raise TopologyMismatch(f"launcher, process group and framework disagree on the world size: {said}",
                               "start with `torchrun --nproc_per_node N -m bit_transformer.train …`")
    expected = "DeepSpeedEngine" if sharding in STAGES else "DistributedDataParallel"
    needs_none = sharding == "ddp" and set(sizes.values()) == {1}
    if wrapper != expected and not needs_none:
        raise TopologyMismatch(f"sharding `{sharding}` was requested, the model is wrapped by {wrapper}, expected "
                               f"{expected}", "choose a sharding that works on this machine")


def measure_sizes(accelerator: Accelerator) -> dict[str, int]:
    """Return the world size as the launcher, torch and Accelerate report it."""
    running = dist.get_world_size() if dist.is_initialized() else 1
    return {"launcher": int(os.environ.get("WORLD_SIZE", "1")), "torch": running, "accelerate": accelerator.num_processes}


# --- DeepSpeed ZeRO

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

# Stage 3 keeps small parameters whole between steps. It gathers them in float32 after a step, but in bf16 when a module
# asks for them, which happens once more in the first pass after a start. A resumed run would see other biases than an
# uninterrupted one, so no parameter is kept whole.
ONE_WAY_TO_GATHER = {"stage3_param_persistence_threshold": 0}


def plan_zero(recipe: Recipe, *, cpu: bool) -> Any:
    """Return Accelerate's DeepSpeed plugin for the recipe, None without ZeRO. Raises BadRecipe where it cannot run."""
    if recipe.sharding not in STAGES:
        return None
    if importlib.util.find_spec("deepspeed") is None:
        raise BadRecipe(f"sharding `{recipe.sharding}` needs DeepSpeed", "pip install 'chronicle-ml[deepspeed]'")
    if recipe.model.reversible:
        raise BadRecipe("reversible blocks cannot run under DeepSpeed: the backward pass needs whole parameters",
                        "set model.reversible=false and model.checkpointing=true")
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        # `shm_comm` serves inference alone. Its build is silent, takes a minute, and waits for ever on the lock of a build
        # that was killed (torch's FileBaton).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from accelerate.utils import DeepSpeedPlugin

    stage, bf16 = STAGES[recipe.sharding], recipe.mixed_precision == "bf16"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return DeepSpeedPlugin(hf_ds_config={
        "train_micro_batch_size_per_gpu": recipe.data.batch_size // world_size // recipe.accumulation_steps,
        "gradient_accumulation_steps": recipe.accumulation_steps,
        "gradient_clipping": recipe.optimizer.max_grad_norm,
        # torch's autocast inside the engine: weights, gradients and moments stay float32 (`bf16` would cast the weights)
        "torch_autocast": {"enabled": bf16, "dtype": "bfloat16"},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True,
                              **(ONE_WAY_TO_GATHER if stage == 3 and bf16 else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    })


# --- torch.compile


def compile_where_possible(model: BitTransformer, device: torch.device) -> str | None:
    """Compile the blocks in place, or return in one line why that is not possible.

    Trying a model of one such layer is the only test: which versions and compilers work is not known in advance.
    """
    if model.config.reversible:
        return "reversible blocks have their own backward pass"
    small = replace(model.config, num_layers=1)
    try:
        with torch.random.fork_rng(), torch.enable_grad():  # building draws random numbers: the run's stay unchanged
            compiled = torch.compile(BitTransformer(small).to(device))
            compiled(torch.zeros(1, small.max_bits, dtype=torch.long, device=device)).logits_BTV.sum().backward()
    except Exception as problem:  # noqa: BLE001 any error of the compiler means that it does not work here
        first_line = str(problem).strip().partition("\n")[0]
        return f"{type(problem).__name__}: {first_line[:200]}"
    for block in model.blocks:
        block.compile()
    return None
