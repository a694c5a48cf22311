"""Ways back are tried as real forks, ranked by what came out, and told in the plan; nothing of the run changes."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.causes import digests
from chronicle.metrics.log import MetricsWriter
from chronicle.replay.inside import Played, Spec
from chronicle.replay.tries import Way, WayTried, answer_of, order
from tests.replay.test_replay import PROBE, chronicle, environ

# Plain gradient descent whose LR grows beyond what is stable: it diverges, and does not at half the LR.
TRAIN = """
import sys, time
from pathlib import Path
import torch
import chronicle

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0025 * min(step + 1, 80))
run = chronicle.attach(None, model, optimizer, scheduler)
root, step = Path("checkpoints"), 0
root.mkdir(exist_ok=True)
newest = sorted(root.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
if newest:
    state = torch.load(newest[-1], weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    step = state["step"]
truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(9))
while step < int(sys.argv[1]):
    step += 1
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator) * torch.tensor([2.5] + [1.0] * 7)
    y = x @ truth + 0.3 * torch.randn(32, 1, generator=generator)
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
    if (root.parent / "stop-at").exists() and step >= int((root.parent / "stop-at").read_text()):
        sys.exit(3)
"""


def tried(words: str, loss: float | None, error: float | None = 0.01, trouble: str = "") -> WayTried:
    """What came of a way."""
    any_checkpoint: Any = (10, None, {})
    return WayTried(way=Way(words=words, begin=any_checkpoint), loss=loss, error=error, trouble=trouble)


def test_trouble_comes_last_and_what_is_not_told_apart_keeps_the_order_of_the_question() -> None:
    asked = [
        tried("spikes", 1.0, trouble="spike from step 12"), tried("first", 2.01), tried("ended", None, None, "it ended"),
        tried("second", 2.0), tried("worse", 2.2),
    ]  # fmt: skip
    ranked = order(asked)
    assert [one.way.words for one in ranked] == ["first", "second", "worse", "spikes", "ended"]
    assert "first goes best" in answer_of(ranked) and "not told apart from it: second" in answer_of(ranked)
    assert answer_of(order(asked[:1] + asked[2:3])).startswith("none of 2 ways goes well")
    exploding = [tried("up", 1e9, 9e8), tried("steady", 0.1)]
    assert not exploding[0].equals(exploding[1]) and order(exploding)[0].way.words == "steady"
    unsure = [tried("a", 2.0, None), tried("b", 1.0, None)]
    assert [one.way.words for one in order(unsure)] == ["b", "a"], "without an error nothing is called equal"


@pytest.mark.parametrize(("loss", "ends"), [(2.5, False), (math.inf, True), (math.nan, True)])
def test_a_fork_is_ended_where_its_loss_is_no_number_any_more(tmp_path: Path, loss: float, ends: bool) -> None:
    spec = Spec(
        run_dir="", roots=(), checkpoint="", name="", start=0, until=40, ranks=(), command=(), cwd="", environ={},
        overlaid=(), sandbox="", launch=1, scan=True,
    )  # fmt: skip
    with MetricsWriter(tmp_path / "metrics.jsonl", aloud=False) as writer:
        writer.write(7, {"loss": loss})
    assert bool(list(Played(tmp_path, spec).poll())) is ends


@pytest.mark.slow
@pytest.mark.sample
def test_half_the_lr_is_found_to_go_best_and_the_plan_says_so(tmp_path: Path) -> None:
    probe = [tmp_path / "seen", tmp_path / "kept"]
    for one in probe:
        one.mkdir()
    here = subprocess.run(
        [sys.executable, "-c", PROBE, *map(str, probe)], env=environ(), capture_output=True, text=True, check=False
    )
    if here.returncode:
        pytest.skip(f"no private mount namespace here: {here.stderr.strip().splitlines()[-1]}")
    directory = (tmp_path / "run").resolve()
    directory.mkdir()
    (directory / "train.py").write_text(TRAIN)
    (directory / "stop-at").write_text("90")
    assert chronicle(directory, "run", "--", sys.executable, "train.py", "400").returncode == 3
    (directory / "stop-at").unlink()
    before = digests(directory)
    done = chronicle(directory, "rollback", "--to", "60", "--try", "3", "--try-steps", "40", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["answer"].startswith("back to step 60 with half the LR goes best"), found["answer"]
    rows = {row["change"]: row for row in found["rows"]}
    assert set(rows) == {"back to step 60", "on from step 80 as it is", "back to step 60 with half the LR"}
    assert rows["back to step 60 with half the LR"]["command"] == "chronicle rollback --to 60 --lr-scale 0.5"
    best = rows.pop("back to step 60 with half the LR")["loss"]
    assert math.isfinite(best) and all(row["loss"] is None or row["loss"] > 10 * best for row in rows.values())
    after = digests(directory)
    assert {path: after.get(path) for path in before} == before
    plan = chronicle(directory, "rollback", "--to", "60", "--lr-scale", "0.5", "--dry-run")
    assert "goes best" in plan.stdout, plan.stdout
