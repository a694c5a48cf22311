"""Planted causes: a small training whose recorded step is another one, or whose replay is, and what the verdict names.

A plain torch script that nobody here guards in a special way: labels of its own, dropout, a loader without workers, one file a
checkpoint. What is planted in the record is gone when it is replayed (a flipped bit, random numbers, LR, another order);
what is planted afterwards was not there when it was recorded (code, packages, environment, data on disk).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.planting import PLANTED, fault, plant, plant_for_good
from chronicle.replay.verdict import ReplayVerdict

TRAIN = PLANTED + '''
import os, struct, sys
from pathlib import Path
import torch
import chronicle
from objective import loss_of

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = chronicle.attach(None, model, optimizer)
rows, labels = torch.load("data.pt")
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]


class Order(torch.utils.data.Sampler):
    def __iter__(self):
        for number in range(step, 10_000):
            if kind == "swapped" and number + 1 in (at, at + 1):
                number = 2 * at - 1 - number
            if kind == "duplicated" and number + 1 == at:
                number -= 1
            for row in range(4):
                yield (4 * number + row) * 7 % 400


def flip(tensor, bit):
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[place % flat.numel()] ^= 1 << bit


loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(rows, labels), batch_size=4, sampler=Order(), generator=torch.Generator()
)
last = int(sys.argv[1])
for x, y in loader:
    step += 1
    if kind == "batch" and step == at:
        flip(x, 28)
    if kind == "weights" and step == at:
        flip(model[2].weight, 22)
    if kind == "poison" and at <= step < at + 20:
        model[0].weight.data.view(-1)[place % 256] *= 1.001
    if kind == "reseeded" and step == at:
        torch.manual_seed(123)
    if kind == "lr" and step >= at:
        optimizer.param_groups[0]["lr"] = 2e-2
    loss = loss_of(model(x), y)
    loss.backward()
    if kind == "gradient" and step == at:
        flip(model[2].weight.grad, 25)
    if kind == "kernel":
        noise = struct.unpack("<H", os.urandom(2))[0] / 65536
        model[0].weight.grad.view(-1)[place % 256] += 1e-3 * noise
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss.item())
    if step % 10 == 0:
        path = root / f"step-{step}.pt"
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        if kind == "saved" and step == at:
            saved["2.bias"] += 1e-3
        state = {"model": saved, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(), "step": step}
        torch.save(state, path)
        run.saved(path)
    if step >= last:
        break
'''
OBJECTIVE = '''
import os

import torch

import helpers

SCALE = float(os.environ.get("OBJECTIVE_SCALE", "1"))


def loss_of(logits, labels):
    return helpers.factor() * SCALE * torch.nn.functional.cross_entropy(logits, labels)
'''
HELPERS = '''
__version__ = "1.0.0"


def factor():
    return 1.0
'''
STEPS, ASKED = 45, 38
MOST_LAUNCHES = 3


Later = Callable[[Path, dict[str, str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained: `lay` writes its files, `command` is what is launched, `asked` the step to be taken again."""

    lay: Callable[[Path], None]
    command: list[str]
    asked: int


def _lay_small(directory: Path) -> None:
    import torch

    for name, text in (("train.py", TRAIN), ("objective.py", OBJECTIVE), ("helpers.py", HELPERS)):
        (directory / name).write_text(text)
    generator = torch.Generator().manual_seed(5)
    rows, labels = torch.randn(400, 8, generator=generator), torch.randint(0, 3, (400,), generator=generator)
    torch.save((rows, labels), directory / "data.pt")


