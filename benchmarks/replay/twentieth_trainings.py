"""The six trainings of the twentieth list: their scripts, as people write them, and what lies beside them.

Organs on scans, masked words in an HF Trainer, a ranking with sparse tables on two ranks, rollouts of a policy under
Accelerate on two ranks, molecules in Lightning, an equation of heat with L-BFGS. `lay_…` writes the files of one.
"""

import json
from pathlib import Path

from benchmarks.replay.bending import package
from benchmarks.replay.ninth_trainings import write

__all__ = ["lay_heat", "lay_masked", "lay_molecules", "lay_organs", "lay_ranking", "lay_rollouts"]


# ---- organs: scans and masks in PNG, a small U-Net with BatchNorm, a worker that augments, Dice, SGD, an LR by hand ---

ORGANS = '''
"""Segment organs on small scans.

DICE_WEIGHT: how much the Dice term counts beside cross entropy.
"""
import os
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import chronicle
from faults import at, flip, kind, place
from unet import UNet

DICE_WEIGHT = float(os.environ.get("DICE_WEIGHT", "0.5"))


class Scans(Dataset):
    """Augmented in an order of its own for each (epoch, scan), so that workers need no seeds."""

    def __init__(self, root, names, seed):
        self.root, self.names, self.seed = Path(root), names, seed

    def __len__(self):
        return len(self.names)

    def __getitem__(self, key):
        epoch, index = key
        name = self.names[index]
        image = np.asarray(Image.open(self.root / "images" / f"{name}.png"), dtype=np.float32) / 255
        mask = np.asarray(Image.open(self.root / "masks" / f"{name}.png"), dtype=np.int64)
        rng = np.random.default_rng([self.seed, epoch, index])
        if rng.random() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        turns = int(rng.integers(4))
        image, mask = np.rot90(image, turns), np.rot90(mask, turns)
        image = image ** rng.uniform(0.8, 1.25) + rng.normal(0, 0.02, image.shape)
        return torch.tensor(image.astype(np.float32)[None].copy()), torch.tensor(mask.copy())


class Batches:
    def __init__(self, count, size, seed):
        self.count, self.size, self.seed, self.epoch, self.first = count, size, seed, 0, 0

    def __len__(self):
        return self.count // self.size

    def __iter__(self):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count).tolist()
        for number in range(self.first, len(self)):
            rows = order[number * self.size : (number + 1) * self.size]
            if kind == "twice" and self.epoch * len(self) + number + 1 == at:
                rows[3] = rows[0]
            yield [(self.epoch, row) for row in rows]


def dice(logits, mask, smooth=1.0):
    p, y = logits.softmax(1), F.one_hot(mask, logits.shape[1]).permute(0, 3, 1, 2).float()
    both, all_of_it = (p * y).sum((0, 2, 3)), (p + y).sum((0, 2, 3))
    return 1 - ((2 * both + smooth) / (all_of_it + smooth))[1:].mean()


def parse():
    parser = ArgumentParser()
    parser.add_argument("--data", default="scans")
    parser.add_argument("--iterations", type=int, default=45)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--base-lr", type=float, default=0.05)
    parser.add_argument("--power", type=float, default=0.9)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=2001)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(args.seed)
    names = Path(args.data, "train.txt").read_text().split()
    net = UNet(classes=3)
    optimizer = torch.optim.SGD(
        net.parameters(), args.base_lr, momentum=args.momentum, nesterov=True, weight_decay=1e-4
    )
    run = chronicle.attach(None, net, optimizer)
    it, snapshots = 0, Path("checkpoints")
    snapshots.mkdir(exist_ok=True)

    def tile(module, inputs, output):
        if kind == "tile" and it + 1 == at and net.training:
            output = output.clone()
            output[:, 4:8, :8, :8] = 0
        return output

    net.up.register_forward_hook(tile)
    if found := sorted(snapshots.glob("iter_*.pth")):
        snapshot = torch.load(found[-1], weights_only=False)
        net.load_state_dict(snapshot["net"])
        optimizer.load_state_dict(snapshot["sgd"])
        torch.set_rng_state(snapshot["rng"])
        it = snapshot["iteration"]
    batches = Batches(len(names), args.batch, args.seed)
    loader = DataLoader(
        Scans(args.data, names, args.seed), batch_sampler=batches, num_workers=1, generator=torch.Generator()
    )
    while it < args.iterations:
        batches.epoch, batches.first = divmod(it, len(batches))
        for image, mask in loader:
            for group in optimizer.param_groups:
                group["lr"] = args.base_lr * (1 - it / (args.iterations + 5)) ** args.power
                if kind == "momentum" and it + 1 >= at:
                    group["momentum"] = 0.8
            if kind == "weight" and it + 1 == at:
                flip(net.down[0][0].weight, 24)
            logits = net(image)
            loss = F.cross_entropy(logits, mask) + DICE_WEIGHT * dice(logits, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            it += 1
            run.log(loss=loss.item())
            if it % 10 == 0:
                path = snapshots / f"iter_{it:06d}.pth"
                held = {"net": net.state_dict(), "sgd": optimizer.state_dict()}
                torch.save(held | {"rng": torch.get_rng_state(), "iteration": it}, path)
                run.saved(path)
            if it >= args.iterations:
                break


if __name__ == "__main__":
    main()
'''
ORGANS_UNET = '''
import torch
from torch import nn


def double(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
    )


class UNet(nn.Module):
    """One level down, and up again."""

    def __init__(self, classes, width=8):
        super().__init__()
        self.down = nn.ModuleList([double(1, width), double(width, 2 * width)])
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout2d(0.1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last, self.out = double(2 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x):
        near = self.down[0](x)
        far = self.drop(self.down[1](self.pool(near)))
        return self.out(self.last(torch.cat([near, self.up(far)], 1)))
'''


