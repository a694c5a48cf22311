"""Replays of scripts that nobody here wrote: recorded healthy, and replayed after a checkpoint and from the beginning.

The scripts are those of `benchmarks.strangers` (originals from clones, patterns in our own words, lots), and a few more
originals with the fewest edits that let them run on a CPU. A healthy launch must be "reproduced", or the verdict must name what
its resume does not restore: never hardware, never an error. Every byte of the run is hashed before and after.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from benchmarks.replay.causes import Later, digests, edit, in_chronicle, quiet, set_variable
from benchmarks.replay.planting import PLANTED, fault, plant
from benchmarks.strangers.offline import assets
from benchmarks.strangers.originals import ATTACH, GUARD, ORIGINALS, Original, glue
from benchmarks.strangers.play import HERE, NEEDS_BERT, OFFLINE
from chronicle.resume.ring import rings_of

__all__ = ["show"]

RUN = ("--run", "strangers", "--logs", "logs")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ON_CPU = (
    (r"^( +)torch.cuda.set_device\(.*\)$", r"\1pass"),
    (r'backend="nccl"', 'backend="gloo"'),
    (r"self.model = model.to\(self.gpu_id\)", "self.model = model"),
    (r"DDP\(self.model, device_ids=\[self.gpu_id\]\)", "DDP(self.model)"),
    (r'loc = f"cuda:\{self.gpu_id\}"', 'loc = "cpu"'),
    (r"source = source.to\(self.gpu_id\)", "pass"),
    (r"targets = targets.to\(self.gpu_id\)", "pass"),
    (r"MyTrainDataset\(2048\)", "MyTrainDataset(160)"),
)
MORE = {
    "pytorch-ddp-torchrun": Original(
        file="pytorch+examples/distributed/ddp-tutorial-series/multigpu_torchrun.py",
        edits=(
            *ON_CPU,
            (
                r"^( +)(trainer = Trainer\(.*\))$",
                r"\1import chronicle; chronicle.attach('strangers', model, optimizer)\n\1\2",
            ),
        ),
        arguments=("6", "2", "--batch_size", "8"),
    ),
    "pytorch-word-lm": Original(
        file="pytorch+examples/word_language_model/main.py",
        prepare=lambda folder: words(folder),
        edits=(
            (
                r"^def get_batch",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n"
                "import chronicle; chronicle.attach('strangers', model, optimizer)\n\ndef get_batch",
            ),
            (r"^( +)optimizer = torch.optim.AdamW\(.*\)$", r"\1pass"),
        ),
        arguments=(
            *("--data", "words", "--epochs", "3", "--use-optimizer", "--lr", "0.01", "--emsize", "16", "--nhid", "16"),
            *("--batch_size", "4", "--bptt", "8"),
        ),
    ),
    "pytorch-mnist": Original(
        file="pytorch+examples/mnist/main.py",
        edits=(
            (
                r"^( +)(scheduler = StepLR\(.*\))$",
                r"\1\2\n\1import chronicle; chronicle.attach('strangers', model, optimizer, scheduler)",
            ),
        ),
        arguments=("--no-accel", "--epochs", "2", "--batch-size", "8", "--log-interval", "5"),
        pictures=True,
    ),
    "pytorch-vae": Original(
        file="pytorch+examples/vae/main.py",
        edits=(
            (r"^from torchvision.utils import save_image$", "save_image = lambda *ignored, **more: None"),
            (r"^(optimizer = optim.Adam.*)$", rf"\1\n{ATTACH})"),
            (r"^( +)data = data.to\(device\)$", r"\1data = data.sigmoid()"),
            (r"test\(epoch\)$", "pass"),
        ),
        arguments=("--no-accel", "--epochs", "2", "--batch-size", "8"),
        pictures=True,
    ),
    "pytorch-time-sequence": Original(
        file="pytorch+examples/time_sequence_prediction/train.py",
        prepare=lambda folder: waves(folder),
        edits=(
            (r"^( +)(optimizer = optim.LBFGS.*)$", r"\1\2\n\1import chronicle; chronicle.attach('strangers', seq, optimizer)"),
            (r"future = 1000", "future = 10"),
            (r"torch.load\('traindata.pt'\)", "torch.load('traindata.pt', weights_only=False)"),
        ),
        arguments=("--steps", "8"),
    ),
    "mingpt-adder": Original(
        file="karpathy+minGPT/projects/adder/adder.py",
        edits=(
            (r"^from mingpt.trainer import Trainer$", "from mingpt.trainer import Trainer\nimport mingpt.model"),
            (
                r"^( +)trainer.run\(\)$",
                r"\1made = mingpt.model.GPT.configure_optimizers\n"
                r"\1def attached(model, config):\n"
                r"\1    import chronicle\n"
                r"\1    optimizer = made(model, config)\n"
                r"\1    chronicle.attach('strangers', model, optimizer)\n"
                r"\1    return optimizer\n"
                r"\1mingpt.model.GPT.configure_optimizers = attached\n"
                r"\1trainer.run()",
            ),
        ),
        arguments=(
            *("--trainer.max_iters=60", "--trainer.num_workers=2", "--trainer.batch_size=8", "--system.work_dir=out"),
            *("--model.model_type=None", "--model.n_layer=2", "--model.n_head=2", "--model.n_embd=16"),
        ),
        environment={"PYTHONPATH": "{clones}/karpathy+minGPT"},
    ),
    "accelerate-accumulation": Original(
        file="huggingface+accelerate/examples/by_feature/gradient_accumulation.py",
        prepare=lambda folder: measured_glue(folder),
        edits=((r"^( +)(metric = evaluate.load)", rf"\1{GUARD}\n\1\2"),),
        arguments=("--cpu", "--gradient_accumulation_steps", "2"),
    ),
    "accelerate-local-sgd": Original(
        file="huggingface+accelerate/examples/by_feature/local_sgd.py",
        prepare=lambda folder: measured_glue(folder),
        edits=((r"^( +)(metric = evaluate.load)", rf"\1{GUARD}\n\1\2"),),
        arguments=("--cpu", "--gradient_accumulation_steps", "1", "--local_sgd_steps", "4"),
    ),
}


def words(folder: Path) -> None:
    """Three small texts for the word language model."""
    (folder / "words").mkdir()
    for name, count in (("train", 60), ("valid", 20), ("test", 20)):
        lines = (" ".join(f"w{(line * 7 + place * place) % 31}" for place in range(9)) for line in range(count))
        (folder / "words" / f"{name}.txt").write_text("\n".join(lines) + "\n")


def waves(folder: Path) -> None:
    """Twelve sines of 60 places, as a NumPy array in torch's file, as the script makes them."""
    places = numpy.arange(60) + numpy.random.default_rng(2).integers(-80, 80, 12)[:, None]
    with (folder / "traindata.pt").open("wb") as file:
        torch.save(numpy.sin(places / 20), file)


