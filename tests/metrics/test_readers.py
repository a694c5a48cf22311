"""Every log that exists is read: printed dialects, tables, JSON, TensorBoard, MLflow; and nothing stops a reader."""

import gzip
import json
import math
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event

from chronicle.errors import ChronicleError
from chronicle.integrations.trackers import read_tracked
from chronicle.metrics.mlflow_log import WhichRun
from chronicle.metrics.readers import UnknownLog, read_log
from chronicle.watch.follow import follow_file
from chronicle.watch.scan import scan_file
from tests.metrics.event_files import write_events
from tests.metrics.printed import parse_log_line, read_lines

LINES = {
    "megatron": (
        "[2025-09-07 23:58:47] iteration      609/  500000 | consumed samples:        19488 | elapsed time per iteration "
        "(ms): 438.3 | learning rate: 5.999998E-05 | global batch size:    32 | lm loss: 6.159759E+00 | loss scale: "
        "131072.0 | grad norm: 1.095 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        609, {"lr": 5.999998e-05, "loss": 6.159759, "loss_scale": 131072.0, "grad_norm": 1.095,
              "number of skipped iterations": 0,
              "number of nan iterations": 0},
    ),
    "megatron behind a rank": (
        "[default7]: [2026-09-14 15:08:27.273656] iteration       44/  102400 | learning rate: 1.289062E-04 | lm loss: "
        "6.457796E+00 | loss scale: 1.0 | grad norm: 4.096 | num zeros: 760881152.0 | params norm: 2241.466 |",
        44, {"lr": 1.289062e-04, "loss": 6.457796, "loss_scale": 1.0, "grad_norm": 4.096},
    ),
    "m4": (
        "iteration: 4875/500000 1% | elapsed_time: 1d | per_token_loss: 1.7109 | lr: 3.75E-05 | num_tokens: 5.1e9 |",
        4875, {"loss": 1.7109, "lr": 3.75e-05},
    ),
    "nanogpt": ("iter 100: loss 3.1234, time 123.45ms, mfu 12.34%", 100, {"loss": 3.1234}),
    "nanochat": (
        "step 00012/21400 (0.06%) | loss: 8.123456 | grad norm: 0.1234 | lrm: 1.00 | dt: 123.45ms | tok/sec: 1,234,567 |",
        12, {"loss": 8.123456, "grad_norm": 0.1234, "tokens_per_second": 1234567.0},
    ),
    "torchtitan": (
        "[titan] 2025-03-01 10:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1234  \x1b[33mgrad_norm:  "
        "1.2345  \x1b[34mmemory: 12.30GiB(12.9%)  \x1b[35mtps: 1,234  \x1b[36mtflops: 50.1  mfu: 16.05%\x1b[39m",
        10, {"loss": 7.1234, "grad_norm": 1.2345, "tokens_per_second": 1234.0},
    ),
    "llm.c": (
        "step    1/19560 | loss 11.009123 (+nanz)| norm 15.3720 (+nanz)| lr 8.57e-07 | 3000.12 ms | 39.9% bf16 MFU | 17 tok/s",
        1, {"loss": 11.009123, "grad_norm": 15.372, "lr": 8.57e-07},
    ),
    "llm.c main.log": ("s:12 trl:10.8556 lr:3e-06 norm:14.84", 12, {"loss": 10.8556, "lr": 3e-06, "grad_norm": 14.84}),
    "modded-nanogpt": ("step:10/5100 train_loss:7.2053 train_time:1000ms step_avg:nanms", 10, {"loss": 7.2053}),
    "deepspeed": (
        "[2025-09-07 23:58:47,001] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]",
        10, {"lr": 1e-05, "skipped": 0},
    ),
    "key=value": ("level=info step=12 loss=2.5 lr=3e-4 grad_norm=nan", 12, {"loss": 2.5, "lr": 3e-4, "grad_norm": math.nan}),
    "trainer": ("{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.5}", 7,
                {"loss": 2.5, "grad_norm": 1.25, "lr": 5e-05, "epoch": 0.5}),
    "ours": ("step 12/600 | loss 0.6931 nats/bit (5.54 bits/byte) | lr 1.0e-03 | grad_norm 0.25 | 80 ms", 12,
             {"loss": 0.6931, "lr": 1.0e-03, "grad_norm": 0.25}),
}  # fmt: skip