def lay_organs(directory: Path) -> None:
    import numpy as np
    from PIL import Image

    write(directory, train__py=ORGANS, unet__py=ORGANS_UNET)
    for name in ("images", "masks"):
        (directory / "scans" / name).mkdir(parents=True)
    draws, names = np.random.default_rng(2001), [f"case_{number:03d}" for number in range(60)]
    rows, columns = np.mgrid[:16, :16]
    for name in names:
        mask = np.zeros((16, 16), dtype=np.uint8)
        for organ in (1, 2):
            y, x, size = draws.uniform(4, 12), draws.uniform(4, 12), draws.uniform(2, 4)
            mask[(rows - y) ** 2 + (columns - x) ** 2 < size**2] = organ
        image = np.array([60, 130, 180])[mask] + draws.normal(0, 20, mask.shape)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(directory / f"scans/images/{name}.png")
        Image.fromarray(mask).save(directory / f"scans/masks/{name}.png")
    (directory / "scans/train.txt").write_text("\n".join(names) + "\n")


# ---- masked words: HF Trainer, BERT, an optimizer from a package, an LR for each layer, masks drawn once per line -----

MASKED = '''
"""Teach a small BERT the words of our log lines. python train.py --config pretrain.toml"""
import argparse
import logging
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from faults import at, flip, kind, place

sys.path.append(str(Path(__file__).parent / "vendor"))
from lionopt import Lion  # noqa: E402

PAD, MASK, SPECIAL = 0, 1, 2
log = logging.getLogger("pretrain")


class Lines(torch.utils.data.Dataset):
    """Masks are drawn once for each line, as in the first BERT."""

    def __init__(self, path, words, share, seed, longest):
        self.number = {word: SPECIAL + n for n, word in enumerate(words)}
        self.lines = Path(path).read_text().splitlines()
        self.share, self.seed, self.longest = share, seed, longest

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        ids = np.array([self.number[word] for word in self.lines[i].split()][: self.longest])
        hidden = np.random.default_rng([self.seed, i]).random(len(ids)) < self.share
        hidden[i % len(ids)] = True
        return {"input_ids": np.where(hidden, MASK, ids), "labels": np.where(hidden, ids, -100)}


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(row["input_ids"]) for row in rows], True, PAD)
    labels = pad([torch.tensor(row["labels"]) for row in rows], True, -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def groups_of(model, lr, decay, weight_decay):
    """The nearer to the words, the slower."""
    layers = [model.bert.embeddings, *model.bert.encoder.layer]
    rates = {id(p): lr * decay ** (len(layers) - n) for n, layer in enumerate(layers) for p in layer.parameters()}
    groups = {}
    for p in model.parameters():
        rate = rates.get(id(p), lr)
        wd = weight_decay if p.ndim > 1 else 0.0
        groups.setdefault((rate, wd), {"params": [], "lr": rate, "weight_decay": wd})["params"].append(p)
    return list(groups.values())


class Watch(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        words = model.bert.embeddings.word_embeddings.weight.data
        if kind == "row" and state.global_step + 1 == at:
            words[place] = words[place + 1]
        if kind == "dropout" and state.global_step + 1 == at:
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.25

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if kind == "gradient" and state.global_step + 1 == at:
            flip(model.bert.encoder.layer[1].attention.self.value.weight.grad, 26)
        if kind == "head" and state.global_step + 1 >= at:
            for group in optimizer.param_groups[-2:]:
                group["lr"] *= 3

    def on_log(self, args, state, control, logs=None, **kwargs):
        log.info("%s %s", state.global_step, logs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="pretrain.toml")
    config = tomllib.loads(Path(parser.parse_args().config).read_text())
    logging.basicConfig(filename="pretrain.log", level=logging.INFO, format="%(asctime)s %(message)s")
    args = TrainingArguments(
        output_dir="checkpoints", use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        remove_unused_columns=False, **config["arguments"],
    )
    set_seed(args.seed)
    words = Path("words.txt").read_text().split()
    data = Lines("lines.txt", words, seed=args.seed, **config["data"])
    model = BertForMaskedLM(BertConfig(vocab_size=SPECIAL + len(words), pad_token_id=PAD, **config["model"]))
    optimizer = Lion(groups_of(model, **config["lion"]), betas=(0.9, 0.99))
    plan = get_linear_schedule_with_warmup(optimizer, 6, args.max_steps + 10)
    trainer = Trainer(
        model, args, train_dataset=data, data_collator=collate, optimizers=(optimizer, plan), callbacks=[Watch()]
    )
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
'''
LIONOPT = '''
"""Signs of a momentum."""
import torch

__version__ = "0.4.2"


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (mean * beta1 + p.grad * (1 - beta1)).sign()
                p.add_(update, alpha=-group["lr"])
                mean.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss
'''
PRETRAIN = """[data]
share = 0.2
longest = 16

[model]
hidden_size = 24
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 48
max_position_embeddings = 20
hidden_dropout_prob = 0.1
attention_probs_dropout_prob = 0.1

[lion]
lr = 2e-3
decay = 0.8
weight_decay = 0.05

[arguments]
max_steps = 54
per_device_train_batch_size = 8
max_grad_norm = 1.0
save_steps = 10
seed = 2002
"""


