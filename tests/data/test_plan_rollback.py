"""`chronicle rollback --skip-batches` and `--reshuffle` reach the plan of a script that keeps its place in its checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.data import PlanDataset
from chronicle.data.plan_dataset import BLOCK_SAMPLES
from chronicle.data.shard_index import index_source, write_source_index
from tests.data.elastic_data import write_foreign_tars

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
BATCH = 4
HEAD = f'''
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from chronicle.data import PlanDataset

place, end, handed, launch = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:]), os.environ["CHRONICLE_LAUNCH"]

def decode(sample):
    name = json.loads(sample["meta.json"])["id"]
    x = torch.tensor(list(sample["txt"][:8]), dtype=torch.float32) / 255
    return {{"x": x, "names": torch.tensor(list(name.ljust(12).encode()))}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
    def forward(self, x, names):
        with open(place / f"seen-{{launch}}.jsonl", "a") as seen:
            seen.write(json.dumps([bytes(row.tolist()).decode().strip() for row in names]) + "\\n")
        return {{"loss": self.layer(x).square().mean()}}

data = PlanDataset({{place / "web.index": 3, place / "code.index": 1}}, seed=4, decode=decode)
torch.manual_seed(0)
net = Net()
loader = data.loader({BATCH}, num_workers=1)
'''
SCRIPTS = {
    "torch": '''
import chronicle
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
run = chronicle.attach(os.environ["CHRONICLE_RUN_DIR"], net, optimizer, data=loader)
step = 0
if handed:
    saved = torch.load(handed)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["data"])
    step = saved["step"]
while step < end:
    for inputs in loader:
        net(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            os.makedirs("ck", exist_ok=True)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict(),
                        "step": step}, f"ck/step-{step}.pt")
            run.saved(f"ck/step-{step}.pt")
        if step == end:
            break
''',
    "accelerate": '''
import chronicle
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
chronicle.guard(accelerator)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
held_out = torch.utils.data.DataLoader(torch.zeros(4, 8))
net, optimizer, held_out = accelerator.prepare(net, optimizer, held_out)
accelerator.register_for_checkpointing(loader)
step = 0
if handed:
    accelerator.load_state(handed)
    step = int(Path(handed).name.split("-")[1])
while step < end:
    for inputs in loader:
        accelerator.backward(net(**inputs)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            accelerator.save_state(f"ck/step-{step}")
        if step == end:
            break
''',
    "trainer": '''
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("ck", per_device_train_batch_size=4, max_steps=end, save_steps=5, use_cpu=True, report_to=[],
    disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant")
trainer = Trainer(net, arguments)
loader.attach(trainer)
trainer.train(resume_from_checkpoint=handed or None)
''',
    "lightning": '''
import lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, index):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
keep = pl.callbacks.ModelCheckpoint("ck", filename="{step}", every_n_train_steps=5, save_top_k=-1)
trainer = pl.Trainer(accelerator="cpu", max_steps=end, max_epochs=-1, logger=False, enable_progress_bar=False, callbacks=[keep])
trainer.fit(Module(), loader, ckpt_path=handed or None)
''',
}  # fmt: skip

SAVED = {"torch": "ck/step-{}.pt", "accelerate": "ck/step-{}", "trainer": "ck/checkpoint-{}", "lightning": "ck/step={}.ckpt"}


def play(place: Path, *words: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CHRONICLE", "RANK", "WORLD"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CHRONICLE_MLFLOW_URI": "off"}
    done = subprocess.run([sys.executable, "-m", "chronicle.cli.main", *words], cwd=place, env=environ, capture_output=True,
                          text=True, check=False)
    (place / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-2500:] + done.stderr[-2500:]
    return done.stdout + done.stderr


def seen(place: Path, launch: int) -> list[str]:
    return [name for line in (place / f"seen-{launch}.jsonl").read_text().splitlines() for name in json.loads(line)]


def started(tmp_path: Path, framework: str) -> tuple[PlanDataset, list[str]]:
    """Twelve steps of a script over 160 samples, saved at 5 and 10; the plan, and the words that launch it again."""
    pytest.importorskip({"trainer": "transformers"}.get(framework, framework))
    write_foreign_tars(tmp_path, shards=2, samples=40)
    for name in ("web", "code"):
        write_source_index(index_source(name, tmp_path / name), tmp_path / f"{name}.index")
    (tmp_path / "train.py").write_text(HEAD + SCRIPTS[framework])
    words = ["run", "--run", "r", "--checkpoints", "ck", "--", sys.executable, "train.py", str(tmp_path)]
    play(tmp_path, *words, "12")
    plan = PlanDataset({tmp_path / "web.index": 3, tmp_path / "code.index": 1}, seed=4,
                       decode=lambda sample: json.loads(sample["meta.json"])["id"])
    assert seen(tmp_path, 1) == names(plan, 0, 12)
    return plan, words


def names(plan: PlanDataset, first: int, end: int) -> list[str]:
    """The samples of steps `first` to `end` of an undisturbed run."""
    return [plan[number] for number in range(first * BATCH, end * BATCH)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("framework", [*SCRIPTS])
def test_skipped_batches_are_left_out_once_whatever_saves_the_place(tmp_path, framework):
    """Back to step 5 without the data of three steps; a later resume, from a save after it, does not skip again."""
    plan, words = started(tmp_path, framework)
    play(tmp_path, "rollback", "--run", "r", "--to", "5", "--skip-batches", "3", "--yes")
    told = play(tmp_path, *words, "11", SAVED[framework].format(5))
    assert seen(tmp_path, 2) == names(plan, 8, 14)
    assert "12 samples of the plan are left out after sample 20; the next is 32" in told
    told = play(tmp_path, *words, "13", SAVED[framework].format(10))
    assert seen(tmp_path, 3) == names(plan, 13, 16)
    assert "left out" not in told


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reshuffle_changes_the_order_from_the_next_block_on(tmp_path):
    plan, words = started(tmp_path, "torch")
    play(tmp_path, "rollback", "--run", "r", "--to", "5", "--reshuffle", "--skip-batches", "248", "--yes")
    told = play(tmp_path, *words, "11", SAVED["torch"].format(5))
    assert f"the next is 1012, reshuffled from {BLOCK_SAMPLES} on" in told
    same = [plan[number] for number in range(1012, 1036)]
    plan.reshuffled(1012)
    assert seen(tmp_path, 2) == [plan[number] for number in range(1012, 1036)] != same
