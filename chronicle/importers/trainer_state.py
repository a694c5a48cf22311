"""`trainer_state.json` of a Hugging Face checkpoint: its `log_history`, one dict a logged step."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.importers.sources import Import, cut_into_launches
from chronicle.metrics import Point

__all__ = ["read_trainer_state"]

NAMES = {"learning_rate": "lr"}
NO_CHANNEL = frozenset(("step", "epoch"))


def read_trainer_state(path: Path) -> Import:
    """The points of the file; it says nothing of restarts, only the last process wrote it."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ChronicleError(f"`{path}` is no trainer state: expected JSON with `log_history`") from problem
    return Import(format="trainer-state", launches=cut_into_launches(_points(history), path.name))


def _points(history: list[Mapping[str, Any]]) -> Iterator[Point]:
    for row, record in enumerate(history):
        step = record.get("step")
        if isinstance(step, int):
            numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k not in NO_CHANNEL}
            yield Point(row, step, None, {NAMES.get(name, name): value for name, value in numbers.items()})
