"""The per-step log of a launch, `<launch>/metrics.jsonl`, as a framework's adapter fills it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicle.metrics.log import MetricsWriter, number_of
from chronicle.resume.events import Logged
from chronicle.resume.faults import last_resort
from chronicle.resume.hub import Observer


class StepLog(Observer):
    """Appends to it; outside `chronicle run` there is no launch and nothing is written."""

    about = "log"

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        directory = environ.get("CHRONICLE_LAUNCH_DIR")
        self._path = Path(directory) / "metrics.jsonl" if directory else None
        self._writer: MetricsWriter | None = None

    def logged(self, event: Logged) -> None:
        """Write one line."""
        self.write(event.step, event.values)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line with the numbers among `values` (tensors of one element count); an error ends the log only."""
        try:
            self._write(step, values)
        except Exception as problem:  # noqa: BLE001 a log is not worth a run
            self._path = None
            last_resort(self._say_end, problem)

    def _write(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {str(name): number for name, value in values.items() if (number := number_of(value)) is not None}
        numbers.pop("step", None)
        numbers.pop("t", None)
        if self._path is None or not numbers:
            return
        if self._writer is None:
            self._writer = MetricsWriter(self._path)
        self._writer.write(step, numbers)

    def _say_end(self, problem: Exception) -> None:
        print(f"chronicle: the per-step log stops here ({problem}); training continues", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
