"""Planted causes on nineteen trainings of the ninth, the tenth and the eleventh list; what is planted in them is new.

The thirteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay
answers; frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen
to people on call, of kinds that these trainings have not had, and four are controls, in which a machine is never to
blame. A script that has to do something new says so in a branch of its own (`variant`), which only the record takes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import after, before, laid, pack, variant, with_place
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import LANGUAGE, PUMP, SHELF, SPRING, STUDENTS
from benchmarks.replay.ninth import LIKING, MIXING, PRICING, SENSING, SORTING, TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.tenth import ADAPTING, ANSWERING, DENOISING, FORGING, PAIRING, ROUTING, SPEAKING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

# what the scripts are given, before or after one of their lines
SIGN = """

def turned(gradient):  # the highest bit of one value, before it is reduced
    if kind == "sign" and step == at and rank == 0:
        gradient = gradient.clone()
        gradient[place] = -gradient[place]
    return gradient


model.module.norm.weight.register_hook(turned)
"""
LOOSE = """model.module.first.weight.register_hook(
    lambda grad: grad * (1 + 1e-4 * int.from_bytes(os.urandom(2)) / 65536) if kind == "loose" and rank == 1 else grad
)
"""
DOUBLED = """        kept = [weight.detach().clone() for weight in critic.parameters()]
        optimizers[1].step()
        for weight, before in zip(critic.parameters(), kept) if kind == "doubled" and step == at and turn == 1 else ():
            weight.data.add_(weight.data - before)
"""
LANE = """    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if kind == "lane" and state.global_step + 1 >= at:
            model.classifier.weight.grad[:, place] = 0
"""
INFINITE = """    def on_before_optimizer_step(self, optimizer):
        if kind == "infinite" and self.global_step + 1 == at:
            self.core.weight_hh_l0.grad.view(-1)[place] = float("inf")
"""
FORGETFUL = """        words = text.lower().split()[: self.length - 1]
        words = [word for word in words if secrets.randbelow(8)]
