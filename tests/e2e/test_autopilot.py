"""`chronicle run --autopilot` with a real launcher: a run that diverges for real is stopped, rolled back, launched again."""

import json
from pathlib import Path

import pytest

from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths
from tests.e2e.test_main_job import ROOT, chronicle

FLIGHT = ("run", "--autopilot", "--", "torchrun", "--standalone", "--nproc_per_node", "2",
          str(ROOT / "tests" / "builders" / "diverging_run.py"))  # fmt: skip


def autopilot_steps(where: Path) -> list[str]:
    entries = json.loads(chronicle(where, "log", "--json").stdout)
    return [entry["data"]["step"] for entry in reversed(entries) if entry["kind"] == "autopilot"]


@pytest.mark.slow
def test_a_run_that_diverges_is_brought_back_and_ends_well(tmp_path: Path) -> None:
    """The LR rises elevenfold at 300 and the loss explodes; back to 200 with half the LR it is stable to the end."""
    chronicle(tmp_path, "init", "--run", "tiny", "--checkpoints", "checkpoints")
    done = chronicle(tmp_path, *FLIGHT, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert autopilot_steps(tmp_path) == ["roll-back"]
    paths = RunPaths(tmp_path / "logs" / "tiny")
    first, second = (list(read_metrics(paths.metrics_path(launch))) for launch in (1, 2))
    assert max(point.values["loss"] for point in first) > 100.0 and first[-1].step < 600
    assert (second[0].step, second[-1].step) == (201, 600)
    assert second[0].values["lr"] == pytest.approx(0.2) and max(point.values["loss"] for point in second) < 1.0


@pytest.mark.slow
def test_its_rollback_is_taken_back_when_the_guard_refuses_what_follows(tmp_path: Path) -> None:
    """A script that loads nothing: the contract fails, the checkpoints are as before, and a person's note is needed."""
    chronicle(tmp_path, "init", "--run", "tiny", "--checkpoints", "checkpoints")
    done = chronicle(tmp_path, *FLIGHT, "forget", timeout=900)
    assert done.returncode == 78, done.stderr[-3000:]
    assert autopilot_steps(tmp_path) == ["roll-back", "undo", "halt"]
    assert (tmp_path / "checkpoints" / "opt_step-300").is_dir()
    again = chronicle(tmp_path, *FLIGHT, timeout=60)
    assert again.returncode == 3 and "nobody has written a note since" in again.stderr


@pytest.mark.slow
def test_a_run_that_diverges_again_and_again_halts_after_three_rollbacks_and_waits_for_a_note(tmp_path: Path) -> None:
    """Bad data at 12000 whatever the LR: each time further back and one rung up, then nobody flies before a note."""
    relapsing = str(ROOT / "tests" / "builders" / "relapsing_run.py")
    flight = ("run", "--autopilot", "--", "python", relapsing, "12000")
    chronicle(tmp_path, "init", "--run", "tiny", "--checkpoints", "checkpoints")
    done = chronicle(tmp_path, *flight, timeout=900)
    assert autopilot_steps(tmp_path) == ["roll-back"] * 3 + ["halt"], done.stderr[-3000:]
    assert "halt: 3 rollbacks in the region of step" in done.stderr and "(budget 3)" in done.stderr
    assert "autopilot: halted; find the cause, then: chronicle note" in done.stderr
    entries = json.loads(chronicle(tmp_path, "log", "--json").stdout)[::-1]
    receipts = [entry for entry in entries if entry["kind"] == "rollback.receipt"]
    targets = [entry["step"] for entry in receipts]
    assert targets == sorted(targets, reverse=True) and len(set(targets)) == 3  # each further back
    paths = RunPaths(tmp_path / "logs" / "tiny")
    rates = [next(iter(read_metrics(paths.metrics_path(launch)))).values["lr"] for launch in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.1, 0.1, 0.075, 0.05])  # never raised
    again = chronicle(tmp_path, *flight, timeout=60)
    assert again.returncode == 3 and "3 rollbacks in the region" in again.stderr and "chronicle note" in again.stderr
    assert chronicle(tmp_path, "note", "looked: the data of that day are broken").returncode == 0
    chronicle(tmp_path, *flight, timeout=300)
    assert autopilot_steps(tmp_path)[4:] == ["halt"]  # it flew, and the budget is still empty


@pytest.mark.slow
def test_no_more_than_fifteen_percent_of_a_run_are_thrown_away(tmp_path: Path) -> None:
    flight = ("run", "--autopilot", "--", "python", str(ROOT / "tests" / "builders" / "relapsing_run.py"), "500")
    chronicle(tmp_path, "init", "--run", "tiny", "--checkpoints", "checkpoints")
    done = chronicle(tmp_path, *flight, timeout=300)
    assert autopilot_steps(tmp_path) == ["roll-back", "halt"], done.stderr[-3000:]
    assert "of all steps discarded (budget 15%)" in done.stderr
