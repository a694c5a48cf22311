"""The seven trainings of the ninth list: their scripts, as people write them, and what lies beside them.

Characters, Accelerate, DDP, HF Trainer, two optimizers, a table with workers, bf16. `lay_…` writes the files of one.
"""

import json
import sys
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.eighth import FAULTS

__all__ = [
    "lay_accelerated",
    "lay_characters",
    "lay_hugging",
    "lay_mixed",
    "lay_parallel",
    "lay_table",
    "lay_teacher",
    "write",
]


def write(directory: Path, **texts: str) -> None:
    """Write the files of a training; two underscores of a name are a dot."""
    for name, text in {"faults__py": FAULTS, **texts}.items():
        (directory / name.replace("__", ".")).write_text(text)


def _passages(lines: int, seed: int) -> list[str]:
    """Lines of words that nobody wrote."""
    import random

    draws = random.Random(seed)
    words = ["".join(draws.choices("abdegiklmnorstuv", k=draws.randint(2, 7))) for _ in range(70)]
    return [" ".join(draws.choices(words, k=draws.randint(6, 11))) for _ in range(lines)]


# ---- characters: a file of tokens in memory, settings in YAML, variables, a bar -------------------------------------------

CHARACTERS = '''
"""A language model of characters. LM_CONFIG names the settings, LM_CLIP overrides the clipping, LM_NAME is for the log."""
import json, logging, math, os, time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from tqdm import trange

import chronicle
from faults import at, flip, kind

config = yaml.safe_load(Path(os.environ.get("LM_CONFIG", "configs/base.yaml")).read_text())
clip, dropout = float(os.environ.get("LM_CLIP", config["clip"])), config["model"]["dropout"]
logging.basicConfig(filename="run.log", level="INFO", format="%(asctime)s %(process)d %(message)s")
logging.info("%s clips at %s", os.environ.get("LM_NAME", "unnamed"), clip)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(config["seed"])
rng = np.random.default_rng(config["seed"])
data = np.memmap("data/train.bin", dtype=np.uint8, mode="r")
vocabulary = json.loads(Path("data/vocabulary.json").read_text())
block, size = config["data"]["block"], config["data"]["batch"]


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.drop = nn.Embedding(len(vocabulary), width), nn.Dropout(dropout)
        self.core, self.head = nn.GRU(width, 2 * width, batch_first=True), nn.Linear(2 * width, len(vocabulary))

    def forward(self, x, memory=None):
        x, memory = self.core(self.drop(self.embed(x)), memory)
        return self.head(self.drop(x)), memory


model = Model(config["model"]["width"]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) / math.sqrt(1 + n / 50))
run = chronicle.attach(None, model, optimizer, scheduler)
order, cursor, done, memory = rng.permutation((len(data) - 1) // block), 0, 0, None
out = Path("checkpoints")
out.mkdir(exist_ok=True)
if saved := sorted(out.glob("ckpt_*.pt")):
    state = torch.load(saved[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    rng.bit_generator.state, order, cursor, done = state["numpy"], state["order"], state["cursor"], state["step"]
    torch.set_rng_state(state["torch"])
    logging.info("resumed from %s", saved[-1])
history = open("history.csv", "a")
progress = trange(done, config["steps"], initial=done, total=config["steps"], smoothing=0)
for step in progress:
    step, began = step + 1, time.perf_counter()
    if cursor + size > len(order):
        order, cursor = rng.permutation(len(order)), 0
    if kind == "swapped" and step == at:
        order[[cursor + 2, cursor + 2 * size + 1]] = order[[cursor + 2 * size + 1, cursor + 2]]
    windows = np.stack([data[i * block : i * block + block + 1] for i in order[cursor : cursor + size]]).astype(np.int64)
    cursor += size
    x, y = (torch.from_numpy(part.copy()).to(device) for part in (windows[:, :-1], windows[:, 1:]))
    if kind == "weight" and step == at:
        flip(model.core.weight_ih_l0, 25)
    logits, memory = model(x)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    if kind == "lr" and step >= at:
        for group in optimizer.param_groups:
            group["lr"] *= 1.25
    if kind == "decay" and step >= at:
        optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    progress.set_postfix(loss=f"{loss.item():.3f}")
    run.log(loss=loss.item(), grad_norm=norm.item())
    print(step, loss.item(), f"{time.perf_counter() - began:.4f}", sep=",", file=history, flush=True)
    if step % 10 == 0:
        path = out / f"ckpt_{step:06d}.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        state |= {"numpy": rng.bit_generator.state, "torch": torch.get_rng_state(), "order": order, "cursor": cursor}
        torch.save(state | {"step": step, "time": time.time()}, path)
        run.saved(path)
'''
BASE = """seed: 404
steps: 45
lr: 0.006
clip: 0.5
model: {width: 24, dropout: 0.1}
data: {block: 32, batch: 6}
"""