@pytest.mark.parametrize("dialect", LINES)
def test_a_printed_line_is_read(dialect: str) -> None:
    line, step, values = LINES[dialect]
    point = parse_log_line(line, counted=7)
    assert point is not None and point.step == step
    assert point.values == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    "line",
    [
        "step 250: train loss 3.2000, val loss 3.3000",
        "step:125/5100 val_loss:6.0123 train_time:1ms",
        "saving checkpoint of step 12",
        "Epoch 3 done, loss of interest was lost",
        "WARNING: loss scale is high at 12",
        "learning rate: 1e-4 is the default",
    ],
)
def test_other_lines_are_no_points(line: str) -> None:
    """A validation loss among training losses would be a level shift a thousand times a run."""
    assert parse_log_line(line) is None


def test_lines_of_one_step_become_one_point() -> None:
    """DeepSpeed prints the LR, the script prints the loss."""
    lines = ["step=10, lr=[1e-05]\n", "step 10 loss 2.5\n", "step=11, lr=[2e-05]\n", "step 11 loss 2.25\n"]
    assert [(p.row, p.step, dict(p.values)) for p in read_lines(lines)] == [
        (0, 10, {"lr": 1e-05, "loss": 2.5}), (1, 11, {"lr": 2e-05, "loss": 2.25}),
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_no_line_stops_the_reader(text: str) -> None:
    """Whatever a terminal, a crash or a foreign encoding left in a log."""
    for line in (text, f"step 3 loss 1.5 {text}", f"{{'loss': {text}}}", f"step {text} loss 1"):
        point = parse_log_line(line)
        assert point is None or isinstance(point.step, int)


@pytest.mark.parametrize("suffix", [".log", ".jsonl", ".csv", ".json", ".tfevents.1.host", ".db"])
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=400))
def test_garbage_is_an_unknown_log_under_any_name(suffix: str, data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One of our errors, never a traceback."""
    path = tmp_path_factory.mktemp("garbage") / f"x{suffix}"
    path.write_bytes(data)
    try:
        points = list(read_log(path))
    except ChronicleError:
        return
    assert all(isinstance(point.step, int) for point in points)


def test_torn_and_foreign_bytes_cost_only_their_line(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    garbage = b"\xff\xfe\x00 garbage \x80\n"
    path.write_bytes(b"iter 1: loss 2.5\n" + garbage + b"iter 2: loss 2.25\nbar 1\rbar 2\riter 3: loss 2.0\niter 4: lo")
    assert [(p.step, p.values["loss"]) for p in read_log(path)] == [(1, 2.5), (2, 2.25), (3, 2.0)]


@pytest.mark.parametrize("torn", [2, 5, 12, -30, -1])
@pytest.mark.parametrize("line", ["iter {0}: loss {0}.5", '{{"step": {0}, "loss": {0}.5}}', "{0},{0}.5"])
def test_torn_gzip_is_read_as_far_as_it_goes(tmp_path: Path, line: str, torn: int) -> None:
    """A job killed while it packed its log: from two bytes to all but the last."""
    lines = [line.format(step) for step in range(1, 2000)]
    whole = gzip.compress("\n".join(["step,loss", *lines] if line.startswith("{0},") else lines).encode())
    path = tmp_path / "train.log.gz"
    path.write_bytes(whole[:torn])
    if torn > 0:
        with pytest.raises(UnknownLog):
            list(read_log(path))
        return
    steps = [point.step for point in read_log(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 1000


def test_utf16_log_of_a_windows_shell_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.log").write_text("iter 1: loss 2.5\niter 2: loss 2.25\n", encoding="utf-16")
    assert [p.step for p in read_log(tmp_path / "t.log")] == [1, 2]


def test_csv_with_empty_cells_nan_and_sessions(tmp_path: Path) -> None:
    """An empty cell was not recorded, `nan` is a value, `event_file` numbers the sessions; a row without a step is a row."""
    path = tmp_path / "c.csv"
    path.write_text("step,loss,grad_norm,event_file,wall_time\n0,2.5,,0,1.5\nx,1,1,0,1\n100,nan,3.5,1,2.5\n")
    points = list(read_log(path))
    assert [(p.row, p.step, p.time, p.launch) for p in points] == [(0, 0, 1.5, 0), (2, 100, 2.5, 1)]
    assert dict(points[0].values) == {"loss": 2.5}
    assert math.isnan(points[1].values["loss"]) and points[1].values["grad_norm"] == 3.5


def test_wandb_downloads_are_read(tmp_path: Path) -> None:
    """The CSV of the web page has the run's name in its columns, and bands that are no channels."""
    table = tmp_path / "w.csv"
    head = '"Step","run-7 - train/loss","run-7 - train/loss__MIN","run-7 - train/loss__MAX"'
    table.write_text(head + '\n"10","2.5","2.5","2.5"\n')
    assert [(p.step, dict(p.values)) for p in read_log(table)] == [(10, {"train/loss": 2.5})]
    history = tmp_path / "h.jsonl"
    record = {"_step": 3, "_timestamp": 1.5, "train/loss": 2.5, "train/global_step": 30, "train": {"lr": 0.5}, "tag": "x"}
    history.write_text(json.dumps(record) + "\n")
    (point,) = read_log(history)
    assert (point.step, point.time, dict(point.values)) == (30, 1.5, {"train/loss": 2.5, "train/lr": 0.5})


def test_trainer_state_of_a_real_run(tmp_path: Path) -> None:
    """Evaluations are no training points, the run's mean at the end is none at all."""
    state = {"log_history": [
        {"step": 10, "loss": 2.5, "learning_rate": 0.5, "grad_norm": 1.5, "epoch": 0.1},
        {"step": 10, "eval_loss": 2.25, "epoch": 0.1},
        {"step": 20, "train_loss": 9.0, "train_runtime": 3.0, "epoch": 0.2},
    ]}  # fmt: skip
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state, indent=2))
    assert [(p.step, dict(p.values)) for p in read_log(path)] == [
        (10, {"loss": 2.5, "learning_rate": 0.5, "grad_norm": 1.5, "eval_loss": 2.25}),
    ]  # fmt: skip


