"""The sums of one optimizer step, and the one collective in which all ranks learn them.

Losses per source, the norm of the gradient, a wish to stop and a non-finite gradient travel in one vector, so that no
rank stops, steps or raises alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Global figures of one step. Losses are means in nats per predicted bit; a source without rows is absent."""

    loss: float
    source_losses: Mapping[str, float]
    source_rows: Mapping[str, int]
    grad_norm: float
    stop: bool
    finite: bool


class StepTally:
    """Adds up micro-batches of this rank; `reduce` adds the ranks and starts over."""

    def __init__(self, sources: tuple[str, ...], device: torch.device) -> None:
        self.sources = sources
        self._sums = torch.zeros(len(sources), 3, dtype=torch.float64, device=device)

    def add(self, losses_BT: Tensor, num_predicted_B: Tensor, sources_B: Tensor) -> None:
        """Add the losses of one micro-batch (nats, 0 where padded) under the source of each row."""
        counts_B = num_predicted_B.double()
        rows = torch.stack([losses_BT.detach().double().sum(1), counts_B, torch.ones_like(counts_B)], dim=1)
        self._sums.index_add_(0, sources_B, rows)

    def reduce(self, *, grad_norm: Tensor | float | None, stop: bool) -> StepResult:
        """Return the global figures; every rank gets the same."""
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
