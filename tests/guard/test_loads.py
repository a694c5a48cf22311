"""Every load of a process opens its own expectation: reloads are checked like the first, and evaluation never refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import MANIFEST_NAME
from tests.guard.test_torch import Loop
from tests.guard.training import Launch, start


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(entry.data) for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]


def two_checkpoints(run_dir: Path, checkpoint: Path) -> tuple[Launch, Path]:
    """Step 4 and step 7 of one launch, which goes on."""
    launch = start(run_dir)
    launch.train(4)
    older = launch.save(checkpoint.with_name("opt_step-4"))
    launch.train(3)
    launch.save(checkpoint)
    launch.train(3)
    return launch, older


def test_recovery_from_nan_is_checked_like_the_first_load(run_dir: Path, checkpoint: Path) -> None:
    """A resume, a jump back within fifty steps, and on: the LRs start again at the reload, and so does the tripwire."""
    two_checkpoints(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    expected = launch.train(5)
    for _ in range(3):
        launch.accelerator.load_state(str(checkpoint))
        assert launch.train(5) == expected
    assert [one["verdict"] for one in verdicts(run_dir)[1:]] == ["passed"] * 4


def test_reload_that_loses_state_is_refused_at_the_next_step(run_dir: Path, checkpoint: Path) -> None:
    two_checkpoints(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.train(5)
    launch.accelerator.load_state(str(checkpoint))
    for state in launch.optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
    with pytest.raises(ResumeRefused, match="moments"):
        launch.train(1)


def test_lr_that_leaves_the_plan_after_a_reload_trips(run_dir: Path, checkpoint: Path) -> None:
    launch, _ = two_checkpoints(run_dir, checkpoint)
    launch.accelerator.load_state(str(checkpoint))
    launch.train(1)
    launch.scheduler.scheduler.last_epoch = 0
    launch.optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(ResumeRefused, match="learning rate in use"):
        launch.train(2)


def test_best_model_at_the_end_may_be_any_checkpoint_in_any_state(
    run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are damaged are said. No step follows, so nothing is refused."""
    launch, older = two_checkpoints(run_dir, checkpoint)
    (older / "random_states_0.pkl").unlink()
    launch.accelerator.load_state(str(older))
    launch.model.eval()
    assert "checkpoint file random_states_0.pkl" in capsys.readouterr().err
    assert [one["verdict"] for one in verdicts(run_dir)] == ["passed"]


def test_step_after_a_load_of_damaged_files_is_refused(run_dir: Path, checkpoint: Path) -> None:
    launch, older = two_checkpoints(run_dir, checkpoint)
    (older / "random_states_0.pkl").unlink()
    launch.accelerator.load_state(str(older))
    with pytest.raises(ResumeRefused, match="random_states_0"):
        launch.train(1)


@pytest.mark.parametrize("mode", ["no optimizer", "eval", "no_grad"])
def test_script_that_only_evaluates_is_never_refused(run_dir: Path, checkpoint: Path, mode: str) -> None:
    """A damaged inventory and another model's random state: a resume would be refused before the load."""
    two_checkpoints(run_dir, checkpoint)
    (checkpoint / "random_states_0.pkl").unlink()
    launch = start(run_dir, seed=1)
    if mode == "no optimizer":
        launch.accelerator._optimizers.clear()
        launch.accelerator._schedulers.clear()
    launch.model.train(mode == "no_grad")
    with torch.set_grad_enabled(mode != "no_grad"):
        launch.accelerator.load_state(str(checkpoint))
        launch.model(torch.randn(2, 8))
    assert len(verdicts(run_dir)) == 1  # of the training


def test_first_load_to_train_from_is_refused_before_any_state_is_replaced(run_dir: Path, checkpoint: Path) -> None:
    two_checkpoints(run_dir, checkpoint)
    (checkpoint / "random_states_0.pkl").unlink()
    launch = start(run_dir, seed=1)
    before = [p.detach().clone() for p in launch.model.parameters()]
    with pytest.raises(ResumeRefused, match="before load"):
        launch.accelerator.load_state(str(checkpoint))
    assert all(torch.equal(a, b) for a, b in zip(before, launch.model.parameters(), strict=True))


