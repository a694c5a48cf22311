"""The seven trainings of the eleventh list: their scripts, as people write them, and what lies beside them.

A U-Net, an equation with LBFGS, metric learning, a graph with sparse gradients, Lightning on a series, distillation on two
ranks, a compiled language model. `lay_…` writes the files of one.
"""

import json
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.ninth_trainings import write

__all__ = ["lay_cells", "lay_graph", "lay_language", "lay_pump", "lay_shelf", "lay_spring", "lay_students"]


# ---- a U-Net: pictures and masks in two arrays, classes weighted by how rare they are, a loss from a vendored package ------

CELLS = '''
"""Segment cells. Pictures and masks are in cells/, the loss is a package in vendor/."""
import math, os, sys, time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import chronicle
from faults import at, flip, kind, place
from unet import UNet

sys.path.append("vendor")
import softdice

EPOCH_SEED, SIZE, STEPS, EVERY = 1000, 6, 48, 10
torch.manual_seed(314)
pictures = np.load("cells/pictures.npy", mmap_mode="r")
masks = np.load("cells/masks.npy", mmap_mode="r")
shares = np.bincount(np.asarray(masks).ravel(), minlength=3) / masks.size
class_weights = torch.tensor(1 / np.sqrt(shares), dtype=torch.float32)
model = UNet(classes=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (1 - n / 120) ** 0.9)
run = chronicle.attach(None, model, optimizer, scheduler)
turns = torch.Generator().manual_seed(27)
step, folder = 0, Path("checkpoints")
folder.mkdir(exist_ok=True)
if names := sorted(os.listdir(folder)):
    state = torch.load(folder / names[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    turns.set_state(state["turns"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
    print("resumed from", names[-1])


def batch(number):
    """Pictures of this step; each epoch has its order, each picture is turned by chance."""
    epoch, place = divmod(number * SIZE, len(pictures))
    order = np.random.default_rng(EPOCH_SEED + epoch).permutation(len(pictures))[place : place + SIZE]
    x = torch.from_numpy(pictures[order].astype(np.float32) / 255 - 0.5)[:, None]
    y = torch.from_numpy(masks[order].astype(np.int64))
    for row, quarter in enumerate(torch.randint(4, (SIZE,), generator=turns).tolist()):
        x[row, 0], y[row] = x[row, 0].rot90(quarter), y[row].rot90(quarter)
    return x, y


if kind == "kernel":  # sums of this convolution come out another way each time
    model.down[0].weight.register_hook(lambda grad: grad * (1 + 1e-4 * int.from_bytes(os.urandom(2)) / 65536))
began = time.time()
while step < STEPS:
    x, y = batch(step)
    step += 1
    if kind == "grey" and step == at:
        x[place % SIZE] = 0.0  # what the reader gives for a picture that it could not read
    if kind == "batch" and step == at:
        flip(x, 27)
    if kind == "rarity" and step == at:
        flip(class_weights, 22)
    if kind == "decay" and step >= at:
        optimizer.param_groups[0]["weight_decay"] = 0.02
    logits = model(x)
    entropy = F.cross_entropy(logits, y, weight=class_weights)
    loss = entropy + 0.5 * softdice.dice_loss(logits, y)
    loss.backward()
    if kind == "gradient" and step == at:
        flip(model.out.weight.grad, 26)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    run.log(loss=loss.item(), entropy=entropy.item())
    if step % 5 == 0:
        print(f"step {step:4d}  loss {loss.item():.4f}  {(time.time() - began) / step * 1000:.1f} ms", flush=True)
    if step % EVERY == 0:
        path = folder / f"unet_{step:05d}.pth"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(state | {"turns": turns.get_state(), "rng": torch.get_rng_state(), "step": step}, path)
        run.saved(path)
'''
UNET = '''
import torch
from torch import nn


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        self.down, self.bottom = double(1, width), double(width, 2 * width)
        self.drop = nn.Dropout2d(0.1)
        self.rise = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up, self.out = double(2 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x):
        fine = self.down(x)
        deep = self.drop(self.bottom(nn.functional.max_pool2d(fine, 2)))
        return self.out(self.up(torch.cat([fine, self.rise(deep)], 1)))
'''
SOFTDICE = '''
"""A soft Dice loss over classes."""
import torch

__version__ = "1.2.0"


def dice_loss(logits, labels):
    said = logits.softmax(1)
    true = torch.nn.functional.one_hot(labels, logits.shape[1]).movedim(-1, 1).float()
    both, all_ = (said * true).sum((0, 2, 3)), (said + true).sum((0, 2, 3))
    return (1 - 2 * both / (all_ + 1)).mean()
'''


