"""The catalogue: which checks there are, in order, and the run over one set of facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from chronicle.errors import UsageProblem
from chronicle.preflight import data_checks, model_checks, rank_checks, saving_checks, schedule_checks
from chronicle.preflight.expectation import Expectation
from chronicle.preflight.facts import TrainerFacts
from chronicle.preflight.results import CheckResult, Verdict

__all__ = ["CHECK_IDS", "FACT_CHECKS", "check_facts", "require_known"]

CHECK_IDS = tuple(f"PF{number:02d}" for number in range(1, 32))

FACT_CHECKS: tuple[Callable[[TrainerFacts, Expectation], CheckResult], ...] = (
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
    saving_checks.check_disk,  # PF21
    saving_checks.check_round_trip,  # PF22
    saving_checks.check_save_time,  # PF23
    saving_checks.check_fit,  # PF25
    rank_checks.check_gradients,  # PF26
    saving_checks.check_telemetry,  # PF27
    saving_checks.check_micro_batches,  # PF28
    model_checks.check_flags,  # PF29
    rank_checks.check_memory,  # PF31
)


def check_facts(
    facts: TrainerFacts, expected: Expectation | None = None, *, skip: Collection[str] = ()
) -> tuple[CheckResult, ...]:
    """Every check over these facts, in the catalogue's order; a skipped one says so."""
    results = (check(facts, expected or Expectation()) for check in FACT_CHECKS)
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
        verdict=Verdict.SKIPPED,
        message=f"skipped on request (it would say {result.verdict.value}: {result.message})",
    )
