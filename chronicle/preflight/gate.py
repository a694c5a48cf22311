"""The gate inside the ranks: check what the trainer says before its first step, write it down, refuse on a failure.

Called on one rank with the gathered facts. Without `chronicle run` there is no journal and nothing is written; a
failure is refused all the same. The first launch of a run declares its plan here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.errors import JournalError, Refusal, UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.launchers import REQUESTED_VARIABLE
from chronicle.paths import RunPaths
from chronicle.preflight import (
    data_checks,
    host,
    model_checks,
)
from chronicle.preflight import (
    data_checks as rank_checks,
)
from chronicle.preflight import (
    model_checks as schedule_checks,
)
from chronicle.preflight.facts import (
    SIGNAL_LEAD_VARIABLE,
    Baseline,
    TrainerFacts,
    declare_plan,
    find_plan,
    read_seconds,
)
from chronicle.preflight.host import free_bytes
from chronicle.preflight.results import CheckResult, CheckVerdict, count_verdicts

__all__ = [
    "ACCEPT_VARIABLE",
    "CHECK_IDS",
    "FACT_CHECKS",
    "FULL_VARIABLE",
    "SKIP_VARIABLE",
    "PreflightFailed",
    "check_before_first_step",
    "check_facts",
    "code_and_environment",
    "read_expectation",
    "require_known",
]

ACCEPT_VARIABLE = "CHRONICLE_ACCEPT_CHANGE"
SKIP_VARIABLE = "CHRONICLE_PREFLIGHT_SKIP"
FULL_VARIABLE = "CHRONICLE_PREFLIGHT"  # "full": this start is for the experiments of `chronicle preflight --full`
EXPERIMENTS = ("save_round_trip", "fit_losses", "fit_resumed_equal", "micro_batch_difference", "telemetry")
FROM_EXPERIMENTS = ("PF22", "PF25", "PF27", "PF28")


class PreflightFailed(Refusal):
    """At least one check failed. A trainer that ends because of it exits with 78: a requeue would fail again."""

    exit_code = 78

    def __init__(self, failures: tuple[CheckResult, ...]) -> None:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        super().__init__(f"preflight {first.check} {first.title}: {first.message}{more}", first.remedy)
        self.failures = failures


def check_before_first_step(
    facts: TrainerFacts, *, environ: Mapping[str, str] = os.environ, expected: Baseline | None = None
) -> tuple[CheckResult, ...]:
    """Run the catalogue over `facts`, record it, raise `PreflightFailed` when something failed."""
    paths, launch = _where(environ)
    if expected is None:
        expected = read_expectation(paths, environ)
    full = environ.get(FULL_VARIABLE) == "full"
    earlier = None if full else _find_earlier_experiments(facts, paths, launch)
    if earlier is not None:
        facts = replace(facts, **{name: getattr(earlier[1], name) for name in EXPERIMENTS})
    skip = tuple(filter(None, environ.get(SKIP_VARIABLE, "").split(",")))
    results = check_facts(facts, expected, skip=skip)
    if earlier is not None:
        results = tuple(_as_reused(result, earlier[0]) for result in results)
    failures = tuple(result for result in results if result.verdict is CheckVerdict.FAIL)
    if paths is not None:
        _record(paths, launch, facts, expected, results, failures, declares=not full)
    if failures:
        raise PreflightFailed(failures)
    return results


def read_expectation(paths: RunPaths | None, environ: Mapping[str, str]) -> Baseline:
    """The declared plan of the run and the limits this launch was started with."""
    plan = find_plan(read_journal(paths).entries) if paths is not None else None
    asked = environ.get(REQUESTED_VARIABLE, "")
    checkpoints = environ.get("CHRONICLE_CHECKPOINTS")
    return Baseline(
        claimed_devices=int(asked) if asked.isdigit() else None,
        plan=dict(plan.data["declared"]) if plan is not None else {},
        accepted_change=environ.get(ACCEPT_VARIABLE) or None,
        grace_seconds=read_seconds(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        signal_lead_seconds=read_seconds(environ, SIGNAL_LEAD_VARIABLE),
        free_bytes=free_bytes(Path(checkpoints)) if checkpoints else None,
    )


def _find_earlier_experiments(
    facts: TrainerFacts, paths: RunPaths | None, launch: int | None
) -> tuple[int | None, TrainerFacts] | None:
    """Launch and facts of a `--full` that passed on this plan, code and environment; None when there is none."""
    if paths is None or any(getattr(facts, name) not in (None, (), {}) for name in EXPERIMENTS):
        return None
    entries = read_journal(paths).entries
    origins = {entry.launch: code_and_environment(entry.data) for entry in entries if entry.kind == "launch.start"}
    mine = origins.get(launch)
    for entry in reversed(entries):
        known = entry.data.get("facts") if entry.kind == "preflight" and entry.data.get("verdict") == "passed" else None
        if mine is None or not isinstance(known, Mapping) or origins.get(entry.launch) != mine:
            continue
        try:
            earlier = TrainerFacts.from_json(known)
        except (ValueError, TypeError):
            continue
        if earlier.save_round_trip is not None and declare_plan(earlier) == declare_plan(facts):
            return entry.launch, earlier
    return None


def _as_reused(result: CheckResult, launch: int | None) -> CheckResult:
    if result.check not in FROM_EXPERIMENTS or result.verdict is CheckVerdict.UNKNOWN:
        return result
    return replace(result, read=f"{result.read}; launch {launch}: same plan, code and environment")


def code_and_environment(start: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Digests of code and packages out of a `launch.start`; None where one is unknown, because unknown equals nothing."""
    commit, packages = start.get("git_commit"), start.get("env_digest")
    if not commit or not packages:
        return None
    return str(commit), str(start.get("git_dirty_digest") or ""), str(packages)


