"""The LR that a rollback promised for the next steps, as a channel beside the one that was logged.

Source: `contract.json`, whose `next_lrs` are the LRs of the optimizer steps after the checkpoint. Some trainers log the
LR a step was taken with, others the one that the scheduler has set for the next: the promise nearer to what was logged
counts, so that only a wrong LR is a mismatch and not a habit of logging. In a warm-up some log what the scheduler says
and some what a step was taken with: both are promised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.resume.warming import warmed

LR_NAMES = ("lr", "learning_rate")
CHANNEL = "lr/expected"
NEAR_STEPS = 1000  # the first logged step may lie that far behind the checkpoint


class LrPromise:
    """The promised LRs by step; empty where there is no contract, or one for another start."""

    def __init__(self, first_step: int, lrs: Sequence[float], warmup_steps: int = 0) -> None:
        self._first, self._lrs = first_step, tuple(lrs)
        self._warmups = [(0, warmup_steps)]

    def add_to(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return the values with the promised LR beside the logged one, while the promise lasts."""
        found = next((values[name] for name in LR_NAMES if name in values), None)
        at = step - self._first
        near = self._lrs[at : at + 2] if at >= 0 else ()
        near = (*near, *(warmed(lr, at + index, self._warmups) for index, lr in enumerate(near)))
        if found is None or not near:
            return values
        return {CHANNEL: min(near, key=lambda lr: abs(lr - found)), **values}


def read_promise(path: Path, first_step: int) -> LrPromise:
    """Read the contract for a launch whose first logged step this is; anything but a fitting contract promises nothing."""
    try:
        contract = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return LrPromise(0, ())
    return LrPromise(*parse_promise(contract, first_step), _count(contract, "warmup_steps"))


def lr_ratio_of(path: Path, first_step: int) -> float:
    """By how much the rollback that this launch follows scaled the LR; 1 where there is none for this start."""
    try:
        contract = json.loads(path.read_text(encoding="utf-8"))
        step, ratio = contract["step"], contract["lr_ratio"]
    except (OSError, ValueError, KeyError, TypeError):
        return 1.0
    fits = isinstance(step, int) and isinstance(ratio, int | float) and step < first_step <= step + NEAR_STEPS
    return float(ratio) if fits and ratio > 0 else 1.0


def warm_until(path: Path, first_step: int) -> int:
    """The last step of the warm-up that the rollback asked for; 0 where there is none for this start."""
    try:
        contract = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    step, count = _count(contract, "step"), _count(contract, "warmup_steps")
    return step + count if count and step < first_step <= step + NEAR_STEPS else 0


def _count(contract: Any, name: str) -> int:
    value = contract.get(name) if isinstance(contract, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def parse_promise(contract: Any, first_step: int) -> tuple[int, tuple[float, ...]]:
    """Return (first promised step, LRs of the first group); nothing when the launch did not start at the checkpoint."""
    if not isinstance(contract, dict) or contract.get("v") != 1:
        return 0, ()
    step, rows = contract.get("step"), contract.get("next_lrs")
    if not isinstance(step, int) or not isinstance(rows, list) or not step < first_step <= step + len(rows):
        return 0, ()
    lrs = [row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], int | float)]
    return (step + 1, tuple(float(lr) for lr in lrs)) if len(lrs) == len(rows) else (0, ())
