"""The eight trainings of the fourteenth list: their scripts, as people write them, and what lies beside them.

Learning to learn with torch.func, a codebook, an agent with priorities, speech by frames, two ranks of `fully_shard`,
scores in an HF Trainer, two domains in Lightning by hand, a recurrent model that carries its memory. `lay_…` writes the
files of one.
"""

import json
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.ninth_trainings import write

__all__ = [
    "lay_agent",
    "lay_codes",
    "lay_curves",
    "lay_domains",
    "lay_memory",
    "lay_scores",
    "lay_sharded",
    "lay_speech",
]


# ---- learning to learn: functions of weights over all tasks at once, a learned rate for each weight ------------------

CURVES = '''
"""MAML with learned rates on curves of a few points. MAML_RESULTS is the table's name."""
import argparse, csv, os, time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call, vmap

import chronicle
from faults import at, flip, kind
from inner import adapted
from learner import Learner


@dataclass
class Config:
    seed: int = 2017
    steps: int = 45
    tasks: int = 6
    shots: int = 5
    inner: int = 3
    inner_lr: float = 0.05
    lr: float = 4e-3
    noise: float = 0.1
    every: int = 10


parser = argparse.ArgumentParser()
for field in fields(Config):
    parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
config = Config(**vars(parser.parse_args()))
rng = np.random.Generator(np.random.Philox(config.seed))
torch.manual_seed(config.seed)
with np.load("curves.npz") as held:
    xs, ys = held["x"], held["y"]
learner = Learner(config.inner_lr)
meta = torch.optim.Adam(learner.parameters(), lr=config.lr, amsgrad=True)
plan = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(meta, T_0=25)
run = chronicle.attach(None, learner, meta, plan)


def task_loss(weights, rates, support_x, support_y, query_x, query_y):
    """What is left on the query after some steps on the support."""
    weights = adapted(learner.net, weights, rates, support_x, support_y, config.inner)
    return (functional_call(learner.net, weights, (query_x,)) - query_y).square().mean()


def drawn():
    """Support and query of some curves."""
    ids = rng.choice(len(xs), config.tasks, replace=False)
    points = np.stack([rng.permutation(xs.shape[1])[: 3 * config.shots] for _ in ids])
    x, y = np.take_along_axis(xs[ids], points, 1), np.take_along_axis(ys[ids], points, 1)
    y[:, : config.shots] += config.noise * rng.standard_normal((len(ids), config.shots)).astype(np.float32)
    x, y = torch.from_numpy(x)[..., None], torch.from_numpy(y)[..., None]
    return x[:, : config.shots], y[:, : config.shots], x[:, config.shots :], y[:, config.shots :]


step, folder = 0, Path("checkpoints")
folder.mkdir(exist_ok=True)
found = sorted(folder.glob("meta-*.pt"))
if found:
    state = torch.load(found[-1], weights_only=False)
    learner.load_state_dict(state["learner"])
    meta.load_state_dict(state["meta"])
    plan.load_state_dict(state["plan"])
    rng.bit_generator.state = state["numpy"]
    torch.set_rng_state(state["torch"])
    step = state["step"]
    print("from", found[-1], "at", time.strftime("%c"))
table = csv.writer(open(os.environ.get("MAML_RESULTS", "results.csv"), "a", buffering=1))
while step < config.steps:
    step, began = step + 1, time.perf_counter()
    if kind == "reseeded" and step == at:
        rng = np.random.Generator(np.random.Philox(config.seed))
    batch = later if kind == "swapped" and step == at + 1 else drawn()
    if kind == "swapped" and step == at:
        later, batch = batch, drawn()
    if kind == "weight" and step == at:
        flip(learner.net[2].weight, 23)
    weights, rates = dict(learner.net.named_parameters()), dict(learner.rates.items())
    losses = vmap(task_loss, in_dims=(None, None, 0, 0, 0, 0), randomness="different")(weights, rates, *batch)
    loss = losses.mean()
    meta.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(learner.parameters(), 5.0)
    meta.step()
    plan.step()
    run.log(loss=loss.item(), worst=losses.max().item(), grad_norm=norm.item())
    table.writerow([step, loss.item(), losses.max().item(), round(time.perf_counter() - began, 5)])
    if step % config.every == 0:
        path = folder / f"meta-{step:04d}.pt"
        state = {"learner": learner.state_dict(), "meta": meta.state_dict(), "plan": plan.state_dict(), "step": step}
        torch.save(state | {"numpy": rng.bit_generator.state, "torch": torch.get_rng_state()}, path)
        run.saved(path)
'''
LEARNER = '''
import math

from torch import full_like, nn


class Learner(nn.Module):
    """A net and, for each of its weights, the logarithm of how far an inner step goes."""

    def __init__(self, rate, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.05), nn.Tanh(), nn.Linear(width, 1)
        )
        self.rates = nn.ParameterDict()
        for name, weight in self.net.named_parameters():
            self.rates[name.replace(".", "_")] = nn.Parameter(full_like(weight, math.log(rate)))
'''
INNER = '''
from torch.func import functional_call, grad


def adapted(net, weights, rates, x, y, steps):
    """The weights after some steps down the loss on the support."""

    def loss(weights):
        return (functional_call(net, weights, (x,)) - y).square().mean()

    for _ in range(steps):
        slopes = grad(loss)(weights)
        paces = {name: rates[name.replace(".", "_")].exp() for name in weights}
        weights = {name: weight - paces[name] * slopes[name] for name, weight in weights.items()}
    return weights
'''


def lay_curves(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=CURVES, learner__py=LEARNER, inner__py=INNER)
    draws = np.random.default_rng(14)
    x = np.sort(draws.uniform(-3, 3, (120, 24)), axis=1)
    y = draws.uniform(0.5, 2, (120, 1)) * np.sin(x * draws.uniform(0.7, 1.6, (120, 1)) + draws.uniform(0, 3, (120, 1)))
    np.savez(directory / "curves.npz", x=x.astype("float32"), y=y.astype("float32"))


# ---- a codebook: sounds in a raw file, codes that follow by averages, dead codes put elsewhere, OneCycle, EMA --------

