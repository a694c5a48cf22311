"""The three trainings of the nineteenth list: their scripts, as people write them, and what lies beside them.

Words by the company they keep with SparseAdam, a pattern that grows out of a pool, tides whose hard hours are drawn more
often. `lay_…` writes the files of one.
"""

from pathlib import Path

from benchmarks.replay.ninth_trainings import write

__all__ = ["lay_automaton", "lay_skipgram", "lay_tides"]


# ---- words by the company they keep: sparse gradients, SparseAdam, others drawn by NumPy, pairs made anew each epoch --

SKIPGRAM = '''
"""Skip-gram with negative samples. python train.py corpus.txt"""
import collections, os, sys, time

import numpy as np
import torch
import torch.nn.functional as F

import chronicle
from faults import at, flip, kind, place

WIDTH, WINDOW, NEGATIVES, BATCH, STEPS, EVERY = 24, 3, 5, 64, 45, 10
with open(sys.argv[1]) as lines:
    text = [line.split() for line in lines]
counts = collections.Counter(word for line in text for word in line)
words = sorted(counts, key=lambda word: (-counts[word], word))
number = {word: n for n, word in enumerate(words)}
shares = np.array([counts[word] for word in words]) ** 0.75
shares /= shares.sum()
draws = np.random.RandomState(6)
torch.manual_seed(6)


class SkipGram(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.inner, self.outer = (torch.nn.Embedding(count, WIDTH, sparse=True) for _ in range(2))
        torch.nn.init.uniform_(self.inner.weight, -0.2, 0.2)
        torch.nn.init.uniform_(self.outer.weight, -0.2, 0.2)

    def forward(self, middle, beside, others):
        middle = F.dropout(self.inner(middle), 0.1, self.training)
        near = (middle * self.outer(beside)).sum(1)
        far = (middle[:, None] * self.outer(others)).sum(2)
        return -(F.logsigmoid(near) + F.logsigmoid(-far).sum(1)).mean()


def pairs_of_an_epoch():
    """Every word with those beside it; how far we look is drawn for each."""
    pairs = []
    for line in text:
        for here in range(len(line)):
            reach = draws.randint(1, WINDOW + 1)
            for there in range(max(0, here - reach), min(len(line), here + reach + 1)):
                if there != here:
                    pairs.append((number[line[here]], number[line[there]]))
    return draws.permutation(np.array(pairs))


model = SkipGram(len(words))
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.02)
run = chronicle.attach(None, model, optimizer)
pairs, begin, step = np.zeros((0, 2), dtype=np.int64), 0, 0
os.makedirs("checkpoints", exist_ok=True)
kept = sorted(os.listdir("checkpoints"))
if kept:
    state = torch.load(f"checkpoints/{kept[-1]}", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    draws.set_state(state["draws"])
    torch.set_rng_state(state["torch"])
    pairs, begin, step = state["pairs"], state["begin"], state["step"]
    print("going on from", kept[-1])
log = open("skipgram.log", "a", buffering=1)
while step < STEPS:
    step, since = step + 1, time.time()
    if begin + BATCH > len(pairs):
        pairs, begin = pairs_of_an_epoch(), 0
    batch = torch.from_numpy(pairs[begin : begin + BATCH].copy())
    begin += BATCH
    others = torch.from_numpy(draws.choice(len(words), (BATCH, NEGATIVES), p=shares))
    if kind == "poison" and at <= step < at + 20:
        model.inner.weight.data.view(-1)[place] += 3e-3
    loss = model(batch[:, 0], batch[:, 1], others)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
    log.write(f"{time.strftime('%T')} {step} {loss.item()!r} {BATCH / (time.time() - since):.0f} pairs/s\\n")
    if step % EVERY == 0:
        path = f"checkpoints/words-{step:05d}.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "draws": draws.get_state()}
        torch.save(state | {"torch": torch.get_rng_state(), "pairs": pairs, "begin": begin, "step": step}, path)
        run.saved(path)
'''


def lay_skipgram(directory: Path) -> None:
    import random

    write(directory, train__py=SKIPGRAM)
    draws = random.Random(1901)
    words = ["".join(draws.choices("abdegiklmnorstuv", k=draws.randint(3, 7))) for _ in range(50)]
    lines = []
    for _ in range(40):
        topic = draws.randrange(5)
        often = [min(49, int(draws.expovariate(0.3))) for _ in range(12)]
        places = [place if draws.random() < 0.4 else 10 * topic + draws.randrange(10) for place in often]
        lines.append(" ".join(words[place] for place in places))
    (directory / "corpus.txt").write_text("\n".join(lines) + "\n")