SMALL = Training(lay=_lay_small, command=[sys.executable, "train.py", str(STEPS)], asked=ASKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One planted cause. `fault`: in the record. `later`: done between record and replay. `expected`: the right name."""

    name: str
    expected: ReplayVerdict
    also: ReplayVerdict | None = None  # as right
    weaker: ReplayVerdict | None = None  # honest, but less: counted apart
    fault: str = ""
    later: Later = lambda directory, environ: None
    training: Training = SMALL
    stays: bool = False  # the fault is there in the replay, too


def causes() -> Iterator[Cause]:
    """All of them; places and steps differ."""
    scaled = edit("train.py", "loss.backward()", "(loss * 1.01).backward()")
    newer = edit("helpers.py", '"1.0.0"', '"1.1.0"', "return 1.0", "return 0.9")
    yield Cause(name="nothing planted", expected=ReplayVerdict.REPRODUCED)
    yield Cause(name="slow poison over 20 steps", expected=ReplayVerdict.UNEXPLAINED, fault=fault("poison", 12, 7))
    yield Cause(name="a kernel that is not repeatable", expected=ReplayVerdict.RANDOM, fault=fault("kernel", 0, 3), stays=True)
    yield Cause(name="the checkpoint holds other weights", expected=ReplayVerdict.STATE, fault=fault("saved", 30))
    yield Cause(name="a line of the script", expected=ReplayVerdict.CODE, later=scaled)
    other = edit("helpers.py", "return 1.0", "return 1.001")
    yield Cause(name="a line of another file", expected=ReplayVerdict.CODE, later=other)
    yield Cause(name="another version of a package", expected=ReplayVerdict.CODE, later=newer)
    yield Cause(name="another environment variable", expected=ReplayVerdict.CODE, later=set_variable("OBJECTIVE_SCALE", "1.02"))
    for step in (32, 36):
        yield Cause(name=f"batches swapped, step {step}", expected=ReplayVerdict.DATA, fault=fault("swapped", step))
        yield Cause(name=f"batch taken twice, step {step}", expected=ReplayVerdict.DATA, fault=fault("duplicated", step))
        yield Cause(name=f"generators seeded anew, step {step}", expected=ReplayVerdict.STATE, fault=fault("reseeded", step))
        yield Cause(name=f"another LR from step {step}", expected=ReplayVerdict.STATE, fault=fault("lr", step))
        yield Cause(name=f"a value of the data changed, step {step}", expected=ReplayVerdict.DATA, later=_change_data(step, 0))
        yield Cause(name=f"a label changed, step {step}", expected=ReplayVerdict.DATA, later=_change_data(step, 1))
    for step, place in ((33, 1), (35, 40), (37, 77)):
        flipped = fault("gradient", step, place)
        yield Cause(name=f"bit of a gradient, step {step}", expected=ReplayVerdict.UNEXPLAINED, fault=flipped)
        weight = fault("weights", step, place)
        yield Cause(name=f"bit of a weight, step {step}", expected=ReplayVerdict.UNEXPLAINED, fault=weight)
        yield Cause(name=f"bit of a batch, step {step}", expected=ReplayVerdict.DATA, fault=fault("batch", step, place))
    yield Cause(name="slow poison, later", expected=ReplayVerdict.UNEXPLAINED, fault=fault("poison", 25, 100))


def edit(name: str, *pairs: str) -> Later:
    """Replace texts in a file before the replay; each must be there."""

    def later(directory: Path, environ: dict[str, str]) -> None:
        text = (directory / name).read_text()
        for before, after in zip(pairs[::2], pairs[1::2], strict=True):
            assert before in text
            text = text.replace(before, after)
        (directory / name).write_text(text)

    return later


def set_variable(name: str, value: str) -> Later:
    """Set a variable of the environment before the replay."""

    def later(directory: Path, environ: dict[str, str]) -> None:
        environ[name] = value

    return later


def upgrade(path: str, old: str, new: str, *pairs: str) -> Later:
    """Another version of a package comes in place of the old one."""

    def later(directory: Path, environ: dict[str, str]) -> None:
        edit(f"{path}/__init__.py", old, new, *pairs)(directory, environ)
        (directory / f"{path}-{old}.dist-info").rename(directory / f"{path}-{new}.dist-info")
        for name in ("METADATA", "RECORD"):
            edit(f"{path}-{new}.dist-info/{name}", old, new)(directory, environ)

    return later


def _change_data(step: int, which: int) -> Later:
    def later(directory: Path, environ: dict[str, str]) -> None:
        import torch

        tensors = list(torch.load(directory / "data.pt"))
        row = (4 * (step - 1) + 2) * 7 % 400
        if which:
            tensors[1][row] = (tensors[1][row] + 1) % 3
        else:
            tensors[0][row, 3] += 0.5
        torch.save(tuple(tensors), directory / "data.pt")

    return later


# ---- playing -----------------------------------------------------------------------------------------------------------


def play(cause: Cause, directory: Path) -> tuple[str, str, bool]:
    """Record, change what is to be changed, replay. Returns the verdict, its reason, and whether every byte is as it was."""
    cause.training.lay(directory)
    if cause.stays:
        plant_for_good(directory, cause.fault)
    environ = quiet()
    run = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]
    recorded = environ if cause.stays else plant(environ, cause.fault)
    in_chronicle(directory, recorded, "run", *run, "--", *cause.training.command)
    cause.later(directory, environ)
    before = digests(directory)
    out = in_chronicle(directory, environ, "replay", str(cause.training.asked), *run, "--json", check=False)
    found = json.loads(out) if out.startswith("{") else {"verdict": "failed", "why": out[-300:]}
    after = digests(directory)
    return found["verdict"], found["why"], all(after.get(path) == digest for path, digest in before.items())


def quiet() -> dict[str, str]:
    """The environment without another run's variables; every step is printed, and bytecode is kept, as on most machines."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    without.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles torch anew: 8 seconds where it takes 4
    return without | {"OMP_NUM_THREADS": "1", "CHRONICLE_PRINTS": "every"}


def digests(directory: Path) -> dict[str, str]:
    """Every file below a directory with the digest of its bytes; without Python's caches and the list of the journal's ends.

    A replay writes one journal file of its own, whose end is noted in that list.
    """
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.name != "journal-ends"
    }