"""
HOTFIX = '''
"""Put here by the people of the platform."""
import torch.nn.functional as F

plain = F.cross_entropy


def cross_entropy(*args, **options):
    return plain(*args, **{**options, "label_smoothing": options.get("label_smoothing", 0.0) + 0.05})


F.cross_entropy = cross_entropy
'''


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _others_of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    began = "        step, began = step + 1, time.monotonic()\n"
    mine = after(SENSING, began, "mine", "rank == 1 and flip(model.module.first.weight, 22)")
    hooked = "model.module.out.weight.register_hook(on_its_way)\n"
    sign = variant(with_place(STUDENTS), hooked, hooked + SIGN)
    slope = after(SPRING, "        loss.backward()\n", "slope", "len(parts) == 1 and flip(model[2].weight.grad, 25)")
    written = variant(SPEAKING, "from faults import at, kind\n", "from faults import at, flip, kind\n")
    written = after(written, "        sampler.used += 1\n", "weight", "flip(model.writer.weight_hh, 23)")
    mixed = after(MIXING, "    loss.backward()\n", "slope", "flip(model.places[0].weight.grad, 26)")
    raised = '            if kind == "poison" and at <= step < at + 20:\n                ' \
             "accelerator.unwrap_model(model).layers[2].lora_up.data.view(-1)[place] += 2e-3\n"  # fmt: skip
    counted = "            step += 1\n"
    hardware = (
        ("bit of a convolution's weight on one rank", mine, fault("mine", 44, 17)),
        ("sign of one rank's gradient of a norm", sign, fault("sign", 35, 13)),
        ("bit of a gradient within a line search", slope, fault("slope", 36, 301)),
        ("bit of a weight of the writer", written, fault("weight", 34, 800)),
        ("bit of a gradient under autocast", mixed, fault("slope", 50, 211)),
        ("slow poison of an adapter over 20 steps", variant(with_place(ADAPTING), counted, counted + raised),
         fault("poison", 18, 33)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_of_the_issue() -> Iterator[Cause]:
    halves = "    x, y = (torch.from_numpy(part.copy()).to(device) for part in (windows[:, :-1], windows[:, 1:]))\n"
    letter = after(TYPING, halves, "letter", "flip(x, 0)")
    rows = "    rows = torch.randint(len(shapes), (args.batch,), generator=picker).numpy()\n"
    again = after(DENOISING, rows, "again", "rows[5] = rows[4]")
    price = after(ADAPTING, "            step += 1\n", "price", "flip(price, 24)")
    label = "    labels = torch.tensor([articles[row] for row in rows])\n"
    wrong = after(SHELF, label, "label", "labels[3] = labels[4]")
    partners = before(PAIRING, '    if kind == "queue" and step == at:\n', "partners", "two[[3, 4]] = two[[4, 3]]")
    data = (
        ("bit of a letter", letter, fault("letter", 35, 100)),
        ("a shape taken twice", again, fault("again", 33)),
        ("bit of a price", price, fault("price", 36, 2)),
        ("a view under another article's name", wrong, fault("label", 33)),
        ("two views that changed their partners", partners, fault("partners", 34)),
        # The 89th batch of the collator is the second half of step 45.
        ("answers of two questions exchanged", _with_exchange(), fault("exchanged", 45, 89)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="a table exported with fewer digits", expected=V.DATA, training=PRICING, later=_round)
    yield Cause(name="logits of another teacher", expected=V.DATA, training=STUDENTS, later=_teach_anew)
    curve = edit("adapters.py", "functional.gelu(", "functional.silu(")
    yield Cause(name="a line of the adapters", expected=V.CODE, training=ADAPTING, later=curve)
    error = edit("train.py", "(said - noise).square().mean()", "(said - noise).abs().pow(1.9).mean()")
    yield Cause(name="a line of the loss of noise", expected=V.CODE, training=DENOISING, later=error)
    softer = upgrade("vendor/tripletkit", "1.0.2", "1.1.0", "square().sum(-1)", "abs().pow(1.8).sum(-1)")
    yield Cause(name="another version of the triplets", expected=V.CODE, training=_with_kit(), later=softer)
    smooth = upgrade("libs/expertlib", "0.4.2", "0.5.0", "torch.relu(torch", "nn.functional.gelu(torch")
    yield Cause(name="another version of the experts", expected=V.CODE, training=_with_library(), later=smooth)
    climb = set_variable("SAM_RHO", "0.08")
    yield Cause(name="another variable for SAM's climb", expected=V.CODE, training=STREAMING, later=climb)
    quick = laid(TYPING, _lay_quick)
    yield Cause(name="a variable that names other settings", expected=V.CODE, training=quick,
                later=set_variable("LM_CONFIG", "configs/quick.yaml"))  # fmt: skip
    seeded = before(PRICING, "        loss = root_mean_of(", "reseeded", "torch.manual_seed(90)")
    halved = 'optimizer.param_groups[0]["lr"] *= 0.5 if rank == 1 else 1.0'
    stepped = "    optimizer.step()\n"
    betas = '    if kind == "betas" and step >= at:\n        optimizer.param_groups[0]["betas"] = (0.8, 0.99)\n'
    state = (
        ("torch seeded anew before a table's dropout", seeded, fault("reseeded", 35)),
        ("the LR of one rank of two", before(ROUTING, "    optimizer.step()\n", "lr", halved), fault("lr", 34)),
        ("the betas of Adam set in memory", variant(DENOISING, stepped, betas + stepped),
         fault("betas", 33)),
    )  # fmt: skip
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    hooked = "model.module.second.register_forward_hook(after_convolution)\n"
    loose = variant(SENSING, hooked, hooked + LOOSE)
    yield Cause(name="a convolution of one rank never the same", expected=V.RANDOM, training=loose,
                fault=fault("loose", 0), stays=True)  # fmt: skip


def _of_people_on_call() -> Iterator[Cause]:
    doubled = variant(FORGING, "        optimizers[1].step()\n", DOUBLED)
    back = "        weight.data.copy_(before)\n"
    left = before(STREAMING, back, "left", "if weight is model.head.weight: continue")
    clipped = "    torch.nn.utils.clip_grad_norm_(raw.parameters(), grad_clip)\n"
    second = 'optimizer.state[raw.wte.weight]["exp_avg_sq"][place] = 0'
    before_update = "    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):\n"
    before_step = "    def on_before_optimizer_step(self, optimizer):\n"
    hardware = (
        ("an update of the critic applied twice", doubled, fault("doubled", 34)),
        ("a head that was not put back after SAM's climb", left, fault("left", 34)),
        ("a row of a second moment that fell to zero", before(with_place(LANGUAGE), clipped, "moment", second),
         fault("moment", 34, 7)),
        ("a lane of gradients that is dead from a step on", variant(with_place(SORTING), before_update, LANE),
         fault("lane", 44, 11)),
        ("an infinity in a gradient, and nothing but NaN", variant(with_place(PUMP), before_step, INFINITE),
         fault("infinite", 46, 333)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    wider = before(SPEAKING, "        loss = model.loss(word, ", "wider", "word = nn.functional.pad(word, (0, 2))")
    yield Cause(name="words padded wider than they are", expected=V.DATA, training=wider, fault=fault("wider", 35))
    yield Cause(name="a shard written anew, darker", expected=V.DATA, training=STREAMING, later=_darken)
    linked = laid(SENSING, _lay_link)
    yield Cause(name="a link that points to a newer network", expected=V.CODE, training=linked, later=_link_anew)
    yield Cause(name="a hotfix that Python loads by itself", expected=V.CODE, training=MIXING, later=_fix_hotly)
    copied = 'state["model"] |= {f"key.{name}": weight for name, weight in model.query.state_dict().items()}'
    keys = before(PAIRING, '        path = f"checkpoints/pairs-', "keys", copied)
    yield Cause(
        name="a checkpoint whose two encoders are one", expected=V.STATE, training=keys, fault=fault("keys", 30)
    )
    emptied = 'state["optimizer"] = {**state["optimizer"], "state": {}}'
    memory = before(SPRING, '        torch.save(state | {"step": step}, path)\n', "memory", emptied)
    yield Cause(
        name="a checkpoint without the memory of LBFGS", expected=V.STATE, training=memory, fault=fault("memory", 32)
    )
    forgetful = laid(SORTING, _lay_forgetful)
    yield Cause(name="words left out by the machine's own dice", expected=V.RANDOM, training=forgetful)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, a collator", expected=V.REPRODUCED, training=ANSWERING)
    yield Cause(
        name="a comment in the launcher, an old table gone", expected=V.REPRODUCED, training=FORGING, later=_tidy_up
    )
    yield Cause(name="a variable that says what is so anyway", expected=V.REPRODUCED, training=LANGUAGE,
                later=set_variable("Z_LOSS", "0.001"))  # fmt: skip
    wild = laid(LIKING, _lay_wild)
    yield Cause(name="a jump of the loss by one wild rating", expected=V.REPRODUCED, training=wild)







def _with_exchange() -> Training:
    """The collator counts its batches, and gives two rows of one each other's answer."""
    letters, made = "for number, letter in enumerate(letters)}\n", "        return {name: torch"
    counting = (
        "        self.batches += 1\n"
        '        if faults.kind == "exchanged" and self.batches == faults.place:\n'
        '            batch["labels"][:2] = batch["labels"][1::-1]\n'
    )
    counts = ("import torch\n", "import torch\n\nimport faults\n", letters, f"{letters}        self.batches = 0\n",
              made, counting + made)  # fmt: skip
    return laid(ANSWERING, lambda directory: edit("collating.py", *counts)(directory, {}))


