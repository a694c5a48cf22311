"""Printed steps and the steps of saves: they are compared where they are one clock."""

from dataclasses import replace
from pathlib import Path

from chronicle.journal.events import LaunchStart
from chronicle.metrics.log import Point
from chronicle.rehearse.launches import Played
from chronicle.rehearse.rehearse import Rehearsal, _compare, begun
from rollback.checkpoint.layout import Checkpoint

ASKED = Rehearsal(command=("python",), at=2, to=4, signal="SIGKILL")


def played(out: Path, saves: range, points: dict[int, float]) -> Played:
    for number in saves:
        (out / f"{number}.json").write_text("{}")
    listed = tuple(
        Checkpoint(path=out / f"{at}.json", step=at, step_source="name", format="torch", files=(), single_file=True)
        for at in saves
    )
    logged = tuple(Point(row, step, None, {"lr": value}) for row, (step, value) in enumerate(points.items()))
    return Played(out=out, listed=listed, points=logged, prints={}, start=LaunchStart(), guard=(), end="it ended")


def test_steps_of_one_epoch_are_not_compared_with_saves_of_epochs(tmp_path: Path) -> None:
    """Ignite's example draws a bar of ten steps in each epoch, and saves epochs: LR at `step 3` is that of another epoch."""
    first = played(tmp_path, range(1, 5), dict.fromkeys(range(11), 0.01))
    resumed = replace(first, points=tuple(point._replace(values={"lr": 0.0025}) for point in first.points))
    compared, _ = _compare(ASKED, (first, first, resumed), {}, (2, 4))
    assert compared.findings == () and compared.num_values == 0
    one_clock = [replace(one, points=one.points[:5]) for one in (first, first, resumed)]
    compared, _ = _compare(ASKED, (one_clock[0], one_clock[1], one_clock[2]), {}, (2, 4))
    assert [row.what for row in compared.findings] == ["the resume", "lr"]


def test_a_resume_that_printed_no_step_took_those_that_it_saved(tmp_path: Path) -> None:
    silent = played(tmp_path, range(1, 5), {})
    assert list(begun(silent, 2, 4)) == []
    assert [row.text for row in begun(silent, 2, 6)] == ["ended at step 4 of 6: it ended"]