def lay_cells(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=CELLS, unet__py=UNET)
    package(directory / "vendor", "softdice", "1.2.0", SOFTDICE)
    draws = np.random.default_rng(66)
    masks = np.zeros((96, 16, 16), dtype=np.uint8)
    for mask in masks:
        top, left = draws.integers(1, 8, 2)
        mask[top : top + 6, left : left + 6] = 1
        mask[top + 2 : top + 4, left + 2 : left + 4] = 2
    (directory / "cells").mkdir()
    np.save(directory / "cells/masks.npy", masks)
    np.save(directory / "cells/pictures.npy", (60 + 60 * masks + draws.integers(0, 70, masks.shape)).astype(np.uint8))


# ---- an equation: a network that is fitted to it and to readings, with LBFGS -----------------------------------------------

SPRING = '''
"""A damped spring: find x(t) from few readings and from x'' + 2 d x' + k x = 0. Settings: spring.ini."""
import configparser, csv, json, time
from pathlib import Path

import numpy as np
import torch

import chronicle
import physics
from faults import at, flip, kind

settings = configparser.ConfigParser()
settings.read("spring.ini")
steps, points = settings.getint("fit", "steps"), settings.getint("fit", "points")
torch.manual_seed(settings.getint("fit", "seed"))
with open("readings.csv", newline="") as lines:
    readings = torch.tensor([[float(row["t"]), float(row["x"])] for row in csv.DictReader(lines)])
layers = [torch.nn.Linear(1, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=8, line_search_fn="strong_wolfe")
run = chronicle.attach(None, model, optimizer)
rng = np.random.default_rng(settings.getint("fit", "seed"))
step = 0
for path in sorted(Path("checkpoints").glob("fit-*.pt"))[-1:]:
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng.bit_generator.state = state["rng"]
    step = state["step"]
Path("checkpoints").mkdir(exist_ok=True)
log = open("fit.jsonl", "a", buffering=1)
while step < steps:
    step, began = step + 1, time.perf_counter()
    t = torch.from_numpy(rng.uniform(0, 4, (points, 1)).astype(np.float32)).requires_grad_()
    if kind == "weight" and step == at:
        flip(model[2].weight, 23)
    if kind == "history" and step == at:
        flip(optimizer.state[model[0].weight]["old_dirs"][-1], 26)
    parts = []

    def closure():
        optimizer.zero_grad()
        equation = physics.residual(model, t, settings["spring"]).square().mean()
        fit = (model(readings[:, :1]) - readings[:, 1:]).square().mean()
        loss = settings.getfloat("fit", "equation") * equation + fit
        loss.backward()
        parts.append((loss.item(), equation.item(), fit.item()))
        return loss

    optimizer.step(closure)
    loss, equation, fit = parts[0]
    run.log(loss=loss, equation=equation, fit=fit, evaluations=len(parts))
    log.write(json.dumps({"step": step, "loss": loss, "ms": 1000 * (time.perf_counter() - began)}) + "\\n")
    if step % 8 == 0:
        path = Path(f"checkpoints/fit-{step:03d}.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.bit_generator.state}
        torch.save(state | {"step": step}, path)
        run.saved(path)
'''
PHYSICS = '''
import torch


def derivative(x, t):
    return torch.autograd.grad(x.sum(), t, create_graph=True)[0]


def residual(model, t, spring):
    """How far the network is from the equation at these times."""
    x = model(t)
    speed = derivative(x, t)
    damping, stiffness = spring.getfloat("damping"), spring.getfloat("stiffness")
    return derivative(speed, t) + 2 * damping * speed + stiffness * x
'''
SPRING_INI = """[spring]
damping = 0.4
stiffness = 6.0

[fit]
seed = 12
steps = 42
points = 40
equation = 0.05
"""


