"""Files beside the checkpoints of a run: what is known of a saved state, one file of JSON a state and rank.

A checkpoint cannot say what came after it. So the run's directory holds, by the id of the state, what a launch that goes on
learns of it later. The newest 64 of a launch are kept.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_KEPT = 64  # files of one launch and rank
NUM_RANKS = 8  # that keep theirs


class StateFiles:
    """The records of one kind. `directory` None: nothing is kept. `version`: of the form; another one is not read."""

    def __init__(self, directory: Path | None, rank: int, *, version: int, ending: str = "") -> None:
        self._directory, self._rank, self._version, self._ending = directory, rank, version, ending
        self._written: list[Path] = []

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps any."""
        return self._directory is not None and self._rank < NUM_RANKS

    def write(self, state: str, record: Mapping[str, Any]) -> None:
        """Keep this record of a state, in place of one before. Raises OSError."""
        if not self.keeps or not state:
            return
        path = self._path(state, self._rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"v": self._version, **record}, separators=(",", ":"), default=str)
        path.write_text(text + "\n", encoding="utf-8")
        if path not in self._written:
            self._written.append(path)
        if len(self._written) > NUM_KEPT:
            self._written.pop(0).unlink(missing_ok=True)

    def read(self, state: str, rank: int | None = None) -> dict[str, Any]:
        """The record that this rank, or `rank`, kept of a state; {} where there is none."""
        if self._directory is None or not state:
            return {}
        try:
            record = json.loads(self._path(state, self._rank if rank is None else rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and record.get("v") == self._version else {}

    def _path(self, state: str, rank: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{state}.{rank}{self._ending}"
