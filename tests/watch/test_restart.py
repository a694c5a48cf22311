"""What the log alone says about a restart: in the live watch, under `chronicle run`, and after the fact."""

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from chronicle.journal import Entry, read_journal
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.watch import LiveWatch
from chronicle.watch.restart import LogRestart
from tests.watch.conftest import Stage

PRINTS = """
import math, random, sys
first, last, lr, shift = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
noise = random.Random(first)
for step in range(first, last + 1):
    loss = 2 + 3 / math.sqrt(step + 1) + shift + noise.gauss(0, 0.02)
    print(f" iteration {step:8d}/   50000 | elapsed time per iteration (ms): 9.1 "
          f"| learning rate: {lr:.6E} | lm loss: {loss:.6E} |")
"""  # a Megatron log, written by nobody who knows chronicle


def verdicts(paths: RunPaths) -> list[Entry]:
    return [entry for entry in read_journal(paths).entries if entry.kind == "guard.log"]


def names(entry: Entry) -> list[str]:
    return [check["name"] for check in entry.data["checks"]]


def resume(
    stage: Stage, *, first: int, lr: float = 3e-3, shift: float = 0.0, rows: int = 60, handed: int | None = None
) -> Entry:
    """A launch to step 300, one that goes on at `first` and logs `rows` steps; the verdict on it."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 300)
    stage.writer.append("launch.end", launch=1, data={"last_step": 300})
    noise = random.Random(2)
    with stage.start(2, 300, **({} if handed is None else {"handed": {"path": f"step-{handed}", "step": handed}})) as log:
        for step in range(first, first + rows):
            loss = 0.42 + 0.5 * math.exp(-step / 60) + shift + noise.gauss(0.0, 0.02)
            log.write(step, {"loss": loss, "lr": lr}, time=1.7e9 + step)
    LiveWatch(stage.paths, 2, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append).finish()
    (entry,) = verdicts(stage.paths)
    assert entry.launch == 2
    return entry


def test_healthy_restart_passes_and_says_nothing(stage: Stage) -> None:
    entry = resume(stage, first=301)
    assert (entry.data["verdict"], entry.data["checks"], entry.data["rows"], entry.step) == ("passed", [], 50, 300)
    assert not [line for line in stage.said if "restart" in line]


@pytest.mark.parametrize(
    ("accident", "name"),
    [
        ({"first": 301, "lr": 3e-4}, "logged learning rate"),
        ({"first": 1}, "first logged step"),
        ({"first": 341}, "first logged step"),
        ({"first": 341, "handed": 300}, "first logged step"),
        ({"first": 301, "shift": 1.0}, "loss after the resume"),
        ({"first": 301, "shift": -0.3}, "loss after the resume"),
    ],
)
def test_accident_is_said_at_once_and_journalled(stage: Stage, accident: dict[str, Any], name: str) -> None:
    entry = resume(stage, **accident)
    found = [e.data for e in read_journal(stage.paths).of_kind("incident") if e.data["kind"] == "lr-not-as-promised"]
    assert [(data["tier"], data["launch"], data["change"]) for data in found] == [("warn", 2, "opened")] * ("lr" in accident)
    assert entry.data["verdict"] == "warned" and name in names(entry)
    assert [line for line in stage.said if line.startswith("chronicle: restart at step") and name in line]


def test_steps_that_the_launch_before_did_not_log_are_no_skipped_ones(stage: Stage) -> None:
    """Its supervisor was killed with printed steps in hand; the next launch was told the checkpoint's step."""
    entry = resume(stage, first=341, handed=340)
    assert (entry.data["verdict"], entry.data["basis"], names(entry)) == ("passed", "handed over", [])


def test_restart_that_ends_early_is_judged_by_the_rows_it_has(stage: Stage) -> None:
    entry = resume(stage, first=301, lr=3e-5, rows=4)
    assert entry.data["rows"] == 4 and names(entry) == ["logged learning rate"]


def test_lr_of_a_rollback_is_what_is_expected(stage: Stage) -> None:
    stage.paths.contract_path.parent.mkdir(parents=True, exist_ok=True)
    stage.paths.contract_path.write_text(json.dumps({"v": 1, "step": 300, "lr_ratio": 0.5, "next_lrs": None}))
    assert resume(stage, first=301, lr=1.5e-3).data["verdict"] == "passed"


