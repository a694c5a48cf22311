"""The per-step log of a launch, written by adapters that see the framework's own logging; never fails training."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicle.metrics.log import MetricsWriter

__all__ = ["StepLog"]


class StepLog:
    """Appends to `<launch>/metrics.jsonl`; does nothing outside `chronicle run`, where there is no launch."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        directory = environ.get("CHRONICLE_LAUNCH_DIR")
        self._path = Path(directory) / "metrics.jsonl" if directory else None
        self._writer: MetricsWriter | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line with the numbers among `values` (tensors of one element count as numbers)."""
        numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
        numbers.pop("step", None)
        numbers.pop("t", None)
        if self._path is None or not numbers:
            return
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self._path)
            self._writer.write(step, numbers)
        except OSError as problem:
            print(f"chronicle: the per-step log stops here ({problem}); training goes on", file=sys.stderr, flush=True)
            self._path = None

    def close(self) -> None:
        """Release the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