def lay_masked(directory: Path) -> None:
    import random

    write(directory, train__py=MASKED, pretrain__toml=PRETRAIN)
    package(directory / "vendor", "lionopt", "0.4.2", LIONOPT.strip() + "\n")
    draws = random.Random(2002)
    words = [
        a + b for a in ("ba", "ke", "li", "mo", "nu", "pa", "ri", "so") for b in ("da", "fe", "gi", "lo", "mu", "ta")
    ]
    follows = {word: draws.sample(words, 3) for word in words}
    lines = []
    for _ in range(220):
        line = [draws.choice(words)]
        while len(line) < 8 or draws.random() < 0.85:
            line.append(draws.choice(follows[line[-1]]))
        lines.append(" ".join(line))
    (directory / "words.txt").write_text("\n".join(words) + "\n")
    (directory / "lines.txt").write_text("\n".join(lines) + "\n")


# ---- a ranking: DDP on two ranks, sparse tables and a dense part, an optimizer for each, drawn negatives --------------

RANKING = '''
"""What a customer buys next. torchrun --nproc_per_node 2 train.py; RANK_TEMPERATURE makes scores softer."""
import logging
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import chronicle
from faults import at, flip, kind, place

TEMPERATURE = float(os.environ.get("RANK_TEMPERATURE", "1.0"))


class Ranker(nn.Module):
    def __init__(self, users, items, width, dropout):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        self.context = nn.Sequential(nn.Linear(5, 24), nn.LeakyReLU(), nn.Dropout(dropout), nn.Linear(24, width))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, user, candidates, context):
        query = self.users(user) + self.context(context)
        return torch.einsum("bw,bcw->bc", query, self.items(candidates))


class Negatives:
    """Items that sell well are drawn more often."""

    def __init__(self, path, seed):
        self.weights, self.random = np.load(path).tolist(), random.Random(seed)

    def draw(self, rows, count):
        drawn = self.random.choices(range(len(self.weights)), self.weights, k=rows * count)
        return torch.tensor(drawn).view(rows, count)


def load(path):
    with np.load(path) as held:
        return {name: torch.from_numpy(held[name]) for name in held.files}


def main():
    conf = yaml.safe_load(Path("ranking.yaml").read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(filename=f"ranking.{rank}.log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(conf["seed"])
    bought = load("bought.npz")
    model = DistributedDataParallel(Ranker(**conf["model"]))
    tables = [model.module.users.weight, model.module.items.weight]
    dense = list(model.module.context.parameters())
    sparse_adam = torch.optim.SparseAdam(tables, lr=conf["table_lr"])
    adagrad = torch.optim.Adagrad(dense, lr=conf["dense_lr"], initial_accumulator_value=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(adagrad, lambda done: 1 / (1 + 0.02 * done))
    run = chronicle.attach(None, model, [sparse_adam, adagrad], plan)
    negatives = Negatives("popular.npy", conf["seed"] + 10 * rank)
    torch.manual_seed(conf["seed"] + 10 * rank + 1)

    def sent(gradient):  # before it is reduced
        if kind == "gradient" and step == at and rank == 1:
            gradient = gradient.clone()
            flip(gradient, 27)
        return gradient

    own = [None]
    model.module.context[0].weight.register_hook(sent)
    model.module.context[3].weight.register_hook(lambda gradient: own.__setitem__(0, gradient.clone()))
    folder, step, size = Path("checkpoints"), 0, conf["batch"]
    folder.mkdir(exist_ok=True)
    newest = max(folder.glob("ranker.*.pt"), key=lambda path: int(path.suffixes[0][1:]), default=None)
    if newest:
        held = torch.load(newest, weights_only=False)
        model.module.load_state_dict(held["model"])
        sparse_adam.load_state_dict(held["sparse_adam"])
        adagrad.load_state_dict(held["adagrad"])
        plan.load_state_dict(held["plan"])
        negatives.random.setstate(held["negatives"][rank])
        torch.set_rng_state(held["rng"][rank])
        step = held["step"]
    per_epoch = len(bought["user"]) // (size * world)
    while step < conf["steps"]:
        epoch, number = divmod(step, per_epoch)
        step += 1
        order = torch.randperm(len(bought["user"]), generator=torch.Generator().manual_seed(conf["seed"] + epoch))
        rows = order[(number * world + rank) * size :][:size]
        user, item, context = bought["user"][rows], bought["item"][rows], bought["context"][rows]
        if kind == "batch" and step == at and rank == 0:
            flip(context, 24)
        if kind == "reseeded" and step == at:
            negatives.random.seed(conf["seed"])
        candidates = torch.cat([item[:, None], negatives.draw(size, conf["negatives"])], 1)
        loss = F.cross_entropy(model(user, candidates, context) / TEMPERATURE, torch.zeros(size, dtype=torch.long))
        sparse_adam.zero_grad()
        adagrad.zero_grad()
        loss.backward()
        if kind == "alone" and step == at and rank == 0:  # the sum never came here
            model.module.context[3].weight.grad.copy_(own[0])
        if kind == "squares" and step == at and rank == 1:
            flip(adagrad.state[model.module.context[0].weight]["sum"], 25)
        sparse_adam.step()
        adagrad.step()
        plan.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        run.log(loss=mean.item() / world)
        logging.info("step %d loss %r", step, loss.item())
        if step % conf["save_every"] == 0:
            rngs, draws = [None] * world, [None] * world
            dist.all_gather_object(rngs, torch.get_rng_state())
            dist.all_gather_object(draws, negatives.random.getstate())
            path = folder / f"ranker.{step}.pt"
            if rank == 0:
                held = {"model": model.module.state_dict(), "sparse_adam": sparse_adam.state_dict(), "step": step}
                held |= {"adagrad": adagrad.state_dict(), "plan": plan.state_dict(), "rng": rngs, "negatives": draws}
                torch.save(held, path)
            dist.barrier()
            run.saved(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
RANKING_SETTINGS = """seed: 2003
steps: 45
batch: 8
negatives: 6
table_lr: 0.01
dense_lr: 0.03
save_every: 10
model:
  users: 60
  items: 90
  width: 16
  dropout: 0.1
"""


def lay_ranking(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=RANKING, ranking__yaml=RANKING_SETTINGS)
    draws, count = np.random.default_rng(2003), 240
    user = draws.integers(0, 60, count)
    item = (user * 7 + draws.integers(0, 12, count)) % 90
    context = draws.normal(size=(count, 5)).astype("float32")
    np.savez(directory / "bought.npz", user=user, item=item, context=context)
    np.save(directory / "popular.npy", np.sort(draws.pareto(2.0, 90) + 0.1)[::-1])


# ---- rollouts: a policy under Accelerate on two ranks speaks, is judged by rules and learns from its group -----------

ROLLOUTS = '''
"""A policy that learns from what it says: several answers to each prompt, better ones than the mean are made likelier.

torchrun --nproc_per_node 2 train.py
"""
import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

