"""Lightning: memory travels inside the checkpoint file, and is compared when training starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl

from benchmarks.planted_bugs.causes_accelerate import reseal_file
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.adapters.lightning import ChronicleCallback, EnteredCallback, callbacks_factory


class Regression(pl.LightningModule):
    """A linear model with a per-step schedule."""

    def __init__(self, gamma: float = 0.97) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.gamma = gamma
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.layer(x) - x.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(
    root: Path,
    run_dir: Path | None,
    *,
    max_steps: int,
    ckpt_path: Path | None = None,
    module: Any = None,
    callback: Any = None,
    batch_size: int = 4,
) -> Any:
    torch.manual_seed(0)
    module = module or Regression()
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
    given = callback if isinstance(callback, list) else [callback or ChronicleCallback(run_dir)]
    callbacks = given if run_dir is not None else []
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(root),
        callbacks=callbacks,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    trainer.fit(module, loader, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return trainer


@pytest.fixture
def saved(tmp_path: Path, run_dir: Path) -> Path:
    trainer = fit(tmp_path, run_dir, max_steps=6)
    trainer.save_checkpoint(tmp_path / "step=6.ckpt")
    trainer.callbacks[0].session.sealer.finish()
    return tmp_path / "step=6.ckpt"


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(entry.data) for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]


def only_the_data_differ(verdict: dict[str, Any]) -> bool:
    """Lightning begins the epoch again in the middle: the state is as saved, and the guard says that the data are not."""
    told = [*verdict.get("not_compared", ()), *verdict.get("noted", ())]
    return verdict["verdict"] == "unverified" and {one["name"] for one in told} == {"next batch"}


def test_healthy_resume_passes_and_the_save_is_journalled(saved: Path, tmp_path: Path, run_dir: Path) -> None:
    module = Regression()
    fit(tmp_path, run_dir, max_steps=10, ckpt_path=saved, module=module)
    assert len(module.losses) == 4
    assert verdicts(run_dir)[-1]["basis"] == "manifest" and only_the_data_differ(verdicts(run_dir)[-1])
    entry = next(read_journal(RunPaths(run_dir)).of_kind("checkpoint"))
    assert (entry.step, entry.data["path"]) == (6, str(saved))


def test_a_save_of_weights_alone_is_no_checkpoint_of_the_run(tmp_path: Path, run_dir: Path) -> None:
    """It holds nothing to resume from, and no description."""
    trainer = fit(tmp_path, run_dir, max_steps=6)
    trainer.save_checkpoint(tmp_path / "step=6.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.callbacks[0].session.sealer.finish()
    saved = [entry.data["path"] for entry in read_journal(RunPaths(run_dir)).of_kind("checkpoint")]
    assert saved == [str(tmp_path / "step=6.ckpt")]


class SavesAnAverage(Regression):
    """Writes other weights than it trains."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: one * 0.5 for name, one in checkpoint["state_dict"].items()}


def test_a_save_with_other_weights_than_memory_is_said_at_the_save(tmp_path: Path, run_dir: Path) -> None:
    trainer = fit(tmp_path, run_dir, max_steps=6, module=SavesAnAverage())
    trainer.save_checkpoint(tmp_path / "step=6.ckpt")
    trainer.callbacks[0].session.sealer.finish()
    (told,) = read_journal(RunPaths(run_dir)).of_kind("incident")
    assert told.data["kind"] == "save-differs" and "layer.weight" in told.data["text"]


def test_scheduler_state_lost_in_the_file_is_refused(saved: Path, tmp_path: Path, run_dir: Path) -> None:
    """Lightning #11188: a plugin stored no scheduler; the LR starts again."""
    state = torch.load(saved, weights_only=False)
    state["lr_schedulers"] = []
    torch.save(state, saved)
    reseal_file(saved)  # as if Lightning itself had saved it so
    with pytest.raises(ResumeRefused):
        fit(tmp_path, run_dir, max_steps=10, ckpt_path=saved)


def test_optimizer_state_lost_in_the_file_is_refused(saved: Path, tmp_path: Path, run_dir: Path) -> None:
    state = torch.load(saved, weights_only=False)
    state["optimizer_states"][0]["state"] = {}
    torch.save(state, saved)
    reseal_file(saved)  # as if Lightning itself had saved it so
    with pytest.raises(ResumeRefused):
        fit(tmp_path, run_dir, max_steps=10, ckpt_path=saved)
    assert verdicts(run_dir)[-1]["verdict"] == "refused"


def test_file_that_was_exchanged_after_the_save_is_refused_by_its_digest(
    saved: Path, tmp_path: Path, run_dir: Path
) -> None:
    """Every check sum inside the file is right; nothing lies beside it that a loader could take for state."""
    assert sorted(path.name for path in saved.parent.iterdir() if path.is_file()) == ["step=6.ckpt"]
    state = torch.load(saved, weights_only=False)
    torch.save({**state, "hyper_parameters": {"note": "from another run"}}, saved)
    with pytest.raises(ResumeRefused) as refused:
        fit(tmp_path, run_dir, max_steps=10, ckpt_path=saved)
    assert refused.value.checks[0].code == "F3"


def test_file_saved_again_under_the_same_name_is_held_to_its_newest_digest(
    saved: Path, tmp_path: Path, run_dir: Path
) -> None:
    last = saved.with_name("last.ckpt")
    for steps, path in ((8, saved), (10, last), (12, last)):
        trainer = fit(tmp_path, run_dir, max_steps=steps, ckpt_path=path)
        trainer.save_checkpoint(last)
    assert only_the_data_differ(verdicts(run_dir)[-1])


