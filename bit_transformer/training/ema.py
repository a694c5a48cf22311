"""A running average of the weights, saved with the checkpoint: what is evaluated at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bit_transformer.model.transformer import BitTransformer, copy_model


class Ema:
    """After every step: average = decay · average + (1 − decay) · weight, in float32."""

    def __init__(self, model: BitTransformer, decay: float) -> None:
        self.decay = decay
        self.averages = {name: value.detach().clone().float() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: BitTransformer) -> None:
        """Take the weights after a step."""
        for name, value in model.named_parameters():
            self.averages[name].lerp_(value.detach().float(), 1 - self.decay)

    def averaged(self, model: BitTransformer) -> BitTransformer:
        """Return another model with the averaged weights."""
        result = copy_model(model)
        result.load_state_dict({**model.state_dict(), **self.averages})
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages."""
        return {name: value.cpu() for name, value in self.averages.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved averages."""
        for name, value in state.items():
            self.averages[name].copy_(value)