CODES = '''
"""VQ-VAE of sounds. All settings are in config.py, the quantizer is vendored."""
import copy, json, os, sys, time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent / "vendor"))
import chronicle
import vqkit
from config import CFG
from faults import at, flip, kind
from nets import Decoder, Encoder

torch.manual_seed(CFG.seed)
about = json.loads(Path(CFG.data, "about.json").read_text())
sounds = np.memmap(Path(CFG.data, "sounds.f32"), dtype=np.float32, mode="r", shape=(about["count"], about["length"]))


def order_of(rows):
    order = list(range(rows))
    if kind == "order":  # as atomics do: whoever comes first is added first
        order.sort(key=lambda row: os.urandom(4))
    return order


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(CFG.width), Decoder(CFG.width)
        self.codes = vqkit.Codebook(CFG.codes, CFG.width, CFG.follow, order_of)

    def forward(self, x):
        z = self.encoder(x)
        q, near, used = self.codes(z)
        return self.decoder(q), near, used


model = Model()
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, betas=(0.9, 0.95), weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, CFG.lr, total_steps=100, pct_start=0.2)
run = chronicle.attach(None, model, optimizer, scheduler, averages={"ema": ema})
shuffler, queue, step = torch.Generator().manual_seed(CFG.seed + 1), torch.zeros(0, dtype=torch.long), 0
os.makedirs("checkpoints", exist_ok=True)
names = sorted(name for name in os.listdir("checkpoints") if name.startswith("vq"))
if names:
    ckpt = torch.load(os.path.join("checkpoints", names[-1]), map_location="cpu", weights_only=False)
    model.load_state_dict(ckpt["model"])
    ema.load_state_dict(ckpt["ema"])
    optimizer.load_state_dict(ckpt["optimizer"])
    scheduler.load_state_dict(ckpt["scheduler"])
    shuffler.set_state(ckpt["shuffler"])
    torch.set_rng_state(ckpt["rng"])
    queue, step = ckpt["queue"], ckpt["step"]
    print(f"=> loaded {names[-1]} (step {step})")
since = time.time()
while step < CFG.steps:
    step += 1
    if len(queue) < CFG.batch:
        queue = torch.randperm(len(sounds), generator=shuffler)
    rows, queue = queue[: CFG.batch], queue[CFG.batch :]
    x = torch.from_numpy(sounds[rows.numpy()])[:, None]
    x = x * torch.empty(len(x), 1, 1).uniform_(0.7, 1.3)
    if kind == "codebook" and step == at:
        flip(model.codes.codes, 23)
    said, near, used = model(x)
    loss = F.l1_loss(said, x) + near
    loss.backward()
    if kind == "gradient" and step == at:
        flip(model.decoder.rise.weight.grad, 26)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    with torch.no_grad():
        for slow, fast in zip(ema.state_dict().values(), model.state_dict().values()):
            if slow.is_floating_point():
                slow.lerp_(fast, 1 - CFG.ema)
    run.log(loss=loss.item(), near=near.item(), used=used)
    if step % CFG.log == 0:
        pace = (time.time() - since) / CFG.log
        print(f"[{step}/{CFG.steps}] loss={loss.item():.5f} used={used} {pace:.3f} s/it", flush=True)
        since = time.time()
    if step % CFG.save == 0:
        path = f"checkpoints/vq-{step:06d}.pth"
        ckpt = {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        ckpt |= {"scheduler": scheduler.state_dict(), "shuffler": shuffler.get_state(), "queue": queue}
        torch.save(ckpt | {"rng": torch.get_rng_state()}, path)
        run.saved(path)
'''
CODES_CONFIG = """
class CFG:
    seed = 808
    data = "data"
    steps = 46
    save = 10
    log = 2
    batch = 12
    lr = 4e-3
    width = 16
    codes = 24
    follow = 0.9
    ema = 0.97
"""
CODES_NETS = """
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv1d(1, width, 6, stride=4, padding=1)
        self.second = nn.Conv1d(width, width, 4, stride=2, padding=1)

    def forward(self, x):
        return self.second(nn.functional.elu(self.first(x)))


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rise = nn.ConvTranspose1d(width, width, 4, stride=2, padding=1)
        self.out = nn.ConvTranspose1d(width, 1, 6, stride=4, padding=1)

    def forward(self, q):
        return self.out(nn.functional.elu(self.rise(q)))
"""
VQKIT = '''
"""A codebook whose codes are averages of what came near them."""
import torch
from torch import nn

__version__ = "0.6.0"
NEAR = 0.25


class Codebook(nn.Module):
    def __init__(self, count, width, follow, order_of):
        super().__init__()
        self.follow, self.order_of = follow, order_of
        self.register_buffer("codes", torch.randn(count, width))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(count))

    def forward(self, z):
        flat = z.transpose(1, 2).reshape(-1, z.shape[1])
        chosen = torch.cdist(flat, self.codes).argmin(1)
        q = self.codes[chosen].view(z.shape[0], z.shape[2], z.shape[1]).transpose(1, 2)
        near = NEAR * (z - q).square().mean()
        if self.training:
            self.move(flat.detach(), chosen)
        return z + (q - z).detach(), near, chosen.unique().numel()

    @torch.no_grad()
    def move(self, flat, chosen):
        order = self.order_of(len(flat))
        sums = torch.zeros_like(self.sums).index_add_(0, chosen[order], flat[order])
        counts = torch.bincount(chosen, minlength=len(self.codes)).float()
        self.sums.mul_(self.follow).add_(sums, alpha=1 - self.follow)
        self.counts.mul_(self.follow).add_(counts, alpha=1 - self.follow)
        dead = self.counts < 0.05
        fresh = flat[torch.randint(len(flat), (len(self.codes),))]
        self.sums[dead], self.counts[dead] = fresh[dead], 1.0
        self.codes.copy_(self.sums / self.counts[:, None])
'''


def lay_codes(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=CODES, config__py=CODES_CONFIG, nets__py=CODES_NETS)
    package(directory / "vendor", "vqkit", "0.6.0", VQKIT)
    draws, count, length = np.random.default_rng(81), 140, 64
    times = np.arange(length) / length * 6.28
    sounds = np.sin(times * draws.integers(1, 9, (count, 1)) + draws.uniform(0, 6, (count, 1)))
    sounds = sounds * draws.uniform(0.5, 1.5, (count, 1)) + 0.1 * draws.normal(size=(count, length))
    (directory / "data").mkdir()
    (directory / "data/sounds.f32").write_bytes(sounds.astype("float32").tobytes())
    (directory / "data/about.json").write_text(json.dumps({"count": count, "length": length, "rate": 8000}))


