"""Every dialect is read: the planted spike is seen at its place, cut, coloured, interleaved or behind a prefix."""

import random
from pathlib import Path

import pytest

from chronicle.metrics.readers import Contents, form_of, read_log
from chronicle.watch.follow import follow_file
from chronicle.watch.scan import scan_file
from rollback.channels import Role, find_channel
from tests.metrics.dialects import WRITERS

SPIKE = 240
LOSSES = [2.0 + 3.0 / (1 + row / 30) + random.Random(row).gauss(0.0, 0.02) + 2.5 * (row == SPIKE) for row in range(300)]


def write(path: Path, name: str) -> Path:
    suffix, writer = WRITERS[name]
    file = path / f"log{suffix}"
    file.write_text(writer(LOSSES))
    return file


def series(path: Path) -> list[tuple[int, float]]:
    """The leading loss of a log: (step, value)."""
    points = list(read_log(path))
    name = find_channel({name: None for point in points for name in point.values}, Role.LOSS)
    return [(point.step, point.values[name]) for point in points if name in point.values]


@pytest.mark.parametrize("name", WRITERS)
def test_the_planted_spike_is_seen(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    read = series(path)
    assert [value for _, value in read] == pytest.approx(LOSSES, rel=0.03), name
    steps = [step for step, _ in read]
    assert steps == sorted(steps) and len(set(steps)) == len(steps)
    scan = scan_file(path)
    assert steps[SPIKE] in [event.onset_step for event in scan.events], [e.onset_step for e in scan.events]
    assert scan.contents is not None and scan.contents.judged


DOCUMENTS = ("megatron golden", "megatron golden, older")  # one JSON document: half of one is none
LINES = [name for name, (suffix, _) in WRITERS.items() if suffix == ".log"]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in DOCUMENTS])
def test_a_log_cut_at_any_byte_is_a_shorter_log(name: str, tmp_path: Path) -> None:
    """A number that a kill cut in half (`11.3` as `1`) would be a fall of the loss."""
    path = write(tmp_path, name)
    whole, data, dice = series(path), path.read_bytes(), random.Random(7)
    for at in [len(data) - 1, len(data) - 3, *(dice.randrange(len(data) // 8, len(data)) for _ in range(3))]:
        path.write_bytes(data[:at])
        read = series(path)
        assert read == whole[: len(read)] and len(read) >= len(whole) * at // len(data) - 3, data[at - 60 : at]


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in DOCUMENTS])
def test_colours_line_ends_and_prefixes_change_nothing(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    whole, text = series(path), path.read_text()
    colour = "".join(f"\x1b[32m\x1b[1m{line}\x1b[0m\n" for line in text.splitlines())
    collected = "".join(f"2026-01-02T03:04:05.678901Z node-7 {line}\n" for line in text.split("\n")[:-1])
    container = "".join(f"2026-01-02T03:04:05.678901234Z stdout F {line}\n" for line in text.split("\n")[:-1])
    for dress in (colour, text.replace("\n", "\r\n"), collected, container):
        path.write_text(dress, newline="")
        assert series(path) == whole, dress[:300]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("form", ["[rank{0}]: "])
def test_of_two_ranks_that_print_one_is_read(name: str, form: str, tmp_path: Path) -> None:
    """Both ranks print, each its own loss, the second one lags: one series comes out."""
    path = write(tmp_path, name)
    whole, writer = series(path), WRITERS[name][1]
    first, second = writer(LOSSES).splitlines(), writer([loss + 0.3 for loss in LOSSES]).splitlines()
    dice, mixed = random.Random(3), []
    at = [0, 0]
    while at[0] < len(first) or at[1] < len(second):
        rank = 0 if at[1] >= len(second) or (at[0] < len(first) and dice.random() < 0.5 + 0.05 * (at[1] - at[0])) else 1
        mixed.append(form.format(rank) + (first, second)[rank][at[rank]])
        at[rank] += 1
    path.write_text("\n".join(mixed) + "\n")
    assert [step for step, _ in series(path)] == [step for step, _ in whole]
    assert len({round(value - other, 1) for (_, value), (_, other) in zip(series(path), whole, strict=True)}) <= 2


@pytest.mark.parametrize("name", WRITERS)
def test_a_growing_log_gives_what_the_finished_one_gives(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    follower = follow_file(path, once=True)
    follower.look()
    assert follower.contents.judged == _contents(path).judged
    onsets = {event.onset_step for event in follower.detector.events}
    assert series(path)[SPIKE][0] in onsets


def _contents(path: Path) -> Contents:
    contents = Contents(form_of(path))
    for point in read_log(path):
        contents.note(point)
    return contents