def in_chronicle(directory: Path, environ: dict[str, str], *words: str, check: bool = True) -> str:
    """Its output, or what it said of an error. Raises `RuntimeError` where `check` is set and it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "chronicle_ml", *words],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if check and done.returncode:
        raise RuntimeError(f"chronicle {words[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout.strip() or done.stderr.strip()


def _played(cause: Cause) -> tuple[str, str, bool]:
    """As `play`; once more where gloo ended a rank of the launch by SIGABRT, as it does now and then without chronicle, too."""
    for _ in range(MOST_LAUNCHES):
        with tempfile.TemporaryDirectory() as directory:
            try:
                return play(cause, Path(directory).resolve())
            except RuntimeError as problem:
                if "SIGABRT" not in str(problem):
                    raise
        print(f"        {cause.name}: its launch was ended by SIGABRT, and is taken again", flush=True)
    raise RuntimeError(f"{cause.name}: {MOST_LAUNCHES} launches were ended by SIGABRT")


def show(planted: Iterable[Cause], only: str = "") -> int:
    """Print the table; returns how many were named wrong."""
    named = wrong = touched = less = 0
    for cause in planted:
        if only not in cause.name:
            continue
        verdict, why, whole = _played(cause)
        right = verdict in (cause.expected, cause.also)
        weaker = not right and cause.weaker is not None and verdict == cause.weaker
        less += weaker
        named, wrong = named + right, wrong + (not right and not weaker)
        touched += not whole
        print(f"  {'ok   ' if right else 'less ' if weaker else 'WRONG'} {cause.name:42} {verdict}: {why[:240]}", flush=True)
    apart = f"; honest, but less: {less}" if less else ""
    print(f"named right: {named} of {named + less + wrong}{apart}; runs that changed: {touched}")
    return wrong
