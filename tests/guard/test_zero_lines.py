"""An HF Trainer script without a line of ours under `chronicle run`: killed, resumed, and refused when its state is wrong."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chronicle.journal import read_journal
from chronicle.paths import RunPaths

transformers = pytest.importorskip("transformers")

from chronicle.resume.adapters import transformers as adapter  # noqa: E402

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys
import torch
import transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}

class Killed(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
rows = [{"x": x, "labels": x.sum().reshape(1)} for x in torch.randn(64, 4)]
arguments = transformers.TrainingArguments(
    "out", max_steps=8, save_steps=4, warmup_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
    disable_tqdm=True)
callbacks = [Killed()]
if "own" in sys.argv:
    from chronicle.resume.transformers import ChronicleCallback
    callbacks.append(ChronicleCallback())
trainer = transformers.Trainer(Model(), arguments, train_dataset=rows, callbacks=callbacks)
trainer.train(resume_from_checkpoint=os.path.isdir("out/checkpoint-4") or None)
"""


def launch(folder: Path, *words: str, launcher: tuple[str, ...] = (sys.executable,), **variables: str) -> Any:
    """`chronicle run -- python train.py words` to its end."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHRONICLE_MLFLOW_URI": "off", **variables}
    command = [sys.executable, "-m", "chronicle", "run", "--run", "tr", "--", *launcher, "train.py", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600)


def verdicts(folder: Path) -> list[tuple[str, str]]:
    found = read_journal(RunPaths(folder / "logs" / "tr")).of_kind("guard.verdict")
    return [(entry.data["verdict"], entry.data["basis"]) for entry in found]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three launches, each of which imports torch and transformers
def test_killed_and_resumed_is_verified_and_a_planted_fault_is_refused(tmp_path: Path) -> None:
    """The scheduler's file is gone: HF Trainer 5 would silently begin the warm-up again."""
    killed = launch(tmp_path, "kill")
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr
    (tmp_path / "out" / "checkpoint-4" / "scheduler.pt").rename(tmp_path / "kept.pt")
    refused = launch(tmp_path)
    assert refused.returncode == 78, refused.stderr
    (tmp_path / "kept.pt").rename(tmp_path / "out" / "checkpoint-4" / "scheduler.pt")
    resumed = launch(tmp_path, "own")  # the script's own callback beside it: one guard, not two
    assert resumed.returncode == 0, resumed.stderr
    assert verdicts(tmp_path) == [("passed", "fresh"), ("refused", "manifest"), ("passed", "manifest")]


class Handler:
    """As much of a Trainer and its callback handler as `enter` uses."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = list(callbacks)
        self.add_callback = self.callbacks.append
        self.callback_handler = self


def test_script_with_a_callback_of_its_own_gets_no_second_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapter, "_began", [0])
    handler = Handler(adapter.ChronicleCallback(tmp_path))
    adapter.enter(handler)
    assert len(handler.callbacks) == 1


def test_second_trainer_of_a_process_may_start_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds, or a reward model before the policy: only the first may have forgotten to resume."""
    monkeypatch.setattr(adapter, "_began", [0])
    first, second = Handler(), Handler()
    for handler in (first, first, second):
        adapter.enter(handler)
    assert [len(first.callbacks), len(second.callbacks)] == [1, 1]
    assert not first.callbacks[0]._options.fresh_start
    assert second.callbacks[0]._options.fresh_start


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_of_torchrun_are_guarded(tmp_path: Path) -> None:
    torchrun = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc_per_node", "2")
    done = launch(tmp_path, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert verdicts(tmp_path) == [("passed", "fresh")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_guard_off_ends_it(tmp_path: Path) -> None:
    done = launch(tmp_path, CHRONICLE_GUARD="off")
    assert done.returncode == 0, done.stderr
    assert verdicts(tmp_path) == []
    assert not re.search("chronicle guard", done.stdout + done.stderr)
