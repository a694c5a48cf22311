"""`spikes`, `watch`: exit codes, JSON as promised, hooks, and no heavy import on the way."""

import dataclasses
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from chronicle.cli.options import AtCheckpoints
from chronicle.cli.watch import sparkline, watch
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.metrics.log import MetricsWriter
from chronicle.watch.follow import follow_file
from chronicle.watch.live import Hooks
from chronicle.watch.scan import Spark
from rollback.detect import Tier
from tests.builders.story_runs import toy_run
from tests.detect.series import fold, noise

FIELDS = {
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster", "evidence", "excess", "sigmas",
}  # fmt: skip


def write(path: Path, losses: list[float]) -> Path:
    with MetricsWriter(path) as log:
        for step, loss in enumerate(losses):
            log.write(step, {"loss": loss}, time=float(step))
    return path


def press_ctrl_c(_: float) -> None:
    raise KeyboardInterrupt


SPIKE = [x + (1.0 if row == 200 else 0.0) for row, x in enumerate(noise(400))]
DIVERGENCE = [x + max(0.0, 0.01 * (row - 300)) for row, x in enumerate(noise(500))]


def test_json_has_the_promised_fields(tmp_path: Path) -> None:
    result = watch([str(write(tmp_path / "a.jsonl", SPIKE))], once=True)
    assert isinstance(result.data, dict)
    assert set(result.data) == {"file", "rows", "read", "events", "proposals"}
    (event,) = result.data["events"]
    assert set(event) == FIELDS
    assert json.loads(json.dumps(result.data)) == result.data
    assert (event["kind"], event["tier"], event["onset_row"]) == ("instant-spike", "notice", 200)


def test_two_files_are_two_objects(tmp_path: Path) -> None:
    result = watch([str(write(tmp_path / "a.jsonl", SPIKE)), str(write(tmp_path / "b.jsonl", DIVERGENCE))], once=True)
    assert isinstance(result.data, list) and [scan["rows"] for scan in result.data] == [400, 500]
    assert [bool(scan["proposals"]) for scan in result.data] == [False, True]


def test_fail_means_warn_or_above(tmp_path: Path) -> None:
    """A recovered spike is no reason for CI to fail, a divergence is."""
    assert watch([str(write(tmp_path / "a.jsonl", SPIKE))], once=True, fail=True).exit_code == 0
    assert watch([str(write(tmp_path / "b.jsonl", DIVERGENCE))], once=True, fail=True).exit_code == 5
    assert watch([str(tmp_path / "b.jsonl")], once=True).exit_code == 0


def test_proposal_names_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    """Without a directory of checkpoints there is no target, and it says so."""
    result = watch([str(write(tmp_path / "b.jsonl", DIVERGENCE))], once=True)
    assert isinstance(result.data, dict)
    assert result.data["proposals"][0]["target_step"] is None
    assert "no verified checkpoint" in result.text


@pytest.mark.parametrize(("name", "error"), [("no/such/file", UsageProblem), ("nosuchrun", ChronicleError)])
def test_missing_log_is_one_sentence(
    name: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=name):
        watch([name], once=True)


def test_a_spark_keeps_every_peak_in_bounded_slices() -> None:
    """A spike of one point in ten thousand is seen in the line of text."""
    spark = Spark()
    for row in range(50_000):
        spark.feed(row, 9.0 if row == 31_234 else math.nan if row == 40_000 else 1.0 + (row % 10) / 10)
    found = spark.line()
    assert 36 <= len(found) <= 72 and [row for row, _ in found] == sorted(row for row, _ in found)
    assert max(high for _, high in found if high == high) == 9.0
    assert sum(high != high for _, high in found) == 1


def test_sparkline_shows_what_is_not_finite() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 3.0]) == "▁█✗█"


def test_watch_once_reads_printed_logs(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"iter {step}: loss {loss:.6f}, time 1ms\n" for step, loss in enumerate(SPIKE)))
    result = watch([str(path)], once=True)
    assert isinstance(result.data, dict) and result.data["rows"] == 400
    assert [event["kind"] for event in result.data["events"]] == ["instant-spike"]


def test_watch_follows_a_table_that_grows_is_cut_and_replaced(tmp_path: Path) -> None:
    """Half lines wait, a file that was truncated or put in another's place starts anew, its header included."""
    path = tmp_path / "x.csv"
    path.write_text("step,loss\n1,2.5\n2,2.")
    follower = follow_file(path)

    def steps() -> list[int]:
        before = follower.rows
        follower.look()
        assert follower.last is not None
        return [follower.rows - before, follower.last.step]

    assert steps() == [1, 1]
    with open(path, "a") as log:
        log.write("25\n3,2.0\nnonsense\n")
    assert steps() == [2, 3]
    path.write_text("loss;step\n2,5;4\n")
    assert steps() == [1, 4] and follower.last is not None and follower.last.values == {"loss": 2.5}
    (tmp_path / "y.csv").write_text("step,loss\n" + "".join(f"{step},2\n" for step in range(5, 25)))
    (tmp_path / "y.csv").rename(path)
    assert steps() == [20, 24]


