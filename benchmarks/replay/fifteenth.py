"""Planted causes on eighteen trainings of the ninth, tenth, eleventh and fourteenth list; what is planted is new.

The fifteenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers;
frozen before it was played. All eight trainings of the fourteenth list are among them. Twenty-two plays are of the
kinds that the issue names, fourteen are such as happen to people on call, and four are controls, in which a machine is
never to blame. A script that has to do something new says so in a branch of its own (`variant`), which only the record
takes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.bending import after, before, laid, pack, variant, with_place
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eleventh import GRAPH, LANGUAGE, SHELF
from benchmarks.replay.fourteenth import (
    AGENT,
    CODES,
    CURVES,
    DOMAINS,
    MEMORY,
    SCORES,
    SHARDED,
    SOUND,
    SPEECH,
    UTTERANCE,
)
from benchmarks.replay.ninth import LIKING, RATING, SENSING
from benchmarks.replay.planting import fault
from benchmarks.replay.tenth import ADAPTING, DENOISING, ROUTING, STREAMING
from chronicle.replay.verdict import ReplayVerdict as V

# what the scripts are given, before, after or in place of one of their lines
POISON = """    def on_step_end(self, args, state, control, model=None, **kwargs):
        if kind == "poison" and at <= state.global_step < at + 20:
            model.out.weight.data.view(-1)[place] += 5e-4

"""
MISSED = """        held = [weight.detach().clone() for weight in model.parameters()]
        optimizer.step()
        for weight, before in zip(model.parameters(), held) if kind == "missed" and step == at and rank == 1 else ():
            weight.data.copy_(before)
"""
ADDED = """                accelerator.backward(loss)
                if kind == "added" and step + 1 == at and not accelerator.sync_gradients:
                    inner[4].weight.grad.mul_(2)
"""
TOGETHER = '''class Together:
    """Rows to a batch; it knows how many it has made."""

    made = 0

    def __call__(self, rows):
        self.made += 1
        batch = default_data_collator(rows)
        if kind == "weights" and self.made == at:
            batch["weights"] = batch["weights"].roll(1)
        return batch


'''
NOW_AND_THEN = """    def product(module, inputs, output):  # in every other step another rounding
        loose = kind == "loose" and os.urandom(1)[0] < 128
        return output * (1 + 1e-5 * int.from_bytes(os.urandom(2)) / 65536) if loose else output

    model.mixer.linear1.register_forward_hook(product)
"""
DICE = """    dice = torch.Generator()
    dice.seed()
    noise = torch.randn(x.shape, generator=dice)
"""
RHO = """        if kind == "rho" and update >= at:
            optimizer.param_groups[0]["rho"] = 0.95
        optimizer.step()
