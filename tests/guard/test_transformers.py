"""HF Trainer 5: what it leaves out in silence on resume is refused before its first step."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from chronicle import ResumeRefused  # noqa: E402
from chronicle.journal import read_journal  # noqa: E402
from chronicle.paths import RunPaths  # noqa: E402
from chronicle.resume.transformers import ChronicleCallback  # noqa: E402


class Regression(torch.nn.Module):
    """As little model as the Trainer accepts."""

    name = "layer"  # of its only layer
    _keys_to_ignore_on_save = None  # which the Trainer reads when keys are missing

    def __init__(self) -> None:
        super().__init__()
        self.add_module(self.name, torch.nn.Linear(4, 1))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.get_submodule(self.name)(self.dropout(x))
        return {"loss": (out - labels).square().mean(), "logits": out}


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return [{"x": x, "labels": x.sum().reshape(1)} for x in inputs]


def train(
    out: Path, run_dir: Path, *, max_steps: int, resume: bool, guarded: bool = True, **changes: Any
) -> list[float]:
    """One launch; returns the logged losses."""
    torch.manual_seed(3)
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=max_steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=4,
        save_steps=6,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **changes,
    )
    callbacks = [ChronicleCallback(run_dir)] if guarded else []
    trainer = transformers.Trainer(model=Regression(), args=arguments, train_dataset=rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def stopped(tmp_path: Path, run_dir: Path) -> Path:
    """A run of 12 planned steps that stopped after step 9, with a checkpoint of step 6."""
    out = tmp_path / "out"

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 9  # the batches after the save are on record
            return control

    torch.manual_seed(3)
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=4,
        save_steps=6,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [Stop(), ChronicleCallback(run_dir)]
    transformers.Trainer(model=Regression(), args=arguments, train_dataset=rows(), callbacks=callbacks).train()
    return out


def last_verdict(run_dir: Path) -> dict[str, Any]:
    return dict([entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1])


def test_healthy_resume_passes_and_repeats_the_uninterrupted_run(stopped: Path, run_dir: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", run_dir, max_steps=12, resume=False, guarded=False)
    assert train(stopped, run_dir, max_steps=12, resume=True) == whole
    assert (last_verdict(run_dir)["verdict"], last_verdict(run_dir)["basis"]) == ("passed", "manifest")
    assert last_verdict(run_dir)["checkpoint"] == str(stopped / "checkpoint-6")


@pytest.mark.parametrize("name", ["scheduler.pt", "optimizer.pt", "rng_state.pth"])
def test_missing_state_file_that_the_trainer_skips_in_silence_is_refused(
    stopped: Path, run_dir: Path, name: str
) -> None:
    """5.23: with `scheduler.pt` gone neither scheduler nor optimizer is loaded, and nothing says so."""
    (stopped / "checkpoint-6" / name).rename(stopped / "checkpoint-6" / f"{name}.bak")
    with pytest.raises(ResumeRefused):
        train(stopped, run_dir, max_steps=12, resume=True)
    assert last_verdict(run_dir)["verdict"] == "refused"


def test_argument_that_shapes_the_gradient_is_refused_by_its_name(stopped: Path, run_dir: Path) -> None:
    with pytest.raises(ResumeRefused) as refusal:
        train(stopped, run_dir, max_steps=12, resume=True, max_grad_norm=0.0)
    assert "max_grad_norm" in {check.name for check in refusal.value.checks}


def test_schedule_of_another_shape_is_refused(stopped: Path, run_dir: Path) -> None:
    """HF schedules are functions of the script's arguments: another `warmup_steps` re-shapes the curve silently."""
    with pytest.raises(ResumeRefused):
        train(stopped, run_dir, max_steps=12, resume=True, lr_scheduler_type="cosine")
    assert "learning rates of the next steps" in [c["name"] for c in last_verdict(run_dir)["checks"]]


def test_forgotten_resume_flag_is_refused(stopped: Path, run_dir: Path) -> None:
    with pytest.raises(ResumeRefused):
        train(stopped, run_dir, max_steps=12, resume=False)
    assert [c["name"] for c in last_verdict(run_dir)["checks"]] == ["resume"]


def test_weights_of_other_names_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer loads by names and leaves the others as they were made: so its own ViT resumes with a random encoder."""
    train(tmp_path / "out", tmp_path / "run", max_steps=6, resume=False)
    monkeypatch.setattr(Regression, "name", "head")
    with pytest.raises(ResumeRefused) as refused:
        train(tmp_path / "out", tmp_path / "run", max_steps=8, resume=True)
    cause = next(check.cause for check in refused.value.checks if check.name == "weights")
    assert "2 of them have no entry in the checkpoint's files (`head.bias`, `head.weight`)" in cause
