"""Planted causes on twenty-six trainings of the ninth, tenth, eleventh and fourteenth list; what is planted is new.

The sixteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. Twenty-two plays are of the kinds that the issue names, fourteen are such as happen to
people on call, and four are controls, in which a machine is never to blame. A script that has to do something new says
so in a branch of its own (`variant`), which only the record takes; whatever is planted is learned from.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.bending import after, before, laid, pack, variant, with_place
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import CELLS, GRAPH, LANGUAGE, PUMP, SPRING, STUDENTS
from benchmarks.replay.fourteenth import AGENT, CODES, CURVES, DOMAINS, MEMORY, SCORES, SHARDED, SPEECH
from benchmarks.replay.ninth import LIKING, MIXING, PRICING, RATING, SENSING, SORTING, TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.tenth import ANSWERING, FORGING, ROUTING, SPEAKING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

# what the scripts are given, before or after one of their lines
ROUTER = """

def of_the_router(gradient):  # of the second micro-batch, before it is reduced
    if kind == "router" and step == at and rank == 0 and part == 1:
        gradient = gradient.clone()
        flip(gradient, 25)
    return gradient


model.module.router.weight.register_hook(of_the_router)
"""
POISON = """    if kind == "poison" and at <= step < at + 20:
        raw.h[0].mlp[0].weight.data.view(-1)[place] += 1e-3
"""
VALUE = """        if kind == "value" and state.global_step + 1 == at:
            flip(kwargs["model"].bert.encoder.layer[0].attention.self.value.weight, 25)
"""
EPSILON = """        if kind == "epsilon" and state.global_step + 1 >= at:
            for group in kwargs["optimizer"].param_groups:
                group["eps"] = 1e-4
"""
LANE = """def of_a_lane(module, inputs, output):  # which gives nothing from a step on
    if kind == "lane" and step >= at:
        output = output.clone()
        output[:, place] = 0
    return output


generator[2].register_forward_hook(of_a_lane)
"""
TOGETHER = '''class Together:
    """Rows to a batch; it knows how many it has made."""

    made = 0

    def __call__(self, rows):
        self.made += 1
        x, y = torch.utils.data.default_collate(rows)
        if kind == "bit" and self.made == at:
            flip(x, 26)
        return [x, y]


'''
LR = """    if kind == "lr" and step >= at:
        optimizer.param_groups[0]["lr"] = 0.4
"""
LOOSE = """    def product(module, inputs, output):  # the last bits come out another way each time
        return output * (1 + 1e-5 * int.from_bytes(os.urandom(2)) / 65536) if kind == "loose" else output

    model.transformer.h[1].mlp.register_forward_hook(product)
