"""The experiments of `chronicle preflight --full`: a fit on one batch, saved half-way and gone on with in a fresh process.

The same launcher is started twice with one directory. The first start fits, saves half-way and notes what memory held
there and which losses came; the second loads that checkpoint, compares memory, and goes the second half again. The steps
are those of the trainer's own loop; nothing is guarded, nothing becomes a step or a checkpoint of the run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from bit_transformer.data.loaders import Batch
from bit_transformer.evaluation.telemetry import agreement, certainty_of_output, place_frequencies
from bit_transformer.model.transformer import BitTransformer, next_symbol_losses
from bit_transformer.training.resume import ResumePoint
from bit_transformer.training.state import StepResult, TrainingProgress
from chronicle.resume.adapters.accelerate import observe_accelerator
from chronicle.resume.fingerprint import rng_digests

__all__ = ["Trial", "open_trial"]

STEPS = 200
SAME_LOSS = 1e-4  # relative; on a CPU the second half is bit-identical
CHECKPOINT, LOSSES, MEMORY = "checkpoint", "losses.json", "memory-rank-{rank}.json"


def open_trial(environ: Mapping[str, str]) -> Trial | None:
    """The trial that was asked for; None for an ordinary launch."""
    directory = environ.get("CHRONICLE_PREFLIGHT_DIR")
    if environ.get("CHRONICLE_PREFLIGHT") != "full" or not directory:
        return None
    return Trial(Path(directory), num_steps=int(environ.get("CHRONICLE_PREFLIGHT_STEPS") or STEPS))


class Trial:
    """One of the two starts; which one follows from what lies in the directory."""

    def __init__(self, directory: Path, *, num_steps: int) -> None:
        self._directory = directory
        self._num_steps, self._half = num_steps, num_steps // 2
        self._losses: list[float] = []
        self._channels: dict[str, list[float]] = {}
        self._save_seconds: float | None = None
        self._different = ""
        self.resumes = (directory / LOSSES).is_file()

    @property
    def start(self) -> ResumePoint:
        """Where this start begins: fresh, or half-way."""
        return ResumePoint(path=self._directory / CHECKPOINT if self.resumes else None)

    def batches(self, batch: Batch, first: int) -> Iterator[Batch]:
        """The same batch for every step of the trial from `first` on."""
        return itertools.repeat(batch, self._num_steps - first)

    def compare_memory(self, accelerator: Any, progress: TrainingProgress) -> None:
        """In the fresh process, right after the load: every object against what was noted when it was saved."""
        if not self.resumes:
            return
        path = self._directory / MEMORY.format(rank=accelerator.process_index)
        before, now = json.loads(path.read_text(encoding="utf-8")), digest_memory(accelerator, progress)
        missing = [name for name in before if before[name] != now.get(name)]
        if missing:
            self._different = f"{', '.join(missing)} of rank {accelerator.process_index}"

    def after_step(self, accelerator: Any, progress: TrainingProgress, step: StepResult, model: BitTransformer, batch: Batch) -> None:
        """Note a step's figures; save when half of the steps are done. Runs on every rank."""
        self._losses.append(step.loss)
        self._note(loss=step.loss, grad_norm=step.grad_norm)
        if model.config.vocab == 2 and progress.step % max(1, self._num_steps // 10) == 0:
            self._note(**_telemetry(model, batch.bits_BT))
        if not self.resumes and progress.step == self._half:
            started = time.perf_counter()
            accelerator.save_state(str(self._directory / CHECKPOINT), safe_serialization=True)
            self._save_seconds = time.perf_counter() - started
            path = self._directory / MEMORY.format(rank=accelerator.process_index)
            path.write_text(json.dumps(digest_memory(accelerator, progress)), encoding="utf-8")

    def conclude(self, accelerator: Any, model: nn.Module, batch: Batch, parts: int) -> dict[str, Any] | None:
        """The facts of the experiments; None after the first start, which only leaves its notes."""
        if not self.resumes:
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                notes = {"losses": self._losses, "save_seconds": self._save_seconds, "bytes": _size(self._directory)}
                (self._directory / LOSSES).write_text(json.dumps(notes), encoding="utf-8")
            return None
        notes = json.loads((self._directory / LOSSES).read_text(encoding="utf-8"))
        different = [text for text in gather_object([self._different]) if text]
        difference = max(gather_object([_micro_batch_difference(accelerator, model, batch, parts)]))
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
    """A digest of every object that a checkpoint must bring back, whole tensors bit for bit, by name."""
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
    """|loss of the batch − mean loss of its parts| over the loss: what accumulation really sums up."""
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
    """Mean K and S of the model's predictions. C and the flip rate are properties of the batch, which stays the same."""
    logits_BT2 = model(bits_BT).logits_BTV
    return {"K": float(certainty_of_output(logits_BT2).mean()),
            "S": float(agreement(logits_BT2, place_frequencies(bits_BT)).mean())}


def _same(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(one, other, rel_tol=SAME_LOSS) for one, other in zip(first, second, strict=True))


def _size(directory: Path) -> int:
    return sum(os.lstat(Path(root) / name).st_size for root, _, names in os.walk(directory / CHECKPOINT) for name in names)
