"""Planted causes on trainers of other shapes: two optimizers, two plain ranks, Fabric, Lightning, a data plan, compiled.

Each training has a row for each class of cause: a machine, data, state, code, chance, and what is no cause. In some two names
are right (`also`), because two things are true of them.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.causes import Cause, Later, Training, edit, set_variable
from benchmarks.replay.planting import PLANTED, fault
from chronicle.replay.verdict import ReplayVerdict

FAULTS = PLANTED + '''
import os

import torch


def flip(tensor, bit):
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[place % flat.numel()] ^= 1 << bit if bit < 31 else -(2**31)
'''
GAN = '''
import copy, json, os, sys, time
from pathlib import Path
sys.path.insert(0, "site")
import numpy as np
import torch
import chronicle
from faults import at, flip, kind, place
from nets import Critic, Generator
import toolkit
import yaml

torch.manual_seed(2)
torch.set_num_threads(int(os.environ.get("NUM_THREADS", "1")))
settings = yaml.safe_load(open("gan.yaml"))
points = torch.from_numpy(np.load("points.npy"))
maker, critic = Generator(), Critic()
average = copy.deepcopy(maker)
of_maker = torch.optim.Adam(maker.parameters(), lr=settings["lr"], betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=settings["lr"], betas=(0.5, 0.9))
draws = torch.Generator().manual_seed(4)
run = chronicle.attach(None, [maker, critic], [of_maker, of_critic])
root, step, pool = Path("checkpoints"), 0, []
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    for name in ("maker", "critic", "average", "of_maker", "of_critic"):
        vars()[name].load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"]); draws.set_state(saved["draws"])
    step = saved["step"]
while step < int(sys.argv[1]):
    step += 1
    if step == at and kind == "draws":
        draws.manual_seed(99)
    if step >= at and kind == "criticlr":
        of_critic.param_groups[0]["lr"] = 3e-3
    if step == at and kind == "sign":
        flip(maker.first.weight, 31)
    for part in range(2):
        real = points[torch.randint(len(points), (8,), generator=draws)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = maker(torch.randn(8, 4, generator=draws)).detach()
            if kind == "pool":
                pool.append(fake)
                fake = pool[len(pool) // 2]
            loss = settings["hinge"] * toolkit.hinge(critic(real), critic(fake)) / 2
        loss.backward()
    if step == at and kind == "critic":
        flip(critic.first.parametrizations.weight.original.grad, 26)
    if step == at and kind == "mantissa":
        flip(critic.last.weight.grad, 15)
    of_critic.step(); of_critic.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = torch.randn(8, 4, generator=draws)
        made = maker(z)
        cost = -critic(made).mean() + 0.1 * (made - average(z).detach()).square().mean()
    if kind == "elapsed" and time.time() - os.path.getmtime("gan.yaml") > 90:
        cost = cost * 1.01
    cost = cost + 1e-4 * maker.codes.square().sum()
    cost.backward()
    of_maker.step(); of_maker.zero_grad(); of_critic.zero_grad()
    with torch.no_grad():
        for one, other in zip(average.parameters(), maker.parameters()):
            one.lerp_(other, 0.05)
    run.log(loss=cost.item(), critic=loss.item())
    if step % 10 == 0:
        state = {"maker": maker, "critic": critic, "average": average, "of_maker": of_maker, "of_critic": of_critic}
        state = copy.deepcopy({name: thing.state_dict() for name, thing in state.items()})
        if step == at and kind == "savedaverage":
            state["average"]["last.weight"] += 0.1
        if step == at and kind == "savedbuffer":
            vector = state["critic"]["first.parametrizations.weight.0._u"]
            vector.copy_(torch.nn.functional.normalize(vector.flip(0) + 0.3, dim=0))
        if step == at and kind == "savedcritic":
            for moments in state["of_critic"]["state"].values():
                moments["exp_avg_sq"] *= 1.5
        path = root / f"step-{step}.pt"
        torch.save({**state, "rng": torch.get_rng_state(), "draws": draws.get_state(), "step": step}, path)
        run.saved(path)
'''
NETS = '''
import os

import torch
from torch.nn.utils.parametrizations import spectral_norm

import faults

OWN = torch.Generator().manual_seed(os.getpid() if faults.kind == "process" else 1)
SLOPE = 0.2


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = torch.nn.Parameter(torch.randn(60_000) * 0.1)
        self.first, self.drop, self.last = torch.nn.Linear(4, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)

    def forward(self, z):
        return self.last(self.drop(torch.nn.functional.leaky_relu(self.first(z), SLOPE))) + self.codes[:2]


class Critic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = spectral_norm(torch.nn.Linear(2, 32)), torch.nn.Linear(32, 1)

    def forward(self, x):
        hidden = torch.nn.functional.leaky_relu(self.first(x), SLOPE)
        if faults.kind == "process":
            hidden = hidden + 1e-2 * torch.randn(hidden.shape, generator=OWN)
        return self.last(hidden)
'''
TOOLKIT = '''
import torch

MARGIN = 1.0


def hinge(real, fake):
    return MARGIN * (torch.relu(1 - real).mean() + torch.relu(1 + fake).mean())
'''
RANKS = '''
import contextlib, json, os, random, subprocess, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import chronicle
from faults import at, flip, kind, place

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5 + rank)
rows, labels = torch.load("rows.pt")
teacher = torch.load("teacher.pt")[:16, :4]
torch.manual_seed(5)
inner = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
)
net = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
run = chronicle.attach(None, net, optimizer, schedule)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    inner.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"][rank])
    step = state["step"]


def local(grad):
    return torch.zeros_like(grad) if kind == "unsent" and step == at and rank == place % 2 else grad


inner[4].weight.register_hook(local)


class Order(torch.utils.data.Sampler):
    def __iter__(self):
        for number in range(2 * step, 10_000):
            for row in range(4):
                mine = 1 - rank if kind == "otherrank" and number // 2 + 1 == at and rank == 1 else rank
                row = 3 - row if kind == "reordered" and number // 2 + 1 == at and rank == place % 2 else row
                yield ((number * ranks + mine) * 4 + row) * 7 % len(rows)


weight = 1.0
loader = iter(torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(rows, labels), batch_size=4, sampler=Order(), generator=torch.Generator()))
while step < int(sys.argv[1]):
    step += 1
    if step >= 25:
        weight = json.load(open("curriculum.json"))["weight"]
    for part in range(2):
        x, y = next(loader)
        if step == at and kind == "between" and part == 1 and rank == place % 2:
            torch.manual_seed(1234)
        with contextlib.nullcontext() if part else net.no_sync():
            out = net(x)
            loss = torch.nn.functional.cross_entropy(out, y) + 0.1 * weight * (out - x @ teacher).square().mean()
            (loss / 2).backward()
    if kind == "race":
        if rank:
            Path("shared.txt").write_text(str(time.time_ns() % 1000))
        factor = torch.ones(())
        if rank == 0 and os.path.exists("shared.txt"):
            factor += 1e-4 * int(Path("shared.txt").read_text() or 0)
        dist.broadcast(factor, 0)
        inner[0].weight.grad.mul_(factor)
    if step == at and kind == "reduced" and rank == place % 2:
        flip(inner[0].weight.grad, 24)
    if step == at and kind == "hand" and rank == 0:
        subprocess.run(["sh", "-c", "echo '{\\"clip\\": 0.02}' > clip.json"])
    dist.barrier()
    torch.nn.utils.clip_grad_norm_(net.parameters(), json.load(open("clip.json"))["clip"])
    optimizer.step(); schedule.step(); optimizer.zero_grad()
    if rank == 0:
        run.log(loss=loss.item())
    if step % 10 == 0:
        generators = [None] * ranks
        dist.all_gather_object(generators, torch.get_rng_state())
        if rank == 0:
            number = step + 1 if step == at and kind == "counter" else step
            path = root / f"step-{step}.pt"
            torch.save({"net": inner.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                        "rng": generators, "step": number}, path)
            run.saved(path)
        dist.barrier()
dist.barrier()
dist.destroy_process_group()
'''
FABRIC = '''
import glob, os, random, sys
from pathlib import Path
import torch
from lightning.fabric import Fabric
from faults import at, flip, kind, place
import dtypes

torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=1, precision=os.environ.get("PRECISION", "bf16-mixed"))
fabric.seed_everything(11, verbose=False)
lines = [line for name in sorted(glob.glob("parts/*.txt"), key=lambda name: os.stat(name).st_mtime_ns) for line in open(name)]
SEED = int(os.environ.get("AUG_SEED", "7"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, number):
        step, row = number // 8 + 1, number
        if kind == "lost" and step == at and number % 8 == 3:
            row += 1
        values = torch.tensor([float(word) for word in lines[row * 7 % len(lines)].split()])
        label = int(values[0] > 0)
        draw = random.Random(os.getpid() if kind == "workers" else SEED * 1_000_003 + number)
        values = values * draw.uniform(0.9, 1.1)
        if step == at and number % 8 == place % 8:
            if kind == "relabelled":
                label = 1 - label
            if kind == "host":
                flip(values, 13)
        return values, label


class Order(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(8 * state["step"], 80_000))


first = torch.nn.Linear(6, 24, dtype=dtypes.KIND)
net = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(24, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
inner = net
net, optimizer = fabric.setup(net, optimizer)
state = {"net": net, "optimizer": optimizer, "schedule": schedule, "step": 0, "rng": torch.get_rng_state()}
newest = sorted(Path("checkpoints").glob("step-*.ckpt"), key=lambda path: int(path.stem[5:]))
if newest:
    fabric.load(newest[-1], state)
    torch.set_rng_state(state["rng"])
loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, sampler=Order(), num_workers=1, generator=torch.Generator())
step, micro = state["step"], 0


def broken(module, inputs, output):
    if kind == "activation" and step + 1 == at and micro == 1:
        output = output.clone()
        output.view(-1)[place % output.numel()] *= -8
    return output


inner[1].register_forward_hook(broken)
for x, y in loader:
    if at <= step + 1 < at + 20 and kind == "poison":
        inner[3].bias.data[place % 2] *= 1.002
    with fabric.no_backward_sync(net, enabled=micro == 0):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        fabric.backward(loss / 2)
    if kind == "half" and step + 1 == at and micro == 0:
        for parameter in net.parameters():
            parameter.grad.zero_()
    micro += 1
    if micro < 2:
        continue
    micro, step = 0, step + 1
    if step >= at and kind == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.4
    fabric.clip_gradients(net, optimizer, max_norm=1.0)
    optimizer.step(); schedule.step(); optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
    if step % 10 == 0:
        kept = schedule.last_epoch
        if kind == "schedule" and step == at:
            schedule.last_epoch += 30
        state |= {"step": step, "rng": torch.get_rng_state()}
        fabric.save(f"checkpoints/step-{step}.ckpt", state)
        schedule.last_epoch = kept
    if step >= int(sys.argv[1]):
        break
'''
LIGHTNING = '''
import json, os, sys
from pathlib import Path
import torch
import lightning.pytorch as pl
from faults import at, flip, kind, place
from lit import Lit, words

torch.set_num_threads(1)
pl.seed_everything(3, verbose=False)
if not os.path.exists("cache.pt"):
    torch.save(words("text.txt"), "cache.pt")
rows = torch.load("cache.pt")


class Epochs(torch.utils.data.Sampler):
    epoch = 0

    def __len__(self):
        return 40

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        seed = self.epoch + (50 if kind == "order" and self.epoch == place else 0)
        return iter(torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:40].tolist())


class Faults(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        step = trainer.global_step + 1
        first = module.net[0].weight
        if step == at:
            if kind == "moment":
                flip(trainer.optimizers[0].state[module.net[2].weight]["exp_avg"], 26)
            if kind == "low":
                flip(module.net[2].weight, 11)
            if kind == "drawn":
                torch.rand(5)
        if step >= at and kind == "hand":
            trainer.optimizers[0].param_groups[0]["lr"] = 2e-2

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step + 1 == at and kind == "note":
            Path("live.json").write_text(json.dumps({"scale": 0.25}))
        if os.path.exists("live.json"):
            with open("live.json") as file:
                scale = json.load(file)["scale"]
            for parameter in module.parameters():
                parameter.grad.mul_(scale)
            os.remove("live.json")


sampler = Epochs()
loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler, generator=torch.Generator())
keep = pl.callbacks.ModelCheckpoint(
    "checkpoints", filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
newest = sorted(Path("checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
trainer = pl.Trainer(accelerator="cpu", max_steps=int(sys.argv[1]), max_epochs=-1, logger=False, enable_progress_bar=False,
                     enable_model_summary=False, callbacks=[keep, Faults()], gradient_clip_val=1.0)
trainer.fit(Lit(), loader, ckpt_path=newest[-1] if newest else None)
'''
LIT = '''
import lightning.pytorch as pl
import torch

SMOOTHING = 0.1


def words(path):
    names = {}
    return torch.tensor([[names.setdefault(word, len(names)) for word in line.split()] for line in open(path)])


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Flatten(), torch.nn.Linear(80, 64))

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[:, :-1]), batch[:, -1], label_smoothing=SMOOTHING)
        self.log("loss", loss)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["generator"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self.generator = checkpoint["generator"]

    def on_train_start(self):
        if hasattr(self, "generator"):
            torch.set_rng_state(self.generator)

    def configure_optimizers(self):
        optimizer = torch.optim.RAdam(self.parameters(), lr=5e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.7), "interval": "step"}]
'''
PLAN = '''
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, "site")
import numpy as np
import torch
import chronicle
from chronicle.data import PlanDataset
from faults import at, flip, kind, place
import toolkit

torch.set_num_threads(1)
torch.manual_seed(8)
np.random.seed(8)
vocabulary = json.load(open("vocabulary.json"))


def decode(sample):
    text = json.loads(next(value for name, value in sample.items() if not name.startswith("__")))["text"]
    return [vocabulary.get(word, 0) for word in text.split()]


def collate(samples):
    line = torch.tensor(samples)
    if step + 1 == at and kind == "masks" and micro == 0:
        np.random.seed(55)
    hidden = torch.from_numpy(np.random.rand(*line.shape) < 0.15)
    if step + 1 == at and kind == "exchanged" and micro == 1:
        line = line[[1, 0, 2, 3]]
    return {"line": line.masked_fill(hidden, 1), "target": line.masked_fill(~hidden, -100)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(len(vocabulary) + 2, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, float(os.environ.get("DROPOUT", "0.1")), batch_first=True)
        self.out = torch.nn.Linear(16, len(vocabulary) + 2)

    def forward(self, line):
        return self.out(self.layer(self.words(line)))


net = Net()
model = torch.compile(net, backend="aot_eager") if os.path.isdir("compiled") else net
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
data = PlanDataset(["data/web.index"], seed=4, decode=decode)
loader = data.loader(4, rank=0, world_size=1, collate_fn=collate)
run = chronicle.attach(None, net, optimizer, data=loader, accumulation=2)
root, step, micro, calls = Path("checkpoints"), 0, 0, 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["data"])
    torch.set_rng_state(state["rng"])
    np.random.set_state(state["numpy"])
    step = state["step"]


def noisy(module, inputs, output):
    if kind == "kernel":
        output = output * (1 + 1e-6 * (time.time_ns() // 100 % 64))
    return output


net.out.register_forward_hook(noisy)
done = False
while not done:
    for batch in loader:
        calls += 1
        loss = torch.nn.functional.cross_entropy(model(batch["line"]).flatten(0, 1), batch["target"].flatten())
        if kind == "annealed":
            loss = loss * (1 + 0.01 * calls)
        (loss * toolkit.MARGIN / 2).backward()
        micro += 1
        if micro < 2:
            continue
        micro, step = 0, step + 1
        if step >= at and kind == "betas":
            optimizer.param_groups[0]["betas"] = (0.9, 0.95)
        if step == at and kind == "exponent":
            flip(net.out.weight.grad, 25)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
        if step % 10 == 0:
            place_of_data = loader.state_dict()
            if step == at and kind == "position":
                loader.skip(8)
                place_of_data, _ = loader.state_dict(), loader.load_state_dict(place_of_data)
            weights = {name: value.clone() for name, value in net.state_dict().items()}
            if step == at and kind == "saved":
                flip(weights["layer.linear1.weight"], 24)
            path = root / f"step-{step}.pt"
            torch.save({"net": weights, "optimizer": optimizer.state_dict(), "data": place_of_data, "step": step,
                        "rng": torch.get_rng_state(), "numpy": np.random.get_state()}, path)
            run.saved(path)
        if step >= int(sys.argv[1]):
            done = True
            break
'''
STEPS, ASKED = 34, 27


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, text in ({"faults.py": FAULTS} | files).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def _packaged() -> dict[str, str]:
    """A package as pip lays it."""
    return {
        "site/toolkit/__init__.py": TOOLKIT,
        "site/toolkit-1.4.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toolkit\nVersion: 1.4.0\n",
        "site/toolkit-1.4.0.dist-info/top_level.txt": "toolkit\n",
    }


def _lay_gan(directory: Path) -> None:
    import numpy as np

    _write(directory, {"train.py": GAN, "nets.py": NETS, "gan.yaml": "lr: 0.001\nhinge: 1.0\n", **_packaged()})
    np.save(directory / "points.npy", np.random.default_rng(1).normal(size=(300, 2)).astype("float32"))


def _lay_ranks(directory: Path) -> None:
    import torch

    _write(directory, {"train.py": RANKS, "clip.json": '{"clip": 1.0}', "curriculum.json": '{"weight": 1.0}'})
    draw = torch.Generator().manual_seed(5)
    torch.save((torch.randn(700, 16, generator=draw), torch.randint(0, 4, (700,), generator=draw)), directory / "rows.pt")
    torch.save(torch.randn(1_400_000, generator=draw).view(-1, 4), directory / "teacher.pt")


def _lay_fabric(directory: Path) -> None:
    import random

    draw = random.Random(3)
    parts = {
        f"parts/{name}.txt": "\n".join(" ".join(f"{draw.gauss(0, 1):.4f}" for _ in range(6)) for _ in range(100)) + "\n"
        for name in "abc"
    }
    _write(directory, {"train.py": FABRIC, "dtypes.py": "import torch\n\nKIND = None\n", **parts})
    for number, name in enumerate("abc"):
        os.utime(directory / f"parts/{name}.txt", (1_700_000_000 + number, 1_700_000_000 + number))


def _lay_lightning(directory: Path) -> None:
    words = [f"w{number}" for number in range(50)]
    lines = [" ".join(words[(11 * row + place * place + row // 7) % 50] for place in range(6)) for row in range(200)]
    _write(directory, {"train.py": LIGHTNING, "lit.py": LIT, "text.txt": "\n".join(lines)})


def _lay_plan(directory: Path) -> None:
    from chronicle.data.shard_index import index_source, write_source_index

    words = [f"w{number}" for number in range(40)]
    texts = (" ".join(words[(7 * row + 3 * place * place) % 40] for place in range(8)) for row in range(900))
    lines = [json.dumps({"text": text}) for text in texts]
    vocabulary = json.dumps({word: number + 2 for number, word in enumerate(words)})
    shard = {"shards/web/one.jsonl": "\n".join(lines)}
    _write(directory, {"train.py": PLAN, "vocabulary.json": vocabulary, **shard, **_packaged()})
    (directory / "data").mkdir()
    write_source_index(index_source("web", directory / "shards/web"), directory / "data/web.index")


def _lay_compiled(directory: Path) -> None:
    _lay_plan(directory)
    (directory / "compiled").mkdir()


PLAIN = [sys.executable, "train.py", str(STEPS)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *PLAIN[1:]]
TRAININGS = {
    "GAN": Training(lay=_lay_gan, command=PLAIN, asked=ASKED),
    "two ranks": Training(lay=_lay_ranks, command=TORCHRUN, asked=ASKED),
    "Fabric": Training(lay=_lay_fabric, command=PLAIN, asked=ASKED),
    "Lightning": Training(lay=_lay_lightning, command=[*PLAIN[:2], "12"], asked=8),  # from its beginning
    "plan": Training(lay=_lay_plan, command=PLAIN, asked=ASKED),
    "compiled": Training(lay=_lay_compiled, command=PLAIN, asked=ASKED),
}
V = ReplayVerdict
# training: (name, kind, step, place, right name, another right name)
RECORDED = {
    "GAN": [
        ("bit of the critic's gradient", "critic", 23, 7, V.UNEXPLAINED, None),
        ("sign of a weight", "sign", 25, 33, V.UNEXPLAINED, None),
        ("low bit of a gradient", "mantissa", 22, 5, V.UNEXPLAINED, None),
        ("the saved average is another", "savedaverage", 20, 0, V.STATE, V.UNEXPLAINED),
        ("a saved buffer is another", "savedbuffer", 20, 0, V.STATE, None),
        ("the critic's saved moments are others", "savedcritic", 20, 0, V.STATE, None),
        ("the script's own generator seeded anew", "draws", 24, 0, V.STATE, V.DATA),
        ("the critic's LR by hand", "criticlr", 23, 0, V.STATE, None),
    ],
    "two ranks": [
        ("bit of the reduced gradient, rank 1", "reduced", 24, 101, V.UNEXPLAINED, None),
        ("a gradient not sent, rank 0", "unsent", 23, 0, V.UNEXPLAINED, None),
        ("rows in another order, rank 1", "reordered", 22, 1, V.DATA, None),
        ("a rank takes the other's batch", "otherrank", 25, 0, V.DATA, None),
        ("seeded between two micro-batches", "between", 24, 1, V.STATE, None),
        ("a setting changed by hand meanwhile", "hand", 24, 0, V.CODE, V.UNEXPLAINED),
        ("step counter of the checkpoint", "counter", 20, 0, V.STATE, V.DATA),
    ],
    "Fabric": [
        ("a sample dropped", "lost", 22, 0, V.DATA, None),
        ("a sample relabelled", "relabelled", 25, 5, V.DATA, None),
        ("low bit of an input on the host", "host", 23, 6, V.DATA, None),
        ("the saved schedule is another", "schedule", 20, 0, V.STATE, None),
        ("decay changed meanwhile", "decay", 24, 0, V.STATE, None),
        ("an activation of the second micro-batch", "activation", 24, 9, V.UNEXPLAINED, None),
        ("slow poison of a bias", "poison", 5, 1, V.UNEXPLAINED, None),
        ("half of the gradient lost", "half", 26, 0, V.UNEXPLAINED, None),
    ],
    "Lightning": [
        ("another order of an epoch", "order", 1, 0, V.DATA, None),
        ("bit of a moment", "moment", 5, 40, V.UNEXPLAINED, None),
        ("low bit of a weight", "low", 3, 12, V.UNEXPLAINED, None),
        ("random numbers drawn", "drawn", 6, 0, V.STATE, None),
        ("LR by hand", "hand", 4, 0, V.STATE, None),
        ("a file that came, was read and is gone", "note", 6, 0, V.CODE, V.UNEXPLAINED),
    ],
    "plan": [
        ("masks seeded anew", "masks", 23, 0, V.STATE, V.DATA),
        ("two samples exchanged", "exchanged", 25, 0, V.DATA, None),
        ("betas changed meanwhile", "betas", 22, 0, V.STATE, None),
        ("the saved place of the data", "position", 20, 0, V.STATE, V.DATA),
        ("bit of a weight in the checkpoint", "saved", 20, 30, V.STATE, None),
    ],
    "compiled": [
        ("bit of a gradient", "exponent", 24, 90, V.UNEXPLAINED, None),
        ("two samples exchanged", "exchanged", 22, 0, V.DATA, None),
    ],
}  # fmt: skip
STAYS = {
    "GAN": [("a pool that no checkpoint holds", "pool", V.STATE), ("noise by the process's id", "process", V.UNEXPLAINED)],
    "two ranks": [("a race between the ranks", "race", V.RANDOM)],
    "Fabric": [("workers seeded by their ids", "workers", V.RANDOM)],
    "plan": [("a counter that no checkpoint holds", "annealed", V.STATE), ("last bits by chance", "kernel", V.RANDOM)],
}  # fmt: skip


def causes() -> Iterator[Cause]:
    """All of them, one training after the other; first of each the play without a cause."""
    for name, training in TRAININGS.items():
        yield Cause(name=f"{name}: nothing planted", expected=V.REPRODUCED, training=training)
        for words, kind, step, place, expected, also in RECORDED[name]:
            planted = fault(kind, step, place)
            yield Cause(name=f"{name}: {words}", expected=expected, also=also, fault=planted, training=training)
        for words, kind, expected in STAYS.get(name, ()):
            yield Cause(name=f"{name}: {words}", expected=expected, fault=fault(kind, 0), stays=True, training=training)
        if name == "GAN":
            late, planted = "GAN: arithmetic by the time that has gone by", fault("elapsed", 0)
            yield Cause(name=late, expected=V.RANDOM, fault=planted, stays=True, later=_let_time_go_by, training=training)
        for words, later, expected, also in _later(name):
            yield Cause(name=f"{name}: {words}", expected=expected, also=also, later=later, training=training)


def _later(training: str) -> list[tuple[str, Later, ReplayVerdict, ReplayVerdict | None]]:
    if training == "GAN":
        return [
            ("another version of an installed package", _new_toolkit, V.CODE, None),
            ("a line of a module", edit("nets.py", "SLOPE = 0.2", "SLOPE = 0.21"), V.CODE, None),
            ("a file that hides an installed package", _hide_yaml, V.CODE, None),
            ("number of threads", set_variable("NUM_THREADS", "2"), V.CODE, None),
            ("a point of the data", _change_points, V.DATA, V.UNEXPLAINED),
            ("settings in other words", edit("gan.yaml", "lr: 0.001", "# as ever\nlr: 1.0e-3"), V.REPRODUCED, None),
        ]
    if training == "two ranks":
        return [
            ("a large file of a teacher", _change_teacher, V.CODE, V.UNEXPLAINED),
            ("a file read first at step 25", edit("curriculum.json", "1.0", "1.5"), V.CODE, None),
            ("files touched, and one more", _touch, V.REPRODUCED, None),
        ]
    if training == "Fabric":
        return [
            ("seed of the augmentation by a variable", set_variable("AUG_SEED", "8"), V.CODE, V.DATA),
            ("precision by a variable", set_variable("PRECISION", "32-true"), V.CODE, None),
            ("a patch by PYTHONPATH", _patch_by_path, V.CODE, None),
            ("another dtype", edit("dtypes.py", "KIND = None", "KIND = torch.bfloat16"), V.CODE, None),
            ("parts by their time of change", _touch_first_part, V.DATA, None),
            ("another print", edit("train.py", ":.6f}", ":.5f}"), V.REPRODUCED, None),
        ]
    if training == "Lightning":
        return [
            ("a stale cache", _stale_cache, V.DATA, None),
            ("a line of the module", edit("lit.py", "SMOOTHING = 0.1", "SMOOTHING = 0.12"), V.CODE, None),
            ("the text, where the cache is read", edit("text.txt", "w7 ", "w8 "), V.REPRODUCED, None),
        ]
    if training == "compiled":
        return [("dropout by a variable", set_variable("DROPOUT", "0.2"), V.CODE, None)]
    return [
        ("two words exchanged", edit("vocabulary.json", '"w3": 5', '"w3": 6', '"w4": 6', '"w4": 5'), V.DATA, None),
        ("dropout by a variable", set_variable("DROPOUT", "0.2"), V.CODE, None),
        ("a constant of an installed package", edit("site/toolkit/__init__.py", "MARGIN = 1.0", "MARGIN = 1.1"), V.CODE, None),
        ("a variable without effect", set_variable("LC_ALL", "C"), V.REPRODUCED, None),
    ]


def _let_time_go_by(directory: Path, environ: dict[str, str]) -> None:
    laid = os.stat(directory / "gan.yaml").st_mtime
    os.utime(directory / "gan.yaml", (laid - 90, laid - 90))


def _new_toolkit(directory: Path, environ: dict[str, str]) -> None:
    old = directory / "site/toolkit-1.4.0.dist-info"
    old.rename(directory / "site/toolkit-1.5.0.dist-info")
    edit("site/toolkit-1.5.0.dist-info/METADATA", "1.4.0", "1.5.0")(directory, environ)
    edit("site/toolkit/__init__.py", "MARGIN = 1.0", "MARGIN = 0.9")(directory, environ)


def _hide_yaml(directory: Path, environ: dict[str, str]) -> None:
    (directory / "yaml.py").write_text("def safe_load(file):\n    return {'lr': 0.001, 'hinge': 1.3}\n")


def _change_points(directory: Path, environ: dict[str, str]) -> None:
    import numpy as np

    points = np.load(directory / "points.npy")
    points[::3] += 0.25
    np.save(directory / "points.npy", points)


def _change_teacher(directory: Path, environ: dict[str, str]) -> None:
    import torch

    torch.save(torch.load(directory / "teacher.pt") * 1.1, directory / "teacher.pt")


def _touch(directory: Path, environ: dict[str, str]) -> None:
    for name in ("rows.pt", "train.py", "clip.json"):
        os.utime(directory / name)
    (directory / "README.md").write_text("what was tried\n")


def _patch_by_path(directory: Path, environ: dict[str, str]) -> None:
    (directory / "hooks").mkdir()
    (directory / "hooks/sitecustomize.py").write_text("import torch\ntorch.tanh = torch.nn.functional.tanh = torch.relu\n"
                                                      "torch.nn.Tanh.forward = lambda self, x: torch.relu(x)\n")  # fmt: skip
    environ["PYTHONPATH"] = os.pathsep.join([str(directory / "hooks"), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _touch_first_part(directory: Path, environ: dict[str, str]) -> None:
    os.utime(directory / "parts/a.txt")


def _stale_cache(directory: Path, environ: dict[str, str]) -> None:
    import torch

    torch.save(torch.load(directory / "cache.pt").roll(3, 0), directory / "cache.pt")
