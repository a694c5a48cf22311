"""A launch that continues another: the points it starts from, its promised LRs, its first-steps check.

`RestartCheck` compares the first fifty logged steps with the steps they continue (L1-L4, from the log alone). For
trainers without the guard this is the only verdict on a restart, so it is journalled like the guard's own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chronicle.checkpoints import LR_NOT_AS_PROMISED
from chronicle.journal.entries import Entry
from chronicle.journal.events import GuardVerdict, Incident, JournalEvent, LogVerdict
from chronicle.journal.lineage import Interval, compute_lineage
from chronicle.metrics.log import Point, read_metrics
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import Check
from chronicle.resume.learning_rate import warmed
from chronicle.watch.log_checks import LR_JUMP, NUM_AFTER, NUM_BEFORE, LoggedRow, check_log, logged_row
from rollback.channels import EXPECTED_LR, Role, value_of

LR_CODE, STEP_CODE = "L1", "L2"
LEAST_TO_JUDGE = 2  # the spacing of logged steps must be known


@dataclass(slots=True, kw_only=True)
class RestartCheck:
    """One restart: compares its first fifty logged rows with the rows before it.

    `before`: rows the launch continues; `head`: the last step that was reached, which may be later than theirs; `told`: the
    step to resume from, by guard or by what was handed over (`origin`). `exact`: codes of what a guard has compared in memory:
    the log, which may count otherwise, is not asked for it.
    """

    before: Sequence[LoggedRow]
    head: int
    first_step: int
    told: int | None = None
    origin: str = "log"
    lr_ratio: float = 1.0
    warm_until: int = 0
    exact: frozenset[str] = frozenset()
    rows: list[LoggedRow] = field(default_factory=list)
    failed: list[Check] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all fifty rows have been compared."""
        return len(self.rows) >= NUM_AFTER

    @property
    def resume_step(self) -> int:
        """The step that the launch resumes from: as told, else by its own first row."""
        if self.told is not None:
            return self.told
        steps = [row[0] for row in self.rows]
        spacing = min((b - a for a, b in pairwise(steps) if b > a), default=1)
        begins_anew = self.first_step <= 1 + spacing < self.head
        return self.head if begins_anew or self.first_step > self.head + spacing else self.first_step - 1

    def feed(self, point: Point) -> list[Check]:
        """Return the checks that this row makes fail."""
        if self.done or (row := logged_row(point.step, point.values)) is None:
            return []
        self.rows.append(row)
        if len(self.rows) < LEAST_TO_JUDGE:
            return []
        known = {check.name for check in self.failed}
        found = check_log(
            self.before, self.rows, resume_step=self.resume_step, lr_ratio=self.lr_ratio, warm_until=self.warm_until
        )
        fresh = [check for check in found if check.name not in known and check.code not in self.exact]
        self.failed += fresh
        return fresh


class LogRestart:
    """Restarts inside one log, for `chronicle watch FILE`."""

    def __init__(self) -> None:
        self._rows: deque[LoggedRow] = deque(maxlen=4 * NUM_BEFORE)
        self._check: RestartCheck | None = None

    def feed(self, point: Point) -> list[tuple[int, Check]]:
        """Return (step of the restart, failed check) for each check that this point makes fail."""
        row = logged_row(point.step, point.values)
        if row is None:
            return []
        if self._is_restart(point):
            head = self._rows[-1][0]
            before = [known for known in self._rows if known[0] < point.step]
            self._check = RestartCheck(before=before or list(self._rows), head=head, first_step=point.step)
            self._rows = deque(before, maxlen=self._rows.maxlen)
        self._rows.append(row)
        if self._check is None:
            return []
        found = [(self._check.resume_step, check) for check in self._check.feed(point)]
        self._check = None if self._check.done else self._check
        return found

    def _is_restart(self, point: Point) -> bool:
        """Whether two logged steps repeat: one alone is a line printed twice."""
        return len(self._rows) > 1 and point.step <= self._rows[-2][0]


def describe_trip(step: int, check: Check) -> str:
    """Return one line for a failed check."""
    return f"restart at step {step}: {check.code} {check.name}: expected {check.expected}, found {check.found} ({check.cause})"