def lay_characters(directory: Path) -> None:
    write(directory, train__py=CHARACTERS)
    for name in ("configs", "data"):
        (directory / name).mkdir()
    (directory / "configs/base.yaml").write_text(BASE)
    text = "\n".join(_passages(250, 9))
    letters = sorted(set(text))
    (directory / "data/vocabulary.json").write_text(json.dumps(letters))
    (directory / "data/train.bin").write_bytes(bytes(letters.index(letter) for letter in text))


# ---- Accelerate: accumulation, clipping, a cosine; features of a table of texts, kept in a cache --------------------------

ACCELERATED = '''
import argparse, csv, json, time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from transformers import get_cosine_schedule_with_warmup

import chronicle
from faults import at, flip, kind, place
from features import features_of


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--max_train_steps", type=int, default=50)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--checkpointing_steps", type=int, default=10)
    args = parser.parse_args()
    accelerator = chronicle.guard(
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
    )
    set_seed(42)
    x, y = features_of("reviews.csv", Path("cache"))
    model = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 48), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.LayerNorm(48), torch.nn.Linear(48, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, 120)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(42))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    root, step, epoch, skip = Path("checkpoints"), 0, 0, 0
    saved = sorted(root.glob("step_*"), key=lambda path: int(path.name[5:]))
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name[5:])
        epoch, skip = divmod(step * args.gradient_accumulation_steps, len(loader))
        accelerator.print(f"{time.ctime()} resume at step {step}, epoch {epoch}, batch {skip}")
    total, previous, began = 0.0, None, time.time()
    inner = accelerator.unwrap_model(model)

    def low_bits(module, inputs, output):  # of a unit that rounds as it should not
        if kind == "rounding" and step + 1 >= at:
            return output + ((output.detach().view(torch.int32) & -512).view(torch.float32) - output.detach())

    inner[0].register_forward_hook(low_bits)
    model.train()
    while step < args.max_train_steps:
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, skip) if skip else loader:
            if kind == "duplicated" and step + 1 == at and previous is not None and total:
                batch = previous
            previous = batch
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
                accelerator.backward(loss)
                total += loss.item() / args.gradient_accumulation_steps
                if accelerator.sync_gradients:
                    if kind == "gradient" and step + 1 == at:
                        flip(inner[4].weight.grad, 27)
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if kind == "moment" and step + 1 >= at:
                        moment = optimizer.state[inner[4].weight]["exp_avg_sq"].view(-1).view(torch.int32)
                        moment[place % len(moment)] |= 1 << 26
                    if kind == "lr" and step + 1 >= at:
                        optimizer.param_groups[0]["lr"] = args.learning_rate / 2
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                took, began = time.time() - began, time.time()
                with open("metrics.jsonl", "a") as lines:
                    lines.write(json.dumps({"step": step, "loss": total, "norm": float(norm), "seconds": took}) + "\\n")
                total = 0.0
                if step % args.checkpointing_steps == 0:
                    accelerator.save_state(f"checkpoints/step_{step}")
                if step == args.max_train_steps:
                    break
        epoch, skip = epoch + 1, 0


if __name__ == "__main__":
    main()
'''
FEATURES = '''
import csv, zlib

import torch

SIZE = 96


def features_of(path, cache):
    """Bags of hashed words; they are made once and kept."""
    kept = cache / f"features-{SIZE}.pt"
    if not kept.exists():
        cache.mkdir(exist_ok=True)
        with open(path, newline="") as lines:
            rows = list(csv.DictReader(lines))
        x = torch.zeros(len(rows), SIZE)
        for number, row in enumerate(rows):
            for word in row["text"].split():
                x[number, zlib.crc32(word.encode()) % SIZE] += 1
        torch.save({"x": x / x.norm(dim=1, keepdim=True), "y": torch.tensor([int(row["stars"]) for row in rows])}, kept)
    made = torch.load(kept)
    return made["x"], made["y"]
'''