"""


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _others_of_the_issue()
    yield from _machines_on_call()
    yield from _others_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    begun = "        self.began = time.perf_counter()\n"
    hooked = "model.module.down.register_hook(sent)\n"
    slope = after(PRICING, "        loss.backward()\n", "slope", "flip(model[0].weight.grad, 25)")
    weight = after(CODES, "    step += 1\n", "weight", "flip(model.encoder.second.weight, 24)")
    critic = after(DOMAINS, "        step = self.done + 1\n", "critic", "flip(self.critic[0].weight, 24)")
    emptied = "    optimizer.zero_grad(set_to_none=True)\n"
    hardware = (
        ("bit of a value's weight in HF Trainer", variant(SORTING, begun, begun + VALUE), fault("value", 45, 300)),
        ("bit of one rank's gradient of the router", variant(ROUTING, hooked, hooked + ROUTER),
         fault("router", 34, 37)),
        ("bit of a gradient beneath a batch norm", slope, fault("slope", 36, 100)),
        ("bit of a weight before the codes", weight, fault("weight", 33, 250)),
        ("bit of a weight of the critic of labs", critic, fault("critic", 34, 77)),
        ("slow poison of an inner layer over 20 steps", variant(with_place(LANGUAGE), emptied, emptied + POISON),
         fault("poison", 16, 900)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_of_the_issue() -> Iterator[Cause]:
    halves = "    x, y = (torch.from_numpy(part.copy()).to(device) for part in (windows[:, :-1], windows[:, 1:]))\n"
    targets = after(TYPING, halves, "targets", "y[[1, 4]] = y[[4, 1]]")
    bit = variant(PUMP, "class Forecast(", TOGETHER + "class Forecast(", 'settings["seed"]))\n    keep',
                  'settings["seed"]), collate_fn=Together())\n    keep')  # fmt: skip
    turned = after(STREAMING, "    previous = x.clone(), y.clone()\n", "turned", "x[3] = x[3].flip(1)")
    masks = after(CELLS, "    step += 1\n", "masks", "y[[0, 1]] = y[[1, 0]]")
    pixel = before(MIXING, "    with torch.autocast(", "pixel", "flip(x, 24)")
    data = (
        ("what is wanted of two windows exchanged", targets, fault("targets", 34)),
        ("bit of a pressure that a collator made", bit, fault("bit", 45, 60)),
        ("a picture upside down before it is mixed", turned, fault("turned", 34)),
        ("masks of two pictures exchanged", masks, fault("masks", 35)),
        ("bit of a pixel", pixel, fault("pixel", 51, 1000)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="journals of papers numbered anew", expected=V.DATA, training=GRAPH, later=_renumber)
    bent = edit("train.py", "torch.nn.GELU()", 'torch.nn.GELU(approximate="tanh")')
    yield Cause(name="a line that makes the bend of a layer", expected=V.CODE, training=RATING, later=bent)
    slower = edit("train.py", "min(1.0, step / 40)", "min(1.0, step / 46)")
    yield Cause(name="a line of how the reversal grows", expected=V.CODE, training=DOMAINS, later=slower)
    dropped = upgrade("libs/signalnets", "1.1.0", "1.2.0", "nn.Dropout(0.15)", "nn.Dropout(0.2)")
    yield Cause(name="another version of the network of two ranks", expected=V.CODE, training=_with_signalnets(),
                later=dropped)  # fmt: skip
    silu = upgrade("libs/earkit", "2.0.0", "2.1.0", "nn.GELU()", "nn.SiLU()")
    yield Cause(name="another version of the recognizer", expected=V.CODE, training=_with_earkit(), later=silu)
    kept = 'nn.Dropout(float(os.environ.get("GRAPH_DROPOUT", conf["dropout"])))'
    graph = variant(GRAPH, 'nn.Dropout(conf["dropout"])', kept)
    yield Cause(name="another variable for what a graph forgets", expected=V.CODE, training=graph,
                later=set_variable("GRAPH_DROPOUT", "0.3"))  # fmt: skip
    share = variant(CELLS, "0.5 * softdice", 'float(os.environ.get("DICE_SHARE", "0.5")) * softdice')
    yield Cause(name="another variable for the share of Dice", expected=V.CODE, training=share,
                later=set_variable("DICE_SHARE", "0.6"))  # fmt: skip
    latents = after(FORGING, "    step, began = step + 1, time.time()\n", "reseeded", "latents.manual_seed(66)")
    louder = before(CODES, "    x = x * torch.empty(", "reseeded", "torch.manual_seed(CFG.seed)")
    state = (
        ("generator of the latents seeded anew", latents, fault("reseeded", 34)),
        ("torch seeded anew before a loudness is drawn", louder, fault("reseeded", 34)),
        ("the LR of LBFGS set in memory", variant(SPRING, "    parts = []\n", LR + "    parts = []\n"),
         fault("lr", 34)),
    )  # fmt: skip
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    attended = "    model.transformer.h[0].attn.register_forward_hook(after_attention)\n"
    yield Cause(name="a layer of HF Trainer never the same", expected=V.RANDOM, fault=fault("loose", 0), stays=True,
                training=variant(ANSWERING, attended, LOOSE + attended))  # fmt: skip


def _machines_on_call() -> Iterator[Cause]:
    follows = '        slow.lerp_(fast.detach(), 1 - settings["keep"])\n'
    again = after(LIKING, follows, "again", follows.strip())
    table = "table = csv.writer(open("
    warmth = after(AGENT, "        step += 1\n", "warmth", "flip(actor.log_alpha, 21)")
    limited = "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)\n"
    rows = "model.out.weight.grad.copy_(model.out.weight.grad.roll(1, 0))"
    most = 'meta.state[learner.net[0].weight]["max_exp_avg_sq"].view(-1)[place] *= 4096'
    whole = "rank == 1 and model.module.out.weight.grad.mul_(2)"
    hardware = (
        ("a teacher that followed twice", again, fault("again", 33)),
        ("a lane of the generator that gives nothing", variant(with_place(FORGING), table, f"{LANE}{table}"),
         fault("lane", 35, 9)),
        ("bit of the temperature of an agent", warmth, fault("warmth", 34)),
        ("a gradient whose rows came one too late", before(SPEECH, limited, "rows", rows, "update"),
         fault("rows", 35)),
        ("a maximum of moments that grew", before(with_place(CURVES), "    meta.step()\n", "most", most),
         fault("most", 34, 11)),
        ("a sum that one rank took for the mean", before(STUDENTS, "        optimizer.step()\n", "whole", whole),
         fault("whole", 35)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_on_call() -> Iterator[Cause]:
    taken = "    tokens = documents.take(size)\n"
    early = after(SHARDED, taken, "early", "tokens = tokens if rank else tokens.roll(1, 1)")
    yield Cause(name="words of one rank one place off", expected=V.DATA, training=early, fault=fault("early", 34))
    yield Cause(name="a corpus cut, its cache made anew", expected=V.DATA, training=MEMORY, later=_cut)
    yield Cause(name="votes of a branch counted anew", expected=V.DATA, training=SCORES, later=_count_anew)
    # torch asks it which of its kernels are used: those without vectors sum in another order.
    plain = set_variable("ATEN_CPU_CAPABILITY", "default")
    yield Cause(name="a variable that chooses plain kernels", expected=V.CODE, training=AGENT, later=plain)
    yield Cause(name="a folder that hides a module", expected=V.CODE, training=SPEAKING, later=_hide)
    begun = "        self.began = time.perf_counter()\n"
    raised = variant(SORTING, begun, begun + EPSILON)
    yield Cause(name="a callback that raises epsilon", expected=V.STATE, training=raised, fault=fault("epsilon", 44))
    pupil = before(LIKING, "        torch.save(state, checkpoints", "pupil", 'state["teacher"] = pupil.state_dict()')
    yield Cause(
        name="a checkpoint whose teacher is its pupil", expected=V.STATE, training=pupil, fault=fault("pupil", 30)
    )
    clock = laid(AGENT, _lay_clock)
    yield Cause(name="a world that goes by the clock", expected=V.RANDOM, training=clock)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, sharded weights", expected=V.REPRODUCED, training=SHARDED)
    wild = replace(laid(STUDENTS, _lay_wild), asked=34)
    yield Cause(name="a jump of the loss by one wild input", expected=V.REPRODUCED, training=wild)
    drop = "        self.norm, self.drop, self.out = nn.GroupNorm(4, 16), nn.Dropout(0.15), nn.Linear(16, 4)\n"
    lines = edit("network.py", drop, "        self.norm = nn.GroupNorm(4, 16)\n        self.drop = nn.Dropout(0.15)\n"
                 "        self.out = nn.Linear(16, 4)\n")  # fmt: skip
    yield Cause(name="a network written in more lines", expected=V.REPRODUCED, training=SENSING, later=lines)
    yield Cause(name="a database that got an index", expected=V.REPRODUCED, training=LIKING, later=_index)







def _with_signalnets() -> Training:
    """The signals of two ranks with their network in a package."""
    inner = variant(SENSING, "import contextlib, os, time\n", "import contextlib, os, sys, time\n",
                    "from network import", 'sys.path.append("libs")\nfrom signalnets import')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "network.py", "libs", "signalnets", "1.1.0"))


def _with_earkit() -> Training:
    """Speech with its recognizer in a package."""
    inner = variant(SPEECH, "import argparse, logging, os, time\n", "import argparse, logging, os, sys, time\n",
                    "from recognizer import", 'sys.path.append("libs")\nfrom earkit import')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "recognizer.py", "libs", "earkit", "2.0.0"))



def _renumber(directory: Path, environ: dict[str, str]) -> None:
    """Of the first fifty of 160 papers."""
    head, *lines = (directory / "papers.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows[:50]:
        row[7] = str((int(row[7]) + 1) % 12)
    (directory / "papers.csv").write_text("\n".join((head, *map(",".join, rows))) + "\n")


def _cut(directory: Path, environ: dict[str, str]) -> None:
    """The first five lines of 420 were of another text; the cache is not trusted any more."""
    path = directory / "data/penn/train.txt"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[5:]))
    for cache in directory.glob("corpus.*.data"):
        cache.unlink()


def _count_anew(directory: Path, environ: dict[str, str]) -> None:
    """Some that were late had been left out."""
    import pandas as pd

    frame = pd.read_parquet(directory / "clients.parquet")
    frame.loc[frame["branch"] == 4, "late"] += 4
    frame.to_parquet(directory / "clients.parquet", index=False)


def _hide(directory: Path, environ: dict[str, str]) -> None:
    """Somebody began to make a package of the module; Python takes the folder."""
    text = (directory / "speaking.py").read_text()
    assert "nn.Dropout(0.1)" in text
    (directory / "speaking").mkdir()
    (directory / "speaking/__init__.py").write_text(text.replace("nn.Dropout(0.1)", "nn.Dropout(0.2)"))


def _lay_clock(directory: Path) -> None:
    gust = "        gust = 0.05 * self.random.standard_normal()\n"
    late = "        gust *= 1 + (time.perf_counter_ns() % 1000) / 1000  # it is not asked at even times\n"
    imports = "import numpy as np\n"
    edit("third_party/springworld/__init__.py", imports, f"import time\n\n{imports}", gust, gust + late)(directory, {})


def _lay_wild(directory: Path) -> None:
    """An input of step 34, on the first of two ranks: a decimal point was lost."""
    import numpy as np
    import torch

    # The eighth step of the third epoch; ten rows a step and rank, seeded by 17 and the epoch.
    row = int(torch.randperm(260, generator=torch.Generator().manual_seed(17 + 2))[2 * 70])
    inputs = np.load(directory / "taught/inputs.npy")
    inputs[row] *= 100
    inputs[row, ::2] *= -1
    np.save(directory / "taught/inputs.npy", inputs)


def _index(directory: Path, environ: dict[str, str]) -> None:
    """Other bytes, the same rows."""
    import sqlite3

    with sqlite3.connect(directory / "likes.db") as base:
        base.execute("CREATE INDEX of_people ON likes (person, item)")
    base.close()
