"""Checks on the learning rate's plan. Pure.

Sources: seed 002 tasks 1 and 4 (a OneCycle horizon that forgot the accumulation never finishes), seed 004 (warm-up).
"""

from __future__ import annotations

import itertools

from chronicle.preflight.answers import Answer
from chronicle.preflight.expectation import Expectation
from chronicle.preflight.facts import TrainerFacts
from chronicle.preflight.results import CheckResult

__all__ = ["check_horizon", "check_lr_picture", "check_warmup", "count_warmup"]

HORIZON_TOLERANCE = 0.01
LONG_WARMUP = 0.1
SHORT_WARMUP = 10
LOOKED_AT = 100


def check_horizon(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF11: the scheduler reaches its end when the run does."""
    answer = Answer("PF11", "LR horizon")
    horizon, updates = facts.scheduler_horizon, facts.planned_steps
    if horizon is None or updates is None:
        return answer.unknown("the scheduler's horizon or the planned updates")
    per_update = facts.scheduler_steps_per_update or 1.0
    taken = updates * per_update
    read = f"horizon {horizon:,}, {updates:,} updates × {per_update:g} scheduler steps"
    if abs(taken - horizon) <= HORIZON_TOLERANCE * horizon:
        return answer.passed(f"{taken:,.0f} of {horizon:,} scheduler steps", read)
    name = facts.scheduler or "scheduler"
    text = f"{name} horizon {horizon:,} but {taken:,.0f} scheduler steps in {updates:,} updates"
    if taken < horizon and facts.learning_rates:
        end, peak = facts.learning_rates[min(updates, len(facts.learning_rates)) - 1], max(facts.learning_rates)
        text += f": LR ends at {end / peak:.0%} of its peak" if peak > 0 else ""
    if facts.accumulation and facts.accumulation > 1 and abs(horizon - taken * facts.accumulation) <= 0.02 * horizon:
        text += f" (accumulation {facts.accumulation} was not divided out)"
    return answer.failed(text, read, "set the horizon to the number of scheduler steps that will be taken")


def check_warmup(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF12: the LR rises at first, for a while and not for ever. A resumed launch has its warm-up behind it."""
    answer = Answer("PF12", "warm-up")
    lrs = facts.learning_rates
    if len(lrs) < 2:
        return answer.unknown("no predicted LRs")
    updates = count_warmup(lrs)
    read = f"{len(lrs)} predicted LRs"
    if updates == 0:
        return answer.warned(f"the LR does not rise in its first {min(LOOKED_AT, len(lrs))} updates", read, "add a warm-up")
    if updates < SHORT_WARMUP:
        return answer.warned(f"the warm-up lasts {updates} updates", read, "lengthen it")
    if facts.planned_steps and updates > LONG_WARMUP * facts.planned_steps:
        return answer.warned(f"the warm-up lasts {updates} of {facts.planned_steps} updates", read, "shorten it")
    return answer.passed(f"the LR rises for {updates} updates", read)


def count_warmup(learning_rates: tuple[float, ...]) -> int:
    """Updates over which the LR rises from the start without falling."""
    rising = 0
    for before, after in itertools.pairwise(learning_rates):
        if after <= before:
            break
        rising += 1
    return rising


def check_lr_picture(facts: TrainerFacts, expected: Expectation) -> CheckResult:
    """PF13: the LR at the start, at the peak, half-way and at the end, always said."""
    answer = Answer("PF13", "LR plan")
    lrs = facts.learning_rates
    if not lrs:
        return answer.unknown("no predicted LRs")
    peak = max(range(len(lrs)), key=lrs.__getitem__)
    places = {0: "start", 1: "second", peak: "peak", len(lrs) // 2: "half-way", len(lrs) - 1: "end"}
    text = ", ".join(f"{name} {lrs[index]:.4g}" for index, name in sorted(places.items()))
    return answer.passed(text, f"{len(lrs)} predicted LRs, peak after {peak} updates")