GROWING = {
    "ours.jsonl": '{{"step":{i},"t":1.5,"loss":{x}}}\n', "other.jsonl": '{{"_step":{i},"train/loss":{x}}}\n',
    "table.csv": "{i},{x}\n", "table.tsv": "{i}\t{x}\n", "nanogpt.log": "iter {i}: loss {x}, time 1ms\n",
    "megatron.log": " iteration {i}/ 9 | lm loss: {x} | grad norm: 1.0 |\n", "trainer.log": "{{'loss': {x}, 'epoch': 0.1}}\n",
    "bar.log": "\rstep {i} loss {x}",
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_watch_reads_every_dialect_that_grows(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    head = {"table.csv": "step,loss\n", "table.tsv": "step\tloss\n"}.get(name, "")
    path.write_text(head + "".join(GROWING[name].format(i=step, x=x) for step, x in enumerate(SPIKE)) + "\r")
    result = watch([str(path)], once=True)
    assert isinstance(result.data, dict)
    assert [event["kind"] for event in result.data["events"]] == ["instant-spike"]
    assert (result.data["read"]["first_step"], result.data["read"]["last_step"]) == (0, len(SPIKE) - 1)


def test_watch_reads_again_what_does_not_grow_by_lines(tmp_path: Path) -> None:
    """trainer_state.json is written anew with every save: only what is new is folded."""
    path = tmp_path / "trainer_state.json"

    def save(count: int) -> None:
        records = [{"step": step, "loss": loss} for step, loss in enumerate(SPIKE[:count])]
        path.write_text(json.dumps({"log_history": records}, indent=1))

    save(150)
    follower = follow_file(path, once=True)
    assert follower.look() == [] and follower.rows == 150
    save(300)
    assert [event.onset_row for event in follower.look()] == [200] and follower.rows == 300


def test_watch_follows_event_files_as_tensorboard_writes_them(tmp_path: Path) -> None:
    """Named by the run's directory or by one above it; the newest step waits until its last channel is there."""
    writing = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto import event_pb2, summary_pb2

    writer = writing.EventFileWriter(str(tmp_path / "runs" / "first"))

    def write_until(first: int, last: int) -> None:
        for step in range(first, last):
            for tag, value in (("train/loss", SPIKE[step]), ("train/lr", 1e-3)):
                summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(event_pb2.Event(wall_time=float(step), step=step, summary=summary))
        writer.flush()

    write_until(0, 150)
    result = watch([str(tmp_path / "runs")], once=True)
    assert isinstance(result.data, dict) and result.data["rows"] == 150
    follower = follow_file(tmp_path / "runs")
    assert follower.look() == [] and follower.rows == 149
    write_until(150, 300)
    assert [event.onset_row for event in follower.look()] == [200] and follower.rows == 299
    assert follower.last is not None and follower.last.values.keys() == {"train/loss", "train/lr"}
    writer.close()


def test_watch_follows_a_store_of_mlflow_that_is_empty_first_and_locked_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronicle.metrics.mlflow_log.LOCK_SECONDS", 0.05)
    path = tmp_path / "mlflow.db"
    store = sqlite3.connect(path, isolation_level=None)
    store.execute("CREATE TABLE metrics(key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER, is_nan INTEGER)")

    def write_until(first: int, last: int, run: str = "abc") -> None:
        rows = [("loss", SPIKE[step], 1000 * step, run, step, 0) for step in range(first, last)]
        store.execute("BEGIN")
        store.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
        store.execute("COMMIT")

    follower = follow_file(path, once=True)
    assert follower.look() == [] and follower.rows == 0
    write_until(0, 150)
    store.execute("BEGIN EXCLUSIVE")
    assert follower.look() == [] and follower.rows == 0
    store.execute("COMMIT")
    assert follower.look() == [] and follower.rows == 150
    write_until(150, 300)
    assert [event.onset_row for event in follower.look()] == [200] and follower.rows == 300
    write_until(0, 20, "def")
    with pytest.raises(ChronicleError, match="holds 2 runs with metrics: abc, def"):
        follower.look()
    result = watch([f"{path}#abc"], once=True)
    assert isinstance(result.data, dict) and result.data["rows"] == 300
    named = follow_file(Path(f"{path}#abc"), once=True)
    assert named.look() != [] and named.rows == 300
    write_until(300, 320)
    named.look()
    assert named.rows == 320
    store.close()


def test_hook_of_the_tier_is_called_with_the_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_propose gets the facts in its environment; a hook that fails is said and changes nothing."""
    out = tmp_path / "out"
    hook = f"echo $CHRONICLE_EVENT_KIND $CHRONICLE_EVENT_ONSET >> {out}"
    (tmp_path / "chronicle.toml").write_text(f'run = "r"\non_propose = "{hook}"\non_notice = "exit 3"\n')
    write(tmp_path / "logs" / "r" / "launches" / "0001" / "metrics.jsonl", DIVERGENCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chronicle.cli.watch.time", SimpleNamespace(sleep=press_ctrl_c))  # no other module's sleep
    assert watch(None, once=True).exit_code == 0 and not out.exists()  # a second look at an old log calls nobody
    assert watch(None).exit_code == 0
    kind, onset = out.read_text().split()
    assert kind == "gradual-divergence" and 250 <= int(onset) <= 340


def test_hook_given_as_a_flag_gets_the_event_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard input and in the environment the same record; called once though the event changes many times."""
    monkeypatch.chdir(tmp_path)
    log = write(tmp_path / "b.jsonl", DIVERGENCE)
    watch([str(log)], once=True, on_propose='cat >> in.json; echo "$CHRONICLE_EVENT" >> env.json')
    (line,) = (tmp_path / "in.json").read_text().splitlines()
    assert (tmp_path / "env.json").read_text().splitlines() == [line]
    assert (json.loads(line)["tier"], json.loads(line)["channels"]) == ("propose", ["loss"])


def test_hooks_never_hold_up_or_end_the_watch(capfd: pytest.CaptureFixture[str]) -> None:
    """One that hangs, one that fails, one that does not exist, one that never reads: all only said."""
    said: list[str] = []
    hooks = Hooks({"on_notice": "sleep 30", "on_warn": "exit 4", "on_propose": "no-such-command"}, said.append)
    event = fold(SPIKE)[0]
    begin = time.monotonic()
    hooks.call(event)
    for tier in (Tier.WARN, Tier.PROPOSE):
        hooks.call(dataclasses.replace(event, tier=tier))
    assert time.monotonic() - begin < 5
    hooks.finish(1.0)
    assert sorted(line.split(" process")[0] for line in said) == [
        "hook on_notice still runs as", "hook on_propose ended with code 127", "hook on_warn ended with code 4",
    ]  # fmt: skip
    os.killpg(int(said[-1].rsplit(" ", 1)[-1]), signal.SIGKILL)


def test_nothing_heavy_is_imported_to_list_spikes(tmp_path: Path) -> None:
    """`spikes` runs on a login node: no torch, mlflow, numpy, pydantic, matplotlib; metrics and detector no typer."""
    path = write(tmp_path / "a.jsonl", SPIKE)
    code = (
        "import sys; import chronicle.metrics.readers, rollback.detect, rollback.propose\n"
        "assert 'typer' not in sys.modules\n"
        f"from chronicle.cli.watch import watch; watch([{str(path)!r}], once=True)\n"
        "print([m for m in ('torch','mlflow','numpy','pydantic','matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metrics_package_knows_only_the_table_of_channel_names_of_rollback() -> None:
    """A trainer pays for a write, and `status` for a few names: neither the detector nor the file readers are imported."""
    code = "import sys, chronicle.metrics.readers; print(*(m for m in sys.modules if m.split('.')[0] == 'rollback'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"rollback", "rollback.channels", "rollback.errors", "rollback.findings"}
    code = "import sys, chronicle.metrics; print(*(m for m in sys.modules if m.split('.')[0] == 'rollback'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_ctrl_c_ends_a_watch_with_its_summary_and_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "error: interrupted", 130: the usual end of a watch is no error."""
    monkeypatch.setattr("chronicle.cli.watch.time", SimpleNamespace(sleep=press_ctrl_c))  # no other module's sleep
    result = watch([str(write(tmp_path / "a.jsonl", SPIKE))])
    assert result.exit_code == 0 and "instant-spike" in result.text and "\n  read: metrics.jsonl" in result.text


@pytest.mark.timeout(60)
def test_a_watch_of_a_run_that_has_ended_says_so_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = toy_run(tmp_path)
    result = watch(["toy"], interval=0.1, at=AtCheckpoints(logs=story.paths.run_dir.parent))
    assert "step 8" in result.text and "watching toy: launch 2 ended" in capsys.readouterr().err


def test_an_imported_run_is_scanned_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chronicle.cli.importing import import_
    from chronicle.cli.options import InRun

    monkeypatch.chdir(tmp_path)
    result = import_([str(write(tmp_path / "old.jsonl", DIVERGENCE))], at=InRun(run="old"))
    assert "scanned: 1 event\n" in result.text and "propose" in result.text
    assert isinstance(result.data, dict) and [event["tier"] for event in result.data["events"]] == ["propose"]