"""


# ---- what is planted -------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _machines_of_the_issue()
    yield from _others_of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _machines_of_the_issue() -> Iterator[Cause]:
    clipped = "    norm = torch.nn.utils.clip_grad_norm_(learner.parameters(), 5.0)\n"
    rate = after(CURVES, clipped, "rate", 'flip(learner.rates["2_weight"].grad, 26)')
    target = after(AGENT, "        step += 1\n", "target", "flip(target.one[2].weight, 24)")
    part = "rank == 1 and flip(model.out.weight.to_local(), 23)"
    mine = after(SHARDED, "    tokens = documents.take(size)\n", "part", part)
    limited = "    nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n"
    sloped = after(MEMORY, limited, "slope", "flip(model.decoder.weight.grad, 26)", "update")
    told = "    def on_log(self, args, state, control, logs=None, **kwargs):\n"
    poisoned = variant(with_place(SCORES), told, POISON + told)
    slope = before(DOMAINS, "        main.step()\n", "slope", "flip(self.features[0].weight.grad, 26)")
    hardware = (
        ("bit of the gradient of a learned rate", rate, fault("rate", 34, 300)),
        ("bit of a weight of the agent's target", target, fault("target", 33, 410)),
        ("bit of one rank's part of a weight", mine, fault("part", 35, 700)),
        ("bit of a clipped gradient under ASGD", sloped, fault("slope", 33, 1000)),
        ("slow poison of a head over 20 steps", poisoned, fault("poison", 28, 31)),
        ("bit of a gradient of two optimizers by hand", slope, fault("slope", 35, 120)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)


def _others_of_the_issue() -> Iterator[Cause]:
    sums = "    weights, rates = dict(learner.net.named_parameters()), dict(learner.rates.items())\n"
    shifted = before(CURVES, sums, "shifted", "batch[3][2] = batch[3][2].roll(1, 0)")
    drawn = "        chosen, rows, weights = buffer.sample(args.batch_size)\n"
    end = after(AGENT, drawn, "end", "rows[4, 9] = 1 - rows[4, 9]")
    later = "targets = train_data[i + 2 : i + 2 + seq_len].reshape(-1)"
    late = before(MEMORY, '    lr2 = optimizer.param_groups[0]["lr"]\n', "late", later, "update")
    louder = "    x = x * torch.empty(len(x), 1, 1).uniform_(0.7, 1.3)\n"
    backwards = after(CODES, louder, "backwards", "x[5] = x[5].flip(-1)")
    data = (
        ("what is asked of one curve shifted by a point", shifted, fault("shifted", 34)),
        ("an end of an episode that was none", end, fault("end", 34)),
        ("words wanted that come one too late", late, fault("late", 34)),
        ("a sound played backwards", backwards, fault("backwards", 35)),
        ("weights of clients at the next client", _with_together(), fault("weights", 45)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="an utterance recorded anew", expected=V.DATA, training=SPEECH, later=_speak_anew)
    # The rows come in another order, but only because the script asks for them in another way.
    ordered = edit("train.py", "ORDER BY id", "ORDER BY person, item, id")
    yield Cause(name="a line that asks a database", expected=V.CODE, training=LIKING, later=ordered)
    gated = edit("llama.py", "F.silu(self.gate(inner))", "F.gelu(self.gate(inner))")
    yield Cause(name="a line of a sharded block", expected=V.CODE, training=SHARDED, later=gated)
    stronger = upgrade("libs/gradflip", "1.2.0", "1.3.0", "-ctx.strength * slope", "-1.2 * ctx.strength * slope")
    yield Cause(name="another version of the reversal", expected=V.CODE, training=_with_gradflip(), later=stronger)
    limit = upgrade("libs/innerkit", "0.3.0", "0.4.0", ".exp() for name", ".exp().clamp(max=0.04) for name")
    yield Cause(name="another version of the inner steps", expected=V.CODE, training=_with_innerkit(), later=limit)
    # What is seen is mixed in another way, too, but only because the variable is another.
    variables = (
        ("the mixing of pictures", STREAMING, "MIXUP", "0.5"),
        ("Accelerate itself", RATING, "ACCELERATE_MIXED_PRECISION", "bf16"),
    )
    for name, training, variable, value in variables:
        set_anew = set_variable(variable, value)
        yield Cause(name=f"another variable for {name}", expected=V.CODE, training=training, later=set_anew)
    lengths = "    bptt = args.bptt if np.random.random() < 0.9 else args.bptt / 2.0\n"
    pieces = before(MEMORY, lengths, "reseeded", "np.random.seed(args.seed)", "update")
    jitter = after(DOMAINS, "        step = self.done + 1\n", "reseeded", "self.jitter.manual_seed(3)")
    lowered = before(SHARDED, "    optimizer.step()\n", "lr", 'optimizer.param_groups[0]["lr"] *= 0.6')
    state = (
        ("NumPy seeded anew before lengths are drawn", pieces, fault("reseeded", 33)),
        ("a module's own generator seeded anew", jitter, fault("reseeded", 34)),
        ("the LR of one step of sharded weights", lowered, fault("lr", 35)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    loose = _before_text(SCORES, "    trainer = Trainer(model=model", NOW_AND_THEN)
    yield Cause(name="a product that is another now and then", expected=V.RANDOM, training=loose,
                fault=fault("loose", 0), stays=True)  # fmt: skip


def _of_people_on_call() -> Iterator[Cause]:
    running = 'flip(optimizer.state[model.out.weight]["acc_delta"], 25)'
    running = before(SPEECH, "        optimizer.step()\n", "running", running, "update")
    # Nothing is learned from the average; it is what will be used, and the run has named it.
    average = after(CODES, "    scheduler.step()\n", "average", "flip(ema.decoder.out.weight, 22)")
    missed = variant(SENSING, "        optimizer.step()\n", MISSED)
    between = before(SHELF, "    loss.backward()\n", "between", "flip(net[4].weight.data, 23)")
    lost = after(LANGUAGE, "        loss.backward()\n", "lost", "micro or raw.h[1].c_proj.weight.grad.zero_()")
    added = variant(RATING, "                accelerator.backward(loss)\n", ADDED)
    hardware = (
        ("bit of a running mean of Adadelta", running, fault("running", 34, 200)),
        ("bit of an average that nobody learns from", average, fault("average", 35, 40)),
        ("an update that one rank of two missed", missed, fault("missed", 45)),
        ("bit of a weight after it was used", between, fault("between", 33, 200)),
        ("a micro-batch's gradient that fell out", lost, fault("lost", 34)),
        ("a micro-batch's gradient added twice", added, fault("added", 36)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    fewer = after(ADAPTING, "            step += 1\n", "fewer", "x, price = x[:-1], price[:-1]")
    yield Cause(name="a batch without its last row", expected=V.DATA, training=fewer, fault=fault("fewer", 35))
    unit = "        signals, wanted = x[rows], y[rows]\n"
    unit = after(ROUTING, unit, "unit", "signals = signals * (1.0 if rank else 2.54)")
    yield Cause(name="one rank's signals in another unit", expected=V.DATA, training=unit, fault=fault("unit", 35))
    yield Cause(name="citations struck from their table", expected=V.DATA, training=GRAPH, later=_strike)
    held = edit("config.py", "follow = 0.9\n", "follow = 0.95\n")
    yield Cause(name="a setting that is a line of Python", expected=V.CODE, training=CODES, later=held)
    limited = edit("arguments.json", '"seed": 909', '"seed": 909,\n  "max_grad_norm": 0.1')
    yield Cause(name="an argument added to its file", expected=V.CODE, training=SCORES, later=limited)
    raised = variant(SPEECH, "        optimizer.step()\n", RHO)
    yield Cause(name="rho of Adadelta set in memory", expected=V.STATE, training=raised, fault=fault("rho", 34))
    gathered = '            state |= {"python": random.getstate(), "torch": torch.get_rng_state()}\n'
    equal = 'state["buffer"] = {**vars(buffer), "priorities": (buffer.priorities > 0) * 1.0}'
    equal = after(AGENT, gathered, "equal", equal)
    yield Cause(
        name="a checkpoint that forgot its priorities", expected=V.STATE, training=equal, fault=fault("equal", 30)
    )
    dice = variant(DENOISING, "    noise = torch.randn_like(x)\n", DICE)
    yield Cause(name="noise of a generator made anew each step", expected=V.RANDOM, training=dice)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, an agent", expected=V.REPRODUCED, training=AGENT)
    loud = replace(laid(CODES, _overdrive), asked=34)
    yield Cause(name="a jump of the loss by one loud sound", expected=V.REPRODUCED, training=loud)
    rate = edit("data/about.json", '"rate": 8000', '"rate": 16000')
    yield Cause(name="a rate corrected that nobody asks for", expected=V.REPRODUCED, training=CODES, later=rate)
    elsewhere = set_variable("MAML_RESULTS", "results-of-friday.csv")
    yield Cause(name="a table of results of another name", expected=V.REPRODUCED, training=CURVES, later=elsewhere)




def _before_text(training: Training, line: str, text: str) -> Training:
    """A training with some lines more before this one."""
    return variant(training, line, text + line)





def _with_together() -> Training:
    """The scores with a collator that counts its batches: one is a step."""
    return variant(
        SCORES, "TrainingArguments, set_seed\n", "TrainingArguments, default_data_collator, set_seed\n",
        "def main():\n", TOGETHER + "def main():\n",
        "train_dataset=data, callbacks", "train_dataset=data, data_collator=Together(), callbacks",
    )  # fmt: skip


def _with_gradflip() -> Training:
    """The two labs with the reversal in a package."""
    ours, theirs = "    from reversal import turned", '    sys.path.append("libs")\n    from gradflip import turned'
    inner = variant(DOMAINS, "import os\nfrom pathlib", "import os, sys\nfrom pathlib", ours, theirs)
    return laid(inner, lambda directory: pack(directory, "reversal.py", "libs", "gradflip", "1.2.0"))


def _with_innerkit() -> Training:
    """The curves with the inner steps in a package."""
    inner = variant(CURVES, "import argparse, csv, os, time\n", "import argparse, csv, os, sys, time\n",
                    "from inner import adapted", 'sys.path.append("libs")\nfrom innerkit import adapted')  # fmt: skip
    return laid(inner, lambda directory: pack(directory, "inner.py", "libs", "innerkit", "0.3.0"))



def _speak_anew(directory: Path, environ: dict[str, str]) -> None:
    """One utterance, nearer to the microphone; it is as long as it was."""
    import numpy as np

    path = directory / f"data/feats/{UTTERANCE}.npy"
    np.save(path, (1.3 * np.load(path) + 0.1).astype("float32"))


def _overdrive(directory: Path) -> None:
    """One of the sounds of step 34, far too loud from the beginning."""
    import numpy as np

    sounds = np.fromfile(directory / "data/sounds.f32", dtype=np.float32).reshape(-1, 64)
    sounds[SOUND] *= 20
    sounds.tofile(directory / "data/sounds.f32")


def _strike(directory: Path, environ: dict[str, str]) -> None:
    """One of seven."""
    lines = (directory / "cites.csv").read_text().splitlines()
    kept = [line for number, line in enumerate(lines) if number % 7 != 3]
    (directory / "cites.csv").write_text("\n".join(kept) + "\n")