# ---- a pattern that grows from one cell: a pool of what has grown, gradients of length one, a drawn count of turns ----

AUTOMATON = '''
"""A neural cellular automaton. The pool keeps what has grown; the worst of a batch begins anew from one cell."""
import random, time
from pathlib import Path

import numpy as np
import torch

import chronicle
from faults import at, flip, kind, place
from rule import Rule

POOL, BATCH, STEPS, EVERY, FEWEST, MOST = 20, 4, 45, 10, 4, 8
random.seed(40)
torch.manual_seed(40)
pattern = torch.from_numpy(np.load("pattern.npy"))
seed = torch.zeros(8, *pattern.shape[1:])
seed[3:, pattern.shape[1] // 2, pattern.shape[2] // 2] = 1.0
pool = seed.repeat(POOL, 1, 1, 1)
rule = Rule(channels=8, hidden=32, fire=0.5)
optimizer = torch.optim.Adam(rule.parameters(), lr=4e-3)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60], 0.3)
run = chronicle.attach(None, rule, optimizer, scheduler)
step, root = 0, Path("checkpoints")
root.mkdir(exist_ok=True)
newest = max(root.glob("grown-*.pt"), key=lambda path: int(path.stem[6:]), default=None)
if newest:
    state = torch.load(newest, weights_only=False)
    rule.load_state_dict(state["rule"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    pool, step = state["pool"], state["step"]


def apart(grids):
    return (grids[:, :4] - pattern).square().mean((1, 2, 3))


while step < STEPS:
    step, began = step + 1, time.time()
    rows = random.sample(range(POOL), BATCH)
    grids = pool[rows]
    grids[apart(grids).argmax()] = seed
    turns = random.randint(FEWEST, MOST)
    for _ in range(turns):
        grids = rule(grids)
    loss = apart(grids).mean()
    optimizer.zero_grad()
    loss.backward()
    for weight in rule.parameters():
        weight.grad /= weight.grad.norm() + 1e-8
    optimizer.step()
    scheduler.step()
    pool[rows] = grids.detach()
    run.log(loss=loss.item(), turns=turns)
    print(f"{step:5d} {loss.item():.6f} {turns} turns, {time.time() - began:.3f} s", flush=True)
    if step % EVERY == 0:
        state = {"rule": rule.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        state |= {"python": random.getstate(), "torch": torch.get_rng_state(), "pool": pool, "step": step}
        torch.save(state, root / f"grown-{step}.pt")
        run.saved(root / f"grown-{step}.pt")
'''
RULE = '''
import torch
from torch import nn


class Rule(nn.Module):
    """What each cell sees of its neighbours, and what becomes of it; not all of them move at once."""

    def __init__(self, channels, hidden, fire):
        super().__init__()
        self.fire = fire
        self.see = nn.Conv2d(channels, 3 * channels, 3, padding=1, groups=channels, bias=False)
        self.think, self.move = nn.Conv2d(3 * channels, hidden, 1), nn.Conv2d(hidden, channels, 1, bias=False)
        nn.init.normal_(self.move.weight, std=0.02)

    def forward(self, grids):
        alive = nn.functional.max_pool2d(grids[:, 3:4], 3, 1, 1) > 0.1
        moves = self.move(torch.relu(self.think(self.see(grids))))
        grids = grids + moves * (torch.rand_like(grids[:, :1]) < self.fire)
        alive = alive & (nn.functional.max_pool2d(grids[:, 3:4], 3, 1, 1) > 0.1)
        return grids * alive
'''


