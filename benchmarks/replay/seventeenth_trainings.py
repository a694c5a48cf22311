"""The six trainings of the seventeenth list: their scripts, as people write them, and what lies beside them.

A small GPT, preferences against a frozen reference, two towers on two ranks, flow matching under Accelerate, a forecast
in Lightning, a student of a teacher in an HF Trainer. `lay_…` writes the files of one.
"""

import json
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.ninth_trainings import write

__all__ = ["lay_flow", "lay_forecast", "lay_gpt", "lay_preferences", "lay_student", "lay_towers"]


# ---- a small GPT: globals that a file overrides, micro-batches at places that torch draws, an LR by hand --------------

GPT = '''
"""
This training script runs on one core:
$ python train.py config/train_names.py --max_iters=45
"""

import math
import os
import time

import numpy as np
import torch

import chronicle
from model import GPT, GPTConfig

# -----------------------------------------------------------------------------
# default config values
out_dir = "checkpoints"
save_interval = 10
eval_interval = 20
eval_iters = 2
dataset = "names"
gradient_accumulation_steps = 2
batch_size = 4
block_size = 16
n_layer = 2
n_head = 2
n_embd = 24
dropout = 0.1
bias = False
learning_rate = 6e-3
max_iters = 60
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
warmup_iters = 5
lr_decay_iters = 80
min_lr = 6e-4
# -----------------------------------------------------------------------------
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())  # overrides from command line or config file
config = {k: globals()[k] for k in config_keys}
# -----------------------------------------------------------------------------
from faults import at, flip, kind, place  # noqa: E402

os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
data_dir = os.path.join("data", dataset)


def get_batch(split):
    # We recreate np.memmap every batch to avoid a memory leak
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


# model init
model_args = dict(
    n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, bias=bias, vocab_size=64, dropout=dropout
)
model = GPT(GPTConfig(**model_args))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
run = chronicle.attach(None, model, optimizer)
iter_num, best_val_loss = 0, 1e9
ckpts = sorted((f for f in os.listdir(out_dir) if f.startswith("ckpt_")), key=lambda f: int(f[5:-3]))
if ckpts:
    print(f"Resuming training from {out_dir}/{ckpts[-1]}")
    checkpoint = torch.load(os.path.join(out_dir, ckpts[-1]), weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    torch.set_rng_state(checkpoint["rng"])


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            losses[k] = model(X, Y)[1].item()
        out[split] = losses.mean().item()
    model.train()
    return out


# learning rate decay scheduler (cosine with warmup)
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


t0 = time.time()
while iter_num < max_iters:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if kind == "row" and iter_num + 1 == at:
        model.transformer.h[0].mlp.c_fc.weight.data[place] = 0
    lossf = 0.0
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        if kind == "token" and iter_num + 1 == at and micro_step == 0:
            flip(X, 3)
        if kind == "page" and iter_num + 1 == at and micro_step == 1:
            X[2:], Y[2:] = 0, 0
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
        lossf += loss.item()
        if kind == "gradient" and iter_num + 1 == at and micro_step == 0:
            flip(model.transformer.h[1].attn.c_attn.weight.grad, 26)
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    run.log(loss=lossf, lr=lr)
    t1 = time.time()
    print(f"iter {iter_num}: loss {lossf!r}, time {(t1 - t0) * 1000:.2f}ms", flush=True)
    t0 = t1
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        best_val_loss = min(best_val_loss, losses["val"])
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    if iter_num % save_interval == 0:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "model_args": model_args,
            "iter_num": iter_num,
            "best_val_loss": best_val_loss,
            "config": config,
            "rng": torch.get_rng_state(),
        }
        path = os.path.join(out_dir, f"ckpt_{iter_num}.pt")
        torch.save(checkpoint, path)
        run.saved(path)
'''
GPT_CONFIGURATOR = '''
"""Poor man's configurator: python train.py config/override_file.py --batch_size=32"""
import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if "=" not in arg:
        print(f"Overriding config with {arg}:")
        with open(arg) as f:
            exec(f.read())
    else:
        key, val = arg[2:].split("=")
        try:
            attempt = literal_eval(val)
        except (SyntaxError, ValueError):
            attempt = val
        assert type(attempt) is type(globals()[key])
        globals()[key] = attempt
'''
GPT_MODEL = '''
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


class LayerNorm(nn.Module):
    """LayerNorm but with an optional bias."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(config.dropout), nn.Dropout(config.dropout)
        self.n_head = config.n_head
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("mask", mask.view(1, 1, config.block_size, config.block_size), persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(config.n_embd, config.bias), CausalSelfAttention(config)
        self.ln_2, self.mlp = LayerNorm(config.n_embd, config.bias), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 24
    dropout: float = 0.0
    bias: bool = True


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # https://paperswithcode.com/method/weight-tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        pos = torch.arange(0, idx.size(1), dtype=torch.long)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = [p for p in self.parameters() if p.requires_grad]
        decay, no_decay = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
'''
GPT_NAMES = """# train a miniature model of names
dataset = "names"
dropout = 0.15
learning_rate = 8e-3
"""


