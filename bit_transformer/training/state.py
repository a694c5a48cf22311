"""State of the training loop besides model and optimizer: progress, and the sums of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor

from bit_transformer.errors import CannotResume
from bit_transformer.evaluation.gate import GateConfig, HeldOutGate
from bit_transformer.model.conversion import GROWTH_LR_FACTOR
from bit_transformer.training.schedule import ScheduleConfig, plan_schedule
from chronicle.data import DataPlan, Segments
from chronicle.resume.learning_rate import warmed

PROGRESS_VERSION = 4
STATE_FILE = "custom_checkpoint_1.pkl"
PLAIN = ("step", "rewarms", "growths", "decays", "best", "since")  # saved as they are


class TrainingProgress:
    """Where a run is: steps, data plan and segments, warm-ups, plateau, growths, and the gate.

    Accelerate saves neither the global step nor the data position. This object is registered second, after the
    scheduler, so the files are `custom_checkpoint_0.pkl` (scheduler) and `custom_checkpoint_1.pkl` (this).
    """

    def __init__(self, plan: DataPlan, gate: GateConfig) -> None:
        self.plan, self.gate = plan, HeldOutGate(gate)
        self.step = 0
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

    def planned_factor(self, config: ScheduleConfig) -> Callable[[int], float]:
        """Return the factor on the base LR by step: the schedule, cut at plateaus and growths, warmed up again where asked."""
        scheduled = plan_schedule(config)

        def factor(step: int) -> float:
            cuts = sum(first <= step for first in self.decays)
            grown = sum(first <= step for first, _ in self.growths)
            value = scheduled(step) * config.plateau_ratio**cuts * GROWTH_LR_FACTOR**grown
            return float(warmed(value, step, self.rewarms))

        return factor

    def state_dict(self) -> dict[str, Any]:
        """Return plain values only, so that the file can be read without executing code."""
        plain = {name: getattr(self, name) for name in PLAIN}
        return {"v": PROGRESS_VERSION, "data": {"plan": self.plan.to_json(), **self.data_state()},
                "gate": self.gate.to_json(), **plain}

    def data_state(self) -> dict[str, Any]:
        """Return the data position of the next step, which the guard compares."""
        return {"plan_hash": self.plan.plan_hash, "segments": self.segments.to_json(),
                "position": self.segments.position(self.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Raises PlanChanged if the data plan differs, CannotResume for another version."""
        if state.get("v") != PROGRESS_VERSION:
            raise CannotResume(f"progress state has version {state.get('v')}, this program reads {PROGRESS_VERSION}")
        self.plan.require_same(state["data"]["plan"])
        self.segments = Segments.from_json(state["data"]["segments"])
        self.gate.load(state["gate"])
        for name in PLAIN:
            setattr(self, name, state[name])


def read_progress(checkpoint: Path | None) -> dict[str, Any]:
    """Return the saved progress of a checkpoint before it is loaded; empty where there is none, which the load reports."""
    path = checkpoint / STATE_FILE if checkpoint is not None else None
    if path is None or not path.is_file():
        return {}
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


# --- The sums of one optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of one step over all ranks. Losses are means in nats per predicted bit; a source without rows is absent."""

    loss: float
    source_losses: Mapping[str, float]
    source_rows: Mapping[str, float]
    grad_norm: float
    stop: bool
    finite: bool


class StepTally:
    """Sums over the micro-batches of this rank; `reduce` adds all ranks in one collective and resets the sums."""

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        self.sources = sources
        self._sums = torch.zeros(3, len(sources), dtype=torch.float64, device=device)

    def add(self, losses_BT: Tensor, num_predicted_B: Tensor, sources_B: Tensor) -> None:
        """Add the losses of one micro-batch (nats, 0 where padded) under the source of each row."""
        counts_B = num_predicted_B.double()
        rows = torch.stack([losses_BT.detach().double().sum(1), counts_B, torch.ones_like(counts_B)])
        self._sums.index_add_(1, sources_B, rows)

    def reduce(self, *, grad_norm: Tensor | float | None, stop: bool) -> StepResult:
        """Return the figures over all ranks, the same on every rank."""
        norm = float("nan") if grad_norm is None else float(grad_norm)
        flags = torch.tensor([float(stop), float(not math.isfinite(norm))], dtype=torch.float64)
        vector = torch.cat([self._sums.flatten(), flags.to(self._sums.device)])
        summed = reduce(vector, "sum")
        self._sums.zero_()
        totals, counts, rows = summed[:-2].view(3, -1).tolist()
        stops, not_finite = summed[-2:].tolist()
        by_source = zip(self.sources, totals, counts, strict=True)
        return StepResult(
            loss=sum(totals) / sum(counts), source_losses={name: total / count for name, total, count in by_source if count},
            source_rows=dict(zip(self.sources, rows, strict=True)), grad_norm=norm, stop=stops > 0, finite=not_finite == 0)
