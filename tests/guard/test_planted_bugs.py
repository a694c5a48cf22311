"""The benchmark as a test: no planted cause that leaves a trace is missed, no healthy resume is stopped."""

import pytest

from benchmarks.planted_bugs.__main__ import find_defects, format_report, play_all, play_here
from benchmarks.planted_bugs.catalogue import causes, healthy_causes
from benchmarks.planted_bugs.plan import Acts
from benchmarks.planted_bugs.play import Outcome

EVERYTHING = tuple(enumerate((*causes(), *healthy_causes())))
SAMPLE = EVERYTHING[::8]  # a fixed sample of the single-process rigs; the slow test plays all


def test_benchmark_has_the_breadth_it_claims() -> None:
    planted = [cause for cause in causes() if cause.acts is not Acts.NEVER_SEEN]
    assert len(planted) >= 40
    assert {cause.rig for cause in planted} == {
        "accelerate",
        "ddp",
        "zero",
        "transformers",
        "lightning",
        "torch",
        "deepspeed",
    }
    assert len(healthy_causes()) >= 60
    assert len({(cause.rig, cause.name) for cause in causes()}) == len(causes())


@pytest.mark.parametrize("rig", ["torch", "accelerate"])
def test_sample_is_stopped_before_the_first_step_and_healthy_resumes_pass(rig: str) -> None:
    results = play_here(rig, [item for item in SAMPLE if item[1].rig == rig], guarded=True)
    assert find_defects(results) == [], format_report(results)
    assert Outcome.BEFORE in {result.outcome for result in results}
    assert Outcome.HEALTHY in {result.outcome for result in results}


def test_causes_that_act_later_are_stopped_at_the_first_step_they_act() -> None:
    """Batches skipped in every epoch act when the second epoch begins (220 batches, 12 of them before the save)."""
    later = [item for item in EVERYTHING if item[1].acts is Acts.LATER and item[1].rig == "accelerate"]
    results = play_here("accelerate", later, guarded=True)
    assert {result.name: (result.outcome, result.step) for result in results} == {
        "skip_first_batches applied in every epoch": (Outcome.ACTING, 220 - 12 + 1),
        "LR set by hand from the second step on": (Outcome.ACTING, 2),
        # acts 228 steps later; seen before the first, because the schedule is a function that can be asked
        "decay of a warm-up-stable-decay schedule begins earlier": (Outcome.BEFORE, 1),
    }


def test_what_was_missed_at_first_sight_is_stopped() -> None:
    """Causes that got past the guard when they were first played (docs/guard.md)."""
    names = (
        "layers change places in the optimizer, same shapes",
        "betas set again from the arguments",
        "momentum set again from the arguments",
        "frozen layer becomes trainable",
        "model is left in evaluation mode",
        "update counter of an average starts again",
        "largest second moments of AMSGrad lost",
    )
    for rig in ("accelerate", "torch"):
        wanted = [item for item in EVERYTHING if item[1].rig == rig and item[1].name in names]
        results = play_here(rig, wanted, guarded=True)
        assert [result.outcome for result in results] == [Outcome.BEFORE] * len(wanted), format_report(results)


def test_older_checkpoint_is_said_and_goes_on() -> None:
    wanted = [item for item in EVERYTHING if item[1].acts is Acts.ALLOWED and item[1].rig == "accelerate"]
    results = play_here("accelerate", wanted, guarded=True)
    assert [result.outcome for result in results] == [Outcome.SAID] * len(wanted) != [], format_report(results)


def test_false_alarms_of_the_first_sight_are_none_any_more() -> None:
    names = ("batch norm", "a new evaluation set, prepared first", "tied weights", "torch.compile on")
    for rig in ("accelerate", "torch"):
        wanted = [item for item in EVERYTHING if item[1].rig == rig and item[1].name in names]
        results = play_here(rig, wanted, guarded=True)
        assert [result.outcome for result in results] == [Outcome.HEALTHY] * len(wanted), format_report(results)


def test_bare_framework_goes_on_without_a_word() -> None:
    """The benchmark can fail: without the guard the seed's accident is only a curve in the log."""
    item = next(item for item in EVERYTHING if item[1].name == "scheduler neither prepared nor registered")
    (result,) = play_here("accelerate", [item], guarded=False)
    assert result.outcome in (Outcome.LOG, Outcome.MISSED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_benchmark() -> None:
    results = play_all(("accelerate", "torch", "transformers", "lightning", "deepspeed", "ddp", "zero"), bare=False)
    assert find_defects(results) == [], format_report(results)


def test_passes_inside_a_step_are_no_change_between_two_steps() -> None:
    """Lightning's step calls the model itself, which moves running statistics: that they start again is still refused."""
    asked = [item for item in EVERYTHING if item[1].rig == "lightning" and "batch norm" in item[1].name]
    assert {result.outcome for result in play_here("lightning", asked, guarded=True)} == {Outcome.BEFORE}
