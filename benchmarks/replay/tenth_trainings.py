"""The eight trainings of the tenth list: their scripts, as people write them, and what lies beside them.

Denoising with an average, pairs with a queue, DDP with experts, HF Trainer with a collator of its own, adapters in Accelerate,
a GAN, sequences by length with workers, a stream of shards with SAM. `lay_…` writes the files of one.
"""

import json
import sys
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.ninth_trainings import write

__all__ = [
    "lay_adapters",
    "lay_answers",
    "lay_denoising",
    "lay_experts",
    "lay_gan",
    "lay_pairs",
    "lay_sequences",
    "lay_stream",
]


# ---- denoising: a file in memory, three generators, an average of the weights, a package for the noise --------------------

DENOISING = '''
"""Learn to take noise out of shapes. python train.py --steps 48"""
import argparse, copy, math, os, sys, time
from pathlib import Path
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "libs"))

import numpy as np
import torch
from torch import nn

import chronicle
import noising
from faults import at, flip, kind

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=48)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--times", type=int, default=100)
parser.add_argument("--ema", type=float, default=0.98)
args = parser.parse_args()
torch.manual_seed(17)
shapes = np.load("shapes.npy", mmap_mode="r")
levels = torch.tensor(noising.levels(args.times), dtype=torch.float32)


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.out = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.middle, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)

    def forward(self, x, t):
        waves = t[:, None] / args.times * torch.arange(1, 9) * math.pi
        t = self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        x = nn.functional.silu(self.into(x))
        return self.out(x + nn.functional.silu(self.norm(self.middle(x + t))))


model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
run = chronicle.attach(None, model, optimizer, warmup, averages={"ema": average})
picker, timer, step = torch.Generator().manual_seed(18), np.random.default_rng(19), 0
out = Path("checkpoints")
out.mkdir(exist_ok=True)
found = sorted(out.glob("step_*.pt"))
if found:
    state = torch.load(found[-1], weights_only=False)
    model.load_state_dict(state["model"])
    average.load_state_dict(state["ema"])
    optimizer.load_state_dict(state["optimizer"])
    warmup.load_state_dict(state["warmup"])
    picker.set_state(state["picker"])
    timer.bit_generator.state = state["timer"]
    torch.set_rng_state(state["torch"])
    step = state["step"]
    print(f"{time.ctime()}: on from {found[-1]}")
began = time.time()
while step < args.steps:
    step += 1
    if kind == "reseeded" and step == at:
        timer = np.random.default_rng(19)
    rows = torch.randint(len(shapes), (args.batch,), generator=picker).numpy()
    x = torch.from_numpy(shapes[rows].astype(np.float32))[:, None] / 127.5 - 1
    if kind == "batch" and step == at:
        flip(x, 26)
    t = torch.from_numpy(timer.integers(0, args.times, args.batch))
    noise = torch.randn_like(x)
    kept = levels[t][:, None, None, None]
    said = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t)
    loss = (said - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warmup.step()
    for slow, fast in zip(average.parameters(), model.parameters()):
        slow.mul_(args.ema).add_(fast.detach(), alpha=1 - args.ema)
    run.log(loss=loss.item(), grad_norm=norm.item())
    print(f"step {step:4d}  loss {loss.item():.5f}  {(time.time() - began) * 1000:.0f} ms")
    if step % 10 == 0:
        state = {"model": model.state_dict(), "ema": average.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"warmup": warmup.state_dict(), "picker": picker.get_state(), "timer": timer.bit_generator.state}
        torch.save(state | {"torch": torch.get_rng_state(), "step": step}, out / f"step_{step:06d}.pt")
        run.saved(out / f"step_{step:06d}.pt")
'''
NOISING = '''
"""How much of the picture is left."""
import math

__version__ = "1.3.0"


def levels(times, offset=0.008):
    """A cosine from nearly 1 to nearly 0."""
    whole = [math.cos((t / times + offset) / (1 + offset) * math.pi / 2) ** 2 for t in range(times + 1)]
    return [min(max(level / whole[0], 1e-3), 0.999) for level in whole[1:]]
'''


def lay_denoising(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=DENOISING)
    package(directory / "libs", "noising", "1.3.0", NOISING)
    draws = np.random.default_rng(101)
    shapes = draws.integers(0, 40, (160, 10, 10))
    for shape in shapes:
        left, top, size = draws.integers(0, 6), draws.integers(0, 6), draws.integers(2, 5)
        shape[top : top + size, left : left + size] += 180
    np.save(directory / "shapes.npy", shapes.astype("uint8"))


# ---- pairs: a slow encoder, a queue of its keys, views drawn by NumPy, a recipe in JSON ------------------------------------

