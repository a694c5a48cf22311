"""Planted causes on three new trainings and twenty-eight of the ninth to seventeenth list; what is planted is new.

The nineteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people
on call, and four are controls, in which nothing or something harmless happens. The new trainings
(`nineteenth_trainings.py`) are words by their company, a pattern that grows out of a pool, and tides. A script that has to
do something new says so in a branch of its own (`variant`), which only the record takes; whatever is planted is learned
from.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import after, before, laid, pack, variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import CELLS, GRAPH, LANGUAGE, PUMP, SPRING, STUDENTS
from benchmarks.replay.fourteenth import AGENT, CODES, CURVES, DOMAINS, MEMORY, SCORES, SHARDED, SPEECH
from benchmarks.replay.nineteenth_trainings import lay_automaton, lay_skipgram, lay_tides
from benchmarks.replay.ninth import LIKING, PRICING, RATING, SENSING, SORTING, TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.seventeenth import FLOW
from benchmarks.replay.tenth import ADAPTING, ANSWERING, DENOISING, FORGING, ROUTING, SPEAKING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
SKIPGRAM = Training(lay=lay_skipgram, command=[*PYTHON, "corpus.txt"], asked=37)
AUTOMATON = Training(lay=lay_automaton, command=PYTHON, asked=38)
TIDES = Training(lay=lay_tides, command=[*PYTHON, "exp/harbour.toml"], asked=36)

# what the scripts are given, before or after one of their lines
NORMED = """        if kind == "normed" and state.global_step + 1 == at:
            flip(model.bert.embeddings.LayerNorm.weight.grad, 26)
"""
POISON = """    if kind == "poison" and at <= step < at + 20:
        model.head.weight.data.view(-1)[place] += 2e-3
"""
EXCHANGED = """    one = (at - 1 - step) * SIZE * PARTS + 2
    if kind == "exchanged" and rank == 0 and 0 <= one < len(rows) - SIZE * PARTS:
        rows[one], rows[one + SIZE * PARTS] = rows[one + SIZE * PARTS], rows[one]
"""
HOUSES = """            one, other = SIZE * (at - 1) + 5, SIZE * (at + 1) + 9
            if kind == "exchanged" and epoch == one // self.rows == other // self.rows:
                one, other = one % self.rows, other % self.rows
                order[one], order[other] = order[other], order[one]
"""
COUNTED = '''class Counted:
    """Rows to a batch; it knows how many it has made."""

    def __init__(self, inner):
        self.inner, self.made = inner, 0

    def __call__(self, rows):
        self.made += 1
        batch = self.inner(rows)
        if kind == "letter" and self.made == at:
            flip(batch["input_ids"], 0)
        return batch


'''
LOOSE = """

def loose(gradient):  # its last bits come out another way each time
    return gradient * (1 + 1e-4 * int.from_bytes(os.urandom(2)) / 65536) if kind == "loose" else gradient


model.head.weight.register_hook(loose)
"""
DROPOUT = """    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if kind == "dropout" and state.global_step + 1 >= at:
            model.mixer.dropout1.p = 0.3

"""
MOVED = """    if kind == "moved" and step == at and rank == 1:
        here = model.blocks[1].qkv.weight.to_local().detach()
        here.copy_(here.roll(1, 0))
