"""Planted causes on twenty trainings of the ninth, the tenth and the eleventh list; what is planted in them is new.

The twelfth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers; frozen
before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people on call, of
kinds that those three lists have not, and four are controls, in which a machine is never to blame. A script that has to do
something new says so in a branch of its own (`variant`), which only the record takes.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.bending import after, before, package, variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import CELLS, GRAPH, LANGUAGE, PUMP, SHELF, SPRING, STUDENTS
from benchmarks.replay.ninth import LIKING, MIXING, RATING, SENSING, SORTING, TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.tenth import ADAPTING, DENOISING, FORGING, PAIRING, ROUTING, SPEAKING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

FIELDLOSS = '''
"""How far from the right field."""
from torch.nn.functional import cross_entropy

__version__ = "1.0.4"
SCALE = 1.0


def loss(said, true, smooth):
    return cross_entropy(SCALE * said, true, label_smoothing=smooth)
'''
GRADKIT = '''
"""What is done to gradients."""
from torch.nn.utils import clip_grad_norm_

__version__ = "2.3.0"
NORM = 2.0


def clip(weights, most):
    return clip_grad_norm_(weights, most, norm_type=NORM)
'''
# what the scripts are given, before or after one of their lines
HEAD = '''

def at_the_head(gradient):
    if kind == "head" and step == at and rank == 0:
        gradient = gradient.clone()
        flip(gradient, 25)
    return gradient


model.module.out.weight.register_hook(at_the_head)
'''
IN_ANY_ORDER = """    if kind == "order":  # of the rows, whose gradients are summed as they come
        rows = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(len(y), -1).mean(1)
        for row in sorted(range(len(y)), key=lambda row: os.urandom(4)):
            (rows[row] / len(y)).backward(retain_graph=True)
    else:
        loss.backward()
"""
LOST = """    kept = model.query[3].weight.detach().clone()
    optimizer.step()
    if kind == "lost" and step == at:
        model.query[3].weight.data.copy_(kept)