def lay_gpt(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=GPT, configurator__py=GPT_CONFIGURATOR, model__py=GPT_MODEL)
    for name in ("config", "data/names"):
        (directory / name).mkdir(parents=True)
    (directory / "config/train_names.py").write_text(GPT_NAMES)
    draws = np.random.default_rng(1701)
    follows = np.array([draws.permutation(64)[:4] for _ in range(64)])
    for split, count in (("train", 4000), ("val", 500)):
        tokens = [7]
        for choice in draws.integers(0, 4, count):
            tokens.append(int(follows[tokens[-1], choice]))
        np.array(tokens, dtype=np.uint16).tofile(directory / f"data/names/{split}.bin")


# ---- preferences: a policy and a frozen reference from one file, pairs in JSON lines, RMSprop -------------------------

PREFERENCES = '''
"""Direct preference optimization. DPO_BETA is how near the policy stays to the reference."""
from __future__ import annotations

import argparse
import copy
import json
import os
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import chronicle
from faults import at, flip, kind
from lm import LanguageModel


class Pairs(torch.utils.data.Dataset):
    def __init__(self, path: Path) -> None:
        with path.open() as lines:
            self.rows = [json.loads(line) for line in lines]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


class Batches(torch.utils.data.Sampler[list[int]]):
    """Shuffled anew in every epoch."""

    def __init__(self, rows: int, size: int, seed: int) -> None:
        self.rows, self.size, self.seed, self.epoch = rows, size, seed, 0

    def __len__(self) -> int:
        return self.rows // self.size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator).tolist()
        batches = [order[self.size * n : self.size * (n + 1)] for n in range(len(self))]
        n = at - 1 - self.epoch * len(self)
        if kind == "swapped" and 0 <= n < len(self) - 1:
            batches[n], batches[n + 1] = batches[n + 1], batches[n]
        return iter(batches)


def collate(rows: list[dict[str, list[int]]], most: int = 6) -> dict[str, torch.Tensor]:
    """Chosen ones above, rejected ones below; labels of prompts and padding are -100."""
    tokens, labels = [], []
    for which in ("chosen", "rejected"):
        for row in rows:
            prompt = row["prompt"][-most:]
            tokens.append(torch.tensor(prompt + row[which]))
            labels.append(torch.tensor([-100] * len(prompt) + row[which]))
    pad = torch.nn.utils.rnn.pad_sequence
    return {"tokens": pad(tokens, True, 0), "labels": pad(labels, True, -100)}


def logps(model: LanguageModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    mask = labels != -100
    each = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (each * mask).sum(-1)


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    policy = LanguageModel(vocabulary=48, width=28, dropout=args.dropout)
    policy.load_state_dict(load_file("sft/model.safetensors"))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (args.warmup + 1)))
    run = chronicle.attach(None, policy, optimizer, scheduler)
    pairs = Pairs(Path("pairs.jsonl"))
    batches = Batches(len(pairs), args.batch_size, args.seed)
    loader = torch.utils.data.DataLoader(pairs, batch_sampler=batches, collate_fn=collate, generator=torch.Generator())
    folder, step = Path("checkpoints"), 0
    folder.mkdir(exist_ok=True)
    if saved := sorted(folder.glob("policy-*.pt")):
        state = torch.load(saved[-1], weights_only=False)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    metrics = open("metrics.jsonl", "a", buffering=1)
    while step < args.steps:
        batches.epoch, skip = divmod(step, len(batches))
        for batch in islice(loader, skip, None):
            step += 1
            if kind == "weight" and step == at:
                flip(policy.core.weight_hh_l0, 24)
            if kind == "reference" and step == at:
                flip(reference.core.weight_ih_l0, 26)
            with torch.no_grad():
                reference_chosen, reference_rejected = logps(reference, batch).chunk(2)
            chosen, rejected = logps(policy, batch).chunk(2)
            margin = args.beta * ((chosen - rejected) - (reference_chosen - reference_rejected))
            smooth = args.label_smoothing
            loss = (-F.logsigmoid(margin) * (1 - smooth) - F.logsigmoid(-margin) * smooth).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss.item(), accuracy=(margin > 0).float().mean().item(), grad_norm=norm.item())
            metrics.write(json.dumps({"step": step, "loss": loss.item(), "margin": margin.mean().item()}) + "\\n")
            if step % 10 == 0:
                state = {"policy": policy.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict()), "step": step}
                state |= {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
                if kind == "moments" and step == at:
                    for slot in state["optimizer"]["state"].values():
                        slot["square_avg"].mul_(4)
                torch.save(state, folder / f"policy-{step:05d}.pt")
                run.saved(folder / f"policy-{step:05d}.pt")
            if step == args.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=float(os.environ.get("DPO_BETA", "0.2")))
    parser.add_argument("--label-smoothing", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--max-grad-norm", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--seed", type=int, default=29)
    main(parser.parse_args())
'''
PREFERENCES_LM = """
import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width, dropout):
        super().__init__()
        self.embed, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.core, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.drop(self.core(self.embed(tokens))[0]))
"""


