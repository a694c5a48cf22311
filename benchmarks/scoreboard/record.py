"""Write the stored runs of `runs/` with today's code: `python -m benchmarks.scoreboard.record [NAME …]`.

Some are real: a script of plain torch under `chronicle run`, on the CPU, with whatever happens to it. The others are written
by the journal's and the metrics' own writers with a pinned clock. A run that is there is not written anew unless it is named.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.scoreboard.stored import PLACE, RUNS, pack
from tests.builders.story_runs import StoryRun, toy_run

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(PLACE / "venv" / "bin" / "python")  # what is recorded names no directory of the machine that recorded it
PLACES = ["--run", "r", "--logs", "logs", "--checkpoints", "checkpoints"]
TRAIN = '''
import os, sys
from pathlib import Path
import torch
import chronicle

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
run = chronicle.attach(None, model, optimizer, scheduler)
root, step, last, what = Path("checkpoints"), 0, int(sys.argv[1]), sys.argv[2]
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1] / "state.pt" if newest[-1].is_dir() else newest[-1], weights_only=False)
    for name, part in parts.items():
        if what != "forgets" or name != "optimizer":
            part.load_state_dict(state[name])
    step = state["step"]
while step < last:
    step += 1
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = (model(rows) - rows[:, :2]).square().mean()
    if "nan" in what and step > 12:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
    if step % 5 == 0:
        path = root / (f"step-{step}" if "folder" in what else f"step-{step}.pt")
        if "folder" in what:
            path.mkdir()
        state = {**{name: part.state_dict() for name, part in parts.items()}, "step": step}
        torch.save(state, path / "state.pt" if path.is_dir() else path)
        run.saved(path)
    if what == "dies" and step == 13:
        os.kill(os.getpid(), 9)
'''


def chronicle(top: Path, *words: str) -> None:
    """One command as it is typed in `top`; its exit code is part of what is recorded, not judged."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(PLACE / "source"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, "-m", "chronicle_ml", *words], cwd=top, env=environ, capture_output=True, text=True)
    print(f"    {' '.join(words[:6])}: exit {done.returncode} {done.stderr.strip()[-120:]}")


def train(top: Path, last: int, what: str = "well") -> None:
    """One supervised launch up to this step."""
    (top / "train.py").write_text(TRAIN, encoding="utf-8")
    chronicle(top, "run", *PLACES, "--", PYTHON, "train.py", str(last), what)


def finished(top: Path) -> None:
    """Two launches that go well."""
    train(top, 10)
    train(top, 20)


def rolled_back(top: Path) -> None:
    """A rollback with half the LR, and a launch that goes on from there."""
    train(top, 20)
    chronicle(top, "rollback", "--to", "10", "--lr-scale", "0.5", *PLACES, "--yes")
    train(top, 25)


def undone(top: Path) -> None:
    """A rollback that was undone."""
    train(top, 20)
    chronicle(top, "rollback", "--to", "5", *PLACES, "--yes")
    chronicle(top, "undo", *PLACES, "--yes")


def killed(top: Path) -> None:
    """The trainer was killed between two saves."""
    train(top, 20, "dies")


def nan_weights(top: Path) -> None:
    """The loss is NaN from step 13 on, and the saves after it are spoilt."""
    train(top, 20, "nan")


def nan_folders(top: Path) -> None:
    """The same with a directory and a manifest for each save."""
    train(top, 20, "nan-folder")


def refused(top: Path) -> None:
    """The second launch did not load the optimizer, and the guard refused it."""
    train(top, 10)
    train(top, 20, "forgets")


def noted(top: Path) -> None:
    """Notes of several kinds, one of them closed, and no launch."""
    chronicle(top, "init", "--run", "r", "--logs", "logs")
    for words in ("node 7 is slow|--host|node-7", "loss jumped|--incident|--step|120", "batch 12 again|--tag|data"):
        chronicle(top, "note", *words.split("|"), "--run", "r", "--logs", "logs")


def imported(top: Path) -> None:
    """A CSV of others, imported."""
    rows = "".join(f"{step},{3 / math.sqrt(step):.4f},{1e-3:.4f}\n" for step in range(1, 61))
    (top / "log.csv").write_text("step,loss,lr\n" + rows, encoding="utf-8")
    chronicle(top, "import", "log.csv", "--run", "r", "--logs", "logs")


def every_kind(top: Path) -> None:
    """A journal of an earlier day with one entry of each kind that there was."""
    journal = top / "logs" / "every-kind" / "journal"
    journal.mkdir(parents=True)
    for path in (ROOT / "tests" / "journal" / "fixtures").glob("*.jsonl"):
        shutil.copy(path, journal)


def toy(top: Path) -> None:
    """The run that trackers tell wrongly: ten steps, back to five, three more."""
    toy_run(top).writer.close()


def diverging(top: Path) -> None:
    """Two spikes and a divergence in 400 steps; nobody has done anything yet."""
    story = StoryRun(top, "diverging")
    story.add("run.init", title="run diverging")
    story.start(1, 0)
    story.metrics(1, {step: {"loss": loss_of(step), "lr": 3e-4} for step in range(1, 401)})
    for step in range(100, 401, 100):
        story.add("checkpoint", launch=1, step=step, data={"path": f"checkpoints/step-{step}"})
    story.add("incident", launch=1, step=320, title="divergence from step 320", data={"kind": "divergence", "tier": "propose"})
    story.end(1, 400, exit_code=None, signal="SIGTERM")
    story.writer.close()


def loss_of(step: int) -> float:
    """Smooth, with a small regular noise, spikes at 150 and 220 and a rise from 320 on."""
    calm = 2 + 6 / (1 + step / 20) + 0.02 * math.sin(7 * step)
    if step in (150, 220):
        return calm + 4
    return calm + max(0, step - 320) * 0.05


def siblings(top: Path) -> None:
    """Three runs of one sweep, to be compared."""
    for number, rate in enumerate((1e-3, 3e-3, 1e-2), 1):
        story = StoryRun(top, f"lr-{number}")
        story.add("run.init", title=f"run lr-{number}")
        story.start(1, 0, settings={"lr": rate})
        story.metrics(1, {step: {"loss": 4 * math.exp(-rate * step), "lr": rate} for step in range(1, 51)})
        story.end(1, 50)
        story.writer.close()


REAL = (finished, rolled_back, undone, killed, nan_weights, nan_folders, refused)
WRITTEN = (noted, imported, every_kind, toy, diverging, siblings)
RECORDED: dict[str, Callable[[Path], None]] = {make.__name__: make for make in (*REAL, *WRITTEN)}


def main() -> int:
    """Record what is missing, or what was named."""
    asked = sys.argv[1:]
    PLACE.mkdir(exist_ok=True)
    for name, target in (("source", ROOT), ("venv", Path(sys.prefix))):
        (PLACE / name).unlink(missing_ok=True)
        (PLACE / name).symlink_to(target)
    for name, make in RECORDED.items():
        target = RUNS / f"{name}.json"
        if name not in asked if asked else target.exists():
            continue
        print(name)
        top = PLACE / name
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        make(top)
        target.write_text(json.dumps(pack(top), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.rmtree(top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
