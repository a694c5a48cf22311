"""A log that is read says what it held; what is no loss, no step or another series is not taken for one."""

import random
from pathlib import Path

import pytest

from chronicle.metrics.log import Point
from chronicle.metrics.readers import AnyLine, Contents, NothingToWatch, read_log

LOSSES = [1.0 + 2.0 / (1 + row / 30) + random.Random(row).gauss(0.0, 0.02) for row in range(60)]


def read(path: Path, text: str) -> list[Point]:
    path.write_text(text)
    return list(read_log(path))


def test_two_values_of_one_step_are_two_series(tmp_path: Path) -> None:
    """A window's median and the running mean in a second line: they alternated in one series of twice the points."""
    text = "".join(
        f"INFO: iter: {row} time: 0.1 loss: {x:.4f} lr: 0.0096\n"
        f':::MLLOG {{"event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {{"loss": {x + 0.3:.6f}}},'
        f' "metadata": {{"step": {row}}}}}\n'
        for row, x in enumerate(LOSSES)
    )
    points = read(tmp_path / "log.txt", text)
    assert [point.step for point in points] == list(range(60))
    assert [point.values["loss"] for point in points] == pytest.approx(LOSSES, abs=1e-4)
    assert all(point.values["loss (2)"] == pytest.approx(point.values["loss"] + 0.3, abs=1e-3) for point in points)


def test_a_step_that_is_printed_again_is_no_second_series(tmp_path: Path) -> None:
    text = "".join(f"step {row // 2} loss {x:.4f} lr 1e-4\n" for row, x in enumerate(LOSSES))
    assert {name for point in read(tmp_path / "log.txt", text) for name in point.values} == {"loss", "lr"}


def test_the_loss_of_an_evaluation_is_no_point(tmp_path: Path) -> None:
    """LR lines for 200 steps, and two evaluations: "238 points, steps 0–2360; loss ← loss"."""
    evaluation = "***** Evaluating, Epoch 0/1 *****\nchosen: 0.0, rejected: 0.0, loss: 0.6934\n"
    path = tmp_path / "log.txt"
    rates = [f"[INFO] [Rank 0] step={10 * row}, skipped=4, lr=[4.9e-05]\n" for row in range(60)]
    points = read(path, evaluation + "".join(rates))
    contents = Contents("printed lines")
    for point in points:
        contents.note(point)
    assert len(points) == 60 and contents.judged == ()
    with pytest.raises(NothingToWatch):
        contents.need_loss(str(path))


def test_points_with_a_loss_are_counted(tmp_path: Path) -> None:
    contents = Contents("printed lines")
    text = "".join(f"step {row} lr 1e-4{f' loss {x:.4f}' if row % 3 == 0 else ''}\n" for row, x in enumerate(LOSSES))
    for point in read(tmp_path / "log.txt", text):
        contents.note(point)
    assert contents.lines()[0].startswith("read: printed lines, 60 points (20 with a loss), steps 0–59")


@pytest.mark.parametrize("banner", ["", "[INFO] optimizer_params ............. {'lr': 1e-05, 'weight_decay': 0.01}\n"])
def test_a_line_without_a_step_makes_none_and_a_counter_that_is_ahead_drops_no_loss(banner: str, tmp_path: Path) -> None:
    """The banner was step 0, and every later loss "a rank that lags behind": the log was refused."""
    text = banner + "".join(
        f"[INFO] [Rank 0] step={row + 1}, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]\n[Step {row}/100] Loss: {x:.4f}\n"
        for row, x in enumerate(LOSSES)
    )
    points = read(tmp_path / "log.txt", text)
    assert [(point.step, point.values["loss"]) for point in points] == [(row, round(x, 4)) for row, x in enumerate(LOSSES)]


def test_a_count_is_no_loss_and_a_gradient_needs_no_norm_in_its_name(tmp_path: Path) -> None:
    text = "".join(
        f"iter {row}:, hard_loss_metric={x:.5f}, full_loss_num={3000 + row}, grad 0.768, num_loss=3\n"
        for row, x in enumerate(LOSSES)
    )
    contents = Contents("printed lines")
    for point in read(tmp_path / "log.txt", text):
        contents.note(point)
    assert contents.judged == ("hard_loss_metric",)
    assert contents.channels["grad_norm"] == 60