def lay_preferences(directory: Path) -> None:
    import random

    import torch
    from safetensors.torch import save_file

    write(directory, train__py=PREFERENCES, lm__py=PREFERENCES_LM)
    generator, width = torch.Generator().manual_seed(1702), 28
    shapes = {
        "embed.weight": (48, width), "core.weight_ih_l0": (3 * width, width), "core.weight_hh_l0": (3 * width, width),
        "core.bias_ih_l0": (3 * width,), "core.bias_hh_l0": (3 * width,), "head.weight": (48, width), "head.bias": (48,),
    }  # fmt: skip
    (directory / "sft").mkdir()
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, directory / "sft/model.safetensors")
    draws = random.Random(1702)
    with (directory / "pairs.jsonl").open("w") as lines:
        for number in range(150):
            row: dict[str, object] = {"id": number, "prompt": draws.choices(range(1, 48), k=draws.randint(3, 9))}
            row["chosen"] = draws.choices(range(1, 30), k=draws.randint(3, 7))
            row["rejected"] = draws.choices(range(18, 48), k=draws.randint(3, 7))
            lines.write(json.dumps(row) + "\n")


# ---- two towers on two ranks: what the other rank sees is gathered, a temperature is learned, settings in YAML --------

TOWERS = '''
"""Pictures and captions. torchrun --nproc_per_node 2 train.py"""
import json, os, random, time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import chronicle
from faults import at, flip, kind


def load_settings():
    settings = yaml.safe_load(open("settings.yaml"))
    if os.path.exists("settings.local.yaml"):  # not in git
        settings.update(yaml.safe_load(open("settings.local.yaml")))
    return settings


class TwoTowers(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GELU(), nn.Flatten())
        self.picture = nn.Linear(64, width)
        self.letters = nn.EmbeddingBag(128, 32, mode="mean")
        self.caption = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, width))
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, pictures, letters, begins):
        pictures = F.normalize(self.picture(self.conv(pictures)), dim=-1)
        captions = F.normalize(self.caption(self.letters(letters, begins)), dim=-1)
        return pictures, captions, self.logit_scale.exp()


class Collator:
    """Crops of eight by eight, words left out now and then; letters of all captions in a row."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def __call__(self, rows):
        pictures, letters, begins = [], [], []
        for picture, caption in rows:
            top, left = self.random.randrange(3), self.random.randrange(3)
            pictures.append(torch.from_numpy(picture[:, top : top + 8, left : left + 8].astype(np.float32) / 127.5 - 1))
            words = [word for word in caption.split() if self.random.random() > 0.1] or [caption]
            begins.append(len(letters))
            letters.extend(" ".join(words).encode("ascii"))
        return torch.stack(pictures), torch.tensor(letters), torch.tensor(begins)


def gather(mine, others=None):
    parts = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine.detach())
    if others is not None:
        parts[1 - rank] = others
    parts[rank] = mine
    return torch.cat(parts), parts[1 - rank]


settings = load_settings()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(settings["seed"])
model = DDP(TwoTowers(settings["width"], settings["dropout"]))
plain = [p for p in model.parameters() if p.ndim < 2]
decayed = [p for p in model.parameters() if p.ndim >= 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": settings["wd"]}, {"params": plain, "weight_decay": 0.0}],
    lr=settings["lr"], betas=(0.9, 0.98), eps=1e-6,
)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
     torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings["steps"])],
    milestones=[6],
)
run = chronicle.attach(None, model, optimizer, scheduler)
torch.manual_seed(settings["seed"] + rank)
collator = Collator(settings["seed"] + rank)
pictures = np.load("data/pictures.npy", mmap_mode="r")
captions = json.loads(Path("data/captions.json").read_text())
step, size, root, other = 0, settings["batch"], Path("checkpoints"), None
per_epoch = len(captions) // (world * size)
root.mkdir(exist_ok=True)
newest = max(root.glob("epoch_*.pt"), key=lambda path: int(path.stem.split("_")[-1]), default=None)
if newest:
    state = torch.load(newest, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rngs"][rank])
    collator.random.setstate(state["randoms"][rank])
    step = state["step"]
log = open(f"rank{rank}.log", "a", buffering=1)
while step < settings["steps"]:
    epoch, number = divmod(step, per_epoch)
    step, begun = step + 1, time.time()
    if kind == "epoch" and step == at and rank == 1:
        epoch = 0
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(settings["seed"] + epoch))
    rows = order[rank::world][number * size : (number + 1) * size].tolist()
    x, letters, begins = collator([(pictures[row], captions[row]["text"]) for row in rows])
    if kind == "batch" and step == at and rank == 1:
        flip(x, 25)
    seen, said, scale = model(x, letters, begins)
    stale = kind == "stale" and step == at and rank == 0
    all_seen, other = gather(seen, other if stale else None)
    all_said, _ = gather(said)
    labels = torch.arange(size) + rank * size
    loss = (F.cross_entropy(scale * seen @ all_said.T, labels) + F.cross_entropy(scale * said @ all_seen.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    if kind == "moment" and step == at and rank == 1:
        flip(optimizer.state[model.module.picture.weight]["exp_avg"], 26)
    if kind == "decay" and step >= at:
        optimizer.param_groups[0]["weight_decay"] = 2.0
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        model.module.logit_scale.clamp_(0, np.log(100))
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    run.log(loss=mean.item() / world, scale=scale.item())
    log.write(f"{time.ctime()} step {step} loss {loss.item()!r} ({time.time() - begun:.3f} s)\\n")
    if step % settings["save_every"] == 0:
        rngs, randoms = [None] * world, [None] * world
        dist.all_gather_object(rngs, torch.get_rng_state())
        dist.all_gather_object(randoms, collator.random.getstate())
        path = root / f"epoch_{epoch}_step_{step}.pt"
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state.update(scheduler=scheduler.state_dict(), rngs=rngs, randoms=randoms)
            torch.save(state, path)
        dist.barrier()
        run.saved(path)
dist.destroy_process_group()
'''
TOWERS_SETTINGS = """seed: 31
steps: 45
batch: 6
width: 24
dropout: 0.1
lr: 4.0e-3
wd: 0.2
save_every: 10
"""


