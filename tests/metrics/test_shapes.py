"""A line is taken apart once for its shape: what is known of it must be what would be found in the line itself."""

import pytest

from chronicle.metrics.shapes import LONGEST, MOST_SHAPES, Shapes, find_shape
from tests.metrics.dialects import WRITERS
from tests.metrics.printed import read_lines

LOSSES = [4.5 - row / 30 for row in range(120)]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_known_of_a_shape_is_what_stands_in_each_line_of_it(name: str) -> None:
    shapes = Shapes()
    for line in WRITERS[name][1](LOSSES).splitlines():
        assert shapes.of(line) == find_shape(line), line


def test_a_digit_of_a_name_is_no_number() -> None:
    """`loss_1` and `loss_2` have one shape."""
    lines = (f"step {step} loss_{1 + step % 2}: {step}.5\n" for step in range(20))
    points = list(read_lines(lines))
    assert [dict(point.values) for point in points] == [{f"loss_{1 + step % 2}": step + 0.5} for step in range(20)]


def test_numbers_of_other_lengths_are_read_whole() -> None:
    lines = (f"step {10**row} loss {1 / 10**row}\n" for row in range(9))
    assert [(point.step, point.values["loss"]) for point in read_lines(lines)] == [(10**row, 1 / 10**row) for row in range(9)]


def test_what_is_kept_of_shapes_is_bounded() -> None:
    """Lines of words that never come again, and long ones (a dump of a batch), fill no memory."""
    shapes = Shapes()
    for row in range(LONGEST + 100):
        assert shapes.of(f"step {row} loss 2.5 {'x' * row}").loss == "loss"
    assert 0 < len(shapes._known) <= MOST_SHAPES and max(map(len, shapes._known)) == LONGEST