def measured_glue(folder: Path) -> None:
    """Sentences, and a measure that measures nothing: `evaluate` is not installed here."""
    glue(folder)
    lines = ("class Measure:", "    def add_batch(self, **more): pass", "    def compute(self): return {}", "")
    (folder / "evaluate.py").write_text("\n".join((*lines, "def load(*names): return Measure()", "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Abroad:
    """One script: `lot` or "" for the list, an original or our own words, and how it is started."""

    name: str
    lot: str = ""
    start: Sequence[str] = ()


SCRIPTS = (
    Abroad(name="nanogpt"),
    Abroad(name="accelerate-checkpointing"),
    Abroad(name="accelerate-complete-nlp"),
    Abroad(name="imagenet"),
    Abroad(name="pytorch-mnist"),
    Abroad(name="pytorch-word-lm"),
    Abroad(name="pytorch-ddp-torchrun", start=TORCHRUN),
    Abroad(name="pytorch-vae"),
    Abroad(name="pytorch-time-sequence"),
    Abroad(name="mingpt-adder"),
    Abroad(name="accelerate-accumulation"),
    Abroad(name="accelerate-local-sgd", start=TORCHRUN),
    Abroad(name="gan-alternating"),
    Abroad(name="scaler-accumulate"),
    Abroad(name="compile-accumulate"),
    Abroad(name="muon-adamw"),
    Abroad(name="hf-compute-loss"),
    Abroad(name="timm-like"),
    Abroad(name="lightning-gan"),
    Abroad(name="fabric-own-trainer"),
    Abroad(name="fabric-litgpt", lot="six"),
    Abroad(name="deepspeed-zero2"),
    Abroad(name="fsdp2"),
    Abroad(name="fsdp2-two-ranks", lot="seven"),
    Abroad(name="lightning-plateau", lot="six"),
    Abroad(name="mingpt"),
    Abroad(name="vae-schedulefree"),
    Abroad(name="peft-lora"),
    Abroad(name="trl-sft"),
    Abroad(name="stream-accelerate"),
    Abroad(name="stream-tokens", lot="six"),
    Abroad(name="ema-webdataset"),
    Abroad(name="word-lm-anneal"),
    Abroad(name="lbfgs"),
    Abroad(name="reinforce"),
)


FAULTS = PLANTED + """
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_steps = {}


def _stepped(optimizer, args, kwargs):
    number = _steps[id(optimizer)] = _steps.get(id(optimizer), 0) + 1
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if number == at and kind in ("gradient", "weights"):
        flipped = held[-1].grad if kind == "gradient" else held[-1].data
        flipped.view(-1).view(torch.int32)[place % flipped.numel()] ^= 1 << 24
    if number == at and kind == "lr":
        optimizer.param_groups[0]["lr"] *= 2


register_optimizer_step_pre_hook(_stepped)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A cause in one script: in the record alone (`fault`), or changed before the replay (`later`)."""

    script: str
    expected: str
    step: int
    lot: str = ""
    fault: str = ""
    edits: Sequence[tuple[str, str]] = ()  # of the script before it is recorded
    later: Later = lambda directory, environ: None


PLANTS = (
    Plant(script="nanogpt", expected="hardware or race", step=9, fault=fault("gradient", 7, 5)),
    Plant(script="scaler-accumulate", expected="hardware or race", step=12, fault=fault("weights", 9, 3)),
    Plant(script="hf-compute-loss", expected="hardware or race", step=35, fault=fault("gradient", 34, 1)),
    Plant(script="fsdp2", expected="state differs", step=14, fault=fault("lr", 12)),
    Plant(
        script="gan-alternating",
        expected="code or packages differ",
        step=15,
        later=edit("train.py", "LeakyReLU(0.2)", "LeakyReLU(0.25)"),
    ),
    Plant(
        script="muon-adamw",
        expected="data differ",
        step=12,
        fault=fault("batch", 8),
        edits=(("manual_seed(step))", "manual_seed(step + (kind == 'batch' and step + 1 == at)))"),),
    ),
    Plant(
        script="timm-like",
        expected="code or packages differ",
        step=20,
        edits=(("lr=0.05", "lr=float(os.environ.get('PEAK', '0.05'))"),),
        later=set_variable("PEAK", "0.06"),
    ),
)


def play_plant(planted: Plant, folder: Path, clones: Path | None) -> str:
    """Record with the cause, or change it before the replay; the verdict in a line."""
    staged = stage(Abroad(name=planted.script, lot=planted.lot), folder, clones)
    if staged is None:
        return "not on this machine"
    command, environ = staged
    text = (folder / "train.py").read_text()
    for before, after in planted.edits:
        assert before in text
        text = text.replace(before, after)
    (folder / "train.py").write_text(FAULTS + text)
    in_chronicle(folder, plant(environ, planted.fault), "run", *RUN, "--", *command)
    planted.later(folder, environ)
    before_all = digests(folder)
    out = in_chronicle(folder, environ, "replay", str(planted.step), *RUN, "--json", check=False)
    found = json.loads(out) if out.startswith("{") else {"verdict": "FAILED", "why": out[-600:]}
    after_all = digests(folder)
    whole = all(after_all.get(path) == digest for path, digest in before_all.items())
    mark = "ok   " if found["verdict"] == planted.expected else "WRONG"
    return f"{mark} {planted.expected}: {found['verdict']}{'' if whole else ' CHANGED'}: {found['why'][:300]}"


def stage(script: Abroad, folder: Path, clones: Path | None) -> tuple[list[str], dict[str, str]] | None:
    """Lay a script with what it reads; its command and variables. None where the original is not on this machine."""
    original = None if script.lot else {**ORIGINALS, **MORE}.get(script.name)
    environ = quiet() | OFFLINE | {"HF_HOME": str(folder / "hub")}
    environ["CHRONICLE_PRINTS"] = "every"
    if original is not None:
        if not original.write(folder, clones):
            return None
        environ |= {name: value.replace("{clones}", str(clones)) for name, value in original.environment.items()}
        if original.pictures:
            environ["PYTHONPATH"] = os.pathsep.join((environ.get("PYTHONPATH", ""), str(HERE / "offline")))
        return [sys.executable, *script.start, "train.py", *original.arguments], environ
    own = HERE / "lots" / script.lot if script.lot else HERE / "rebuilt"
    (folder / "train.py").write_text((own / f"{script.name.replace('-', '_')}.py").read_text())
    if script.lot and script.name.startswith("trl-"):
        assets.write_llama(folder)
        assets.write_chats(folder)
    if script.name in NEEDS_BERT:
        assets.write_bert(folder)
    return [sys.executable, *script.start, "train.py"], environ


def asked_of(folder: Path) -> list[int]:
    """The steps to be taken again: the last of the launch, one in its middle, and one before the first checkpoint."""
    printed = [set(ring.steps()) for ring in rings_of(folder / "logs/strangers/launches/0001").values()]
    common = set.intersection(*printed) if printed else set()
    last = max(common, default=0)
    return sorted({last, last * 5 // 8, 3} & common, reverse=True)


def play(script: Abroad, folder: Path, clones: Path | None, steps: Sequence[int] = ()) -> Iterator[str]:
    """Record and replay; a line for each."""
    staged = stage(script, folder, clones)
    if staged is None:
        yield "not on this machine"
        return
    command, environ = staged
    begun = time.monotonic()
    in_chronicle(folder, environ, "run", *RUN, "--", *command)
    yield f"recorded in {time.monotonic() - begun:.0f} s"
    for step in steps or asked_of(folder):
        before, begun = digests(folder), time.monotonic()
        out = in_chronicle(folder, environ, "replay", str(step), *RUN, "--json", check=False)
        took = time.monotonic() - begun
        found = json.loads(out) if out.startswith("{") else {"verdict": "FAILED", "why": out[-600:]}
        after = digests(folder)
        changed = [path for path, digest in before.items() if after.get(path) != digest]
        touched = f" CHANGED {changed[:3]}" if changed else ""
        start = found.get("start")
        plays = f"step {step} from {start}, {found.get('replays')} plays, {took:.0f} s{touched}"
        yield f"{plays}: {found['verdict']}: {found['why'][:500]}"
        for line in found.get("evidence", ())[:8]:
            yield f"      {line[:260]}"


def show(only: str = "", clones: Path | None = None, keep: Path | None = None, steps: Sequence[int] = ()) -> int:
    """Print the tables; returns how many plants were named wrong, or not played. `only`: names, with commas; `planted`."""
    wrong = 0
    for planted in PLANTS if only in ("", "planted") else ():
        with tempfile.TemporaryDirectory() as directory:
            try:
                line = play_plant(planted, Path(directory).resolve(), clones)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                line = f"BROKEN {str(error)[-300:]}"
        wrong += not line.startswith("ok")
        print(planted.script, line, flush=True)
    for script in SCRIPTS:
        if only and script.name not in only.split(","):
            continue
        with tempfile.TemporaryDirectory() as directory:
            folder = keep / script.name if keep else Path(directory).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            print(script.name, flush=True)
            try:
                for line in play(script, folder, clones, steps):
                    print("   ", line, flush=True)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                print("    BROKEN", str(error)[-700:], flush=True)
    return wrong