def test_older_checkpoint_is_said_with_both_steps_and_not_refused(
    run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, older = two_checkpoints(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(older))
    launch.train(1)
    said = [line for line in capsys.readouterr().err.splitlines() if "newest checkpoint" in line]
    assert len(said) == 1 and "step 4 was loaded, and step 7 exists" in said[0]
    assert [one["name"] for one in verdicts(run_dir)[-1]["noted"]] == ["newest checkpoint"]


def test_load_that_fails_in_a_running_training_ends_nothing(run_dir: Path, checkpoint: Path) -> None:
    launch, _ = two_checkpoints(run_dir, checkpoint)
    (checkpoint / "optimizer.bin").write_bytes(b"torn")
    with pytest.raises(Exception):  # whatever torch says about it
        launch.accelerator.load_state(str(checkpoint))
    launch.train(2)


def test_save_that_lacks_what_the_save_before_wrote_is_said(
    run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = start(run_dir)
    fails: list[bool] = []

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if not fails:
            (Path(output_dir) / "vocabulary.json").write_text("{}")

    launch.accelerator.register_save_state_pre_hook(hook)
    launch.train(1)
    launch.save(checkpoint.with_name("opt_step-1"))
    fails.append(True)
    launch.train(1)
    launch.save(checkpoint.with_name("opt_step-2"))
    assert "has no `vocabulary.json`, which the save before wrote" in capsys.readouterr().err


def test_manifest_of_another_version_leaves_the_resume_unverified(run_dir: Path, checkpoint: Path) -> None:
    two_checkpoints(run_dir, checkpoint)
    file = checkpoint / MANIFEST_NAME
    file.write_text(file.read_text().replace('"v": 1,\n "step"', '"v": 99,\n "step"'))
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.train(2)
    last = verdicts(run_dir)[-1]
    assert (last["verdict"], last["verified"]) == ("unverified", False)
    assert "99" in str(last["not_compared"])


# ---- plain torch -----------------------------------------------------------------------------------------------------


def test_plain_torch_second_load_is_checked(run_dir: Path, tmp_path: Path) -> None:
    loop = Loop(run_dir)
    loop.train(7)
    loop.save(tmp_path / "step-7.pt")
    expected = loop.train(4, first=7)
    loop.load(tmp_path / "step-7.pt")
    assert loop.train(4, first=7) == expected
    loop.load(tmp_path / "step-7.pt", "optimizer", "scheduler")  # the weights stay where they were
    with pytest.raises(ResumeRefused, match="weights"):
        loop.train(1, first=7)


def test_plain_torch_reset_to_the_untrained_optimizer_is_not_a_resume(run_dir: Path) -> None:
    """LR finders and restarts put back the state from before the first step."""
    loop = Loop(run_dir)
    fresh = loop.optimizer.state_dict()
    loop.train(5)
    loop.optimizer.load_state_dict(fresh)
    loop.train(5)
    assert verdicts(run_dir)[-1]["verdict"] == "unverified"


def test_averaged_weights_swapped_for_an_evaluation_are_no_load(run_dir: Path) -> None:
    """store, copy_to, restore, as EMA classes do it."""
    loop = Loop(run_dir)
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for _ in range(3):
        loop.train(3)
        average.update_parameters(loop.model)
        stored = [p.detach().clone() for p in loop.model.parameters()]
        for p, mean in zip(loop.model.parameters(), average.parameters(), strict=True):
            p.data.copy_(mean.data)
        loop.model(torch.randn(2, 4))
        for p, kept in zip(loop.model.parameters(), stored, strict=True):
            p.data.copy_(kept)
    assert [one["verdict"] for one in verdicts(run_dir)] == ["passed"]


# ---- HF Trainer ------------------------------------------------------------------------------------------------------


def test_train_called_again_goes_on_with_the_weights_in_memory(run_dir: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from chronicle.resume.transformers import ChronicleCallback
    from tests.guard.test_transformers import Regression, rows

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [ChronicleCallback(run_dir)]
    trainer = transformers.Trainer(
        Regression(), arguments, train_dataset=rows(), eval_dataset=rows(8), callbacks=callbacks
    )
    trainer.train()
    trainer.train()
    found = verdicts(run_dir)
    assert [one["verdict"] for one in found] == ["passed", "passed"]
    assert [one["name"] for one in found[1]["noted"]] == ["resume"]