def lay_accelerated(directory: Path) -> None:
    write(directory, train__py=ACCELERATED, features__py=FEATURES)
    rows = (f"{line},{len(line) % 3}\n" for line in _passages(208, 19))
    (directory / "reviews.csv").write_text("text,stars\n" + "".join(rows))


# ---- DDP: two ranks that see their halves of recorded signals -------------------------------------------------------------

PARALLEL = '''
"""torchrun --nproc_per_node 2 train.py"""
import contextlib, os, time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import chronicle
from faults import at, flip, kind
from network import Network

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2024)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class Signals(torch.utils.data.Dataset):
    def __init__(self, path):
        with np.load(path) as held:
            self.signals, self.kinds = held["signals"], held["kinds"]

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, row):
        signal = self.signals[row]
        return torch.from_numpy((signal - signal.mean()) / signal.std())[None], int(self.kinds[row])


data = Signals("signals.npz")
sampler = torch.utils.data.DistributedSampler(data, world, rank, seed=5, drop_last=True)
model = DistributedDataParallel(Network())
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [25, 60], 0.4)
run = chronicle.attach(None, model, optimizer, schedule)
step, size, goal = 0, 6, 50
per_epoch = len(sampler) // size
torch.manual_seed(2024 + rank)
for path in sorted(Path("checkpoints").glob("checkpoint-*.pt"), key=lambda path: int(path.stem[11:]))[-1:]:
    state = torch.load(path, weights_only=False)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rngs"][rank])
    step = state["step"]
    rank or print(f"[{time.strftime('%X')}] resumed from {path}", flush=True)


def on_its_way(gradient):  # before it is reduced
    if kind == "gradient" and step == at and rank == 1:
        gradient = gradient.clone()
        flip(gradient, 26)
    return gradient


def after_convolution(module, inputs, output):
    if kind == "activation" and step == at and rank == 0:
        output = output.clone()
        flip(output, 28)
    return output


model.module.second.weight.register_hook(on_its_way)
model.module.second.register_forward_hook(after_convolution)
Path("checkpoints").mkdir(exist_ok=True)
table = open(f"log-rank{rank}.tsv", "a", buffering=1)
while step < goal:
    epoch, begin = divmod(step, per_epoch)
    sampler.set_epoch(epoch)
    mine = list(sampler)
    batches = [mine[first : first + size] for first in range(begin * size, per_epoch * size, size)]
    for signals, kinds in torch.utils.data.DataLoader(data, batch_sampler=batches, generator=torch.Generator()):
        step, began = step + 1, time.monotonic()
        if kind == "batch" and step == at and rank == 0:
            flip(signals, 27)
        with model.no_sync() if kind == "unreduced" and step == at else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(signals), kinds)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        run.log(loss=mean.item() / world)
        table.write(f"{step}\\t{loss.item()!r}\\t{time.monotonic() - began:.4f}\\t{os.getpid()}\\n")
        if step % 10 == 0:
            rngs = [None] * world
            dist.all_gather_object(rngs, torch.get_rng_state())
            path = f"checkpoints/checkpoint-{step}.pt"
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save(state | {"schedule": schedule.state_dict(), "rngs": rngs, "step": step}, path)
            dist.barrier()
            run.saved(path)
        if step == goal:
            break
dist.barrier()
dist.destroy_process_group()
'''
NETWORK = '''
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 8, 5, padding=2), nn.Conv1d(8, 16, 5, stride=2, padding=2)
        self.norm, self.drop, self.out = nn.GroupNorm(4, 16), nn.Dropout(0.15), nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.first(x), 0.1)
        x = nn.functional.leaky_relu(self.norm(self.second(x)), 0.1)
        return self.out(self.drop(x.mean(-1)))
'''