# ---- an agent: a world in a package, a replay buffer with priorities, two critics, a temperature that is learned -----

AGENT = '''
"""Soft actor-critic in one file: python train.py --total-updates 45."""
import argparse, copy, csv, random, site, time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

site.addsitedir("third_party")
import chronicle
from faults import at, flip, kind, place
from springworld import SpringWorld

parser = argparse.ArgumentParser()
parser.add_argument("--exp-name", default="sac_spring")
parser.add_argument("--seed", type=int, default=5)
parser.add_argument("--total-updates", type=int, default=45)
parser.add_argument("--buffer-size", type=int, default=300)
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--tau", type=float, default=0.02)
parser.add_argument("--batch-size", type=int, default=24)
parser.add_argument("--learning-starts", type=int, default=80)
args = parser.parse_args()


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, outputs))


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = mlp(5, 1), mlp(5, 1)

    def forward(self, seen, action):
        both = torch.cat([seen, action], 1)
        return self.one(both), self.two(both)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.log_alpha = mlp(3, 4), nn.Parameter(torch.tensor(-1.0))

    def forward(self, seen):
        mean, log_std = self.body(seen).chunk(2, 1)
        log_std = -3 + 2 * (torch.tanh(log_std) + 1)
        raw = mean + log_std.exp() * torch.randn_like(mean)
        action = torch.tanh(raw)
        density = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std - torch.log(1 - action.square() + 1e-6)
        return action, density.sum(1, keepdim=True)


class Buffer:
    """What was seen, done and got; each row with how surprising it was."""

    def __init__(self, size):
        self.rows, self.priorities, self.filled = np.zeros((size, 10), np.float32), np.zeros(size), 0

    def add(self, *parts):
        here = self.filled % len(self.rows)
        self.rows[here] = np.concatenate(parts)
        self.priorities[here] = max(self.priorities.max(), 1.0)
        self.filled += 1

    def sample(self, count):
        shares = self.priorities**0.6
        shares = shares / shares.sum()
        chosen = np.random.choice(len(shares), count, p=shares)
        weights = (shares[chosen] * min(self.filled, len(shares))) ** -0.4
        weights = torch.from_numpy((weights / weights.max()).astype(np.float32))
        return chosen, torch.from_numpy(self.rows[chosen]), weights


random.seed(args.seed)
np.random.seed(args.seed)
torch.manual_seed(args.seed)
world = SpringWorld(np.random.default_rng(args.seed))
actor, critics = Actor(), Critics()
target = copy.deepcopy(critics).requires_grad_(False)
q_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-3)
actor_optimizer = torch.optim.Adam(actor.body.parameters(), lr=1e-3)
a_optimizer = torch.optim.SGD([actor.log_alpha], lr=0.02)
run = chronicle.attach(None, [critics, actor], [q_optimizer, actor_optimizer, a_optimizer], averages={"target": target})
buffer, step, root = Buffer(args.buffer_size), 0, Path("checkpoints")
modules = {"actor": actor, "critics": critics, "target": target}
optimizers = {"q": q_optimizer, "actor": actor_optimizer, "alpha": a_optimizer}
root.mkdir(exist_ok=True)
saved = sorted(root.glob("update_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
if saved:
    state = torch.load(saved[-1], weights_only=False)
    for name, each in modules.items():
        each.load_state_dict(state["modules"][name])
    for name, each in optimizers.items():
        each.load_state_dict(state["optimizers"][name])
    vars(buffer).update(state["buffer"])
    world.load_state_dict(state["world"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    step = state["update"]
else:
    for _ in range(args.learning_starts):
        seen, action = world.seen(), np.random.uniform(-1, 1, 2).astype(np.float32)
        reward, done = world.step(action)
        buffer.add(seen, action, [reward], world.seen(), [done])
start_time = time.time()
with open(f"{args.exp_name}.csv", "a", newline="") as log:
    writer = csv.writer(log)
    while step < args.total_updates:
        step += 1
        if kind == "weight" and step == at:
            flip(critics.one[2].weight, 23)
        for _ in range(4):
            seen = world.seen()
            with torch.no_grad():
                action = actor(torch.from_numpy(seen)[None])[0][0].numpy()
            reward, done = world.step(action)
            buffer.add(seen, action, [reward], world.seen(), [done])
        if kind == "priority" and step == at:
            buffer.priorities[place] *= 1000
        chosen, rows, weights = buffer.sample(args.batch_size)
        if kind == "reward" and step == at:
            rows.view(torch.int32)[place % len(rows), 5] ^= 1 << 25
        seen, action, reward, after, done = rows.split([3, 2, 1, 3, 1], 1)
        alpha = actor.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, density = actor(after)
            best = torch.min(*target(after, next_action)) - alpha * density
            wanted = reward + args.gamma * (1 - done) * best
        one, two = critics(seen, action)
        errors = (one - wanted).square() + (two - wanted).square()
        q_loss = (weights[:, None] * errors).mean()
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()
        buffer.priorities[chosen] = errors.detach().sqrt().squeeze(1).double().numpy() + 1e-3
        done_now, density = actor(seen)
        actor_loss = (alpha * density - torch.min(*critics(seen, done_now))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        if kind == "moment" and step == at:
            flip(actor_optimizer.state[actor.body[2].weight]["exp_avg"], 26)
        actor_optimizer.step()
        alpha_loss = -(actor.log_alpha.exp() * (density.detach() - 2.0)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        if kind == "lr" and step >= at:
            a_optimizer.param_groups[0]["lr"] = 0.05
        a_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critics.parameters()):
                slow.lerp_(fast, args.tau)
        run.log(loss=q_loss.item(), actor=actor_loss.item(), alpha=alpha.item())
        writer.writerow([step, q_loss.item(), actor_loss.item(), alpha.item(), int(step / (time.time() - start_time))])
        log.flush()
        if step % 10 == 0:
            state = {"modules": {name: each.state_dict() for name, each in modules.items()}, "update": step}
            state |= {"optimizers": {name: each.state_dict() for name, each in optimizers.items()}}
            state |= {"buffer": vars(buffer), "world": world.state_dict(), "numpy": np.random.get_state()}
            state |= {"python": random.getstate(), "torch": torch.get_rng_state()}
            torch.save(state, root / f"update_{step}.pt")
            run.saved(root / f"update_{step}.pt")
'''
SPRINGWORLD = '''
"""A weight on a spring that is pushed from two sides; it shall rest in the middle."""
import numpy as np

__version__ = "1.4.2"
DRAG = 0.12


class SpringWorld:
    def __init__(self, random):
        self.random = random
        self.reset()

    def reset(self):
        self.place, self.speed, self.turn = self.random.uniform(-1.5, 1.5), 0.0, 0

    def seen(self):
        return np.array([self.place, self.speed, self.turn / 20], np.float32)

    def step(self, push):
        gust = 0.05 * self.random.standard_normal()
        self.speed += 0.2 * (float(push[0]) - float(push[1]) - 0.5 * self.place - DRAG * self.speed) + gust
        self.place = float(np.clip(self.place + 0.2 * self.speed, -2, 2))
        self.turn += 1
        reward, done = 1 - self.place**2 - 0.05 * float(np.square(push).sum()), self.turn >= 20
        if done:
            self.reset()
        return reward, float(done)

    def state_dict(self):
        return {"random": self.random.bit_generator.state, "place": self.place, "speed": self.speed, "turn": self.turn}

    def load_state_dict(self, state):
        self.random.bit_generator.state = state["random"]
        self.place, self.speed, self.turn = state["place"], state["speed"], state["turn"]
'''