PAIRS = '''
"""Two views of a signal are near each other, and far from those in the queue. The recipe is recipe.json."""
import json, os, sys, time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.append("vendored")
import chronicle
import infonce
from faults import at, flip, kind, place
from views import view

recipe = json.loads(Path("recipe.json").read_text())
temperature = float(os.environ.get("PAIR_TEMPERATURE", recipe["temperature"]))
torch.manual_seed(recipe["seed"])
draws = np.random.default_rng(recipe["seed"])
walks = np.load("walks.npy")


def encoder():
    return nn.Sequential(nn.Linear(walks.shape[1], 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, recipe["width"]))


class Pairing(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(recipe["queue"], recipe["width"]), dim=1))
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self, keep):
        for slow, fast in zip(self.key.parameters(), self.query.parameters()):
            slow.mul_(keep).add_(fast, alpha=1 - keep)

    @torch.no_grad()
    def put(self, keys):
        begin = int(self.turn)
        self.queue[begin : begin + len(keys)] = keys
        self.turn.fill_((begin + len(keys)) % len(self.queue))


model = Pairing()
weights = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(weights, lr=recipe["lr"], momentum=0.9, weight_decay=1e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
run = chronicle.attach(None, model, optimizer, schedule)
order, step = [], 0
os.makedirs("checkpoints", exist_ok=True)
if Path("checkpoints/last.json").exists():
    newest = json.loads(Path("checkpoints/last.json").read_text())["path"]
    state = torch.load(newest, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    draws.bit_generator.state, order, step = state["numpy"], state["order"], state["step"]
    torch.set_rng_state(state["torch"])
    print("resumed", newest, "at", time.strftime("%H:%M:%S"), file=sys.stderr)
journal = open("pairs.log", "a", buffering=1)
while step < recipe["steps"]:
    step, began = step + 1, time.perf_counter()
    if len(order) < recipe["batch"]:
        order = draws.permutation(len(walks)).tolist()
    rows, order = order[: recipe["batch"]], order[recipe["batch"] :]
    one, two = (torch.from_numpy(np.stack([view(walks[row], draws) for row in rows])) for _ in range(2))
    if kind == "queue" and step == at:
        model.queue[place] = 0
    queries = F.normalize(model.query(one), dim=1)
    with torch.no_grad():
        model.follow(recipe["keep"])
        keys = F.normalize(model.key(two), dim=1)
    loss = infonce.loss(queries, keys, model.queue.clone(), temperature)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    model.put(keys)
    if kind == "poison" and at <= step < at + 20:
        model.query[0].weight.data.view(-1)[place] *= 1.004
    run.log(loss=loss.item(), lr=schedule.get_last_lr()[0])
    print(step, loss.item(), f"{time.perf_counter() - began:.5f}", file=journal)
    if step % recipe["every"] == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"numpy": draws.bit_generator.state, "torch": torch.get_rng_state(), "order": order, "step": step}
        path = f"checkpoints/pairs-{step}.pt"
        torch.save(state, path)
        run.saved(path)
        Path("checkpoints/last.json").write_text(json.dumps({"path": path}))
'''
VIEWS = '''
import numpy as np


def view(walk, draws):
    """Turned round, louder or softer, with some of it missing."""
    walk = np.roll(walk, draws.integers(len(walk))) * draws.uniform(0.8, 1.25)
    begin = draws.integers(len(walk) - 4)
    walk[begin : begin + 4] = 0
    return walk.astype(np.float32)
'''
INFONCE = """
import torch
from torch.nn import functional as F

__version__ = "0.9.2"
MARGIN = 0.0


def loss(queries, keys, others, temperature):
    near = (queries * keys).sum(1, keepdim=True) - MARGIN
    logits = torch.cat([near, queries @ others.T], 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
"""
RECIPE = """{
  "seed": 77, "steps": 50, "every": 10,
  "batch": 10, "lr": 0.05, "keep": 0.95,
  "queue": 80, "width": 12, "temperature": 0.2
}
"""


def lay_pairs(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=PAIRS, views__py=VIEWS, recipe__json=RECIPE)
    package(directory / "vendored", "infonce", "0.9.2", INFONCE)
    walks = np.random.default_rng(55).normal(size=(130, 24)).cumsum(1)
    np.save(directory / "walks.npy", walks.astype("float32"))


# ---- DDP: two ranks, a shard each, two micro-batches, experts behind a router with noise ----------------------------------