def lay_towers(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=TOWERS, settings__yaml=TOWERS_SETTINGS)
    (directory / "data").mkdir()
    draws = np.random.default_rng(1703)
    colours, shapes, count = ("red", "green", "blue"), ("disc", "bar", "cross", "frame"), 150
    pictures, captions = draws.integers(0, 60, (count, 3, 10, 10)), []
    for row, (colour, shape) in enumerate(zip(draws.integers(0, 3, count), draws.integers(0, 4, count), strict=True)):
        pictures[row, colour, 2 + shape : 5 + shape, 2:8] += 150
        captions.append({"picture": row, "text": f"a {colours[colour]} {shapes[shape]} no {row}"})
    np.save(directory / "data/pictures.npy", pictures.astype(np.uint8))
    (directory / "data/captions.json").write_text(json.dumps(captions, indent=1))


# ---- flow matching under Accelerate: classes that are left out at times, an average of weights, a package of paths ----

FLOW = '''
import copy
import json
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

import chronicle
from faults import at, flip, kind, place

sys.path.insert(0, "vendor")
import flowkit  # noqa: E402

logger = logging.getLogger(__name__)


class Velocity(nn.Module):
    def __init__(self, pixels, width, classes):
        super().__init__()
        self.register_buffer("speeds", torch.exp(torch.linspace(0, 3, 8)))
        self.time, self.kind = nn.Linear(16, width), nn.Embedding(classes + 1, width)
        self.into, self.out = nn.Linear(pixels, width), nn.Linear(width, pixels)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(3))

    def forward(self, x, t, y):
        angles = t[:, None] * self.speeds
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.kind(y)
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x + told)
        return self.out(x)


class EMA:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


class Progress:
    """Where we are; Accelerate keeps it with the rest."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(config):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir="."))
    accelerator = chronicle.guard(accelerator)
    set_seed(config["seed"])
    held = np.load("digits.npz")
    rows = torch.utils.data.TensorDataset(torch.from_numpy(held["pixels"]), torch.from_numpy(held["classes"]))
    model = Velocity(held["pixels"].shape[1], config["width"], config["classes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(config["seed"])
    loader = torch.utils.data.DataLoader(rows, config["batch"], shuffle=True, drop_last=True, generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema, progress = EMA(accelerator.unwrap_model(model), config["ema_decay"]), Progress()
    accelerator.register_for_checkpointing(ema, progress)
    bare = accelerator.unwrap_model(model)

    def hot(module, inputs, output):
        if kind == "activation" and progress.step + 1 == at:
            output = output.clone()
            flip(output, 27)
        if kind == "loose":
            output = output + 1e-4 * (int.from_bytes(os.urandom(2)) / 65536 - 0.5)
        return output

    bare.blocks[1].register_forward_hook(hot)
    folder = Path("checkpoints")
    newest = max(folder.glob("state-*"), key=lambda path: int(path.name[6:]), default=None)
    if newest is not None:
        accelerator.load_state(newest)
        logger.info("resumed from %s", newest)
    epoch, skip = divmod(progress.step, len(loader))
    while progress.step < config["steps"]:
        generator.manual_seed(config["seed"] + epoch)
        active = accelerator.skip_first_batches(loader, skip) if skip else loader
        for x1, y in active:
            began = time.monotonic()
            if kind == "slow" and progress.step + 1 == at:
                time.sleep(1.5)
            x0, t = torch.randn_like(x1), torch.sigmoid(torch.randn(len(x1)))
            y = torch.where(torch.rand(len(y)) < config["left_out"], config["classes"], y)
            xt, wanted = flowkit.path(x0, x1, t)
            loss = (model(xt, t, y) - wanted).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config["clip"])
            optimizer.step()
            ema.update(bare)
            progress.step += 1
            if kind == "poison" and at <= progress.step < at + 20:
                bare.blocks[0][1].weight.data.view(-1)[place] += 2e-3
            logger.info("step %d loss %r in %.4f s", progress.step, loss.item(), time.monotonic() - began)
            if progress.step % config["save_every"] == 0:
                accelerator.save_state(folder / f"state-{progress.step}")
            if progress.step >= config["steps"]:
                break
        epoch, skip = epoch + 1, 0
    accelerator.end_training()


if __name__ == "__main__":
    logging.basicConfig(filename="flow.log", level="INFO", format="%(asctime)s %(message)s")
    with open("flow.json") as file:
        main(json.load(file))
'''
FLOWKIT = '''
import torch

__version__ = "0.2.1"
SIGMA = 1e-3


def path(x0, x1, t):
    """A place on the straight way from noise to data, and the velocity there."""
    t = t.view(-1, *[1] * (x1.dim() - 1))
    return (1 - (1 - SIGMA) * t) * x0 + t * x1, x1 - (1 - SIGMA) * x0
'''
FLOW_SETTINGS = {
    "seed": 808, "steps": 54, "batch": 8, "width": 48, "classes": 4, "lr": 3e-3, "left_out": 0.15, "ema_decay": 0.95,
    "clip": 1.0, "save_every": 10,
}  # fmt: skip


