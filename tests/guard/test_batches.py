"""M4: the data a resume really begins with."""

from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.batches import batch_digest
from tests.guard.training import start


def batches(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 8, generator=generator)


def train(launch: Any, source: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = launch.model(next(source)).square().mean()
        launch.optimizer.zero_grad()
        launch.accelerator.backward(loss)
        launch.optimizer.step()
        launch.scheduler.step()


@pytest.fixture
def interrupted(run_dir: Path, checkpoint: Path) -> Path:
    """Seven steps, a save, three more, then the end."""
    launch = start(run_dir)
    source = batches(0)
    train(launch, source, 7)
    launch.save(checkpoint)
    train(launch, source, 3)
    return checkpoint


def resumed(run_dir: Path, checkpoint: Path, **options: Any) -> Any:
    launch = start(run_dir, seed=1, **options)
    launch.accelerator.load_state(str(checkpoint))
    return launch


def next_batch(run_dir: Path) -> str:
    verdict = [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1]
    check = next(check for check in verdict["checks"] if check["name"] == "next batch")
    return check["found"] if check["outcome"] == "equal" else str(check["cause"])


def test_resume_that_goes_on_with_the_next_batch_says_so(run_dir: Path, interrupted: Path) -> None:
    source = batches(0)
    for _ in range(7):
        next(source)
    train(resumed(run_dir, interrupted), source, 1)
    assert next_batch(run_dir) == "equal"


def test_data_that_starts_again_is_refused_before_the_first_step(run_dir: Path, interrupted: Path) -> None:
    """Accelerate by default: model, optimizer, schedule and generators are right, and the first samples come again."""
    with pytest.raises(ResumeRefused) as refusal:
        train(resumed(run_dir, interrupted), batches(0), 1)
    assert [check.code for check in refusal.value.checks] == ["M4"]


def test_another_order_passes_unless_the_same_was_promised(run_dir: Path, interrupted: Path) -> None:
    """Most scripts shuffle anew after a resume: no accident, but it stands in the verdict."""
    train(resumed(run_dir, interrupted), batches(5), 1)
    assert next_batch(run_dir).startswith("another order than in the first pass")
    with pytest.raises(ResumeRefused):
        train(resumed(run_dir, interrupted, same_data=True), batches(5), 1)


def test_a_constant_batch_is_no_restart(run_dir: Path, checkpoint: Path) -> None:
    same = iter([torch.ones(4, 8)] * 20)
    launch = start(run_dir)
    train(launch, same, 7)
    launch.save(checkpoint)
    train(launch, same, 3)
    train(resumed(run_dir, checkpoint), same, 1)
    assert next_batch(run_dir) == "equal"


def test_digest_sees_values_order_and_shape() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    seen = {
        batch_digest((x,), {}),
        batch_digest((x.flip(0),), {}),
        batch_digest((x.reshape(4, 3),), {}),
        batch_digest((), {"x": x + 1}),
    }
    assert len(seen) == 4
    assert batch_digest((), {"a": x, "b": x + 1}) == batch_digest((), {"b": x + 1, "a": x})


def test_tracker_logs_into_the_launch_with_one_line_of_adoption(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    from chronicle.metrics.log import read_metrics

    monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(tmp_path / "launch"))
    accelerator: Any = chronicle.guard(Accelerator(cpu=True, log_with="chronicle"), run_dir=run_dir)
    accelerator.init_trackers("tr-190")
    accelerator.log({"loss": 2.5, "lr": 1e-3}, step=4)
    accelerator.end_training()
    points = list(read_metrics(tmp_path / "launch" / "metrics.jsonl"))
    assert [(point.step, dict(point.values)) for point in points] == [(4, {"loss": 2.5, "lr": 1e-3})]


def test_model_under_guard_can_be_copied_and_pickled_and_the_copy_is_not_watched(
    run_dir: Path, checkpoint: Path
) -> None:
    """EMA copies are made by `copy.deepcopy(model)`: a hook that held the guard would drag the whole process along."""
    import copy
    import io

    launch = start(run_dir)
    average = copy.deepcopy(launch.model)
    torch.save(launch.model, io.BytesIO())
    average(torch.ones(4, 8))
    train(launch, batches(0), 4)
    entry = next(read_journal(RunPaths(run_dir)).of_kind("guard.batches"))
    source = batches(0)
    assert list(entry.data["digests"]) == [batch_digest((next(source),), {}) for _ in range(3)]
    assert not launch.model._forward_pre_hooks