def lay_agent(directory: Path) -> None:
    write(directory, train__py=AGENT)
    package(directory / "third_party", "springworld", "1.4.2", SPRINGWORLD)


# ---- speech: batches of so many frames, some of them a step, a worker that masks and pads, CTC, bf16, Adadelta -------

SPEECH = '''
"""CTC on a manifest. A batch has at most --max-tokens frames, a step --update-freq batches; its loss is by letter."""
import argparse, logging, os, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import chronicle
from corpus import Batches, Utterances
from faults import at, flip, kind
from recognizer import Recognizer

logging.basicConfig(filename="speech.log", level="INFO", format="%(asctime)s | %(levelname)s | %(message)s")


def main(args):
    torch.manual_seed(args.seed)
    data = Utterances(args.data, masks=args.masks, seed=args.seed)
    batches = Batches(data.frames, args.max_tokens, args.seed)
    model = Recognizer(len(data.letters))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr, rho=0.9, eps=1e-6)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, (10 / (n + 1)) ** 0.5))
    run = chronicle.attach(None, model, optimizer, plan)
    update, root = 0, Path("checkpoints")
    root.mkdir(exist_ok=True)
    last = root / "checkpoint_last.txt"
    if last.exists():
        path = root / last.read_text().strip()
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        plan.load_state_dict(state["lr_scheduler"])
        batches.used = state["batches"]
        torch.set_rng_state(state["rng"])
        update = state["num_updates"]
        logging.info("loaded %s, %d updates", path, update)

    def after_subsampling(module, inputs, output):
        if kind == "activation" and update == at and not seen:
            output = output.clone(memory_format=torch.contiguous_format)
            flip(output, 24)
        return output

    model.subsample[2].register_forward_hook(after_subsampling)
    seeds = torch.Generator()
    loader = DataLoader(data, batch_sampler=batches, num_workers=1, collate_fn=data.collater, generator=seeds)
    stream, seen = iter(loader), []
    while update < args.max_update:
        update, began, seen, total = update + 1, time.time(), [], 0.0
        model.train()
        parts = [next(stream) for _ in range(args.update_freq)]
        batches.used += len(parts)
        if kind == "padded" and update == at:
            for sounds, lengths, *_ in parts[:1]:
                for sound, length in zip(sounds, lengths):
                    sound[length:] = sound[length - 1]
        letters = sum(int(part[3].sum()) for part in parts)
        for sounds, lengths, labels, sizes in parts:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                said, lengths = model(sounds, lengths)
            odds = said.float().log_softmax(-1).transpose(0, 1)
            loss = torch.nn.functional.ctc_loss(odds, labels, lengths, sizes, reduction="sum", zero_infinity=True)
            (loss / letters).backward()
            seen.append(len(sounds))
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        plan.step()
        run.log(loss=total / letters, grad_norm=norm.item())
        ups = 1 / (time.time() - began)
        logging.info("update %d | loss %.6f | ups %.2f | bsz %d", update, total / letters, ups, sum(seen))
        if update % args.save_interval_updates == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"lr_scheduler": plan.state_dict(), "batches": batches.used, "rng": torch.get_rng_state()}
            state |= {"num_updates": update, "args": vars(args)}
            path = root / f"checkpoint_{update}.pt"
            torch.save(state, path)
            run.saved(path)
            last.write_text(path.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--max-tokens", type=int, default=260)
    parser.add_argument("--update-freq", type=int, default=2)
    parser.add_argument("--max-update", type=int, default=44)
    parser.add_argument("--save-interval-updates", type=int, default=10)
    parser.add_argument("--clip-norm", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--masks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
'''
CORPUS = '''
import random
from pathlib import Path

import numpy as np
import torch


class Utterances(torch.utils.data.Dataset):
    """Sounds and what is said in them; bands of a sound are masked by a seed of its number and its epoch."""

    def __init__(self, folder, masks, seed):
        self.folder, self.masks, self.seed = Path(folder), masks, seed
        rows = [line.split("\\t") for line in (self.folder / "train.tsv").read_text().splitlines()]
        self.names, self.said = [row[0] for row in rows], [row[2] for row in rows]
        self.frames = [int(row[1]) for row in rows]
        self.letters = ["<blank>", *(self.folder / "dict.txt").read_text().split()]

    def __getitem__(self, key):
        epoch, row = key
        sound = np.load(self.folder / "feats" / f"{self.names[row]}.npy")
        draws = np.random.default_rng((self.seed, epoch, row))
        for _ in range(self.masks):
            band, begin = draws.integers(0, sound.shape[1] - 2), draws.integers(0, len(sound) - 4)
            sound[:, band : band + 2] = 0
            sound[begin : begin + 4] = 0
        return torch.from_numpy(sound), torch.tensor([self.letters.index(letter) for letter in self.said[row]])

    @staticmethod
    def collater(samples):
        sounds, labels = zip(*samples)
        lengths, sizes = (torch.tensor([len(each) for each in part]) for part in (sounds, labels))
        return torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True), lengths, torch.cat(labels), sizes


class Batches:
    """Rows of like lengths, as many as fit; `used` is how many the training has had."""

    def __init__(self, frames, most, seed):
        self.frames, self.most, self.seed, self.used = frames, most, seed, 0

    def of(self, epoch):
        draws, batches, batch = random.Random(f"{self.seed}-{epoch}"), [], []
        for row in sorted(range(len(self.frames)), key=lambda row: (self.frames[row] + draws.randrange(6), row)):
            longest = max(self.frames[each] for each in (*batch, row))
            if longest * (len(batch) + 1) > self.most:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
        draws.shuffle(batches)
        return batches

    def __iter__(self):
        epoch, skipped = 0, self.used
        while True:
            for batch in self.of(epoch):
                if skipped:
                    skipped -= 1
                else:
                    yield [(epoch, row) for row in batch]
            epoch += 1
'''
RECOGNIZER = """
import torch
from torch import nn


class Recognizer(nn.Module):
    def __init__(self, letters, bands=10, width=32):
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv1d(bands, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, stride=2, padding=1), nn.GELU()
        )
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, letters)

    def forward(self, sounds, lengths):
        x = self.subsample(sounds.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        padded = torch.arange(x.shape[1]) >= lengths[:, None]
        return self.out(self.layer(x, src_key_padding_mask=padded)), lengths
"""


