"""Where a study lies on disk: a run of its own below `logs/`, with the runs of its arms inside. Pure path arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chronicle.paths import RunPaths

__all__ = ["StudyPaths"]


@dataclass(frozen=True, slots=True)
class StudyPaths:
    """The files of one study: `logs/<name>/`."""

    study_dir: Path

    @property
    def journal(self) -> RunPaths:
        """The study's own journal: registration, launches, results, report."""
        return RunPaths(self.study_dir)

    @property
    def plan_path(self) -> Path:
        """The registered plan, for the trainers."""
        return self.study_dir / "plan.json"

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
        """What one launch said, `chronicle run` included."""
        return self.study_dir / "output" / f"{name}-leg{leg}.txt"

    @property
    def report_dir(self) -> Path:
        """The report: Markdown, plots, tables."""
        return self.study_dir / "report"