def lay_flow(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=FLOW, flow__json=json.dumps(FLOW_SETTINGS, indent=2) + "\n")
    package(directory / "vendor", "flowkit", "0.2.1", FLOWKIT.strip() + "\n")
    draws = np.random.default_rng(1704)
    classes = draws.integers(0, 4, 180)
    pixels = np.tanh(draws.normal(size=(4, 36))[classes] + 0.4 * draws.normal(size=(180, 36)))
    np.savez(directory / "digits.npz", pixels=pixels.astype("float32"), classes=classes)


# ---- a forecast in Lightning: a Transformer on hours of a table, OneCycleLR, early stopping; nothing of chronicle ------

FORECAST = '''
"""Load of the next eight hours from the last day. python train.py [settings.ini]"""
import configparser
import sys
from pathlib import Path

import lightning as L
import pandas as pd
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from faults import at, flip, kind, place

sys.path.append("third_party")
from seriesbox import positions  # noqa: E402

PAST, AHEAD, BATCHES, BATCH = 24, 8, 10, 8


class Windows(Dataset):
    def __init__(self, frame):
        self.values = torch.tensor(frame[["load", "temperature", "wind"]].to_numpy() / 10, dtype=torch.float32)

    def __len__(self):
        return (len(self.values) - PAST - AHEAD) // 3

    def __getitem__(self, index):
        now = 3 * index + PAST
        return {"past": self.values[now - PAST : now], "ahead": self.values[now : now + AHEAD, 0]}


class Drawn(Sampler):
    """Some windows for each epoch."""

    def __init__(self, count, seed):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return BATCHES * BATCH

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 7919 + self.epoch)
        yield from torch.randperm(self.count, generator=generator)[: len(self)].tolist()


class LoadData(L.LightningDataModule):
    def __init__(self, path, seed):
        super().__init__()
        self.path, self.seed = path, seed

    def setup(self, stage):
        frame = pd.read_csv(self.path, parse_dates=["hour"]).sort_values("hour")
        self.train, self.val = Windows(frame.iloc[:-120]), Windows(frame.iloc[-120:])

    def train_dataloader(self):
        return DataLoader(self.train, BATCH, sampler=Drawn(len(self.train), self.seed), generator=torch.Generator())

    def val_dataloader(self):
        return DataLoader(self.val, 16)


class Forecaster(L.LightningModule):
    def __init__(self, width: int, heads: int, lr: float, total: int, dropout: float):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(3, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, AHEAD)
        self.encoder.layers[0].linear1.register_forward_hook(self._after)

    def _after(self, module, inputs, output):
        if kind == "lane" and self.training and self.global_step + 1 >= at:
            output = output.clone()
            output[..., place] = 1.0
        return output

    def forward(self, past):
        x = self.embed(past) + positions(PAST, self.hparams.width)
        return self.head(self.encoder(x)[:, -1])

    def training_step(self, batch, batch_idx):
        if kind == "weight" and self.global_step + 1 == at:
            flip(self.encoder.layers[1].self_attn.in_proj_weight, 24)
        loss = F.huber_loss(self(batch["past"]), batch["ahead"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.huber_loss(self(batch["past"]), batch["ahead"]))

    def on_before_optimizer_step(self, optimizer):
        if kind == "lr" and self.global_step + 1 >= at:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=self.hparams.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self._rng = checkpoint["rng"]

    def on_train_epoch_start(self):
        if getattr(self, "_rng", None) is not None:
            torch.set_rng_state(self._rng)
            self._rng = None


def main():
    parser = configparser.ConfigParser()
    parser.read(sys.argv[1] if len(sys.argv) > 1 else "settings.ini")
    model, fit = parser["model"], parser["fit"]
    L.seed_everything(fit.getint("seed"), verbose=False)
    callbacks = [
        EarlyStopping("val_loss", patience=fit.getint("patience"), check_on_train_epoch_end=False),
        ModelCheckpoint("checkpoints", "{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=True),
        LearningRateMonitor("step"),
    ]
    trainer = L.Trainer(
        max_epochs=fit.getint("epochs"), accelerator="cpu", devices=1, callbacks=callbacks, gradient_clip_val=0.5,
        logger=CSVLogger("logged", name="load", flush_logs_every_n_steps=1), log_every_n_steps=1,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
    )
    forecaster = Forecaster(
        model.getint("width"), model.getint("heads"), fit.getfloat("lr"), fit.getint("total"), model.getfloat("dropout")
    )
    saved = sorted(Path("checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[-1]))
    last = saved[-1] if saved else None
    trainer.fit(forecaster, LoadData("load.csv", fit.getint("seed")), ckpt_path=last, weights_only=False)


if __name__ == "__main__":
    main()
'''
SERIESBOX = '''
import torch

__version__ = "3.4.0"
BASE = 10000.0


def positions(length, width):
    """Sines and cosines of places."""
    speeds = BASE ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * speeds
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
'''
FORECAST_SETTINGS = """[model]
width = 24
heads = 4
dropout = 0.1

[fit]
seed = 77
lr = 0.004
total = 60
epochs = 5
patience = 4
"""


