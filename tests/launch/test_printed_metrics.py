"""Loss and LR of trainers that only print them."""

import json
import random
import sys
from pathlib import Path

import pytest

from chronicle.launch.live_metrics import HOLD_SECONDS, REPEATS, Place, PrintedMetrics
from chronicle.launch.output import LineTail
from chronicle.metrics.log import MetricsWriter, read_attempts, read_metrics
from rollback.channels import Role, find_channel
from tests.metrics.test_dialects import LINES, series, write


class Bench:
    """The reader with a clock that is set by hand, and what it said."""

    def __init__(self, path: Path) -> None:
        self.now, self.said, self.path = 1000.0, [], path
        self.printed = PrintedMetrics(path, clock=lambda: self.now, say=self.said.append)
        self.log = path.with_name("supervisor.log")
        self.tail = LineTail(self.log)

    def prints(self, text: bytes) -> None:
        with self.log.open("ab") as log:
            log.write(text)
        self.printed.take(self.tail.read(), Place(self.tail.part, self.tail.offset))

    def finish(self) -> None:
        self.printed.take([self.tail.rest()], Place())
        self.printed.finish()

    def points(self) -> list[tuple[int, dict[str, float]]]:
        return [(point.step, dict(point.values)) for point in read_metrics(self.path)] if self.path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "metrics.jsonl")


def test_lines_become_points_once_they_have_been_held(bench: Bench) -> None:
    bench.prints(b"warming up\nstep=1 loss=2.5 lr=0.1\nstep=2 lo")
    bench.prints(b"ss=2.25 lr=0.1\nstep=3 loss=nan lr=0.1\nstep=4 loss=2 lr=0.1\n")
    bench.now += HOLD_SECONDS - 1
    bench.printed.write_due()
    assert bench.points() == []
    bench.now += 1
    bench.printed.write_due()
    bench.finish()
    points = bench.points()
    assert [step for step, _ in points] == [1, 2, 3, 4]
    assert points[1] == (2, {"loss": 2.25, "lr": 0.1}) and points[2][1]["loss"] != points[2][1]["loss"]
    assert bench.printed.writing and "no metrics.jsonl" in bench.said[0]


def test_lines_of_one_step_are_one_point(bench: Bench) -> None:
    bench.prints(b"step 7: lr 0.5\nstep 7: lo")
    bench.prints(b"ss 3.0\nstep 8: loss 2.9")
    bench.finish()
    assert bench.points() == [(7, {"lr": 0.5, "loss": 3.0}), (8, {"loss": 2.9})]


def test_a_bar_that_moved_shows_the_values_of_the_step_before_and_then_its_own(bench: Bench) -> None:
    """tqdm: `update` draws the bar with the values that were set last, `set_postfix` draws it again (diffusers' examples)."""
    bench.prints(b"Epoch 0:  8%|1| 1/12 [00:00<00:01, 5it/s, loss=1.09, lr=2e-7, step=1]\r")
    bench.prints(b"Epoch 0: 17%|2| 2/12 [00:00<00:01, 5it/s, loss=1.09, lr=2e-7, step=1]\r")
    bench.prints(b"Epoch 0: 17%|2| 2/12 [00:00<00:01, 5it/s, loss=1.13, lr=4e-7, step=2]\n")
    bench.finish()
    assert bench.points() == [(1, {"loss": 1.09, "lr": 2e-7}), (2, {"loss": 1.13, "lr": 4e-7})]


def test_a_trainer_with_a_file_of_its_own_is_not_read_twice(bench: Bench) -> None:
    with MetricsWriter(bench.path) as own:
        bench.prints(b"step 1 loss 3.0\nstep 2 loss 2.9\n")
        bench.now += HOLD_SECONDS
        bench.printed.write_due()  # opened, nothing in it yet
        own.write(2, {"loss": 2.9})
    bench.prints(b"step 3 loss 2.8\n")
    bench.finish()
    assert bench.points() == [(2, {"loss": 2.9})] and not bench.printed.writing


def test_a_trainer_that_begins_its_own_file_late_has_it_to_itself_from_then_on(bench: Bench) -> None:
    bench.prints(b"step 1 loss 3.0\nstep 2 loss 2.9\n")
    bench.now += HOLD_SECONDS
    bench.printed.write_due()
    with MetricsWriter(bench.path) as own:
        own.write(50, {"loss": 2.0})
    bench.prints(b"step 51 loss 1.9\nstep 52 loss 1.9\n")
    bench.now += 1
    bench.printed.write_due()
    bench.finish()
    assert [step for step, _ in bench.points()] == [1, 50]


