"""The detector's state beside each checkpoint: what a launch that resumes there starts to watch with.

`<run>/launches/<nnnn>/detector/<step>.json`, written when a checkpoint of that step appears in the journal. A state is
taken every few points in memory; the newest one not after the checkpoint is kept, and the points between are folded
again from the log. So the resumed watch says what it would have said had it never stopped.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chronicle.journal.entries import Entry
from chronicle.paths import RunPaths
from rollback.detect import Detector, UnknownState

TAKE_EVERY = 25  # points
KEEP = 8  # states in memory (100 kB a channel each): a checkpoint is journalled at most so many takes after its step
NAME = re.compile(r"(\d+)\.json")
VERSION = 1


def snapshots_dir(paths: RunPaths, launch: int) -> Path:
    return paths.launch_dir(launch) / "detector"


class SnapshotKeeper:
    """Takes states in memory and writes the one that belongs to a checkpoint."""

    def __init__(self, paths: RunPaths, launch: int) -> None:
        self._directory = snapshots_dir(paths, launch)
        self._taken: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEEP)
        self._written: set[int] = set()
        self._points = 0

    def note(self, step: int, detector: Detector) -> None:
        """Called after every folded point; takes a state every few."""
        self._points += 1
        if self._points % TAKE_EVERY == 1:
            self._taken.append((step, detector.to_json()))

    def save_for(self, entries: Iterable[Entry]) -> None:
        """Write the states of checkpoints not seen before; steps that have not been folded yet wait."""
        for entry in entries:
            step = entry.step
            if entry.kind != "checkpoint" or step is None or step in self._written:
                continue
            if not self._taken or self._taken[-1][0] < step - TAKE_EVERY:
                continue
            older = [(taken, state) for taken, state in self._taken if taken <= step]
            if older:
                self._write(step, *older[-1])
            self._written.add(step)

    def _write(self, checkpoint: int, folded_to: int, state: dict[str, Any]) -> None:
        """Whole or not at all; a state is a convenience, so nothing waits for the disk."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{checkpoint}.json"
        temporary = path.with_suffix(".tmp")
        record = {"v": VERSION, "checkpoint": checkpoint, "folded_to": folded_to, "state": state}
        temporary.write_text(json.dumps(record), encoding="utf-8")
        os.replace(temporary, path)


def load_snapshot(paths: RunPaths, launches: Iterable[int], before: int) -> tuple[int, Detector] | None:
    """The newest state folded to a step below `before`, in the newest of these launches that has one: (step, detector)."""
    for launch in sorted(launches, reverse=True):
        directory = snapshots_dir(paths, launch)
        names = [NAME.fullmatch(path.name) for path in directory.iterdir()] if directory.is_dir() else []
        for step in sorted((int(match[1]) for match in names if match), reverse=True):
            loaded = _load(directory / f"{step}.json", before) if step < before else None
            if loaded is not None:
                return loaded
    return None


def _load(path: Path, before: int) -> tuple[int, Detector] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        folded_to = int(record["folded_to"])
        if record["v"] != VERSION or folded_to >= before:
            return None
        return folded_to, Detector.from_json(record["state"])
    except (OSError, ValueError, KeyError, TypeError, UnknownState):
        return None  # damaged or of another version: the log is folded from further back instead