def _where(environ: Mapping[str, str]) -> tuple[RunPaths | None, int | None]:
    directory, number = environ.get("CHRONICLE_RUN_DIR"), environ.get("CHRONICLE_LAUNCH", "")
    return (RunPaths(Path(directory)) if directory else None), (int(number) if number.isdigit() else None)


def _record(
    paths: RunPaths,
    launch: int | None,
    facts: TrainerFacts,
    expected: Baseline,
    results: tuple[CheckResult, ...],
    failures: tuple[CheckResult, ...],
    *,
    declares: bool,
) -> None:
    """One `preflight` entry, and the plan where this launch declares or changes it. A broken journal stops nobody."""
    data: dict[str, Any] = {"verdict": "failed" if failures else "passed", "checks": [r.to_json() for r in results]}
    data["facts"] = json.loads(json.dumps(facts.to_json(), default=str))
    declared = declare_plan(facts)
    try:
        with JournalWriter(paths) as writer:
            writer.append("preflight", launch=launch, title=f"preflight: {count_verdicts(results)}", data=data)
            if declares and declared and not failures and (not expected.plan or expected.accepted_change):
                title = f"plan changed: {expected.accepted_change}" if expected.plan else f"plan declared by launch {launch}"
                reason = expected.accepted_change if expected.plan else None
                writer.append("plan", launch=launch, title=title, data={"declared": declared, "reason": reason})
    except JournalError:
        pass


# --- The catalogue: which checks there are, in order

CHECK_IDS = tuple(f"PF{number:02d}" for number in range(1, 32))

FACT_CHECKS: tuple[Callable[[TrainerFacts, Baseline], CheckResult], ...] = (
    data_checks.check_shards,  # PF01
    model_checks.check_claimed_count,  # PF02
    model_checks.check_arithmetic_count,  # PF03
    rank_checks.check_devices,  # PF04
    model_checks.check_wrapper,  # PF05
    model_checks.check_plan,  # PF06
    rank_checks.check_collectives,  # PF10
    schedule_checks.check_horizon,  # PF11
    schedule_checks.check_warmup,  # PF12
    schedule_checks.check_lr_picture,  # PF13
    data_checks.check_labels,  # PF14
    data_checks.check_size,  # PF15
    data_checks.check_samples,  # PF16
    data_checks.check_causality,  # PF17
    model_checks.check_tied_weights,  # PF18
    rank_checks.check_seeds,  # PF19
    model_checks.check_precision,  # PF20
    host.check_disk,  # PF21
    host.check_round_trip,  # PF22
    host.check_save_time,  # PF23
    host.check_fit,  # PF25
    rank_checks.check_gradients,  # PF26
    host.check_telemetry,  # PF27
    host.check_micro_batches,  # PF28
    model_checks.check_flags,  # PF29
    rank_checks.check_free_memory,  # PF31
)


def check_facts(
    facts: TrainerFacts, expected: Baseline | None = None, *, skip: Collection[str] = ()
) -> tuple[CheckResult, ...]:
    """Every check over these facts, in the catalogue's order; a skipped one says so."""
    results = (check(facts, expected or Baseline()) for check in FACT_CHECKS)
    return tuple(_skipped(result) if result.check in skip else result for result in results)


def require_known(names: Collection[str]) -> tuple[str, ...]:
    """The names, or UsageProblem for one that is no check: a mistyped `--skip` must not look like a skipped check."""
    for name in names:
        if name not in CHECK_IDS:
            raise UsageProblem(f"--skip {name}: expected a check from PF01 to PF31", "chronicle preflight lists them")
    return tuple(names)


def _skipped(result: CheckResult) -> CheckResult:
    return CheckResult(
        check=result.check,
        title=result.title,
        verdict=CheckVerdict.SKIPPED,
        message=f"skipped on request (it would say {result.verdict.value}: {result.message})",
    )
