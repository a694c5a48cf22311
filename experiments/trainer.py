"""Trains one launch of a study: `python -m experiments.trainer --plan plan.json --run B-s3 --leg 2`.

A small trainer made of bit_transformer's parts; read `train_leg` from top to bottom. Accelerate saves and loads under the
guard, as in ordinary training. A leg that loses state on purpose runs with the guard on `warn`, which records its verdict.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import chronicle
from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.data.corpora import read_corpus
from bit_transformer.errors import TrainerError
from bit_transformer.evaluation.held_out import evaluate, mixture_bpb
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses
from bit_transformer.recipes import OptimizerConfig
from bit_transformer.training.preflight import digest_values
from bit_transformer.training.report import open_output
from bit_transformer.training.resume import checkpoint_path
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule
from bit_transformer.training.setup import build_optimizers
from bit_transformer.training.state import Ema
from chronicle.data import step_digest
from chronicle.errors import ChronicleError
from chronicle.metrics.log import MetricsWriter
from experiments.definition import Loss, Profile
from experiments.design import START, Leg, StudyPlan, StudyRun
from experiments.errors import NoData, StudyError
from experiments.files import LEG_RESULT, LegResult, write_result
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

GUARDED = {Loss.MOMENTS, Loss.SCHEDULE, Loss.PRECISION}  # losses that the guard must notice


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit code: 0 done, 1 an error in one sentence, 78 refused by the guard."""
    open_output(os.environ)
    parser = argparse.ArgumentParser(prog="python -m experiments.trainer", allow_abbrev=False)
    parser.add_argument("--plan", type=Path, required=True, help="the registered plan")
    parser.add_argument("--run", required=True, help="run of the plan, for example B-s3")
    parser.add_argument("--leg", type=int, required=True, help="launch of that run, from 1")
    parser.add_argument("--resume", type=Path, help="checkpoint directory to load")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(os.environ.get("CHRONICLE_CHECKPOINTS", "checkpoints"))
    )
    options = parser.parse_args(argv)
    try:
        plan = StudyPlan.from_json(json.loads(options.plan.read_text(encoding="utf-8")))
        run = plan.run(options.run)
        train_leg(plan, run, run.legs[options.leg - 1], options.resume, options.checkpoints)
    except (ChronicleError, TrainerError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 78 if type(problem).__name__ == "ResumeRefused" else 1
    except OSError as problem:
        print(f"error: {problem.strerror or problem}: `{problem.filename}`", file=sys.stderr)
        return 1
    return 0


def train_leg(plan: StudyPlan, run: StudyRun, leg: Leg, resume: Path | None, checkpoints: Path) -> None:
    """Train the updates of one leg, save where the plan says, and write the result last."""
    profile, weights = plan.profile, plan.sources
    began = time.perf_counter()
    torch.set_num_threads(1)
    shape, corpora = read_shape(plan)
    stores = [cut_windows(corpus.train, profile.window_bytes, corpus.name) for corpus in corpora]
    ids = reading_order(plan, run, leg, shape)
    small, large = (held_out(weights, profile, count) for count in (profile.eval_windows, 4 * profile.eval_windows))

    # Parts: everything that a checkpoint of this run holds ------------------------------------------------------------
    position = [leg.first]
    loses = set(leg.restart.loses) if leg.restart else set()
    accelerator = chronicle.guard(
        Accelerator(cpu=profile.device == "cpu" or not torch.cuda.is_available(), mixed_precision=profile.mixed_precision),
        step=lambda: profile.start_updates + position[0],
        data_state=lambda: {"run": run.name, "batch": position[0] + (leg.data_offset if position[0] > leg.first else 0)},
        fresh_start=run.arm == START, honours=("skip",),  # the plan sets the data offsets of legs
        accept_change=accepted(run, leg),
        mode="warn" if loses & GUARDED else "enforce")
    set_seed(run.seed if run.arm == START else 0)
    if accelerator.device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # the gate asks for equal bits
    model: Any = BitTransformer(model_config(profile))
    optimizer: Any = build_optimizers(model, OptimizerConfig(lr=profile.lr))[0]
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = LambdaLR(optimizer.optimizer, plan_schedule(schedule_config(plan)))
    average = Ema(model, profile.ema_decay)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.register_for_checkpointing(average)

    # Resume, then the treatment ------------------------------------------------------------------------------------------
    if resume is not None:
        accelerator.load_state(str(resume))
    if Loss.MOMENTS in loses:
        optimizer.optimizer.state.clear()
    if Loss.PRECISION in loses:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.to(torch.bfloat16))
    if Loss.SCHEDULE in loses:
        restart_schedule(optimizer.optimizer, scheduler)

    # The loop -------------------------------------------------------------------------------------------------------------
    saved: list[Path] = []
    with MetricsWriter(launch_dir() / "metrics.jsonl") as metrics:
        for batch in ids:
            bits_BT, sources_B = read_batch(stores, batch, accelerator.device)
            with accelerator.autocast():
                logits_BTV = model(bits_BT).logits_BTV
            losses_BT = next_symbol_losses(logits_BTV, bits_BT)
            loss = losses_BT.mean()
            accelerator.backward(loss)
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            values = {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"], "grad_norm": float(grad_norm)}
            values |= by_source(losses_BT, sources_B, tuple(weights), profile)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update(model)
            position[0] += 1
            values["data_digest"] = int(step_digest(batch)[:13], 16)  # 52 bits: a float holds it exactly
            last = position[0] == leg.last
            if last or position[0] % profile.eval_every == 0:
                found = held_out_bpb(model, small, weights)
                values |= {f"eval/{name}": bpb for name, bpb in found.items()}
            metrics.write(profile.start_updates + position[0], values)
            if position[0] in leg.saves:
                saved.append(checkpoint_path(checkpoints, profile.start_updates + position[0]))
                save(accelerator, saved[-1])

    # The result, written last ---------------------------------------------------------------------
    done = leg is run.legs[-1]
    final = measure_leg(plan, run, model, average.averaged(model), large, shape, stores) if done else {}
    write_result(launch_dir() / LEG_RESULT, LegResult(
        plan_hash=plan.plan_hash, run=run.name, leg=leg.number, first=leg.first, last=leg.last,
        weights=digest_values(dict(model.named_parameters())), moments=digest_values(optimizer.optimizer.state_dict()),
        average=digest_values(average.state_dict()), checkpoints=tuple(str(path) for path in saved),
        final=final, seconds=round(time.perf_counter() - began, 3),
        device=str(accelerator.device)))


def save(accelerator: Accelerator, path: Path) -> None:
    """Save a checkpoint. On a full disk torch only reports `unexpected pos`, so the error names the free bytes."""
    try:
        accelerator.save_state(str(path))
    except ChronicleError:
        raise
    except Exception as problem:  # OSError, torch's RuntimeError, safetensors' own
        free = shutil.disk_usage(next(parent for parent in path.parents if parent.is_dir())).free
        told = str(problem).splitlines()[0]
        raise StudyError(
            f"checkpoint `{path.parent.name}` could not be saved: {free:,} bytes are free on its disk ({told})",
            "make room, then `chronicle experiment run … --retry-stopped`",
        ) from problem


def measure_leg(
    plan: StudyPlan, run: StudyRun, model: BitTransformer, averaged: BitTransformer, windows: Mapping[str, Tensor],
    shape: DataShape, stores: Sequence[Windows],
) -> dict[str, float]:
    """The outcomes of a finished run: `raw/…`, `averaged/…`, `slice/…`, `copy/…`, all in bits per byte."""
    found = {f"raw/{name}": bpb for name, bpb in held_out_bpb(model, windows, plan.sources).items()}
    found |= {f"averaged/{name}": bpb for name, bpb in held_out_bpb(averaged, windows, plan.sources).items()}
    found |= copy_task(averaged, plan.profile.window_bytes)
    for logical in (1, shape.num_slices) if run.arm != START else ():
        text = {}  # an arm may have been trained on it
        for source, name in enumerate(plan.sources):
            samples = slice_samples(shape, source, plan.order_seed(run), logical).ravel()
            text[name] = torch.from_numpy(stores[source][samples[spread(len(samples), 2 * plan.profile.eval_windows)]])
        found[f"slice/{logical}"] = held_out_bpb(averaged, text, plan.sources)["mixture"]
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


def held_out_bpb(model: BitTransformer, windows: Mapping[str, Tensor], weights: Mapping[str, int]) -> dict[str, float]:
    """Bits per byte by source, and their mean with the mixture's weights under `mixture`."""
    found = evaluate(model, windows, rank=0, world_size=1)
    by_source = {name: held.bpb for name, held in found.items()}
    return {**by_source, "mixture": mixture_bpb(found, weights)}


def accepted(run: StudyRun, leg: Leg) -> dict[str, str]:
    """Return what may differ from the checkpoint by design, with the reason that the guard records."""
    if run.arm != START and leg.number == 1:
        return {"data": "the arm's slices begin here, after the common start"}
    if leg.data_offset:
        return {"data": "batches are skipped after the rollback, by plan"}
    return {}


def restart_schedule(optimizer: AdamW, scheduler: LambdaLR) -> None:
    """Start the LR schedule again, as in exp9."""
    scheduler.last_epoch, scheduler._step_count = 0, 1
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(0)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


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


def launch_dir() -> Path:
    """Where this launch writes: given by `chronicle run`, else the working directory."""
    return Path(os.environ.get("CHRONICLE_LAUNCH_DIR", "."))


# --- A small analogue of k-shot evaluation
#
# The bits of the last copy of a random string after k earlier copies, at equal position and length. No gain at the
# common checkpoint means "not measurable at this size".

COPIES = (0, 4)
LONGEST_STRING = 8
NUM_PROBES = 96
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


@torch.no_grad()
def copy_task(model: BitTransformer, window_bytes: int) -> dict[str, float]:
    """Bits per byte of a random string's last copy after k = 0 and 4 earlier ones; keys `copy/0` and `copy/4`."""
    size = min(LONGEST_STRING, window_bytes // (max(COPIES) + 1))
    if size < 2:
        return {}
    device = next(model.parameters()).device
    drawn = LETTERS[np.random.default_rng(0).integers(0, len(LETTERS), size=(NUM_PROBES, max(COPIES) + 1, size))]
    found = {}
    for copies in COPIES:
        strings = drawn.copy()
        strings[:, max(COPIES) - copies :] = drawn[:, -1:]
        bits_BT = encode_bytes(torch.from_numpy(strings.reshape(NUM_PROBES, -1))).to(device)
        losses = next_symbol_losses(model(bits_BT).logits_BTV, bits_BT)[:, -size * BITS_PER_BYTE :]
        found[f"copy/{copies}"] = float(losses.double().sum() / math.log(2) / (NUM_PROBES * size))
    return found


if __name__ == "__main__":
    sys.exit(main())