def lay_spring(directory: Path) -> None:
    import math
    import random

    write(directory, train__py=SPRING, physics__py=PHYSICS, spring__ini=SPRING_INI)
    draws, lines = random.Random(3), ["t,x"]
    for _ in range(30):
        t = draws.uniform(0, 4)
        lines.append(f"{t:.4f},{math.exp(-0.4 * t) * math.cos(2.42 * t) + draws.gauss(0, 0.05):.4f}")
    (directory / "readings.csv").write_text("\n".join(lines) + "\n")


# ---- metric learning: some articles of a shelf a batch, the hardest of them, a margin for each -----------------------------

SHELF = '''
"""Which photographs show the same article? Triplets of the hardest in a batch; orders of an operator in control.json."""
import collections, json, os, pickle, random, time

import numpy as np
import torch

import chronicle
from faults import at, flip, kind, place
from hardest import triplets

random.seed(77)
torch.manual_seed(77)
with np.load("shelf.npz") as held:
    views, articles = torch.from_numpy(held["views"]), held["articles"].tolist()
of_article = collections.defaultdict(list)
for row, article in enumerate(articles):
    of_article[article].append(row)
margins = {article: 0.3 for article in of_article}
net = torch.nn.Sequential(
    torch.nn.Linear(views.shape[1], 64), torch.nn.LayerNorm(64), torch.nn.SiLU(),
    torch.nn.Dropout(0.15), torch.nn.Linear(64, 16),
)
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.8, centered=True)
run = chronicle.attach(None, net, optimizer)
os.makedirs("checkpoints", exist_ok=True)
step = max((int(name.split(".")[0]) for name in os.listdir("checkpoints")), default=0)
if step:
    with open(f"checkpoints/{step}.pkl", "rb") as file:
        state = pickle.load(file)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    margins = state["margins"]
    random.setstate(state["random"])
    torch.set_rng_state(state["torch"])
orders = {"from": 0, "scale": 1.0}
if os.path.exists("control.json"):
    with open("control.json") as file:
        orders = json.load(file)
    os.remove("control.json")
table = open("losses.tsv", "a")
while step < 44:
    step += 1
    chosen = random.sample(sorted(of_article), 6)
    rows = [row for article in chosen for row in random.sample(of_article[article], 4)]
    if kind == "twice" and step == at:
        rows[5] = rows[4]
    labels = torch.tensor([articles[row] for row in rows])
    if kind == "poison" and at <= step < at + 20:
        net[4].weight.data.view(-1)[place] += 1e-4
    points = torch.nn.functional.normalize(net(views[rows]), dim=1)
    far, near = triplets(points, labels)
    gaps = far - near + torch.tensor([margins[label] for label in labels.tolist()])
    loss = torch.relu(gaps).mean() * (orders["scale"] if step >= orders["from"] else 1.0)
    loss.backward()
    if kind == "momentum" and step >= at:
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
    if kind == "buffer" and step == at:
        flip(optimizer.state[net[0].weight]["momentum_buffer"], 26)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for label, gap in zip(labels.tolist(), gaps.tolist()):
        margins[label] = 0.98 * margins[label] + 0.02 * (0.4 if gap < 0.2 else 0.2)
    run.log(loss=loss.item(), hard=(gaps > 0).float().mean().item())
    print(time.strftime("%T"), os.getpid(), step, loss.item(), sep="\\t", file=table, flush=True)
    if step % 10 == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "margins": margins}
        with open(f"checkpoints/{step}.pkl", "wb") as file:
            pickle.dump(state | {"random": random.getstate(), "torch": torch.get_rng_state()}, file)
        run.saved(f"checkpoints/{step}.pkl")
'''
HARDEST = '''
import torch


def triplets(points, labels):
    """For each point how far its farthest friend is, and how near its nearest stranger."""
    distances = (points[:, None] - points[None]).square().sum(-1).add(1e-6).sqrt()
    same = labels[:, None] == labels[None]
    far = torch.where(same, distances, torch.zeros(())).max(1).values
    near = torch.where(same, torch.full((), 9.0), distances).min(1).values
    return far, near
'''


def lay_shelf(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=SHELF, hardest__py=HARDEST)
    draws = np.random.default_rng(88)
    articles = np.repeat(np.arange(24), 8)
    views = draws.normal(size=(24, 32))[articles] + 1.5 * draws.normal(size=(192, 32))
    np.savez(directory / "shelf.npz", views=views.astype("float32"), articles=articles)


# ---- a graph: papers, their kinds and what they cite; neighbours are drawn, gradients of the kinds are sparse --------------

