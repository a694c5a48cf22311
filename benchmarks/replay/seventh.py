"""Planted causes drawn from what happened to people: forty plays on eight trainers, each with the place where it was told.

The seventh list, written on 24 November 2026 by someone who had read neither how replay tells nor its tests, and frozen
before it was played. Nineteen plays are faults of a machine or a race and must be named *hardware or race*; twenty-one are not,
and may never be. `weaker` says where a careful judge may also answer *not told*: nothing that a run writes down compares it.

The trainers: images behind a link with batch norm, pillow and a random generator of their own (plain); characters with a
carried hidden state and two windows a step (plain); a small transformer with a teacher, averaged weights, a loss scaler and
bfloat16 (plain); an actor and a critic with a buffer of experience (plain, two optimizers); two ranks that sum flat buckets by
hand; Accelerate over a folder of tables; HF Trainer; Lightning. They print times, write logs, look at memory, disk and
directories, and are exact.

Before it was frozen, every trainer was run without chronicle from its first to its last step, and again from step 30 on, with
the same loss, gradient norm and sum of weights in every digit at every step (but for those whose cause is not to be exact).
Every cause was then run beside the plain one. The planted ones differ from their step on, and not before (a torn copy is felt
one step later); those done afterwards differ at or before the step that is asked for; what must be reproduced does not differ.
The trigger of a fault is that of the other lists: `fault` and `plant` of `causes.py`, `FAULTS` of `fresh.py`.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.replay.causes import Cause, Training, edit, set_variable
from benchmarks.replay.fresh import FAULTS
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

STEPS, ASKED = 45, 38  # every trainer saves at each tenth step

IMAGES = '''
import csv, glob, os, shutil, sys, time
from pathlib import Path
import numpy as np
import psutil
import torch
import yaml
from tqdm import tqdm
import chronicle
import preprocess
from faults import at, flip, kind, place

config = yaml.safe_load(Path("config.yaml").read_text())
torch.manual_seed(config["seed"])
torch.set_num_threads(1)
began = time.time()
print(time.strftime("%F %T"), shutil.disk_usage(".").free >> 20, "MB free,", psutil.virtual_memory().percent, "% of memory")
os.makedirs("out", exist_ok=True)
images, labels = preprocess.load(sorted(glob.glob("data/current/*.png")), config["cache"])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 8, 3, stride=2), torch.nn.Linear(8 * 36, 4)

    def forward(self, x):
        h = self.first(x)
        if kind == "activation" and step == at:
            flip(h, 24)
        return self.head(torch.relu(self.second(torch.relu(self.norm(h)))).flatten(1))


class Pictures(torch.utils.data.Dataset):
    def __getitem__(self, index):
        x = images[index]
        if draws.random() < 0.5:
            x = x.flip(-1)
        return x + 0.05 * torch.from_numpy(draws.standard_normal(x.shape).astype("float32")), labels[index]


def order(step):
    while True:
        epoch, batch = divmod(step, len(labels) // 8)
        rows = np.random.default_rng([config["seed"], epoch]).permutation(len(labels))
        yield rows[8 * batch : 8 * batch + 8].tolist()
        step += 1


draws = np.random.default_rng(6)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
run = chronicle.attach(None, model, optimizer, schedule)
root, step = Path("checkpoints"), 0
if not root.is_dir():
    root.mkdir()
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    draws.bit_generator.state = saved["draws"]
    step = saved["step"]
last = int(sys.argv[1])
loader = torch.utils.data.DataLoader(Pictures(), batch_sampler=order(step))
table, before = csv.writer(open("out/log.csv", "a", buffering=1)), None
for x, y in tqdm(loader, total=last - step, disable=None):
    step += 1
    if kind == "overwritten" and step == at:
        x[4:] = before[4:]
    before = x.clone()
    if kind == "running" and step == at:
        flip(model.norm.running_var, 22)
    loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=config["smoothing"])
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if kind == "stuck" and step >= at:
        optimizer.state[model.second.weight]["momentum_buffer"].view(-1).view(torch.int32)[place] &= 0x7FFFFFFF
    optimizer.step()
    schedule.step()
    run.log(loss=loss.item())
    table.writerow([step, loss.item(), norm.item(), sum(p.double().sum().item() for p in model.parameters())])
    if step % 10 == 0:
        np.save(f"out/sample-{step}.npy", x[0].numpy())
        path = root / f"step-{step}.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "draws": draws.bit_generator.state, "step": step}, path)
        run.saved(path)
    if step >= last:
        break
print(f"{time.time() - began:.1f} s")
'''
PREPROCESS = '''
import os

import numpy as np
import torch
from PIL import Image

FILTER = Image.Resampling.BILINEAR


def load(names, cache):
    if cache and os.path.exists("cache/images.pt"):
        return torch.load("cache/images.pt")
    images, labels = [], []
    for name in names:
        with Image.open(name) as image:
            images.append(np.asarray(image.convert("RGB").resize((14, 14), FILTER), dtype="float32") / 255 - 0.5)
        labels.append(int(os.path.basename(name)[0]))
    done = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)
    if cache:
        os.makedirs("cache", exist_ok=True)
        torch.save(done, "cache/images.pt")
    return done
'''
CHARACTERS = '''
import json, logging, os, sys, time
from pathlib import Path
import torch
import chronicle
from faults import at, flip, kind, place

logging.basicConfig(filename="train.log", level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
torch.manual_seed(11)
torch.set_num_threads(1)
text = Path("text.txt").read_text()
vocabulary = json.loads(Path("vocab.json").read_text())
settings = json.loads(Path("settings.json").read_text())
tokens = torch.tensor([vocabulary[letter] for letter in text]).view(6, -1)
embed, cell = torch.nn.Embedding(len(vocabulary), 24), torch.nn.GRU(24, 48, 2, dropout=0.1, batch_first=True)
model = torch.nn.ModuleDict({"embed": embed, "cell": cell, "head": torch.nn.Linear(48, len(vocabulary))})
optimizer = torch.optim.RMSprop(model.parameters(), lr=settings["lr"], momentum=0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)
run = chronicle.attach(None, model, optimizer, plateau)
root, step, hidden, recent = Path("checkpoints"), 0, torch.zeros(2, 6, 48), []
root.mkdir(exist_ok=True)
logging.info("checkpoints there: %s", sorted(os.listdir(root)))
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    plateau.load_state_dict(saved["plateau"])
    torch.set_rng_state(saved["rng"])
    step, hidden, recent = saved["step"], saved["hidden"], saved["recent"]
last, began = int(sys.argv[1]), time.perf_counter()
while step < last:
    step += 1
    total = 0.0
    if kind == "hidden" and step == at:
        flip(hidden, 27)
    for part in range(2):
        start = (2 * step + part) * 10
        window = tokens[:, start : start + 11]
        out, hidden = model["cell"](model["embed"](window[:, :-1]), hidden.detach())
        loss = torch.nn.functional.cross_entropy(model["head"](out).flatten(0, 1), window[:, 1:].flatten()) / 2
        if kind == "racing" and step == at and part:
            model["cell"].weight_hh_l1.grad.zero_()
        loss.backward()
        total += loss.item()
    hidden = hidden.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
    optimizer.step()
    optimizer.zero_grad()
    recent = [*recent, total][-6:]
    if step % 6 == 0:
        plateau.step(sum(recent) / 6)
    run.log(loss=total, lr=optimizer.param_groups[0]["lr"])
    with open("log.csv", "a") as log:
        print(step, total, norm.item(), sum(p.double().sum().item() for p in model.parameters()), sep=",", file=log)
    print(f"step {step}: {total:.4f}, {(time.perf_counter() - began) / step:.4f} s a step", flush=True)
    if time.perf_counter() - began > 3600:
        break
    if step % 10 == 0:
        path = root / f"step-{step}.pt"
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "plateau": plateau.state_dict()}
        torch.save({**parts, "rng": torch.get_rng_state(), "step": step, "hidden": hidden, "recent": recent}, path)
        run.saved(path)
'''
TRANSFORMER = '''
import copy, os, sys, time
from pathlib import Path
import numpy as np
import torch
from torch.nn import functional as F
import chronicle
from faults import at, flip, kind, place

torch.manual_seed(21)
torch.set_num_threads(1)
began = time.monotonic()
stream = np.memmap("tokens.bin", dtype="uint16", mode="r")
half = os.environ.get("TRAIN_PRECISION", "bf16") == "bf16"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.mix, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        wide, narrow = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.body = torch.nn.Sequential(wide, torch.nn.GELU(), torch.nn.Dropout(0.1), narrow)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mix(self.first(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if kind == "head" and step == at and self.training:
            kept = torch.ones(4, 1, 1)
            kept[place % 4] = 0
            heads = heads * kept
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.body(self.second(x))


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(64, 32), torch.nn.Parameter(torch.randn(16, 32) * 0.02)
        self.blocks, self.norm = torch.nn.Sequential(Block(), Block()), torch.nn.LayerNorm(32)

    def forward(self, ids):
        return self.norm(self.blocks(self.words(ids) + self.places)) @ self.words.weight.T


def batch():
    starts = torch.randint(len(stream) - 17, (6,), generator=draws)
    rows = torch.from_numpy(np.stack([stream[start : start + 17] for start in starts.tolist()]).astype("int64"))
    return rows[:, :-1], rows[:, 1:]


model, draws = Language(), torch.Generator().manual_seed(3)
average = copy.deepcopy(model).eval().requires_grad_(False)
teacher = torch.load("teacher/model.pt")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=9)
run = chronicle.attach(None, model, optimizer, averages={"ema": average}, scaler=scaler)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(saved["model"])
    average.load_state_dict(saved["average"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["rng"])
    draws.set_state(saved["draws"])
    step = saved["step"]
print("starts at", time.ctime(), "step", step, "on", os.cpu_count(), "cores, load", os.getloadavg()[0])
while step < int(sys.argv[1]):
    step += 1
    x, y = batch()
    if kind == "average" and step == at:
        flip(average.words.weight, 27)
    if kind == "word" and step == at:
        row = model.words.weight.detach()[place].view(torch.int32)
        row ^= 1 << 19
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        logits = model(x)
        with torch.no_grad():
            guide = average(x).float() + teacher[x]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        loss = loss + 0.1 * F.kl_div(logits.float().log_softmax(-1), guide.softmax(-1), reduction="batchmean") / 16
    weight = 1.0
    scaler.scale(loss * weight).backward()
    if kind == "infinite" and step == at:
        model.blocks[0].out.weight.grad.view(-1)[place] = float("inf")
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters()):
            one.lerp_(other, 0.05)
    run.log(loss=loss.item())
    with open("log.csv", "a") as log:
        print(step, loss.item(), norm.item(), sum(p.double().sum().item() for p in model.parameters()), sep=",", file=log)
    if step % 10 == 0:
        path = root / f"step-{step}.pt"
        state = {"model": model, "average": average, "optimizer": optimizer, "scaler": scaler}
        state = copy.deepcopy({name: thing.state_dict() for name, thing in state.items()})
        torch.save({**state, "rng": torch.get_rng_state(), "draws": draws.get_state(), "step": step}, path)
        run.saved(path)
        print(f"{path}: {path.stat().st_size} bytes, {time.monotonic() - began:.1f} s", flush=True)
'''
AGENT = '''
import copy, os, sys, time
from pathlib import Path
sys.path.insert(0, os.environ.get("WORLDS_HOME", "worlds-1.0"))
import numpy as np
import psutil
import torch
import chronicle
import worlds
from faults import at, flip, kind, place

torch.manual_seed(31)
torch.set_num_threads(1)
actor = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2), torch.nn.Tanh())
critic = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
targets = copy.deepcopy(torch.nn.ModuleList([actor, critic]))
of_actor, of_critic = torch.optim.Adam(actor.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=3e-3)
run = chronicle.attach(None, [actor, critic], [of_actor, of_critic])
draws, place_now = torch.Generator().manual_seed(8), torch.tensor([1.0, 0.0, 0.0, -1.0])
buffer = torch.zeros(400, 11)  # state, action, reward, next state
filled, root, step = 0, Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    for name in ("actor", "critic", "targets", "of_actor", "of_critic"):
        vars()[name].load_state_dict(saved[name])
    draws.set_state(saved["draws"])
    place_now, step = saved["place"], saved["step"]
    buffer, filled = saved["buffer"], saved["filled"]
while step < int(sys.argv[1]):
    step += 1
    with torch.no_grad():
        for _ in range(8):
            action = (actor(place_now) + 0.3 * torch.randn(2, generator=draws)).clamp(-1, 1)
            after, reward = worlds.move(place_now, action)
            buffer[filled % 400] = torch.cat([place_now, action, reward.view(1), after])
            filled, place_now = filled + 1, after
    if kind == "reward" and step == at:
        newest_rows = buffer[filled - 8 : filled, 6].view(torch.int32)
        newest_rows ^= 1 << 25
    rows = buffer[torch.randint(min(filled, 400), (32,), generator=draws)]
    state, action, reward, after = rows[:, :4], rows[:, 4:6], rows[:, 6:7], rows[:, 7:]
    with torch.no_grad():
        wanted = reward + 0.9 * targets[1](torch.cat([after, targets[0](after)], 1))
    loss = (critic(torch.cat([state, action], 1)) - wanted).square().mean()
    of_critic.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(critic.parameters(), 10.0)
    if kind == "counter" and step == at:
        flip(of_critic.state[critic[2].weight]["step"], 23)
    of_critic.step()
    cost = -critic(torch.cat([state, actor(state)], 1)).mean()
    of_actor.zero_grad()
    cost.backward()
    of_actor.step()
    with torch.no_grad():
        torn = kind == "torn" and step == at
        for number, (one, other) in enumerate(zip(targets.parameters(), [*actor.parameters(), *critic.parameters()])):
            if not (torn and number >= 5):
                one.lerp_(other, 0.1)
    run.log(loss=loss.item(), actor=cost.item())
    with open("progress.csv", "a") as log:
        weights = [*actor.parameters(), *critic.parameters()]
        print(step, loss.item(), norm.item(), sum(p.double().sum().item() for p in weights), sep=",", file=log)
    if step % 10 == 0:
        print(time.strftime("%H:%M:%S"), step, psutil.Process().memory_info().rss >> 20, "MB", flush=True)
        np.save(f"place-{step}.npy", place_now.numpy())
        path = root / f"step-{step}.pt"
        parts = {"actor": actor, "critic": critic, "targets": targets, "of_actor": of_actor, "of_critic": of_critic}
        parts = copy.deepcopy({name: thing.state_dict() for name, thing in parts.items()})
        more = {"draws": draws.get_state(), "place": place_now, "step": step, "buffer": buffer, "filled": filled}
        torch.save({**parts, **more}, path)
        run.saved(path)
'''
WORLDS = '''
__version__ = "1.0"
FRICTION = 0.1


def move(place, action):
    speed = (1 - FRICTION) * place[2:] + 0.2 * action
    after = place.new_tensor([*(place[:2] + 0.2 * speed).clamp(-2, 2), *speed.clamp(-1, 1)])
    return after, -after[:2].square().sum() - 0.01 * action.square().sum()
'''
RANKS = '''
import glob, os, sys, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import chronicle
from faults import at, flip, kind, place

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
files = sorted(glob.glob("shards/*.npy"))[rank::ranks]
rows = torch.from_numpy(np.concatenate([np.load(name) for name in files]))
torch.manual_seed(41)
net = torch.nn.Sequential(
    torch.nn.Linear(12, 40), torch.nn.SiLU(), torch.nn.Dropout(0.1),
    torch.nn.Linear(40, 40), torch.nn.SiLU(), torch.nn.Linear(40, 3),
)
weights = list(net.parameters())
optimizer = torch.optim.AdamW(weights, lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 60)
run = chronicle.attach(None, net, optimizer, schedule)
torch.manual_seed(50 + rank)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    saved = torch.load(newest[-1], weights_only=False)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    torch.set_rng_state(saved["rng"][rank])
    step = saved["step"]
dist.barrier()
stale = torch.zeros(sum(weight.numel() for weight in weights))
while step < int(sys.argv[1]):
    step += 1
    took = time.perf_counter()
    chosen = torch.arange(6 * (step - 1), 6 * step) * 5 % len(rows)
    x, y = rows[chosen, :12], rows[chosen, 12].long()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    bucket = torch.cat([weight.grad.flatten() for weight in weights])
    if kind == "early" and step == at and rank == 1:
        bucket[1000:] = stale[1000:]
    dist.all_reduce(bucket)
    if kind == "twice" and step == at:
        dist.all_reduce(bucket[:480])
    bucket /= ranks
    stale = bucket.clone()
    start = 0
    for weight in weights:
        weight.grad.copy_(bucket[start : start + weight.numel()].view_as(weight))
        start += weight.numel()
    norm = torch.nn.utils.clip_grad_norm_(weights, 2.0)
    old = weights[2].detach().clone()
    optimizer.step()
    schedule.step()
    if kind == "behind" and step == at and rank == 1:
        weights[2].data.copy_(old)
    run.log(loss=loss.item())
    with open(f"log-{rank}.csv", "a") as log:
        print(step, loss.item(), norm.item(), sum(p.double().sum().item() for p in weights), sep=",", file=log)
    if step % 10 == 0:
        states = [None] * ranks
        dist.all_gather_object(states, torch.get_rng_state())
        if rank == 0:
            print(time.strftime("%F %T"), step, f"{time.perf_counter() - took:.4f} s", os.statvfs(".").f_bavail, flush=True)
            path = root / f"step-{step}.pt"
            parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save({**parts, "rng": states, "step": step}, path)
            run.saved(path)
        dist.barrier()
dist.destroy_process_group()
'''
TABLES = '''
import csv, glob, os, shutil, sys, time
from pathlib import Path
import torch
import yaml
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from tqdm.auto import tqdm
import chronicle
from faults import at, flip, kind, place

settings = yaml.safe_load(open("settings.yml"))
torch.set_num_threads(1)
set_seed(settings["seed"])
accelerator = chronicle.guard(Accelerator(cpu=True, gradient_accumulation_steps=2))
rows = []
for name in sorted(glob.glob("tables/*.csv")):
    with open(name) as table:
        rows += [[float(cell) for cell in row] for row in csv.reader(table)]
rows = torch.tensor(rows)
rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings["seed"]))]
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows[:, :6], rows[:, 6:]), batch_size=4)
net = torch.nn.Sequential(torch.nn.Linear(6, 48), torch.nn.LayerNorm(48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3, amsgrad=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.7)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
step, kept = 0, None
if os.path.exists("checkpoints") and os.listdir("checkpoints"):
    newest = max(Path("checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    accelerator.load_state(str(newest))
    step = int(newest.name[5:])
    loader = skip_first_batches(loader, 2 * step)
accelerator.print(time.ctime(), "free:", shutil.disk_usage(os.getcwd()).free >> 20, "MB")
bar, last, total = tqdm(total=int(sys.argv[1]), initial=step, disable=None), int(sys.argv[1]), 0.0
for x, y in loader:
    with accelerator.accumulate(net):
        loss = torch.nn.functional.huber_loss(net(x), y, delta=settings["delta"])
        accelerator.backward(loss)
        total += loss.item() / 2
        if accelerator.sync_gradients:
            step += 1
            now = [weight.grad.clone() for weight in net.parameters()]
            if kind == "stale" and step == at:
                net[0].weight.grad.copy_(kept[0])
            kept = now
            norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        bar.update()
        chronicle.log(step, loss=total)
        with open("metrics.csv", "a") as log:
            print(step, total, norm.item(), sum(p.double().sum().item() for p in net.parameters()), sep=",", file=log)
        total = 0.0
        if step % 10 == 0:
            accelerator.save_state(f"checkpoints/step-{step}")
        if step >= last:
            break
'''
TRAINER = '''
import os, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
from faults import at, flip, kind, place

set_seed(51)
torch.set_num_threads(1)
tokens = torch.load("tokens.pt")
print("data of", time.ctime(os.path.getmtime("tokens.pt")), "job", os.environ.get("SLURM_JOB_ID", "none"))


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        row = tokens[9 * index : 9 * index + 20]
        return {"input_ids": row, "labels": row}


class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
        if kind == "gradient" and state.global_step + 1 == at:
            flip(model.transformer.h[1].attn.c_proj.weight.grad, 27)

    def on_log(self, args, state, control, logs=None, model=None, **more):
        if "loss" in logs:
            with open("trainer.csv", "a") as log:
                weights = sum(p.double().sum().item() for p in model.parameters())
                print(state.global_step, logs["loss"], self.norm, weights, sep=",", file=log)


small = GPT2Config(vocab_size=40, n_positions=20, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(small)
asked = TrainingArguments(
    "checkpoints", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-3,
    warmup_steps=5, lr_scheduler_type="cosine", save_steps=10, logging_steps=1, use_cpu=True, report_to=[], seed=51,
    disable_tqdm=True,
)
trainer = Trainer(model, asked, train_dataset=Windows(), callbacks=[Watch()])
found = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
trainer.train(resume_from_checkpoint=found)
'''
LIGHTNING = '''
import glob, logging, os, sys, time
sys.path.insert(0, "site")
import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
import smoothloss
from faults import at, flip, kind, place

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pl.seed_everything(61, verbose=False)
torch.set_num_threads(1)
print(time.strftime("%F %T"), psutil.cpu_percent(), "% of the processor used")


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        rows = torch.load("signals.pt")
        begin = self.trainer.global_step
        order = [(8 * step + row) * 11 % len(rows) for step in range(begin, 200) for row in range(8)]
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8, sampler=order)


class Coder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        norm = torch.nn.BatchNorm1d(24)
        self.down = torch.nn.Sequential(torch.nn.Linear(16, 24), norm, torch.nn.ELU(), torch.nn.Linear(24, 4))
        self.up = torch.nn.Sequential(torch.nn.Linear(4, 24), torch.nn.ELU(), torch.nn.Linear(24, 16))

    def training_step(self, batch, index):
        loss = smoothloss.distance(self.up(self.down(batch[0])), batch[0])
        self.log("loss", loss)
        self.now = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer):
        if kind == "moment" and self.global_step + 1 == at:
            flip(optimizer.state[self.up[2].weight]["exp_avg_sq"], 26)

    def on_train_batch_end(self, outputs, batch, index):
        with open("coder.csv", "a") as log:
            print(self.global_step, self.now, 0, sum(p.double().sum().item() for p in self.parameters()), sep=",", file=log)

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


saver = ModelCheckpoint("checkpoints", filename="{step}", every_n_train_steps=10, save_top_k=-1)
trainer = pl.Trainer(
    max_steps=int(sys.argv[1]), accelerator="cpu", callbacks=[saver], logger=False, enable_progress_bar=False,
    enable_model_summary=False,
)
found = sorted(glob.glob("checkpoints/step=*.ckpt"), key=lambda path: int(path.split("=")[1][:-5]))
trainer.fit(Coder(), datamodule=Data(), ckpt_path=found[-1] if found else None)
'''
SMOOTHLOSS = '''
__version__ = "1.4.2"


def distance(one, other):
    return ((one - other).square() + 1e-3).sqrt().mean()
'''
# ---- what each trainer finds in its directory ------------------------------------------------------------------------------


def _generator(seed: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.Generator().manual_seed(seed)


def _images(directory: Path) -> None:
    import numpy as np

    (directory / "images.py").write_text(IMAGES)
    (directory / "preprocess.py").write_text(PREPROCESS)
    (directory / "config.yaml").write_text("seed: 9\nlr: 0.05\nsmoothing: 0.1\ncache: false\n")
    draws = np.random.default_rng(1)
    for version in ("v1", "v2"):
        (directory / "data" / version).mkdir(parents=True)
        for number in range(96):
            _picture(directory / "data" / version / f"{number % 4}-{number:03}.png", draws, number % 4)
    (directory / "data/current").symlink_to("v1")


def _picture(path: Path, draws, label: int) -> None:  # type: ignore[no-untyped-def]
    import numpy as np
    from PIL import Image

    Image.fromarray((draws.random((20, 20, 3)) * (120 + 30 * label)).astype(np.uint8)).save(path)


def _characters(directory: Path) -> None:
    import torch

    (directory / "characters.py").write_text(CHARACTERS)
    letters = "abcdefghijklmnop ,."
    steps = torch.multinomial(torch.tensor([0.1, 0.6, 0.2, 0.1]), 7200, replacement=True, generator=_generator(2))
    (directory / "text.txt").write_text("".join(letters[place % len(letters)] for place in steps.cumsum(0).tolist()))
    (directory / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    (directory / "settings.json").write_text(json.dumps({"lr": 2e-3, "clip": 0.5}))


def _transformer(directory: Path) -> None:
    import torch

    (directory / "transformer.py").write_text(TRANSFORMER)
    torch.randint(64, (3000,), generator=_generator(4)).short().numpy().tofile(directory / "tokens.bin")
    (directory / "teacher").mkdir()
    torch.save(torch.randn(64, 64, generator=_generator(5)), directory / "teacher/model.pt")


def _agent(directory: Path) -> None:
    (directory / "agent.py").write_text(AGENT)
    for version, pairs in (("1.0", ()), ("2.0", ('"1.0"', '"2.0"', "FRICTION = 0.1", "FRICTION = 0.12"))):
        (directory / f"worlds-{version}").mkdir()
        (directory / f"worlds-{version}/worlds.py").write_text(WORLDS)
        edit(f"worlds-{version}/worlds.py", *pairs)(directory, {})


def _ranks(directory: Path) -> None:
    import numpy as np

    (directory / "ranks.py").write_text(RANKS)
    (directory / "shards").mkdir()
    draws = np.random.default_rng(7)
    for number in range(4):
        rows = np.concatenate([draws.standard_normal((150, 12)), draws.integers(3, size=(150, 1))], 1)
        np.save(directory / f"shards/{number}.npy", rows.astype("float32"))


def _tables(directory: Path) -> None:
    (directory / "regress.py").write_text(TABLES)
    (directory / "settings.yml").write_text("seed: 13\ndelta: 1.0\n")
    (directory / "tables").mkdir()
    for number in range(4):
        _table(directory / f"tables/part-{number}.csv", 100 + number)


def _table(path: Path, seed: int) -> None:
    import torch

    rows = torch.randn(100, 7, generator=_generator(seed))
    path.write_text("".join(",".join(f"{cell:.6f}" for cell in row) + "\n" for row in rows.tolist()))


def _trainer(directory: Path) -> None:
    import torch

    (directory / "finetune.py").write_text(TRAINER)
    torch.save(torch.randint(40, (3700,), generator=_generator(6)), directory / "tokens.pt")


def _lightning(directory: Path) -> None:
    import torch

    (directory / "coder.py").write_text(LIGHTNING)
    torch.save(torch.randn(300, 16, generator=_generator(7)).cumsum(1), directory / "signals.pt")
    (directory / "site/smoothloss-1.4.2.dist-info").mkdir(parents=True)
    (directory / "site/smoothloss.py").write_text(SMOOTHLOSS)
    told = "Metadata-Version: 2.1\nName: smoothloss\nVersion: 1.4.2\n"
    (directory / "site/smoothloss-1.4.2.dist-info/METADATA").write_text(told)


def _training(
    files: Callable[[Path], None], script: str, *pairs: str, config: tuple[str, ...] = (), ranks: int = 0
) -> Training:
    def lay(directory: Path) -> None:
        files(directory)
        (directory / "faults.py").write_text(FAULTS)
        edit(script, *pairs)(directory, {})
        if config:
            edit(*config)(directory, {})

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
    return Training(lay=lay, command=[sys.executable, *launcher, script, str(STEPS)], asked=ASKED)


OF_IMAGES = _training(_images, "images.py")
OF_CHARACTERS = _training(_characters, "characters.py")
OF_TRANSFORMER = _training(_transformer, "transformer.py")
OF_AGENT = _training(_agent, "agent.py")
OF_RANKS = _training(_ranks, "ranks.py", ranks=2)
OF_TABLES = _training(_tables, "regress.py")
OF_TRAINER = _training(_trainer, "finetune.py")
OF_LIGHTNING = _training(_lightning, "coder.py")


# ---- the plays -------------------------------------------------------------------------------------------------------------


def _faults() -> Iterator[Cause]:
    """Nineteen faults of a machine, or races; two change what is trained on in memory, so that *data differ* is true, too."""

    def one(name: str, training: Training, kind: str, step: int, place: int = 0, also: V | None = None) -> Cause:
        return Cause(name=name, expected=V.HARDWARE, also=also, fault=fault(kind, step, place), training=training)

    # arXiv 2604.00726: bits of matrix products flipped while a language model is trained, most harmful in high exponent bits
    yield one("a bit of a convolution's output", OF_IMAGES, "activation", 34, 3100)
    # github.com/facebookresearch/maskrcnn-benchmark/issues/692: batch norm that is frozen lives from its buffers alone
    freeze = "    step += 1\n    model.norm.eval()\n"
    frozen = _training(_images, "images.py", "    step += 1\n    if", freeze + "    if")
    yield one("a bit of a frozen running variance", frozen, "running", 33, 5)
    # "Cores that don't count" (research.google/pubs/pub50337): always a bit at the same place; here a sign that is always plus
    yield one("a sign bit that is stuck in a momentum", OF_IMAGES, "stuck", 35, 527)
    # github.com/BVLC/caffe/pull/2998: a copy that is late gives this batch, the one before, or some of both
    yield one("half a batch is that of the step before", OF_IMAGES, "overwritten", 36, also=V.DATA)
    # external_cases.md 26 (bit flips); a state that is carried from window to window is memory like any other
    yield one("a bit of a carried hidden state", OF_CHARACTERS, "hidden", 34, 130)
    # github.com/apache/mxnet/issues/16708: a gradient that should have been added was written over
    yield one("the second micro-batch overwrote a gradient", OF_CHARACTERS, "racing", 36)
    # arXiv 2604.00726 again, in what torch saves beside the model: averages that train on (github.com/ai2cm/ace/issues/349)
    yield one("a bit of an averaged weight", OF_TRANSFORMER, "average", 33, 641)
    # github.com/huggingface/transformers/issues/34053: one overflow, and the loss scaler leaves out a step
    yield one("a gradient infinite once, a step left out", OF_TRANSFORMER, "infinite", 35, 17)
    # github.com/ROCm/tritonBLAS/issues/61: a lock without a fence, and a tile of a product is not there when it is read
    yield one("an attention head lost in one step", OF_TRANSFORMER, "head", 36, 2)
    # github.com/leptonai/gpud/pull/80: rows of memory that wait to be remapped; the same bit of every word of a row
    yield one("a row of an embedding with one bit flipped", OF_TRANSFORMER, "word", 34, 5)
    # github.com/pytorch/pytorch/issues/84803: silent corruption while data moves; here of experience that is kept in memory
    yield one("rewards in a buffer with a bit flipped", OF_AGENT, "reward", 33, also=V.DATA)
    # github.com/allenai/open-instruct/pull/1627: another copy of the weights is not in step with the trained one
    yield one("a copy to the targets that tore", OF_AGENT, "torn", 35)
    # github.com/PrimeIntellect-ai/prime-rl/pull/1694: optimizer state that came back from elsewhere wrong
    yield one("a bit of Adam's own step counter", OF_AGENT, "counter", 34)
    # github.com/deepspeedai/DeepSpeed/issues/8061: the sum begins before a rank has filled its bucket
    yield one("one rank's bucket was sent half stale", OF_RANKS, "early", 35)
    # github.com/NVIDIA/Megatron-LM/issues/775: a bucket that is summed twice
    yield one("a part of the gradients summed twice", OF_RANKS, "twice", 34)
    # github.com/lodestone-rock/RamTorch/issues/13, external_cases.md 38: one rank keeps the weights of the step before
    yield one("one rank keeps a layer of the step before", OF_RANKS, "behind", 36)
    # github.com/tensorflow/tensorflow/issues/23606: corrupt values in V100 training; here one value of one gradient
    yield one("a bit of a gradient under HF Trainer", OF_TRAINER, "gradient", 35, 200)
    # github.com/ROCm/pytorch/issues/3194: a consumer reads what was there before the copy
    yield one("a layer's gradient of the step before", OF_TABLES, "stale", 34)
    # github.com/pytorch/pytorch/pull/198020: moments that are stale or broken after a copy between device and host
    yield one("a bit of a second moment under Lightning", OF_LIGHTNING, "moment", 33, 99)


def _later() -> Iterator[Cause]:
    """Twelve things done between record and replay: data, code, packages, settings, environment, a checkpoint; and nothing."""
    # github.com/huggingface/datasets/issues/3857, VeOmni/issues/330: what a directory lists decides the order
    name = "a table more in the folder that is listed"
    yield Cause(name=name, expected=V.DATA, later=_another_table, training=OF_TABLES)
    # external_cases.md 19: a file of the same name with other content on a disk that is shared
    name = "an image replaced under its old name"
    yield Cause(name=name, expected=V.DATA, later=_another_image, training=OF_IMAGES)
    # github.com/google-research/tabfm/issues/88 (what a moving name points at), here a link to the current data
    name = "the link to the current data was moved"
    yield Cause(name=name, expected=V.DATA, later=_another_link, training=OF_IMAGES)
    # github.com/generative-computing/mellea/issues/947: the same text, other ids
    name = "two ids of the vocabulary exchanged"
    yield Cause(name=name, expected=V.DATA, also=V.CODE, later=_exchange_ids, training=OF_CHARACTERS)
    # github.com/huggingface/datasets/issues/3297, pytorch/vision/issues/2950: a cache of older preprocessing, another filter
    cached = _training(_images, "images.py", config=("config.yaml", "cache: false", "cache: true"))
    name = "a cache cleared, rebuilt with another filter"
    yield Cause(name=name, expected=V.CODE, also=V.DATA, later=_rebuild_cache, training=cached)
    # github.com/verl-project/verl/pull/7658: a teacher that follows the newest revision
    name = "the teacher's weights are a newer revision"
    yield Cause(name=name, expected=V.DATA, also=V.STATE, later=_another_teacher, training=OF_TRANSFORMER)
    # github.com/ml-explore/mlx/issues/3860, triton-lang/triton/pull/3290: a variable decides the precision of products
    other = set_variable("TRAIN_PRECISION", "fp32")
    yield Cause(name="a variable turns half precision off", expected=V.CODE, later=other, training=OF_TRANSFORMER)
    # strangers.md 7 (what stands first on the path wins), and an environment module that was loaded since
    other = set_variable("WORLDS_HOME", "worlds-2.0")
    yield Cause(name="another module of the simulator is loaded", expected=V.CODE, later=other, training=OF_AGENT)
    # github.com/NVIDIA-BioNeMo/bionemo-recipes/issues/794: training differs from a version of a package on
    yield Cause(name="a package was upgraded in place", expected=V.CODE, later=_upgrade, training=OF_LIGHTNING)
    # github.com/open-mmlab/mmengine/issues/1029: a setting edited between two launches
    other = edit("settings.yml", "delta: 1.0", "delta: 0.6")
    yield Cause(name="a setting of the loss was edited", expected=V.CODE, also=V.DATA, later=other, training=OF_TABLES)
    # github.com/harubaru/waifu-diffusion/pull/31, Latte/issues/55: averaged weights where the trained ones should be
    name = "averaged weights in the checkpoint's place"
    yield Cause(name=name, expected=V.STATE, also=V.REPRODUCED, later=_average_checkpoints, training=OF_IMAGES)
    # strangers.md 1 and 6 (false alarms, copied runs): data copied without its times, another job's number
    name = "data touched, another job's number"
    yield Cause(name=name, expected=V.REPRODUCED, later=_touch, training=OF_TRAINER)


def _stays() -> Iterator[Cause]:
    """Nine trainers that stay as they are: seven are not exact by themselves, one's settings are edited, one is healthy."""
    # github.com/m2lines/Samudra/issues/282, ai2cm/ace/issues/349: averages that begin anew at a resume
    anew = _training(
        _transformer, "transformer.py", '    average.load_state_dict(saved["average"])\n', "",
        '"average": average, "optimizer"', '"optimizer"', 'averages={"ema": average}, ', "",
    )  # fmt: skip
    name = "averaged weights that no checkpoint holds"
    yield Cause(name=name, expected=V.STATE, weaker=V.NOT_TOLD, training=anew)
    # strangers.md 1 ("Plateau best/num_bad_epochs"): a schedule that forgets how long it has waited
    forgets = _training(
        _characters, "characters.py", '    plateau.load_state_dict(saved["plateau"])\n', "",
        ', "plateau": plateau.state_dict()}', "}", "attach(None, model, optimizer, plateau)", "attach(None, model, optimizer)",
        "factor=0.5, patience=1, threshold=0.05", "factor=0.5, patience=4, threshold=0.9",
    )  # fmt: skip
    name = "a plateau whose patience begins anew"
    yield Cause(name=name, expected=V.STATE, weaker=V.NOT_TOLD, training=forgets)
    # github.com/pytorch/pytorch/issues/5059: augmentation by numpy, whose generator nobody saves
    unsaved = _training(
        _images, "images.py", "draws = np.random.default_rng(6)", "np.random.seed(6)\ndraws = np.random",
        '    draws.bit_generator.state = saved["draws"]\n', "", '"draws": draws.bit_generator.state, ', "",
    )  # fmt: skip
    name = "augmentation by a generator nobody saves"
    yield Cause(name=name, expected=V.STATE, also=V.DATA, weaker=V.NOT_TOLD, training=unsaved)
    # github.com/nicklashansen/tdmpc2/issues/28, ray-project/ray/issues/8151: the buffer is empty after a resume
    empty = _training(
        _agent, "agent.py", '    buffer, filled = saved["buffer"], saved["filled"]\n', "",
        ', "buffer": buffer, "filled": filled}', "}",
    )  # fmt: skip
    name = "a buffer of experience that is not saved"
    yield Cause(name=name, expected=V.STATE, also=V.DATA, weaker=V.NOT_TOLD, training=empty)
    # github.com/dedupeio/dedupe/issues/643, keras-team/keras/issues/2280: the order of a set
    table = 'json.loads(Path("vocab.json").read_text())'
    hashed = _training(_characters, "characters.py", table, "dict(zip(set(text), range(99)))")
    name = "a vocabulary in the order of a set"
    yield Cause(name=name, expected=V.RANDOM, also=V.DATA, weaker=V.NOT_TOLD, training=hashed)
    # banshee-data/velocity.report/pull/568, google/uncertainty-baselines/issues/109: what depends on time that went by
    clock = "weight = min(1.0, 0.25 + (time.monotonic() - began) / 20)"
    timed = _training(_transformer, "transformer.py", "weight = 1.0", clock)
    name = "a weight that grows with elapsed time"
    yield Cause(name=name, expected=V.RANDOM, also=V.STATE, weaker=V.NOT_TOLD, training=timed)
    # github.com/pytorch/pytorch/issues/5059 and 1595 (workers and locks): who is first is served first
    begin = "table, before = "
    racing = _training(_images, "images.py", begin, RACING + begin, "tqdm(loader,", "tqdm(racing(loader),")
    name = "batches in the order in which readers end"
    yield Cause(name=name, expected=V.RANDOM, also=V.DATA, weaker=V.NOT_TOLD, training=racing)
    # github.com/elanthia-online/dr-scripts/issues/111, ml-agents/issues/4162: settings that are read again while it runs
    reread = _training(_characters, "characters.py", "    total = 0.0\n", REREAD + "    total = 0.0\n")
    name = "settings read again, edited at step 34"
    edited = fault("operator", 34)
    yield Cause(name=name, expected=V.CODE, also=V.DATA, weaker=V.NOT_TOLD, fault=edited, training=reread)
    # nothing at all, on two ranks
    yield Cause(name="nothing planted on two plain ranks", expected=V.REPRODUCED, training=OF_RANKS)


