"""A schedule that was made longer is noted with both lengths; every other change of its shape is refused."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from tests.guard.training import start

TOTAL = 100  # a global that `by_global` reads


def linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """As transformers builds it."""
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def by_partial(total: int, warmup: int = 3) -> Callable[[int], float]:
    return partial(linear, num_warmup_steps=warmup, num_training_steps=total)


def by_closure(total: int) -> Callable[[int], float]:
    def cosine(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(step, total) / total))

    return cosine


def by_arguments(total: int) -> Callable[[int], float]:
    args = argparse.Namespace(max_steps=total, seed=1, lr=1e-2)
    return lambda step: max(0.0, 1 - step / args.max_steps)


def by_default(total: int) -> Callable[[int], float]:
    return lambda step, total=total: max(0.0, 1 - step / total)  # type: ignore[misc]


def by_global(total: int) -> Callable[[int], float]:
    globals()["TOTAL"] = total
    return lambda step: max(0.0, 1 - step / TOTAL)


def resume(run_dir: Path, checkpoint: Path, before: Any, after: Any) -> dict[str, Any]:
    """Seven steps under one schedule, five more under another; the last verdict."""
    launch = start(run_dir, scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, before()))
    launch.train(7)
    launch.save(checkpoint)
    launch.train(3)
    launch = start(run_dir, seed=1, scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, after()))
    launch.accelerator.load_state(str(checkpoint))
    launch.train(30)
    return dict([entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1])


@pytest.mark.parametrize("made", [by_partial, by_closure, by_arguments, by_default, by_global])
def test_longer_schedule_is_noted_with_both_lengths(
    made: Any, run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = resume(run_dir, checkpoint, lambda: made(10_000), lambda: made(20_000))
    assert last["verdict"] == "passed"
    assert [one["name"] for one in last["noted"]] == ["schedule"]
    assert "schedule: 10,000 → 20,000 steps" in capsys.readouterr().err


def test_an_error_in_finding_out_whether_it_is_longer_refuses_no_step(
    run_dir: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows then which LRs hold: neither the first step nor the fifty after it are judged by those of the save."""

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr("chronicle.resume.horizon._change", fail)
    last = resume(run_dir, checkpoint, lambda: by_partial(50), lambda: by_partial(100))
    assert last["verdict"] == "unverified"
    assert list(read_journal(RunPaths(run_dir)).of_kind("guard.fault"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: by_partial(10_000), lambda: by_partial(5_000)),  # shorter
        (lambda: by_partial(10_000, warmup=3), lambda: by_partial(10_000, warmup=50)),  # begins to warm up again
        (lambda: by_partial(10_000, warmup=3), lambda: by_partial(20_000, warmup=5)),  # two changes
        (lambda: by_partial(10_000), lambda: by_closure(20_000)),  # another shape
    ],
    ids=["shorter", "warm-up", "two changes", "another shape"],
)
def test_any_other_change_of_a_schedule_is_refused(before: Any, after: Any, run_dir: Path, checkpoint: Path) -> None:
    with pytest.raises(ResumeRefused):
        resume(run_dir, checkpoint, before, after)