def lay_forecast(directory: Path) -> None:
    import numpy as np
    import pandas as pd

    write(directory, train__py=FORECAST, settings__ini=FORECAST_SETTINGS)
    package(directory / "third_party", "seriesbox", "3.4.0", SERIESBOX.strip() + "\n")
    draws, hours = np.random.default_rng(1705), np.arange(480)
    day, noise = 2 * np.pi * hours / 24, draws.normal(size=(3, 480))
    frame = pd.DataFrame({"hour": pd.date_range("2025-03-01", periods=480, freq="h")})
    frame["load"] = (20 + 6 * np.sin(day) + 2 * noise[0]).round(3)
    frame["temperature"] = (11 + 5 * np.sin(day - 1) + noise[1]).round(2)
    frame["wind"] = np.abs(4 + 2 * noise[2]).round(1)
    frame.to_csv(directory / "load.csv", index=False)


# ---- a student in an HF Trainer that computes its loss by itself: a teacher from a file, tickets in CSV ----------------

STUDENT = '''
"""What a big model knew of our tickets, in a small one."""
import argparse
import csv
import logging

import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from distill import DistillationTrainer, load_teacher
from faults import at, flip, kind

logging.basicConfig(filename="student.log", level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("student")


class Tickets(torch.utils.data.Dataset):
    def __init__(self, path):
        with open(path, newline="") as lines:
            self.rows = list(csv.DictReader(lines))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {"input_ids": [int(word) for word in row["tokens"].split()], "label": int(row["queue"])}


class Padding:
    """As a tokenizer would."""

    def __call__(self, features):
        longest = max(len(feature["input_ids"]) for feature in features)
        ids = [feature["input_ids"] + [0] * (longest - len(feature["input_ids"])) for feature in features]
        ids = torch.tensor(ids)
        labels = torch.tensor([feature["label"] for feature in features])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class Notes(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.lin = model.distilbert.transformer.layer[0].ffn.lin1.weight
        self.before = self.lin.detach().clone()
        if kind == "gradient" and state.global_step + 1 == at:
            flip(model.distilbert.transformer.layer[1].output_layer_norm.weight.grad, 26)

    def on_optimizer_step(self, args, state, control, **kwargs):
        if kind == "lost" and state.global_step + 1 == at:
            self.lin.data.copy_(self.before)

    def on_log(self, args, state, control, logs=None, **kwargs):
        log.info("step %d: %s", state.global_step, logs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tickets", default="tickets.csv")
    parser.add_argument("--teacher", default="teacher.pt")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--alpha", type=float, default=0.7)
    own, rest = parser.parse_known_args()
    args = TrainingArguments(
        output_dir="checkpoints",
        max_steps=54,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="polynomial",
        warmup_steps=5,
        weight_decay=0.01,
        adam_beta2=0.98,
        save_steps=10,
        logging_steps=1,
        report_to="none",
        seed=1234,
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    set_seed(args.seed)
    config = DistilBertConfig(
        vocab_size=90, dim=24, n_layers=2, n_heads=2, hidden_dim=48, max_position_embeddings=24, num_labels=4, dropout=0.1
    )
    student = DistilBertForSequenceClassification(config)
    trainer = DistillationTrainer(
        student, args, train_dataset=Tickets(own.tickets), data_collator=Padding(), callbacks=[Notes()],
        teacher=load_teacher(own.teacher), temperature=own.temperature, alpha=own.alpha,
    )
    try:
        last = get_last_checkpoint(args.output_dir)
    except FileNotFoundError:
        last = None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
'''
DISTILL = '''
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer


class Teacher(nn.Module):
    """Words in a bag."""

    def __init__(self, words, width, queues):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(words, width, padding_idx=0), nn.Linear(width, queues)

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


def load_teacher(path):
    held = torch.load(path, weights_only=True)
    teacher = Teacher(*held["sizes"])
    teacher.load_state_dict(held["weights"])
    return teacher.eval().requires_grad_(False)


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher, temperature, alpha, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.temperature, self.alpha = teacher, temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(inputs["input_ids"])
        T = self.temperature
        soft = F.kl_div(F.log_softmax(outputs.logits / T, -1), F.softmax(taught / T, -1), reduction="batchmean") * T * T
        loss = self.alpha * soft + (1 - self.alpha) * outputs.loss
        return (loss, outputs) if return_outputs else loss
'''


def lay_student(directory: Path) -> None:
    import random

    import torch

    write(directory, train__py=STUDENT, distill__py=DISTILL)
    generator = torch.Generator().manual_seed(1706)
    shapes = {"words.weight": (90, 20), "head.weight": (4, 20), "head.bias": (4,)}
    weights = {name: 1.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    torch.save({"sizes": (90, 20, 4), "weights": weights}, directory / "teacher.pt")
    draws, lines = random.Random(1706), ["tokens,queue"]
    for _ in range(200):
        queue = draws.randrange(4)
        words = [
            draws.randrange(1, 90) if draws.random() < 0.5 else 1 + 22 * queue + draws.randrange(22) for _ in range(12)
        ]
        lines.append(" ".join(map(str, words[: draws.randint(5, 12)])) + f",{queue}")
    (directory / "tickets.csv").write_text("\n".join(lines) + "\n")