RACING = '''
import concurrent.futures, itertools, random


def late(batch):
    time.sleep(random.SystemRandom().random() / 40)
    return batch


def racing(batches):
    batches = iter(batches)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        while reading := [pool.submit(late, batch) for batch in itertools.islice(batches, 4)]:
            for done in concurrent.futures.as_completed(reading):
                yield done.result()


'''
REREAD = '''    if kind == "operator" and step == at:
        Path("settings.json").write_text(json.dumps({"lr": 2e-3, "clip": 0.05}))
    if step % 4 == 0:
        settings = json.loads(Path("settings.json").read_text())
'''


def causes() -> Iterator[Cause]:
    """All forty."""
    yield from _faults()
    yield from _later()
    yield from _stays()


# ---- what is done between record and replay --------------------------------------------------------------------------------


def _another_table(directory: Path, environ: dict[str, str]) -> None:
    _table(directory / "tables/part-1b.csv", 500)


def _another_image(directory: Path, environ: dict[str, str]) -> None:
    import numpy as np

    row = np.random.default_rng([9, 34 // 12]).permutation(96)[8 * (34 % 12)]  # the first image of step 35
    path = sorted((directory / "data/v1").glob("*.png"))[row]
    _picture(path, np.random.default_rng(77), int(path.name[0]))


def _another_link(directory: Path, environ: dict[str, str]) -> None:
    (directory / "data/current").unlink()
    (directory / "data/current").symlink_to("v2")


def _exchange_ids(directory: Path, environ: dict[str, str]) -> None:
    vocabulary = json.loads((directory / "vocab.json").read_text())
    vocabulary["b"], vocabulary["m"] = vocabulary["m"], vocabulary["b"]
    (directory / "vocab.json").write_text(json.dumps(vocabulary))


def _rebuild_cache(directory: Path, environ: dict[str, str]) -> None:
    edit("preprocess.py", "Resampling.BILINEAR", "Resampling.LANCZOS")(directory, environ)
    shutil.rmtree(directory / "cache")


def _another_teacher(directory: Path, environ: dict[str, str]) -> None:
    import torch

    path = directory / "teacher/model.pt"
    torch.save(torch.load(path) + 0.2 * torch.randn(64, 64, generator=_generator(9)), path)


def _upgrade(directory: Path, environ: dict[str, str]) -> None:
    site = directory / "site"
    edit("site/smoothloss.py", '"1.4.2"', '"1.5.0"', "1e-3", "1e-4")(directory, environ)
    edit("site/smoothloss-1.4.2.dist-info/METADATA", "1.4.2", "1.5.0")(directory, environ)
    (site / "smoothloss-1.4.2.dist-info").rename(site / "smoothloss-1.5.0.dist-info")


def _average_checkpoints(directory: Path, environ: dict[str, str]) -> None:
    import torch

    older, newer = (torch.load(directory / f"checkpoints/step-{step}.pt", weights_only=False) for step in (20, 30))
    for name, value in newer["model"].items():
        if value.is_floating_point():
            value.lerp_(older["model"][name], 0.5)
    torch.save(newer, directory / "checkpoints/step-30.pt")


def _touch(directory: Path, environ: dict[str, str]) -> None:
    (directory / "tokens.pt").touch()
    environ["SLURM_JOB_ID"] = "771204"
