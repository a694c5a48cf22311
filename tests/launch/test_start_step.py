"""The step from which a launch started, computed from the first rows of its log."""

from pathlib import Path

import pytest

from chronicle.launch.live_metrics import read_start_step


@pytest.mark.parametrize(
    ("steps", "start"),
    [
        ((1, 2, 3), 0),
        ((10, 20), 0),
        ((40, 50), 30),
        ((41, 51), 40),
        ((7,), None),
        ((0, 1, 2), -1),
        ((0, 5, 10), -1),
        ((0, 35), -1),
    ],
)
def test_the_first_two_steps_tell_the_start(tmp_path: Path, steps: tuple[int, ...], start: int | None) -> None:
    """-1: the first step of a trainer that counts from 0 is step 0, however rarely it logs."""
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps))
    assert read_start_step(log) == start