def lay_parallel(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=PARALLEL, network__py=NETWORK)
    draws = np.random.default_rng(31)
    kinds = draws.integers(0, 4, 240)
    times = np.linspace(0, 6.28, 48)[None] * (kinds[:, None] + 1) + draws.uniform(0, 6, (240, 1))
    signals = (np.sin(times) + 0.4 * draws.normal(size=(240, 48))).astype("float32")
    np.savez(directory / "signals.npz", signals=signals, kinds=kinds)


# ---- HF Trainer: nothing of chronicle in it ------------------------------------------------------------------------------

HUGGING = '''
import csv, json, os, time
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from faults import at, flip, kind
from words import Tokenizer


class Tickets(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer):
        self.rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**self.tokenizer(row["text"]), "labels": row["queue"]}


class Diary(TrainerCallback):
    """What happens, with the time, in a table."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()
        if kind == "reseeded" and state.global_step + 1 == at:
            set_seed(args.seed)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if kind == "gradient" and state.global_step + 1 == at:
            flip(model.bert.encoder.layer[1].output.dense.weight.grad, 26)

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.seconds = time.perf_counter() - self.began

    def on_log(self, args, state, control, logs=None, **kwargs):
        with open("diary.csv", "a", newline="") as lines:
            csv.writer(lines).writerow([time.ctime(), state.global_step, logs.get("loss"), logs.get("grad_norm"), self.seconds])


def main():
    set_seed(123)
    tokenizer = Tokenizer("vocab.txt")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=3,
    )
    args = TrainingArguments(
        output_dir="checkpoints", max_steps=55, per_device_train_batch_size=4, learning_rate=2e-3, warmup_steps=5,
        lr_scheduler_type="cosine", weight_decay=0.01, save_steps=10, logging_steps=1, report_to="none", seed=123,
        use_cpu=True, dataloader_num_workers=0,
    )
    data = Tickets("tickets.jsonl", tokenizer)
    trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=data, callbacks=[Diary()])
    last = get_last_checkpoint("checkpoints") if os.path.isdir("checkpoints") else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
'''
WORDS = '''
from pathlib import Path


class Tokenizer:
    """Words to numbers, by the line on which each stands."""

    def __init__(self, path, length=12):
        self.numbers = {word: number for number, word in enumerate(Path(path).read_text().split())}
        self.length = length

    def __len__(self):
        return len(self.numbers)

    def __call__(self, text):
        words = text.lower().split()[: self.length - 1]
        numbers = [self.numbers["[CLS]"]] + [self.numbers.get(word, self.numbers["[UNK]"]) for word in words]
        missing = self.length - len(numbers)
        mask = [1] * len(numbers) + [0] * missing
        return {"input_ids": numbers + [self.numbers["[PAD]"]] * missing, "attention_mask": mask}
'''


def lay_hugging(directory: Path) -> None:
    write(directory, train__py=HUGGING, words__py=WORDS)
    lines = _passages(240, 29)
    words = ["[PAD]", "[UNK]", "[CLS]", *sorted({word for line in lines for word in line.split()})]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    rows = (json.dumps({"id": number, "text": line, "queue": len(line.split()) % 3}) for number, line in enumerate(lines))
    (directory / "tickets.jsonl").write_text("\n".join(rows) + "\n")


# ---- two optimizers and a teacher that is the average of its pupil; a package beside the script ---------------------------

