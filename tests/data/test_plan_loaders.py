"""The loaders of others over one plan: their order is the plan's, and a kill loses and repeats nothing on other ranks."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from chronicle.data import PlanDataset
from chronicle.data.plan_dataset import PlanBatches
from chronicle.data.shard_index import index_source, write_source_index
from chronicle.errors import DataError
from tests.data.elastic_data import write_foreign_tars

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two indexed sources of foreign tars, 80 samples each."""
    place = tmp_path_factory.mktemp("loaders")
    write_foreign_tars(place, shards=2, samples=40)
    for name in ("web", "code"):
        write_source_index(index_source(name, place / name), place / f"{name}.index")
    return place


def name_of(sample):
    return json.loads(sample["meta.json"])["id"]


def plain(batch):
    return batch


def dataset(place):
    return PlanDataset({place / "web.index": 3, place / "code.index": 1}, seed=4, decode=name_of)


def planned(place, first, end):
    data = dataset(place)
    return [data[number] for number in range(first, end)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["alone", "workers"])
def test_passes_go_on_one_behind_the_other_and_drop_nothing(place, options):
    """160 samples in batches of 12: the batch across the end of an epoch belongs to the first."""
    loader = dataset(place).loader(12, rank=0, world_size=1, collate_fn=plain, **options)
    passes = [[name for batch in loader for name in batch] for _ in range(3)]
    assert [len(names) for names in passes] == [168, 156, 156] and len(loader) == 14
    assert [*chain(*passes)] == planned(place, 0, 480) and loader.epoch == 3


def test_persistent_workers_follow_a_reshuffle_and_an_older_state(place):
    data = PlanDataset([place / "web.index"], seed=4, decode=name_of)
    options = {"rank": 0, "world_size": 1, "num_samples": 400, "collate_fn": plain}
    loader = data.loader(100, num_workers=1, persistent_workers=True, **options)
    before = loader.state_dict()
    straight = [name for batch in loader for name in batch]
    loader.load_state_dict(before)
    data.reshuffled(0)
    other = [name for batch in loader for name in batch]
    assert other != straight and other == [name for batch in data.loader(50, **options) for name in batch]
    loader.load_state_dict(before)
    assert [name for batch in loader for name in batch] == straight


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_reads_the_order_and_is_stopped_where_it_shuffles(place, workers):
    options = {"batch_size": 4, "collate_fn": plain, "num_workers": workers, "persistent_workers": workers > 0}
    loader = torch.utils.data.DataLoader(dataset(place), **options)
    for _ in range(2):
        assert [name for batch in loader for name in batch] == planned(place, 0, 160)
    with pytest.raises(DataError, match=r"asked for sample \d+ after sample \d+: it shuffles"):
        list(torch.utils.data.DataLoader(dataset(place), shuffle=True, **options))
    with pytest.raises(DataError, match="it shuffles"):
        list(torch.utils.data.DataLoader(dataset(place), shuffle=True, **{**options, "batch_size": 1}))