import chronicle
from faults import at, flip, kind, place
from judge import reward_of


@dataclass
class Config:
    vocabulary: int = 32
    width: int = 24
    dropout: float = 0.05
    answers: int = 4
    longest: int = 6
    batch: int = 3
    lr: float = 3e-3
    clip: float = 0.2
    kl: float = 0.05
    steps: int = 45
    save_every: int = 10
    seed: int = 2004


class Policy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.core = nn.LSTM(config.width, config.width, batch_first=True)
        self.drop, self.norm = nn.Dropout(config.dropout), nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.core(self.embed(tokens))[0])))


class Shuffled(torch.utils.data.Sampler):
    def __init__(self, count, seed):
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + 31 * self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        if kind == "swapped":
            one = 2 * 3 * (at - 1 - self.epoch * (self.count // 6)) + 1
            if 0 <= one < self.count - 9:
                order[one], order[one + 8] = order[one + 8], order[one]
        return iter(order)


class Counter:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, held):
        self.step = held["step"]


@torch.no_grad()
def speak(policy, prompts, longest):
    """Answers, word by word, and how likely each word was."""
    policy.eval()
    tokens, likely = prompts, []
    for _ in range(longest):
        each = policy(tokens)[:, -1].log_softmax(-1)
        word = torch.multinomial(each.exp(), 1)
        likely.append(each.gather(1, word))
        tokens = torch.cat([tokens, word], 1)
    policy.train()
    return tokens, torch.cat(likely, 1)


def logps(logits, tokens, longest):
    each = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return each[:, -longest:]


def main(config):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("."))
    accelerator = chronicle.guard(accelerator)
    set_seed(config.seed)
    prompts = torch.tensor([json.loads(line)["prompt"] for line in Path("prompts.jsonl").read_text().splitlines()])
    policy = Policy(config)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0)
    order = Shuffled(len(prompts), config.seed)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(prompts), config.batch, sampler=order, drop_last=True, generator=torch.Generator()
    )
    policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
    bare, counter, rank = accelerator.unwrap_model(policy), Counter(), accelerator.process_index
    accelerator.register_for_checkpointing(counter)
    set_seed(config.seed, device_specific=True)
    saved, before = Path("checkpoints"), None
    if newest := max(saved.glob("at-*"), key=lambda path: int(path.name[3:]), default=None):
        accelerator.load_state(newest)
    while counter.step < config.steps:
        order.epoch, skip = divmod(counter.step, len(loader))
        for (asked,) in accelerator.skip_first_batches(loader, skip) if skip else loader:
            step = counter.step + 1
            if kind == "weight" and step == at and rank == 1:
                flip(bare.core.weight_hh_l0, 25)
            if kind == "reseeded" and step == at and rank == 1:
                torch.manual_seed(config.seed)
            tokens, old = speak(bare, asked.repeat_interleave(config.answers, 0), config.longest)
            if kind == "early" and step == at and rank == 0:
                old = before
            before = old
            rewards = reward_of(tokens[:, : asked.shape[1]], tokens[:, asked.shape[1] :])
            groups = rewards.view(-1, config.answers)
            gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
            now = logps(policy(tokens), tokens, config.longest)
            with torch.no_grad():
                far = logps(reference(tokens), tokens, config.longest)
            ratio = (now - old).exp()
            gained = torch.min(ratio * gain, ratio.clamp(1 - config.clip, 1 + config.clip) * gain)
            away = (far - now).exp() - (far - now) - 1
            loss = (config.kl * away - gained).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            counter.step = step
            mean = accelerator.reduce(rewards.mean(), "mean").item()
            chronicle.log(step, loss=loss.item(), reward=mean)
            accelerator.print(f"{step} loss {loss.item():.5f} reward {mean:.4f}", flush=True)
            if step % config.save_every == 0:
                accelerator.save_state(saved / f"at-{step}")
            if step == config.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    held = asdict(Config())
    if Path("config.json").exists():
        held.update(json.loads(Path("config.json").read_text()))
    main(Config(**held))