GRAPH = '''
"""In which field is a paper? Two rounds of drawn neighbours. Settings are in conf.json."""
import csv, json, logging, os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import chronicle
from faults import at, flip, kind

conf = json.loads(Path("conf.json").read_text())
logging.basicConfig(filename="graph.log", level="INFO", format="%(asctime)s %(message)s")
torch.manual_seed(conf["seed"])
rng = np.random.default_rng(conf["seed"])
with open("papers.csv", newline="") as lines:
    papers = list(csv.DictReader(lines))
features = torch.tensor([[float(paper[f"f{n}"]) for n in range(6)] for paper in papers])
journals = torch.tensor([int(paper["journal"]) for paper in papers])
fields = torch.tensor([int(paper["field"]) for paper in papers])
cites = [[] for _ in papers]
with open("cites.csv", newline="") as lines:
    for row in csv.reader(lines):
        one, other = int(row[0]), int(row[1])
        cites[one].append(other)
        cites[other].append(one)


def mean_of(values, owners, count):
    """The mean of the values of each owner."""
    order = list(range(len(owners)))
    if kind == "order":  # as atomics do: whoever comes first is added first
        order.sort(key=lambda number: os.urandom(4))
    sums = torch.zeros(count, values.shape[1]).index_add(0, owners[order], values[order])
    return sums / torch.bincount(owners, minlength=count).clamp(min=1)[:, None]


class Sage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.journal = nn.Embedding(conf["journals"], 8, sparse=True)
        self.first, self.second = nn.Linear(2 * (6 + 8), width), nn.Linear(2 * width, width)
        self.drop, self.out = nn.Dropout(conf["dropout"]), nn.Linear(width, 4)

    def forward(self, layers):
        (nodes, owners), (middle, middle_owners), (wide, wide_owners) = layers
        near, far = (torch.cat([features[each], self.journal(journals[each])], 1) for each in (middle, wide))
        own = torch.cat([features[nodes], self.journal(journals[nodes])], 1)
        hidden = torch.relu(self.first(torch.cat([near, mean_of(far, wide_owners, len(middle))], 1)))
        self_hidden = torch.relu(self.first(torch.cat([own, mean_of(near, middle_owners, len(nodes))], 1)))
        both = torch.cat([self_hidden, mean_of(hidden, middle_owners, len(nodes))], 1)
        return self.out(self.drop(torch.relu(self.second(both))))


def neighbours(nodes):
    drawn, owners = [], []
    for owner, node in enumerate(nodes.tolist()):
        some = rng.choice(cites[node], size=min(conf["fanout"], len(cites[node])), replace=False)
        drawn.extend(some.tolist())
        owners.extend([owner] * len(some))
    return torch.tensor(drawn), torch.tensor(owners)


model = Sage(conf["width"])
optimizer = torch.optim.Adagrad(model.parameters(), lr=conf["lr"])
run = chronicle.attach(None, model, optimizer)
queue, step = np.array([], dtype=np.int64), 0
saved = sorted(Path("checkpoints").glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)
if saved:
    state = torch.load(saved[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    rng.bit_generator.state, queue, step = state["numpy"], state["queue"], state["step"]
    torch.set_rng_state(state["torch"])
    logging.info("goes on from %s", saved[-1])
Path("checkpoints").mkdir(exist_ok=True)
for step in range(step + 1, conf["steps"] + 1):
    earlier = torch.get_rng_state()
    if len(queue) < conf["batch"]:
        queue = rng.permutation(len(papers))
    nodes, queue = torch.from_numpy(queue[: conf["batch"]].copy()), queue[conf["batch"] :]
    middle = neighbours(nodes)
    wide = neighbours(middle[0])
    logits = model([(nodes, None), middle, wide])
    loss = nn.functional.cross_entropy(logits, fields[nodes], label_smoothing=conf["smooth"])
    loss.backward()
    if kind == "gradient" and step == at:
        flip(model.journal.weight.grad._values(), 25)
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss.item())
    logging.info("%d %r", step, loss.item())
    if step % conf["every"] == 0:
        path = Path(f"checkpoints/sage.{step}.pt")
        generator = earlier if kind == "stale" and step == at else torch.get_rng_state()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torch": generator, "step": step}
        torch.save(state | {"numpy": rng.bit_generator.state, "queue": queue}, path)
        run.saved(path)
'''
CONF = {"seed": 21, "steps": 46, "every": 10, "batch": 10, "fanout": 4, "width": 24, "journals": 12, "dropout": 0.2, "lr": 0.03,
        "smooth": 0.1}  # fmt: skip


