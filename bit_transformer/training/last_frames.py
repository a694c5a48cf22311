"""The last batches before a loss or the weights became NaN: `non_finite.json` beside the launch's log.

Every frame is cheap while it is kept: small samples on the device, no transfer. They are read only when the file is written,
once per launch. Each rank writes its own (`non_finite-rank<N>.json` for all but the first). No torch here.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollback.disk.durable import write_atomic

NUM_FRAMES = 16


def frames_path(launch_dir: Path, rank: int = 0) -> Path:
    """Where the frames of a rank are."""
    return launch_dir / ("non_finite.json" if rank == 0 else f"non_finite-rank{rank}.json")


class LastFrames:
    """A ring of the last frames of one rank. `launch_dir` None: nothing is kept."""

    def __init__(self, launch_dir: Path | None, rank: int = 0) -> None:
        self._path = None if launch_dir is None else frames_path(launch_dir, rank)
        self._frames: deque[Callable[[], Mapping[str, Any]]] = deque(maxlen=NUM_FRAMES)
        self.written: Path | None = None

    def add(self, frame: Callable[[], Mapping[str, Any]]) -> None:
        """Keep one frame; `frame()` reads it, later and perhaps never."""
        if self._path is not None and self.written is None:
            self._frames.append(frame)

    def keep(self, why: str) -> Path | None:
        """Write the frames, oldest first; returns the file, or None when there are none or it was written before."""
        if self._path is None or self.written is not None or not self._frames:
            return None
        frames = [{**_finite(frame()), **({"why": why} if frame is self._frames[-1] else {})} for frame in self._frames]
        write_atomic(self._path, (json.dumps(frames, indent=1) + "\n").encode())
        self.written = self._path
        return self._path


def _finite(frame: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such numbers become their names."""
    return {
        key: repr(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in frame.items()
    }
