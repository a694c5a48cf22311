"""Where a run stands, as one object that Accelerate saves with every checkpoint.

Accelerate itself saves neither the global step nor the data position. Registered second, after the scheduler, so that
the files are `custom_checkpoint_0.pkl` (scheduler, as in seed 003) and `custom_checkpoint_1.pkl` (this).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bit_transformer.errors import CannotResume
from bit_transformer.evaluation.monitor import Monitor
from bit_transformer.training.schedule import ScheduleConfig
from chronicle.data import DataPlan, Segments

STATE_VERSION = 2
STATE_FILE = "custom_checkpoint_1.pkl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """Held-out loss that no longer falls: the best so far, evaluations since, and the steps at which the LR was cut."""

    best: float = math.inf
    since: int = 0
    decays: tuple[int, ...] = ()

    def observe(self, bpb: float, *, patience: int, min_gain: float) -> tuple[Plateau, bool]:
        """Return the state after an evaluation, and whether it is the `patience`-th without a gain."""
        if bpb < self.best - min_gain:
            return replace(self, best=bpb, since=0), False
        if self.since + 1 < patience:
            return replace(self, since=self.since + 1), False
        return replace(self, since=0), True

    def cut(self, step: int) -> Plateau:
        """Return the state with the LR cut from `step` on."""
        return replace(self, decays=(*self.decays, step))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"best": self.best, "since": self.since, "decays": list(self.decays)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plateau:
        """Read what `to_json` wrote."""
        return cls(best=float(data["best"]), since=int(data["since"]), decays=tuple(data["decays"]))


class Progress:
    """Completed optimizer steps, bits seen, data plan and segments, warm-ups, growths, and what the monitor knows."""

    def __init__(self, plan: DataPlan, monitor: Monitor) -> None:
        self.plan, self.monitor = plan, monitor
        self.step = 0
        self.bits_seen = 0
        self.segments = Segments()
        self.rewarms: tuple[tuple[int, int], ...] = ()  # (first step, number of steps)
        self.plateau = Plateau()
        self.growths: tuple[tuple[int, str], ...] = ()  # (first step of the grown model, kind)

    def observe_plateau(self, bpb: float, config: ScheduleConfig) -> bool:
        """Take one evaluation; return whether the held-out loss has stopped falling: cut the LR, or grow."""
        self.plateau, reached = self.plateau.observe(
            bpb, patience=config.plateau_patience, min_gain=config.plateau_min_gain)
        return reached

    def state_dict(self) -> dict[str, Any]:
        """Return plain values only, so that the file can be read without executing anything."""
        return {"v": STATE_VERSION, "step": self.step, "bits_seen": self.bits_seen,
                "data": {"plan": self.plan.to_json(), **self.data_state()},
                "plateau": self.plateau.to_json(), "growths": [list(growth) for growth in self.growths],
                "monitor": self.monitor.to_json(),
                "rewarms": [list(rewarm) for rewarm in self.rewarms]}

    def data_state(self) -> dict[str, Any]:
        """Return where the data of the next step lies, for the guard to compare."""
        return {"plan_hash": self.plan.plan_hash, "segments": self.segments.to_json(),
                "position": self.segments.position(self.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; raises PlanChanged if the data plan is another one."""
        if state.get("v") != STATE_VERSION:
            raise CannotResume(f"progress state has version {state.get('v')}, this program reads {STATE_VERSION}")
        self.plan.require_same(state["data"]["plan"])
        self.step, self.bits_seen = int(state["step"]), int(state["bits_seen"])
        self.segments = Segments.from_json(state["data"]["segments"])
        self.plateau = Plateau.from_json(state["plateau"])
        self.rewarms = tuple((int(first), int(count)) for first, count in state["rewarms"])
        self.growths = tuple((int(step), str(kind)) for step, kind in state["growths"])
        self.monitor.load(state["monitor"])


def saved_growths(checkpoint: Path | None) -> tuple[str, ...]:
    """Return how the model of a checkpoint had grown, before there is a model to load it into."""
    path = checkpoint / STATE_FILE if checkpoint is not None else None
    if path is None or not path.is_file():
        return ()  # what is missing is said by the load
    state = torch.load(path, weights_only=True)
    return tuple(str(kind) for _, kind in state.get("growths", ()))
