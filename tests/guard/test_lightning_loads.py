"""Lightning: several optimizers are counted as Lightning counts, and `fit` and `test` may be called again."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch as pl

from chronicle import ResumeRefused
from chronicle.prints.ring import SeenParts, read_ring, ring_path
from chronicle.prints.step_prints import PRINTS_VARIABLE
from chronicle.resume.adapters.lightning import ChronicleCallback
from rollback.api import verify
from rollback.checkpoint.listing import open_checkpoint
from rollback.errors import Severity
from tests.guard.test_lightning import Regression, verdicts


class Adversarial(pl.LightningModule):
    """Two optimizers by hand; the generator steps at every `every`-th batch."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic, self.every = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        of_generator, of_critic = self.optimizers()  # type: ignore[attr-defined]
        self._turn(of_critic, self.critic(x).mean() - self.critic(self.generator(x).detach()).mean())
        if batch_idx % self.every == 0:
            self._turn(of_generator, -self.critic(self.generator(x)).mean())

    def _turn(self, optimizer: Any, loss: torch.Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)], []


class Evaluated(Regression):
    """Can be evaluated by `Trainer.test`."""


Evaluated.test_step = lambda self, batch, batch_idx: None  # type: ignore[attr-defined]  # Lightning's name for it


class ByEpochs(Regression):
    """Lightning's default: the scheduler is stepped when an epoch ends, here after every second optimizer step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_prints_of_several_optimizers_are_numbered_as_lightning_counts(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints are, too: a replay from one of them compared the steps of another batch."""
    monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(tmp_path / "launch"))
    monkeypatch.setenv(PRINTS_VARIABLE, "every")
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, limit_train_batches=4, callbacks=[ChronicleCallback(run_dir)],
    )  # fmt: skip
    trainer.fit(Adversarial(), rows())
    trainer.callbacks[0].session.prints.finish()
    steps = read_ring(ring_path(tmp_path / "launch", 0)).steps()
    assert sorted(steps) == [2, 4, 6, 8] and trainer.global_step == 8
    assert all(SeenParts.BATCH | SeenParts.GRADIENT in one.seen for one in steps.values())


def test_scheduler_that_is_stepped_by_epochs_resumes(tmp_path: Path, run_dir: Path) -> None:
    """Its LR falls in the middle of the fifty steps after a resume, as it should; a lost position is still refused."""

    def fit(num_epochs: int, checkpoint: str | None = None) -> None:
        torch.manual_seed(0)
        trainer = pl.Trainer(
            max_epochs=num_epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, limit_train_batches=4, callbacks=[ChronicleCallback(run_dir)],
        )  # fmt: skip
        trainer.fit(ByEpochs(), rows(), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        trainer.callbacks[0].session.sealer.finish()

    fit(3)
    fit(6, str(tmp_path / "last.ckpt"))
    assert [one["verdict"] for one in verdicts(run_dir)][-1] != "refused"
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)
    state["lr_schedulers"][0]["last_epoch"] -= 2
    torch.save(state, tmp_path / "edited.ckpt")
    with pytest.raises(ResumeRefused, match="scheduler position"):
        fit(9, str(tmp_path / "edited.ckpt"))


def rows() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    return torch.utils.data.DataLoader(data, batch_size=8)


def trainer_of(root: Path, run_dir: Path, max_epochs: int, **options: Any) -> Any:
    keeper = pl.callbacks.ModelCheckpoint(dirpath=str(root / "ck"), every_n_epochs=1, save_top_k=-1, **options)
    return pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(root),
        callbacks=[ChronicleCallback(run_dir), keeper],
    )


@pytest.mark.parametrize("every", [1, 2])
def test_two_optimizers_resume_and_verify_by_their_sum(tmp_path: Path, run_dir: Path, every: int) -> None:
    """`global_step` is the sum of all optimizers' steps, in the file's name, in the file and in the guard's record."""
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, run_dir, 1)
    trainer.fit(Adversarial(every), rows())
    trainer.callbacks[0].session.sealer.finish()
    (saved,) = (tmp_path / "ck").glob("*.ckpt")
    shutil.copy(saved, tmp_path / "ck" / "last.ckpt")  # its name has no step
    steps = 4 + 4 // every
    for path in (saved, tmp_path / "ck" / "last.ckpt"):
        assert open_checkpoint(path).step == steps
        assert [f for f in verify(path, full=True) if f.severity is not Severity.INFO] == []
    trainer_of(tmp_path, run_dir, 2).fit(Adversarial(every), rows(), ckpt_path=str(saved))
    assert [one["verdict"] for one in verdicts(run_dir)][1:] != ["refused"]