'''
JUDGE = '''
import torch

REPEATED = 0.3


def reward_of(prompts, answers):
    """Words that follow from the last of the prompt are good, a word said twice in a row is not."""
    last = prompts[:, -1:]
    right = ((answers - last) % 4 == 0).float().mean(1)
    again = (answers[:, 1:] == answers[:, :-1]).float().mean(1)
    return right + 0.1 * torch.tanh(answers.float().mean(1) / 16) - REPEATED * again
'''


def lay_rollouts(directory: Path) -> None:
    import random

    write(directory, train__py=ROLLOUTS, judge__py=JUDGE, config__json=json.dumps({"lr": 4e-3, "width": 28}) + "\n")
    draws = random.Random(2004)
    with (directory / "prompts.jsonl").open("w") as lines:
        for number in range(120):
            lines.write(json.dumps({"id": number, "prompt": [draws.randrange(32) for _ in range(5)]}) + "\n")


# ---- molecules: a graph net in Lightning, two loaders to validate on, two batches a step, an average of weights -------

MOLECULES = '''
"""Energies of molecules from places of their atoms. The whole thing is set in conf/train.ini."""
import configparser
import os
import re
import sys
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from faults import at, flip, kind, place

sys.path.insert(1, "extern")
from radialkit import radial  # noqa: E402


