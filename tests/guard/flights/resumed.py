"""The healthy trainings of `healthy.py`, killed and resumed: a refusal, or anything that is told, is a false alarm.

Each kind is launched twice. The first launch saves after `SAVED_AT` steps everything with a `state_dict` that it attached or
that its step uses, and the random generators, and trains on. The second loads all that and goes on from there. Two kinds are
left out: at one step they free layers, which a resume behind that step has to do again, and is rightly refused where it does
not. "Told" counts notices too.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from chronicle import ResumeRefused
from tests.guard.flights import healthy
from tests.guard.flights.fly import Flight, attached

__all__ = ["RESUMED", "play_resumed"]

BY_NUMBER = ("frozen backbone in evaluation mode, unfrozen later", "optimizer built late for a part that was frozen")
RESUMED = [name for name in healthy.HEALTHY if name not in BY_NUMBER]

SAVED_AT, STEPS = 24, 44


def play_resumed(name: str, seed: int) -> tuple[Flight, str]:
    """What the second launch was told, and the refusal that ended it ("" for none)."""
    kept, flight = (healthy.attached, healthy.fly), Flight()
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        try:
            for again in (False, True):
                torch.manual_seed(seed + 1000 * again)
                random.seed(seed + 1000 * again)
                attaching: list[Any] = []
                healthy.attached = _attached(attaching)  # type: ignore[assignment]
                healthy.fly = _fly(top / "state.pt", attaching, again)  # type: ignore[assignment]
                flight = healthy.HEALTHY[name].fly(top)
        except ResumeRefused as refusal:
            return flight, "; ".join(f"{one.code} {one.name}: {one.cause}" for one in refusal.checks if not one.ok)
        finally:
            healthy.attached, healthy.fly = kept  # type: ignore[assignment]
    return flight, ""


def _attached(parts: list[Any]) -> Callable[..., Any]:
    def attach(directory: Path, model: Any, optimizer: Any, scheduler: Any = None, **options: Any) -> Any:
        parts.extend((model, optimizer, scheduler, list(options.get("averages", {}).values())))
        return attached(directory, model, optimizer, scheduler, **options)

    return attach


def _fly(path: Path, parts: list[Any], again: bool) -> Callable[[Any, int, Callable[[int], object]], Flight]:
    def fly(run: Any, steps: int, step: Callable[[int], object]) -> Flight:
        stateful = list({id(one): one for one in (*_stateful(parts), *_stateful(step))}.values())
        if again:
            state = torch.load(path, weights_only=False)
            for one, saved in zip(stateful, state["parts"], strict=True):
                one.load_state_dict(saved)
            torch.set_rng_state(state["torch"])
            random.setstate(state["random"])
        for number in range(SAVED_AT + 1 if again else 1, STEPS + 1):
            step(number)
            if number == SAVED_AT:
                generators = {"torch": torch.get_rng_state(), "random": random.getstate()}
                torch.save({"parts": [one.state_dict() for one in stateful], **generators}, path)
        flight = Flight()
        flight.add(run.session)
        run.session.envelope.end()
        return flight

    return fly


def _stateful(one: Any, depth: int = 0) -> Iterator[Any]:
    """Whatever has a state that can be loaded, in lists and in what a function has around it."""
    if callable(getattr(one, "load_state_dict", None)) and not isinstance(one, type):
        yield one
    elif isinstance(one, list | tuple) and depth < 4:
        for part in one:
            yield from _stateful(part, depth + 1)
    elif depth < 4:
        owner = getattr(one, "__self__", None)
        for cell in getattr(one, "__closure__", None) or ():
            yield from _stateful(cell.cell_contents, depth + 1)
        if owner is not None:
            yield from _stateful(owner, depth + 1)
