"""Adaptive computation time over the layers: a position stops when its halting probabilities reach the threshold.

After Graves 2016. Every layer has one halting unit; the output is the average of the layers' states weighted by their
probabilities, the last one by the remainder. Halted positions are masked, the loop over the layers never breaks: with
DDP every rank must run the same layers. The ponder cost is the mean of layers run plus remainder.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HaltingState:
    """Accumulates the weighted output over the layers of one forward pass."""

    def __init__(self, x_BTD: Tensor, threshold: float, num_layers: int) -> None:
        self.threshold, self.num_layers = threshold, num_layers
        self.output_BTD = torch.zeros_like(x_BTD, dtype=torch.float32)
        self.total_BT = x_BTD.new_zeros(x_BTD.shape[:2], dtype=torch.float32)
        self.running_BT = torch.ones_like(self.total_BT, dtype=torch.bool)
        self.layers_run_BT = torch.zeros_like(self.total_BT)
        self.remainder_BT = torch.zeros_like(self.total_BT)

    def take(self, layer: int, x_BTD: Tensor, probability_BT: Tensor) -> Tensor:
        """Add layer number `layer` (from 0) and return which positions still run, (B, T) bool."""
        probability_BT = probability_BT.float()
        stops = self.running_BT & (self.total_BT + probability_BT >= self.threshold)
        if layer == self.num_layers - 1:
            stops = self.running_BT
        remainder_BT = 1.0 - self.total_BT
        weight_BT = torch.where(stops, remainder_BT, probability_BT) * self.running_BT
        self.output_BTD = self.output_BTD + weight_BT[..., None] * x_BTD
        self.layers_run_BT = self.layers_run_BT + self.running_BT
        self.remainder_BT = self.remainder_BT + torch.where(stops, remainder_BT, torch.zeros_like(remainder_BT))
        self.total_BT = self.total_BT + weight_BT
        self.running_BT = self.running_BT & ~stops
        return self.running_BT

    def ponder(self) -> Tensor:
        """Return the scalar cost; its gradient reaches the halting units through the remainders."""
        return (self.layers_run_BT + self.remainder_BT).mean()