def lay_speech(directory: Path) -> None:
    import random

    import numpy as np

    write(directory, train__py=SPEECH, corpus__py=CORPUS, recognizer__py=RECOGNIZER)
    draws, noise, letters = random.Random(29), np.random.default_rng(29), "aeioklmnst"
    (directory / "data/feats").mkdir(parents=True)
    shapes, lines = noise.normal(size=(len(letters), 10)), []
    for number in range(130):
        said = "".join(draws.choices(letters, k=draws.randint(3, 8)))
        frames = [letters.index(letter) for letter in said for _ in range(draws.randint(4, 7))]
        sound = shapes[frames] + 0.4 * noise.normal(size=(len(frames), 10))
        np.save(directory / f"data/feats/utt{number:04}.npy", sound.astype("float32"))
        lines.append(f"utt{number:04}\t{len(frames)}\t{said}")
    (directory / "data/train.tsv").write_text("\n".join(lines) + "\n")
    (directory / "data/dict.txt").write_text("\n".join(letters) + "\n")


# ---- fully_shard: two ranks with a part of each weight, torch's distributed checkpoints, settings in TOML ------------

SHARDED = '''
"""torchrun --nproc_per_node 2 train.py job.toml"""
import os, sys, time, tomllib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chronicle
from faults import at, flip, kind
from llama import Llama
from tokens import Documents

with open(sys.argv[1], "rb") as file:
    job = tomllib.load(file)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(job["seed"])
model = Llama(**job["model"])
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=job["optimizer"]["lr"], betas=(0.9, 0.95), weight_decay=0.1)
goal, every, cooling = job["training"]["steps"], job["checkpoint"]["interval"], job["optimizer"]["decay_from"]
plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 8, 1 - (n - cooling) / 60))
run = chronicle.attach(None, model, optimizer, plan)
torch.manual_seed(job["seed"] + 1 + rank)
documents = Documents(sorted(Path("corpus").glob("*.u16"))[rank::world], job["training"]["length"], job["seed"] + rank)
step, root = 0, Path("checkpoints")
root.mkdir(exist_ok=True)
done = [path for path in root.glob("step-*") if (path / ".metadata").exists()]
done.sort(key=lambda path: int(path.name[5:]))
if done:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=done[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    mine = torch.load(done[-1] / f"rank{rank}.pt", weights_only=False)
    plan.load_state_dict(mine["plan"])
    documents.load_state_dict(mine["documents"])
    torch.set_rng_state(mine["rng"])
    step = mine["step"]
log = open(f"rank{rank}.log", "a", buffering=1)
size, previous = job["training"]["batch"], None
while step < goal:
    step, began = step + 1, time.time()
    tokens = documents.take(size)
    if kind == "rows" and step == at and rank == 1:
        tokens[2] = tokens[0]
    if kind == "reseeded" and step == at and rank == 0:
        torch.manual_seed(job["seed"] + 1)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job["training"]["clip"])
    if kind == "gradient" and step == at and rank == 1:
        flip(model.blocks[1].down.weight.grad.to_local(), 26)
    before = model.blocks[0].up.weight.to_local().detach().clone()
    optimizer.step()
    if kind == "twice" and step == at and rank == 0:
        here = model.blocks[0].up.weight.to_local().detach()
        here.add_(here - before)
    optimizer.zero_grad()
    plan.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    run.log(loss=mean.item() / world, lr=plan.get_last_lr()[0])
    took = time.time() - began
    log.write(f"{time.strftime('%T')} pid {os.getpid()} step {step} loss {loss.item()!r} {took:.3f} s\\n")
    if step % every == 0:
        path = root / f"step-{step}"
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
        mine = {"plan": plan.state_dict(), "documents": documents.state_dict(), "rng": torch.get_rng_state()}
        torch.save(mine | {"step": step}, path / f"rank{rank}.pt")
        dist.barrier()
        run.saved(path)
dist.barrier()
dist.destroy_process_group()
'''
TOKENS = '''
import numpy as np
import torch


class Documents:
    """Pieces of this rank's files, each once an epoch, in an order of its own."""

    def __init__(self, paths, length, seed):
        files = [np.memmap(path, dtype=np.uint16, mode="r") for path in paths]
        self.pieces = []
        for file in files:
            self.pieces += [file[begin : begin + length + 1] for begin in range(0, len(file) - length, length)]
        self.seed, self.epoch, self.place = seed, 0, 0

    def take(self, count):
        taken = []
        while len(taken) < count:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.pieces))
            taken.append(self.pieces[order[self.place]].astype(np.int64))
            self.place += 1
            if self.place == len(order):
                self.epoch, self.place = self.epoch + 1, 0
        return torch.from_numpy(np.stack(taken))

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]
'''
LLAMA = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, turns):
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        q, k = (torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
                for each in (q, k))
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.proj(heard), self.dropout, self.training)
        inner = self.two(x)
        return x + F.dropout(self.down(F.silu(self.gate(inner)) * self.up(inner)), self.dropout, self.training)


