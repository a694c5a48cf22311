"""What one launch of a study leaves behind: one small JSON file, written whole as its last act."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.errors import StudyError

__all__ = ["LEG_RESULT", "LegResult", "read_result", "write_result"]

LEG_RESULT = "study-leg.json"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    """Digests are sha256 of state at the end; `final` holds the outcomes of the last leg, in bits per byte."""

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
    entropy: str | None = None
    seconds: float = 0.0
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"v": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LegResult:
        """Read what `to_json` wrote; raises `StudyError` for another version."""
        parts = dict(record)
        if parts.pop("v", None) != VERSION:
            raise StudyError(f"result of a launch has version {record.get('v')!r}: this program reads {VERSION}")
        return cls(**{**parts, "checkpoints": tuple(parts["checkpoints"])})


def write_result(path: Path, result: LegResult) -> None:
    """Write the file whole or not at all, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(result.to_json(), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_result(path: Path) -> LegResult:
    """Read a result; raises `StudyError` where there is none or it is damaged."""
    try:
        return LegResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise StudyError(f"no usable result in `{path}`: {problem}") from problem
