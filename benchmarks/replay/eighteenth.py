"""Planted causes on twenty-two trainings of the ninth, tenth, eleventh, fourteenth and seventeenth list; the plants are new.

The eighteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people
on call, and four are controls, in which nothing or something harmless happens. A script that has to do something new says
so in a branch of its own (`variant`), which only the record takes; whatever is planted is learned from.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import after, before, laid, pack, variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import CELLS, LANGUAGE, SHELF
from benchmarks.replay.fourteenth import CURVES, DOMAINS, MEMORY, SCORES
from benchmarks.replay.ninth import MIXING, PRICING, RATING, SENSING, TYPING
from benchmarks.replay.planting import fault
from benchmarks.replay.seventeenth import FLOW, FORECAST, GPT, PREFERENCES, STUDENT, TOWERS
from benchmarks.replay.tenth import ADAPTING, DENOISING, SPEAKING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

# what the scripts are given, before or after one of their lines
CAPTIONS = """

def of_captions(gradient):  # of the first rank, before it is reduced
    if kind == "captions" and step == at and rank == 0:
        gradient = gradient.clone()
        flip(gradient, 26)
    return gradient


model.module.caption[0].weight.register_hook(of_captions)
"""
HURRIED = """

def hurried(optimizer, args, kwargs):  # only for as long as the update takes
    for group in optimizer.param_groups if kind == "hurried" and step == at else []:
        group["lr"] *= 2


def calmed(optimizer, args, kwargs):
    for group in optimizer.param_groups if kind == "hurried" and step == at else []:
        group["lr"] /= 2


optimizer.register_step_pre_hook(hurried)
optimizer.register_step_post_hook(calmed)
"""
QUERY = """    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if kind == "query" and state.global_step + 1 == at:
            flip(model.distilbert.transformer.layer[0].attention.q_lin.weight, 25)

"""
BETAS = """        if kind == "betas" and state.global_step + 1 >= at:
            for group in kwargs["optimizer"].param_groups:
                group["betas"] = (0.5, 0.98)
"""
EMBEDDED = """
    def embedded(module, inputs, output):
        if kind == "embedded" and step == at:
            output = output.clone()
            flip(output, 25)
        return output

    policy.embed.register_forward_hook(embedded)
"""
MOMENT = """        if kind == "moment" and self.global_step + 1 == at:
            flip(optimizer.state[self.head.weight]["exp_avg_sq"], 26)
"""
MIDDLE = """

def of_the_middle(module, inputs, output):
    if kind == "middle" and step == at:
        output = output.clone(memory_format=torch.contiguous_format)
        flip(output, 27)
    return output


model.middle.register_forward_hook(of_the_middle)
"""
POISON = """    if kind == "poison" and at <= iter_num < at + 20:
        model.transformer.wpe.weight.data.view(-1)[place] += 2e-3
"""
LATE = """    written = [None, None]

    def late(module, inputs, output):  # what is read is what was written in the step before
        written[:] = written[1], output.detach().clone()
        return output + (written[0] - output).detach() if kind == "late" and progress.step + 1 == at else output

    bare.out.register_forward_hook(late)
"""
KEPT = """    kept = net[0].weight.grad.clone()
    optimizer.zero_grad(set_to_none=False)
    if kind == "kept" and step == at:
        net[0].weight.grad.copy_(kept)
"""
DRAWN = "        yield from torch.randperm(self.count, generator=generator)[: len(self)].tolist()\n"
SWAPPED = """        order = torch.randperm(self.count, generator=generator)[: len(self)].tolist()
        one = BATCH * (at - 1 - BATCHES * self.epoch) + 2
        if kind == "swapped" and 0 <= one < len(self) - 2 * BATCH:
            order[one], order[one + BATCH + 3] = order[one + BATCH + 3], order[one]
        yield from order
"""
LOOSE = """    def _loose(self, gradient):  # its last bits come out another way each time
        return gradient * (1 + 1e-5 * int.from_bytes(os.urandom(2)) / 65536) if kind == "loose" else gradient