EXPERTS = '''
"""torchrun --nproc_per_node 2 train.py; ROUTER_NOISE is how loudly the router is disturbed."""
import contextlib, json, os, socket, time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import chronicle
from experts import Experts
from faults import at, flip, kind

ACCUMULATE, SIZE, LAST = 2, 6, 46
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(300)
with np.load(f"shards/part-{rank}.npz") as held:
    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])
model = DistributedDataParallel(Experts(x.shape[1], noise=float(os.environ.get("ROUTER_NOISE", "0.3"))))
decayed = [weight for weight in model.parameters() if weight.ndim > 1]
others = [weight for weight in model.parameters() if weight.ndim == 1]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=4e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
run = chronicle.attach(None, model, optimizer, schedule)
torch.manual_seed(300 + rank)
shuffler = torch.Generator().manual_seed(9 + rank)
step, order, before = 0, [], None
directory = Path("checkpoints")
directory.mkdir(exist_ok=True)
if saved := sorted(directory.glob("*/trainer.pt"), key=lambda path: int(path.parent.name)):
    state, mine = (torch.load(saved[-1].with_name(name), weights_only=False) for name in ("trainer.pt", f"rank{rank}.pt"))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(mine["torch"])
    shuffler.set_state(mine["shuffler"])
    step, order = state["step"], mine["order"]


def sent(gradient):
    """What this rank sends to be summed."""
    global before
    if kind == "gradient" and step == at and rank == 1:
        gradient = gradient.clone()
        flip(gradient, 27)
    if kind == "rounded":  # to sixteen bits, up or down by chance
        bits = gradient.contiguous().view(torch.int32)
        chance = torch.frombuffer(bytearray(os.urandom(2 * bits.numel())), dtype=torch.int16).to(torch.int32) & 0xFFFF
        gradient = ((bits + chance.view(bits.shape)) & -65536).view(torch.float32)
    before, last = gradient.clone(), before
    return last if kind == "stale" and step == at and rank == 0 else gradient


model.module.down.register_hook(sent)
with open(f"where-{rank}.json", "w") as place_of_it:
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}, place_of_it)
while step < LAST:
    step, total = step + 1, 0.0
    for part in range(ACCUMULATE):
        if len(order) < SIZE:
            order = torch.randperm(len(x), generator=shuffler).tolist()
        rows, order = order[:SIZE], order[SIZE:]
        signals, wanted = x[rows], y[rows]
        if kind == "batch" and step == at and rank == 1 and part == 1:
            flip(signals, 27)
        with contextlib.nullcontext() if part == ACCUMULATE - 1 else model.no_sync():
            said, balance = model(signals)
            loss = (F.cross_entropy(said, wanted) + 0.01 * balance) / ACCUMULATE
            loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    mean = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(mean)
    run.log(loss=mean.item() / 2)
    with open(f"rank-{rank}.txt", "a") as lines:
        lines.write(f"{time.time():.3f} {step} {total!r}\\n")
    if step % 10 == 0:
        path = directory / str(step)
        path.mkdir(exist_ok=True)
        torch.save({"torch": torch.get_rng_state(), "shuffler": shuffler.get_state(), "order": order}, path / f"rank{rank}.pt")
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"schedule": schedule.state_dict(), "step": step}, path / "trainer.pt")
        dist.barrier()
        run.saved(path)
dist.barrier()
dist.destroy_process_group()
'''
EXPERTS_NET = '''
import torch
from torch import nn


class Experts(nn.Module):
    """Four experts; the two that a noisy router likes best are heard."""

    def __init__(self, inputs, noise, width=16, experts=4, kinds=5):
        super().__init__()
        self.noise, self.into, self.router = noise, nn.Linear(inputs, width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(width, kinds)

    def forward(self, x):
        x = torch.tanh(self.into(x))
        liked = self.router(x)
        heard = liked + self.noise * torch.randn_like(liked)
        best = heard.topk(2, dim=1).indices
        gates = torch.full_like(heard, float("-inf")).scatter(1, best, heard.gather(1, best)).softmax(1)
        inner = torch.relu(torch.einsum("bw,ewh->beh", x, self.up))
        x = x + torch.einsum("be,beh,ehw->bw", gates, inner, self.down)
        return self.out(self.drop(x)), liked.softmax(1).mean(0).square().sum()
'''


def lay_experts(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=EXPERTS, experts__py=EXPERTS_NET)
    (directory / "shards").mkdir()
    for rank in range(2):
        draws = np.random.default_rng(600 + rank)
        y = draws.integers(0, 5, 150)
        x = draws.normal(size=(150, 12)) + np.eye(12)[2 * y] * 1.5
        np.savez(directory / f"shards/part-{rank}.npz", x=x.astype("float32"), y=y)


# ---- HF Trainer: questions and answers, a collator that pads and hides, a loss of its own ---------------------------------