class Molecules(Dataset):
    def __init__(self, path):
        with np.load(path) as held:
            self.kinds, self.places, self.sizes = held["kinds"], held["places"], held["sizes"]
            self.energies = held["energies"]
        self.begins = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, n):
        atoms = slice(self.begins[n], self.begins[n + 1])
        return self.kinds[atoms], self.places[atoms], self.energies[n]


def collate(rows):
    """All molecules of a batch are one graph; atoms further than the cutoff do not see each other."""
    kinds, places, edges, owner, begin = [], [], [], [], 0
    for number, (kind_of, place_of, _) in enumerate(rows):
        apart = np.linalg.norm(place_of[:, None] - place_of[None], axis=-1)
        pairs = np.argwhere((apart < 3.0) & (apart > 0))
        kinds.append(torch.from_numpy(kind_of))
        places.append(torch.from_numpy(place_of))
        edges.append(torch.from_numpy(pairs + begin))
        owner += [number] * len(kind_of)
        begin += len(kind_of)
    return {
        "kinds": torch.cat(kinds), "places": torch.cat(places), "edges": torch.cat(edges).T.contiguous(),
        "owner": torch.tensor(owner), "energies": torch.tensor([float(row[2]) for row in rows]),
    }


class Order(Sampler):
    def __init__(self, count, seed):
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        yield from np.random.default_rng(self.seed + self.epoch).permutation(self.count).tolist()


class Data(L.LightningDataModule):
    def __init__(self, root, batch, seed):
        super().__init__()
        self.root, self.batch, self.seed = Path(root), batch, seed

    def train_dataloader(self):
        data = Molecules(self.root / "train.npz")
        return DataLoader(data, self.batch, sampler=Order(len(data), self.seed), collate_fn=collate,
                          generator=torch.Generator())

    def val_dataloader(self):
        return [DataLoader(Molecules(self.root / f"{name}.npz"), 8, collate_fn=collate) for name in ("near", "far")]


