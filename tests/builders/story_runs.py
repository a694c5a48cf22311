"""Runs written through the real journal and metrics writers, with a pinned clock, host and randomness.

`StoryRun` is the pen; `toy_run` is the run that eight trackers tell wrongly: log 1..10, diverge at 8, back to 5, log 6..8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from chronicle.journal import Entry, JournalWriter
from chronicle.metrics import MetricsWriter
from chronicle.paths import RunPaths

START = datetime(2026, 5, 18, 14, 25, tzinfo=UTC)


class StoryRun:
    """Appends entries one minute apart; `launch` writes start, metrics and end of one launch."""

    def __init__(self, root: Path, run: str = "toy", *, start: datetime = START) -> None:
        self.paths = RunPaths(root / "logs" / run)
        self.now = start
        self._numbers = iter(range(1, 1 << 30))
        self.writer = JournalWriter(
            self.paths, clock=self._tick, host="node-1", pid=4242, randomness=lambda bits: next(self._numbers) % (1 << bits)
        )

    def _tick(self) -> datetime:
        self.now += timedelta(minutes=1)
        return self.now

    def add(self, kind: str, **fields: Any) -> Entry:
        """One entry."""
        return self.writer.append(kind, **fields)

    def start(self, number: int, start_step: int | None = 0, **data: Any) -> Entry:
        """The launch begins."""
        facts: dict[str, Any] = {"argv": ["torchrun", "train.py"], "host": "node-1", "pid": 100 + number, **data}
        if start_step is not None:
            facts["start_step"] = start_step
        return self.add("launch.start", launch=number, title=f"launch {number}", data=facts)

    def metrics(self, number: int, points: Mapping[int, Mapping[str, float]]) -> None:
        """The per-step log of a launch: step -> channels."""
        with MetricsWriter(self.paths.metrics_path(number)) as log:
            for step, values in points.items():
                log.write(step, values, time=self.now.timestamp() + step)

    def end(self, number: int, last_step: int | None, *, exit_code: int | None = 0, signal: str | None = None) -> Entry:
        """The launch ends."""
        data = {"exit_code": exit_code, "signal": signal, "last_step": last_step}
        return self.add("launch.end", launch=number, step=last_step, data=data)

    def rollback(self, step: int, ratio: float | None = None, **data: Any) -> Entry:
        """An applied rollback."""
        intent = self.add("rollback.intent", step=step, title=f"rollback to {step}")
        facts = dict(data) if ratio is None else {"lr_ratio": ratio, **data}
        return self.add("rollback.receipt", step=step, title=f"rollback to {step}", refs=(intent.id,), data=facts)


def toy_losses(first: int, last: int, *, diverges_at: int | None = None) -> Iterator[tuple[int, float]]:
    """9.9, 9.8, … and 100.0 from the step of divergence."""
    for step in range(first, last + 1):
        yield step, 100.0 if diverges_at is not None and step >= diverges_at else round(10 - step / 10, 1)


def toy_run(root: Path, run: str = "toy") -> StoryRun:
    """Log 1..10 (100.0 from 8, lr 5e-5), back to 5 at half the LR, log 6..8 = 8.4, 8.3, 8.2."""
    story = StoryRun(root, run)
    story.add("run.init", title=f"run {run}")
    story.start(1, 0)
    story.metrics(1, {s: {"loss": v, "lr": 5e-5} for s, v in toy_losses(1, 10, diverges_at=8)})
    story.add("checkpoint", launch=1, step=5, data={"path": "checkpoints/opt_step-5"})
    story.add("checkpoint", launch=1, step=10, data={"path": "checkpoints/opt_step-10"})
    story.add("incident", launch=1, step=8, title="divergence from step 8", data={"kind": "divergence", "tier": "propose"})
    story.end(1, 10, exit_code=None, signal="SIGINT")
    story.rollback(5, 0.5, from_step=10)
    story.start(2, 5)
    story.add("guard.verdict", launch=2, step=5, title="resume verified", data={"verdict": "passed", "checks": []})
    story.metrics(2, {6: {"loss": 8.4, "lr": 2.5e-5}, 7: {"loss": 8.3, "lr": 2.5e-5}, 8: {"loss": 8.2, "lr": 2.5e-5}})
    story.end(2, 8)
    return story
