"""State of the training loop besides model and optimizer: progress, and the sums of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bit_transformer.errors import CannotResume
from bit_transformer.evaluation.gate import GateConfig, HeldOutGate
from bit_transformer.training.schedule import ScheduleConfig
from chronicle.data import DataPlan, Segments

PROGRESS_VERSION = 3
STATE_FILE = "custom_checkpoint_1.pkl"


class TrainingProgress:
    """Where a run is: steps, symbols seen, data plan and segments, warm-ups, plateau, growths, and the gate.

    Accelerate saves neither the global step nor the data position. This object is registered second, after the
    scheduler, so the files are `custom_checkpoint_0.pkl` (scheduler) and `custom_checkpoint_1.pkl` (this).
    """

    def __init__(self, plan: DataPlan, gate: GateConfig) -> None:
        self.plan, self.gate = plan, HeldOutGate(gate)
        self.step = 0
        self.bits_seen = 0
        self.segments = Segments()
        self.rewarms: tuple[tuple[int, int], ...] = ()  # (first step, number of steps)
        self.growths: tuple[tuple[int, str], ...] = ()  # (first step of the grown model, kind)
        self.decays: tuple[int, ...] = ()  # steps from which the LR is cut
        self.best, self.since = math.inf, 0  # held-out loss at its best, evaluations since

    def observe_plateau(self, bpb: float, config: ScheduleConfig) -> bool:
        """Record one evaluation; return whether the held-out loss has stopped falling (time to cut the LR, or to grow)."""
        if bpb < self.best - config.plateau_min_gain:
            self.best, self.since = bpb, 0
            return False
        self.since = (self.since + 1) % config.plateau_patience
        return self.since == 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain values only, so that the file can be read without executing code."""
        return {"v": PROGRESS_VERSION, "step": self.step, "bits_seen": self.bits_seen,
                "data": {"plan": self.plan.to_json(), **self.data_state()}, "gate": self.gate.to_json(),
                "growths": [list(growth) for growth in self.growths], "rewarms": [list(rewarm) for rewarm in self.rewarms],
                "decays": list(self.decays), "best": self.best, "since": self.since}

    def data_state(self) -> dict[str, Any]:
        """Return the data position of the next step, which the guard compares."""
        return {"plan_hash": self.plan.plan_hash, "segments": self.segments.to_json(),
                "position": self.segments.position(self.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises PlanChanged if the data plan differs, CannotResume for another version."""
        if state.get("v") != PROGRESS_VERSION:
            raise CannotResume(f"progress state has version {state.get('v')}, this program reads {PROGRESS_VERSION}")
        self.plan.require_same(state["data"]["plan"])
        self.step, self.bits_seen = int(state["step"]), int(state["bits_seen"])
        self.segments = Segments.from_json(state["data"]["segments"])
        self.rewarms = tuple((int(first), int(count)) for first, count in state["rewarms"])
        self.growths = tuple((int(step), str(kind)) for step, kind in state["growths"])
        self.decays, self.best, self.since = tuple(state["decays"]), state["best"], state["since"]
        self.gate.load(state["gate"])


def saved_growths(checkpoint: Path | None) -> tuple[str, ...]:
    """Return the growths of a checkpoint's model, so that a model of that shape can be built to load it into."""
    path = checkpoint / STATE_FILE if checkpoint is not None else None
    if path is None or not path.is_file():
        return ()  # loading the checkpoint reports missing files
    return tuple(str(kind) for _, kind in torch.load(path, weights_only=True).get("growths", ()))


# --- The sums of one optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of one step over all ranks. Losses are means in nats per predicted bit; a source without rows is absent."""

    loss: float
    source_losses: Mapping[str, float]
    source_rows: Mapping[str, int]
    grad_norm: float
    stop: bool
    finite: bool


class StepTally:
    """Sums over the micro-batches of this rank; `reduce` adds all ranks in one collective and resets the sums."""

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        self.sources = sources
        self._sums = torch.zeros(len(sources), 3, dtype=torch.float64, device=device)

    def add(self, losses_BT: Tensor, num_predicted_B: Tensor, sources_B: Tensor) -> None:
        """Add the losses of one micro-batch (nats, 0 where padded) under the source of each row."""
        counts_B = num_predicted_B.double()
        rows = torch.stack([losses_BT.detach().double().sum(1), counts_B, torch.ones_like(counts_B)], dim=1)
        self._sums.index_add_(0, sources_B, rows)

    def reduce(self, *, grad_norm: Tensor | float | None, stop: bool) -> StepResult:
        """Return the figures over all ranks, the same on every rank."""
        norm = float("nan") if grad_norm is None else float(grad_norm)
        flags = torch.tensor([float(stop), float(not math.isfinite(norm))], dtype=torch.float64)
        vector = torch.cat([self._sums.flatten(), flags.to(self._sums.device)])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(vector)
        *sums, stops, not_finite = vector.tolist()
        self._sums.zero_()
        rows = dict(zip(self.sources, zip(sums[::3], sums[1::3], sums[2::3], strict=True), strict=True))
        return StepResult(
            loss=sum(total for total, _, _ in rows.values()) / sum(count for _, count, _ in rows.values()),
            source_losses={name: total / count for name, (total, count, _) in rows.items() if count},
            source_rows={name: int(number) for name, (_, _, number) in rows.items()},
            grad_norm=norm, stop=stops > 0, finite=not_finite == 0)
