"""Settings that a framework knows are settings of the launch, without a line in the script."""

from pathlib import Path
from typing import Any

import pytest
import torch

import chronicle
from chronicle import recording
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import HIDDEN
from tests.guard.training import start


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    paths = RunPaths(tmp_path / "logs" / "tr")
    paths.launch_dir(1).mkdir(parents=True)
    given = {"RUN": "tr", "RUN_DIR": str(paths.run_dir), "LAUNCH": "1", "LAUNCH_DIR": str(paths.launch_dir(1))}
    for name, value in given.items():
        monkeypatch.setenv(f"CHRONICLE_{name}", value)
    monkeypatch.setattr(recording, "_recording", None)
    return paths


def settings(paths: RunPaths) -> dict[str, Any]:
    entries = read_journal(paths).entries
    return {entry.data["source"]: entry.data["values"] for entry in entries if entry.kind == "launch.settings"}


def test_what_accelerate_gives_to_its_trackers(launch: RunPaths) -> None:
    run = start(launch.run_dir)
    run.accelerator.init_trackers("project", {"lr": 1e-2, "hub_token": "hf_secret"})
    run.train(1)
    assert settings(launch) == {"init_trackers": {"lr": 1e-2, "hub_token": HIDDEN}}


def test_arguments_and_model_of_the_hf_trainer(launch: RunPaths, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from chronicle.resume.adapters.transformers import ChronicleCallback

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=3e-4
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[ChronicleCallback()]).train()
    found = settings(launch)
    assert found["TrainingArguments"]["learning_rate"] == 3e-4 and found["the model's config"]["model"]["n_layer"] == 1
    flat = chronicle.open(launch.run_dir).settings(1)
    assert (flat["learning_rate"], flat["model.n_embd"], flat["max_steps"]) == (3e-4, 8, 2)


def test_hyperparameters_of_lightning(launch: RunPaths, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from chronicle.resume.adapters.lightning import ChronicleCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 3, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, width)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=2, callbacks=[ChronicleCallback()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(width=5), loader)
    found = settings(launch)
    assert found["hparams"] == {"width": 5, "lr": 0.1} and found["Trainer"]["max_steps"] == 2
