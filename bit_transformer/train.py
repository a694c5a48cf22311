"""Train: `torchrun --nproc_per_node 2 -m bit_transformer.train --recipe demo`. Read it from top to bottom.

One loop under Accelerate. Counters are optimizer steps everywhere; the loss is in nats per bit. Parts with a story of
their own (data plan, schedule, resume point, evaluation) are modules; what happens in a step happens here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.data.loaders import StepDataset, load_steps, open_held_out, open_stores, plan_data, spread_windows
from bit_transformer.errors import NonFiniteGradients, TrainerError
from bit_transformer.evaluation.gate import CALIBRATION_WINDOWS, Monitor, telemetry_rows
from bit_transformer.evaluation.held_out import evaluate
from bit_transformer.footprint import Announcer, measure_room
from bit_transformer.model.conversion import LR_FACTOR as GROWTH_LR_FACTOR
from bit_transformer.model.conversion import WARMUP_STEPS as GROWTH_WARMUP
from bit_transformer.model.conversion import build_grown, grow, prepare_qat, set_qat
from bit_transformer.model.transformer import BitTransformer, count_model_parameters, next_symbol_losses
from bit_transformer.recipes import Recipe, find_recipe, with_settings
from bit_transformer.training import report
from bit_transformer.training.distributed import (
    ShardedAdamW,
    compile_where_possible,
    gather_whole,
    measure_topology,
    plan_zero,
    require_all_ranks,
    shard_model,
)
from bit_transformer.training.preflight import check_launch, require_room
from bit_transformer.training.resume import checkpoint_path, find_resume_point, require_later
from bit_transformer.training.schedule import plan_schedule, with_plateaus, with_rewarms
from bit_transformer.training.state import Ema, StepTally, TrainingProgress, saved_growths
from bit_transformer.training.trial import open_trial
from chronicle import guard
from chronicle.errors import ChronicleError
from chronicle.launch.processes import read_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code. Errors of ours are one sentence and a hint."""
    report.open_output(os.environ)
    parser = argparse.ArgumentParser(prog="python -m bit_transformer.train", allow_abbrev=False)
    parser.add_argument("--recipe", default="demo", help="name of a recipe (a function in recipes.py)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one field of the recipe")
    parser.add_argument("--checkpoints", type=Path, default=Path(os.environ.get("CHRONICLE_CHECKPOINTS", "checkpoints")))
    parser.add_argument("--resume", default="auto", help="auto, fresh, latest-complete, a step, or a path")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end this launch after STEP")
    parser.add_argument("--accident", choices=["schedule-restarts"], help="for demonstrations: what the guard must refuse")
    options = parser.parse_args(argv)
    try:
        train(with_settings(find_recipe(options.recipe), options.set), options.checkpoints, options.resume,
              stop_at=options.stop_at, accident=options.accident)
    except (TrainerError, ChronicleError) as problem:
        report.print_error(problem)
        return getattr(problem, "exit_code", 1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def train(recipe: Recipe, checkpoints: Path, resume: str = "auto", *, stop_at: int | None = None,
          accident: str | None = None) -> None:
    """Train `recipe` to its last step, to `stop_at` or until SIGTERM; a checkpoint is saved in each case."""
    stop_asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):  # USR1: a scheduler's warning before its time limit
        signal.signal(number, lambda number, frame: stop_asked.append(number))
    torch.set_num_threads(1)  # two torch threads on a shared machine measured 2-7x slower than one

    # Ranks ---------------------------------------------------------------------------------------------------------
    require_all_ranks(os.environ, read_environment(os.getppid()))
    cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    backend = [InitProcessGroupKwargs(backend="gloo" if cpu else "nccl")] if "WORLD_SIZE" in os.environ else []
    zero = plan_zero(recipe, cpu=cpu)
    # cpu=True makes Accelerate leave its DeepSpeed plugin aside in silence and train with DDP
    # and mixed_precision="bf16" beside DeepSpeed casts the weights: there the engine's own autocast does it (`zero`)
    accelerator = Accelerator(cpu=cpu and zero is None, kwargs_handlers=backend,
                              mixed_precision=recipe.mixed_precision if zero is None else "no",
                              gradient_accumulation_steps=recipe.accumulation_steps,
                              deepspeed_plugin=zero)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    recipe.require_divisible(world_size)

    # Data: a plan, not a stream ------------------------------------------------------------------------------------
    data, announcer = recipe.data, Announcer(is_main=accelerator.is_main_process)
    stores = open_stores(data.sources, data.window_bytes, data_dir=data.data_dir)
    held_out = open_held_out(data.sources, data.window_bytes, recipe.eval_windows, data_dir=data.data_dir)
    announcer.data(recipe, stores)
    run_dir = os.environ.get("CHRONICLE_RUN_DIR")
    recipe.require_evidence(sum(store.num_samples for store in stores) * data.window_bytes,
                            Path(run_dir).parent if run_dir else Path("logs"))
    plan = plan_data(stores, data.sources, batch_size=data.batch_size, seed=data.seed)
    monitor = Monitor(recipe.gate, windows=recipe.telemetry_windows if recipe.model.vocab == 2 else 0)
    progress = TrainingProgress(plan, monitor)
    trial = open_trial(os.environ)  # `chronicle preflight --full`: the steps below on one batch, none of them the run's
    if trial is None:
        guard(accelerator, step=lambda: progress.step, data_state=progress.data_state, fresh_start=resume == "fresh",
              honours=("warmup", "skip", "reshuffle"))

    # Model, optimizer, schedule ------------------------------------------------------------------------------------
    set_seed(recipe.seed)
    point = find_resume_point(resume, checkpoints, os.environ) if trial is None else trial.start
    announcer.model(recipe, world_size, accelerator.device.type)
    room = measure_room(accelerator, recipe)
    require_room(accelerator, room)
    model = bare_model = build_grown(recipe.model, saved_growths(point.path))
    if recipe.qat_from_step is not None:
        model = bare_model = prepare_qat(bare_model)
    counted = count_model_parameters(model)  # before wrapping: a rank of a sharded model sees only its part
    not_compiled = compile_where_possible(model, accelerator.device) if recipe.compile else None
    sharded = recipe.sharding == "fsdp2"
    if sharded:
        shard_model(model, world_size=world_size, device=accelerator.device.type, bf16=recipe.mixed_precision == "bf16")
    optimizer = (ShardedAdamW if sharded else AdamW)(
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
    announcer.plan(recipe, world_size, accelerator.device.type)
    set_seed(recipe.seed, device_specific=True)

    # Resume: the guard compares memory with contract and manifest at the load and again before the first step -----------
    if point.path is not None:
        accelerator.load_state(str(point.path))
        if accident == "schedule-restarts":  # exp9: a schedule that is built after the load begins at zero
            scheduler.last_epoch = 0
            set_learning_rates(optimizer, scheduler)
        if point.warmup_steps:
            progress.rewarms += ((progress.step, point.warmup_steps),)
            set_learning_rates(optimizer, scheduler)
        progress.segments = progress.segments.resumed(
            progress.step, skip_batches=point.skip_batches, reshuffle=point.reshuffle)
    require_later(stop_at, progress.step)
    dataset = StepDataset(plan, progress.segments, stores, rank=rank, world_size=world_size,
                          compress=data.compress_probability, as_bytes=recipe.model.vocab == 256)
    if trial is not None:
        trial.compare_memory(accelerator, progress)
    first_step = progress.step if trial is None else 0
    first_batch = dataset[first_step]
    check = partial(
        check_launch, accelerator, recipe=recipe, model=model, bare_model=bare_model, counted=counted, topology=topology,
        room=room, plan=plan, stores=stores, batch=first_batch, first_step=first_step, not_compiled=not_compiled,
        learning_rate_at=lambda step: float(scheduler.base_lrs[0]) * factor(step))
    warnings = check()
    log = report.LaunchLog({} if trial else os.environ, is_main=accelerator.is_main_process, recipe=recipe)
    log.start(parameters_logical=bare_model.config.num_parameters, model=model, topology=topology, plan=plan,
              progress=progress, resumed_from=point.path,
              warnings=[*warnings, *([f"not compiled: {not_compiled}"] if not_compiled else [])])

    if monitor.windows and monitor.floors is None and trial is None:
        wanted = telemetry_rows(data.window_bytes, CALIBRATION_WINDOWS)
        log.notice(progress.step, monitor.calibrate(encode_bytes(spread_windows(stores, data.sources, wanted))))

    # The loop ------------------------------------------------------------------------------------------------------
    tally = StepTally(tuple(data.sources), accelerator.device)
    model.train()
    steps = (load_steps(dataset, progress.step, recipe.schedule.total_steps, num_workers=data.num_workers)
             if trial is None else trial.batches(first_batch, progress.step))
    for batch in steps:
        started = time.perf_counter()
        if recipe.qat_from_step is not None:
            set_qat(bare_model, progress.step >= recipe.qat_from_step)
        batch = batch.to(accelerator.device)
        for part in batch.split(recipe.accumulation_steps):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    output = model(part.bits_BT)
                losses_BT = part.without_padding(next_symbol_losses(output.logits_BTV, part.bits_BT))
                mean_loss = losses_BT.sum() / part.num_predicted_B().sum()
                accelerator.backward(mean_loss + recipe.ponder_weight * output.ponder)
                tally.add(losses_BT, part.num_predicted_B(), part.sources_B)
                if not accelerator.sync_gradients:
                    continue
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm)
                step = tally.reduce(grad_norm=grad_norm, stop=bool(stop_asked))  # all ranks agree from here on
                if not step.finite:
                    if trial is not None:
                        check(experiments={"gradients_finite": False})
                    log.keep_frames(batch, step)
                    raise NonFiniteGradients(
                        f"gradients of step {progress.step + 1} are not finite (grad_norm {step.grad_norm})",
                        "roll back with `chronicle rollback`; the last frames lie beside the launch's metrics")
                learning_rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        progress.step += 1
        progress.bits_seen += plan.batch_size * data.window_bytes * BITS_PER_BYTE
        if trial is not None:
            if ema is not None:
                ema.update(bare_model)
            trial.after_step(accelerator, progress, step, bare_model, batch)
            if step.stop:
                return
            continue
        last = step.stop or progress.step in (stop_at, recipe.schedule.total_steps)
        values = log.step(progress, step, learning_rate=learning_rate, batch=batch,
                          seconds=time.perf_counter() - started)
        if last or progress.step % recipe.eval_every == 0:
            found = evaluate(bare_model, held_out, rank=rank, world_size=world_size)
            values |= log.evaluation(progress, found)
            row = log.telemetry(progress, bare_model, held_out, batch)
            values |= {f"telemetry/{name}": value for name, value in row.items()}
        if progress.step % recipe.eval_every == 0:  # not at a stop: it must leave no trace in what is saved
            for notice in monitor.observe(values["eval_bpb"], row):
                log.notice(progress.step, notice)
            if recipe.schedule.shape == "plateau" and progress.observe_plateau(values["eval_bpb"], recipe.schedule):
                if len(progress.growths) < len(recipe.growth):  # grow, where the recipe has something left to grow
                    kind, before = recipe.growth[len(progress.growths)], bare_model.config.num_parameters
                    bare_model = grow(bare_model, kind)
                    model, optimizer = rewrap(accelerator, bare_model, optimizer, recipe)
                    progress.growths += ((progress.step, kind),)
                    progress.rewarms += ((progress.step, GROWTH_WARMUP),)
                    log.grown(progress, kind, bare_model, before)
                else:
                    progress.plateau = progress.plateau.cut(progress.step)
                set_learning_rates(optimizer, scheduler)
        if ema is not None:
            ema.update(bare_model)
        log.write(progress.step, values)
        monitor.require_ok()  # before a checkpoint is saved of what tripped it
        if last or progress.step % recipe.checkpoint_every == 0:
            path = checkpoint_path(checkpoints, progress.step)
            accelerator.save_state(str(path), safe_serialization=True)
            log.saved(progress, path)
        if last:
            break
    if trial is not None:
        experiments = trial.conclude(accelerator, model, first_batch, recipe.accumulation_steps)
        if experiments is not None:
            check(experiments=experiments)
        return
    if recipe.summary and progress.step == recipe.schedule.total_steps:
        final_model = bare_model if ema is None else ema.averaged(bare_model)
        whole_model = (final_model if recipe.sharding == "ddp" else
                       gather_whole(bare_model, keep=accelerator.is_main_process))
        log.summary(whole_model, stores, held_out, progress, averaged=ema is not None)
    log.end(progress, stopped=bool(stop_asked))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def rewrap(accelerator: Accelerator, grown: BitTransformer, optimizer: AcceleratedOptimizer,
           recipe: Recipe) -> tuple[Any, AcceleratedOptimizer]:
    """Put a grown model where the old one was. The optimizer stays the same object and begins without moments."""
    inner = optimizer.optimizer
    inner.state.clear()
    for group, fresh in zip(inner.param_groups, parameter_groups(grown, recipe.optimizer.weight_decay), strict=True):
        group["params"] = fresh["params"]
    accelerator.free_memory()
    model, wrapped = accelerator.prepare(grown.train(), inner)
    return model, wrapped


def set_learning_rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> None:
    """Give the optimizer the LR of the step it is at, after the schedule was changed at a resume."""
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


if __name__ == "__main__":
    sys.exit(main())