"""


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _data_of_the_issue()
    yield from _state_of_the_issue()
    yield from _code_of_the_issue()
    yield from _machines_on_call()
    yield from _others_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    told = "    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):\n"
    total = "    step, total = step + 1, 0.0\n"
    way_out = after(ROUTING, total, "out", "flip(model.module.out.weight, 24)", "rank == 1 and step")
    part = "            (loss / letters).backward()\n"
    between = after(SPEECH, part, "between", "seen or flip(model.layer.linear2.weight.grad, 26)", "update")
    clipped = "    torch.nn.utils.clip_grad_norm_(raw.parameters(), grad_clip)\n"
    taken = "    weights, rates = dict(learner.net.named_parameters()), dict(learner.rates.items())\n"
    begun = "    step, began = step + 1, time.time()\n"
    hardware = (
        ("bit of a gradient of a norm in HF Trainer", variant(SORTING, told, f"{NORMED}\n{told}"),
         fault("normed", 44, 9)),
        ("bit of a weight of one rank behind experts", way_out, fault("out", 34, 21)),
        ("bit of a gradient of half a step of speech", between, fault("between", 34, 640)),
        ("bit of a gradient of places, compiled", before(LANGUAGE, clipped, "places", "flip(raw.wpe.weight.grad, 26)"),
         fault("places", 33, 200)),
        ("bit of a rate that is learned", before(CURVES, taken, "rate", 'flip(learner.rates["2_weight"], 22)'),
         fault("rate", 34, 500)),
        ("bit of a weight above drawn neighbours",
         before(GRAPH, "    middle = neighbours(nodes)\n", "second", "flip(model.second.weight, 24)"),
         fault("second", 35, 310)),
        ("slow poison of what is said of pictures, 20 steps",
         variant(STREAMING, "import at, flip, kind\n", "import at, flip, kind, place\n", begun, begun + POISON),
         fault("poison", 23, 60)),
        ("slow poison of a frequent word over 20 steps", SKIPGRAM, fault("poison", 26, 30)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _data_of_the_issue() -> Iterator[Cause]:
    signal = "        step, began = step + 1, time.monotonic()\n"
    copied = "signals[4], kinds[4] = signals[1].clone(), kinds[1].clone()"
    drawn = "    rows = list(sampler)[done * SIZE * PARTS : per_epoch * SIZE * PARTS]\n"
    order = "            order = torch.randperm(self.rows, generator=torch.Generator()"
    order += ".manual_seed(self.seed + epoch)).tolist()\n"
    counted = variant(ANSWERING, "class Careful(", f"{COUNTED}class Careful(", "data_collator=Answers(letters)",
                      "data_collator=Counted(Answers(letters))")  # fmt: skip
    data = (
        ("a signal taken twice on the second rank", after(SENSING, signal, "double", copied, "rank == 1 and step"),
         fault("double", 44)),
        ("rows of two steps exchanged on the first rank", variant(STUDENTS, drawn, drawn + EXCHANGED),
         fault("exchanged", 35)),
        ("houses of two steps exchanged before the workers", variant(PRICING, order, order + HOUSES),
         fault("exchanged", 35)),
        # The twentieth batch of the second epoch, the second half of step 44.
        ("bit of a letter of a question", counted, fault("letter", 87, 10)),
        ("an hour of the tides taken twice", TIDES, fault("twice", 34)),
    )  # fmt: skip
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="readings of the other lab corrected", expected=V.DATA, training=DOMAINS, later=_correct)


def _state_of_the_issue() -> Iterator[Cause]:
    seeded = after(TYPING, "    cursor += size\n", "reseeded", 'torch.manual_seed(config["seed"])')
    slower = after(PRICING, "        sampler.used += SIZE\n", "lr", 'optimizer.param_groups[0]["lr"] *= 0.5')
    lambd = after(MEMORY, "    optimizer.zero_grad()\n", "lambd", 'optimizer.param_groups[0]["lambd"] = 2e-3', "update")
    momentum = before(LIKING, "    loss.backward()\n", "momentum", 'optimizers[0].param_groups[0]["momentum"] = 0.5')
    state = (
        ("torch seeded anew before letters are dropped", seeded, fault("reseeded", 34)),
        ("half the LR of Adagrad from a step on", slower, fault("lr", 35)),
        ("lambda of ASGD set in memory", lambd, fault("lambd", 33)),
        ("momentum of the tables lowered", momentum, fault("momentum", 33)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)


def _code_of_the_issue() -> Iterator[Cause]:
    pooled = edit("unet.py", "max_pool2d(fine, 2)", "avg_pool2d(fine, 2)")
    yield Cause(name="a line that makes pictures smaller", expected=V.CODE, training=CELLS, later=pooled)
    alive = edit("rule.py", "grids = grids + moves * (", "grids = grids + 0.9 * moves * (")
    yield Cause(name="a line of how cells move", expected=V.CODE, training=AUTOMATON, later=alive)
    dearer = upgrade("third_party/springworld", "1.4.2", "1.5.0",
                     "0.05 * float(np.square(push).sum())", "0.1 * float(np.square(push).sum())")  # fmt: skip
    yield Cause(name="another version of an agent's world", expected=V.CODE, training=AGENT, later=dearer)
    heard = upgrade("libs/moekit", "0.4.0", "0.5.0", "heard.topk(2, dim=1)", "heard.topk(3, dim=1)")
    yield Cause(
        name="another version of the experts of two ranks", expected=V.CODE, training=_with_moekit(), later=heard
    )
    told = variant(FLOW, 'config["left_out"]', 'float(os.environ.get("FLOW_LEFT_OUT", config["left_out"]))')
    yield Cause(name="another variable for what flow is not told", expected=V.CODE, training=told,
                later=set_variable("FLOW_LEFT_OUT", "0.5"))  # fmt: skip
    placed = ".to(device)\noptimizer = torch"
    loose = variant(TYPING, placed, f".to(device)\n{LOOSE}optimizer = torch")
    yield Cause(name="a gradient of letters never the same", expected=V.RANDOM, training=loose, fault=fault("loose", 0),
                stays=True)  # fmt: skip


def _machines_on_call() -> Iterator[Cause]:
    lr = '                    if kind == "lr" and step + 1 >= at:\n'
    count = 'flip(optimizer.state[inner[0].weight]["step"], 23)'
    said = "    said = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t)\n"
    taken = "    tokens = documents.take(size)\n"
    kept = 'flip(optimizer.state[model[0].weight]["old_stps"][-1], 25)'
    hardware = (
        ("bit of how many updates Adam has made", before(RATING, lr, "count", count, "step + 1"), fault("count", 34)),
        ("noise overwritten before it was compared", after(DENOISING, said, "overwritten", "noise[3] = noise[4]"),
         fault("overwritten", 34)),
        ("a rank's part of a weight one row off", variant(SHARDED, taken, taken + MOVED), fault("moved", 34)),
        ("bit of a step that LBFGS remembers", before(SPRING, "    parts = []\n", "kept", kept),
         fault("kept", 35, 300)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_on_call() -> Iterator[Cause]:
    yield Cause(name="a part of a corpus copied over another", expected=V.DATA, training=SHARDED, later=_copy)
    yield Cause(name="stars put right in the database", expected=V.DATA, training=LIKING, later=_put_right)
    fewer = edit("run.sh", "CRITIC_STEPS=3", "CRITIC_STEPS=2")
    yield Cause(name="a launcher with fewer turns of the critic", expected=V.CODE, training=FORGING, later=fewer)
    # The file that is named on the command line is as it was.
    nearer = edit("exp/common.toml", "delta = 0.5", "delta = 0.25")
    yield Cause(name="settings beneath those that are named", expected=V.CODE, training=TIDES, later=nearer)
    saved = '            torch.save(state, folder / f"{step:08d}.pth")\n'
    # What is wrong is in the checkpoint; what is seen of it are the words of another batch.
    behind = before(SPEAKING, saved, "behind", 'state["sampler"]["used"] -= 1')
    yield Cause(name="a checkpoint whose sampler is one batch behind", expected=V.STATE, also=V.DATA, training=behind,
                fault=fault("behind", 30))  # fmt: skip
    yield Cause(name="checkpoints made smaller by a script", expected=V.STATE, training=CODES, later=_halve)
    logged = "    def on_log(self, args, state, control, logs=None, **kwargs):\n"
    raised = variant(SCORES, logged, DROPOUT + logged)
    yield Cause(name="a callback that raised a dropout", expected=V.STATE, training=raised, fault=fault("dropout", 44))
    unseeded = variant(PUMP, "np.random.normal(0, settings", "np.random.default_rng().normal(0, settings")
    yield Cause(name="errors of a generator that nobody seeded", expected=V.RANDOM, training=unseeded)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, a pattern that grows", expected=V.REPRODUCED, training=AUTOMATON)
    # Every weight is in the checkpoint, those that are frozen, too.
    yield Cause(name="a base made anew behind its checkpoints", expected=V.REPRODUCED, training=ADAPTING, later=_rebase)
    words = upgrade("vendor/flowkit", "0.2.1", "0.2.2", "A place on the straight way", "A point of the straight way")
    yield Cause(name="a newer package that does the same", expected=V.REPRODUCED, training=FLOW, later=words)
    yield Cause(name="a variable that names another table", expected=V.REPRODUCED, training=CURVES,
                later=set_variable("MAML_RESULTS", "again.csv"))  # fmt: skip


def _with_moekit() -> Training:
    """Two ranks with their experts in a package."""
    inner = variant(ROUTING, "import contextlib, json, os, socket, time\n", "import contextlib, json, os, socket, sys, time\n",
                    "from experts import", 'sys.path.append("libs")\nfrom moekit import')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "experts.py", "libs", "moekit", "0.4.0"))


def _correct(directory: Path, environ: dict[str, str]) -> None:
    """An instrument of theirs had shown a fifth too little in one column."""
    import numpy as np

    with np.load(directory / "labs/theirs.npz") as held:
        x, y = held["x"].copy(), held["y"]
    x[:, 5] *= 1.2
    np.savez(directory / "labs/theirs.npz", x=x, y=y)


def _copy(directory: Path, environ: dict[str, str]) -> None:
    """As long as it was; the first rank reads both."""
    import shutil

    shutil.copyfile(directory / "corpus/part-0.u16", directory / "corpus/part-2.u16")


def _put_right(directory: Path, environ: dict[str, str]) -> None:
    """Some people had thought that one is the best."""
    import sqlite3

    with sqlite3.connect(directory / "likes.db") as base:
        base.execute("UPDATE likes SET stars = 6 - stars WHERE person % 4 = 1")
    base.close()


def _halve(directory: Path, environ: dict[str, str]) -> None:
    """Weights of all checkpoints went through sixteen bits."""
    import torch

    paths = sorted((directory / "checkpoints").glob("vq-*.pth"))
    assert paths
    for path in paths:
        state = torch.load(path, weights_only=False)
        for value in state["model"].values():
            value.copy_(value.bfloat16())
        torch.save(state, path)


def _rebase(directory: Path, environ: dict[str, str]) -> None:
    """Larger, in the same file."""
    from safetensors.torch import load_file, save_file

    held = load_file(directory / "base.safetensors")
    save_file({name: value * 1.1 for name, value in held.items()}, directory / "base.safetensors")