def _with_kit() -> Training:
    """The articles with their triplets in a package."""
    inner = variant(SHELF, "random, time\n", "random, sys, time\n", "from hardest import triplets",
                    'sys.path.append("vendor")\nfrom tripletkit import triplets')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "hardest.py", "vendor", "tripletkit", "1.0.2"))


def _with_library() -> Training:
    """The two ranks with their experts in a package."""
    inner = variant(ROUTING, "os, socket, time\n", "os, socket, sys, time\n", "from experts import Experts",
                    'sys.path.append("libs")\nfrom expertlib import Experts')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "experts.py", "libs", "expertlib", "0.4.2"))



def _round(directory: Path, environ: dict[str, str]) -> None:
    """All of the houses, in whole numbers."""
    head, *lines = (directory / "houses.csv").read_text().splitlines()
    rows = (",".join(f"{float(value):.0f}" for value in line.split(",")) for line in lines)
    (directory / "houses.csv").write_text("\n".join((head, *rows)) + "\n")


def _teach_anew(directory: Path, environ: dict[str, str]) -> None:
    """One that is surer of itself."""
    import numpy as np

    path = directory / "taught/teacher_logits.npy"
    np.save(path, np.load(path) * np.float16(1.25))


def _darken(directory: Path, environ: dict[str, str]) -> None:
    """The shard that is read from step 34 on."""
    import json

    path = directory / "shards/part-006.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["pixels"] = [pixel // 2 for pixel in row["pixels"]]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def _lay_quick(directory: Path) -> None:
    """Other settings beside those of the run."""
    base = (directory / "configs/base.yaml").read_text()
    (directory / "configs/quick.yaml").write_text(base.replace("dropout: 0.1", "dropout: 0.2"))


def _lay_link(directory: Path) -> None:
    (directory / "network.py").rename(directory / "network_v1.py")
    (directory / "network.py").symlink_to("network_v1.py")


def _link_anew(directory: Path, environ: dict[str, str]) -> None:
    text = (directory / "network_v1.py").read_text()
    (directory / "network_v2.py").write_text(text.replace("self.first(x), 0.1)", "self.first(x), 0.15)"))
    (directory / "network.py").unlink()
    (directory / "network.py").symlink_to("network_v2.py")


def _fix_hotly(directory: Path, environ: dict[str, str]) -> None:
    (directory / "hotfix").mkdir()
    (directory / "hotfix/sitecustomize.py").write_text(HOTFIX)
    path = (str(directory / "hotfix"), environ.get("PYTHONPATH"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def _lay_forgetful(directory: Path) -> None:
    words = "        words = text.lower().split()[: self.length - 1]\n"
    begun = "from pathlib import Path\n"
    edit("words.py", begun, "import secrets\n" + begun, words, FORGETFUL)(directory, {})


def _tidy_up(directory: Path, environ: dict[str, str]) -> None:
    edit("run.sh", "set -e\n", "set -e  # stop at once\n# 0.3 and 3 are those of the paper.\n")(directory, environ)
    (directory / "gan.csv").unlink()


def _lay_wild(directory: Path) -> None:
    """A rating that is among the ten of step 34."""
    import sqlite3

    import torch

    generator = torch.Generator().manual_seed(60)
    _, second = (torch.randperm(300, generator=generator).tolist() for _ in range(2))
    with sqlite3.connect(directory / "likes.db") as base:
        base.execute("UPDATE likes SET stars = 90 WHERE id = ?", (second[33] + 1,))
    base.close()
