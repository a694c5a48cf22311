"""Ways back are tried as real forks, ranked by what came out, and told in the plan; nothing of the run changes."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replay.causes import digests
from chronicle.journal import JournalWriter
from chronicle.journal.events import Proposed
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.replay import tries
from chronicle.replay.fork import Forked
from chronicle.replay.inside import Played, Spec
from chronicle.replay.tries import Versus, Way, WayTried, answer_of, order
from rollback.plan.request import RESHUFFLE, SKIP
from rollback.propose import CandidateCheckpoint
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


def tried(words: str, loss: float | None, *, spread: float = 0.0, trouble: str = "") -> WayTried:
    """What came of a way, with a drift that all have and a noise that each has of its own."""
    any_checkpoint: Any = (10, None, {})
    blocks = () if loss is None else tuple(loss - 0.05 * place + spread * (-1) ** place for place in range(8))
    return WayTried(
        way=Way(words=words, begin=any_checkpoint), loss=loss, blocks=blocks, noise=0.05, trouble=trouble, last_step=40
    )  # fmt: skip


def test_worse_equivalent_and_not_told_apart_are_three_answers() -> None:
    best = tried("best", 2.0)
    assert best.margin == pytest.approx(0.02), "0.4 of the noise of one loss, as the detector's recovery"
    assert tried("a hair", 2.005).versus(best) is Versus.EQUIVALENT, "a real difference, but within the margin"
    assert tried("a step", 2.05).versus(best) is Versus.WORSE, "the drift is in both: it hides nothing"
    assert tried("noisy", 2.005, spread=0.3).versus(best) is Versus.UNTOLD, "no proof of a difference is none of equality"
    assert tried("lost", None, trouble="nan").versus(best) is Versus.WORSE
    exploding = replace(best, blocks=tuple(10.0**place for place in range(1, 9)), loss=1e8 / 7)
    assert exploding.versus(best) is Versus.WORSE, "its error is as large as itself, but all of it is higher"
    short = replace(best, blocks=(2.0,))
    assert short.versus(short) is Versus.UNTOLD


def test_a_lower_loss_by_a_lower_lr_is_no_evidence_against_the_way_that_was_asked_for() -> None:
    """Half the LR lowers the noise of the loss within a few steps, and the end may be higher."""
    half = tried("half", 1.9)
    half = replace(half, way=replace(half.way, options=("--lr-scale", "0.5")))
    asked, ill = tried("asked", 2.0), tried("asked", 2.0, trouble="nan from step 3")
    assert asked.versus(half) is Versus.UNTOLD and half.versus(asked) is not Versus.WORSE
    assert [one.way.words for one in order([asked, half])] == ["asked", "half"]
    assert [one.way.words for one in order([ill, half])] == ["half", "asked"], "but where it does not go well"
    higher = replace(half, blocks=tuple(block + 0.5 for block in half.blocks), loss=2.4)
    assert higher.versus(asked) is Versus.WORSE
    quarter = replace(tried("quarter", 2.0), way=replace(half.way, options=("--lr-scale", "0.25")))
    assert quarter.versus(half) is Versus.WORSE, "of two lower ones the higher LR may win"
    before: Any = (5, None, {})
    longer = replace(tried("longer", 1.8), way=replace(half.way, words="longer", begin=before))
    assert half.versus(longer) is Versus.UNTOLD and longer.versus(replace(half, blocks=asked.blocks)) is not Versus.WORSE
    assert [one.way.words for one in order([half, longer])] == ["half", "longer"], "half the LR for 5 steps more"
    further = replace(tried("further", 1.8), way=replace(asked.way, words="further", begin=before))
    assert asked.versus(further) is Versus.WORSE, "at the same LR as ever an earlier state may be the better one"


def test_trouble_comes_last_and_what_is_not_worse_keeps_the_order_of_the_question() -> None:
    asked = [
        tried("spikes", 1.0, trouble="spike from step 12"), tried("first", 2.01), tried("ended", None, trouble="it ended"),
        tried("second", 2.0), tried("noisy", 2.1, spread=0.9), tried("worse", 2.2),
    ]  # fmt: skip
    ranked = order(asked)
    assert [one.way.words for one in ranked] == ["first", "second", "noisy", "worse", "spikes", "ended"]
    assert answer_of(ranked) == (
        "first goes best: loss 2.01; equivalent within ± 0.02: second; not told apart: noisy"
    )  # fmt: skip
    assert answer_of(order(asked[:1] + asked[2:3])).startswith("none of 2 ways goes well")


def test_a_way_that_took_no_step_is_no_result() -> None:
    """The launcher ended at once: nothing is known of the way, neither that it goes well nor that it does not."""
    why = "it ended at step None (the launcher ended with code 2)"
    dead = [replace(tried(name, None, trouble=why), last_step=None) for name in ("first", "second")]
    assert answer_of(order(dead)) == f"nothing is known: none of 2 ways took a step; first: {why}"
    bad, good = tried("bad", 2.0, trouble="nan"), tried("good", 2.0)
    assert answer_of(order([dead[0], bad])) == f"none of 1 ways goes well: bad: loss 2, nan; could not be tried: first ({why})"
    assert answer_of(order([dead[0], good])) == f"good goes best: loss 2; could not be tried: first ({why})"


def test_where_none_goes_well_the_nearest_is_named_and_what_is_shown_to_be_worse() -> None:
    shift = "level-shift from step 3"
    asked = [
        tried("first", 2.2, trouble=shift), tried("noisy", 2.1, spread=0.9, trouble=shift),
        tried("ended", None, trouble="it ended"), tried("second", 2.0, trouble=shift),
    ]  # fmt: skip
    ranked = order(asked)
    assert [one.way.words for one in ranked] == ["noisy", "second", "first", "ended"], "without evidence as it was asked"
    assert answer_of(ranked[1:]) == "none of 3 ways goes well: second: loss 2, level-shift from step 3; worse: first"
    assert answer_of(ranked[3:]) == "none of 1 ways goes well: ended: it ended"


def ways(
    monkeypatch: pytest.MonkeyPatch, policy: CandidateCheckpoint, beta2: float | None = 0.999
) -> tuple[list[str], list[str]]:
    """The words of the first five ways back to step 60 of a run that came to 95, and what was said of others."""
    monkeypatch.setattr(tries, "collect_candidates", lambda roots, before, entries: (policy,))
    monkeypatch.setattr(tries, "_beta2", lambda one: beta2)
    listed: Any = [(step, None, {}) for step in (20, 40, 60, 80)]
    origin: Any = SimpleNamespace(roots=(), launch=1)
    said: list[str] = []
    found = tries._first(tries._ways(origin, listed, 60, (), [], 95), 5, said.append)
    return [way.command for way in found], said


def test_the_ways_follow_the_ladder_and_what_cannot_be_done_is_said_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    skips = CandidateCheckpoint(step=60, honours=frozenset({SKIP}))
    back = "chronicle rollback --to"
    assert ways(monkeypatch, skips) == ([
        f"{back} 60", f"{back} 60 --skip-batches 220", f"{back} 60 --set beta2=0.95",
        f"{back} 20", f"{back} 40 --lr-scale 0.5",
    ], [])  # fmt: skip
    shuffles = CandidateCheckpoint(step=60, honours=frozenset({RESHUFFLE}))
    assert ways(monkeypatch, shuffles)[0][1] == f"{back} 60 --reshuffle"
    fixed = CandidateCheckpoint(step=60, lr_elsewhere="the script sets it")
    found, said = ways(monkeypatch, fixed, 0.95)
    assert found == [f"{back} 60", f"{back} 20", f"{back} 80"], "no LR, a β2 that is low already, no data"
    assert said == [
        "not tried, back to step 60 with other data: the run supports neither --skip-batches nor --reshuffle",
        "not tried, back to step 60 with half the LR: the script sets it",
    ]


@pytest.mark.parametrize(("launch", "onset", "within"), [(1, 70, 70), (1, 85, None), (2, 70, None)])
def test_going_on_within_the_incident_is_told_from_going_on_after_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: int, onset: int, within: int | None
) -> None:
    monkeypatch.setattr(tries, "collect_candidates", lambda roots, before, entries: (CandidateCheckpoint(step=60),))
    monkeypatch.setattr(tries, "_beta2", lambda one: None)
    with JournalWriter(RunPaths(tmp_path / "logs" / "small")) as writer:
        entry = writer.write(Proposed(onset_step=onset), launch=launch, step=60, title="roll back to 60")
    listed: Any = [(step, None, {}) for step in (20, 60, 80)]
    origin: Any = SimpleNamespace(roots=(), launch=1)
    found = {way.words: way.within for way in tries._ways(origin, listed, 60, (), [entry], 95)}
    assert found["on from step 80 as it is"] == within
    assert found["back to step 60"] is None


def forked(losses: Sequence[float], *, code: int = 143, events: Sequence[dict[str, Any]] = ()) -> Forked:
    """A fork that logged these losses from step 1 on."""
    rows = tuple(enumerate(losses, start=1))
    return Forked(directory=Path(), end={"code": code, "events": events, "end": {}}, losses=rows, last_step=len(rows))


def test_a_fork_that_comes_to_the_end_of_the_training_is_compared_there() -> None:
    way = tried("x", None).way
    whole = tries._weighed(way, forked([2.0, 1.0] * 20), 40, 20, 0.0)
    ended = tries._weighed(way, forked([2.0, 1.0] * 15, code=0), 40, 20, 0.0)
    killed = tries._weighed(way, forked([2.0, 1.0] * 15), 40, 20, 0.0)
    assert whole.loss == ended.loss == 1.5 and len(whole.blocks) == len(ended.blocks) == 8 and not ended.trouble
    assert killed.trouble.startswith("it ended at step 30") and killed.loss is None
    late = replace(way, begin=(20, *way.begin[1:]))
    inside = tries._weighed(replace(way, within=7), forked([2.0, 1.0] * 20), 40, 20, 0.0)
    assert inside.trouble == "it begins in the incident (since step 7): whether that is over is not told"
    assert inside.loss == 1.5, "it is compared with the others all the same"
    short = tries._weighed(late, replace(forked([1.0] * 25, code=0), losses=((21, 1.0), (25, 1.0))), 40, 20, 0.0)
    assert short.trouble == "it came to the training's end after 5 steps: too few to tell"


def test_a_rise_that_came_back_is_no_trouble_and_is_named_where_a_rollback_would_have_been_proposed() -> None:
    event = {"kind": "instant-spike", "onset_step": 3, "alarm_step": 4, "tier": "warn"} | {
        "status": "recovered", "recovered_step": 9,
    }  # fmt: skip
    said = "instant-spike from step 3"
    for changed, trouble, rises in (
        ({}, "", ()), ({"status": "open", "recovered_step": None}, said, ()), ({"tier": "propose"}, "", ((3, 9),)),
        ({"tier": "propose", "status": "diverging"}, said, ()),
    ):  # fmt: skip
        fork = forked([1.0] * 40, events=[{**event, **changed}])
        found = tries._weighed(tried("x", None).way, fork, 40, 20, 0.0)
        assert (found.trouble, found.rises) == (trouble, rises)
    assert answer_of([replace(tried("x", 2.0), rises=((3, 9),))]) == (
        "x goes best: loss 2, after a rise from step 3 that came back by step 9"
    )


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
    assert found["answer"].startswith("back to step 40 with half the LR goes best"), found["answer"]
    assert "not tried, back to step 60 with other data" in done.stderr and "3 ways to step 130, 270 steps in all" in done.stderr
    again = chronicle(directory, "rollback", "--to", "60", "--try", "3", "--try-steps", "40", "--json")
    assert json.loads(again.stdout)["answer"] == found["answer"] and again.stderr.count("tried before") == 3
    rows = {row["change"]: row for row in found["rows"]}
    assert set(rows) == {"back to step 60", "back to step 20", "back to step 40 with half the LR"}
    best = rows.pop("back to step 40 with half the LR")
    assert best["command"].startswith("chronicle rollback --to 40 --lr-scale 0.5 --run small --logs ")
    assert math.isfinite(best["loss"]) and all(row["loss"] is None or row["loss"] > 10 * best["loss"] for row in rows.values())
    after = digests(directory)
    assert {path: after.get(path) for path in before} == before
    for step in ("60", "40"):
        plan = chronicle(directory, "rollback", "--to", step, "--lr-scale", "0.5", "--dry-run")
        assert "goes best" in plan.stdout, plan.stdout