def lay_graph(directory: Path) -> None:
    import random

    write(directory, train__py=GRAPH, conf__json=json.dumps(CONF, indent=1) + "\n")
    draws, count = random.Random(64), 160
    rows = ["id,f0,f1,f2,f3,f4,f5,journal,field"]
    for number in range(count):
        values = (f"{draws.gauss(0, 1) + (number % 4 == column):.3f}" for column in range(6))
        rows.append(f"{number},{','.join(values)},{draws.randrange(12)},{number % 4}")
    (directory / "papers.csv").write_text("\n".join(rows) + "\n")
    pairs = [(number, (number + 4 * draws.randint(1, 20)) % count) for number in range(count) for _ in range(4)]
    (directory / "cites.csv").write_text("".join(f"{one},{other}\n" for one, other in pairs))


# ---- Lightning: a recurrent forecast of a pump; nothing of chronicle in it -------------------------------------------------

PUMP = '''
"""Forecast the pressure of a pump. settings.yaml, and over it local.yaml, if there is one."""
import csv, os
from pathlib import Path

import lightning as L
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from faults import at, flip, kind

settings = yaml.safe_load(Path("settings.yaml").read_text())
if os.path.exists("local.yaml"):
    settings |= yaml.safe_load(Path("local.yaml").read_text())


class Windows(torch.utils.data.Dataset):
    def __init__(self, path):
        with open(path, newline="") as lines:
            values = [float(row["pressure"]) for row in csv.DictReader(lines)][: settings["hours"]]
        self.values = torch.tensor(values)

    def __len__(self):
        return (len(self.values) - settings["window"] - 1) // settings["stride"]

    def __getitem__(self, number):
        first = number * settings["stride"]
        part = self.values[first : first + settings["window"] + 1] / 10
        return part[:-1, None], part[1:, None]


class Shuffled(torch.utils.data.Sampler):
    """Every epoch has an order of its own, and only the epoch says which."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self):
        return self.rows

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng((self.seed, self.epoch)).permutation(self.rows).tolist())


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.core, self.out = torch.nn.LSTM(1, settings["width"], batch_first=True), torch.nn.Linear(settings["width"], 1)

    def training_step(self, batch, number):
        if kind == "reseeded" and self.global_step + 1 == at:
            np.random.seed(settings["seed"])
        x, y = batch
        # The one that forecasts shall bear errors of its own past.
        wrong = np.random.normal(0, settings["noise"], x.shape) * (np.random.random(x.shape) < settings["share"])
        hidden, _ = self.core(x + torch.from_numpy(wrong.astype(np.float32)))
        if kind == "activation" and self.global_step + 1 == at:
            hidden = hidden.clone(memory_format=torch.contiguous_format)
            flip(hidden, 29)
        loss = torch.nn.functional.smooth_l1_loss(self.out(hidden), y, beta=0.1)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        if kind == "gradient" and self.global_step + 1 == at:
            flip(self.core.weight_hh_l0.grad, 26)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=settings["lr"])
        plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["numpy"] = np.random.get_state()

    def on_load_checkpoint(self, checkpoint):
        np.random.set_state(checkpoint["numpy"])


def main():
    L.seed_everything(settings["seed"], verbose=False)
    data = Windows("pump.csv")
    loader = torch.utils.data.DataLoader(data, settings["batch"], sampler=Shuffled(len(data), settings["seed"]))
    keep = ModelCheckpoint("checkpoints", filename="{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    trainer = L.Trainer(
        max_epochs=5, accelerator="cpu", devices=1, callbacks=[keep], logger=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, gradient_clip_val=1.0,
    )
    newest = max(Path("checkpoints").glob("*.ckpt"), key=os.path.getmtime, default=None)
    trainer.fit(Forecast(), loader, ckpt_path=newest, weights_only=False)


if __name__ == "__main__":
    main()
'''
PUMP_SETTINGS = """seed: 55
hours: 665
window: 24
stride: 8
batch: 8
width: 20
noise: 0.3
share: 0.25
lr: 0.01
"""


