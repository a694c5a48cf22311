"""How far a study is and how long it may still take: updates, because launches differ in length by a factor of ten."""

from __future__ import annotations

from collections.abc import Callable

from experiments.design import StudyPlan
from experiments.history import History, NextLaunch

__all__ = ["Progress", "count_updates", "format_duration"]


def count_updates(plan: StudyPlan, history: History) -> int:
    """Updates of the legs that count."""
    return sum(
        run.legs[number].num_updates for run in plan.runs for number in range(len(history.done.get(run.name, ())))
    )


class Progress:
    """Speaks one line per finished launch. The rate is that of this session, not of an earlier one."""

    def __init__(self, plan: StudyPlan, clock: Callable[[], float]) -> None:
        self._plan, self._clock = plan, clock
        self._began, self._at_begin = clock(), -1

    def tell(self, launch: NextLaunch, history: History) -> str:
        """One line for the terminal."""
        run, leg = launch
        done = count_updates(self._plan, history)
        if self._at_begin < 0:
            self._at_begin = done - leg.num_updates
        lost = sum(one.legs[number].num_updates for one in self._plan.runs if one.name in history.stopped
                   for number in range(len(history.done.get(one.name, ())), len(one.legs)))  # fmt: skip
        rate = (done - self._at_begin) / max(1e-9, self._clock() - self._began)
        left = (self._plan.num_updates - done - lost) / rate if rate > 0 else 0.0
        share = f"{done:,} of {self._plan.num_updates:,} updates"
        return f"{run.name}: launch {leg.number} of {len(run.legs)} done; {share}, about {format_duration(left)} left"


def format_duration(seconds: float) -> str:
    """`8 min 05 s`, `2 h 03 min`, `12 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