def test_tensorboard_files_of_the_real_writer(tmp_path: Path) -> None:
    """Two sessions in one directory are two launches, whatever order the file system lists them in."""
    writer_module = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    for session, first in ((1, 0), (2, 5)):
        writer = writer_module.SummaryWriter(str(tmp_path / f"s{session}"))
        for step in range(first, first + 3):
            writer.add_scalar("train/loss", 2.0 + session + step / 8, step)
            writer.add_scalar("train/grad_norm", 0.5, step)
        writer.close()
    for number, file in enumerate(sorted(tmp_path.rglob("*tfevents*"))):
        file.rename(file.with_name(f"events.out.tfevents.{1000 + number}.host.1.0"))
    points = list(read_log(tmp_path))
    assert [(p.row, p.launch, p.step, p.values["train/loss"]) for p in points] == [
        (0, 0, 0, 3.0), (1, 0, 1, 3.125), (2, 0, 2, 3.25), (3, 1, 5, 4.625), (4, 1, 6, 4.75), (5, 1, 7, 4.875),
    ]  # fmt: skip
    assert all(p.values["train/grad_norm"] == 0.5 for p in points)


def test_session_start_inside_an_event_file_begins_a_launch(tmp_path: Path) -> None:
    """TensorFlow's supervisor writes SessionLog.START when it resumes into the same directory."""
    path = tmp_path / "events.out.tfevents.1.host"
    loss = {"summary": {"value": [{"tag": "loss", "simple_value": 2.5}]}}
    start = {"session_log": {"status": "START"}}
    said = ((1, loss), (2, loss), (1, start), (1, loss))
    write_events(path, [Event(wall_time=1.0 + step, step=step, **what) for step, what in said])
    assert [(p.launch, p.step, p.values["loss"]) for p in read_log(path)] == [(0, 1, 2.5), (0, 2, 2.5), (1, 1, 2.5)]