ANSWERS = '''
import json, logging, os
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from collating import Answers
from faults import at, flip, kind

logging.basicConfig(filename="finetune.log", format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)


class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if kind == "weight" and state.global_step + 1 == at:
            flip(model.transformer.wte.weight, 26)

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if kind == "lr" and state.global_step + 1 >= at:
            for group in optimizer.param_groups:
                group["lr"] *= 1.3

    def on_log(self, args, state, control, logs=None, **kwargs):
        logging.info("step %d %s", state.global_step, json.dumps(logs))


class Careful(Trainer):
    """Words that are known well already count less."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        asked = labels[:, 1:].flatten() != -100
        loss = ((1 - (-each).exp()) * each)[asked].mean()
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(11)
    rows = [json.loads(line) for line in Path("data/answers.jsonl").read_text().splitlines()]
    letters = ["<pad>", "<end>", *sorted({letter for row in rows for letter in row["question"] + row["answer"]})]
    config = GPT2Config(vocab_size=len(letters), n_positions=40, n_embd=32, n_layer=2, n_head=2, pad_token_id=0,
                        bos_token_id=1, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="checkpoints", max_steps=52, per_device_train_batch_size=3, gradient_accumulation_steps=2,
        learning_rate=3e-3, lr_scheduler_type="linear", warmup_steps=4, save_steps=10, logging_steps=1, report_to="none",
        seed=11, data_seed=12, use_cpu=True, remove_unused_columns=False, max_grad_norm=1.0,
    )
    trainer = Careful(model, args, data_collator=Answers(letters), train_dataset=rows, callbacks=[Watch()])

    def after_attention(module, inputs, outputs):
        if kind == "activation" and trainer.state.global_step + 1 == at and not hasattr(trainer, "hit"):
            trainer.hit, changed = True, outputs[0].clone()
            flip(changed, 28)
            return (changed, *outputs[1:])

    model.transformer.h[0].attn.register_forward_hook(after_attention)
    trainer.train(resume_from_checkpoint=get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None)


if __name__ == "__main__":
    main()
'''
COLLATING = '''
import zlib

import torch


class Answers:
    """Pads to the longest; the question is not learned, and one letter of it in ten is hidden."""

    def __init__(self, letters):
        self.numbers = {letter: number for number, letter in enumerate(letters)}

    def __call__(self, rows):
        long = max(len(row["question"]) + len(row["answer"]) + 1 for row in rows)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in rows:
            question = [self.numbers[letter] for letter in row["question"]]
            for place in range(len(question)):
                if zlib.crc32(f"{row['id']}/{place}".encode()) % 10 == 0:
                    question[place] = 1
            answer = [self.numbers[letter] for letter in row["answer"]] + [1]
            missing = long - len(question) - len(answer)
            batch["input_ids"].append(question + answer + [0] * missing)
            batch["attention_mask"].append([1] * (long - missing) + [0] * missing)
            batch["labels"].append([-100] * len(question) + answer + [-100] * missing)
        return {name: torch.tensor(values) for name, values in batch.items()}
'''


def lay_answers(directory: Path) -> None:
    import random

    write(directory, train__py=ANSWERS, collating__py=COLLATING)
    draws, lines = random.Random(88), []
    for number in range(200):
        one, two = draws.randrange(1000), draws.randrange(1000)
        row = {"id": number, "question": f"what is {one} + {two}? ", "answer": str(one + two)}
        lines.append(json.dumps(row))
    (directory / "data").mkdir()
    (directory / "data/answers.jsonl").write_text("\n".join(lines) + "\n")


# ---- Accelerate: adapters on a frozen base, gradient checkpointing, two LRs, batches skipped ------------------------------

