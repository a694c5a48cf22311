"""What a try before a rollback saves: diverging runs, the fixed ladder really played, and the way that `--try` puts first.

Small runs under `chronicle run --on-propose stop`: a perceptron with SGD or Adam, checkpoints every 50 steps, and one cause of
seven at a drawn place. An LR that grows beyond what is stable; an LR that is many times too high for 12 steps; labels that are
wrong in 15 batches, with SGD or Adam, with a loader that can skip or none; inputs that are too large for 40 batches and a slow
β2; a fault of the moment, gone at the next launch; a state that was spoilt long before it shows. When a rollback is proposed,
the run goes on in three ways, each from the same files. The fixed ladder: the proposed command is taken, and again at each
relapse, until the run comes to its end. After `--try 3` or `--try 4`: the way that was put first is taken, then the ladder.

Lost are the steps from each checkpoint that was gone back to, to where the run stood; where the run is not cured, also
those since the last of these checkpoints. "In the run" counts those; "in all" counts also the steps of the forks.
"Avoidable" leaves out what the ladder's first rollback throws away: no policy that takes the proposed checkpoint gets it
back.
"""

import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replay.causes import in_chronicle, quiet
from benchmarks.replay.planting import PLANTED, fault, plant_for_good
from chronicle.metrics.log import read_metrics

