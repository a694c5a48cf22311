"""Checks of the model and its training plan: parameter counts, wrapper, tied weights, precision, flags, LR schedule. Pure.

Sources: seed 000 ("1B" that was 771,176,450), seed 001 (169,990,657 is ceil(679,962,626 / 4), one rank's part), seed 002
tasks 1 and 4 (a OneCycle horizon that forgot the accumulation never finishes), seed 004 (warm-up).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from chronicle.preflight.facts import PLAN_KEYS, Baseline, TrainerFacts, declare_plan
from chronicle.preflight.results import CheckAnswer, CheckResult

CLAIM_TOLERANCE = 0.01
SHARDED_WRAPPERS = ("FullyShardedDataParallel", "FSDP", "DeepSpeedEngine", "FSDPModule")
COUNT_REMEDY = "correct the claim, or train the model that was claimed"


def check_claimed_count(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF02: the counted parameters are those claimed, within 1 %."""
    answer = CheckAnswer("PF02", "parameter count against the claim")
    counted = facts.params_counted
    if counted is None or expected.claimed_params is None:
        return answer.unknown(
            "the trainer did not report the parameter count before wrapping"
            if counted is None
            else "no claim was given"
        )
    claimed = expected.claimed_params
    off = (counted - claimed) / claimed
    read = f"counted {counted:,} before wrapping"
    if abs(off) <= CLAIM_TOLERANCE:
        return answer.passed(f"claim {claimed:,.0f}, counted {counted:,} ({off:+.1%})", read)
    return answer.failed(f"claim {claimed:,.0f}, counted {counted:,} ({off:+.1%})", read, COUNT_REMEDY)