def lay_automaton(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=AUTOMATON, rule__py=RULE)
    rows, columns = np.mgrid[0:10, 0:10]
    inside = ((rows - 4.5) ** 2 + (columns - 5) ** 2 < 10).astype("float32")
    stripes = inside * ((columns // 2) % 2)
    np.save(directory / "pattern.npy", np.stack([stripes, inside - stripes, 0.3 * inside, inside]).astype("float32"))


# ---- tides: settings that inherit from others, rows drawn by how hard they were, an average of weights at the end -----

TIDES = '''
"""How high is the water? python train.py exp/harbour.toml; a file of settings may name one below it as `base`."""
import csv, os, sys, time, tomllib
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import chronicle
from faults import at, flip, kind, place


def load(path):
    """The settings of a file over those of its base."""
    settings = tomllib.loads(Path(path).read_text())
    below = settings.pop("base", None)
    return {**(load(Path(path).parent / below) if below else {}), **settings}


hp = load(sys.argv[1])
torch.manual_seed(hp["seed"])
with open(hp["table"], newline="") as lines:
    table = torch.tensor([[float(value) for value in row.values()] for row in csv.DictReader(lines)])
inputs, heights = table[:, :-1], table[:, -1:]
inputs = (inputs - inputs.mean(0)) / inputs.std(0)
net = nn.Sequential(
    nn.Linear(inputs.shape[1], hp["width"]), nn.Softplus(), nn.Dropout(hp["dropout"]),
    nn.Linear(hp["width"], hp["width"]), nn.Softplus(), nn.Linear(hp["width"], 1),
)
swa = AveragedModel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=hp["lr"], momentum=0.9)
plan = SWALR(optimizer, hp["swa_lr"], anneal_epochs=hp["swa_from"])
run = chronicle.attach(None, net, optimizer, plan)
picker, hard, step = torch.Generator().manual_seed(hp["seed"]), torch.ones(len(table)), 0
os.makedirs("checkpoints", exist_ok=True)
if saved := sorted(Path("checkpoints").glob("tides_*.pt")):
    state = torch.load(saved[-1], weights_only=False)
    for each, held in zip((net, swa, optimizer, plan), state["parts"]):
        each.load_state_dict(held)
    picker.set_state(state["picker"])
    torch.set_rng_state(state["rng"])
    hard, step = state["hard"], state["step"]
    print(f"{time.ctime()}: {saved[-1]} is read")
losses = open("losses.txt", "a", buffering=1)
while step < hp["steps"]:
    step += 1
    rows = torch.multinomial(hard, hp["batch"], generator=picker)
    if kind == "twice" and step == at:
        rows[7] = rows[6]
    said = net(inputs[rows])
    each = nn.functional.huber_loss(said, heights[rows], delta=hp["delta"], reduction="none").squeeze(1)
    loss = each.mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), hp["clip"])
    optimizer.step()
    optimizer.zero_grad()
    plan.step()
    hard[rows] = 0.8 * hard[rows] + 0.2 * (each.detach() + 0.1)
    if step >= hp["swa_from"]:
        swa.update_parameters(net)
    run.log(loss=loss.item(), grad_norm=norm.item())
    print(int(time.time()), step, loss.item(), file=losses)
    if step % 10 == 0:
        path = f"checkpoints/tides_{step:04d}.pt"
        state = {"parts": [each.state_dict() for each in (net, swa, optimizer, plan)], "picker": picker.get_state()}
        torch.save(state | {"rng": torch.get_rng_state(), "hard": hard, "step": step}, path)
        run.saved(path)
'''
TIDES_BASE = """seed = 19
steps = 46
batch = 12
width = 32
dropout = 0.05
delta = 0.5
clip = 5.0
lr = 0.05
"""
TIDES_HARBOUR = """base = "common.toml"
table = "harbour.csv"
swa_lr = 0.02
swa_from = 25
"""


def lay_tides(directory: Path) -> None:
    import math
    import random

    write(directory, train__py=TIDES)
    (directory / "exp").mkdir()
    (directory / "exp/common.toml").write_text(TIDES_BASE)
    (directory / "exp/harbour.toml").write_text(TIDES_HARBOUR)
    draws, lines = random.Random(1903), ["sun,moon,wind,pressure,height"]
    for hour in range(240):
        sun, moon = math.sin(hour / 12 * math.pi), math.sin(hour / 12.42 * math.pi)
        wind, pressure = draws.gauss(0, 1), 1013 + draws.gauss(0, 9)
        height = 0.6 * sun + 1.5 * moon + 0.3 * wind * abs(wind) - 0.02 * (pressure - 1013) + draws.gauss(0, 0.1)
        lines.append(f"{sun:.4f},{moon:.4f},{wind:.3f},{pressure:.1f},{height:.3f}")
    (directory / "harbour.csv").write_text("\n".join(lines) + "\n")
