"""The promised LR beside the logged one, and the steps that a continued launch descends from."""

import json
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.watch import LiveWatch
from chronicle.watch.restart import LrPromise, parse_promise, read_contract
from rollback.detect import Kind, Tier
from tests.watch.conftest import Stage

CONTRACT = {"v": 1, "step": 200, "next_lrs": [[0.5, 0.1], [0.4, 0.1], [0.3, 0.1]]}


def watch(stage: Stage, launch: int = 1) -> LiveWatch:
    return LiveWatch(stage.paths, launch, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append)


def test_promise_holds_for_the_steps_it_names() -> None:
    promise = LrPromise(*parse_promise(CONTRACT, 201))
    assert [dict(promise.add_to(step, {"lr": 0.5})).get("lr/expected") for step in (200, 201, 202, 203, 204)] == [
        None, 0.5, 0.4, 0.3, None,
    ]  # fmt: skip


def test_lr_logged_after_the_scheduler_has_moved_on_is_as_promised() -> None:
    """Two habits of logging, one schedule: step 201 with its own LR or with that of step 202."""
    promise = LrPromise(*parse_promise(CONTRACT, 201))
    assert promise.add_to(201, {"lr": 0.4})["lr/expected"] == 0.4


def test_in_a_warm_up_the_lr_of_scheduler_and_of_step_are_both_as_promised() -> None:
    promise = LrPromise(*parse_promise(CONTRACT, 201), 4)
    said = [(201, 0.125), (202, 0.2), (203, 0.225), (201, 0.5), (202, 0.4), (203, 0.3)]
    assert [promise.add_to(step, {"lr": lr})["lr/expected"] for step, lr in said] == pytest.approx([lr for _, lr in said])
    assert promise.add_to(201, {"lr": 1e-8})["lr/expected"] == 0.125


def test_contract_of_another_start_promises_nothing() -> None:
    changed = (CONTRACT | {"v": 2}, CONTRACT | {"next_lrs": None}, CONTRACT | {"step": None}, {})
    for contract, first in ((CONTRACT, 150), (CONTRACT, 900), *((contract, 201) for contract in changed)):
        assert parse_promise(contract, first) == (0, ())


@pytest.mark.parametrize("text", [None, "", "[1]", '"x"', "{"])
def test_contract_that_cannot_be_read_is_empty(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "contract.json"
    if text is not None:
        path.write_text(text)
    assert read_contract(path) == {}


def test_broken_promise_is_proposed_at_the_first_logged_step(stage: Stage) -> None:
    """exp9: the contract said half, the log says a fresh warm-up; nothing has to blow up first."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 300)
    stage.writer.append("launch.end", launch=1, data={"last_step": 300})
    stage.paths.contract_path.write_text(json.dumps({"v": 1, "step": 300, "next_lrs": [[1.5e-3]] * 20}))
    with stage.start(2, 300) as log:
        log.write(301, {"loss": 0.42, "lr": 2.5e-8}, time=1.7e9)
    (event,) = watch(stage, 2).poll()
    assert (event.kind, event.tier, event.onset_step) == (Kind.LR_MISMATCH, Tier.PROPOSE, 301)
    assert event.evidence == ("lr 2.5e-08, expected 0.0015",)
    (proposal,) = [entry for entry in read_journal(stage.paths).entries if entry.kind == "proposal"]
    assert proposal.step == 300 and proposal.data["action"] == "fix-lr"
    # `--lr` would be refused: at step 300 the schedule of these checkpoints has ended, and their LR is 0
    assert proposal.data["command"] == "chronicle rollback --to 300 --run tiny"
    assert "give the next launch the LR 0.0015" in proposal.data["by_hand"]


def test_the_watch_of_a_continued_launch_folds_the_kept_steps_again(stage: Stage) -> None:
    """Its detector is where one stands that has seen these steps alone: the log is the state."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 400)
    stage.writer.append("launch.end", launch=1, data={"last_step": 400})
    with stage.start(2, 350) as log:
        stage.train(log, 351, 351)
    resumed = watch(stage, 2)
    resumed.poll()
    assert resumed.detector.row == 351 and resumed.detector.events == ()