def test_another_batch_size_is_refused_until_it_is_meant(saved: Path, tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ResumeRefused):
        fit(tmp_path, run_dir, max_steps=8, ckpt_path=saved, batch_size=8)
    assert "batch size" in [check["name"] for check in verdicts(run_dir)[-1]["checks"]]
    meant = ChronicleCallback(run_dir, accept_change={"batch_size": "twice the memory", "data": "other batches"})
    fit(tmp_path, run_dir, max_steps=8, ckpt_path=saved, batch_size=8, callback=meant)
    assert verdicts(run_dir)[-1]["verdict"] == "passed"


def test_fit_without_the_checkpoint_is_refused(saved: Path, tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ResumeRefused):
        fit(tmp_path, run_dir, max_steps=10)


def test_factory_guards_every_trainer_under_chronicle_run_and_none_outside(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callbacks_factory() == []
    monkeypatch.setenv("CHRONICLE_RUN_DIR", str(run_dir))
    assert [type(callback) for callback in callbacks_factory()] == [EnteredCallback]


def test_own_callback_beside_the_one_of_the_entry_point(tmp_path: Path, run_dir: Path) -> None:
    """As under `chronicle run`: Lightning wants the two told apart, one guards, and either reads what the other wrote."""
    trainer = fit(tmp_path, run_dir, max_steps=6, callback=[EnteredCallback(run_dir)])
    trainer.save_checkpoint(tmp_path / "step=6.ckpt")
    trainer.callbacks[0].session.sealer.finish()
    both = [ChronicleCallback(run_dir), EnteredCallback(run_dir)]
    fit(tmp_path, run_dir, max_steps=8, ckpt_path=tmp_path / "step=6.ckpt", callback=both)
    first, second = verdicts(run_dir)
    assert (first["verdict"], first["basis"], second["basis"]) == ("passed", "fresh", "manifest")
    assert only_the_data_differ(second)


ZERO_LINES = """
import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=4)
trainer = pl.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Module(), loader)
"""


@pytest.mark.slow
def test_script_without_a_line_of_ours_is_guarded_under_a_run(tmp_path: Path, run_dir: Path) -> None:
    """Through the entry point of the installed package, in a process of its own."""
    script = tmp_path / "train.py"
    script.write_text(ZERO_LINES, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CHRONICLE_RUN_DIR": str(run_dir)}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [(v["verdict"], v["basis"]) for v in verdicts(run_dir)] == [("passed", "fresh")]


class Breaks(pl.Callback):
    """Spoils one callback's state after the load, as a script does that builds it anew."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for callback in trainer.callbacks:
            if self.what == "EarlyStopping" == type(callback).__name__:
                callback.wait_count = 3
            if self.what == "EMAWeightAveraging" == type(callback).__name__:
                with torch.no_grad():
                    for parameter in callback._average_model.parameters():
                        parameter.mul_(2.0)


@pytest.mark.parametrize("what", ["", "EarlyStopping", "EMAWeightAveraging"])
def test_early_stopping_and_averages_of_lightning_are_compared(tmp_path: Path, run_dir: Path, what: str) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging

    def callbacks(broken: str) -> list[Any]:
        stopping = EarlyStopping("loss", check_on_train_epoch_end=False)
        return [Breaks(broken), stopping, EMAWeightAveraging(decay=0.9), ChronicleCallback(run_dir)]

    trainer = fit(tmp_path, run_dir, max_steps=4, callback=callbacks(""))
    trainer.save_checkpoint(tmp_path / "step=4.ckpt")
    if not what:
        fit(tmp_path, run_dir, max_steps=6, ckpt_path=tmp_path / "step=4.ckpt", callback=callbacks(""))
        return
    with pytest.raises(ResumeRefused) as refusal:
        fit(tmp_path, run_dir, max_steps=6, ckpt_path=tmp_path / "step=4.ckpt", callback=callbacks(what))
    assert any(what in check.name for check in refusal.value.checks if not check.ok)


def test_checkpoint_whose_description_failed_resumes_unverified(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint itself says that it is not described; else its resume would be refused for want of a description."""
    trainer = fit(tmp_path, run_dir, max_steps=6)
    with monkeypatch.context() as patch:
        patch.setattr(ChronicleCallback, "_describe", lambda *_: len(1))  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / "step=6.ckpt")
    trainer.callbacks[0].session.sealer.finish()
    fit(tmp_path, run_dir, max_steps=9, ckpt_path=tmp_path / "step=6.ckpt")
    last = verdicts(run_dir)[-1]
    assert (last["verdict"], last["verified"]) == ("unverified", False)
    assert "the guard failed" in last["not_compared"][0]["why"]


class SetsLr(pl.Callback):
    """A hook inside the step that sets another LR at one step."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.at:
            optimizer.param_groups[0]["lr"] = 0.1


@pytest.mark.parametrize("at", [5, None])
def test_lr_that_a_hook_sets_inside_a_step_is_told(tmp_path: Path, run_dir: Path, at: int | None) -> None:
    """The scheduler sets its own one again after the step, so that neither the next step nor a log shows it."""
    fit(tmp_path, run_dir, max_steps=8, callback=[SetsLr(at), ChronicleCallback(run_dir)])
    found = [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("incident")]
    told = [(data["kind"], data["onset_step"]) for data in found]
    assert told == ([] if at is None else [("lr-not-the-schedulers", at + 1)])
