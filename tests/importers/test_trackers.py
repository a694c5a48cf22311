"""Stores of other trackers: every run of a store is a run, and each point is the one that the tracker recorded."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event

from chronicle import runs
from chronicle.integrations.trackers import read_tracked
from chronicle.journal import read_journal
from chronicle.metrics.readers import read_log
from chronicle.metrics.wandb_log import read_session, read_wandb
from chronicle.paths import RunPaths
from tests.commands.cli import Cli
from tests.importers.wandb_files import alert, finished, history, run_record, write_session
from tests.metrics.event_files import write_events


def test_a_run_of_wandb_with_its_settings_alerts_and_end(tmp_path: Path, chronicle: Cli) -> None:
    records = [run_record("abc123", "base run", {"lr": 1e-3, "api_key": "hunter2"}, 1_700_000_000)]
    records += [history({"train/loss": 3.0 - step / 100, "lr": 1e-3, "_step": step, "_timestamp": 1.7e9 + 0.5 + step,
                         "_runtime": 1}) for step in range(100)]  # fmt: skip
    records += [history({"train/loss": math.nan, "_step": 100}), alert("loss is NaN", "look"), finished(1)]
    write_session(tmp_path, "abc123", records)
    done = chronicle("import", "wandb", "--json", cwd=tmp_path)
    assert done.code == 0 and done.json["imports"][0]["points"] == 101
    run = runs.open(tmp_path / "logs" / "base-run")
    curve = run.curve("train/loss")
    assert curve.step == list(range(101)) and curve.value[:100] == [3.0 - step / 100 for step in range(100)]
    assert math.isnan(curve.value[-1]) and curve.time[3] == 1_700_000_003.5
    assert "_runtime" not in run.channels
    assert run.settings()["lr"] == 1e-3 and "hunter2" not in str(run.settings())
    assert run.launches[0].exit_code == 1
    told = [entry.title for entry in run.entries if entry.kind == "incident"]
    assert told == ["loss is NaN (W&B)", "propose: nan on train/loss since step 100, diverging"]
    assert "hunter2" not in "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.jsonl"))
    assert [event["kind"] for event in done.json["events"]] == ["nan"]


def test_sessions_of_one_id_are_launches_and_other_ids_are_runs(tmp_path: Path, chronicle: Cli) -> None:
    """The trainer's own step counts where W&B's counts log calls: the second session began at 5, not at 0."""
    write_session(tmp_path, "b-second", [run_record("one", "same", {}, 2000)] + [
        history({"train/loss": 1.0, "train/global_step": step, "_step": step - 5}) for step in range(5, 9)
    ])  # fmt: skip
    first = [run_record("one", "same", {}, 1000)]
    first += [history({"train/loss": 2.0, "train/global_step": step, "_step": step}) for step in range(8)]
    write_session(tmp_path, "a-first", [*first, finished()])
    other = [run_record("two", "same", {}, 1500), history({"loss": 7.0, "_step": 0})]
    write_session(tmp_path, "c-other", other)
    done = chronicle("import", ".", cwd=tmp_path)
    assert done.code == 0 and "a session has no end: it was stopped, or still writes" in done.out
    run = runs.open(tmp_path / "logs" / "same-one")
    assert [launch.number for launch in run.launches] == [1, 2]
    assert run.curve("train/loss").value == [2.0] * 5 + [1.0] * 4
    assert runs.open(tmp_path / "logs" / "same-two").curve().value == [7.0]


@pytest.mark.parametrize("harm", ["cut", "flipped"])
def test_a_session_whose_writer_was_stopped_is_read_to_its_last_whole_record(tmp_path: Path, harm: str) -> None:
    """Records over blocks of 32 KiB are put together; a half or damaged one ends the file, and invents nothing."""
    records = [history({"loss": float(step), "_step": step, "text": "x" * 3000}) for step in range(100)]
    path = write_session(tmp_path, "r", [run_record("r", "r", {}, 1), *records])
    whole = path.read_bytes()
    assert [point.values["loss"] for point in read_session(path).points] == [float(step) for step in range(100)]
    assert read_session(path).unread == 0
    if harm == "cut":
        path.write_bytes(whole[: len(whole) * 2 // 3])
    else:
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    session, left_out = read_session(path), list[str]()
    assert 20 < len(session.points) < 80 and not session.is_whole
    assert len(list(read_wandb(path, left_out))) == len(session.points)
    assert 0 < session.unread < len(whole) and f"the last {session.unread:,} bytes" in left_out[0]
    assert [point.values["loss"] for point in session.points] == [float(step) for step in range(len(session.points))]


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path, chronicle: Cli) -> None:
    (tmp_path / "run-x.wandb").write_bytes(b"not a log")
    done = chronicle("import", "run-x.wandb", cwd=tmp_path)
    assert done.code == 2 and "is no log of W&B" in done.err and "Traceback" not in done.err
    with pytest.raises(Exception, match="no log of W&B"):
        list(read_wandb(tmp_path / "run-x.wandb"))
    write_session(tmp_path, "empty", [run_record("r", "r", {}, 1)])
    done = chronicle("import", "wandb", cwd=tmp_path)
    assert done.code == 2 and "no run with a logged number (read as wandb)" in done.err


def test_what_the_real_wandb_wrote_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    script = (
        "import wandb\n"
        "run = wandb.init(mode='offline', project='p', name='real', config={'lr': 0.5}, dir='.')\n"
        "for step in range(50):\n    run.log({'loss': 2.5 - step / 64, 'lr': 0.5}, step=step)\n"
        "run.finish()\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    quiet = {**clean, "WANDB_SILENT": "true", "WANDB_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=quiet, check=True, timeout=120, capture_output=True
    )
    (one,) = read_tracked(tmp_path) or []
    (launch,) = one.found.launches
    assert [(point.step, dict(point.values)) for point in launch.points] == [
        (n, {"loss": 2.5 - n / 64, "lr": 0.5}) for n in range(50)
    ]
    assert one.name == "real" and launch.settings == {"lr": 0.5} and launch.exit_code == 0


def trackio_project(path: Path, *, ids: bool = True) -> None:
    """The tables as trackio 0.43 makes them, or as versions before 0.24 did, without ids."""
    with sqlite3.connect(path) as store:
        key = "run_id TEXT, " if ids else ""
        store.execute(
            f"CREATE TABLE metrics (id INTEGER PRIMARY KEY, {key}timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        store.execute(
            f"CREATE TABLE configs (id INTEGER PRIMARY KEY, {key}run_name TEXT, config TEXT, created_at TEXT)"
        )
        if ids:
            store.execute("CREATE TABLE alerts (id INTEGER PRIMARY KEY, run_id TEXT, timestamp TEXT, run_name TEXT, "
                          "title TEXT, text TEXT, level TEXT, step INTEGER)")  # fmt: skip
            store.execute(
                "INSERT INTO alerts VALUES (1, 'id-a', '2026-01-01T00:00:09+00:00', 'a', 'up', 'look', 'error', 4)"
            )
        for name in ("a", "b"):
            own = (f"id-{name}",) if ids else ()
            marks = ",".join("?" * (len(own) + 4))
            for step in range(6):
                values = {"train/loss": 2.0 + step, "odd": "NaN" if step == 3 else step, "words": "hello"}
                row = (*own, f"2026-01-01T00:00:0{step}+00:00", name, step, json.dumps(values))
                store.execute(f"INSERT INTO metrics VALUES (NULL, {marks})", row)
            config = json.dumps({"lr": 0.25, "_Group": None, "_Created": "x"})
            store.execute(
                f"INSERT INTO configs VALUES (NULL, {','.join('?' * (len(own) + 3))})", (*own, name, config, "x")
            )
    store.close()


@pytest.mark.parametrize("ids", [True, False])
def test_a_project_of_trackio_is_as_many_runs_as_it_holds(tmp_path: Path, chronicle: Cli, ids: bool) -> None:
    trackio_project(tmp_path / "p.db", ids=ids)
    done = chronicle("import", "p.db", cwd=tmp_path)
    assert done.code == 0 and "p.db: 2 runs, 12 points (trackio)" in done.out
    run = runs.open(tmp_path / "logs" / "a")
    assert run.curve().value == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and run.curve().time[1] == 1767225601.0
    assert [math.isnan(value) for value in run.curve("odd").value] == [False, False, False, True, False, False]
    assert run.settings() == {"lr": 0.25} and set(run.channels) == {"train/loss", "odd"}
    incidents = [(entry.title, entry.data["tier"], entry.step) for entry in run.entries if entry.kind == "incident"]
    assert incidents == ([("up (trackio)", "warn", 4)] if ids else [])


def test_one_run_of_a_project_and_a_second_import(tmp_path: Path, chronicle: Cli) -> None:
    trackio_project(tmp_path / "p.db")
    assert chronicle("import", "p.db#b", cwd=tmp_path).code == 0
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["b"]
    assert "imported before, nothing changed" in chronicle("import", "p.db#b").out
    with sqlite3.connect(tmp_path / "p.db") as store:
        store.execute(
            "INSERT INTO metrics VALUES (NULL, 'id-b', '2026-01-01T00:00:07+00:00', 'b', 7, '{\"train/loss\": 1}')"
        )
    store.close()
    again = chronicle("import", "p.db#b")
    assert "it has other points now: nothing changed" in again.out
    assert len(runs.open(tmp_path / "logs" / "b").curve()) == 6
    missing = chronicle("import", "p.db#c")
    assert missing.code == 2 and "holds no run `c`: its runs are a, b" in missing.err
    spikes = chronicle("spikes", "p.db")
    assert spikes.code == 2 and "name one: p.db#RUN" in spikes.err


def test_no_run_of_another_origin_is_written_to(tmp_path: Path, chronicle: Cli) -> None:
    trackio_project(tmp_path / "p.db")
    assert chronicle("note", "mine", "--run", "b", cwd=tmp_path).code == 0
    done = chronicle("import", "p.db")
    assert done.code == 3 and "`b` in" in done.err and "nothing was imported" in done.err
    assert not (tmp_path / "logs" / "a").exists()
    assert len(read_journal(RunPaths(tmp_path / "logs" / "b")).entries) == 1
    assert chronicle("import", "p.db", "--run", "old").code == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["b", "old-a", "old-b"]


def test_a_panel_of_two_runs_is_two_runs(tmp_path: Path, chronicle: Cli) -> None:
    head = '"Step","run - a - train/loss","run - a - train/loss__MIN","run - a - train/loss__MAX","b - train/loss"'
    (tmp_path / "panel.csv").write_text(
        head + '\n"1","2.5","2","3","3.5"\n"2","","","","3.25"\n"3","2.25","2","3",""\n'
    )
    assert chronicle("import", "panel.csv", "--run", "p", cwd=tmp_path).code == 0
    first, second = (runs.open(tmp_path / "logs" / name) for name in ("p-run-a", "p-b"))
    assert (first.curve().step, first.curve().value, first.channels) == ([1, 3], [2.5, 2.25], ("train/loss",))
    assert (second.curve().step, second.curve().value) == ([1, 2], [3.5, 3.25])


def test_a_table_with_a_run_column_long_or_wide(tmp_path: Path) -> None:
    """In a long table the values of several tags stand in one column: read as one channel they were a curve that never was."""
    (tmp_path / "long.csv").write_text(
        "run,tag,step,value\na,loss,1,2.5\na,lr,1,0.1\nb,loss,1,3.5\na,loss,2,2.25\nb,lr,1,0.2\n"
    )
    found = {one.name: [(p.step, dict(p.values)) for launch in one.found.launches for p in launch.points]
             for one in read_tracked(tmp_path / "long.csv") or []}  # fmt: skip
    assert found == {"a": [(1, {"loss": 2.5, "lr": 0.1}), (2, {"loss": 2.25})], "b": [(1, {"loss": 3.5, "lr": 0.2})]}
    (tmp_path / "wide.tsv").write_text("run_name\tstep\tloss\tlr\na\t1\t2.5\t0.1\nb\t1\t3.5\t\n")
    wide = {one.name: [dict(p.values) for launch in one.found.launches for p in launch.points]
            for one in read_tracked(tmp_path / "wide.tsv") or []}  # fmt: skip
    assert wide == {"a": [{"loss": 2.5, "lr": 0.1}], "b": [{"loss": 3.5}]}
    (tmp_path / "one.csv").write_text("run,step,loss\na,1,2.5\na,2,2.25\n")
    assert read_tracked(tmp_path / "one.csv") is None


def test_a_long_table_sorted_by_tag_begins_no_launch_with_each_tag(tmp_path: Path) -> None:
    """As `melt` and Aim write it. Read in the order of its rows it was a zigzag, and the LR stood in the curve of the loss."""
    rows = [("train/loss", step, 4 - step / 10) for step in (*range(10), *range(5, 12))]
    rows += [("lr", step, 0.1) for step in (*range(10), *range(5, 12))] + [("val/loss", step, 3.5) for step in (2, 8)]
    text = "".join(f"{tag},{step},{value}\n" for tag, step, value in rows)
    (tmp_path / "one.csv").write_text(f"tag,step,value\n{text}")
    (one,) = read_tracked(tmp_path / "one.csv") or []
    assert one.name == "one"
    first, second = [[(p.step, *sorted(p.values)) for p in launch.points] for launch in one.found.launches]
    assert [step for step, *_ in first] == [*range(10)] and [step for step, *_ in second] == [*range(5, 12)]
    assert [point for point in first if "val/loss" in point] == [(step, "lr", "train/loss", "val/loss") for step in (2, 8)]
    assert second[3] == (8, "lr", "train/loss")  # which pass a validation that was not repeated belongs to is not known
    assert [point.values for point in read_log(tmp_path / "one.csv")][1] == {"train/loss": 3.9, "lr": 0.1}
    (tmp_path / "named.csv").write_text("run,tag,step,value\n" + "".join(f"r,{line}\n" for line in text.splitlines()))
    assert [run.name for run in read_tracked(tmp_path / "named.csv") or []] == ["r"]


def event_file(path: Path, began: float, steps: range) -> None:
    """An event file with one scalar a step, a second apart."""
    path.mkdir(parents=True)
    scalars = {"value": [{"tag": "loss", "simple_value": 2.0}]}
    events = [Event(wall_time=began + step, step=step, summary=scalars) for step in steps]
    write_events(path / f"events.out.tfevents.{int(began)}.host", events)


def test_directories_of_tensorboard_that_were_written_together_are_runs(tmp_path: Path, chronicle: Cli) -> None:
    """Launches of one run never write at the same time. Written one after the other they may be either, and that is said."""
    event_file(tmp_path / "tb" / "a", 1000.0, range(20))
    event_file(tmp_path / "tb" / "b", 1010.0, range(20))
    assert [one.name for one in read_tracked(tmp_path / "tb") or []] == ["a", "b"]
    event_file(tmp_path / "hf" / "Nov01", 1000.0, range(20))
    event_file(tmp_path / "hf" / "Nov02", 2000.0, range(10, 20))
    done = chronicle("import", "hf", "--run", "hf", cwd=tmp_path)
    assert (
        done.code == 0 and "2 directories, one written after the other, are taken for launches of one run" in done.out
    )
    assert [launch.number for launch in runs.open(tmp_path / "logs" / "hf").launches] == [1, 2]


def test_runs_of_an_mlflow_file_store(tmp_path: Path, chronicle: Cli) -> None:
    for name, loss in (("alpha", 2.5), ("beta", 3.5)):
        place = tmp_path / "mlruns" / "0" / f"{name}-uuid"
        (place / "metrics").mkdir(parents=True)
        (place / "meta.yaml").write_text(f"run_name: {name}\nlifecycle_stage: active\n")
        (place / "metrics" / "loss").write_text(f"1000 {loss} 1\n2000 {loss / 2} 2\n")
    done = chronicle("import", "mlruns", cwd=tmp_path)
    assert done.code == 0 and "mlruns: 2 runs, 4 points (mlflow)" in done.out
    assert runs.open(tmp_path / "logs" / "beta").curve().value == [3.5, 1.75]