def test_the_rank_is_asked_for_when_the_first_batch_is_read(place, monkeypatch):
    """Lightning starts its other ranks after the loader was made."""
    loader = dataset(place).loader(4, collate_fn=plain)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert next(iter(loader)) == planned(place, 4, 8) and loader.position == 8 and len(loader) == 20
    with pytest.raises(DataError, match="a rank without a world size"):
        dataset(place).loader(4, rank=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_goes_on_on_other_ranks(place, workers):
    loading = pytest.importorskip("torchdata.stateful_dataloader")

    def loaders(batch_size, world_size):
        return [loading.StatefulDataLoader(data, collate_fn=plain, num_workers=workers, batch_sampler=PlanBatches(
            data, batch_size, rank=rank, world_size=world_size)) for rank in range(world_size) for data in [dataset(place)]]

    def read(ranks, steps):
        rows = [[batch for _, batch in zip(range(steps), loader, strict=False)] for loader in ranks]
        return [name for step in zip(*rows, strict=True) for batch in step for name in batch]

    first = loaders(4, 2)
    names = read(first, 5)
    state = json.loads(json.dumps(first[0].state_dict(), default=str))
    second = loaders(6, 1)
    second[0].load_state_dict(state)
    assert names + read(second, 7) == planned(place, 0, 82)


TRAIN = '''
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from chronicle.data import PlanDataset

batch, save_at, stop_at, end, resumed = (int(word) for word in sys.argv[1:6])
place = Path(sys.argv[6])

def decode(sample):
    name = json.loads(sample["meta.json"])["id"]
    x = torch.tensor(list(sample["txt"][:8]), dtype=torch.float32) / 255
    return {"x": x, "names": torch.tensor(list(name.ljust(12).encode()))}

def rank():
    return int(os.environ.get("RANK", 0))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.step = 0
    def forward(self, x, names):
        with open(place / f"seen-{resumed}-{rank()}.jsonl", "a") as seen:
            seen.write(json.dumps([bytes(row.tolist()).decode().strip() for row in names]) + "\\n")
        return {"loss": self.layer(x).square().mean()}

def after(step):
    if step == stop_at:
        os._exit(9)

data = PlanDataset({place / "web.index": 3, place / "code.index": 1}, seed=4, decode=decode)
torch.manual_seed(0)
net = Net()
'''
SCRIPTS = {
    "accelerate": '''
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = data.loader(batch, num_workers=1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
net, optimizer, same = accelerator.prepare(net, optimizer, loader)
assert same is loader
accelerator.register_for_checkpointing(loader)
step = 0
if resumed:
    accelerator.load_state(str(place / "accelerate"))
    step = save_at
while step < end:
    for inputs in loader:
        loss = net(**inputs)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == save_at and not resumed:
            accelerator.save_state(str(place / "accelerate"))
            accelerator.wait_for_everyone()
        after(step)
        if step == end:
            break
accelerator.end_training()
''',
    "trainer": '''
from transformers import Trainer, TrainerCallback, TrainingArguments
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == save_at
    def on_step_begin(self, args, state, control, **_):
        after(state.global_step)
arguments = TrainingArguments(str(place / "trainer"), per_device_train_batch_size=batch, max_steps=end, save_strategy="no",
    use_cpu=True, report_to=[], disable_tqdm=True, gradient_accumulation_steps=1, logging_strategy="no")
trainer = Trainer(net, arguments, callbacks=[Stop()])
data.loader(batch, num_workers=1).attach(trainer)
trainer.train(resume_from_checkpoint=str(place / f"trainer/checkpoint-{save_at}") if resumed else None)
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
        return torch.optim.SGD(self.parameters(), lr=0.01)
class Stop(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == save_at and not resumed:
            trainer.save_checkpoint(place / "lightning.ckpt")
        after(trainer.global_step)
many = int(os.environ.get("WORLD_SIZE", 1))
trainer = pl.Trainer(accelerator="cpu", devices=many, strategy="ddp" if many > 1 else "auto", max_steps=end, max_epochs=-1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[Stop()], default_root_dir=place)
trainer.fit(Module(), data.loader(batch, num_workers=1), ckpt_path=place / "lightning.ckpt" if resumed else None)
''',
}  # fmt: skip


def launch(place: Path, framework: str, world_size: int, *words: int) -> int:
    script = place / f"train_{framework}.py"
    script.write_text(TRAIN + SCRIPTS[framework])
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CHRONICLE", "RANK", "WORLD"))}
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)] if world_size > 1 else []
    with open(place / f"{framework}.log", "ab") as log:
        return subprocess.run([sys.executable, *starter, str(script), *map(str, words), str(place)], stdout=log, stderr=log,
                              env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False).returncode


def seen(place: Path, resumed: int, world_size: int) -> list[str]:
    """The names in the order of the global batches."""
    ranks = [[json.loads(line) for line in (place / f"seen-{resumed}-{rank}.jsonl").read_text().splitlines()]
             for rank in range(world_size)]
    return [name for step in zip(*ranks, strict=False) for names in step for name in names]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", SCRIPTS)
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["to-one", "to-two"])
def test_a_framework_killed_after_a_save_goes_on_on_other_ranks_across_an_epoch(place, tmp_path, framework, ranks):
    """Saved at step 17, killed at 19, gone on with another batch to step 30: beyond the 160 samples of an epoch."""
    pytest.importorskip({"trainer": "transformers"}.get(framework, framework))
    for path in place.iterdir():
        (tmp_path / path.name).symlink_to(path)
    first, then = ranks
    assert launch(tmp_path, framework, first, 4, 17, 19, 30, 0) != 0
    log = tmp_path / f"{framework}.log"
    assert launch(tmp_path, framework, then, 6, 17, 0, 30, 1) == 0, log.read_text()[-3000:]
    saved, went_on = 17 * 4 * first, 13 * 6 * then
    assert seen(tmp_path, 0, first)[:saved] == planned(place, 0, saved)
    assert seen(tmp_path, 1, then) == planned(place, saved, saved + went_on)