def compared_exactly(verdict: Entry | None) -> frozenset[str]:
    """The codes of what the guard of this launch has compared in memory; nothing without a guard."""
    if verdict is None:
        return frozenset()
    has_memory = GuardVerdict.of(verdict).basis in ("manifest", "contract")
    return frozenset((STEP_CODE, LR_CODE) if has_memory else (STEP_CODE,))


class LiveRestart:
    """The restart check in the live watch: prints each failed check at once, and writes one verdict to the journal.

    An LR that is not the promised one is an incident as well: without a guard nothing else proves the edit of a rollback.
    """

    def __init__(self, launch: int, write: Callable[[int, str, JournalEvent], object], say: Callable[[str], None]) -> None:
        self._launch, self._write, self._say = launch, write, say
        self._check: RestartCheck | None = None

    def begin(self, check: RestartCheck) -> None:
        """Start at the launch's first point; a launch that continues nothing is no restart."""
        self._check = check if check.before else None

    def feed(self, point: Point) -> None:
        """Check one point; after fifty write the verdict."""
        if self._check is None:
            return
        for check in self._check.feed(point):
            text = describe_trip(self._check.resume_step, check)
            self._say(f"chronicle: {text}")
            if check.code == LR_CODE:
                incident = Incident(
                    kind=LR_NOT_AS_PROMISED, tier="warn", status="open", onset_step=point.step, alarm_step=point.step,
                    channels=("lr",), launch=self._launch, change="opened", text=text,
                )  # fmt: skip
                self._write(point.step, f"warn: {text}", incident)
        if self._check.done:
            self.finish()

    def finish(self) -> None:
        """Write the verdict, unless there are too few rows to judge."""
        check, self._check = self._check, None
        if check is None or len(check.rows) < LEAST_TO_JUDGE:
            return
        word = "warned" if check.failed else "passed"
        verdict = LogVerdict(
            verdict=word, moment="first steps in the log", basis=check.origin, rows=len(check.rows),
            checks=tuple(one.to_json() for one in check.failed),
        )  # fmt: skip
        self._write(check.resume_step, f"first {len(check.rows)} logged steps: {word}", verdict)


# --- LRs that the rollback promised for the next steps

# Source: `contract.json`, whose `next_lrs` are the LRs of the optimizer steps after the checkpoint. Some trainers log the
# LR that a step used, others the one that the scheduler has set for the next. The promise nearer to the logged LR counts,
# so that a way of logging is no mismatch. In a warm-up some log the scheduler's LR and some the used one: both count.

NEAR_STEPS = 1000  # the first logged step is at most so far after the checkpoint


