"""What machines tell each other is no part of a person's story, unless it went wrong."""

from pathlib import Path

import pytest

from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli
from tests.commands.conftest import chronicle

__all__ = ["chronicle"]


@pytest.mark.parametrize(("verdict", "told"), [("passed", False), ("failed", True)])
def test_a_preflight_is_told_only_when_it_failed(verdict: str, told: bool, tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.add("preflight", launch=2, title="preflight: 3 checks", data={"verdict": verdict, "checks": []})
    run.add("guard.digest", launch=2, title="batches seen")
    chronicle("render", "--no-plots")
    for page in (chronicle("log", "--graph").out, run.paths.chronicle_md.read_text()):
        assert ("preflight: 3 checks" in page) is told
        assert "batches seen" not in page
    assert "batches seen" in chronicle("log", "--all").out


def guarded(run: StoryRun, number: int, verdict: str, step: int | None, loaded: int | None = None) -> None:
    """What the guard of this run writes: `loaded` is a step of launch 1."""
    own = run.writer.place.run_id
    saved = {} if loaded is None else {"loaded": {"id": "X", "run_id": own, "launch": 1, "step": loaded}}
    data = {"verdict": verdict, "checks": [], "moment": "before the first step", "run_id": own, **saved}
    data["basis"] = "manifest" if saved else "fresh"
    run.add("guard.attached", launch=number, title="guard attached", data={"run_id": own})
    run.add("guard.verdict", launch=number, step=step, title=f"guard: {verdict}", data=data)


def to_60(root: Path) -> StoryRun:
    run = StoryRun(root)
    run.start(1, None)
    guarded(run, 1, "passed", 0)
    run.metrics(1, {step: {"loss": 9.0} for step in range(1, 61)})
    run.end(1, 60)
    return run


def drawn(chronicle: Cli) -> list[str]:
    """The lines of the graph without their times and ids."""
    return [line.split(" · LR")[0].split("  0000")[0] for line in chronicle("log", "--graph").out.splitlines()]


def test_a_refused_launch_does_not_stand_where_the_present_weights_are(tmp_path: Path, chronicle: Cli) -> None:
    run = to_60(tmp_path)
    run.start(2, None)
    guarded(run, 2, "refused", 20, 20)
    run.metrics(2, {21: {"loss": 1.0}})
    run.end(2, 21, exit_code=78)
    assert drawn(chronicle) == [
        "| x  launch 2 · no step",
        "| g  guard refused (step 20)",
        "* |  launch 1 · steps 21–60",
        "|/",
        "*    launch 1 · steps 1–20",
        "g    guard passed (step 0)",
    ]
    assert "inferred" not in chronicle("log", "--graph").out + chronicle("log").out


def test_a_rollback_stays_on_the_lineage_when_the_launch_after_it_was_refused(tmp_path: Path, chronicle: Cli) -> None:
    run = to_60(tmp_path)
    run.rollback(40)
    run.start(2, None)
    guarded(run, 2, "refused", 20, 20)
    run.end(2, None, exit_code=78)
    assert drawn(chronicle) == [
        "| x  launch 2 · no step",
        "| g  guard refused (step 20)",
        "|/",
        "R    rollback to 40",
        "| x  launch 1 · steps 41–60 · abandoned",
        "|/",
        "*    launch 1 · steps 1–40",
        "g    guard passed (step 0)",
    ]


def test_bookkeeping_of_the_guard_is_one_plain_line_in_the_log(tmp_path: Path, chronicle: Cli) -> None:
    to_60(tmp_path)
    assert len([line for line in chronicle("log").out.splitlines() if "guard.attached" in line]) == 1
    assert "attached" not in chronicle("log", "--graph").out


def test_a_launch_that_no_guard_watched_is_inferred_wherever_it_is_listed(tmp_path: Path, chronicle: Cli) -> None:
    run = to_60(tmp_path)
    run.start(2, None)
    run.metrics(2, {step: {"loss": 8.0} for step in range(41, 51)})
    run.end(2, 50)
    for words in (("log",), ("log", "--graph")):
        marked = [line for line in chronicle(*words).out.splitlines() if "inferred" in line]
        assert len(marked) == 1 and "launch 2" in marked[0]
