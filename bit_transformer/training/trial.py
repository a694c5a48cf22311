"""The trial of `chronicle preflight --full`: a fit on one batch, saved half-way and resumed in a fresh process.

The same launcher is started twice with one directory. The first start fits, saves half-way, and records digests of the
memory and the losses; the second loads that checkpoint, compares memory, and repeats the second half. The setup and the
step are those of the training loop. The guard is off, and the run gets no step, metric or checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from bit_transformer.data.loaders import Batch
from bit_transformer.errors import NonFiniteGradients
from bit_transformer.evaluation.telemetry import agreement, certainty_of_output, place_frequencies
from bit_transformer.footprint import Announcer
from bit_transformer.model.transformer import BitTransformer, next_symbol_losses
from bit_transformer.recipes import Recipe
from bit_transformer.training.preflight import check_launch, require_room
from bit_transformer.training.report import LaunchLog
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.setup import (
    TrainingRun,
    build_run,
    catch_stop_signals,
    load_checkpoint,
    open_data,
    start_progress,
    start_ranks,
)
from bit_transformer.training.state import StepResult, StepTally, TrainingProgress
from chronicle.resume.adapters.accelerate import observe_accelerator
from chronicle.resume.fingerprint import rng_digests

STEPS = 200
SAME_LOSS = 1e-4  # relative; on a CPU the second half is bit-identical
CHECKPOINT, LOSSES, MEMORY = "checkpoint", "losses.json", "memory-rank-{rank}.json"

TakeStep = Callable[[TrainingRun, Batch, StepTally, Sequence[int]], StepResult]


def find_trial(environ: Mapping[str, str]) -> Trial | None:
    """Return the trial that preflight asked for through the environment; None for an ordinary launch."""
    directory = environ.get("CHRONICLE_PREFLIGHT_DIR")
    if environ.get("CHRONICLE_PREFLIGHT") != "full" or not directory:
        return None
    return Trial(Path(directory), num_steps=int(environ.get("CHRONICLE_PREFLIGHT_STEPS") or STEPS))


def run_trial(trial: Trial, recipe: Recipe, take_step: TakeStep, *, accident: str | None = None) -> None:
    """Run one of the two starts with the `take_step` of the training loop. Raises ChronicleError where a check fails."""
    stop_asked = catch_stop_signals()
    accelerator = start_ranks(recipe)
    announcer = Announcer(is_main=accelerator.is_main_process)
    data = open_data(recipe, announcer)
    progress = start_progress(recipe, data)
    announcer.model(recipe, accelerator.num_processes, accelerator.device.type)
    room = require_room(accelerator, recipe)
    run = build_run(recipe, accelerator, data, progress, room, announcer, start=trial.start.path)
    load_checkpoint(run, trial.start, accident=accident)
    trial.compare_memory(accelerator, progress)
    batch = data.steps(progress, accelerator)[0].to(accelerator.device)
    warnings = check_launch(run, batch, first_step=0)
    log = LaunchLog({}, is_main=accelerator.is_main_process, recipe=recipe)
    log.start(run, resumed_from=trial.start.path, warnings=warnings)

    tally = StepTally(tuple(recipe.data.sources), accelerator.device)
    run.model.train()
    for _ in range(progress.step, trial.num_steps):
        step = take_step(run, batch, tally, stop_asked)
        if not step.finite:
            check_launch(run, batch, first_step=0, experiments={"gradients_finite": False})
            raise NonFiniteGradients(f"gradients of step {progress.step + 1} are not finite (grad_norm {step.grad_norm})")
        progress.step += 1
        if run.ema is not None:
            run.ema.update(run.bare_model)
        trial.after_step(run, step, batch)
        if step.stop:
            return
    experiments = trial.conclude(run, batch)
    if experiments is not None:
        check_launch(run, batch, first_step=0, experiments=experiments)


class Trial:
    """One of the two starts; files in the directory tell which one."""

    def __init__(self, directory: Path, *, num_steps: int) -> None:
        self._directory = directory
        self.num_steps, self._half = num_steps, num_steps // 2
        self._losses: list[float] = []
        self._channels: dict[str, list[float]] = {}
        self._save_seconds: float | None = None
        self._different = ""
        self.resumes = (directory / LOSSES).is_file()

    @property
    def start(self) -> ResumePoint:
        """Where this start begins: fresh, or half-way."""
        return ResumePoint(path=self._directory / CHECKPOINT if self.resumes else None)

    def compare_memory(self, accelerator: Any, progress: TrainingProgress) -> None:
        """In the fresh process, right after the load: compare every object with its digest from the save."""
        if not self.resumes:
            return
        path = self._directory / MEMORY.format(rank=accelerator.process_index)
        before, now = json.loads(path.read_text(encoding="utf-8")), digest_memory(accelerator, progress)
        missing = [name for name in before if before[name] != now.get(name)]
        if missing:
            self._different = f"{', '.join(missing)} of rank {accelerator.process_index}"

    def after_step(self, run: TrainingRun, step: StepResult, batch: Batch) -> None:
        """Record the figures of a step; save when half of the steps are done. Collective."""
        self._losses.append(step.loss)
        self._note(loss=step.loss, grad_norm=step.grad_norm)
        if run.bare_model.config.vocab == 2 and run.progress.step % max(1, self.num_steps // 10) == 0:
            self._note(**_telemetry(run.bare_model, batch.bits_BT))
        if not self.resumes and run.progress.step == self._half:
            started = time.perf_counter()
            run.accelerator.save_state(str(self._directory / CHECKPOINT), safe_serialization=True)
            self._save_seconds = time.perf_counter() - started
            path = self._directory / MEMORY.format(rank=run.accelerator.process_index)
            path.write_text(json.dumps(digest_memory(run.accelerator, run.progress)), encoding="utf-8")

    def conclude(self, run: TrainingRun, batch: Batch) -> dict[str, Any] | None:
        """Return the facts of the trial; None after the first start, which only writes its records."""
        accelerator = run.accelerator
        if not self.resumes:
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                notes = {"losses": self._losses, "save_seconds": self._save_seconds, "bytes": _size(self._directory)}
                (self._directory / LOSSES).write_text(json.dumps(notes), encoding="utf-8")
            return None
        notes = json.loads((self._directory / LOSSES).read_text(encoding="utf-8"))
        different = [text for text in gather_object([self._different]) if text]
        difference = max(gather_object([
            _micro_batch_difference(accelerator, run.model, batch, run.recipe.accumulation_steps)]))
        return {
            "gradients_finite": True,
            "save_round_trip": "; ".join(different[:3]),
            "save_seconds": notes["save_seconds"],
            "checkpoint_bytes": notes["bytes"],
            "fit_losses": tuple(notes["losses"]),
            "fit_resumed_equal": _same(notes["losses"][self._half:], self._losses),
            "micro_batch_difference": difference,
            "telemetry": {name: tuple(values) for name, values in self._channels.items()},
        }

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self._channels.setdefault(name, []).append(value)


def digest_memory(accelerator: Any, progress: TrainingProgress) -> dict[str, str]:
    """Return a digest of every object that a checkpoint must restore, by name. Tensors are compared bit for bit."""
    live = observe_accelerator(accelerator)
    found: dict[str, Any] = {"weights": [tensor for model in live.models for tensor in model.state_dict().values()]}
    for optimizer in live.optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                found.setdefault(f"optimizer {key}", []).append(value)
        for group in optimizer.param_groups:
            found.setdefault("learning rates", []).append(group["lr"])
    found["schedule"] = [getattr(bound.scheduler, "last_epoch", None) for bound in live.schedulers]
    found["progress and data position"] = [json.dumps(progress.state_dict(), sort_keys=True)]
    averages = [thing for thing in accelerator._custom_objects if type(thing).__name__ == "Ema"]
    found["averaged weights"] = [value for ema in averages for value in ema.state_dict().values()]
    found["random numbers"] = [json.dumps(rng_digests(), sort_keys=True)]
    return {name: _digest(values) for name, values in found.items() if values}


def _digest(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        value = getattr(value, "_local_tensor", value)  # a sharded parameter: this rank's part
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()


@torch.no_grad()
def _micro_batch_difference(accelerator: Any, model: nn.Module, batch: Batch, parts: int) -> float:
    """Return |loss of the batch − mean loss of its parts| / loss: whether accumulation gives the loss of the batch."""
    was_training = model.training
    model.eval()
    losses = []
    for number in (1, parts if parts > 1 else 2):
        sums = [_mean_loss(accelerator, model, part) for part in batch.split(number)]
        losses.append(sum(sums) / len(sums))
    model.train(was_training)
    return abs(losses[0] - losses[1]) / abs(losses[0]) if losses[0] else 0.0


def _mean_loss(accelerator: Any, model: nn.Module, part: Batch) -> float:
    with accelerator.autocast():
        logits = model(part.bits_BT).logits_BTV
    losses_BT = part.without_padding(next_symbol_losses(logits, part.bits_BT))
    return float(losses_BT.sum() / part.num_predicted_B().sum())


@torch.no_grad()
def _telemetry(model: BitTransformer, bits_BT: Tensor) -> dict[str, float]:
    """Return mean K and S of the predictions. C and the flip rate are left out: the batch does not change."""
    logits_BT2 = model(bits_BT).logits_BTV
    return {"K": float(certainty_of_output(logits_BT2).mean()),
            "S": float(agreement(logits_BT2, place_frequencies(bits_BT)).mean())}


def _same(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(one, other, rel_tol=SAME_LOSS) for one, other in zip(first, second, strict=True))


def _size(directory: Path) -> int:
    return sum(os.lstat(Path(root) / name).st_size for root, _, names in os.walk(directory / CHECKPOINT) for name in names)