@pytest.mark.parametrize("harm", ["damaged", "cut", "nothing"])
def test_what_lies_behind_a_damaged_record_is_said_to_be_unread(harm: str, tmp_path: Path) -> None:
    """Five of ten steps were read, and nothing said so: TensorBoard's reader ends a file at its first bad check sum."""
    path = tmp_path / "events.out.tfevents.1.host"
    write_events(path, [Event(step=at, summary={"value": [{"tag": "loss", "simple_value": 2.5}]}) for at in range(1, 11)])
    data, size = bytearray(path.read_bytes()), path.stat().st_size // 10
    if harm == "damaged":
        data[5 * size + 14] ^= 0xFF
    path.write_bytes(data[:-3] if harm == "cut" else data)
    scan = scan_file(path)
    read, rest = {"damaged": (5, 5 * size), "cut": (9, size - 3), "nothing": (10, 0)}[harm]
    said = [f"the last {rest:,} bytes of `{path.name}`: a record is cut or damaged there"] * (rest > 0)
    assert scan.rows == read and scan.contents.left_out == said
    follower = follow_file(path, once=True)
    follower.look()
    assert follower.contents.to_json()["left_out"] == said
    assert scan.contents.lines()[1:] == [f"not read: {one}" for one in said]
    tracked = read_tracked(path)
    assert tracked is not None and tracked[0].left_out == "".join(said)


def test_mlflow_database_with_one_run_and_with_two(tmp_path: Path) -> None:
    """The table as MLflow 2 and 3 create it; which of two runs is meant is asked, not guessed."""
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as store:
        columns = "key TEXT, value REAL, timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN"
        store.execute(f"CREATE TABLE metrics ({columns})")
        rows = [("train/loss", 2.5, 1000, "aa11", 1, 0), ("lr", 0.5, 1001, "aa11", 1, 0)]
        rows.append(("train/loss", 0.0, 2000, "aa11", 2, 1))
        store.executemany("INSERT INTO metrics VALUES (?,?,?,?,?,?)", rows)
    points = list(read_log(path))
    assert [(p.step, p.time) for p in points] == [(1, 1.0), (2, 2.0)]
    assert dict(points[0].values) == {"train/loss": 2.5, "lr": 0.5} and math.isnan(points[1].values["train/loss"])
    with sqlite3.connect(path) as store:
        store.execute("INSERT INTO metrics VALUES ('loss', 1.0, 1, 'bb22', 1, 0)")
    store.close()
    with pytest.raises(WhichRun, match="2 runs with metrics: aa11, bb22"):
        list(read_log(path))
    assert [p.step for p in read_log(Path(f"{path}#bb"))] == [1]


def test_mlflow_directory_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics" / "train").mkdir(parents=True)
    (tmp_path / "meta.yaml").write_text("run_id: x\n")
    (tmp_path / "metrics" / "train" / "loss").write_text("1000 2.5 1\n2000 2.25 2\nbroken\n")
    (tmp_path / "metrics" / "lr").write_text("1000 0.5 1\n")
    points = [(p.step, dict(p.values)) for p in read_log(tmp_path)]
    assert points == [(1, {"train/loss": 2.5, "lr": 0.5}), (2, {"train/loss": 2.25})]


def test_a_log_without_a_step_says_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("hello\nworld\n")
    with pytest.raises(UnknownLog, match="no step with a loss") as error:
        list(read_log(tmp_path / "x.log"))
    assert "trainer_state.json" in (error.value.remedy or "")
