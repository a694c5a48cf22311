"""Planted causes on eight trainings: denoising, pairs, experts, answers, adapters, a GAN, sequences and a stream.

The tenth list, written on 27 November 2026 by someone who had read what the issue asks and not how replay answers; frozen
before it was played. Twenty-four plays are of the kinds that the issue names, twelve are such as happen to people on call, and
four are controls, in which a machine is never to blame. The eight trainings (`tenth_trainings.py`) were seen to resume to the
bit, and every fault and change to alter the weights from its step on and not before, in plain runs without `chronicle run`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.bending import variant
from benchmarks.replay.causes import Cause, Training, edit, set_variable, upgrade
from benchmarks.replay.eighth import TORCHRUN
from benchmarks.replay.planting import fault
from benchmarks.replay.tenth_trainings import (
    lay_adapters,
    lay_answers,
    lay_denoising,
    lay_experts,
    lay_gan,
    lay_pairs,
    lay_sequences,
    lay_stream,
)
from chronicle.replay.verdict import ReplayVerdict as V

PYTHON = [sys.executable, "train.py"]
DENOISING = Training(lay=lay_denoising, command=[*PYTHON, "--steps", "48"], asked=38)
PAIRING = Training(lay=lay_pairs, command=PYTHON, asked=37)
ROUTING = Training(lay=lay_experts, command=[*TORCHRUN, "train.py"], asked=38)
ANSWERING = Training(lay=lay_answers, command=PYTHON, asked=48)
ADAPTING = Training(lay=lay_adapters, command=PYTHON, asked=39)
FORGING = Training(lay=lay_gan, command=["bash", "run.sh", "45"], asked=38)
SPEAKING = Training(lay=lay_sequences, command=PYTHON, asked=38)
STREAMING = Training(lay=lay_stream, command=PYTHON, asked=38)
# rows that are read at the steps 45, 35 and 35
ANSWERED, MEASURED, WILD = 188, 59, 51


# ---- what is planted ------------------------------------------------------------------------------------------------------


def causes() -> Iterator[Cause]:
    """All of them: first those that the issue names, then others, then those where no machine is to blame."""
    yield from _of_the_issue()
    yield from _of_people_on_call()
    yield from _controls()


def _of_the_issue() -> Iterator[Cause]:
    hardware = (
        ("bit of one rank's gradient of the experts", ROUTING, fault("gradient", 35, 1203)),
        ("bit of an adapter's gradient", ADAPTING, fault("gradient", 36, 41)),
        ("bit of the gradient of SAM's second pass", STREAMING, fault("gradient", 34, 517)),
        ("bit of a weight of the critic", FORGING, fault("weight", 34, 333)),
        ("bit of an embedding in HF Trainer", ANSWERING, fault("weight", 44, 290)),
        ("slow poison of an encoder over 20 steps", PAIRING, fault("poison", 25, 700)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    data = (
        ("bit of a batch of shapes", DENOISING, fault("batch", 35, 444)),
        ("bit of one rank's second micro-batch", ROUTING, fault("batch", 36, 31)),
        ("batches by length swapped", SPEAKING, fault("swapped", 33)),
        ("a picture of the step before taken again", STREAMING, fault("duplicated", 35)),
    )
    for name, training, planted in data:
        yield Cause(name=name, expected=V.DATA, training=training, fault=planted)
    yield Cause(name="an answer corrected in its file", expected=V.DATA, training=ANSWERING, later=_correct)
    yield Cause(name="a signal measured anew", expected=V.DATA, training=PAIRING, later=_measure)
    drift = edit("train.py", "learn(apart)\n", "learn(apart + 0.01 * critic(true).square())\n")
    yield Cause(name="a line of the critic's loss", expected=V.CODE, training=FORGING, later=drift)
    softer = edit("speaking.py", "read.shape[-1] ** 0.5", "read.shape[-1] ** 0.25")
    yield Cause(name="a line of the attention", expected=V.CODE, training=SPEAKING, later=softer)
    offset = upgrade("libs/noising", "1.3.0", "1.4.0", "offset=0.008", "offset=0.012")
    yield Cause(name="another version of the noise levels", expected=V.CODE, training=DENOISING, later=offset)
    margin = upgrade("vendored/infonce", "0.9.2", "0.10.0", "MARGIN = 0.0", "MARGIN = 0.02")
    yield Cause(name="another version of the loss of pairs", expected=V.CODE, training=PAIRING, later=margin)
    variables = (("temperature", PAIRING, "PAIR_TEMPERATURE", "0.22"), ("router", ROUTING, "ROUTER_NOISE", "0.4"))
    for name, training, variable, value in variables:
        later = set_variable(variable, value)
        yield Cause(name=f"another variable for the {name}", expected=V.CODE, training=training, later=later)
    state = (
        ("generator of the times seeded anew", DENOISING, fault("reseeded", 34)),
        ("Python's generator seeded anew", SPEAKING, fault("reseeded", 34)),
        ("the LR of one group lowered in memory", ADAPTING, fault("lr", 36)),
        ("a callback that raises the LR", ANSWERING, fault("lr", 45)),
    )
    for name, training, planted in state:
        yield Cause(name=name, expected=V.STATE, training=training, fault=planted)
    chance = (("parts of a gradient in an order of chance", FORGING), ("a mean in an order of chance", STREAMING))
    for name, training in chance:
        yield Cause(name=name, expected=V.RANDOM, training=training, fault=fault("order", 0), stays=True)


def _of_people_on_call() -> Iterator[Cause]:
    hardware = (
        ("a rank that sends its gradient before last", ROUTING, fault("stale", 34)),
        ("a row of the queue that lost its memory", PAIRING, fault("queue", 34, 55)),
        ("bit of an activation in HF Trainer", ANSWERING, fault("activation", 45, 338)),
    )
    for name, training, planted in hardware:
        yield Cause(name=name, expected=V.HARDWARE, training=training, fault=planted)
    yield Cause(name="a worker that gives a word twice", expected=V.DATA, training=SPEAKING, fault=fault("stale", 35))
    yield Cause(name="two shards copied under the wrong names", expected=V.DATA, training=STREAMING, later=_confuse)
    keep = edit("recipe.json", '"keep": 0.95', '"keep": 0.9')
    yield Cause(name="a recipe edited after the run", expected=V.CODE, training=PAIRING, later=keep)
    clip = edit("run.sh", "CRITIC_CLIP=0.3", "CRITIC_CLIP=0.28")
    yield Cause(name="a variable of the launcher edited", expected=V.CODE, training=FORGING, later=clip)
    yield Cause(name="a checkpoint that lost a moment", expected=V.STATE, training=SPEAKING, later=_lose_moment)
    yield Cause(name="a bit of saved weights that rotted", expected=V.STATE, training=ADAPTING, later=_rot)
    # Only the LR is another one from the next step on; the script that is left steps once.
    yield Cause(name="a scheduler stepped twice", expected=V.STATE, training=FORGING, fault=fault("twice", 33))
    rounded = fault("rounded", 0)
    yield Cause(name="gradients rounded by chance", expected=V.RANDOM, training=ROUTING, fault=rounded, stays=True)
    # No two replays agree; that the generator is another than the saved one is as true.
    fresh = variant(FORGING, 'latents.set_state(state["latents"])', "latents.seed()")
    yield Cause(name="latents seeded by the machine at a resume", expected=V.RANDOM, also=V.STATE, training=fresh)


def _controls() -> Iterator[Cause]:
    yield Cause(name="nothing planted, two ranks", expected=V.REPRODUCED, training=ROUTING)
    wild = Training(lay=_lay_wild, command=ADAPTING.command, asked=ADAPTING.asked)
    yield Cause(name="a jump of the loss by one wild price", expected=V.REPRODUCED, training=wild)
    told = edit("train.py", "class Careful(", "# After a talk with Ines: kept for the next run.\nclass Careful(")
    yield Cause(name="a comment in the script", expected=V.REPRODUCED, training=ANSWERING, later=told)
    yield Cause(name="data copied to another disk and back", expected=V.REPRODUCED, training=PAIRING, later=_copy)


def _correct(directory: Path, environ: dict[str, str]) -> None:
    """The answer of a row that ANSWERED reads."""
    import json

    path = directory / "data/answers.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[ANSWERED])
    row["answer"] = str(int(row["answer"]) + 10)
    lines[ANSWERED] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def _measure(directory: Path, environ: dict[str, str]) -> None:
    import numpy as np

    walks = np.load(directory / "walks.npy")
    walks[MEASURED, 6:14] += 0.5
    np.save(directory / "walks.npy", walks)


def _confuse(directory: Path, environ: dict[str, str]) -> None:
    one, two = (directory / f"shards/part-{number:03}.jsonl" for number in (2, 6))
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)


def _lose_moment(directory: Path, environ: dict[str, str]) -> None:
    """Somebody converted the checkpoint, and one of the first moments was not carried over."""
    import torch

    path = directory / "checkpoints/00000030.pth"
    state = torch.load(path, weights_only=False)
    state["optimizer"]["state"][1]["exp_avg"].zero_()
    torch.save(state, path)


def _rot(directory: Path, environ: dict[str, str]) -> None:
    """The highest bit of the mantissa of one value; the file is as long as it was."""
    import json

    path = directory / "checkpoints/adapter-30/model.safetensors"
    held = bytearray(path.read_bytes())
    size = int.from_bytes(held[:8], "little")
    begin, _ = json.loads(held[8 : 8 + size])["layers.1.lora_up"]["data_offsets"]
    held[8 + size + begin + 4 * 57 + 2] ^= 1 << 6
    path.write_bytes(held)


def _lay_wild(directory: Path) -> None:
    lay_adapters(directory)
    lines = (directory / "houses.csv").read_text().splitlines()
    *values, price = lines[WILD + 1].split(",")
    lines[WILD + 1] = ",".join((*values, f"{float(price) * 400:.4f}"))
    (directory / "houses.csv").write_text("\n".join(lines) + "\n")


def _copy(directory: Path, environ: dict[str, str]) -> None:
    """The same bytes, with new times and a new inode."""
    held = (directory / "walks.npy").read_bytes()
    (directory / "walks.npy").unlink()
    (directory / "walks.npy").write_bytes(held)