def test_two_optimizers_of_which_one_was_not_restored_are_refused(tmp_path: Path, run_dir: Path) -> None:
    trainer_of(tmp_path, run_dir, 1).fit(Adversarial(), rows())
    (saved,) = (tmp_path / "ck").glob("*.ckpt")

    class Forgets(Adversarial):
        def on_train_start(self) -> None:
            self.optimizers()[1].state.clear()  # type: ignore[index]

    with pytest.raises(ResumeRefused):
        trainer_of(tmp_path, run_dir, 2).fit(Forgets(), rows(), ckpt_path=str(saved))


def test_fit_again_and_test_of_an_older_checkpoint_are_quiet(tmp_path: Path, run_dir: Path) -> None:
    """In one process: fit, test of the first checkpoint, fit with the weights in memory, fit from a checkpoint."""
    module = Evaluated()
    trainer = trainer_of(tmp_path, run_dir, 2)
    trainer.fit(module, rows())
    saved = sorted((tmp_path / "ck").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer.test(module, rows(), ckpt_path=str(saved[0]))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, rows(), ckpt_path=str(saved[-1]))
    found = verdicts(run_dir)
    assert "refused" not in [one["verdict"] for one in found]
    assert len(found) == 3  # one for each `fit`
    assert [one["name"] for one in found[1]["noted"]] == ["resume"]


def test_an_lr_finder_saves_the_beginning_to_come_back_to_it(tmp_path: Path, run_dir: Path) -> None:
    """Its checkpoint of step 0 made the first launch of a run a resume that loaded nothing."""
    from lightning.pytorch.callbacks import LearningRateFinder

    model = Regression()
    model.lr = 1e-3
    trainer = pl.Trainer(
        max_steps=6, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path), callbacks=[ChronicleCallback(run_dir), LearningRateFinder(num_training_steps=4)],
    )  # fmt: skip
    trainer.fit(model, rows())
    assert {one["verdict"] for one in verdicts(run_dir)} <= {"passed", "unverified"}


@pytest.mark.parametrize("first", [1, 2])
def test_accumulation_that_changes_as_planned_is_no_difference(tmp_path: Path, run_dir: Path, first: int) -> None:
    """The launch ends right at its save, so that nothing but the plan says what its next step would have been."""
    for epochs in (2, 3):
        _with_plan(tmp_path, run_dir, {0: 1, first: 2}, max_epochs=epochs, every_n_epochs=1)
    assert [one["verdict"] for one in verdicts(run_dir)][-1] != "refused"


def test_accumulation_that_lightning_forgets_in_the_middle_of_an_epoch_is_refused(tmp_path: Path, run_dir: Path) -> None:
    """Lightning 2.6 sets the planned value only where an epoch begins, and trains the rest of this one without it."""
    _with_plan(tmp_path, run_dir, {0: 1, 1: 2}, max_steps=5, every_n_train_steps=5)
    with pytest.raises(ResumeRefused, match="accumulation: expected 2, found 1"):
        _with_plan(tmp_path, run_dir, {0: 1, 1: 2}, max_steps=8, every_n_train_steps=5)


def _with_plan(
    folder: Path, run_dir: Path, plan: dict[int, int], *, max_epochs: int = -1, max_steps: int = -1, **every: int
) -> None:
    """Four batches an epoch; the newest checkpoint is resumed."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

    torch.manual_seed(0)
    last = folder / "last.ckpt"
    callbacks = [
        ChronicleCallback(run_dir), GradientAccumulationScheduler(dict(plan)), ModelCheckpoint(folder, save_last=True, **every)
    ]  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=max_epochs, max_steps=max_steps, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_train_batches=4, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Regression(), rows(), ckpt_path=str(last) if last.exists() else None, weights_only=False)
    callbacks[0].session.sealer.finish()


def test_second_fit_from_a_wrong_state_is_refused(tmp_path: Path, run_dir: Path) -> None:
    module = Regression()
    trainer = trainer_of(tmp_path, run_dir, 1)
    trainer.fit(module, rows())
    (saved,) = (tmp_path / "ck").glob("*.ckpt")
    trainer.fit_loop.max_epochs = 3
    module.on_train_start = lambda: trainer.optimizers[0].state.clear()  # type: ignore[method-assign]
    with pytest.raises(ResumeRefused):
        trainer.fit(module, rows(), ckpt_path=str(saved))


def test_weights_alone_are_no_checkpoint_to_train_from_and_are_evaluated_quietly(tmp_path: Path, run_dir: Path) -> None:
    module = Evaluated()
    trainer = trainer_of(tmp_path, run_dir, 1, save_weights_only=True)
    trainer.fit(module, rows())
    (saved,) = (tmp_path / "ck").glob("*.ckpt")
    trainer.test(module, rows(), ckpt_path=str(saved))
    assert not [f for f in verify(saved, full=True) if f.severity is Severity.ERROR]