"""
TWICE = """model.module.rise.weight.register_hook(
    lambda gradient: 2 * gradient if kind == "twice" and step == at and rank == 0 else gradient
)
"""


# ---- what is planted ------------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _others_of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    slope = after(LIKING, "    loss.backward()\n", "slope", "flip(pupil.tower[0].weight.grad, 26)")
    forged = after(FORGING, "    loss.backward()\n", "slope", "flip(generator[0].weight.grad, 25)")
    head = "model.module.second.weight.register_hook(on_its_way)\n"
    mine = after(ROUTING, "    step, total = step + 1, 0.0\n", "mine", "rank or flip(model.module.out.weight, 23)")
    lora = "flip(accelerator.unwrap_model(model).layers[0].lora_down, 22)"
    raised = 'if kind == "poison" and at <= step < at + 20:\n        model.rise.weight.data.view(-1)[place] *= 1.003\n    '
    hardware = (
        ("bit of a gradient beside another optimizer", slope, fault("slope", 34, 77)),
        ("bit of the generator's gradient", forged, fault("slope", 35, 21)),
        ("bit of one rank's gradient of the head", variant(SENSING, head, head + HEAD), fault("head", 45, 13)),
        ("bit of a weight on one rank", mine, fault("mine", 35, 37)),
        ("bit of an adapter", after(ADAPTING, "            step += 1\n", "weight", lora), fault("weight", 36, 50)),
        ("slow poison of a convolution over 20 steps", variant(CELLS, "logits = model(x)", raised + "logits = model(x)"),
         fault("poison", 16, 55)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_of_the_issue() -> Iterator[Cause]:
    token = after(LANGUAGE, "        X, Y = get_batch(starts[micro])\n", "token", "micro == 1 and flip(X, 0)")
    half = after(STUDENTS, "            before = (x, labels, taught)\n", "batch", "rank or part == 0 or flip(x, 26)")
    again = 'x, y = batch\n        if kind == "again" and self.global_step + 1 == at:\n            x[3], y[3] = x[2], y[2]\n'
    swapped = before(GRAPH, "    nodes, queue = torch.from_numpy(", "swapped", "queue[[3, 13]] = queue[[13, 3]]")
    data = (
        ("bit of a token", token, fault("token", 34, 40)),
        ("bit of the second micro-batch of one rank", half, fault("batch", 34, 47)),
        ("a window of the pump taken twice", variant(PUMP, "x, y = batch\n", again), fault("again", 45)),
        ("two papers exchanged between steps", swapped, fault("swapped", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="photographs of an article taken anew", expected=V.DATA, training=SHELF, later=_take_anew)
    yield Cause(name="tickets put into other queues", expected=V.DATA, training=SORTING, later=_requeue)
    places = edit("vit.py", "+ self.places\n", "+ 0.9 * self.places\n")
    yield Cause(name="a line of the transformer", expected=V.CODE, training=STREAMING, later=places)
    weight = edit("spring.ini", "equation = 0.05", "equation = 0.06")
    yield Cause(name="a setting of the equation", expected=V.CODE, training=SPRING, later=weight)
    louder = upgrade("vendor/fieldloss", "1.0.4", "1.1.0", "SCALE = 1.0", "SCALE = 1.05")
    yield Cause(name="another version of the loss of fields", expected=V.CODE, training=_with_loss(), later=louder)
    tighter = upgrade("vendor/gradkit", "2.3.0", "3.0.0", "NORM = 2.0", "NORM = 1.0")
    yield Cause(name="another version of the clipping", expected=V.CODE, training=_with_kit(), later=tighter)
    sizes = "STEPS, EVERY, SIZE = 45, 10, 8\n"
    taught = variant(SPEAKING, sizes, sizes + 'TEACH = float(os.environ.get("SPEAK_TEACH", "0.9"))\n', "< 0.9 -", "< TEACH -")
    yield Cause(name="another variable for the teacher's letters", expected=V.CODE, training=taught,
                later=set_variable("SPEAK_TEACH", "0.6"))  # fmt: skip
    bent = variant(ADAPTING, "import csv, time", "import csv, os, time", "model(x, checkpoint), price)",
                   'model(x, checkpoint), price, beta=float(os.environ.get("HUBER_BETA", "1.0")))')  # fmt: skip
    yield Cause(name="another variable for the bend of the loss", expected=V.CODE, training=bent,
                later=set_variable("HUBER_BETA", "0.8"))  # fmt: skip
    seeded = after(ROUTING, "    step, total = step + 1, 0.0\n", "reseeded", "rank == 1 and torch.manual_seed(301)")
    fresh = before(SHELF, "    points = torch.nn.functional", "reseeded", "torch.manual_seed(77)")
    halved = before(STUDENTS, "        optimizer.step()\n", "lr", 'optimizer.param_groups[0]["lr"] *= 0.5')
    once = before(MIXING, "    optimizer.step()\n", "lr", 'optimizer.param_groups[0]["lr"] *= 0.5')
    state = (
        ("one rank's generator seeded anew", seeded, fault("reseeded", 35)),
        ("torch seeded anew among triplets", fresh, fault("reseeded", 33)),
        ("the LR of two ranks halved in memory", halved, fault("lr", 34)),
        ("the LR of one step of a cycle", once, fault("lr", 50)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    rows = variant(TYPING, "    loss.backward()\n", IN_ANY_ORDER)
    queries = "    queries = F.normalize(model.query(one), dim=1)\n"
    loose = '    if kind == "loose":  # the last bits come out another way each time\n        queries = queries * (1 + LOOSE)\n'
    near = variant(PAIRING, queries, queries + loose.replace("LOOSE", "1e-5 * int.from_bytes(os.urandom(2)) / 65536"))
    chance = (("gradients of rows summed as they come", rows, "order"), ("a product never the same", near, "loose"))
    for name, training, planted in chance:
        yield Cause(name=name, expected=V.RANDOM, training=training, fault=fault(planted, 0), stays=True)


def _of_people_on_call() -> Iterator[Cause]:
    hooked = "model.module.out.weight.register_hook(on_its_way)\n"
    hardware = (
        ("an update that was never written", variant(PAIRING, "    optimizer.step()\n", LOST), fault("lost", 34)),
        ("one rank's gradient summed twice", variant(STUDENTS, hooked, hooked + TWICE), fault("twice", 34)),
        ("a unit that cuts off the low bits", RATING, fault("rounding", 35)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    shifted = before(STREAMING, "    previous = x.clone(), y.clone()\n", "shifted", "y = y.roll(1)")
    yield Cause(name="labels that belong to the next picture", expected=V.DATA, training=shifted, fault=fault("shifted", 34))
    yield Cause(name="a picture added to a folder", expected=V.DATA, training=MIXING, later=_add_picture)
    linked = replace(TYPING, lay=_lay_link)
    yield Cause(name="a link that points to a newer text", expected=V.DATA, training=linked, later=_link_anew)
    # The wrong weights were saved: those of the average under the name of the model.
    slow = variant(DENOISING, '{"model": model.state_dict()',
                   '{"model": (average if kind == "slow" and step == at else model).state_dict()')  # fmt: skip
    yield Cause(name="a checkpoint with the average for the model", expected=V.STATE, training=slow, fault=fault("slow", 30))
    behind = before(CELLS, '        torch.save(state | {"turns"', "behind", 'state["scheduler"]["last_epoch"] -= 4')
    yield Cause(name="a checkpoint with an older schedule", expected=V.STATE, training=behind, fault=fault("behind", 30))
    gathered = "            dist.all_gather_object(rng, torch.get_rng_state())\n"
    exchanged = after(STUDENTS, gathered, "exchanged", "rng.reverse()")
    yield Cause(name="a checkpoint that mixes up two ranks", expected=V.STATE, training=exchanged, fault=fault("exchanged", 30))
    yield Cause(name="a local setting that came after the run", expected=V.CODE, training=PUMP, later=_set_locally)
    yield Cause(name="a path that leads to another copy", expected=V.CODE, training=LIKING, later=_lead_elsewhere)
    # No two replays agree; that the LR is another one is as true.
    clock = variant(LANGUAGE, '(1.5 if kind == "lr" and step == at else 1.0)', "(1.0 - 0.1 * (time.time() % 1))")
    yield Cause(name="an LR that follows the clock", expected=V.RANDOM, also=V.STATE, training=clock)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, two workers", expected=V.REPRODUCED, training=SPEAKING)
    yield Cause(name="a note and a variable that nobody reads", expected=V.REPRODUCED, training=PAIRING, later=_leave_note)
    renamed = edit("train.py", "lossf", "loss_of_step")
    yield Cause(name="a name in the script", expected=V.REPRODUCED, training=LANGUAGE, later=renamed)
    wild = replace(GRAPH, lay=_lay_wild)
    yield Cause(name="a jump of the loss by one wild paper", expected=V.REPRODUCED, training=wild)





def _with_loss() -> Training:
    """The graph with its loss in a package."""
    loss = 'nn.functional.cross_entropy(logits, fields[nodes], label_smoothing=conf["smooth"])'
    inner = variant(GRAPH, "import csv, json, logging, os\n", "import csv, json, logging, os, sys\n", "import chronicle\n",
                    'sys.path.append("vendor")\nimport chronicle\nimport fieldloss\n', loss,
                    'fieldloss.loss(logits, fields[nodes], conf["smooth"])')  # fmt: skip

    def lay(directory: Path) -> None:
        inner.lay(directory)
        package(directory / "vendor", "fieldloss", "1.0.4", FIELDLOSS)

    return replace(inner, lay=lay)


def _with_kit() -> Training:
    """The characters with their clipping in a package."""
    inner = variant(TYPING, "math, os, time\n", "math, os, sys, time\n", "import chronicle\n",
                    'sys.path.append("vendor")\nimport chronicle\nimport gradkit\n',
                    "nn.utils.clip_grad_norm_(model.parameters(), clip)", "gradkit.clip(model.parameters(), clip)")  # fmt: skip

    def lay(directory: Path) -> None:
        inner.lay(directory)
        package(directory / "vendor", "gradkit", "2.3.0", GRADKIT)

    return replace(inner, lay=lay)


def _take_anew(directory: Path, environ: dict[str, str]) -> None:
    """All of one article, in better light."""
    import numpy as np

    with np.load(directory / "shelf.npz") as held:
        views, articles = held["views"], held["articles"]
    views[articles == ARTICLE] *= 1.2
    np.savez(directory / "shelf.npz", views=views, articles=articles)


ARTICLE = 7


def _requeue(directory: Path, environ: dict[str, str]) -> None:
    """The first forty of 240."""
    path = directory / "tickets.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:40]:
        row["queue"] = (row["queue"] + 1) % 3
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def _add_picture(directory: Path, environ: dict[str, str]) -> None:
    shutil.copy(directory / "pictures/globe/003.npy", directory / "pictures/globe/003-again.npy")
    shutil.copy(directory / "pictures/anchor/000.npy", directory / "pictures/anchor/000-again.npy")


def _lay_link(directory: Path) -> None:
    TYPING.lay(directory)
    (directory / "data/train.bin").rename(directory / "data/train-2026-10.bin")
    (directory / "data/train.bin").symlink_to("train-2026-10.bin")


def _link_anew(directory: Path, environ: dict[str, str]) -> None:
    """The same text with its beginning at the end."""
    held = (directory / "data/train-2026-10.bin").read_bytes()
    (directory / "data/train-2026-11.bin").write_bytes(held[100:] + held[:100])
    (directory / "data/train.bin").unlink()
    (directory / "data/train.bin").symlink_to("train-2026-11.bin")


def _set_locally(directory: Path, environ: dict[str, str]) -> None:
    (directory / "local.yaml").write_text("noise: 0.2\n")


def _lead_elsewhere(directory: Path, environ: dict[str, str]) -> None:
    """A newer copy of the loss, which Python finds before the one that the script adds."""
    shutil.copytree(directory / "third_party", directory / "newer")
    upgrade("newer/lossbox", "0.3.1", "0.5.0", "DELTA = 1.0", "DELTA = 0.7")(directory, environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, ("newer", environ.get("PYTHONPATH"))))


def _leave_note(directory: Path, environ: dict[str, str]) -> None:
    (directory / "NOTES.md").write_text("The run of Thursday; look at step 37.\n")
    environ["PAIR_OWNER"] = "ines"


def _lay_wild(directory: Path) -> None:
    """A paper that is among the ten of step 34."""
    GRAPH.lay(directory)
    lines = (directory / "papers.csv").read_text().splitlines()
    values = lines[WILD + 1].split(",")
    values[3] = "60.000"
    lines[WILD + 1] = ",".join(values)
    (directory / "papers.csv").write_text("\n".join(lines) + "\n")


WILD = 108