@pytest.mark.parametrize(("lr", "verdict"), [(1e-3, "passed"), (3e-3, "warned"), (3e-4, "warned")])
def test_an_lr_that_a_rollback_set_as_a_value_is_what_is_expected(stage: Stage, lr: float, verdict: str) -> None:
    """`rollback --set lr=1e-3`: no factor stands in the contract. The old LR is then not what was promised."""
    stage.paths.contract_path.parent.mkdir(parents=True, exist_ok=True)
    contract = {"v": 1, "step": 300, "lr_ratio": None, "next_lrs": None, "groups": [{"lr": 1e-3, "initial_lr": 3e-3}]}
    stage.paths.contract_path.write_text(json.dumps(contract))
    assert resume(stage, first=301, lr=lr).data["verdict"] == verdict


def points(*spans: Sequence[tuple[int, float, float]]) -> list[Point]:
    rows = [row for span in spans for row in span]
    return [Point(i, step, None, {"lr": lr, "loss": loss}) for i, (step, lr, loss) in enumerate(rows)]


def span(first: int, last: int, lr: float = 1e-3) -> list[tuple[int, float, float]]:
    noise = random.Random(first)
    return [(step, lr, 2 + 3 / math.sqrt(step + 1) + noise.gauss(0, 0.02)) for step in range(first, last + 1)]


def found(log: list[Point]) -> list[str]:
    watch = LogRestart()
    return [check.code for point in log for _, check in watch.feed(point)]


def test_restarts_inside_one_log_are_found_by_their_steps() -> None:
    assert found(points(span(1, 120), span(101, 160), span(151, 200))) == []
    assert found(points(span(1, 120), span(101, 160, lr=1e-5), span(161, 170))) == ["L1"]
    assert "L2" in found(points(span(1, 120), span(1, 60)))
    assert found(points(span(1, 120), span(120, 160))) == []  # one line printed twice


@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_trainer_that_only_prints_is_judged_under_chronicle_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lr: float
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(PRINTS)
    for words in (("1", "200", "1e-3", "0"), ("201", "270", str(lr), "0")):
        command = ["run", "--run", "tr", "--logs", "logs", "--", sys.executable, str(script), *words]
        assert run(command) == 0
    (entry,) = verdicts(RunPaths(tmp_path / "logs" / "tr"))
    assert entry.data["verdict"] == ("passed" if lr == 1e-3 else "warned")
    assert names(entry) == ([] if lr == 1e-3 else ["logged learning rate"])


def test_watch_shows_what_a_foreign_log_says_after_the_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`key=value` lines of two launches in one file, the second with a schedule that began again."""
    rows = [*span(1, 200), *((step, 1e-6 * (step - 180), loss) for step, _, loss in span(181, 240))]
    log = tmp_path / "train.log"
    log.write_text("".join(f"step={step} loss={loss:.4f} lr={lr:.3e}\n" for step, lr, loss in rows))
    assert run(["watch", str(log), "--once"]) == 0
    said = capsys.readouterr().out
    assert "restart at step 180: L1 logged learning rate" in said and "the schedule started again" in said


@pytest.mark.parametrize(
    ("basis", "names_told"), [("manifest", []), ("none", ["logged learning rate"]), (None, ["first logged step"])]
)
def test_what_a_guard_compared_in_memory_is_not_asked_of_the_log(
    stage: Stage, basis: str | None, names_told: list[str]
) -> None:
    """The log may count samples, and scale its LR; without a guard nothing else tells."""
    with stage.start(1, 0) as log:
        stage.train(log, 1, 300)
    stage.writer.append("launch.end", launch=1, data={"last_step": 300})
    noise = random.Random(2)
    with stage.start(2, 300) as log:
        if basis is not None:
            data = {"verdict": "passed", "moment": "before the first step", "mode": "refuse", "basis": basis}
            stage.writer.append("guard.verdict", launch=2, step=300, data=data)
        for step in range(60):
            values = {"loss": 0.42 + noise.gauss(0.0, 0.02), "lr": 3e-3 if basis is None else 3e-2}
            log.write(2400 + 8 * step, values, time=1.7e9 + step)
    LiveWatch(stage.paths, 2, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append).finish()
    (entry,) = verdicts(stage.paths)
    assert [name for name in names(entry) if name != "loss after the resume"] == names_told
