"""The small models of the rigs: parts in which a wrong resume can hide."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["MODELS", "split_parameters"]


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.second(self.first(x).tanh()))


MODELS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)),
    "plain": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
    "twins": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)),
    "wide": lambda: nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1)),
    "tied": Tied,
}


def split_parameters(model: Any, *, swapped: bool = False) -> tuple[list[Any], list[Any]]:
    """All but the last layer's parameters, and the last layer's; `swapped`: the first two layers change places."""
    seen: set[int] = set()
    layers = [
        [p for p in layer.parameters(recurse=False) if not (id(p) in seen or seen.add(id(p)))]  # type: ignore[func-returns-value]
        for layer in model.modules()
    ]
    layers = [layer for layer in layers if layer]
    if swapped:
        layers[0], layers[1] = layers[1], layers[0]
    return [p for layer in layers[:-1] for p in layer], layers[-1]