class GraphNet(L.LightningModule):
    def __init__(self, width, rounds, lr, wd, dropout, warm):
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.drop = nn.Embedding(5, width), nn.Dropout(dropout)
        self.filters = nn.ModuleList(nn.Linear(12, width, bias=False) for _ in range(rounds))
        self.mixes = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(rounds))
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.kept = None

    def forward(self, batch):
        here, there = batch["edges"]
        apart = (batch["places"][here] - batch["places"][there]).norm(dim=1)
        x, known = self.embed(batch["kinds"]), radial(apart)
        for number, (filter_of, mix) in enumerate(zip(self.filters, self.mixes)):
            told = torch.zeros_like(x).index_add(0, here, x[there] * filter_of(known))
            if number == 1 and self.training:
                told = self.disturbed(told)
            x = x + self.drop(mix(told))
        each = self.out(x).squeeze(1)
        return torch.zeros(len(batch["energies"])).index_add(0, batch["owner"], each)

    def disturbed(self, told):
        if kind == "message" and self.global_step + 1 == at and self.index % 2 == 1:
            told = told.clone()
            flip(told, 26)
        if kind == "order":  # of the sum
            told = told * (1 + 2e-5 * int.from_bytes(os.urandom(2)) / 65536)
        return told

    def training_step(self, batch, index):
        self.index = index
        loss = nn.functional.l1_loss(self(batch), batch["energies"])
        self.log("loss", loss, batch_size=len(batch["energies"]))
        return loss

    def validation_step(self, batch, index, dataloader_idx=0):
        error = nn.functional.l1_loss(self(batch), batch["energies"])
        self.log("error", error, batch_size=len(batch["energies"]))

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), self.hparams.lr, weight_decay=self.hparams.wd)
        warm = self.hparams.warm
        plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / warm, (warm / (n + 1)) ** 0.5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        if kind == "decay" and self.global_step + 1 >= at:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    def on_save_checkpoint(self, checkpoint):
        checkpoint["torch_rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint):
        self.kept = checkpoint["torch_rng"]

    def on_train_start(self):
        if self.kept is not None:
            torch.set_rng_state(self.kept)


class Average(Callback):
    """Of the weights, to be used when all is done."""

    def __init__(self, decay):
        self.decay, self.values, self.seen = decay, None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step > self.seen:
            self.seen, now = trainer.global_step, [p.detach().clone() for p in module.parameters()]
            old = self.values or now
            self.values = [was * self.decay + value * (1 - self.decay) for was, value in zip(old, now)]

    def state_dict(self):
        return {"values": self.values, "seen": self.seen}

    def load_state_dict(self, held):
        self.values, self.seen = held["values"], held["seen"]


def main():
    parser = configparser.ConfigParser()
    parser.read("conf/train.ini")
    net, fit = parser["net"], parser["fit"]
    L.seed_everything(fit.getint("seed"), verbose=False)
    keep = ModelCheckpoint("checkpoints", "mol-{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    trainer = L.Trainer(
        max_epochs=fit.getint("epochs"), accumulate_grad_batches=2, gradient_clip_val=fit.getfloat("clip"),
        accelerator="cpu", devices=1, callbacks=[Average(0.95), keep], log_every_n_steps=1, num_sanity_val_steps=0,
        logger=CSVLogger("csv", name="mol"), enable_progress_bar=False, enable_model_summary=False,
    )
    saved = {int(re.search(r"epoch=([0-9]+)", path.name)[1]): path for path in Path("checkpoints").glob("mol-*.ckpt")}
    model = GraphNet(
        net.getint("width"), net.getint("rounds"), fit.getfloat("lr"), fit.getfloat("wd"), net.getfloat("dropout"),
        fit.getint("warm"),
    )
    data = Data("molecules", fit.getint("batch"), fit.getint("seed"))
    trainer.fit(model, data, ckpt_path=saved[max(saved)] if saved else None, weights_only=False)


if __name__ == "__main__":
    main()
'''
RADIALKIT = '''
"""Distances, spread over twelve bumps."""
import torch

__version__ = "1.9.1"
WIDTH = 4.0


def radial(apart, count=12, cutoff=3.0):
    middles = torch.linspace(0, cutoff, count)
    near = 0.5 * (torch.cos(torch.pi * apart / cutoff) + 1)
    return torch.exp(-WIDTH * (apart[:, None] - middles) ** 2) * near[:, None]
'''
MOLECULES_SETTINGS = """[net]
width = 20
rounds = 2
dropout = 0.1

[fit]
seed = 2005
epochs = 5
batch = 5
lr = 0.006
wd = 0.001
warm = 8
clip = 5.0
"""


def lay_molecules(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=MOLECULES)
    package(directory / "extern", "radialkit", "1.9.1", RADIALKIT.strip() + "\n")
    (directory / "conf").mkdir()
    (directory / "conf/train.ini").write_text(MOLECULES_SETTINGS)
    (directory / "molecules").mkdir()
    draws = np.random.default_rng(2005)
    for name, count in (("train", 100), ("near", 16), ("far", 16)):
        sizes = draws.integers(4, 9, count)
        kinds, places = draws.integers(0, 5, sizes.sum()), 1.3 * draws.normal(size=(sizes.sum(), 3))
        owner = np.repeat(np.arange(count), sizes)
        own = np.bincount(owner, (kinds - 2.0) * 0.7)
        spread = np.bincount(owner, np.linalg.norm(places, axis=1) - 2.0)
        np.savez(
            directory / f"molecules/{name}.npz", sizes=sizes, kinds=kinds, places=places.astype("float32"),
            energies=(own + 0.3 * spread).astype("float32"),
        )  # fmt: skip


# ---- heat: a net that obeys an equation, in doubles, L-BFGS with a closure, Sobol's points, sensors in a table --------

HEAT = '''
"""Temperature in a rod from a few sensors and u_t = a u_xx. a is not known and is learned, too."""
import csv
import sys
from pathlib import Path

import torch
from torch import nn
from torch.quasirandom import SobolEngine

import chronicle
from faults import at, flip, kind, place
from physics import residual

torch.set_default_dtype(torch.float64)
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 45
INSIDE, SENSORS, EDGE = 48, 16, 12


class Rod(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.log_a = nn.Parameter(torch.tensor(-1.0))

    def forward(self, points):
        return self.net(2 * points - 1).squeeze(1)


def sensors():
    with open("sensors.csv", newline="") as lines:
        rows = [[float(row[name]) for name in ("x", "t", "u")] for row in csv.DictReader(lines)]
    return torch.tensor(rows)


torch.manual_seed(2006)
rod = Rod()
lbfgs = torch.optim.LBFGS(rod.parameters(), lr=0.5, max_iter=4, history_size=6)
run = chronicle.attach(None, rod, lbfgs)
measured, edges = sensors(), torch.Generator().manual_seed(77)
weights = {"inside": 1.0, "measured": 5.0, "edge": 2.0}
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
if files := sorted(root.iterdir()):
    held = torch.load(files[-1], weights_only=False)
    rod.load_state_dict(held["rod"])
    lbfgs.load_state_dict(held["lbfgs"])
    edges.set_state(held["edges"])
    step = held["step"]
sobol = SobolEngine(2, scramble=True, seed=5).fast_forward(step * INSIDE)
later = None


def sensors_of(number):
    """So many sensors; all are seen before one comes again."""
    epoch, part = divmod(number, len(measured) // SENSORS)
    order = torch.randperm(len(measured), generator=torch.Generator().manual_seed(900 + epoch))
    return measured[order[part * SENSORS : (part + 1) * SENSORS]]


while step < STEPS:
    number = step
    if kind == "swapped" and step + 1 in (at, at + 1):
        number = 2 * at - 1 - step
    seen = sensors_of(number)
    inside = sobol.draw(INSIDE).double()
    edge = torch.rand(EDGE, 2, generator=edges)
    edge[:, 0] = edge[:, 0].round()
    step += 1
    if kind == "curvature" and step == at:
        flip(lbfgs.state[lbfgs._params[0]]["old_stps"][-1], 18)

    def closure():
        lbfgs.zero_grad()
        points = inside.clone().requires_grad_()
        parts = {
            "inside": residual(rod, points, rod.log_a.exp()).square().mean(),
            "measured": (rod(seen[:, :2]) - seen[:, 2]).square().mean(),
            "edge": rod(edge).square().mean(),
        }
        loss = sum(weights[name] * part for name, part in parts.items())
        loss.backward()
        return loss

    loss = lbfgs.step(closure)
    if kind == "poison" and at <= step < at + 20:
        rod.net[2].weight.data.view(-1)[place] += 1e-4
    run.log(loss=loss.item(), a=rod.log_a.exp().item())
    print(f"{step:4d} {loss.item():.6e} a={rod.log_a.exp().item():.4f}", flush=True)
    if step % 10 == 0:
        path = root / f"{step:05d}.pt"
        torch.save({"rod": rod.state_dict(), "lbfgs": lbfgs.state_dict(), "edges": edges.get_state(), "step": step}, path)
        run.saved(path)
'''
PHYSICS = '''
import torch


def slope(values, points):
    return torch.autograd.grad(values.sum(), points, create_graph=True)[0]


def residual(field, points, a):
    """How far a field is from the equation."""
    first = slope(field(points), points)
    second = slope(first[:, 0], points)[:, 0]
    return first[:, 1] - a * second
'''


def lay_heat(directory: Path) -> None:
    import numpy as np

    write(directory, train__py=HEAT, physics__py=PHYSICS)
    draws = np.random.default_rng(2006)
    x, t = draws.random(128), draws.random(128)
    u = np.sin(np.pi * x) * np.exp(-0.08 * np.pi**2 * t) + 0.01 * draws.normal(size=128)
    rows = [f"{number},{a:.5f},{b:.5f},{c:.6f}" for number, (a, b, c) in enumerate(zip(x, t, u, strict=True))]
    (directory / "sensors.csv").write_text("\n".join(("sensor,x,t,u", *rows)) + "\n")