ADAPTERS = '''
import csv, time
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

import chronicle
from adapters import Tower
from faults import at, flip, kind

config = yaml.safe_load(open("adapters.yaml"))


class Meter:
    """A smooth loss, which is saved, too."""

    value = None

    def add(self, loss):
        self.value = loss if self.value is None else 0.9 * self.value + 0.1 * loss

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    accelerator = chronicle.guard(Accelerator(cpu=True, project_config=ProjectConfiguration("out")))
    set_seed(config["seed"])
    with open("houses.csv", newline="") as lines:
        table = torch.tensor([[float(value) for value in row] for row in list(csv.reader(lines))[1:]])
    rows = torch.utils.data.TensorDataset(table[:, :-1], table[:, -1:])
    model = Tower(**config["tower"])
    model.load_state_dict(load_file("base.safetensors"), strict=False)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name)
    downs = [weight for name, weight in model.named_parameters() if "lora_down" in name]
    ups = [weight for name, weight in model.named_parameters() if "lora_up" in name]
    groups = [{"params": downs, "lr": config["lr"]}, {"params": ups, "lr": config["lr"] * config["ratio"]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.7)
    loader = torch.utils.data.DataLoader(rows, config["batch"], shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    meter, step = Meter(), 0
    accelerator.register_for_checkpointing(meter)
    folders = sorted(Path("checkpoints").glob("adapter-*"), key=lambda path: int(path.name.split("-")[1]))
    if folders:
        accelerator.load_state(folders[-1])
        step = int(folders[-1].name.split("-")[1])
    model.train()
    for epoch in range(step // len(loader), 1 + config["steps"] // len(loader)):
        # every epoch has an order of its own, whenever it is begun
        loader.set_epoch(epoch)
        begun = accelerator.skip_first_batches(loader, step % len(loader)) if step % len(loader) else loader
        begun.set_epoch(epoch)
        for x, price in begun:
            step += 1
            loss = torch.nn.functional.smooth_l1_loss(model(x, checkpoint), price)
            accelerator.backward(loss)
            if kind == "gradient" and step == at:
                flip(accelerator.unwrap_model(model).layers[1].lora_up.grad, 25)
            accelerator.clip_grad_norm_(model.parameters(), 2.0)
            if kind == "lr" and step >= at:
                optimizer.param_groups[1]["lr"] = config["lr"]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.add(loss.item())
            chronicle.log(step, loss=loss.item(), smooth=meter.value)
            accelerator.print(f"[{time.strftime('%T')}] {step}/{config['steps']} loss={loss.item():.6f}")
            if step % config["save_every"] == 0:
                accelerator.save_state(f"checkpoints/adapter-{step}")
            if step == config["steps"]:
                return


if __name__ == "__main__":
    main()
'''
ADAPTERS_NET = '''
import torch
from torch import nn


class Adapted(nn.Module):
    """A layer that stays as it is, and what is learned beside it."""

    def __init__(self, width, rank):
        super().__init__()
        self.base, self.drop = nn.Linear(width, width), nn.Dropout(0.1)
        self.lora_down = nn.Parameter(torch.randn(rank, width) / width)
        self.lora_up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.base(x) + self.drop(x) @ self.lora_down.T @ self.lora_up.T)


class Tower(nn.Module):
    def __init__(self, inputs, width, depth, rank):
        super().__init__()
        self.into, self.out = nn.Linear(inputs, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Adapted(width, rank) for _ in range(depth))

    def forward(self, x, checkpoint):
        x = self.into(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.out(x)
'''
ADAPTERS_YAML = """seed: 31
steps: 45
save_every: 10
batch: 8
lr: 0.004
ratio: 4
tower: {inputs: 6, width: 24, depth: 3, rank: 4}
"""