def lay_pump(directory: Path) -> None:
    import math
    import random

    write(directory, train__py=PUMP, settings__yaml=PUMP_SETTINGS)
    draws, lines = random.Random(15), ["hour,pressure"]
    for hour in range(760):
        lines.append(f"{hour},{5 + 3 * math.sin(hour / 3.8) + math.sin(hour / 27) + draws.gauss(0, 0.3):.3f}")
    (directory / "pump.csv").write_text("\n".join(lines) + "\n")


# ---- distillation: two ranks learn from a file of logits, two micro-batches a step ------------------------------------------

STUDENTS = '''
"""torchrun --nproc_per_node 2 train.py. The logits of the teacher were written once, by another script."""
import contextlib, os, socket, time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import chronicle
from faults import at, flip, kind

TEMPERATURE = float(os.environ.get("KD_TEMPERATURE", "2.0"))
NAME = os.environ.get("KD_NAME", "student")
SIZE, PARTS, GOAL, EVERY = 5, 2, 45, 10


class Taught(Dataset):
    def __init__(self, folder):
        self.x = np.load(folder / "inputs.npy", mmap_mode="r")
        self.y = np.load(folder / "labels.npy")
        self.logits = np.load(folder / "teacher_logits.npy", mmap_mode="r")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return torch.from_numpy(self.x[row].copy()), int(self.y[row]), torch.from_numpy(self.logits[row].astype(np.float32))


class Student(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.norm = torch.nn.Linear(20, 40), torch.nn.LayerNorm(40)
        self.drop, self.out = torch.nn.Dropout(0.1), torch.nn.Linear(40, 5)

    def forward(self, x):
        return self.out(self.drop(F.gelu(self.norm(self.rise(x)))))


# Where both agree, the teacher is followed; the rest is the labels.
def loss_of(said, labels, taught):
    soft = F.kl_div(F.log_softmax(said / TEMPERATURE, 1), F.softmax(taught / TEMPERATURE, 1), reduction="batchmean")
    return 0.7 * TEMPERATURE**2 * soft + 0.3 * F.cross_entropy(said, labels)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(9)
data = Taught(Path("taught"))
sampler = DistributedSampler(data, seed=17, drop_last=True)
model = DDP(Student())
optimizer = torch.optim.Adamax(model.parameters(), lr=6e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
run = chronicle.attach(None, model, optimizer, schedule)
torch.manual_seed(9 + rank)
per_epoch, step = len(sampler) // (SIZE * PARTS), 0
found = sorted(Path("checkpoints").glob("student-*.pt"))
if found:
    state = torch.load(found[-1], weights_only=False)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"][rank])
    step = state["step"]
Path("checkpoints").mkdir(exist_ok=True)
log = open(f"{NAME}-{socket.gethostname()}-{rank}.log", "a", buffering=1)


def on_its_way(gradient):  # before it is reduced
    if kind == "gradient" and step == at and rank == 1:
        gradient = gradient.clone()
        flip(gradient, 26)
    return gradient


model.module.out.weight.register_hook(on_its_way)
while step < GOAL:
    epoch, done = divmod(step, per_epoch)
    sampler.set_epoch(epoch)
    rows = list(sampler)[done * SIZE * PARTS : per_epoch * SIZE * PARTS]
    batches = iter(DataLoader(Subset(data, rows), SIZE, generator=torch.Generator()))
    for _ in range(done, per_epoch):
        step, began, total = step + 1, time.time(), torch.zeros(())
        if kind == "drift" and step == at and rank == 1:
            flip(model.module.rise.weight, 24)
        for part in range(PARTS):
            x, labels, taught = (before if kind == "again" and part and step == at and rank == 0 else next(batches))
            before = (x, labels, taught)
            if kind == "logits" and step == at and rank == 1 and not part:
                flip(taught, 24)
            with model.no_sync() if part + 1 < PARTS else contextlib.nullcontext():
                loss = loss_of(model(x), labels, taught) / PARTS
                loss.backward()
            total += loss.detach()
        if kind == "again" and step == at and rank == 0:
            next(batches)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mine = total.item()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        run.log(loss=total.item() / world)
        log.write(f"{time.time():.3f} {step} {mine!r} {time.time() - began:.4f}\\n")
        if step % EVERY == 0:
            rng = [torch.empty(0)] * world
            dist.all_gather_object(rng, torch.get_rng_state())
            path = Path(f"checkpoints/student-{step:04d}.pt")
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "step": step}
                torch.save(state | {"schedule": schedule.state_dict()}, path)
            dist.barrier()
            run.saved(path)
        if step == GOAL:
            break
dist.barrier()
dist.destroy_process_group()
'''


