"""Exports of the toy run, read back by the tools they are for: the headline after the rollback is 8.2 everywhere."""

import csv
import json
import math
from pathlib import Path

import pytest

from chronicle.integrations.importing import read_source
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli

CANONICAL = [(s, 1, round(10 - s / 10, 1)) for s in range(1, 6)] + [(6, 2, 8.4), (7, 2, 8.3), (8, 2, 8.2)]


def test_csv_holds_every_step_of_the_lineage_once(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    rows = list(csv.DictReader(chronicle("export").out.splitlines()))
    assert [(int(r["step"]), int(r["launch"]), float(r["loss"])) for r in rows] == CANONICAL
    assert [float(r["lr"]) for r in rows] == [5e-5] * 5 + [2.5e-5] * 3


def test_all_adds_the_abandoned_steps_and_says_so(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    rows = [json.loads(line) for line in chronicle("export", "-f", "jsonl", "--all").out.splitlines()]
    assert len(rows) == 13
    assert [(r["step"], r["loss"]) for r in rows if not r["kept"]] == [(6, 9.4), (7, 9.3), (8, 100.0), (9, 100.0), (10, 100.0)]


def test_tensorboard_itself_shows_the_new_timeline(tmp_path: Path, chronicle: Cli) -> None:
    """Without the markers it shows a zigzag that ends right; with them the abandoned steps are gone."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    toy_run(tmp_path)
    assert chronicle("export", "-f", "tensorboard", "-o", "tb").code == 0
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")] == [(s, v) for s, _, v in CANONICAL]
    assert events.Scalars("lr")[-1].value == pytest.approx(2.5e-5)


def test_what_tensorboard_gets_comes_back_as_the_same_launches(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    chronicle("export", "-f", "tensorboard", "-o", "tb")
    found = read_source(tmp_path / "tb")
    assert [[p.step for p in launch.points] for launch in found.launches] == [list(range(1, 11)), [6, 7, 8]]


def test_exporting_again_replaces_and_never_deletes_what_is_not_ours(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    chronicle("export", "-f", "tensorboard", "-o", "tb")
    assert chronicle("export", "-f", "tensorboard", "-o", "tb").code == 0
    (tmp_path / "tb" / "precious").write_text("x")
    assert chronicle("export", "-f", "tensorboard", "-o", "tb").code == 1
    assert (tmp_path / "tb" / "precious").exists()


def test_non_finite_values_and_gaps_survive_a_table(tmp_path: Path, chronicle: Cli) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {1: {"loss": math.nan}, 2: {"loss": math.inf, "extra": 1.0}, 3: {}})
    run.end(1, 3)
    rows = list(csv.DictReader(chronicle("export").out.splitlines()))
    assert [(r["loss"], r["extra"]) for r in rows] == [("NaN", ""), ("Infinity", "1.0"), ("", "")]
    assert chronicle("export", "-f", "tensorboard", "-o", "tb").code == 0


def test_a_binary_format_does_not_go_to_a_terminal(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    assert chronicle("export", "-f", "tensorboard").code == 2
