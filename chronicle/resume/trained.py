"""What is trained, as the guard records it at a save and compares it at a resume: the field `trained` of `Memory`.

It holds the configuration of the models (`configuration.py`), dataset, order and shape of the batches (`feed.py`), the full
state of the schedulers, and gradients that were left over. `TrainedWatch` makes the record before the first step and again at
every save, so that values which move while a launch trains (counters, caches, annealed factors) are known and not compared.
Nothing is done at a step. `checks/trained.py` compares two records.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chronicle.resume.configuration import SKIPPED, model_record, moved_between, plain_value, unwrapped
from chronicle.resume.feed import Shapes, feed_record
from chronicle.resume.fingerprint import LiveState

__all__ = ["TrainedWatch", "feed_values", "is_near"]

VERSION = 1
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "timm", "lightning", "accelerate")
# compared elsewhere (position, LRs), or no part of the state
APART = {"last_epoch", "step_count", "last_lr", "verbose", "optimizer", "lr_lambdas", "num_steps"}


class TrainedWatch:
    """The record of one launch, and which of its values move as it trains."""

    def __init__(self) -> None:
        self.shapes = Shapes()
        self._first: dict[str, Any] = {}
        self._feed: dict[str, Any] = {}
        self._moved: set[str] = set()
        self._left_over: dict[str, int] = {}

    def first_batch(self, live: LiveState) -> None:
        """The first batch is about to enter the model: gradients that exist now belong to no step of this launch."""
        self._left_over = gradients_of(live.models)

    def begin(self, live: LiveState, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record right before the first step. What moved in the launch of `saved` is known to move."""
        self._moved = set((saved or {}).get("moved") or ())
        self._first = self._describe(live)
        self._feed = self._first["feed"]
        return {**self._first, **({"gradients": self._left_over} if self._left_over else {})}

    def record(self, live: LiveState) -> dict[str, Any]:
        """The record at a save. Modes and shapes are those of the first steps: a save may come after an evaluation."""
        now = self._describe(live)
        if not now["feed"]:
            now["feed"] = self._feed  # the loader is not being read
        if self._first:
            now["model"]["eval"] = self._first["model"]["eval"]
            self._moved |= moved_between(self._first["model"], now["model"])
            self._moved |= _moved_in(self._first["feed"], now["feed"])
        if live.accumulating:
            now["gradients"] = gradients_of(live.models)
        return {**now, "moved": sorted(self._moved)}

    def _describe(self, live: LiveState) -> dict[str, Any]:
        return {
            "v": VERSION,
            "model": model_record(live.models),
            "feed": feed_record(live.feed),
            "shape": self.shapes.to_json(),
            "schedulers": scheduler_states(live),
            "versions": {name: str(getattr(sys.modules[name], "__version__", "")) for name in LIBRARIES if name in sys.modules},
        }


def gradients_of(models: Sequence[Any]) -> dict[str, int]:
    """How many parameters hold a gradient, of how many; {} when none does."""
    flags = [p.grad is not None for model in models for p in unwrapped(model).parameters()]
    return {"held": sum(flags), "parameters": len(flags)} if any(flags) else {}


def scheduler_states(live: LiveState) -> list[dict[str, Any]]:
    """The plain fields of every scheduler's `state_dict`, with the arguments of functions that make its LRs."""
    return [_state_of(bound.scheduler) for bound in live.schedulers]


def _state_of(scheduler: Any) -> dict[str, Any]:
    try:
        state = scheduler.state_dict()
    except Exception:  # noqa: BLE001 a scheduler of another make; its position and LRs are compared elsewhere
        return {}
    values = dict(_fields(state)) if isinstance(state, Mapping) else {}
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", None) or ()):
        arguments = getattr(function, "keywords", None)  # functools.partial, as Transformers makes them
        for name, value in (arguments or {}).items():
            if (plain := plain_value(value)) is not SKIPPED:
                values[f"function {index}.{name}"] = plain
    return values


def _fields(state: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, thing in state.items():
        name = str(key)
        if name == "_schedulers" and isinstance(thing, (list, tuple)) and depth < 3:
            for index, inner in enumerate(thing):
                if isinstance(inner, Mapping):
                    yield from _fields(inner, f"{prefix}{index}.", depth + 1)
        elif not name.startswith("_") and name not in APART and (value := plain_value(_number(thing))) is not SKIPPED:
            yield f"{prefix}{name}", value


def _number(thing: Any) -> Any:
    """A tensor of one element on the CPU as its number."""
    if hasattr(thing, "numel") and hasattr(thing, "device"):
        return thing.item() if thing.numel() == 1 and thing.device.type == "cpu" else thing
    return thing


def _moved_in(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    """Names of the values of one loader that changed; another dataset is a new one, and says nothing."""
    before, after = feed_values(first), feed_values(second)
    if any(before.get(name) != after.get(name) for name in ("dataset.class", "dataset.length")):
        return set()
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def feed_values(feed: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Name of a value of dataset and order -> the value, and its section (`dataset_record`, or `order`)."""
    values = {f"order.{name}": (value, "order") for name, value in (feed.get("order") or {}).items()}
    for section, found in (feed.get("dataset") or {}).items():
        values |= {f"dataset.{name}": (value, section) for name, value in found.items()}
    return values


def is_near(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; numbers within rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool) and not isinstance(b, bool):
        return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0)
    return bool(a == b)
