"""The first fifty logged steps after a restart against the steps they continue: L1–L4, from the log alone.

For trainers that nobody instrumented this is the only verdict on a restart, so it is journalled like the guard's own
(`guard.log`); it cannot refuse and verifies no memory. `LiveRestart` sits in the live watch of a launch; `LogRestart`
finds the restarts of a plain log by its steps, which go back, or begin again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from chronicle.metrics.log import Point
from chronicle.resume.checks.log_tripwires import NUM_AFTER, NUM_BEFORE, Row, check_log, logged_row
from chronicle.resume.checks.check import Check

LEAST_TO_JUDGE = 2  # the spacing of logged steps must be known


class RestartCheck:
    """One restart: feed its rows, get what trips; `passed` when fifty have gone by and nothing did."""

    def __init__(
        self, before: Sequence[Row], head: int, first_step: int, *, resume_step: int | None, lr_ratio: float,
        warm_until: int = 0,
    ) -> None:
        """`before`: rows the launch continues; `head`: the last step that was reached, which may lie after them."""
        self._before = tuple(before)
        self._head = head
        self._first, self._told, self._lr_ratio, self._warm_until = first_step, resume_step, lr_ratio, warm_until
        self._rows: list[Row] = []
        self.failed: list[Check] = []

    @property
    def done(self) -> bool:
        return len(self._rows) >= NUM_AFTER

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def resume_step(self) -> int:
        """The step the launch must go on from: what contract or guard say, else what its first row itself claims."""
        if self._told is not None:
            return self._told
        spacing = self._spacing()
        begins_anew = self._first <= 1 + spacing < self._head
        return self._head if begins_anew or self._first > self._head + spacing else self._first - 1

    def feed(self, point: Point) -> list[Check]:
        """Return the checks that this row makes fail."""
        if self.done or (row := logged_row(point.step, point.values)) is None:
            return []
        self._rows.append(row)
        if len(self._rows) < LEAST_TO_JUDGE:
            return []
        known = {check.name for check in self.failed}
        found = check_log(
            self._before, self._rows, resume_step=self.resume_step, lr_ratio=self._lr_ratio, warm_until=self._warm_until
        )
        fresh = [check for check in found if check.name not in known]
        self.failed += fresh
        return fresh

    def to_json(self, origin: str) -> dict[str, Any]:
        """As it stands in the journal."""
        return {
            "verdict": "warned" if self.failed else "passed",
            "moment": "first steps in the log",
            "basis": origin,
            "rows": len(self._rows),
            "checks": [check.to_json() for check in self.failed],
        }

    def _spacing(self) -> int:
        steps = [row[0] for row in self._rows]
        return min((b - a for a, b in pairwise(steps) if b > a), default=1)


class LogRestart:
    """Restarts inside one log, for `chronicle watch FILE` and `chronicle spikes FILE`."""

    def __init__(self, lr_ratio: float = 1.0) -> None:
        self._rows: deque[Row] = deque(maxlen=4 * NUM_BEFORE)
        self._check: RestartCheck | None = None
        self._lr_ratio = lr_ratio
        self._launch: int | None = None

    def feed(self, point: Point) -> list[tuple[int, Check]]:
        """(step of the restart, failed check) for what this point shows."""
        row = logged_row(point.step, point.values)
        if row is None:
            return []
        if self._is_restart(point):
            head = self._rows[-1][0]
            before = [known for known in self._rows if known[0] < point.step]
            rows = before or list(self._rows)
            self._check = RestartCheck(rows, head, point.step, resume_step=None, lr_ratio=self._lr_ratio)
            self._rows = deque(before, maxlen=self._rows.maxlen)
        self._launch = point.launch if point.launch is not None else self._launch
        self._rows.append(row)
        if self._check is None:
            return []
        found = [(self._check.resume_step, check) for check in self._check.feed(point)]
        self._check = None if self._check.done else self._check
        return found

    def _is_restart(self, point: Point) -> bool:
        """Another launch; or, in one log, at least two logged steps once more: one alone is a line printed twice."""
        if self._launch is not None and point.launch is not None:
            return bool(self._rows) and point.launch != self._launch
        return len(self._rows) > 1 and point.step <= self._rows[-2][0]


def describe_trip(step: int, check: Check) -> str:
    """One line for a person."""
    return f"restart at step {step}: {check.code} {check.name}: expected {check.expected}, found {check.found} ({check.cause})"


class LiveRestart:
    """The check of one launch in the live watch: says what trips at once, and writes one verdict."""

    def __init__(self, write: Callable[[int, str, dict[str, Any]], object], say: Callable[[str], None]) -> None:
        self._write, self._say = write, say
        self._check: RestartCheck | None = None
        self._origin = ""

    def begin(
        self, before: Sequence[Row], head: int, first_step: int, *, resume_step: int | None, lr_ratio: float,
        warm_until: int = 0,
    ) -> None:
        """The launch's first point has come; a launch that continues nothing is no restart.

        `resume_step`: what the guard said, None where no guard spoke.
        """
        if before:
            self._check = RestartCheck(
                before, head, first_step, resume_step=resume_step, lr_ratio=lr_ratio, warm_until=warm_until
            )
            self._origin = "log" if resume_step is None else "guard"

    def feed(self, point: Point) -> None:
        if self._check is None:
            return
        for check in self._check.feed(point):
            self._say(f"chronicle: {describe_trip(self._check.resume_step, check)}")
        if self._check.done:
            self.finish()

    def finish(self) -> None:
        """Write the verdict; a restart with too few rows to judge has none."""
        check, self._check = self._check, None
        if check is None or check.num_rows < LEAST_TO_JUDGE:
            return
        word = "warned" if check.failed else "passed"
        self._write(check.resume_step, f"first {check.num_rows} logged steps: {word}", check.to_json(self._origin))
