"""`torchrun --max-restarts`: each further start of the ranks by their launcher, with why the one before ended.

That an attempt began is carried: its ranks say so at their start, by number and process (`pulse.read_attempts_begun`). Why the
one before ended is the launcher's word about the process that failed first, and the last exception before it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.journal import Entry
from chronicle.journal.events import LaunchAttempt, events_of
from chronicle.launch.ending import Ending, Seen, count_oom_kills, judge_attempt
from chronicle.launch.processes import TICKS
from chronicle.launch.pulse import AttemptBegun, read_attempts_begun

FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\)\s+local_rank: \d+ \(pid: (\d+)\)")
NUM_LINES = 200  # in which an exception is looked for
WAIT_SECONDS = 10.0  # for the launcher's word, which comes before it starts the ranks again


class _Failure(NamedTuple):
    pid: int
    code: int
    lines: tuple[str, ...]  # before it


class Attempts:
    """The attempts of one launch on this machine. `write(event, title=)` appends to the journal."""

    def __init__(
        self,
        pulses: Path | None,
        *,
        host: str,
        launch: int,
        write: Callable[..., Any],
        say: Callable[[str], None],
        oom_kills: int | None = None,
        before: Iterable[Entry] = (),
    ) -> None:
        """`oom_kills`: as the kernel had counted them when the launch began. `before`: entries by another follower of it."""
        self._pulses, self._host, self._launch, self._write, self._say = pulses, host, launch, write, say
        self._noted = {event.attempt for _, event in events_of(before, LaunchAttempt)}
        self._lines: deque[bytes] = deque(maxlen=NUM_LINES)
        self._failures: dict[int, _Failure] = {}
        self._seen_at: dict[int, float] = {}
        self.oom_kills = oom_kills  # until the newest attempt began

    def newer(self, number: int) -> int:
        """The first attempt after the n-th that has begun; `number` where none has."""
        return min((one.attempt for one in read_attempts_begun(self._pulses) if one.attempt > number), default=number)

    def take(self, lines: Iterable[bytes]) -> None:
        """Look for the launcher's words about a process that failed."""
        for line in lines:
            found = FAILED.search(line) if b"failed (exitcode: " in line else None
            if found is None:
                self._lines.append(line)
                continue
            texts = tuple(one.decode("utf-8", "replace") for one in self._lines)
            self._failures[int(found[2])] = _Failure(int(found[2]), int(found[1]), texts)
            self._lines.clear()

    def note(self, now: float, *, is_last: bool = False) -> None:
        """Write down the attempts that have begun, each once the launcher's word is known or overdue. `now`: monotonic."""
        begun = read_attempts_begun(self._pulses)
        for number in sorted({one.attempt for one in begun} - self._noted - {0}):
            failure, rank = self._failure_before(number, begun)
            waited = now - self._seen_at.setdefault(number, now)
            if failure is None and waited < WAIT_SECONDS and not is_last:
                return
            self._noted.add(number)
            first = next(one for one in begun if one.attempt == number)
            self._write_down(number, first, self._judge(failure, rank))

    def _failure_before(self, number: int, begun: Iterable[AttemptBegun]) -> tuple[_Failure | None, int | None]:
        """What failed in the attempt before this one, and as which rank."""
        for one in begun:
            if one.attempt == number - 1 and one.pid in self._failures:
                return self._failures[one.pid], one.rank
        return None, None

    def _judge(self, failure: _Failure | None, rank: int | None) -> Ending:
        before, self.oom_kills = self.oom_kills, count_oom_kills()
        killed = None if before is None or self.oom_kills is None else self.oom_kills - before
        if failure is None:
            return judge_attempt(Seen(exit_code=1))
        return judge_attempt(Seen(exit_code=1, rank=rank, rank_code=failure.code, oom_kills=killed, lines=failure.lines))

    def _write_down(self, number: int, first: AttemptBegun, ending: Ending) -> None:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - first.start_ticks / TICKS
        event = LaunchAttempt(
            host=self._host,
            attempt=number,
            began=round(time.time() - max(0.0, age), 3),
            cause=ending.cause.value,
            because=ending.because,
        )
        self._write(event, title=f"attempt {number} of launch {self._launch} begins: {ending.because}")
        self._say(f"the launcher starts its ranks again (attempt {number}): {ending.because}")
