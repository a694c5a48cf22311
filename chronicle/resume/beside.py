"""Files beside the checkpoints of a run: what is known of a saved state, one file of JSON a state and rank.

A checkpoint cannot say what came after it, and that of a plain loop says nothing of ours. So the run's directory holds what a
launch knows of a state and learns of it later, by the state's id or digest. The newest of a launch are kept.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollback.disk.durable import write_atomic

NUM_KEPT = 64  # files of one launch and rank
NUM_RANKS = 8  # that keep theirs; the others read rank 0's


class StateFiles:
    """The records of one kind. `directory` None: nothing is kept. `version`: of the form; another one is not read."""

    def __init__(
        self, directory: Path | None, rank: int, *, version: int, ending: str = "", num_kept: int = 0
    ) -> None:
        self._directory, self._rank, self._version, self._ending = directory, rank, version, ending
        self._num_kept = num_kept or NUM_KEPT
        self._written: list[Path] = []

    @property
    def keeps(self) -> bool:
        """Whether this rank keeps any."""
        return self._directory is not None and self._rank < NUM_RANKS

    def write(self, state: str, record: Mapping[str, Any], *, replaces: bool = True) -> None:
        """Keep this record of a state, if it `replaces` in place of one before. Raises OSError."""
        if self._directory is None or not self.keeps or not state:
            return
        path = self._directory / f"{state}.{self._rank}{self._ending}"
        if path.exists() and not replaces:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"v": self._version, **record}, separators=(",", ":"), default=str)
        write_atomic(path, text + "\n", durable=False)
        if path not in self._written:
            self._written.append(path)
        if len(self._written) > self._num_kept:
            self._written.pop(0).unlink(missing_ok=True)

    def read(self, state: str, *, beside: bool = False) -> dict[str, Any]:
        """The record of a state that this rank kept, else rank 0; {} where there is none.

        `beside`: also what the runs beside this one kept: a fork begins from a checkpoint of its parent.
        """
        for path in self._places(state, beside):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(record, dict) and record.get("v") == self._version:
                return record
        return {}

    def _places(self, state: str, beside: bool) -> Iterator[Path]:
        if self._directory is None or not state:
            return
        names = [f"{state}.{rank}{self._ending}" for rank in dict.fromkeys((self._rank, 0))]
        yield from (self._directory / name for name in names)
        for name in names if beside else ():
            yield from sorted(self._directory.parent.parent.glob(f"*/{self._directory.name}/{name}"))