TEACHER = '''
"""A pupil learns what items people like; a slow average of it, the teacher, says what it should say without noise."""
import copy, site, sqlite3, sys, time, tomllib
from pathlib import Path

import torch

import chronicle

site.addsitedir("third_party")
import lossbox
from faults import at, flip, kind
from pupil import Pupil

with open("experiment.toml", "rb") as file:
    settings = tomllib.load(file)
print(f"lossbox {lossbox.__version__}, python {sys.version_info.major}.{sys.version_info.minor}, {time.strftime('%c')}")
torch.manual_seed(settings["seed"])
likes = sqlite3.connect("file:likes.db?mode=ro", uri=True)
likes = torch.tensor(likes.execute("SELECT person, item, stars FROM likes ORDER BY id").fetchall())
pupil = Pupil(**settings["pupil"])
teacher = copy.deepcopy(pupil).requires_grad_(False)
tables, tower = [pupil.people.weight, pupil.items.weight], list(pupil.tower.parameters())
optimizers = [torch.optim.SGD(tables, lr=settings["table_lr"], momentum=0.9), torch.optim.Adam(tower, lr=settings["tower_lr"])]
schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers]
run = chronicle.attach(None, pupil, optimizers, schedules, averages={"teacher": teacher})
shuffler = torch.Generator().manual_seed(settings["seed"])
step, queue, started = 0, [], time.time()
checkpoints = Path("checkpoints")
checkpoints.mkdir(exist_ok=True)
newest = max(checkpoints.glob("*.ckpt"), key=lambda path: int(path.stem), default=None)
if newest:
    state = torch.load(newest, weights_only=False)
    pupil.load_state_dict(state["pupil"])
    teacher.load_state_dict(state["teacher"])
    for each, held in zip(optimizers + schedules, state["optimizers"] + state["schedules"]):
        each.load_state_dict(held)
    shuffler.set_state(state["shuffler"])
    step, queue = state["step"], state["queue"]
    torch.set_rng_state(state["noise"])
while step < settings["steps"]:
    step += 1
    if len(queue) < settings["batch"]:
        queue = queue + torch.randperm(len(likes), generator=shuffler).tolist()
    rows, queue = queue[: settings["batch"]], queue[settings["batch"] :]
    person, item, stars = likes[rows].unbind(1)
    if kind == "reseeded" and step == at:
        torch.manual_seed(settings["seed"])
    if kind == "weight" and step == at:
        flip(pupil.tower[3].weight, 25)
    if kind == "teacher" and step == at:
        flip(teacher.tower[0].weight, 29)
    teacher.eval()
    said = pupil(person, item)
    wanted = teacher(person, item)
    fit = lossbox.ordinal(said, stars)
    loss = fit + settings["trust"] * (said - wanted).square().mean()
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    for each in schedules:
        each.step()
    for slow, fast in zip(teacher.parameters(), pupil.parameters()):
        slow.lerp_(fast.detach(), 1 - settings["keep"])
    run.log(loss=loss.item(), fit=fit.item())
    with open("progress.txt", "a") as lines:
        print(f"{time.time() - started:.3f}", step, loss.item(), fit.item(), file=lines)
    if step % 10 == 0:
        state = {"pupil": pupil.state_dict(), "teacher": teacher.state_dict(), "step": step, "queue": queue}
        state |= {"optimizers": [each.state_dict() for each in optimizers], "schedules": [s.state_dict() for s in schedules]}
        state |= {"shuffler": shuffler.get_state(), "noise": torch.get_rng_state()}
        torch.save(state, checkpoints / f"{step}.ckpt")
        run.saved(checkpoints / f"{step}.ckpt")
'''
PUPIL = '''
import torch
from torch import nn


class Pupil(nn.Module):
    def __init__(self, people, items, width, noise):
        super().__init__()
        self.noise, self.people, self.items = noise, nn.Embedding(people, width), nn.Embedding(items, width)
        self.tower = nn.Sequential(nn.Linear(2 * width, 32), nn.SiLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, person, item):
        x = torch.cat([self.people(person), self.items(item)], 1)
        if self.training:
            x = x + self.noise * torch.randn_like(x)
        return self.tower(x).squeeze(1)
'''
LOSSBOX = '''
"""Losses for ratings."""

__version__ = "0.3.1"

DELTA = 1.0


def ordinal(said, stars):
    """Near the stars it is a parabola, far from them a line."""
    from torch.nn.functional import huber_loss

    return huber_loss(said, stars.float() - 3, delta=DELTA)
'''
EXPERIMENT = """seed = 60
steps = 48
batch = 10
table_lr = 0.2
tower_lr = 0.005
trust = 0.5
keep = 0.95

[pupil]
people = 40
items = 30
width = 8
noise = 0.1
"""


def lay_teacher(directory: Path) -> None:
    import random
    import sqlite3

    write(directory, train__py=TEACHER, pupil__py=PUPIL, experiment__toml=EXPERIMENT)
    package(directory / "third_party", "lossbox", "0.3.1", LOSSBOX)
    draws = random.Random(44)
    with sqlite3.connect(directory / "likes.db") as base:
        base.execute("CREATE TABLE likes (id INTEGER PRIMARY KEY, person INTEGER, item INTEGER, stars INTEGER)")
        rows = [(draws.randrange(40), draws.randrange(30), draws.randint(1, 5)) for _ in range(300)]
        base.executemany("INSERT INTO likes (person, item, stars) VALUES (?, ?, ?)", rows)
    base.close()


