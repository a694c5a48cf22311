"""Trains one launch of a bit transformer's study: `python -m experiments.trainer --plan plan.json --run B-s3 --leg 2`.

A small trainer made of bit_transformer's parts; read `train_leg` from top to bottom. Accelerate saves and loads under the
guard, as in ordinary training. To the study it is a command as any other: it is told its leg, and logs what it measures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import chronicle
from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.data.corpora import read_corpus
from bit_transformer.errors import TrainerError, print_error
from bit_transformer.evaluation.held_out import evaluate, mixture_bpb
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses
from bit_transformer.recipes import OptimizerConfig
from bit_transformer.training.report import bits_per_byte, open_output
from bit_transformer.training.resume import STATE_DIRECTORY, checkpoint_path
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule
from bit_transformer.training.setup import build_optimizers
from bit_transformer.training.state import Ema
from chronicle.data import step_digest
from chronicle.errors import ChronicleError
from chronicle.metrics.log import MetricsWriter
from experiments.definition import Loss, Profile
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import NoData
from experiments.order import (
    DataShape,
    Ids,
    Windows,
    cut_windows,
    leg_order,
    read_shape,
    slice_samples,
    spread,
    start_order,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code: 0 done, 1 an error in one sentence, 78 refused by the guard."""
    open_output(os.environ)
    parser = argparse.ArgumentParser(prog="python -m experiments.trainer", allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True, help="the registered plan")
    parser.add_argument("--run", required=True, help="run of the plan, for example B-s3")
    parser.add_argument("--leg", type=int, required=True, help="launch of that run, from 1")
    parser.add_argument("--resume", type=Path, help="checkpoint directory to load")
    options = parser.parse_args(argv)
    try:
        plan = StudyPlan.from_json(json.loads(options.plan.read_text(encoding="utf-8")))
        run = plan.run(options.run)
        train_leg(plan, run, run.legs[options.leg - 1], options.resume, Path(os.environ.get("CHRONICLE_CHECKPOINTS", ".")))
    except (ChronicleError, TrainerError) as problem:
        print_error(problem)
        return getattr(problem, "exit_code", 1)
    return 0


def train_leg(plan: StudyPlan, run: StudyRun, leg: Leg, resume: Path | None, checkpoints: Path) -> None:
    """Train the updates of one leg, and save where the plan says; the last update of a run logs its outcomes."""
    profile, weights = plan.profile, plan.sources
    torch.set_num_threads(1)
    shape, corpora = read_shape(plan)
    stores = [cut_windows(corpus.train, profile.window_bytes, corpus.name) for corpus in corpora]
    ids = reading_order(plan, run, leg, shape)
    small, large = (held_out(weights, profile, count) for count in (profile.eval_windows, 4 * profile.eval_windows))

    # Parts: everything that a checkpoint of this run holds ------------------------------------------------------------
    position = [leg.first]
    accelerator = chronicle.guard(
        Accelerator(cpu=profile.device == "cpu" or not torch.cuda.is_available(), mixed_precision=profile.mixed_precision),
        step=lambda: profile.start_updates + position[0],
        data_state=lambda: {"batch": position[0] + (leg.data_offset if position[0] > leg.first else 0)},
        fresh_start=run.arm == START, honours=("skip",))  # the plan sets the data offsets of legs
    set_seed(run.seed if run.arm == START else 0)
    if accelerator.device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # the gate asks for equal bits
    model: Any = BitTransformer(model_config(profile))
    optimizer: Any = build_optimizers(model, OptimizerConfig(lr=profile.lr))[0]
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = LambdaLR(optimizer.optimizer, plan_schedule(schedule_config(plan)))
    average = Ema(model, profile.ema_decay)
    accelerator.register_for_checkpointing(scheduler, average)
    if resume is not None:
        accelerator.load_state(str(resume / STATE_DIRECTORY))
    if leg.restart is not None and Loss.SCHEDULE in leg.restart.loses:  # as in exp9
        scheduler.last_epoch = 0
        for group, base in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = base * scheduler.lr_lambdas[0](0)

    # The loop -------------------------------------------------------------------------------------------------------------
    with MetricsWriter(Path(os.environ.get("CHRONICLE_LAUNCH_DIR", ".")) / "metrics.jsonl") as metrics:
        for batch in ids:
            bits_BT, sources_B = read_batch(stores, batch, accelerator.device)
            with accelerator.autocast():
                logits_BTV = model(bits_BT).logits_BTV
            losses_BT = next_symbol_losses(logits_BTV, bits_BT)
            loss = losses_BT.mean()
            accelerator.backward(loss)
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            values = {"loss": bits_per_byte(loss.item()), "lr": optimizer.param_groups[0]["lr"], "grad_norm": float(grad_norm)}
            values |= by_source(losses_BT, sources_B, tuple(weights), profile)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update(model)
            position[0] += 1
            values["data_digest"] = int(step_digest(batch)[:13], 16)  # 52 bits: a float holds it exactly
            if position[0] == leg.last or position[0] % profile.eval_every == 0:
                values |= held_out_bpb(model, small, weights, "eval")
            if position[0] == run.legs[-1].last:
                averaged = average.averaged(model)
                values |= held_out_bpb(model, large, weights, "raw") | held_out_bpb(averaged, large, weights, "averaged")
                values |= slices_bpb(plan, run, averaged, shape, stores)
            metrics.write(profile.start_updates + position[0], values)
            if position[0] in leg.saves:
                accelerator.save_state(str(checkpoint_path(checkpoints, profile.start_updates + position[0])))