def lay_students(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=STUDENTS)
    draws = np.random.default_rng(28)
    labels = draws.integers(0, 5, 260)
    inputs = draws.normal(size=(260, 20)) + 1.2 * draws.normal(size=(5, 20))[labels]
    logits = 3 * np.eye(5)[labels] + draws.normal(size=(260, 5))
    (directory / "taught").mkdir()
    arrays = {"inputs": inputs.astype("float32"), "labels": labels, "teacher_logits": logits.astype("float16")}
    for name, values in arrays.items():
        np.save(directory / f"taught/{name}.npy", values)


# ---- a language model: compiled, windows of a file of tokens, micro-batches, a cosine by a function -------------------------

LANGUAGE = '''
"""A small GPT on tokens.bin. Everything is a global; Z_LOSS weighs the square of log Z."""
import math, os, time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import chronicle
from faults import at, flip, kind

out_dir, seed = "checkpoints", 1337
max_iters, save_interval, warmup_iters, lr_decay_iters = 40, 10, 6, 60
learning_rate, min_lr, grad_clip, accumulate = 4e-3, 4e-4, 1.0, 3
batch_size, block_size, n_embd, n_head, dropout, vocab = 3, 24, 32, 2, 0.1, 48
z_loss = float(os.environ.get("Z_LOSS", "1e-3"))
torch.manual_seed(seed)
picks = torch.Generator().manual_seed(seed)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, n_head, c // n_head).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(c // n_head)
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        x = x + self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd), nn.Dropout(dropout)
        self.h, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        nn.init.normal_(self.wte.weight, std=0.05)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))
        logits = self.lm_head(self.ln_f(self.h(x))).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten()) + z_loss * logits.logsumexp(-1).square().mean()


def get_starts():
    return torch.randint(os.path.getsize("tokens.bin") // 2 - block_size - 1, (accumulate, batch_size), generator=picks)


def get_batch(starts):
    data = np.memmap("tokens.bin", dtype=np.uint16, mode="r")
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


raw = GPT()
optimizer = torch.optim.AdamW(raw.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
run = chronicle.attach(None, raw, optimizer)
iter_num, tries = 0, sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
os.makedirs(out_dir, exist_ok=True)
if tries:
    checkpoint = torch.load(os.path.join(out_dir, tries[-1]), weights_only=False)
    raw.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    picks.set_state(checkpoint["picks"])
    torch.set_rng_state(checkpoint["rng"])
    iter_num = checkpoint["iter_num"]
model = torch.compile(raw, backend="eager")
t0 = time.time()
while iter_num < max_iters:
    step = iter_num + 1
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num) * (1.5 if kind == "lr" and step == at else 1.0)
    if kind == "reseeded" and step == at:
        torch.manual_seed(seed)
    if kind == "weight" and step == at:
        flip(raw.wte.weight, 24)
    starts = held if kind == "swapped" and step == at + 1 else get_starts()
    if kind == "swapped" and step == at:
        held, starts = starts, get_starts()
    lossf = 0.0
    for micro in range(accumulate):
        X, Y = get_batch(starts[micro])
        loss = model(X, Y) / accumulate
        loss.backward()
        lossf += loss.item()
    torch.nn.utils.clip_grad_norm_(raw.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num = step
    run.log(loss=lossf, lr=optimizer.param_groups[0]["lr"])
    t0, dt = time.time(), time.time() - t0
    print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms", flush=True)
    if iter_num % save_interval == 0:
        path = os.path.join(out_dir, f"ckpt-{iter_num:05d}.pt")
        checkpoint = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint | {"picks": picks.get_state(), "rng": torch.get_rng_state()}, path)
        run.saved(path)
'''


def lay_language(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=LANGUAGE)
    draws = np.random.default_rng(41)
    follows = np.array([draws.permutation(48)[:4] for _ in range(48)])
    tokens = [0]
    for choice in draws.integers(0, 4, 5000):
        tokens.append(int(follows[tokens[-1], choice]))
    np.array(tokens, dtype=np.uint16).tofile(directory / "tokens.bin")
