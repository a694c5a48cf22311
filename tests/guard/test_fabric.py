"""Lightning Fabric: guarded by one line, and by none under `chronicle run`."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library's own, at its import
    lightning = pytest.importorskip("lightning.fabric")

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.adapters import fabric as adapter


def train(run_dir: Path | None, steps: int, *, save: Path | None = None, load: Path | None = None, spoil: str = "") -> Any:
    """One launch of an ordinary Fabric loop, which trains on after a save; `run_dir` None: without a line of ours."""
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    if run_dir is not None:
        chronicle.guard(fabric, run_dir=run_dir)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if load is not None:
        if spoil == "scheduler":
            del state["scheduler"]
        fabric.load(load, state)
        if spoil == "weights":
            torch.nn.init.zeros_(model.weight)
        if spoil == "plan":
            scheduler.gamma = 0.5
    rows = torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(1))
    end = state["step"] + steps
    for step in range(state["step"], end + 3 if save is not None else end):
        fabric.backward(model(rows[step]).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if save is not None and step + 1 == end:
            fabric.save(save, state)
    return fabric


def verdicts(run_dir: Path) -> list[tuple[str, str]]:
    found = read_journal(RunPaths(run_dir)).of_kind("guard.verdict")
    return [(entry.data["verdict"], entry.data["basis"]) for entry in found]


def test_healthy_resume_passes_and_the_checkpoint_is_recorded(tmp_path: Path, run_dir: Path) -> None:
    first = train(run_dir, 5, save=tmp_path / "five.ckpt")
    first.chronicle.guard.session.sealer.finish()
    train(run_dir, 3, load=tmp_path / "five.ckpt")
    assert [pair[0] for pair in verdicts(run_dir)] == ["passed", "passed"]
    saved = list(read_journal(RunPaths(run_dir)).of_kind("checkpoint"))
    assert [(entry.step, entry.data["path"]) for entry in saved] == [(5, str(tmp_path / "five.ckpt"))]


@pytest.mark.parametrize("spoil", ["scheduler", "weights", "plan"])
def test_state_that_did_not_come_back_is_refused(tmp_path: Path, run_dir: Path, spoil: str) -> None:
    train(run_dir, 5, save=tmp_path / "five.ckpt").chronicle.guard.session.sealer.finish()
    with pytest.raises(ResumeRefused) as refusal:
        train(run_dir, 3, load=tmp_path / "five.ckpt", spoil=spoil)
    assert verdicts(run_dir)[-1][0] == "refused"
    if spoil == "plan":  # the schedulers are known from the first save on: forecasts made before it prove nothing
        assert "learning rates of the next steps" in [check.name for check in refusal.value.checks]


def test_no_line_under_a_run_and_none_outside(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`callbacks_factory` is what the entry point calls when a Fabric is made."""
    monkeypatch.setattr(adapter, "_every", [False])
    assert adapter.callbacks_factory() == []
    assert not hasattr(train(None, 2), "chronicle")
    monkeypatch.setenv("CHRONICLE_RUN_DIR", str(run_dir))
    monkeypatch.setenv("CHRONICLE_GUARD", "off")
    assert adapter.callbacks_factory() == []
    assert not hasattr(train(None, 2), "chronicle")
    monkeypatch.delenv("CHRONICLE_GUARD")
    assert adapter.callbacks_factory() == []
    train(None, 2)
    assert verdicts(run_dir) == [("passed", "fresh")]


def test_alternating_optimizers_of_a_gan_are_both_known(tmp_path: Path, run_dir: Path) -> None:
    fabric = chronicle.guard(lightning.Fabric(accelerator="cpu", devices=1), run_dir=run_dir)
    parts = []
    for _ in range(2):
        module = torch.nn.Linear(2, 1)
        parts.append(fabric.setup(module, torch.optim.Adam(module.parameters(), lr=1e-3)))
    for module, optimizer in parts * 2:
        fabric.backward(module(torch.ones(1, 2)).sum())
        optimizer.step()
    assert len(fabric.chronicle.guard.session.training.observe().optimizers) == 2
    assert verdicts(run_dir) == [("passed", "fresh")]