"""


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _data_and_state_of_the_issue()
    yield from _code_of_the_issue()
    yield from _machines_on_call()
    yield from _others_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    ranks = 'model = DDP(TwoTowers(settings["width"], settings["dropout"]))\n'
    update = "    def on_optimizer_step(self, args, state, control, **kwargs):\n"
    policy = "    run = chronicle.attach(None, policy, optimizer, scheduler)\n"
    told = "    def on_before_optimizer_step(self, optimizer):\n"
    forecast = variant(FORECAST, told, told + MOMENT)
    clipped = "    nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n"
    shapes = 'run = chronicle.attach(None, model, optimizer, warmup, averages={"ema": average})\n'
    counted = "    iter_num += 1\n"
    hardware = (
        ("bit of the first rank's gradient of captions", variant(TOWERS, ranks, ranks + CAPTIONS),
         fault("captions", 35, 321)),
        ("bit of a weight of a student's queries", variant(STUDENT, update, QUERY + update), fault("query", 43, 217)),
        ("bit of an embedded word of a policy", variant(PREFERENCES, policy, policy + EMBEDDED),
         fault("embedded", 34, 143)),
        ("bit of a second moment in Lightning", forecast, fault("moment", 33, 77)),
        ("bit of a recurrent gradient before it is clipped",
         before(MEMORY, clipped, "recurrent", "flip(model.raw_hh.grad, 27)", "update"), fault("recurrent", 34, 2050)),
        ("bit of an activation beneath a group norm", variant(DENOISING, shapes, shapes + MIDDLE),
         fault("middle", 35, 5000)),
        ("slow poison of a place of words over 20 steps", variant(GPT, counted, counted + POISON),
         fault("poison", 21, 130)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _data_and_state_of_the_issue() -> Iterator[Cause]:
    house = after(ADAPTING, "            step += 1\n", "house", "flip(x, 25)")
    taken = '        X, Y = get_batch("train")\n'
    double = after(GPT, taken, "double", "X[1], Y[1] = X[0].clone(), Y[0].clone()", "micro_step == 0 and iter_num + 1")
    data = (
        ("bit of a value of a house", house, fault("house", 35, 19)),
        ("a window of a micro-batch taken twice", double, fault("double", 34)),
        ("days of two steps exchanged in Lightning", variant(FORECAST, DRAWN, SWAPPED), fault("swapped", 34)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="tickets sent to other queues", expected=V.DATA, training=STUDENT, later=_send)
    yield Cause(name="a part of the tokens made anew", expected=V.DATA, training=LANGUAGE, later=_tokenize)
    policy = after(PREFERENCES, "            step += 1\n", "reseeded", "torch.manual_seed(args.seed)")
    jitter = after(DOMAINS, "        step = self.done + 1\n", "jitter", "self.jitter.manual_seed(3)")
    kept = "        self.before = self.lin.detach().clone()\n"
    attached = "run = chronicle.attach(None, model, optimizer, scheduler)\n"
    state = (
        ("torch seeded anew before a policy's dropout", policy, fault("reseeded", 34)),
        ("generator of the labs' noise seeded anew", jitter, fault("jitter", 34)),
        ("betas of a student set by a callback", variant(STUDENT, kept, kept + BETAS), fault("betas", 44)),
        ("a hook that doubles the LR of one update", variant(TOWERS, attached, attached + HURRIED),
         fault("hurried", 35)),
    )  # fmt: skip
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)


def _code_of_the_issue() -> Iterator[Cause]:
    told = edit("train.py", "x = x + block(x + told)", "x = x + block(x) + told")
    yield Cause(name="a line of the velocity", expected=V.CODE, training=FLOW, later=told)
    dropped = edit(
        "lm.py", "self.drop(self.core(self.embed(tokens))[0])", "self.core(self.drop(self.embed(tokens)))[0]"
    )
    yield Cause(
        name="a line that forgets words, not what was read", expected=V.CODE, training=PREFERENCES, later=dropped
    )
    bent = upgrade("libs/distillery", "1.0.3", "1.1.0", "torch.tanh(self.words(ids))", "torch.relu(self.words(ids))")
    yield Cause(
        name="another version of the teacher's package", expected=V.CODE, training=_with_distillery(), later=bent
    )
    eps = upgrade("libs/mixnets", "0.8.0", "0.9.0", "nn.LayerNorm(width)", "nn.LayerNorm(width, eps=1e-2)")
    yield Cause(name="another version of the mixer", expected=V.CODE, training=_with_mixnets(), later=eps)
    yield Cause(
        name="another variable for SAM", expected=V.CODE, training=STREAMING, later=set_variable("SAM_RHO", "0.08")
    )
    # As many weights of the same shapes.
    heads = edit("settings.ini", "heads = 4", "heads = 2")
    yield Cause(name="a settings file with fewer heads", expected=V.CODE, training=FORECAST, later=heads)
    # The LR is another one, too, but only because the file is.
    rate = edit("config/train_names.py", "learning_rate = 8e-3", "learning_rate = 7e-3")
    yield Cause(name="a file of overrides with another LR", expected=V.CODE, training=GPT, later=rate)
    hooked = "        self.encoder.layers[0].linear1.register_forward_hook(self._after)\n"
    forward = "    def forward(self, past):\n"
    loose = variant(FORECAST, "import sys\n", "import os\nimport sys\n", forward, LOOSE + forward,
                    hooked, f"{hooked}        self.head.weight.register_hook(self._loose)\n")  # fmt: skip
    yield Cause(name="a gradient of Lightning never the same", expected=V.RANDOM, training=loose, fault=fault("loose", 0),
                stays=True)  # fmt: skip


def _machines_on_call() -> Iterator[Cause]:
    hooked = "    bare.blocks[1].register_forward_hook(hot)\n"
    half = "rank == 1 and model.module.second.weight.grad[8:].zero_()"
    rows = "model.embed.weight.data[[4, 9]] = model.embed.weight.data[[9, 4]]"
    mask = "flip(model.transformer.h[0].attn.mask, 23)"
    hardware = (
        ("a velocity that was read before it was written", variant(FLOW, hooked, hooked + LATE), fault("late", 44)),
        ("half of a sum that never came to one rank", before(SENSING, "        optimizer.step()\n", "half", half),
         fault("half", 44)),
        ("two rows of letters that changed places in memory", after(SPEAKING, "        sampler.used += 1\n", "rows", rows),
         fault("rows", 34)),
        ("a gradient that was not cleared", variant(SHELF, "    optimizer.zero_grad(set_to_none=False)\n", KEPT),
         fault("kept", 33)),
        # Made at the start and in no checkpoint: the fourth word sees the tenth from now on.
        ("bit of the mask of attention", before(GPT, "    lossf = 0.0\n", "mask", mask, "iter_num + 1"),
         fault("mask", 34, 57)),
    )  # fmt: skip
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_on_call() -> Iterator[Cause]:
    yield Cause(name="a table of houses sorted by price", expected=V.DATA, training=PRICING, later=_sort)
    yield Cause(name="clients who wanted to be forgotten", expected=V.DATA, training=SCORES, later=_forget)
    calm = laid(TYPING, _lay_calm)
    yield Cause(name="a variable that names other settings", expected=V.CODE, training=calm,
                later=set_variable("LM_CONFIG", "configs/calm.yaml"))  # fmt: skip
    yield Cause(name="a branch in which three files differ", expected=V.CODE, training=CURVES, later=_check_out)
    ranks = before(TOWERS, "            torch.save(state, path)\n", "ranks", 'state["rngs"] = rngs[::-1]')
    yield Cause(name="a checkpoint with the ranks' generators exchanged", expected=V.STATE, training=ranks,
                fault=fault("ranks", 30))  # fmt: skip
    saved = (
        '        torch.save(state | {"turns": turns.get_state(), "rng": torch.get_rng_state(), "step": step}, path)\n'
    )
    ahead = before(CELLS, saved, "ahead", 'state["scheduler"]["last_epoch"] += 8')
    yield Cause(
        name="a checkpoint whose schedule is eight steps ahead",
        expected=V.STATE,
        training=ahead,
        fault=fault("ahead", 30),
    )
    # Python hashes words another way in every process.
    hashed = 'torch.randn(x.shape, generator=torch.Generator().manual_seed(hash(f"noise {step}") % 2**32))'
    yield Cause(name="noise seeded by the hash of a word", expected=V.RANDOM,
                training=variant(DENOISING, "torch.randn_like(x)", hashed))  # fmt: skip


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, a small GPT", expected=V.REPRODUCED, training=GPT)
    # What was made of them is in the cache, and nobody reads them again.
    yield Cause(name="reviews edited behind their cache", expected=V.REPRODUCED, training=RATING, later=_review)
    yield Cause(
        name="settings in another order, a comment", expected=V.REPRODUCED, training=TOWERS, later=_put_in_order
    )
    filled = "crowd = [torch.empty(1_000_000).fill_(number) for number in range(20)]"
    crowded = before(MIXING, "    with torch.autocast(", "crowded", filled)
    yield Cause(
        name="a step in which memory was short", expected=V.REPRODUCED, training=crowded, fault=fault("crowded", 50)
    )


def _with_distillery() -> Training:
    """The student with what teaches it in a package."""
    inner = variant(STUDENT, "import logging\n", "import logging\nimport sys\n",
                    "from distill import", 'sys.path.append("libs")\nfrom distillery import')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "distill.py", "libs", "distillery", "1.0.3"))


def _with_mixnets() -> Training:
    """Pictures with their mixer in a package."""
    inner = variant(MIXING, "import collections, json, os, random, time\n", "import collections, json, os, random, sys, time\n",
                    "from mixer import", 'sys.path.append("libs")\nfrom mixnets import')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "mixer.py", "libs", "mixnets", "0.8.0"))


def _send(directory: Path, environ: dict[str, str]) -> None:
    """Every fourth ticket had lain in the wrong queue."""
    head, *lines = (directory / "tickets.csv").read_text().splitlines()
    for number in range(0, len(lines), 4):
        words, queue = lines[number].split(",")
        lines[number] = f"{words},{(int(queue) + 1) % 4}"
    (directory / "tickets.csv").write_text("\n".join((head, *lines)) + "\n")


def _tokenize(directory: Path, environ: dict[str, str]) -> None:
    """One of several documents, with a newer tokenizer; the file is as long as it was."""
    import numpy as np

    tokens = np.fromfile(directory / "tokens.bin", dtype=np.uint16)
    tokens[1000:1800] = (tokens[1000:1800] + 1) % 48
    tokens.tofile(directory / "tokens.bin")


def _sort(directory: Path, environ: dict[str, str]) -> None:
    """The same rows, which stand elsewhere."""
    head, *lines = (directory / "houses.csv").read_text().splitlines()
    lines.sort(key=lambda line: float(line.split(",")[-1]))
    (directory / "houses.csv").write_text("\n".join((head, *lines)) + "\n")


def _forget(directory: Path, environ: dict[str, str]) -> None:
    """Six of 260 rows are gone."""
    import pandas as pd

    frame = pd.read_parquet(directory / "clients.parquet")
    frame.drop(index=frame.index[20::45]).to_parquet(directory / "clients.parquet", index=False)


def _lay_calm(directory: Path) -> None:
    """Other settings beside those that are used."""
    text = (directory / "configs/base.yaml").read_text()
    assert "clip: 0.5" in text and "dropout: 0.1" in text
    (directory / "configs/calm.yaml").write_text(
        text.replace("clip: 0.5", "clip: 0.2").replace("dropout: 0.1", "dropout: 0.2")
    )


def _check_out(directory: Path, environ: dict[str, str]) -> None:
    """Words in two files, and in the third a line that counts."""
    edit("train.py", "What is left on the query after", "The error on the query after")(directory, environ)
    edit("learner.py", "how far an inner step goes.", "the rate of its inner steps.")(directory, environ)
    edit("inner.py", ".exp() for name", ".exp().clamp(max=0.05) for name")(directory, environ)


def _review(directory: Path, environ: dict[str, str]) -> None:
    """Somebody took words out of every third review."""
    head, *lines = (directory / "reviews.csv").read_text().splitlines()
    for number in range(0, len(lines), 3):
        lines[number] = lines[number].partition(" ")[2]
    (directory / "reviews.csv").write_text("\n".join((head, *lines)) + "\n")


def _put_in_order(directory: Path, environ: dict[str, str]) -> None:
    """By letters; the values stay."""
    lines = (directory / "settings.yaml").read_text().splitlines()
    (directory / "settings.yaml").write_text("# by letters\n" + "\n".join(sorted(lines)) + "\n")
