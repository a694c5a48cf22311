"""The training loop: `torchrun --nproc_per_node 2 -m bit_transformer.train --recipe demo`. Read `train` from top to bottom.

Counters are optimizer steps everywhere; losses are in nats per bit. What is built before the first step is in
`training/setup.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate.utils import reduce
from torch import Tensor

from bit_transformer.data.loaders import Batch, StepDataset, load_steps
from bit_transformer.errors import CannotResume, NonFiniteGradients, print_error
from bit_transformer.evaluation.held_out import evaluate
from bit_transformer.model.conversion import set_qat
from bit_transformer.model.transformer import next_symbol_losses
from bit_transformer.recipes import Recipe, find_recipe, with_settings
from bit_transformer.training.report import LaunchLog, open_output
from bit_transformer.training.resume import checkpoint_path, find_resume_point
from bit_transformer.training.setup import (
    TrainingRun,
    build_run,
    catch_stop_signals,
    load_checkpoint,
    open_data,
    start_ranks,
)
from bit_transformer.training.state import StepResult, StepTally, TrainingProgress
from chronicle import guard
from chronicle.errors import ChronicleError
from chronicle.launch.ranks import leave_group


def main(argv: Sequence[str] | None = None, *, dataset: Callable[..., StepDataset] = StepDataset) -> int:
    """Run from the command line; return the exit code. Known errors are one sentence and a hint."""
    open_output(os.environ)
    parser = argparse.ArgumentParser(prog="python -m bit_transformer.train", allow_abbrev=False)
    parser.add_argument("--recipe", default="demo", help="name of a recipe (a function in recipes.py)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one field of the recipe")
    parser.add_argument("--checkpoints", type=Path, default=Path(os.environ.get("CHRONICLE_CHECKPOINTS", "checkpoints")))
    parser.add_argument("--resume", default="auto", help="auto, fresh, a step, or a path")
    parser.add_argument("--stop-at", type=int, help="save and end this launch after this step")
    parser.add_argument("--accident", default="none", choices=["none", "schedule-restarts", "moments-lost"],
                        help="state that is lost at the resume, for demonstrations and studies: the guard must refuse it")
    options = parser.parse_args(argv)
    try:
        recipe = with_settings(find_recipe(options.recipe), options.set)
        train(recipe, options.checkpoints, options.resume, stop_at=options.stop_at, accident=options.accident,
              dataset=dataset)
    except ChronicleError as problem:
        print_error(problem)
        return problem.exit_code
    finally:
        leave_group()
    return 0


def train(recipe: Recipe, checkpoints: Path, resume: str, *, stop_at: int | None = None,
          accident: str = "none", dataset: Callable[..., StepDataset] = StepDataset) -> None:
    """Train `recipe` to its last step, to `stop_at` or until SIGTERM; a checkpoint is saved in each case.

    `dataset` makes the dataset: a study orders the samples itself.
    """
    stop_asked = catch_stop_signals()

    # Ranks, data, model, optimizers --------------------------------------------------------------------------------
    accelerator = start_ranks(recipe)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    log = LaunchLog(os.environ, is_main=accelerator.is_main_process, recipe=recipe)
    data = open_data(recipe)
    log.announce(data, accelerator.device.type)
    progress, total_steps = TrainingProgress(data.plan, recipe.gate), recipe.schedule.total_steps
    guard(accelerator, step=lambda: progress.step, data_state=progress.data_state, fresh_start=resume == "fresh",
          honours=("warmup", "skip", "reshuffle"))
    point = find_resume_point(resume, checkpoints, os.environ)
    run = build_run(recipe, accelerator, progress, start=point.path)

    # Resume: the guard compares memory with contract and manifest at the load and again before the first step -----------
    load_checkpoint(run, point, accident=accident)
    if stop_at is not None and stop_at <= progress.step:
        raise CannotResume(f"--stop-at is {stop_at}, this launch starts after step {progress.step}", "name a later step")
    log.start(run, resumed_from=point.path)
    steps = dataset(data.plan, progress.segments, data.stores, recipe.data, rank=rank, world_size=world_size,
                    as_bytes=recipe.model.vocab == 256)

    # The loop ------------------------------------------------------------------------------------------------------
    tally = StepTally(tuple(recipe.data.sources), accelerator.device)
    run.model.train()
    for batch in load_steps(steps, progress.step, total_steps, num_workers=recipe.data.num_workers):
        started = time.perf_counter()
        batch = batch.to(accelerator.device)
        learning_rate = run.learning_rate
        step = take_step(run, batch, tally, stop_asked)
        if not step.finite:
            log.took(batch)
            raise NonFiniteGradients(
                f"gradients of step {progress.step + 1} are not finite (grad_norm {step.grad_norm})",
                "roll back with `chronicle rollback`; the last line of `samples.jsonl` in the launch directory names the batch")
        progress.step += 1
        last = step.stop or progress.step in (stop_at, total_steps)
        values = log.step(progress, step, learning_rate=learning_rate, batch=batch, seconds=time.perf_counter() - started)
        if last or progress.step % recipe.eval_every == 0:
            found = evaluate(run.bare_model, data.held_out, rank=rank, world_size=world_size)
            values |= log.evaluation(progress, found)
        if progress.step % recipe.eval_every == 0:  # not at a stop: it must leave no trace in what is saved
            if progress.gate.observe(values["eval_bpb"]):
                log.gate(progress)
            if recipe.schedule.shape == "plateau" and progress.observe_plateau(values["eval_bpb"], recipe.schedule):
                if len(progress.growths) < len(recipe.growth):
                    log.grown(progress, run.grow(recipe.growth[len(progress.growths)]))
                else:
                    progress.decays += (progress.step,)
                run.apply_schedule()
        log.write(progress.step, values)
        progress.gate.require_open()  # before a checkpoint is saved of what tripped it
        if last or progress.step % recipe.checkpoint_every == 0:
            path = checkpoint_path(checkpoints, progress.step)
            accelerator.save_state(str(path))
            log.saved(progress, path)
        if last:
            break
    if recipe.summary and progress.step == total_steps:
        log.summary(run.whole_model(), data, progress)
    log.end(progress, stopped=bool(stop_asked))


def take_step(run: TrainingRun, batch: Batch, tally: StepTally, stop_asked: Sequence[int]) -> StepResult:
    """Run one optimizer step on this rank's batch and return its figures over all ranks.

    `stop` of the result is True where any rank has received a stop signal. Where a gradient is not finite on some rank
    (`finite` is False) no rank changes its weights.
    """
    recipe, accelerator = run.recipe, run.accelerator
    if recipe.qat_from_step is not None:
        set_qat(run.bare_model, run.progress.step >= recipe.qat_from_step)
    share = predicted_share(batch, recipe)
    for part in batch.split(recipe.accumulation_steps):
        with accelerator.accumulate(run.model):
            with accelerator.autocast():
                output = run.model(part.bits_BT)
            losses_BT = part.without_padding(next_symbol_losses(output.logits_BTV, part.bits_BT))
            mean_loss = losses_BT.sum() / share  # the mean over the batch, once parts and ranks are averaged
            accelerator.backward(mean_loss + recipe.ponder_weight * output.ponder)
            tally.add(losses_BT, part.num_predicted_B(), part.sources_B)
            if not accelerator.sync_gradients:
                continue
            grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), recipe.optimizer.max_grad_norm)
            step = tally.reduce(grad_norm=grad_norm, stop=bool(stop_asked))  # all ranks agree from here on
            if step.finite:
                run.update()
    return step


def predicted_share(batch: Batch, recipe: Recipe) -> Tensor:
    """Return the number of predicted symbols of a micro-batch, as the mean over all parts and ranks of the batch.

    Parts with much padding have fewer; each divided by its own number would give their symbols more weight. Only
    compressed windows are padded, so only then are the ranks asked. Collective in that case.
    """
    total = batch.num_predicted_B().sum().double()
    if recipe.data.compress_end:
        total = reduce(total)
    return (total / recipe.accumulation_steps).float()


if __name__ == "__main__":
    sys.exit(main())
