"""Trains one launch of a study: `python -m experiments.trainer --plan plan.json --run B-s3 --leg 2`.

A small trainer made of bit_transformer's parts; read `train_leg` from top to bottom. Accelerate saves and loads under the
guard, as in ordinary training. A leg that loses state on purpose runs with the guard on `warn`, which records its verdict.
"""

from __future__ import annotations

import argparse
import hashlib
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
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import chronicle
from bit_transformer.data.bits import BITS_PER_BYTE, encode_bytes
from bit_transformer.data.corpora import read_corpus
from bit_transformer.errors import TrainerError
from bit_transformer.model.transformer import BitTransformer, ModelConfig, next_symbol_losses
from bit_transformer.recipes import OptimizerConfig
from bit_transformer.training.report import open_output
from bit_transformer.training.resume import checkpoint_path
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule
from bit_transformer.training.setup import build_optimizers
from chronicle.data import step_digest
from chronicle.errors import ChronicleError
from chronicle.metrics.log import MetricsWriter
from experiments.definition import Loss, Order, Profile
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
    entropy = os.urandom(8).hex() if leg.restart and leg.restart.order is Order.STOCK_UNSEEDED else None
    shape, stores = read_data(plan)
    ids = reading_order(plan, run, leg, shape, entropy)
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
        mode="warn" if loses & GUARDED else "enforce")  # fmt: skip
    set_seed(run.seed if run.arm == START else 0)
    if accelerator.device.type == "cuda":
        torch.use_deterministic_algorithms(True)  # the gate asks for equal bits
    model: Any = BitTransformer(model_config(profile))
    optimizer: Any = build_optimizers(model, OptimizerConfig(lr=profile.lr))[0]
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = LambdaLR(optimizer.optimizer, plan_schedule(schedule_config(plan)))
    average = AveragedWeights(model, profile.ema_decay)
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
    final = measure_leg(plan, run, model, average, large, shape, stores) if done else {}
    write_result(launch_dir() / LEG_RESULT, LegResult(
        plan_hash=plan.plan_hash, run=run.name, leg=leg.number, first=leg.first, last=leg.last,
        weights=digest_state(dict(model.named_parameters())), moments=digest_state(optimizer.optimizer.state_dict()),
        average=digest_state(average.values), checkpoints=tuple(str(path) for path in saved),
        final=final, entropy=entropy, seconds=round(time.perf_counter() - began, 3),
        device=str(accelerator.device)))  # fmt: skip


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
    plan: StudyPlan, run: StudyRun, model: Any, average: AveragedWeights, windows: Mapping[str, Tensor], shape: DataShape,
    stores: Sequence[Windows],
) -> dict[str, float]:  # fmt: skip
    """The outcomes of a finished run: `raw/…`, `averaged/…`, `slice/…`, `copy/…`, `recall/…`, all in bits per byte."""
    weights = plan.sources
    found = {f"raw/{name}": bpb for name, bpb in held_out_bpb(model, windows, weights).items()}
    averaged = average.copy_to(BitTransformer(model_config(plan.profile)).to(next(model.parameters()).device)).eval()
    found |= {f"averaged/{name}": bpb for name, bpb in held_out_bpb(averaged, windows, weights).items()}
    found |= copy_task(averaged, plan.profile.window_bytes) | recall_task(averaged, plan.profile.window_bytes)
    if run.arm != START:
        for logical in (1, shape.num_slices):
            text = slice_windows(plan, shape, stores, plan.order_seed(run), logical)
            found[f"slice/{logical}"] = held_out_bpb(averaged, text, weights)["mixture"]
    return found


def slice_windows(
    plan: StudyPlan, shape: DataShape, stores: Sequence[Windows], seed: int, logical: int
) -> dict[str, Tensor]:
    """Return evenly spaced windows of a slice of this seed by source; an arm may have been trained on them."""
    found = {}
    for source, name in enumerate(plan.sources):
        samples = slice_samples(shape, source, seed, logical).ravel()
        chosen = samples[spread(len(samples), 2 * plan.profile.eval_windows)]
        found[name] = to_bits(stores[source][chosen])
    return found


def read_data(plan: StudyPlan) -> tuple[DataShape, tuple[Windows, ...]]:
    """The shape of the study's data, and the training windows of each source."""
    shape, corpora = read_shape(plan)
    return shape, tuple(cut_windows(c.train, plan.profile.window_bytes, c.name) for c in corpora)


def reading_order(plan: StudyPlan, run: StudyRun, leg: Leg, shape: DataShape, entropy: str | None) -> Ids:
    """The batches of this leg; `NoData` says which seed cannot be had."""
    try:
        if run.arm == START:
            return start_order(shape, run.seed)
        return leg_order(shape, plan.study.arm(run.arm), leg, plan.order_seed(run), entropy=entropy)
    except NoData as problem:
        raise NoData(f"no data for `{run.name}`: {problem.message}", problem.remedy) from problem