def check_arithmetic_count(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF03: the formula, the count before wrapping and the counts on the ranks agree."""
    answer = CheckAnswer("PF03", "three parameter counts agree")
    logical, counted = facts.params_logical, facts.params_counted
    if logical is None or counted is None:
        return answer.unknown("the trainer did not report the formula or the parameter count")
    local = [rank.params_local for rank in facts.ranks if rank.params_local is not None]
    read = f"formula {logical:,}, counted {counted:,}, local {', '.join(f'{n:,}' for n in local[:8]) or 'unknown'}"
    if logical != counted:
        share = _share_of(logical, counted, len(facts.ranks))
        return answer.failed(f"formula says {logical:,}, counted {counted:,}{share}", read, _module_table(facts))
    if local and not _local_fits(counted, local, facts.wrapper):
        return answer.failed(f"{len(local)} ranks hold {sum(local):,} of {counted:,}", read, "check the wrapper")
    return answer.passed(f"{counted:,} by formula and by count", read)


def _share_of(logical: int, counted: int, world_size: int) -> str:
    """A hint when the smaller number is one rank's part of the larger: then it was counted after sharding."""
    for size in {world_size, 2, 4, 8, 16, 32, 64} - {0, 1}:
        if counted == math.ceil(logical / size):
            return f": exactly 1/{size}, a count taken on one rank after sharding"
    return ""


def _local_fits(counted: int, local: list[int], wrapper: str | None) -> bool:
    """Sharded: the parts add up, padding aside. Replicated: every rank holds all of it."""
    padded = counted + len(local) * 64 * 64  # flat parameters are padded per unit
    if wrapper in SHARDED_WRAPPERS:
        return counted <= sum(local) <= padded or all(part == counted for part in local)
    return all(part == counted for part in local) or counted <= sum(local) <= padded


def _module_table(facts: TrainerFacts) -> str:
    rows = sorted(facts.params_by_module.items(), key=lambda row: -row[1])[:6]
    return "; ".join(f"{name}: {count:,}" for name, count in rows) or "count before wrapping, and look at the formula"


def check_wrapper(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF05: the class that wraps the model is the declared one."""
    answer = CheckAnswer("PF05", "wrapper")
    claimed = expected.binding_plan.get("wrapper") or facts.wrapper_requested
    if facts.wrapper is None and claimed is None and facts.world_size == 1:
        return answer.passed("none: one rank holds the whole model", "1 rank")
    if facts.wrapper is None or claimed is None:
        return answer.unknown(
            "the trainer did not report the model's wrapper" if facts.wrapper is None else "no wrapper was declared"
        )
    if _same_wrapper(facts.wrapper, str(claimed)):
        return answer.passed(facts.wrapper, f"class {facts.wrapper}")
    remedy = "start it under the launcher that shards it, or declare the wrapper that is intended"
    return answer.failed(f"declared {claimed}, found {facts.wrapper}", f"class {facts.wrapper}", remedy)


def _same_wrapper(found: str, claimed: str) -> bool:
    families = (
        ("fsdp", "fullyshardeddataparallel", "fsdpmodule"),
        ("ddp", "distributeddataparallel"),
        ("dp", "dataparallel"),
        ("deepspeed", "deepspeedengine", "zero"),
    )
    one, other = found.lower(), claimed.lower()
    return one == other or any(one in family and other in family for family in families)


def check_plan(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF06: model, data, topology and precision are those of the declared plan, or the change was accepted."""
    answer = CheckAnswer("PF06", "no silent change of the plan")
    if not expected.plan:
        return answer.unknown("no plan was declared before this launch")
    now = declare_plan(facts)
    changes = describe_changes(expected.plan, now)
    read = f"compared {', '.join(key for key in PLAN_KEYS if key in expected.plan and key in now)}"
    if not changes:
        return answer.passed("as declared", read)
    text = "; ".join(changes)
    if expected.accepted_change:
        return answer.passed(f"changed and accepted ({expected.accepted_change}): {text}", read)
    return answer.failed(text, read, 'start with the declared plan, or accept it with `chronicle run --accept-change "reason"`')


def describe_changes(plan: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One text per changed key; keys that are unknown on one side are left out."""
    changes = []
    for key in PLAN_KEYS:
        if key in plan and key in now and key != "config" and plan[key] != now[key]:
            changes.append(f"{key}: {_shown(plan[key])} → {_shown(now[key])}{_shrunk(plan[key], now[key])}")
    before, after = plan.get("config") or {}, now.get("config") or {}
    for key in sorted(set(before) & set(after)):
        if before[key] != after[key]:
            changes.append(f"{key}: {_shown(before[key])} → {_shown(after[key])}")
    return changes


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _shrunk(before: Any, after: Any) -> str:
    if isinstance(before, int) and isinstance(after, int) and before > 0 and after < before:
        return f" ({1 - after / before:.0%} smaller)"
    return ""


def check_tied_weights(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF18: input and output embedding share storage exactly when the configuration says so."""
    answer = CheckAnswer("PF18", "tied weights")
    if facts.nothing_to_tie:
        return answer.passed("nothing to tie: no output has a weight like an embedding's", "the model")
    if facts.tied_expected is None and facts.tied_in_memory:
        return answer.passed("tied by the model's code, which has no setting for it, and tied in memory", "the model")
    if facts.tied_expected is None or facts.tied_in_memory is None:
        return answer.unknown("the trainer did not report whether the weights are tied")
    words = {True: "tied", False: "separate"}
    text = f"declared {words[facts.tied_expected]}, in memory {words[facts.tied_in_memory]}"
    if facts.tied_expected == facts.tied_in_memory:
        return answer.passed(text, "storage addresses")
    return answer.failed(text, "storage addresses", "tie them again after loading and wrapping")


def check_precision(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF20: the device supports the requested precision."""
    answer = CheckAnswer("PF20", "precision")
    if facts.precision is None or facts.precision_supported is None:
        return answer.unknown("the trainer did not report whether the device supports the precision")
    name = "fp32" if facts.precision == "no" else facts.precision
    if facts.precision_supported:
        return answer.passed(f"{name} works here", "a matrix product")
    return answer.failed(f"{name} does not work here", "a matrix product", "choose another precision")


def check_flags(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF29: a requested compilation that is not possible is reported."""
    answer = CheckAnswer("PF29", "requested flags")
    if facts.compile_requested is None:
        return answer.unknown("the trainer did not report whether compilation is requested")
    if not facts.compile_requested:
        return answer.passed("no compilation requested")
    if facts.compile_possible is None:
        return answer.unknown("the trainer did not report whether compilation works here")
    if facts.compile_possible:
        return answer.passed("compilation requested and possible")
    return answer.skipped("compilation was requested and is NOT possible here: the run goes on without it")


# ---- the LR schedule -------------------------------------------------------------------------------------------------

HORIZON_TOLERANCE = 0.01
LONG_WARMUP = 0.1
SHORT_WARMUP = 10
LOOKED_AT = 100


def check_horizon(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF11: the scheduler reaches its end when the run does."""
    answer = CheckAnswer("PF11", "LR horizon")
    horizon, updates = facts.scheduler_horizon, facts.planned_steps
    if horizon is None or updates is None:
        return answer.unknown("the trainer did not report the scheduler's horizon or the planned updates")
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


def check_warmup(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF12: the LR rises at the start, neither too briefly nor too long."""
    answer = CheckAnswer("PF12", "warm-up")
    lrs = facts.learning_rates
    if len(lrs) < 2:
        return answer.unknown("the trainer did not report predicted LRs")
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


def check_lr_picture(facts: TrainerFacts, expected: Baseline) -> CheckResult:
    """PF13: the LR at the start, at the peak, half-way and at the end; it cannot fail."""
    answer = CheckAnswer("PF13", "LR plan")
    lrs = facts.learning_rates
    if not lrs:
        return answer.unknown("the trainer did not report predicted LRs")
    peak = max(range(len(lrs)), key=lrs.__getitem__)
    places = {0: "start", 1: "second", peak: "peak", len(lrs) // 2: "half-way", len(lrs) - 1: "end"}
    text = ", ".join(f"{name} {lrs[index]:.4g}" for index, name in sorted(places.items()))
    return answer.passed(text, f"{len(lrs)} predicted LRs, peak after {peak} updates")
