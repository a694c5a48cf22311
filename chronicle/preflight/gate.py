"""The gate in each rank: run the checks on a trainer's facts, record them, refuse on failure.

`check_before_first_step` is called on one rank with the gathered facts. Without `chronicle run` there is no journal and
nothing is written, but a failed check still refuses. The first launch of a run declares its plan here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from chronicle.errors import JournalError, UsageProblem
from chronicle.journal import Entry, JournalWriter, read_journal
from chronicle.journal.events import PlanDeclared, Preflight
from chronicle.launch.ending import free_bytes
from chronicle.launch.launchers import REQUESTED_VARIABLE
from chronicle.paths import RunPaths
from chronicle.preflight.fact_checks import FACT_CHECKS
from chronicle.preflight.facts import (
    SIGNAL_LEAD_VARIABLE,
    Baseline,
    TrainerFacts,
    declare_plan,
    find_plan,
    read_seconds,
)
from chronicle.preflight.results import CheckResult, CheckVerdict, PreflightFailed, count_verdicts, skips

ACCEPT_VARIABLE = "CHRONICLE_ACCEPT_CHANGE"
SKIP_VARIABLE = "CHRONICLE_PREFLIGHT_SKIP"

OF_THE_HOST = ("PF07", "PF08", "PF30", "PF31")  # the rows of `host.py`, which no rank imports
CHECK_IDS = tuple(sorted((*(row.check for row in FACT_CHECKS), *OF_THE_HOST)))


def check_facts(
    facts: TrainerFacts, expected: Baseline | None = None, *, skip: Collection[str] = ()
) -> tuple[CheckResult, ...]:
    """Run every check over these facts, in the catalogue's order; a skipped one says what it would have said."""
    results = []
    for check in FACT_CHECKS:
        result = check.on(facts, expected or Baseline())
        if result.check in skip:
            would = f"skipped on request (it would say {result.verdict.value}: {result.message})"
            result = check.result(skips(would))
        results.append(result)
    return tuple(results)


def require_known(names: Collection[str]) -> tuple[str, ...]:
    """The names of checks. Raises `UsageProblem` for an unknown one: a mistyped `--skip` must not look like a skipped check."""
    for name in names:
        if name not in CHECK_IDS:
            raise UsageProblem(f"--skip {name}: expected a check from PF01 to PF31", "`chronicle preflight --json` lists them")
    return tuple(names)


# ---- the gate inside the ranks ---------------------------------------------------------------------------------------


def check_before_first_step(
    facts: TrainerFacts,
    *,
    environ: Mapping[str, str] = os.environ,
    start_step: int | None = None,
    binds: bool = True,
) -> tuple[CheckResult, ...]:
    """Run the catalogue over `facts` and record the results. Raises `PreflightFailed` when a check failed.

    `start_step`: optimizer steps completed before this launch, for a training that changes its own plan on its way.
    `binds`: whether a failed check refuses, and the facts declare the plan; not where the trainer did not ask for it.
    """
    directory, number = environ.get("CHRONICLE_RUN_DIR"), environ.get("CHRONICLE_LAUNCH", "")
    paths = RunPaths(Path(directory)) if directory else None
    launch = int(number) if number.isdigit() else None
    entries = read_journal(paths).entries if paths is not None else ()
    expected = read_baseline(entries, environ, start_step)
    results = check_facts(facts, expected, skip=environ.get(SKIP_VARIABLE, "").split(","))
    failures = tuple(result for result in results if result.verdict is CheckVerdict.FAIL)
    if paths is not None:
        _record(paths, launch, facts, expected, results, failures, declares=binds)
    if failures and binds:
        raise PreflightFailed(failures)
    return results


def read_baseline(entries: Sequence[Entry], environ: Mapping[str, str], start_step: int | None = None) -> Baseline:
    """The declared plan of the run and the limits this launch was started with."""
    plan = find_plan(entries, start_step)
    asked = environ.get(REQUESTED_VARIABLE, "")
    checkpoints = environ.get("CHRONICLE_CHECKPOINTS")
    return Baseline(
        claimed_devices=int(asked) if asked.isdigit() else None,
        plan=dict(plan.declared) if plan is not None else {},
        accepted_change=environ.get(ACCEPT_VARIABLE) or None,
        grace_seconds=read_seconds(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        signal_lead_seconds=read_seconds(environ, SIGNAL_LEAD_VARIABLE),
        free_bytes=free_bytes(Path(checkpoints)) if checkpoints else None,
    )


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
    """Write the `preflight` entry, and the plan if this launch declares or changes it. A broken journal stops no launch."""
    event = Preflight(
        verdict="failed" if failures else "passed",
        checks=tuple(result.to_json() for result in results),
        facts=json.loads(json.dumps(facts.to_json(), default=str)),
    )
    declared = declare_plan(facts)
    try:
        with JournalWriter(paths) as writer:
            writer.write(event, launch=launch, title=f"preflight: {count_verdicts(results)}")
            if declares and declared and not failures and (not expected.plan or expected.accepted_change):
                reason = expected.accepted_change if expected.plan else None
                title = f"plan changed: {reason}" if expected.plan else f"plan declared by launch {launch}"
                writer.write(PlanDeclared(declared=declared, reason=reason), launch=launch, title=title)
    except JournalError:
        pass
