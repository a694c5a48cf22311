"""A run on disk that diverges: a metrics log, a journal, and real Accelerate checkpoints every 50 steps."""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from chronicle.journal import JournalWriter
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths
from tests.builders.checkpoints import CheckpointFactory

SAVED = list(range(50, 651, 50))


@dataclass(slots=True)
class Stage:
    """The parts of a run and the ways to make it go on."""

    paths: RunPaths
    checkpoints: Path
    writer: JournalWriter
    said: list[str]

    def start(self, launch: int, start_step: int, **more: object) -> MetricsWriter:
        self.writer.append("launch.start", launch=launch, data={"start_step": start_step, **more})
        return MetricsWriter(self.paths.metrics_path(launch))

    def train(self, log: MetricsWriter, first: int, last: int, *, diverges_at: int | None = None) -> None:
        """Log steps `first..last` of a tiny noisy model, which goes wrong after `diverges_at`."""
        rng = random.Random(f"{log.path.name}/{first}/1")
        for step in range(first, last + 1):
            loss = 0.42 + 0.5 * math.exp(-step / 60) + rng.gauss(0.0, 0.02)
            if diverges_at is not None and step > diverges_at:
                loss += min(1.2, 0.01 * math.expm1((step - diverges_at) / 15))
            log.write(step, {"loss": loss, "lr": 3e-3}, time=1.7e9 + 0.1 * step)
            if step in SAVED:
                path = self.checkpoints / f"opt_step-{step}" / "accelerator_state"
                self.writer.append("checkpoint", step=step, data={"path": str(path.parent), "step": step})


@pytest.fixture(scope="session")
def saved_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    factory = CheckpointFactory(tmp_path_factory.mktemp("built"))
    folder = "opt_step-{step}/accelerator_state"
    return factory.accelerate(
        tmp_path_factory.mktemp("saved"), steps=650, save_at=SAVED, folder=folder, scheduler="register"
    )


@pytest.fixture
def stage(tmp_path: Path, saved_checkpoints: Path) -> Stage:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(saved_checkpoints, checkpoints)
    paths = RunPaths(tmp_path / "logs" / "tiny")
    return Stage(paths=paths, checkpoints=checkpoints, writer=JournalWriter(paths), said=[])