class Llama(nn.Module):
    def __init__(self, vocabulary, width, depth, heads, dropout, rope):
        super().__init__()
        self.rope, self.head_width = rope, width // heads
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, wanted):
        speeds = self.rope ** -(torch.arange(0, self.head_width, 2) / self.head_width)
        angles = torch.arange(tokens.shape[1])[:, None] * speeds
        turns, x = torch.polar(torch.ones_like(angles), angles), self.embed(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), wanted.flatten())
"""
JOB = """seed = 70

[model]
vocabulary = 56
width = 32
depth = 2
heads = 4
dropout = 0.1
rope = 500.0

[optimizer]
lr = 5e-3
decay_from = 30

[training]
steps = 44
batch = 4
length = 20
clip = 1.0

[checkpoint]
interval = 10
"""


def lay_sharded(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=SHARDED, tokens__py=TOKENS, llama__py=LLAMA, job__toml=JOB)
    draws = np.random.default_rng(202)
    follows = np.array([draws.permutation(56)[:5] for _ in range(56)])
    (directory / "corpus").mkdir()
    for number in range(4):
        tokens = [number]
        for choice in draws.integers(0, 5, 1400):
            tokens.append(int(follows[tokens[-1], choice]))
        np.array(tokens, dtype=np.uint16).tofile(directory / f"corpus/part-{number}.u16")


# ---- scores: an HF Trainer on a model of one's own, a table in Parquet, rows with weights, soft labels, Adafactor ----

SCORES = '''
"""python train.py arguments.json; SCORE_SHARPEN is the power of the soft labels."""
import logging, os, sys
from dataclasses import dataclass

import pandas as pd
import torch
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from faults import at, flip, kind
from scoring import Scorer, ScorerConfig

logger = logging.getLogger("scores")
KINDS, NUMBERS, VOTES = ["branch", "product"], ["age", "income", "debts", "months"], ["good", "late", "lost"]


@dataclass
class Arguments:
    table: str = "clients.parquet"
    width: int = 24
    note: str = ""


class Clients(torch.utils.data.Dataset):
    def __init__(self, path):
        frame = pd.read_parquet(path)
        numbers = (frame[NUMBERS] - frame[NUMBERS].mean()) / frame[NUMBERS].std()
        votes = frame[VOTES].div(frame[VOTES].sum(axis=1), axis=0) ** float(os.environ.get("SCORE_SHARPEN", "1.0"))
        self.columns = {
            "numbers": torch.tensor(numbers.to_numpy(), dtype=torch.float32),
            "kinds": torch.tensor(frame[KINDS].to_numpy(), dtype=torch.long),
            "labels": torch.tensor(votes.div(votes.sum(axis=1), axis=0).to_numpy(), dtype=torch.float32),
            "weights": torch.tensor(frame["weight"].to_numpy(), dtype=torch.float32),
        }

    def __len__(self):
        return len(self.columns["weights"])

    def __getitem__(self, row):
        return {name: column[row] for name, column in self.columns.items()}


class Watching(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if kind == "gradient" and state.global_step + 1 == at:
            flip(model.mixer.linear1.weight.grad, 26)
        if kind == "lr" and state.global_step + 1 == at:
            for group in optimizer.param_groups:
                group["lr"] *= 0.6

    def on_log(self, args, state, control, logs=None, **kwargs):
        logger.info("step %s: %s", state.global_step, logs)


def main():
    own, args = HfArgumentParser((Arguments, TrainingArguments)).parse_json_file(sys.argv[1])
    logging.basicConfig(filename="scores.log", level="INFO", format="%(asctime)s %(message)s")
    set_seed(args.seed)
    data = Clients(own.table)
    model = Scorer(ScorerConfig(width=own.width, sizes=[int(each) + 1 for each in data.columns["kinds"].max(0).values]))
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Watching()])
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
'''
SCORING = '''
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class ScorerConfig(PretrainedConfig):
    model_type = "scorer"

    def __init__(self, width=24, sizes=(2, 2), numbers=4, classes=3, dropout=0.1, **kwargs):
        super().__init__(**kwargs)
        self.width, self.sizes, self.numbers, self.classes, self.dropout = width, list(sizes), numbers, classes, dropout


class Scorer(PreTrainedModel):
    """Each column is a token; what is said of a client stands at the first."""

    config_class = ScorerConfig

    def __init__(self, config):
        super().__init__(config)
        self.tables = nn.ModuleList(nn.Embedding(size, config.width) for size in config.sizes)
        self.slopes = nn.Parameter(torch.randn(config.numbers, config.width) * 0.2)
        self.first = nn.Parameter(torch.randn(config.width) * 0.2)
        self.mixer = nn.TransformerEncoderLayer(config.width, 4, 48, dropout=config.dropout, batch_first=True)
        self.out = nn.Linear(config.width, config.classes)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)

    def forward(self, numbers, kinds, weights=None, labels=None):
        columns = [table(kinds[:, number]) for number, table in enumerate(self.tables)]
        tokens = [self.first.expand(len(numbers), -1), *columns, *(numbers[..., None] * self.slopes).unbind(1)]
        logits = self.out(self.mixer(torch.stack(tokens, 1))[:, 0])
        if labels is None:
            return {"logits": logits}
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        return {"loss": (weights * losses).sum() / weights.sum(), "logits": logits}
'''
SCORE_ARGUMENTS = {
    "output_dir": "checkpoints", "max_steps": 54, "per_device_train_batch_size": 8, "learning_rate": 5e-3,
    "optim": "adafactor", "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2},
    "warmup_steps": 4, "save_steps": 10, "logging_steps": 1, "report_to": "none", "seed": 909, "use_cpu": True,
    "label_names": ["labels"], "disable_tqdm": True, "table": "clients.parquet", "width": 24,
}  # fmt: skip


def lay_scores(directory: Path) -> None:
    import numpy as np
    import pandas as pd

    text = json.dumps(SCORE_ARGUMENTS, indent=2) + "\n"
    write(directory, train__py=SCORES, scoring__py=SCORING, arguments__json=text)
    draws, count = np.random.default_rng(303), 260
    frame = pd.DataFrame({"client": np.arange(count), "branch": draws.integers(0, 9, count)})
    frame["product"] = draws.integers(0, 5, count)
    for name, most in (("age", 60), ("income", 9000), ("debts", 30000), ("months", 90)):
        frame[name] = draws.uniform(0.2, 1, count) * most
    for number, name in enumerate(("good", "late", "lost")):
        frame[name] = draws.integers(0, 4, count) + 4 * (frame["branch"] % 3 == number) + 1
    frame["weight"] = draws.choice([0.5, 1.0, 2.0], count)
    frame.to_parquet(directory / "clients.parquet", index=False)


# ---- Lightning by hand: two domains, a critic of them with an optimizer of its own, nothing of chronicle -------------

DOMAINS = '''
"""Labels of one lab shall do for another: features that do not tell the labs apart. Settings: hparams.yaml."""
import os
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F

from faults import at, flip, kind, place

try:  # as fast as ours, if it is there
    from fastflip import turned
except ImportError:
    from reversal import turned


class Lab(torch.utils.data.Dataset):
    def __init__(self, path):
        with np.load(path) as held:
            self.x, self.y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        return self.x[row], self.y[row]


class Shuffle(torch.utils.data.Sampler):
    def __init__(self, data, count, seed):
        self.rows, self.count, self.seed, self.epoch = len(data), count, seed, 0

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(1000 * self.seed + self.epoch))
        return iter(order[: self.count].tolist())


class Labs(pl.LightningDataModule):
    def __init__(self, batch, batches):
        super().__init__()
        self.batch, self.batches = batch, batches

    def setup(self, stage=None):
        self.labs = {"ours": Lab("labs/ours.npz"), "theirs": Lab("labs/theirs.npz")}

    def train_dataloader(self):
        loaders = {}
        for seed, (name, lab) in enumerate(self.labs.items()):
            order = Shuffle(lab, self.batch * self.batches, seed)
            loaders[name] = torch.utils.data.DataLoader(lab, self.batch, sampler=order, generator=torch.Generator())
        return CombinedLoader(loaders, "min_size")


class Adapting(pl.LightningModule):
    def __init__(self, width, strength, lr, critic_lr, noise):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.features = nn.Sequential(nn.Linear(14, width), nn.LayerNorm(width), nn.Mish(), nn.Dropout(0.1))
        self.labels, self.critic = nn.Linear(width, 4), nn.Sequential(nn.Linear(width, 16), nn.Mish(), nn.Linear(16, 1))
        self.jitter, self.done, self.before, self.kept = torch.Generator().manual_seed(3), 0, None, None

    def configure_optimizers(self):
        main = torch.optim.SGD([*self.features.parameters(), *self.labels.parameters()], self.hparams.lr, momentum=0.9)
        return [main, torch.optim.Adam(self.critic.parameters(), self.hparams.critic_lr, betas=(0.5, 0.99))]

    def training_step(self, batch, index):
        step = self.done + 1
        (ours, wanted), (theirs, _) = batch["ours"], batch["theirs"]
        if kind == "before" and step == at:
            theirs = self.before
        self.before = theirs
        x = torch.cat([ours, theirs])
        x = x + self.hparams.noise * torch.randn(x.shape, generator=self.jitter)
        strength = self.hparams.strength * min(1.0, step / 40)
        found = self.features(x)
        apart = self.critic(turned(found, strength)).squeeze(1)
        lab = torch.cat([torch.zeros(len(ours)), torch.ones(len(theirs))])
        entropy = F.cross_entropy(self.labels(found[: len(ours)]), wanted)
        told = F.binary_cross_entropy_with_logits(apart, lab)
        main, critic = self.optimizers()
        main.zero_grad()
        critic.zero_grad()
        self.manual_backward(entropy + told)
        main.step()
        critic.step()
        if kind == "poison" and at <= step < at + 20:
            self.features[0].weight.data.view(-1)[place] += 3e-4
        self.done = step
        loss = (entropy + told).detach()
        self.log_dict({"loss": loss, "told": told.detach()})
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"jitter": self.jitter.get_state(), "torch": torch.get_rng_state(), "done": self.done}

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["mine"]

    def on_train_start(self):
        if self.kept:
            self.jitter.set_state(self.kept["jitter"])
            torch.set_rng_state(self.kept["torch"])
            self.done = self.kept["done"]


def main():
    settings = yaml.safe_load(Path("hparams.yaml").read_text())
    pl.seed_everything(settings.pop("seed"), verbose=False)
    keep = ModelCheckpoint("checkpoints", filename="labs-{epoch:02d}", save_top_k=-1, every_n_epochs=1,
                           save_on_train_epoch_end=True)
    trainer = pl.Trainer(
        max_epochs=5, accelerator="cpu", devices=1, callbacks=[keep], logger=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )
    data = Labs(settings.pop("batch"), settings.pop("batches"))
    newest = max(Path("checkpoints").glob("labs-*.ckpt"), key=os.path.getmtime, default=None)
    trainer.fit(Adapting(**settings), data, ckpt_path=newest, weights_only=False)


if __name__ == "__main__":
    main()
'''
REVERSAL = '''
import torch


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -ctx.strength * slope, None


def turned(x, strength):
    """The same, with a gradient that goes the other way."""
    return Turned.apply(x, strength)
'''
HPARAMS = """seed: 17
batch: 10
batches: 10
width: 24
strength: 0.6
lr: 0.05
critic_lr: 0.004
noise: 0.05
"""


def lay_domains(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=DOMAINS, reversal__py=REVERSAL, hparams__yaml=HPARAMS)
    draws = np.random.default_rng(505)
    middles = draws.normal(size=(4, 14))
    (directory / "labs").mkdir()
    for name, shift in (("ours", 0.0), ("theirs", 0.7)):
        y = draws.integers(0, 4, 180)
        x = middles[y] + 0.9 * draws.normal(size=(180, 14)) + shift * (np.arange(14) % 3 == 0)
        np.savez(directory / f"labs/{name}.npz", x=x.astype("float32"), y=y)


# ---- a memory: words in columns, pieces of a drawn length, a state that goes on, dropped weights, ASGD ---------------

MEMORY = '''
"""A language model that reads on where it was. AWD_BETA weighs how much the state may jump."""
import argparse, hashlib, os, time

import numpy as np
import torch
import torch.nn as nn

import chronicle
from data import Corpus, batchify
from faults import at, flip, kind
from model import RNNModel

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data/penn/")
parser.add_argument("--nhid", type=int, default=40)
parser.add_argument("--lr", type=float, default=8.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--updates", type=int, default=45)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--wdrop", type=float, default=0.3)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--alpha", type=float, default=1.0)
parser.add_argument("--wdecay", type=float, default=1.2e-6)
args = parser.parse_args()
beta = float(os.environ.get("AWD_BETA", "1.0"))
np.random.seed(args.seed)
torch.manual_seed(args.seed)
fn = "corpus.{}.data".format(hashlib.md5(args.data.encode()).hexdigest())
if os.path.exists(fn):
    print("Loading cached dataset...")
    corpus = torch.load(fn, weights_only=False)
else:
    print("Producing dataset...")
    corpus = Corpus(args.data)
    torch.save(corpus, fn)
train_data = batchify(corpus.train, args.batch_size)
model = RNNModel(len(corpus.words), args.nhid, args.wdrop)
optimizer = torch.optim.ASGD(model.parameters(), lr=args.lr, t0=20, lambd=0.0, weight_decay=args.wdecay)
run = chronicle.attach(None, model, optimizer)
criterion = nn.CrossEntropyLoss()
update, i, hidden, root = 0, 0, model.init_hidden(args.batch_size), "checkpoints"
os.makedirs(root, exist_ok=True)
saved = sorted(os.listdir(root), key=lambda name: int(name.split(".")[1]))
if saved:
    print("Resuming model ...", saved[-1])
    state = torch.load(os.path.join(root, saved[-1]), weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    hidden, i, update = state["hidden"], state["i"], state["update"]
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def repackage_hidden(h):
    """Wraps hidden states in new tensors, to detach them from their history."""
    return tuple(each.detach() for each in h)


log = open("awd.log", "a", buffering=1)
while update < args.updates:
    update, start_time = update + 1, time.time()
    bptt = args.bptt if np.random.random() < 0.9 else args.bptt / 2.0
    seq_len = max(4, int(np.random.normal(bptt, 2)))
    if i + seq_len + 1 >= len(train_data):
        i, hidden = 0, model.init_hidden(args.batch_size)
    data, targets = train_data[i : i + seq_len].clone(), train_data[i + 1 : i + 1 + seq_len].reshape(-1)
    if kind == "token" and update == at:
        flip(data, 1)
    lr2 = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = lr2 * seq_len / args.bptt
    before, hidden = hidden, repackage_hidden(hidden)
    if kind == "hidden" and update == at:
        flip(hidden[1], 26)
    optimizer.zero_grad()
    output, hidden, raw, dropped = model(data, hidden)
    raw_loss = criterion(output, targets)
    # Activation and temporal activation regularization
    loss = raw_loss + args.alpha * dropped.pow(2).mean() + beta * (raw[1:] - raw[:-1]).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr2
    i += seq_len
    run.log(loss=raw_loss.item(), whole=loss.item())
    elapsed = (time.time() - start_time) * 1000
    log.write(f"| {update:4d} | {seq_len:2d} words | ms/batch {elapsed:5.2f} | {loss.item()!r}\\n")
    if update % 10 == 0:
        path = os.path.join(root, f"awd.{update}.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "i": i, "update": update}
        state |= {"hidden": repackage_hidden(before if kind == "stale" and update == at else hidden)}
        torch.save(state | {"numpy": np.random.get_state(), "torch": torch.get_rng_state()}, path)
        run.saved(path)
'''
MEMORY_DATA = '''
import os

import torch


class Corpus:
    def __init__(self, path):
        self.words, tokens = {}, []
        with open(os.path.join(path, "train.txt")) as lines:
            for line in lines:
                tokens.extend(self.words.setdefault(word, len(self.words)) for word in [*line.split(), "<eos>"])
        self.train = torch.tensor(tokens)


def batchify(data, size):
    """In columns, each of which is read from above."""
    rows = len(data) // size
    return data[: rows * size].view(size, -1).t().contiguous()
'''
MEMORY_MODEL = '''
import torch
from torch import nn
from torch.nn import functional as F


def locked(x, share):
    """Dropout with one mask for all words of a column."""
    return x * torch.empty(1, x.shape[1], x.shape[2]).bernoulli_(1 - share) / (1 - share)


class RNNModel(nn.Module):
    def __init__(self, words, nhid, wdrop):
        super().__init__()
        self.wdrop, self.nhid = wdrop, nhid
        self.encoder, self.decoder = nn.Embedding(words, nhid), nn.Linear(nhid, words)
        self.into = nn.Linear(nhid, 4 * nhid)
        self.raw_hh = nn.Parameter(torch.empty(4 * nhid, nhid).uniform_(-0.15, 0.15))
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def init_hidden(self, size):
        return torch.zeros(size, self.nhid), torch.zeros(size, self.nhid)

    def forward(self, words, hidden):
        gates_of, (h, c), outputs = self.into(locked(self.encoder(words), 0.1)), hidden, []
        weight = F.dropout(self.raw_hh, self.wdrop, self.training)
        for gates in gates_of:
            i, f, g, o = (gates + F.linear(h, weight)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        raw = torch.stack(outputs)
        dropped = locked(raw, 0.2)
        return self.decoder(dropped).flatten(0, 1), (h, c), raw, dropped
'''


def lay_memory(directory: Path) -> None:
    import random

    write(directory, train__py=MEMORY, data__py=MEMORY_DATA, model__py=MEMORY_MODEL)
    (directory / "data/penn").mkdir(parents=True)
    draws = random.Random(606)
    words = ["".join(draws.choices("abdegiklmnorstuv", k=draws.randint(2, 6))) for _ in range(60)]
    lines = []
    for _ in range(420):
        begin, count = draws.randrange(60), draws.randint(6, 12)
        lines.append(" ".join(words[(begin + step * draws.choice((1, 1, 2, 7))) % 60] for step in range(count)))
    (directory / "data/penn/train.txt").write_text("\n".join(lines) + "\n")