def test_what_chronicle_itself_prints_is_no_metric(tmp_path: Path) -> None:
    """The guard's report of a resume became step 0 with an LR, and the trainer's own LR became `lr (2)`."""
    report = (
        "chronicle guard: warning, allowed by CHRONICLE_GUARD=warn before the first step: nothing was loaded\n"
        "  L2  resume\n"
        "      expected: a resume: the run has checkpoints up to step 10\n"
        "      found:    no optimizer state was loaded; the optimizer is at step 0, LR 0.01\n"
        "      likely:   the weights of step 10 were loaded, and the optimizer's state of that step was not\n"
    )
    lines = "".join(f"step {row} loss {x:.4f} lr 0.0096\n" for row, x in enumerate(LOSSES, start=11))
    points = read(tmp_path / "log.txt", report + lines)
    assert [point.step for point in points] == list(range(11, 71))
    assert {name for point in points for name in point.values} == {"loss", "lr"}


STRANGERS = {  # form of a line, what it was read as: a rank of 29, and later lines dropped; the last step of each epoch
    "a clock is no rank": ("02:{row:02d}:53: train iter: {step} loss_net: {x:.4f} norm: 21.8", 100),
    "a semicolon before the iteration": ("Epoch: {epoch}/200; iter: {at}/156; Loss: {x:.4f}; time: 37.99 s;", 52),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_lines_of_strangers_that_were_read_wrongly(name: str, tmp_path: Path) -> None:
    """Pasted in public issues: the loss of some other step, or one point of sixty."""
    line, every = STRANGERS[name]
    text = "".join(
        line.format(row=row, step=100 * row, epoch=row // 3, at=52 * (row % 3), x=x) + "\n" for row, x in enumerate(LOSSES)
    )
    points = read(tmp_path / "log.txt", text)
    first = points[0].step
    assert [point.step - first for point in points] == [every * row for row in range(60)]


def test_a_record_without_a_step_between_lines_that_name_theirs_is_none(tmp_path: Path) -> None:
    """It was counted as the step after the line above it."""
    text = "".join(f"step {10 * row} loss {x:.4f}\n{{'loss': {x + 1:.4f}, 'epoch': 0.5}}\n" for row, x in enumerate(LOSSES))
    assert [point.step for point in read(tmp_path / "log.txt", text)] == list(range(0, 600, 10))


def test_a_line_that_tells_of_a_step_is_no_header(tmp_path: Path) -> None:
    """`saving checkpoint of step 12` gave its step to a loss below it that has none."""
    steps = "".join(f"step {20 + row} loss {x:.4f}\n" for row, x in enumerate(LOSSES))
    text = f"saving checkpoint of step 12\nloss: 0.5\n{steps}"
    assert [point.step for point in read(tmp_path / "log.txt", text)] == list(range(20, 80))


BEFORE = {  # what stands above the lines of steps
    "resumed": "Resuming from step 5000, best loss 1.234\n",
    "loaded": "INFO loaded checkpoint out/ckpt_5000.pt (step 5000, loss 1.9)\n",
    "settings": "optimizer:\n  lr: 0.0003\nscheduler:\n  step: 500\n  lr: 0.1\n  loss_weight: 0.3\n  loss_type: 2\n",
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_stands_above_the_lines_of_steps_is_no_step(name: str, tmp_path: Path) -> None:
    """Step 5000 with the loss of another run; while a run is followed, all later steps were then older ones."""
    steps = "".join(f"step {20 + row} loss {x:.4f}\n" for row, x in enumerate(LOSSES))
    assert [point.step for point in read(tmp_path / "log.txt", BEFORE[name] + steps)] == list(range(20, 80))


def test_a_line_that_saves_behind_its_loss_is_a_step(tmp_path: Path) -> None:
    line = "step {} loss {:.4f} | loading 0.1 s | saved checkpoint at step {}\n"
    text = "".join(line.format(row, x, row) for row, x in enumerate(LOSSES))
    assert [point.step for point in read(tmp_path / "log.txt", text)] == list(range(60))


def test_prose_with_a_comma_begins_no_table_of_a_log_that_is_followed() -> None:
    """The head was known anywhere, and each later line was a row."""
    follow = AnyLine()
    lines = [b"loading the data", b"the loss, the learning rate", b"3, 4", b"step 1 loss 2.5", b"5, 6"]
    points = [point for line in lines if (point := follow(line, 0)) is not None]
    assert [(point.step, dict(point.values)) for point in points] == [(1, {"loss": 2.5})]
