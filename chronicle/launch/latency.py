"""Does output arrive when it is printed? A rank prints one marked line unflushed and says so; here it is waited for.

Seed 003 lost days to a relay that held lines for 10 to 20 minutes (formats §5: `--tee` without an unbuffered launcher).
The marked line itself is taken out of what people see.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chronicle.launch.rank_output import LATENCY_MARK

__all__ = ["LatencyTest"]

LIMIT_SECONDS = 2.0
LONGEST_MARK_BYTES = 128
MARK = LATENCY_MARK.encode()
ANNOUNCED = MARK + b"latency "
REST_OF_LINE = re.compile(rb"([0-9a-f]{8,64})\r?\n")


class LatencyTest:
    """Marks that are expected, and how late they came. `late` maps a rank to seconds, None while it has not come."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[bytes, tuple[int, float]] = {}
        self._said: set[int] = set()
        self._early: set[bytes] = set()
        self._held: dict[int, bytes] = {}
        self.late: dict[int, float | None] = {}
        self.tested: set[int] = set()

    def expect(self, rank: int, mark: str) -> None:
        """This rank has just printed the mark."""
        self.tested.add(rank)
        if mark.encode() in self._early:
            self._early.discard(mark.encode())
        else:
            self._waiting[mark.encode()] = (rank, self._clock())

    def take(self, data: bytes, stream: int) -> bytes:
        """The data without marked lines; a mark cut in two by the reader's block waits for its other half."""
        data = self._held.pop(stream, b"") + data
        if MARK not in data:
            return data
        start = data.rfind(MARK)
        if b"\n" not in data[start:] and len(data) - start < LONGEST_MARK_BYTES:
            self._held[stream] = data[start:]
            data = data[:start]
        return self._take_out(data)

    def _take_out(self, data: bytes) -> bytes:
        """Whole marked lines taken out, by plain search: a trainer may print megabytes without an end of line."""
        kept, done, start = [], 0, data.find(ANNOUNCED)
        while start >= 0:
            match = REST_OF_LINE.match(data, start + len(ANNOUNCED))
            if match is not None:
                self._arrived(match.group(1))
                kept.append(data[done : max(done, data.rfind(b"\n", done, start) + 1)])
                done = match.end()
            start = data.find(ANNOUNCED, start + 1)
        return b"".join([*kept, data[done:]])

    def check(self, say: Callable[[str], None]) -> None:
        """Once per rank: say that its output is buffered."""
        for rank, printed_at in self._waiting.values():
            if rank not in self._said and self._clock() - printed_at > LIMIT_SECONDS:
                self._said.add(rank)
                self.late[rank] = None
                say(
                    f"buffered: a line that rank {rank} printed has not arrived within {LIMIT_SECONDS:g} s; "
                    "something between the trainer and here holds output back"
                )

    def _arrived(self, mark: bytes) -> None:
        if mark not in self._waiting:
            self._early.add(mark)  # the line can be faster than the word that announces it
            return
        rank, printed_at = self._waiting.pop(mark)
        if rank in self._said:
            self.late[rank] = round(self._clock() - printed_at, 1)