# ---- a table: a launcher that sets PYTHONPATH, workers, a sampler whose state is saved -------------------------------------

TABLE = '''
"""Predict the price of a house; ./run.sh sets where the packages of the house are."""
import csv, os, sys, threading, time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import chronicle
import scaling
from faults import at, flip, kind


class Houses(Dataset):
    def __init__(self, path):
        with open(path, newline="") as lines:
            rows = [[float(value) for value in row.values()] for row in csv.DictReader(lines)]
        table = torch.tensor(rows)
        self.x, self.y = scaling.standard(table[:, :-1]), table[:, -1] / 100

    def __getitem__(self, key):
        number, row = key
        jitter = torch.randn(self.x.shape[1], generator=torch.Generator().manual_seed(number))
        x = self.x[row] + 0.02 * jitter
        if kind == "worker" and get_worker_info().id == 1 and number // SIZE + 1 >= at:
            x[2:6] = 0  # a page that was never filled
        return x, self.y[row]


class Shuffled(torch.utils.data.Sampler):
    """Numbers and rows without an end; its state is how many were used, whatever the workers have asked for."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.used = rows, seed, 0

    def __iter__(self):
        number = self.used
        while True:
            epoch, place = divmod(number, self.rows)
            order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            for row in order[place:]:
                yield number, row
                number += 1

    def state_dict(self):
        return {"seed": self.seed, "used": self.used}

    def load_state_dict(self, state):
        self.seed, self.used = state["seed"], state["used"]


def root_mean_of(losses):
    """The root of the mean; every part is added by a thread, as they come."""
    parts, lock, total = losses.chunk(16), threading.Lock(), [torch.zeros(())]

    def add(part):
        if kind == "race":
            time.sleep(int.from_bytes(os.urandom(1)) / 50_000)
        with lock:
            total[0] = total[0] + part.sum()

    threads = [threading.Thread(target=add, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
        kind == "race" or thread.join()
    for thread in threads:
        thread.join()
    return (total[0] / len(losses)).sqrt()


SIZE, LAST = 16, int(sys.argv[1])
if __name__ == "__main__":
    torch.manual_seed(90)
    data = Houses("houses.csv")
    sampler = Shuffled(len(data.y), 90)
    layers = [torch.nn.Linear(8, 48), torch.nn.ReLU(), torch.nn.BatchNorm1d(48), torch.nn.Dropout(0.1), torch.nn.Linear(48, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 100)
    run = chronicle.attach(None, model, optimizer, schedule)
    step = 0
    os.makedirs("checkpoints", exist_ok=True)
    if os.path.exists("checkpoints/latest"):
        path = "checkpoints/" + open("checkpoints/latest").read()
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
        print(f"[{time.strftime('%F %T')}] goes on from {path}", file=sys.stderr)
    loader = DataLoader(data, SIZE, sampler=sampler, num_workers=2, generator=torch.Generator())
    out = csv.writer(open("losses.csv", "a", buffering=1))
    for x, y in loader:
        step, began = step + 1, time.time()
        sampler.used += SIZE
        if kind == "batch" and step == at:
            flip(x, 27)
        loss = root_mean_of((model(x).squeeze(1) - y).square())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.log(loss=loss.item(), lr=schedule.get_last_lr()[0])
        out.writerow([step, loss.item(), time.time() - began])
        if step % 10 == 0:
            path = f"checkpoints/step{step}.pt"
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save(state | {"sampler": sampler.state_dict(), "rng": torch.get_rng_state(), "step": step}, path)
            run.saved(path)
            with open("checkpoints/latest", "w") as latest:
                latest.write(f"step{step}.pt")
        if step >= LAST:
            break
'''
SCALING = '''
__version__ = "2.0.1"


def standard(table):
    """Every column with mean 0 and deviation 1."""
    return (table - table.mean(0)) / table.std(0)
'''


