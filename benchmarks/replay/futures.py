"""What a try costs: the steps of its forks, beside the steps that are lost when the same ways are taken one after the other.

Divergences of a plain script at drawn places, of three kinds: an LR that grows beyond what is stable, a fault of the moment,
weights that were spoilt before the newest checkpoint. `chronicle rollback --try 4` plays the ways; its forks are thrown away,
so all of their steps are lost. Whoever takes the ways in turn (the same again, half the LR, an older checkpoint) loses the
steps of those that go bad, up to the first that goes well. A fork ends where its loss is no number, in both.
"""

import json
import random
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.replay.causes import in_chronicle, quiet
from benchmarks.replay.planting import PLANTED, fault, plant_for_good

TRAIN = PLANTED + '''
import os, sys
from pathlib import Path
import torch
import chronicle

torch.set_num_threads(1)
torch.manual_seed(0)
size = place
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
top = 0.0025 * (1 + size / 100) if kind == "lr" else 0.0008
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: top * min(step + 1, 80))
run = chronicle.attach(None, model, optimizer, scheduler)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    for name, one in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        one.load_state_dict(state[name])
    step = state["step"]
truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(9))
while step < int(sys.argv[1]):
    step += 1
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator) * torch.tensor([2.5] + [1.0] * 7)
    y = x @ truth + 0.3 * torch.randn(32, 1, generator=generator)
    if not newest and kind == "moment" and at <= step < at + 15:
        y = y * (100 + size)
    if not newest and kind == "spoilt" and step == at:
        for parameter in model.parameters():
            parameter.data.mul_(1e20)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
    if step % 20 == 0:
        path = root / f"step-{step}.pt"
        states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: one.state_dict() for name, one in states.items()} | {"step": step}, path)
        run.saved(path)
    if not newest and step == 95:
        sys.exit(3)
'''
Row = dict[str, str | int | float | None]  # of `rollback --try --json`
RUN = ["--run", "small", "--logs", "logs", "--checkpoints", "checkpoints"]
KINDS = ("lr", "moment", "spoilt")
TARGET, NEWEST, LAST = 60, 80, 95


def show(plays: int, seed: int) -> int:
    """Print one line a divergence and the sums; returns how many tries put a way first that went bad."""
    draw = random.Random(seed)
    forks = turns = wrong = 0
    for number in range(plays):
        kind = KINDS[number % len(KINDS)]
        at = draw.randrange(TARGET + 4, NEWEST - 2) if kind == "spoilt" else draw.randrange(NEWEST + 2, LAST - 8)
        planted = fault(kind, at, draw.randrange(60))
        with tempfile.TemporaryDirectory() as name:
            rows = _play(Path(name).resolve(), planted)
        tried = sum(_steps(row) for row in rows)
        lost, cured = _in_turn(rows)
        first_is_bad = cured and not _goes_well(rows[0])
        forks, turns, wrong = forks + tried, turns + lost, wrong + first_is_bad
        ways = "; ".join(f"{row['change']}: {row['verdict'][:40]}" for row in rows)
        print(f"  {planted:18} forks {tried:3} steps, in turn {lost:3} lost: {ways}", flush=True)
    print(f"steps of the forks {forks}, lost by taking the ways in turn {turns}")
    print(f"tries that put a bad way first though one goes well: {wrong} of {plays}")
    return wrong


def _play(directory: Path, planted: str) -> list[Row]:
    (directory / "train.py").write_text(TRAIN)
    plant_for_good(directory, planted)
    in_chronicle(directory, quiet(), "run", *RUN, "--", sys.executable, "train.py", "400", check=False)
    words = ["rollback", "--to", str(TARGET), "--try", "4", "--try-steps", "40", *RUN, "--json"]
    rows: list[Row] = json.loads(in_chronicle(directory, quiet(), *words, check=False))["rows"]
    return rows


def _steps(row: Row) -> int:
    begin = int(re.findall(r"step (\d+)", str(row["change"]))[0])
    return max(0, int(row["last_step"] or begin) - begin)


def _goes_well(row: Row) -> bool:
    return row["loss"] is not None and "," not in str(row["verdict"])


def _in_turn(rows: list[Row]) -> tuple[int, bool]:
    """Steps lost by the ways that go bad, in the ladder's order; whether one goes well."""
    lost = 0
    for words in (f"back to step {TARGET}", f"back to step {TARGET} with half the LR", f"back to step {TARGET - 20}"):
        row = next(row for row in rows if row["change"] == words)
        if _goes_well(row):
            return lost, True
        lost += _steps(row)
    return lost, False