TRAIN = PLANTED + '''
import itertools, sys, time
from pathlib import Path
import torch
import chronicle

torch.set_num_threads(1)
torch.manual_seed(place)
generator = torch.Generator().manual_seed(place + 100)
rows = torch.randn(16 * 1000, 16, generator=generator)
weights = torch.randn(16, 1, generator=generator) / 4
noise = 0.2 * torch.randn(16 * 1000, 1, generator=generator)
labels = torch.tanh(rows @ weights) + 0.5 * rows[:, :1] * rows[:, 1:2] + noise
wrong = slice(16 * (at - 1), 16 * (at + 14))
if kind in ("burst", "heavy", "labels"):
    labels[wrong] *= 60 + 2 * place
if kind == "beta2":
    rows[16 * (at - 1) : 16 * (at + 39)] *= 12 + place / 4
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
rate = {"lr": 1.0, "burst": 0.01, "moment": 0.01, "spike": 2e-3, "slow": 2e-3}.get(kind, 4e-3)
if kind in ("lr", "burst", "moment"):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.9999 if kind == "beta2" else 0.999))


def factor(step):
    if kind == "lr":
        return 0.005 + (0.0015 * place + 0.12) * min(step + 1, at) / at
    return 60 + 4 * place if kind == "spike" and at <= step + 1 < at + 12 else 1


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=16)
can_skip = kind in ("burst", "heavy")
run = chronicle.attach(None, model, optimizer, scheduler, **({"data": data} if can_skip else {}))
root, step, hidden = Path("checkpoints"), 0, 0.0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    for name, one in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        one.load_state_dict(state[name])
    step, hidden = state["step"], state["hidden"]
batches = data if can_skip else zip(rows.view(-1, 16, 16), labels.view(-1, 16, 1))
for x, y in itertools.islice(batches, step, None):
    step += 1
    if not newest and kind == "moment" and at <= step < at + 10:
        y = y * (300 + 10 * place)
    hidden = 1e-4 if not newest and kind == "slow" and step == at - 180 else hidden * (1.04 + place / 4000)
    loss = torch.nn.functional.mse_loss(model(x) * (1 + hidden), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
    time.sleep(0.01 if step >= 280 and "CHRONICLE_REPLAY" not in os.environ else 0)  # the detector looks once a second
    if step % 50 == 0:
        path = root / f"step-{step}.pt"
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: one.state_dict() for name, one in states.items()} | {"step": step, "hidden": hidden}, path)
        run.saved(path)
    if step >= int(sys.argv[1]):
        break
'''
RUN = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]
KINDS = ("lr", "spike", "burst", "labels", "heavy", "beta2", "moment", "slow")
END, MOST = 700, 5
TRIES = (3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A run taken on after its first proposal: what each rollback threw away, whether it came to its end, its last loss.

    Of a run that is not cured, the last of `lost` is what it did after its last rollback.
    """

    lost: tuple[int, ...]
    cured: bool
    loss: float

    @property
    def words(self) -> str:
        """In a few words."""
        return f"{'+'.join(map(str, self.lost))} lost, " + (f"loss {self.loss:.3g}" if self.cured else "not cured")


def show(plays: int, seed: int, seconds: float) -> int:
    """Print one line a divergence and the sums; returns in how many a try made the run lose over 10 % more than the ladder."""
    draw = random.Random(seed)
    found: list[Mapping[str, Any]] = []
    number, start = 0, time.monotonic()
    while len(found) < plays and number < 2 * plays and time.monotonic() - start < seconds:
        kind = KINDS[number % len(KINDS)]
        planted = fault(kind, draw.randrange(290, 340), draw.randrange(30 if kind == "lr" else 40))
        number += 1
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            try:
                one = _play(Path(name).resolve(), planted)
            except subprocess.TimeoutExpired:
                print(f"  {planted:14} left out: one command took five minutes on this machine", flush=True)
                continue
        if one is None:
            print(f"  {planted:14} no rollback is proposed", flush=True)
            continue
        found.append(one)
        print(f"  {planted:14} {one['words']} ({time.monotonic() - begun:.0f} s)", flush=True)
    return sum(_sum(found, count) for count in TRIES)


def _sum(found: Sequence[Mapping[str, Any]], count: int) -> int:
    ladder = sum(sum(one["ladder"].lost) for one in found)
    first = sum(one["ladder"].lost[0] for one in found)
    mine = sum(sum(one[count].lost) for one in found)
    forks = sum(one["forks", count] for one in found)
    worse = [one for one in found if sum(one[count].lost) > 1.1 * sum(one["ladder"].lost)]
    worse_all = [one for one in found if sum(one[count].lost) + one["forks", count] > 1.1 * sum(one["ladder"].lost)]
    cured = [sum(one[key].cured for one in found) for key in ("ladder", count)]
    print(f"--try {count}, {len(found)} divergences; cured {cured[1]}, by the ladder {cured[0]}")
    print(f"  in the run: lost {mine}, by the ladder {ladder} ({_change(mine, ladder)}); worse by over 10 %: {len(worse)}")
    print(f"  avoidable: {mine - first}, by the ladder {ladder - first} ({_change(mine - first, ladder - first)})")
    print(f"  in all: lost {mine + forks}, of them {forks} by forks ({_change(mine + forks, ladder)}); worse: {len(worse_all)}")
    return len(worse)


def _change(mine: int, ladder: int) -> str:
    return f"{100 * (mine - ladder) / ladder:+.0f} %" if ladder else "nothing to save"


def _play(directory: Path, planted: str) -> dict[Any, Any] | None:
    (directory / "train.py").write_text(TRAIN)
    plant_for_good(directory, planted)
    _launch(directory)
    if _proposed(directory) is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        return _compared(directory, Path(name))


def _compared(directory: Path, kept: Path) -> dict[Any, Any]:
    one: dict[Any, Any] = {}
    firsts: dict[Any, str | None] = {"ladder": None}
    rises: dict[Any, bool] = {}
    words = []
    shutil.copytree(directory, kept / "proposed")
    for count in TRIES:
        asked = ["rollback", "--try", str(count), *RUN, "--json"]
        said = in_chronicle(directory, _environ(), *asked, check=False)
        assert said.startswith("{"), said
        rows = json.loads(said)["rows"]
        one["forks", count] = sum((row["last_step"] or row["begin"]) - row["begin"] for row in rows)
        firsts[count] = None if rows[0]["trouble"] else rows[0]["command"]
        rises |= {count: "after a rise" in rows[0]["verdict"]}
        words.append(f"try {count}: " + (rows[0]["change"] if firsts[count] else "none goes well"))
    proposed = _proposed(directory)
    shutil.copytree(directory, kept / "tried")  # what a try saw is in the journal of a launch that takes its way
    taken: dict[Any, Lineage] = {}
    for key, first in firsts.items():
        first, waits = first or proposed, rises.get(key, False)
        if (_of(first), waits) not in taken:
            _restore(directory, kept / ("proposed" if key == "ladder" else "tried"))
            taken[_of(first), waits] = _go_on(directory, first)
        one[key] = taken[_of(first), waits]
    ladder = f"{one['ladder'].words} by `{' '.join(_of(proposed))}`"
    one["words"] = f"ladder {ladder}; " + "; ".join(
        f"{text}, {one[count].words}, forks {one['forks', count]}" for count, text in zip(TRIES, words, strict=True)
    )
    return one


def _of(command: str | None) -> Any:
    """A rollback's command without what names the run."""
    words = shlex.split(command or "")
    return tuple(words[2 : words.index("--run")] if "--run" in words else words[2:])


def _go_on(directory: Path, first: str | None) -> Lineage:
    lost: list[int] = []
    command, launch, target = first, 0, 0
    while command is not None and len(lost) < MOST:
        words = [*_of(command)]
        launch, step, _ = _last(directory)
        target = int(words[words.index("--to") + 1].partition("@")[0])
        lost.append(step - target)
        in_chronicle(directory, _environ(), "rollback", *words, *RUN, "--yes")
        _launch(directory)
        command = _proposed(directory)
    newest, step, loss = _last(directory)
    cured = command is None and newest > launch and step == END and loss == loss
    rest = step - target if newest > launch and not cured else 0
    return Lineage(lost=(*lost, rest) if rest else tuple(lost), cured=cured, loss=loss)


def _launch(directory: Path) -> None:
    words = ["run", *RUN, "--on-propose", "stop", "--", sys.executable, "train.py", str(END)]
    in_chronicle(directory, _environ(), *words, check=False)


def _proposed(directory: Path) -> str | None:
    found = json.loads(in_chronicle(directory, _environ(), "status", *RUN, "--json", check=False)).get("proposal")
    return None if found is None or "--to" not in found["command"] else str(found["command"])


def _last(directory: Path) -> tuple[int, int, float]:
    """The newest launch that took a step, its last step, and the mean of its last 50 losses."""
    newest = max((directory / "logs" / "small" / "launches").glob("*/metrics.jsonl"))
    points = list(read_metrics(newest))
    losses = [float(point.values["loss"]) for point in points[-50:]]
    return int(newest.parent.name), points[-1].step, sum(losses) / len(losses)


def _restore(directory: Path, kept: Path) -> None:
    """The files as they were, in the same directories: a run knows its own by their inodes."""
    for name in ("logs/small", "checkpoints"):
        for path in (directory / name).iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(kept / name, directory / name, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(directory / "abandoned", ignore_errors=True)


def _environ() -> dict[str, str]:
    return {name: value for name, value in quiet().items() if name != "CHRONICLE_PRINTS"}