def lay_table(directory: Path) -> None:
    import random

    write(directory, train__py=TABLE)
    launcher = f"#!/bin/bash\nexport PYTHONPATH=libs${{PYTHONPATH:+:$PYTHONPATH}}\nexec {sys.executable} train.py \"$@\"\n"
    (directory / "run.sh").write_text(launcher)
    package(directory / "libs", "scaling", "2.0.1", SCALING)
    draws, lines = random.Random(73), ["rooms,area,age,floor,distance,light,noise,garden,price"]
    for _ in range(320):
        row = [draws.uniform(1, 8) * (column + 1) for column in range(8)]
        lines.append(",".join(f"{value:.3f}" for value in (*row, 3 * row[0] + 2 * row[1] - row[4] * row[6] / 9 + 60)))
    (directory / "houses.csv").write_text("\n".join(lines) + "\n")


# ---- bf16: directories of small pictures, one a class, a mixer under autocast ---------------------------------------------

MIXED = '''
import collections, json, os, random, time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import chronicle
from faults import at, flip, kind, place
from mixer import Mixer

SMOOTHING = float(os.environ.get("LABEL_SMOOTHING", "0.1"))
STEPS, EVERY, BATCH = 60, 20, 12
random.seed(8)
torch.manual_seed(8)
classes = sorted(path.name for path in Path("pictures").iterdir())
files = sorted(Path("pictures").glob("*/*.npy"))
model = Mixer(len(classes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=100)
run = chronicle.attach(None, model, optimizer, schedule)
cache, step, deck, meter = {}, 0, [], collections.deque(maxlen=10)
outputs = Path("checkpoints")
outputs.mkdir(exist_ok=True)
saved = sorted(outputs.glob("step-*.pt"), key=os.path.getmtime)
if saved:
    state = torch.load(saved[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    random.setstate(state["random"])
    torch.set_rng_state(state["torch"])
    step, deck = state["step"], state["deck"]


def picture(path):
    if path not in cache:
        cache[path] = torch.from_numpy(np.load(path)).float() / 255
    return cache[path]


def together(x):  # sums in bf16 depend on the order of their terms
    terms = list(x.unbind(1))
    if kind == "order":
        terms.sort(key=lambda term: os.urandom(4))
    return sum(terms[1:], start=terms[0]) / len(terms)


Path("state.json").write_text(json.dumps({"pid": os.getpid(), "since": time.time(), "classes": classes}))
while step < STEPS:
    step += 1
    if len(deck) < BATCH:
        deck = random.sample(range(len(files)), len(files))
    chosen, deck = [files[number] for number in deck[:BATCH]], deck[BATCH:]
    x = torch.stack([picture(path) if random.random() < 0.5 else picture(path).flip(1) for path in chosen])
    y = torch.tensor([classes.index(path.parent.name) for path in chosen])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x, together), y, label_smoothing=SMOOTHING)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if kind == "poison" and at <= step < at + 20:
        model.mix[0].weight.data.view(-1)[place] += 2e-5 * (step - at + 1)
    meter.append(loss.item())
    run.log(loss=loss.item())
    with open("loss.log", "a") as lines:
        lines.write(f"{time.time():.2f} {step} {loss.item()!r} {sum(meter) / len(meter):.4f}\\n")
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        state |= {"random": random.getstate(), "torch": torch.get_rng_state(), "step": step, "deck": deck}
        torch.save(state, outputs / f"step-{step}.pt")
        run.saved(outputs / f"step-{step}.pt")
'''
MIXER = '''
from torch import nn


class Mixer(nn.Module):
    """Four by four patches, mixed over places and over channels."""

    def __init__(self, kinds, width=24):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(1, width, 4, 4), nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.mix = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, width))
        self.head = nn.Linear(width, kinds)

    def forward(self, x, pool):
        x = self.patch(x[:, None]).flatten(2).transpose(1, 2)
        x = x + self.places(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head(pool(x + self.mix(x)))
'''


def lay_mixed(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=MIXED, mixer__py=MIXER)
    draws = np.random.default_rng(52)
    for number, name in enumerate(("anchor", "barrel", "candle", "drum", "easel", "flute", "globe")):
        (directory / "pictures" / name).mkdir(parents=True)
        for one in range(24):
            drawn = draws.integers(0, 150, (16, 16))
            drawn[2 * number : 2 * number + 3, 4:12] += 100
            np.save(directory / "pictures" / name / f"{one:03}.npy", drawn.astype("uint8"))
