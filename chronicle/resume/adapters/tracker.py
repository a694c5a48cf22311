"""Accelerate's `log_with="chronicle"`: what a script logs goes, one line a step, into the launch's `metrics.jsonl`.

Importing this module registers the tracker (Accelerate 1.15 and newer; before, pass `ChronicleTracker()` itself in
`log_with`). `chronicle.guard` imports it when Accelerate is there, so that
`chronicle.guard(Accelerator(log_with="chronicle"))` is one line: Python looks up `guard` before it builds the argument.
"""

from collections.abc import Mapping
from typing import Any

from accelerate import tracking

from chronicle.resume.adapters.step_log import StepLog

__all__ = ["ChronicleTracker"]


class ChronicleTracker(tracking.GeneralTracker):  # type: ignore[misc]
    """Writes the per-step log of the launch; outside `chronicle run` it does nothing."""

    name = "chronicle"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name: str = "", **_: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._log = StepLog()
        self._calls = 0

    @property
    def tracker(self) -> StepLog:
        """The log itself."""
        return self._log

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The configuration is part of the launch's own entry; nothing to do."""

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """One line; without a step the calls are counted."""
        self._calls += 1
        self._log.write(self._calls if step is None else step, values)

    @tracking.on_main_process  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Close the file."""
        self._log.close()


def register() -> None:
    """Make the name known to Accelerate, once."""
    add = getattr(tracking, "register_tracker_class", None)
    if add is not None and ChronicleTracker.name not in tracking.LOGGER_TYPE_TO_CLASS:
        add(ChronicleTracker)


register()