def slices_bpb(plan: StudyPlan, run: StudyRun, model: BitTransformer, shape: DataShape,
               stores: Sequence[Windows]) -> dict[str, float]:
    """Bits per byte on text of the first and the last slice: an arm may have been trained on it."""
    found = {}
    for logical in (1, shape.num_slices) if run.arm != START else ():
        text = {}
        for source, name in enumerate(plan.sources):
            samples = slice_samples(shape, source, plan.order_seed(run), logical).ravel()
            text[name] = torch.from_numpy(stores[source][samples[spread(len(samples), 2 * plan.profile.eval_windows)]])
        found[f"slice/{logical}"] = mixture_bpb(evaluate(model, text), plan.sources)
    return found


def reading_order(plan: StudyPlan, run: StudyRun, leg: Leg, shape: DataShape) -> Ids:
    """The batches of this leg; `NoData` says which seed cannot be had."""
    try:
        if run.arm == START:
            return start_order(shape, run.seed)
        return leg_order(shape, plan.study.arm(run.arm), leg, plan.order_seed(run))
    except NoData as problem:
        raise NoData(f"no data for `{run.name}`: {problem.message}", problem.remedy) from problem


def read_batch(stores: Sequence[Windows], batch: Ids, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bits (B, T) and the source of each row (B,)."""
    windows = np.stack([stores[source][window] for source, window in batch.tolist()])
    return encode_bytes(torch.from_numpy(windows)).to(device), torch.from_numpy(batch[:, 0].copy()).to(device)


def held_out(weights: Mapping[str, int], profile: Profile, count: int) -> dict[str, Tensor]:
    """Return at most `count` evenly spaced held-out windows by source as bytes, the same for every arm."""
    found = {}
    for name in weights:
        windows = cut_windows(read_corpus(name).held_out, profile.window_bytes, name)
        found[name] = torch.from_numpy(windows[spread(len(windows), count)])
    return found


def held_out_bpb(model: BitTransformer, windows: Mapping[str, Tensor], weights: Mapping[str, int],
                 what: str) -> dict[str, float]:
    """Bits per byte by source, `what/<source>`, and their mean with the mixture's weights, `what/mixture`."""
    found = evaluate(model, windows)
    return {f"{what}/mixture": mixture_bpb(found, weights), **{f"{what}/{name}": bpb for name, bpb in found.items()}}


def model_config(profile: Profile) -> ModelConfig:
    """Shape of the model of a profile."""
    return ModelConfig(
        d_model=profile.d_model, num_heads=profile.num_heads, num_layers=profile.num_layers, d_ff=profile.d_ff,
        max_bits=profile.window_bytes * BITS_PER_BYTE)


def schedule_config(plan: StudyPlan) -> ScheduleConfig:
    """Return the schedule: warm-up, constant, linear decay to a tenth at the end of the last slice."""
    profile = plan.profile
    size = profile.slice_updates
    return ScheduleConfig(
        shape="wsd", warmup_steps=profile.warmup_updates, decay_steps=round(profile.decay_slices * size),
        total_steps=profile.start_updates + size * len(plan.study.arms[0].slices))


def by_source(losses_BT: Tensor, sources_B: Tensor, names: tuple[str, ...], profile: Profile) -> dict[str, float]:
    """`bpb/<source>` and `ratio/<source>` of one batch; the first bit of a window counts as a coin flip."""
    rows = (losses_BT.detach().double().sum(1) / math.log(2) + 1) / profile.window_bytes
    found: dict[str, float] = {}
    for number, name in enumerate(names):
        mine = sources_B == number
        found[f"ratio/{name}"] = float(mine.double().mean())
        if found[f"ratio/{name}"]:
            found[f"bpb/{name}"] = float(rows[mine].mean())
    return found


if __name__ == "__main__":
    sys.exit(main())
