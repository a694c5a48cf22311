"""A small training under the guard, and what the flight envelope told about it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import chronicle
from chronicle.resume.envelope import Breach


@dataclass
class Flight:
    """What was told in one launch: kind -> breach."""

    told: dict[str, Breach] = field(default_factory=dict)
    error: str = ""  # of the envelope itself

    def add(self, session: Any) -> None:
        """Take what a session told."""
        self.told |= {kind.value: breach for kind, breach in session.envelope.log.told.items()}
        self.error = "; ".join(f"{where}: {error}" for where, error in session.faults.found)

    @property
    def loud(self) -> dict[str, Breach]:
        """Without notices."""
        return {kind: breach for kind, breach in self.told.items() if breach.tier != "notice"}


def network(width: int = 16, *, dropout: float = 0.0) -> torch.nn.Sequential:
    """A small model with a hidden layer."""
    layers = [torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(width, 1)]
    return torch.nn.Sequential(*layers)


def loss_of(model: Any, rows: int = 8) -> torch.Tensor:
    """The loss of one random batch."""
    x = torch.randn(rows, 8)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def attached(directory: Path, model: Any, optimizer: Any, scheduler: Any = None, **options: Any) -> Any:
    """Put a loop under guard in its own run directory."""
    return chronicle.attach(directory / "run", model, optimizer, scheduler, **options)


def fly(run: Any, steps: int, step: Callable[[int], object]) -> Flight:
    """Take `steps` steps, numbered from 1, then one save; returns what was told."""
    for number in range(1, steps + 1):
        step(number)
    run.session.describe()
    flight = Flight()
    flight.add(run.session)
    run.session.envelope.end()
    return flight


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing on stderr: what is told is in the flight."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        saved, sys.stderr = sys.stderr, nowhere
        try:
            yield
        finally:
            sys.stderr = saved
