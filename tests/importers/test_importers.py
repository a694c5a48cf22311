"""Importers: nothing lost, nothing invented, and a picture of an old run in one command."""

import json
import random
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event

from chronicle.integrations.importing import read_source
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.story import read_story
from tests.commands.cli import Cli
from tests.metrics.event_files import write_events


def test_what_is_found_at_an_import_is_marked_once(tmp_path: Path, chronicle: Cli) -> None:
    """So that graph, picture and page show it, a notice too; the second import writes nothing."""
    noise = random.Random(0)
    losses = {step: max(0, step - 400) * 0.1 + noise.gauss(2, 0.02) for step in range(1, 501)} | {250: 2.3}
    log = "".join(f"{step},{loss}\n" for step, loss in losses.items())
    (tmp_path / "log.csv").write_text("step,loss\n" + log)
    for _ in range(2):
        chronicle("import", "log.csv", "--run", "spiky", cwd=tmp_path)
        entries = read_journal(RunPaths(tmp_path / "logs" / "spiky")).entries
        quiet, found = [entry for entry in entries if entry.kind == "incident"]
        assert (quiet.step, quiet.data["tier"]) == (250, "notice")
        assert 395 < found.step < 410 and found.launch == 1
    assert "gradual-divergence on loss since step 40" in chronicle("log", "--graph", "--run", "spiky", cwd=tmp_path).out






def test_tensorboard_files_with_a_purge_are_two_launches(tmp_path: Path) -> None:
    """Written by torch's own SummaryWriter with `purge_step`; other readers drop the marker and show a zigzag."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for name, steps, purge in (("a", range(1, 11), None), ("b", range(6, 9), 6)):
        writer = tensorboard.SummaryWriter(tmp_path / "tb", purge_step=purge, filename_suffix=f".{name}")
        for step in steps:
            writer.add_scalar("loss", 100.0 if step >= 8 and name == "a" else 10 - step / 10, step)
            writer.add_scalar("lr", 5e-5, step, new_style=True)
        writer.close()
    found = read_source(tmp_path / "tb")
    assert [[p.step for p in launch.points] for launch in found.launches] == [list(range(1, 11)), [6, 7, 8]]
    assert found.launches[1].points[-1].values == {"loss": pytest.approx(9.2), "lr": pytest.approx(5e-5)}


def test_a_torn_event_file_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    events = [Event(wall_time=1.0, step=step, summary={"value": [{"tag": "loss", "simple_value": 2.5}]}) for step in (5, 6)]
    write_events(path, events)
    path.write_bytes(path.read_bytes()[:-9])
    (launch,) = read_source(path).launches
    assert [(p.step, p.values) for p in launch.points] == [(5, {"loss": 2.5})]


def test_a_log_that_goes_back_is_cut_into_launches_and_told_by_its_lineage(tmp_path: Path, chronicle: Cli) -> None:
    rows = [(s, 100.0 if s >= 8 else 10 - s / 10) for s in range(1, 11)] + [(6, 8.4), (7, 8.3), (8, 8.2)]
    (tmp_path / "wandb.csv").write_text("_step,loss\n" + "".join(f"{s},{v}\n" for s, v in rows))
    chronicle("import", "wandb.csv", "--run", "toy")
    shown = chronicle("status", "--run", "toy", "--json").json
    assert (shown["step"], shown["loss"], shown["launch"]) == (8, 8.2, 2)


def test_points_without_a_time_stay_without_one(tmp_path: Path, chronicle: Cli) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2.0\n2,NaN\n")
    chronicle("import", "log.csv", "--run", "r")
    lines = (tmp_path / "logs" / "r" / "launches" / "0001" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step":1,"loss":2.0}', '{"step":2,"loss":"NaN"}']


def test_a_log_that_begins_at_step_0_keeps_its_first_row(tmp_path: Path, chronicle: Cli) -> None:
    """Its launch started from scratch: nothing was resumed, and nothing about it is inferred."""
    (tmp_path / "progress.csv").write_text("step,loss\n" + "".join(f"{step},{9 - step / 10}\n" for step in range(0, 50, 10)))
    chronicle("import", "progress.csv", "--run", "r")
    story = read_story(RunPaths(tmp_path / "logs" / "r"))
    assert [(one.first, one.last) for one in story.lineage.kept] == [(0, 40)]
    assert not story.launches[0].resumed and story.lineage.doubt == ""
    exported = chronicle("export", "--run", "r", "--format", "jsonl").out.splitlines()
    assert [json.loads(line)["step"] for line in exported] == [0, 10, 20, 30, 40]


SENSELESS = [("x.jsonl", "{broken"), ("x.csv", ""), ("trainer_state.json", "[]"), ("x.md", "")]


@pytest.mark.parametrize(("name", "content"), SENSELESS)
def test_a_source_without_sense_is_one_sentence_and_no_run(name: str, content: str, tmp_path: Path, chronicle: Cli) -> None:
    (tmp_path / name).write_text(content)
    done = chronicle("import", name, "--run", "r")
    assert done.code in (1, 2) and done.err.startswith("error: ") and "Traceback" not in done.err
    assert "--loss" not in done.err  # which `import` does not have
    assert not (tmp_path / "logs" / "r").exists()


def test_a_missing_source_is_one_sentence(chronicle: Cli) -> None:
    assert chronicle("import", "nowhere", "--run", "r").err.startswith("error: cannot import `nowhere`")


def test_unknown_format_is_refused_with_the_list(tmp_path: Path, chronicle: Cli) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n")
    done = chronicle("import", "a.csv", "--as", "moon", "--run", "r")
    assert done.code == 1 and "entries, events, log" in done.err


def test_read_source_tells_entries_from_metrics(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step":1,"loss":2.0}\n')
    (tmp_path / "e.jsonl").write_text('{"kind":"note","title":"x","v":1}\n')
    assert read_source(tmp_path / "m.jsonl").format == "log"
    assert read_source(tmp_path / "e.jsonl").format == "entries"


def test_a_table_of_incidents_of_two_runs_is_no_table_of_curves(tmp_path: Path, chronicle: Cli) -> None:
    source = tmp_path / "incidents.csv"
    source.write_text("run,date,step,event,action,rollback_to\na,2026-01-01,10,spike,none,5\nb,2026-01-02,20,spike,none,7\n")
    assert chronicle("import", str(source), "--run", "events").code == 0
    assert len(list(read_journal(RunPaths(tmp_path / "logs" / "events")).of_kind("incident"))) == 2