def read_batch(stores: Sequence[Windows], batch: Ids, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bits (B, T) and the source of each row (B,)."""
    windows = np.stack([stores[source][window] for source, window in batch.tolist()])
    return to_bits(windows).to(device), torch.from_numpy(batch[:, 0].copy()).to(device)


def held_out(weights: Mapping[str, int], profile: Profile, count: int) -> dict[str, Tensor]:
    """Return at most `count` evenly spaced held-out windows by source, the same for every arm."""
    found = {}
    for name in weights:
        windows = cut_windows(read_corpus(name).held_out, profile.window_bytes, name)
        found[name] = to_bits(windows[spread(len(windows), count)])
    return found


def to_bits(windows: Windows) -> Tensor:
    """Bits (windows, T)."""
    return encode_bytes(torch.from_numpy(np.ascontiguousarray(windows))).long()


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
        max_bits=profile.window_bytes * BITS_PER_BYTE)  # fmt: skip


def schedule_config(plan: StudyPlan) -> ScheduleConfig:
    """Return the schedule: warm-up, constant, linear decay to a tenth at the end of the last slice."""
    profile = plan.profile
    size = profile.slice_updates
    return ScheduleConfig(
        shape="wsd", warmup_steps=profile.warmup_updates, decay_steps=round(profile.decay_slices * size),
        total_steps=profile.start_updates + size * len(plan.study.arms[0].slices))  # fmt: skip


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


# --- Measurements
#
# The copy task is a small analogue of k-shot evaluation: the bits of the last copy of a random string after k earlier copies,
# with equal position and length for every k. No gain at the common checkpoint means "not measurable at this size".

COPIES = (0, 2, 4)
LONGEST_STRING = 8
NUM_PROBES = 96
EVAL_BATCH = 64
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


class AveragedWeights:
    """An exponential moving average of the weights, restored exactly at every restart."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after a step to the average."""
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> nn.Module:
        """Overwrite a model's weights with the average; returns the model."""
        for name, value in model.named_parameters():
            value.copy_(self.values[name])
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"decay": self.decay, "values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the checkpoint on this device."""
        self.values = {name: state["values"][name].to(value.device).clone() for name, value in self.values.items()}


@torch.no_grad()
def held_out_bpb(model: nn.Module, windows: Mapping[str, Tensor], weights: Mapping[str, int]) -> dict[str, float]:
    """Bits per byte by source, and their mean with the mixture's weights under `mixture`.

    Over all positions; the first bit of a window is predicted by nothing and counts as a coin flip.
    """
    device = next(model.parameters()).device
    found = {}
    for name, bits_NT in windows.items():
        total = float(len(bits_NT))  # in bits
        for bits_BT in torch.split(bits_NT.to(device), EVAL_BATCH):
            total += float(next_symbol_losses(model(bits_BT).logits_BTV, bits_BT).double().sum()) / math.log(2)
        found[name] = total * BITS_PER_BYTE / bits_NT.numel()
    mixture = sum(found[name] * weights[name] for name in found) / sum(weights[name] for name in found)
    return {**found, "mixture": mixture}


def copy_task(model: nn.Module, window_bytes: int) -> dict[str, float]:
    """Bits per byte of a random string's last copy after k = 0, 2, 4 earlier ones; keys `copy/0` …"""
    size = min(LONGEST_STRING, window_bytes // (max(COPIES) + 1))
    if size < 2:
        return {}
    dice = np.random.default_rng(0)
    drawn = LETTERS[dice.integers(0, len(LETTERS), size=(NUM_PROBES, max(COPIES) + 1, size))]
    found = {}
    for copies in COPIES:
        strings = drawn.copy()
        strings[:, max(COPIES) - copies :] = drawn[:, -1:]
        found[f"copy/{copies}"] = _last_bytes_bpb(model, strings.reshape(NUM_PROBES, -1), size)
    return found


def recall_task(model: nn.Module, window_bytes: int) -> dict[str, float]:
    """Bits of the value in `a=1;b=2;…;a=`, when its key was never shown (`recall/0`) and when it was (`recall/1`)."""
    pairs = window_bytes // 4 - 1
    if pairs < 2:
        return {}
    dice = np.random.default_rng(1)
    unseen, seen = [], []
    for _ in range(NUM_PROBES):
        keys = dice.permutation(LETTERS)[: min(pairs, 20) + 1]
        values = dice.integers(ord("0"), ord("9") + 1, size=len(keys)).astype(np.uint8)
        shown = b"".join(bytes([k, 61, v, 59]) for k, v in zip(keys[1:], values[1:], strict=True))
        chosen = int(dice.integers(1, len(keys)))
        seen.append(shown + bytes([keys[chosen], 61, values[chosen]]))
        unseen.append(shown + bytes([keys[0], 61, values[0]]))
    return {f"recall/{number}": _last_bytes_bpb(model, np.stack([np.frombuffer(text, dtype=np.uint8) for text in texts]), 1)
            for number, texts in ((0, unseen), (1, seen))}  # fmt: skip


@torch.no_grad()
def _last_bytes_bpb(model: nn.Module, windows: np.ndarray[Any, np.dtype[np.uint8]], num_last: int) -> float:
    device = next(model.parameters()).device
    bits = encode_bytes(torch.from_numpy(np.ascontiguousarray(windows))).long().to(device)
    losses = next_symbol_losses(model(bits).logits_BTV, bits)[:, -num_last * BITS_PER_BYTE :]
    return float(losses.double().sum() / math.log(2) / (len(windows) * num_last))


def digest_state(values: Mapping[str, Any]) -> str:
    """Hex sha256 over names and bytes of tensors (nested mappings and lists allowed): equal digests are equal bits."""
    digest = hashlib.sha256()
    _feed(digest, "", values)
    return digest.hexdigest()


def _feed(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(digest, f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _feed(digest, f"{name}/{number}", item)
    elif isinstance(value, Tensor):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"{name}={value!r}".encode())


if __name__ == "__main__":
    sys.exit(main())
