"""Planted changes for `chronicle bisect`: whether it names the right one, and in how many launches.

Every play is a recorded run of a plain script and a bisect over real forks of it. The place of the change is drawn: a commit
that changes the arithmetic by a hundredth (judged by the step prints), a value of a variable that doubles the loss, one member
of several that does, a weight that is spoilt at some step (judged by the loss of launches from each checkpoint), and a batch of
huge values (judged by the loss, with more and more of the data skipped). The last two are also played on two ranks.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.replay.causes import HELPERS, SMALL, TRAIN, quiet
from benchmarks.replay.planting import PLANTED, fault, plant

DATA_TRAIN = '''
import itertools
import sys
from pathlib import Path
import torch
import chronicle

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows, labels = torch.load("data.pt")
step = 0


loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=4)
run = chronicle.attach(None, model, optimizer, data=loader)
root = Path("checkpoints")
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
last = int(sys.argv[1])
for x, y in itertools.islice(loader, step, None):
    step += 1
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
    if step % 10 == 0:
        path = root / f"step-{step}.pt"
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save({**parts, "step": step}, path)
        run.saved(path)
    if step >= last:
        break
'''
RANKS_TRAIN = PLANTED + '''
import itertools, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import chronicle

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inner = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
model = torch.nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows, labels = torch.load("data.pt")
own = rows.view(-1, ranks, 4, 8)[:, rank].reshape(-1, 8), labels.view(-1, ranks, 4)[:, rank].reshape(-1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*own), batch_size=4)
run = chronicle.attach(None, model, optimizer, data=loader)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    inner.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
last = int(sys.argv[1])
for x, y in itertools.islice(loader, step, None):
    step += 1
    if kind == "spoilt" and step == at:
        inner[2].bias.data[place % 3] = 1e4
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    run.log(loss=mean.item() / ranks)
    if step % 10 == 0:
        path = root / f"step-{step}.pt"
        if rank == 0:
            parts = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            torch.save({**parts, "step": step}, path)
            run.saved(path)
        dist.barrier()
    if step >= last:
        break
dist.barrier()
dist.destroy_process_group()
'''
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
RUN = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]
GIT = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
SCALED = "OBJECTIVE_SCALE={}"
Play = tuple[list[str], Callable[[str], bool], int]  # words of the bisect, whether an answer is right, number of candidates
Kind = Callable[[Path, random.Random], Play]


def show(plays: int, seed: int, kinds: Sequence[Kind]) -> int:
    """Print one line a play and the sums; returns how many were not found."""
    draw = random.Random(seed)
    found = late = 0
    for number in range(plays):
        kind = kinds[number % len(kinds)]
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name).resolve()
            words, is_right, num = kind(directory, draw)
            done = _chronicle(directory, "bisect", *words[: _dashes(words)], *RUN, "--json", *words[_dashes(words) :])
        told = json.loads(done.stdout) if done.stdout.startswith("{") else {"answer": done.stderr[-200:], "rows": []}
        right, most = is_right(told["answer"]), math.ceil(math.log2(num)) + 2
        found += right
        late += right and len(told["rows"]) > most
        mark = "ok   " if right else "WRONG"
        launches = f"{num:3} candidates, {len(told['rows'])} launches of {most}"
        print(f"  {mark} {kind.__name__[1:]:11} {launches}: {told['answer'][:90]}", flush=True)
    print(f"found: {found} of {plays}; in more than log2 n + 2 launches: {late}")
    return plays - found


def _dashes(words: list[str]) -> int:
    return words.index("--") if "--" in words else len(words)


def _commits(directory: Path, draw: random.Random) -> Play:
    num = draw.randrange(4, 17)
    bad = draw.randrange(1, num)
    _write(directory, 24, run=False)
    (directory / ".gitignore").write_text("logs\ncheckpoints\n*.pt\n__pycache__\n")
    _git(directory, "init", "-q")
    names = []
    for place in range(num):
        text = HELPERS.replace("return 1.0", "return 1.01") if place >= bad else HELPERS
        (directory / "helpers.py").write_text(f"{text}\n\nNUMBER = {place}\n")
        _git(directory, "add", "-A")
        _git(directory, "commit", "-q", "-m", f"change {place}")
        names.append(_git(directory, "rev-parse", "HEAD"))
        if place == 0:
            _record(directory, 24)
    words = ["--commits", f"{names[0]}..HEAD", "--until", "22", "--bad-if", "differs"]
    return words, lambda answer: answer.startswith(names[bad][:12]), num


def _values(directory: Path, draw: random.Random) -> Play:
    num = draw.randrange(4, 13)
    bad = draw.randrange(1, num)
    _write(directory, 24)
    values = [f"{1 + place / 1000:g}" if place < bad else f"{2 + place / 1000:g}" for place in range(num)]
    command = ["--", "env", SCALED, sys.executable, "train.py", "24"]
    words = ["--values", ",".join(values), "--until", "22", "--bad-if", "loss > 1.6", *command]
    return words, lambda answer: answer.startswith(f"with {values[bad - 1]} it goes well, with {values[bad]} "), num


def _among(directory: Path, draw: random.Random) -> Play:
    num = draw.randrange(3, 10)
    bad = f"n{draw.randrange(num)}"
    _write(directory, 24)
    names = [f"n{place}" for place in range(num)]
    inner = f'case ",$1," in *,{bad},*) export OBJECTIVE_SCALE=2;; esac; exec {sys.executable} train.py 24'
    words = ["--among", ",".join(names), "--until", "22", "--bad-if", "loss > 1.6", "--", "sh", "-c", inner, "sh", "{}"]
    return words, lambda answer: answer.startswith(f"{bad} makes it bad"), num


def _steps(directory: Path, draw: random.Random) -> Play:
    num = draw.randrange(4, 13)
    bad = draw.randrange(1, num)
    planted = fault("weights", 10 * bad + 5, draw.randrange(96))
    script = TRAIN.replace("flip(model[2].weight, 22)", "model[2].weight.data.mul_(1e4)")
    _write(directory, 10 * num + 4, script, planted)
    words = ["--steps", f"10..{10 * num}", "--until", str(10 * num + 4), "--bad-if", "loss > 20"]
    right = f"from the checkpoint of step {10 * bad} it goes well, from the checkpoint of step {10 * bad + 10} it does not"
    return words, lambda answer: answer == right, num


def _data(directory: Path, draw: random.Random) -> Play:
    import torch

    bad = draw.randrange(12, 29)
    _write(directory, 34, DATA_TRAIN, run=False)
    rows, labels = torch.load(directory / "data.pt")
    rows[4 * (bad - 1) : 4 * bad] *= 1e5
    torch.save((rows, labels), directory / "data.pt")
    _record(directory, 34)
    first, last = max(12, bad - draw.randrange(1, 4)), min(30, bad + draw.randrange(1, 6))
    words = ["--data", f"{first}..{last}", "--until", str(last + 3), "--bad-if", "loss > 5"]
    right = f"it goes well once the batch of step {bad} is skipped: the cause is in that batch"
    return words, lambda answer: answer == right, last - first + 2


def _ranks_steps(directory: Path, draw: random.Random) -> Play:
    num = draw.randrange(4, 9)
    bad = draw.randrange(1, num)
    _write(directory, 10 * num + 4, RANKS_TRAIN, fault("spoilt", 10 * bad + 5, draw.randrange(96)), ranks=2)
    words = ["--steps", f"10..{10 * num}", "--until", str(10 * num + 4), "--bad-if", "loss > 5"]
    right = f"from the checkpoint of step {10 * bad} it goes well, from the checkpoint of step {10 * bad + 10} it does not"
    return words, lambda answer: answer == right, num


def _ranks_data(directory: Path, draw: random.Random) -> Play:
    """The batch of one of the two ranks is bad."""
    import torch

    bad, rank = draw.randrange(12, 29), draw.randrange(2)
    _write(directory, 34, RANKS_TRAIN, run=False)
    rows, labels = torch.load(directory / "data.pt")
    rows[8 * (bad - 1) + 4 * rank : 8 * (bad - 1) + 4 * rank + 4] *= 1e5
    torch.save((rows, labels), directory / "data.pt")
    _record(directory, 34, ranks=2)
    first, last = max(12, bad - draw.randrange(1, 4)), min(30, bad + draw.randrange(1, 6))
    words = ["--data", f"{first}..{last}", "--until", str(last + 3), "--bad-if", "loss > 5"]
    right = f"it goes well once the batch of step {bad} is skipped: the cause is in that batch"
    return words, lambda answer: answer == right, last - first + 2


KINDS = (_commits, _values, _among, _steps, _data)
RANKS = (_ranks_steps, _ranks_data)


def _write(directory: Path, steps: int, script: str = TRAIN, planted: str = "", *, run: bool = True, ranks: int = 1) -> None:
    SMALL.lay(directory)
    (directory / "train.py").write_text(script)
    if run:
        _record(directory, steps, ranks, planted)


def _record(directory: Path, steps: int, ranks: int = 1, planted: str = "") -> None:
    python = [sys.executable, *(TORCHRUN if ranks > 1 else ())]
    done = _chronicle(directory, "run", *RUN, "--", *python, "train.py", str(steps), environ=plant(quiet(), planted))
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}: {done.stderr[-500:]}")


def _chronicle(directory: Path, *words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chronicle_ml", *words],
        cwd=directory, env=environ or quiet(), capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *words], env={**os.environ, **GIT}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