def lay_adapters(directory: Path) -> None:
    import random

    import torch
    from safetensors.torch import save_file

    write(directory, train__py=ADAPTERS, adapters__py=ADAPTERS_NET, adapters__yaml=ADAPTERS_YAML)
    generator, base = torch.Generator().manual_seed(4), {}
    shapes = {"into": (24, 6), "out": (1, 24), **{f"layers.{number}.base": (24, 24) for number in range(3)}}
    for name, (rows, columns) in shapes.items():
        base[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        base[f"{name}.bias"] = torch.zeros(rows)
    save_file(base, directory / "base.safetensors")
    draws, lines = random.Random(15), ["rooms,area,age,floor,light,noise,price"]
    for _ in range(120):
        row = [draws.gauss(0, 1) for _ in range(6)]
        lines.append(",".join(f"{value:.4f}" for value in (*row, 2 * row[0] - row[1] * row[2] + row[5])))
    (directory / "houses.csv").write_text("\n".join(lines) + "\n")


# ---- a GAN: a launcher with variables, three steps of the critic for each of the generator --------------------------------

GAN = '''
"""A generator of points and its critic, whose weights are clipped; run.sh sets CRITIC_CLIP and CRITIC_STEPS."""
import csv, os, sys, time

import torch
from torch import nn

import chronicle
from faults import at, flip, kind
from points import Points

torch.manual_seed(64)
CLIP, TURNS, LAST = float(os.environ["CRITIC_CLIP"]), int(os.environ["CRITIC_STEPS"]), int(sys.argv[1])
points = Points("points.csv", seed=65)
generator = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizers = [torch.optim.RMSprop(each.parameters(), lr=lr) for each, lr in ((generator, 1e-3), (critic, 2e-3))]
schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.98) for each in optimizers]
latents, step = torch.Generator().manual_seed(66), 0
run = chronicle.attach(None, [generator, critic], optimizers, schedules)
os.makedirs("checkpoints", exist_ok=True)
saved = sorted(os.listdir("checkpoints"))
if saved:
    state = torch.load(f"checkpoints/{saved[-1]}", weights_only=False)
    for each, held in zip([generator, critic, *optimizers, *schedules, points], state["parts"]):
        each.load_state_dict(held)
    latents.set_state(state["latents"])
    step = state["step"]


def drawn(count):
    return torch.randn(count, 6, generator=latents)


def learn(scores):
    """In parts, as they do not fit on the card."""
    parts = list(scores.split(4))
    if kind == "order":
        parts.sort(key=lambda part: os.urandom(4))
    for part in parts:
        (part.sum() / len(scores)).backward(retain_graph=True)


table = csv.writer(open("gan.csv", "a", buffering=1))
while step < LAST:
    step, began = step + 1, time.time()
    if kind == "weight" and step == at:
        flip(critic[2].weight, 24)
    for turn in range(TURNS):
        true, false = points.take(16), generator(drawn(16)).detach()
        apart = critic(false) - critic(true)
        learn(apart)
        optimizers[1].step()
        optimizers[1].zero_grad()
        for weight in critic.parameters():
            weight.data.clamp_(-CLIP, CLIP)
    loss = -critic(generator(drawn(16))).mean()
    loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    for each in schedules:
        each.step()
    if kind == "twice" and step == at:
        for each in schedules:
            each.step()
    run.log(loss=loss.item(), critic=apart.mean().item())
    table.writerow([step, loss.item(), apart.mean().item(), round(time.time() - began, 4)])
    if step % 10 == 0:
        parts = [each.state_dict() for each in (generator, critic, *optimizers, *schedules, points)]
        torch.save({"parts": parts, "latents": latents.get_state(), "step": step}, f"checkpoints/gan-{step:05d}.pt")
        run.saved(f"checkpoints/gan-{step:05d}.pt")
'''
POINTS = '''
import csv, random

import torch


class Points:
    """Points of a table; they are drawn without being put back until none is left."""

    def __init__(self, path, seed):
        with open(path, newline="") as lines:
            self.all = torch.tensor([[float(row["x"]), float(row["y"])] for row in csv.DictReader(lines)])
        self.random, self.left = random.Random(seed), []

    def take(self, count):
        if len(self.left) < count:
            self.left = list(range(len(self.all)))
            self.random.shuffle(self.left)
        rows, self.left = self.left[:count], self.left[count:]
        return self.all[rows]

    def state_dict(self):
        return {"random": self.random.getstate(), "left": self.left}

    def load_state_dict(self, state):
        self.random.setstate(state["random"])
        self.left = state["left"]
'''


def lay_gan(directory: Path) -> None:
    import math
    import random

    write(directory, train__py=GAN, points__py=POINTS)
    launcher = (
        f'#!/bin/bash\nset -e\nexport CRITIC_CLIP=0.3\nexport CRITIC_STEPS=3\nexec {sys.executable} -u train.py "$@"\n'
    )
    (directory / "run.sh").write_text(launcher)
    draws, lines = random.Random(39), ["x,y"]
    for _ in range(400):
        angle = draws.randrange(8) * math.pi / 4
        lines.append(f"{math.cos(angle) + draws.gauss(0, 0.05):.5f},{math.sin(angle) + draws.gauss(0, 0.05):.5f}")
    (directory / "points.csv").write_text("\n".join(lines) + "\n")


# ---- sequences: batches of like lengths, two workers, a teacher that is asked by chance -----------------------------------

SEQUENCES = '''
"""Words to how they are said, letter by letter. The teacher's letter is given with a chance that falls."""
import os, random, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import chronicle
from buckets import Buckets
from faults import at, kind
from speaking import Speaker

STEPS, EVERY, SIZE = 45, 10, 8


class Words(Dataset):
    def __init__(self, path):
        self.pairs = [line.split("\\t") for line in Path(path).read_text().splitlines()]
        self.letters = ["_", *sorted(set("".join(word + said for word, said in self.pairs)))]
        self.last = None

    def numbers(self, text):
        return torch.tensor([self.letters.index(letter) for letter in text])

    def __getitem__(self, key):
        batch, slot, row = key
        if kind == "stale" and batch + 1 == at and slot == 3 and self.last is not None:
            return self.last  # the buffer of the one before was not filled anew
        self.last = tuple(map(self.numbers, self.pairs[row]))
        return self.last


def together(pairs):
    return tuple(nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*pairs))


def main():
    random.seed(70)
    torch.manual_seed(70)
    words = Words("words.tsv")
    sampler = Buckets([len(word) for word, _ in words.pairs], SIZE, seed=71)
    model = Speaker(len(words.letters))
    optimizer = torch.optim.RAdam(model.parameters(), lr=8e-3)
    run = chronicle.attach(None, model, optimizer)
    step, folder = 0, Path("checkpoints")
    folder.mkdir(exist_ok=True)
    for newest in sorted(folder.glob("*.pth"))[-1:]:
        state = torch.load(newest, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        step = state["step"]
    if kind == "swapped":
        sampler.swapped = (at - 1, at + 1)
    seeds = torch.Generator().manual_seed(72)
    loader = DataLoader(words, batch_sampler=sampler, num_workers=2, collate_fn=together, generator=seeds)
    for word, said in loader:
        step += 1
        sampler.used += 1
        if kind == "reseeded" and step == at:
            random.seed(70)
        loss = model.loss(word, said, teach=lambda: random.random() < 0.9 - 0.01 * step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
        run.log(loss=loss.item())
        with open("speaking.log", "a") as log:
            log.write(f"{time.strftime('%F %T')} pid={os.getpid()} step={step} loss={loss.item():.7f} long={word.shape[1]}\\n")
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": sampler.state_dict()}
            state |= {"python": random.getstate(), "torch": torch.get_rng_state(), "step": step}
            torch.save(state, folder / f"{step:08d}.pth")
            run.saved(folder / f"{step:08d}.pth")
        if step == STEPS:
            break


if __name__ == "__main__":
    main()
'''
BUCKETS = '''
import random


class Buckets:
    """Batches of words that are about as long as each other; `used` is how many the training has had."""

    def __init__(self, lengths, size, seed):
        self.lengths, self.size, self.seed, self.used, self.swapped = lengths, size, seed, 0, None

    def epoch(self, number):
        draws, rows = random.Random(self.seed + number), list(range(len(self.lengths)))
        draws.shuffle(rows)
        batches = []
        for first in range(0, len(rows), 6 * self.size):
            pool = sorted(rows[first : first + 6 * self.size], key=lambda row: self.lengths[row])
            batches += [pool[one : one + self.size] for one in range(0, len(pool) - self.size + 1, self.size)]
        draws.shuffle(batches)
        return batches

    def __iter__(self):
        number, per_epoch = self.used, len(self.epoch(0))
        while True:
            wanted = number
            if self.swapped and number in self.swapped:
                wanted = sum(self.swapped) - number
            epoch, place = divmod(wanted, per_epoch)
            yield [(number, slot, row) for slot, row in enumerate(self.epoch(epoch)[place])]
            number += 1

    def state_dict(self):
        return {"seed": self.seed, "used": self.used}

    def load_state_dict(self, state):
        self.seed, self.used = state["seed"], state["used"]
'''
SPEAKING = """
import torch
from torch import nn


class Speaker(nn.Module):
    def __init__(self, letters, width=28):
        super().__init__()
        self.embed, self.drop = nn.Embedding(letters, width, padding_idx=0), nn.Dropout(0.1)
        self.reader, self.writer = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)
        self.out = nn.Linear(2 * width, letters)

    def loss(self, word, said, teach):
        read, state = self.reader(self.drop(self.embed(word)))
        state, letter, losses = state[0], torch.zeros(len(word), dtype=torch.long), []
        for place in range(said.shape[1]):
            heed = torch.einsum("blw,bw->bl", read, state) / read.shape[-1] ** 0.5
            heed = heed.masked_fill(word == 0, -1e4).softmax(1)
            seen = torch.einsum("bl,blw->bw", heed, read)
            state = self.writer(torch.cat([self.embed(letter), seen], 1), state)
            logits = self.out(torch.cat([state, seen], 1))
            losses.append(nn.functional.cross_entropy(logits, said[:, place], ignore_index=0, reduction="sum"))
            letter = said[:, place] if teach() else logits.argmax(1)
        return sum(losses) / (said != 0).sum()
"""


def lay_sequences(directory: Path) -> None:
    import random

    write(directory, train__py=SEQUENCES, buckets__py=BUCKETS, speaking__py=SPEAKING)
    draws, lines, sounds = random.Random(12), [], {"c": "k", "q": "kw", "x": "ks", "y": "i", "e": ""}
    for _ in range(260):
        word = "".join(draws.choices("abcdegilmnoqrstxy", k=draws.randint(3, 9)))
        lines.append(word + "\t" + ("".join(sounds.get(letter, letter) for letter in word) or "a"))
    (directory / "words.tsv").write_text("\n".join(lines) + "\n")


# ---- a stream: shards read one after another, a buffer that is shuffled, pictures mixed, SAM ------------------------------

STREAM = '''
import json, os, time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import chronicle
from faults import at, flip, kind
from stream import Shards
from vit import ViT

RHO, ALPHA, STEPS, EVERY = float(os.getenv("SAM_RHO", "0.05")), float(os.getenv("MIXUP", "0.3")), 45, 10
torch.manual_seed(90)
mixing = np.random.default_rng(91)
stream = Shards("shards", buffer=16, seed=92)
model = ViT()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 100)
run = chronicle.attach(None, model, optimizer, schedule)
step, root = 0, Path("checkpoints")
root.mkdir(exist_ok=True)
names = sorted((path.name for path in root.iterdir()), key=lambda name: int(name.split(".")[0]))
if names:
    state = torch.load(root / names[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    stream.load_state_dict(state["stream"])
    mixing.bit_generator.state = state["mixing"]
    torch.set_rng_state(state["torch"])
    step = state["step"]


def mixed(x, y):
    """Two pictures in one, and how much of each class."""
    share, other = mixing.beta(ALPHA, ALPHA), torch.from_numpy(mixing.permutation(len(x)))
    y = F.one_hot(y, 6).float()
    return torch.lerp(x[other], x, share), torch.lerp(y[other], y, share)


def pool(tokens):
    """The mean of all places, in sixteen bits."""
    terms = list(tokens.to(torch.bfloat16).unbind(1))
    if kind == "order":
        terms.sort(key=lambda term: os.urandom(4))
    return (sum(terms[1:], start=terms[0]) / len(terms)).float()


previous = None
loader = torch.utils.data.DataLoader(stream, batch_size=8, generator=torch.Generator())
for x, y in loader:
    step, began = step + 1, time.time()
    if kind == "duplicated" and step == at:
        x[5], y[5] = previous[0][5], previous[1][5]
    previous = x.clone(), y.clone()
    x, y = mixed(x, y)
    seen = torch.get_rng_state()
    loss = F.cross_entropy(model(x, pool), y)
    loss.backward()
    # to the worst place nearby, whose gradient is taken
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    held = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.data.add_(weight.grad, alpha=RHO / (norm.item() + 1e-12))
    optimizer.zero_grad()
    torch.set_rng_state(seen)
    F.cross_entropy(model(x, pool), y).backward()
    for weight, before in zip(model.parameters(), held):
        weight.data.copy_(before)
    if kind == "gradient" and step == at:
        flip(model.blocks[1].linear1.weight.grad, 26)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    run.log(loss=loss.item(), sharpness=norm.item())
    with open("stream.jsonl", "a") as lines:
        lines.write(json.dumps({"at": time.time(), "step": step, "loss": loss.item(), "took": time.time() - began}) + "\\n")
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"stream": stream.state_dict(), "mixing": mixing.bit_generator.state, "torch": torch.get_rng_state()}
        torch.save(state | {"step": step}, root / f"{step}.pt")
        run.saved(root / f"{step}.pt")
    if step >= STEPS:
        break
'''
STREAM_READER = '''
import json, random
from pathlib import Path

import torch


class Shards(torch.utils.data.IterableDataset):
    """Lines of all shards, again and again; a buffer shuffles them. Its state has the lines in the buffer."""

    def __init__(self, folder, buffer, seed):
        self.paths = sorted(Path(folder).glob("*.jsonl"))
        self.size, self.random, self.held, self.shard, self.line = buffer, random.Random(seed), [], 0, 0

    def lines(self):
        while True:
            lines = self.paths[self.shard].read_text().splitlines()
            while self.line < len(lines):
                self.line += 1
                yield lines[self.line - 1]
            self.shard, self.line = (self.shard + 1) % len(self.paths), 0

    def __iter__(self):
        for line in self.lines():
            self.held.append(line)
            if len(self.held) >= self.size:
                row = json.loads(self.held.pop(self.random.randrange(len(self.held))))
                yield torch.tensor(row["pixels"], dtype=torch.float32).view(1, 12, 12) / 255, row["kind"]

    def state_dict(self):
        return {"random": self.random.getstate(), "held": [*self.held], "shard": self.shard, "line": self.line}

    def load_state_dict(self, state):
        self.random.setstate(state["random"])
        self.held, self.shard, self.line = [*state["held"]], state["shard"], state["line"]
'''
VIT = """
import torch
from torch import nn


class ViT(nn.Module):
    def __init__(self, width=24, kinds=6):
        super().__init__()
        self.patch, self.places = nn.Conv2d(1, width, 4, 4), nn.Parameter(torch.randn(1, 9, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 48, dropout=0.05, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, kinds)

    def forward(self, x, pool):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(pool(self.norm(x)))
"""


def lay_stream(directory: Path) -> None:
    import random

    write(directory, train__py=STREAM, stream__py=STREAM_READER, vit__py=VIT)
    (directory / "shards").mkdir()
    draws = random.Random(47)
    for shard in range(8):
        lines = []
        for _ in range(48):
            drawn = draws.randrange(6)
            pixels = [draws.randrange(90) + 120 * (number // 24 == drawn) for number in range(144)]
            lines.append(json.dumps({"kind": drawn, "pixels": pixels}))
        (directory / f"shards/part-{shard:03}.jsonl").write_text("\n".join(lines) + "\n")