def test_a_second_ranks_copy_falls_away_and_a_counter_that_starts_anew_is_said(bench: Bench) -> None:
    for step in range(1, 4):
        bench.prints(b"[default0]: step %d loss 3.0\n[default1]: step %d loss 9.0\n" % (step, step))
    bench.prints(b"[default1]: step 2 loss 9.0\n")
    bench.prints(b"step 100 loss 2.0\n")
    for step in range(1, REPEATS + 60):  # the second epoch counts from 1 again
        bench.prints(b"step %d loss 1.0\n" % step)
    bench.finish()
    assert bench.points() == [(1, {"loss": 3.0}), (2, {"loss": 3.0}), (3, {"loss": 3.0}), (100, {"loss": 2.0})]
    assert "went back from 100 to 50" in bench.said[0]


def test_a_line_that_names_no_step_is_not_counted_as_one(bench: Bench) -> None:
    bench.prints(b"{'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.5}\nloss 2.0\n")
    bench.finish()
    assert not bench.path.exists()


def test_run_gives_status_spikes_and_start_step_to_a_script_that_only_prints(driver) -> None:
    code = "for s in range(1, 201): print(f'step={s} loss={3 - s / 100 + (5 if s == 150 else 0):.3f} lr=0.001')"
    driver.start([sys.executable, "-c", code])
    assert driver.wait() == 0
    assert driver.entries("launch.end")[0].data["metrics_from"] == "printed lines"
    assert driver.entries("launch.end")[0].data["last_step"] == 200
    status = driver.call("status").stdout
    assert "step 200" in status and "loss        1\n" in status
    assert '"onset_step": 150' in driver.call("spikes", "--json").stdout


COUNTED = ("mlx-vlm",)  # prints each step twice, and its second line later than the next
LIVE = [name for name in LINES if name not in COUNTED]


@pytest.mark.parametrize("name", LIVE)
def test_a_trainers_output_gives_live_what_its_log_gives_afterwards(name: str, tmp_path: Path) -> None:
    """The output comes in pieces. Tables of Rich, and headers without a value above the lines of a step, were passed over."""
    path = write(tmp_path, name)
    data, dice, at = path.read_bytes(), random.Random(name), 0
    live = Bench(tmp_path / "metrics.jsonl")
    while at < len(data):
        size = dice.choice((7, 50, 2000))
        live.prints(data[at : at + size])
        at += size
    live.finish()
    points = list(read_metrics(tmp_path / "metrics.jsonl"))
    loss = find_channel({name: None for point in points for name in point.values}, Role.LOSS)
    assert [(point.step, point.values[loss]) for point in points if loss in point.values] == series(path)


def test_another_reader_goes_on_where_one_has_died_and_writes_nothing_twice(bench: Bench) -> None:
    """At any moment: what was held is read again, what was written is not."""
    lines = [b"step %d loss %d.5\n" % (step, step) for step in range(1, 41)]
    for number, line in enumerate(lines):
        bench.prints(line)
        bench.now += 1
        bench.printed.write_due()
        if number % 13 == 12:  # it dies; its state was written a moment ago
            state = json.loads(json.dumps(bench.printed.state()))
            bench.printed = PrintedMetrics(bench.path, clock=lambda: bench.now, say=bench.said.append)
            place = bench.printed.go_on(state)
            bench.tail = LineTail(bench.log, part=place.part, offset=place.offset)
            bench.prints(b"")
    bench.finish()
    assert bench.points() == [(step, {"loss": step + 0.5}) for step in range(1, 41)]
    assert state["place"][1] > 0, "it goes on near its end"


def test_ranks_that_are_started_again_may_go_back(bench: Bench) -> None:
    """Torchrun has said so in the directory of pulses, before they print."""
    bench.printed.newer_attempt = lambda number: 1
    bench.prints(b"step 1 loss 3.0\nstep 2 loss 2.9\nstep 1 loss 2.8\nstep 2 loss 2.7\n")
    bench.finish()
    assert [(attempt, point.step) for attempt, point in read_attempts(bench.path)] == [(0, 1), (0, 2), (1, 1), (1, 2)]
