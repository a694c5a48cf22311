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


class Scaled(nn.Module):
    """One head of attention over the features, with a scale of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.keys, self.values, self.head, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), scale

    def forward(self, x: Any) -> Any:
        return self.head((self.keys(x) * self.scale).softmax(-1) * self.values(x))


class Counting(nn.Module):
    """A healthy model that is not the same object twice: it counts its calls, keeps a cache and anneals a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)
        self.step, self.strength, self.longest, self.cache = 0, 1.0, 0, None

    def forward(self, x: Any) -> Any:
        if self.training:
            self.step, self.strength = self.step + 1, self.strength * 0.99
        self.longest, self.cache = max(self.longest, x.shape[0]), x.detach()
        return self.head(self.drop(self.body(x).tanh()))


def _normed(eps: float) -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Tanh(), nn.Linear(16, 1))


MODELS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)),
    "plain": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
    "twins": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)),
    "wide": lambda: nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1)),
    "tied": Tied,
    "dropout off": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1)),
    "relu": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)),
    "layer norm": lambda: _normed(1e-5),
    "layer norm, other eps": lambda: _normed(1e-2),
    "scaled": lambda: Scaled(8**-0.5),
    "scaled, other scale": lambda: Scaled(1.0),
    "counting": Counting,
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
