"""The files of a study: its directories below `logs/`, and the result file that every launch writes at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chronicle.paths import RunPaths
from experiments.errors import StudyError
from rollback.disk.durable import write_atomic


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
        """The output of one launch, with that of `chronicle run`."""
        return self.study_dir / "output" / f"{name}-leg{leg}.txt"

    def curves_path(self, name: str, launch: int) -> Path:
        """What a launch of a study's own trainer logged, in the study's names of channels."""
        return self.run(name).launch_dir(launch) / "study-curves.jsonl"

    @property
    def report_dir(self) -> Path:
        """The report: Markdown, plots, tables."""
        return self.study_dir / "report"


# --- The result of one launch

LEG_RESULT = "study-leg.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    """The result of one launch. Digests are sha256 of state at the end; `final` is in bits per byte, for a last leg."""

    plan_hash: str
    run: str
    leg: int
    first: int
    last: int
    weights: str
    moments: str
    average: str
    checkpoints: tuple[str, ...]
    final: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"v": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LegResult:
        """Read the output of `to_json`. Raises `StudyError` for another version."""
        parts = dict(record)
        if parts.pop("v", None) != VERSION:
            raise StudyError(f"result of a launch has version {record.get('v')!r}: this program reads {VERSION}")
        return cls(**{**parts, "checkpoints": tuple(parts["checkpoints"])})


def write_result(path: Path, result: LegResult) -> None:
    """Write the file atomically and durably."""
    write_atomic(path, json.dumps(result.to_json(), indent=1, sort_keys=True))


def read_result(path: Path) -> LegResult:
    """Read a result. Raises `StudyError` where it is missing or damaged."""
    try:
        return LegResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise StudyError(f"no usable result in `{path}`: {problem}") from problem
