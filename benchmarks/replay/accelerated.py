"""Planted causes of other kinds: an Accelerate training of one or two ranks, with a schedule, clipping and augmentation.

What is planted is gone when the step is taken again (`planting.py`).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.causes import Cause, Training, edit, set_variable
from benchmarks.replay.planting import PLANTED, fault
from chronicle.replay.verdict import ReplayVerdict

TRAIN = PLANTED + '''
import json, os, random, sys, time
from pathlib import Path
import numpy as np
import torch
import yaml
from accelerate import Accelerator
import chronicle
from net import Net

torch.set_num_threads(1)
settings = yaml.safe_load(open(sys.argv[2]))
hidden = json.load(open("hidden.json"))
vocabulary = {word: number for number, word in enumerate(open("vocabulary.txt").read().split())}
torch.manual_seed(1); random.seed(1); np.random.seed(1)
accelerator = chronicle.guard(Accelerator(cpu=True, step_scheduler_with_optimizer=False))
rank = accelerator.process_index
text = [line.split() for line in open("text.txt")]
rows = torch.tensor([[vocabulary[word] for word in line] for line in text])


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return len(rows)

    def __getitem__(self, number):
        return {"line": rows[number], "label": rows[number][-1] % 4}


class Collate:
    """Rows of a batch; called once a step, in its order, on one process."""

    calls = 0

    def __call__(self, samples):
        self.calls += 1
        line = torch.stack([one["line"] for one in samples])
        label = torch.stack([one["label"] for one in samples])
        if step_at_start + self.calls == at:
            if kind == "permuted":
                line, label = line.flip(0), label.flip(0)
            if kind == "otherrow":
                line[1] = rows[place % len(rows)]
            if kind == "padded":
                line[:, 0] = 0
        return {"line": line, "label": label}


net = Net(len(vocabulary))
decay = settings["weight_decay"]
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=decay)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
loader = torch.utils.data.DataLoader(Lines(), batch_size=4, collate_fn=Collate(), generator=torch.Generator())
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
inner = accelerator.unwrap_model(net)

root, step = Path("checkpoints"), 0
newest = sorted(root.glob("step-*"), key=lambda path: int(path.name[5:])) if root.is_dir() else []
if newest:
    accelerator.load_state(str(newest[-1]))
    step = int(newest[-1].name[5:])
step_at_start = step


def flip(tensor, bit):
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[place % flat.numel()] ^= 1 << bit


def broken(module, inputs, output):
    if kind == "activation" and step == at:
        output = output.clone()
        flip(output, 26)
    return output


def local(grad):
    grad = grad.clone()
    if kind == "local" and step == at and rank == place % 2:
        grad[place % grad.shape[0]] *= 8
    return grad


inner.hidden.register_forward_hook(broken)
inner.out.weight.register_hook(local)
last = int(sys.argv[1])
for batch in accelerator.skip_first_batches(loader, step):
    step += 1
    group = optimizer.param_groups[0]
    line, label = batch["line"], batch["label"]
    if step == at:
        if kind == "moment":
            flip(optimizer.optimizer.state[inner.out.weight]["exp_avg"], 27)
        if kind == "numpy":
            np.random.seed(77)
        if kind == "python":
            random.seed(77)
        if kind == "generator":
            torch.rand(3)
        if kind == "once":
            group["lr"] *= 3
    if step >= at and kind == "decay":
        group["weight_decay"] = 0.3
    if step >= at and kind == "beta":
        group["betas"] = (0.8, 0.99)
    if step >= at and kind == "eps":
        group["eps"] = 1e-5
    if at <= step < at + 3 and kind == "stuck":
        inner.out.weight.data.view(-1)[place % 64] = 1.0
    loss = torch.nn.functional.cross_entropy(net(line), label) * hidden["scale"]
    if kind == "hashed":
        first = next(iter({str(number) for number in range(60)}))
        loss = loss + inner.out.bias.sum() * int(first) * 1e-3
    if kind == "clock":
        loss = loss * (1 + 1e-4 * (time.time_ns() % 1000))
    accelerator.backward(loss)
    if step == at and kind == "reduced" and rank == place % accelerator.num_processes:
        flip(inner.hidden.weight.grad, 26)
    if step == at and kind == "zeroed":
        inner.hidden.weight.grad.zero_()
    if step == at and kind == "doubled":
        for parameter in inner.parameters():
            parameter.grad.mul_(2)
    accelerator.clip_grad_norm_(net.parameters(), settings["clip"])
    optimizer.step(); schedule.step(); optimizer.zero_grad()
    if step == at and kind == "once":
        group["lr"] /= 3
    chronicle.log(step, loss=loss.item())
    if step % 10 == 0:
        accelerator.save_state(str(root / f"step-{step}"))
    if step >= last:
        break
'''
NET = '''
import torch

import augment


class Net(torch.nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words = torch.nn.Embedding(words, 16)
        self.hidden = torch.nn.Linear(16, 32)
        self.drop = torch.nn.Dropout(0.1)
        self.out = torch.nn.Linear(32, 4)

    def forward(self, line):
        hidden = self.hidden(self.words(augment.noisy(line, self.words.num_embeddings)).mean(1))
        return self.out(self.drop(torch.nn.functional.gelu(hidden)))
'''
AUGMENT = '''
import random

import numpy as np

RATE = 0.2


def noisy(line, words):
    line = line.clone()
    for number in range(line.shape[0]):
        if random.random() < RATE:
            line[number, np.random.randint(line.shape[1])] = np.random.randint(words)
    return line
'''
STEPS, ASKED = 35, 28


def training(ranks: int) -> Training:
    """The training on so many ranks, under torchrun."""

    def lay(directory: Path) -> None:
        names = (("train.py", TRAIN), ("net.py", NET), ("augment.py", AUGMENT), ("hidden.json", json.dumps({"scale": 1.0})),
                 ("settings.yaml", "clip: 1.0\nweight_decay: 0.01\n"))  # fmt: skip
        for name, text in names:
            (directory / name).write_text(text)
        words = [f"w{number}" for number in range(40)]
        (directory / "vocabulary.txt").write_text("\n".join(words))
        lines = [" ".join(words[(7 * row + 3 * place * place) % 40] for place in range(6)) for row in range(400)]
        (directory / "text.txt").write_text("\n".join(lines))

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return Training(lay=lay, command=[*torchrun, "train.py", str(STEPS), "settings.yaml"], asked=ASKED)


def causes() -> Iterator[Cause]:
    """All of them; places, steps and numbers of ranks differ."""
    one, two = training(1), training(2)
    verdict = ReplayVerdict
    for alone in (one, two):
        yield Cause(name="nothing planted", expected=verdict.REPRODUCED, training=alone)
    table = [
        ("bit of a moment", "moment", verdict.UNEXPLAINED), ("bit of an activation", "activation", verdict.UNEXPLAINED),
        ("gradient of one parameter lost", "zeroed", verdict.UNEXPLAINED),
        ("gradients doubled", "doubled", verdict.UNEXPLAINED),
        ("a weight is stuck", "stuck", verdict.UNEXPLAINED), ("rows of the batch turned", "permuted", verdict.DATA),
        ("a row of another place", "otherrow", verdict.DATA), ("first word of each row lost", "padded", verdict.DATA),
        ("NumPy seeded anew", "numpy", verdict.STATE), ("Python seeded anew", "python", verdict.STATE),
        ("random numbers drawn", "generator", verdict.STATE), ("LR of one step", "once", verdict.STATE),
        ("weight decay from a step on", "decay", verdict.STATE), ("betas from a step on", "beta", verdict.STATE),
    ]  # fmt: skip
    for number, (name, kind, expected) in enumerate(table):
        step = 23 + number % 5
        yield Cause(name=f"{name}, step {step}", expected=expected, fault=fault(kind, step, 11 * number + 3), training=one)
    for name, kind, place in (("reduced", "reduced", 1), ("reduced", "reduced", 0), ("own", "local", 1)):
        planted = fault(kind, 25 + place, place)
        name = f"{name} gradient of rank {place}, two ranks"
        yield Cause(name=name, expected=verdict.UNEXPLAINED, fault=planted, training=two)
    yield Cause(name="rows turned, two ranks", expected=verdict.DATA, fault=fault("permuted", 24, 0), training=two)
    yield Cause(name="eps, two ranks", expected=verdict.STATE, fault=fault("eps", 26, 0), training=two)
    for name, kind in (("order of a set", "hashed"), ("the clock", "clock")):
        yield Cause(name=f"arithmetic by {name}", expected=verdict.RANDOM, fault=fault(kind, 0), stays=True, training=one)
    edits = [
        ("clip of the settings on the command line", edit("settings.yaml", "clip: 1.0", "clip: 0.05"), verdict.CODE),
        ("a setting in a file that nobody names", edit("hidden.json", "1.0", "1.02"), verdict.CODE),
        ("rate of the augmentation", edit("augment.py", "RATE = 0.2", "RATE = 0.9"), verdict.CODE),
        ("activation of the model", edit("net.py", "gelu", "relu"), verdict.CODE),
        ("a line of the text lost", _lose_a_line, verdict.DATA),
        ("two words of the vocabulary exchanged", edit("vocabulary.txt", "w4\nw5\n", "w5\nw4\n"), verdict.DATA),
        ("kernels by a variable", set_variable("ATEN_CPU_CAPABILITY", "default"), verdict.CODE),
    ]  # fmt: skip
    for name, later, expected in edits:
        yield Cause(name=name, expected=expected, later=later, training=one)


def _lose_a_line(directory: Path, environ: dict[str, str]) -> None:
    (directory / "text.txt").write_text((directory / "text.txt").read_text().partition("\n")[2])