class LrPromise:
    """The promised LRs by step; empty where there is no contract, or one for another start."""

    def __init__(self, first_step: int, lrs: Sequence[float], warmup_steps: int = 0) -> None:
        self._first, self._lrs = first_step, tuple(lrs)
        self._warmups = [(0, warmup_steps)]

    def add_to(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return the values with the promised LR beside the logged one, while the promise lasts."""
        found = value_of(values, Role.LR)
        at = step - self._first
        near = self._lrs[at : at + 2] if at >= 0 else ()
        near = (*near, *(warmed(lr, at + index, self._warmups) for index, lr in enumerate(near)))
        if found is None or not near:
            return values
        return {EXPECTED_LR: min(near, key=lambda lr: abs(lr - found)), **values}


def read_contract(path: Path) -> Mapping[str, Any]:
    """Return the contract of the last rollback; empty where there is none that can be read."""
    try:
        contract = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return contract if isinstance(contract, dict) else {}


def promise_of(contract: Mapping[str, Any], first_step: int) -> LrPromise:
    """Return the LRs promised to a launch with this first logged step; none where the contract is for another start."""
    return LrPromise(*parse_promise(contract, first_step), _count(contract, "warmup_steps"))


def lr_ratio_of(contract: Mapping[str, Any], first_step: int, before: Sequence[LoggedRow] = ()) -> float:
    """Return the factor by which the rollback before this launch scaled the LR; 1 where there was none.

    A rollback that set the LR as a value (`--set lr=…`) has no factor: it follows from the LR that was logged before, the last
    of `before`. One that is small enough for a schedule's own step is no factor.
    """
    if not _is_for(contract, first_step):
        return 1.0
    ratio, groups = contract.get("lr_ratio"), contract.get("groups")
    if isinstance(ratio, int | float):
        return float(ratio) if ratio > 0 else 1.0
    if ratio is not None or contract.get("next_lrs") is not None or not isinstance(groups, list) or not groups:
        return 1.0
    set_lr = groups[0].get("lr") if isinstance(groups[0], dict) else None
    logged = next((values["lr"] for at, values in reversed(before) if at <= contract["step"] and "lr" in values), 0.0)
    if not isinstance(set_lr, int | float) or set_lr <= 0 or logged <= 0:
        return 1.0
    found = float(set_lr / logged)
    return 1.0 if 1 / LR_JUMP <= found <= LR_JUMP else found


def warm_until(contract: Mapping[str, Any], first_step: int) -> int:
    """Return the last step of the warm-up that the rollback asked for; 0 where there is none for this start."""
    count = _count(contract, "warmup_steps")
    return int(contract["step"]) + count if count and _is_for(contract, first_step) else 0


def _is_for(contract: Mapping[str, Any], first_step: int) -> bool:
    """Whether it is about a launch with this first logged step."""
    step = contract.get("step")
    return isinstance(step, int) and step < first_step <= step + NEAR_STEPS


def _count(contract: Mapping[str, Any], name: str) -> int:
    value = contract.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def parse_promise(contract: Mapping[str, Any], first_step: int) -> tuple[int, tuple[float, ...]]:
    """Return (first promised step, LRs of the first group); (0, ()) where the contract is for another start."""
    step, rows = contract.get("step"), contract.get("next_lrs")
    if contract.get("v") != 1 or not isinstance(step, int) or not isinstance(rows, list):
        return 0, ()
    if not step < first_step <= step + len(rows):
        return 0, ()
    try:
        return step + 1, tuple(float(row[0]) for row in rows)
    except (TypeError, ValueError, IndexError):
        return 0, ()


# --- Points that the launch's weights descend from

REACH_STEPS = 20_000  # the longest memory of the detector, with room


def kept_before(paths: RunPaths, entries: Sequence[Entry], launch: int) -> tuple[Interval, ...]:
    """Return the kept intervals of the launches before this one."""
    earlier = [entry for entry in entries if entry.launch is None or entry.launch < launch]
    return compute_lineage(earlier, _observed(paths, launch)).kept


def read_past(paths: RunPaths, kept: Sequence[Interval], first_step: int) -> Iterator[tuple[int, Point]]:
    """Yield (launch, point) of the kept steps below `first_step`; missing logs are left out."""
    for interval in kept:
        first, last = max(interval.first, first_step - REACH_STEPS), min(interval.last, first_step - 1)
        for point in _logged(paths, interval.launch) if first <= last else ():
            if first <= point.step <= last:
                yield interval.launch, point


def last_rows(paths: RunPaths, kept: Sequence[Interval], until: int) -> list[LoggedRow]:
    """Return LR and loss of the last kept steps up to `until`; of all kept steps where all are later (a new counter)."""
    if not any(interval.first <= until for interval in kept):
        until = max((interval.last for interval in kept), default=0)
    rows: list[LoggedRow] = []
    for interval in reversed(kept):
        if len(rows) >= NUM_BEFORE:
            break
        last = min(interval.last, until)
        points = (point for point in _logged(paths, interval.launch) if interval.first <= point.step <= last)
        found = [row for point in points if (row := logged_row(point.step, point.values)) is not None]
        rows = found[-NUM_BEFORE:] + rows
    return rows[-NUM_BEFORE:]


def _logged(paths: RunPaths, launch: int) -> list[Point]:
    try:
        return list(read_metrics(paths.metrics_path(launch)))
    except OSError:
        return []


def _observed(paths: RunPaths, launch: int) -> dict[int, tuple[int, int]]:
    """Return first and last logged step of the earlier launches that have a log."""
    logs = {number: [point.step for point in _logged(paths, number)] for number in range(1, launch)}
    return {number: (min(steps), max(steps)) for number, steps in logs.items() if steps}
