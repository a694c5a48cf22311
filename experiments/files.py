"""The files of a study: its directories below `logs/`, and the result of a launch as its journal holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicle.paths import RunPaths

RESULTS = ("weights", "moments", "final")  # of a result, what the journal holds under that name


@dataclass(frozen=True, slots=True)
class StudyPaths:
    """The files of one study: `logs/<name>/`."""

    study_dir: Path

    @property
    def journal(self) -> RunPaths:
        """The study's own journal: registration, launches, results, report."""
        return RunPaths(self.study_dir)

    @property
    def runs_dir(self) -> Path:
        """The `logs` directory of the arms' runs."""
        return self.study_dir / "runs"

    def run(self, name: str) -> RunPaths:
        """The run of one arm at one seed."""
        return RunPaths(self.runs_dir / name)

    def checkpoints_dir(self, name: str) -> Path:
        """Checkpoints of one arm at one seed."""
        return self.study_dir / "checkpoints" / name

    def output_path(self, name: str, leg: int) -> Path:
        """The output of one launch, with that of `chronicle run`."""
        return self.study_dir / "output" / f"{name}-leg{leg}.txt"

    def curves_path(self, name: str, launch: int) -> Path:
        """What a launch logged, under the names of its trainer."""
        return self.run(name).launch_dir(launch) / "curves.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    """The result of one launch. Digests are sha256 of its last checkpoint; `final` has the outcomes, for a last leg.

    `launch` is its number in its run, `guard` the guard's word on it.
    """

    weights: str
    moments: str
    final: Mapping[str, float]
    launch: int
    guard: str | None
