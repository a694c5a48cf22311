"""What the log alone shows after a resume; and that a healthy resume shows nothing."""

import math
import random

import pytest

from chronicle.watch.log_checks import LoggedRow, check_log


def curve(first: int, last: int, *, lr: float = 1e-3, shift: float = 0.0, seed: int = 0) -> list[LoggedRow]:
    noise = random.Random(seed)
    return [
        (step, {"lr": lr, "loss": 3.0 / math.sqrt(step + 1) + 2.0 + shift + noise.gauss(0, 0.02)})
        for step in range(first, last + 1)
    ]


BEFORE = curve(1, 200)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_resume_shows_nothing(seed: int) -> None:
    assert check_log(BEFORE, curve(201, 260, seed=seed + 1), resume_step=200) == []


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ([(s, v | {"lr": 1e-5 * (s - 200)}) for s, v in curve(201, 260)], "L1"),
        (curve(1, 60), "L2"),
        (curve(200, 260), "L2"),  # the checkpoint's own step again
        (curve(203, 260), "L2"),  # two steps are missing
        (curve(201, 260, shift=1.0), "L3"),
        (curve(201, 260, shift=-1.0), "L4"),
    ],
)
def test_accident_trips_its_wire(after: list[LoggedRow], code: str) -> None:
    assert code in [check.code for check in check_log(BEFORE, after, resume_step=200)]


def test_lr_of_a_rollback_is_no_accident() -> None:
    assert check_log(BEFORE, curve(201, 260, lr=5e-4), resume_step=200, lr_ratio=0.5) == []


def test_warm_up_of_a_rollback_is_no_schedule_that_starts_again() -> None:
    after = [(s, v | {"lr": 1e-3 * min(1.0, (s - 200) / 20)}) for s, v in curve(201, 260)]
    assert check_log(BEFORE, after, resume_step=200, warm_until=220) == []
    assert [check.code for check in check_log(BEFORE, after, resume_step=200)] == ["L1"]
    low = [(s, v | {"lr": 1e-5}) for s, v in curve(201, 260)]  # it never rises: after the warm-up that counts
    assert [check.code for check in check_log(BEFORE, low, resume_step=200, warm_until=220)] == ["L1"]


def test_logging_every_tenth_step_is_no_missing_step() -> None:
    before, after = BEFORE[9::10], curve(201, 300, seed=3)[9::10]
    assert check_log(before, after, resume_step=200) == []


def test_curve_too_short_to_know_its_noise_is_not_judged() -> None:
    assert check_log(curve(198, 200), curve(201, 260, shift=9.0), resume_step=200) == []


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.9, 2.0])
def test_the_old_lr_after_a_rollback_that_changed_it_is_seen(ratio: float) -> None:
    """Without a guard the log is the only proof of an edit; 0.7 is within the factor that a schedule may jump."""
    checks = check_log(BEFORE, curve(201, 260, lr=1e-3), resume_step=200, lr_ratio=ratio)
    assert [(check.code, check.name) for check in checks] == [("L1", "logged learning rate")]
    assert check_log(BEFORE, curve(201, 260, lr=1e-3 * ratio), resume_step=200, lr_ratio=ratio) == []


@pytest.mark.parametrize(("ratio", "at"), [(0.5, 202), (0.1, 230), (2.0, 202)])
def test_an_lr_that_goes_back_after_a_right_first_step_is_told(ratio: float, at: int) -> None:
    """The optimizer was loaded, its scheduler was not: the first step is as promised, the second is the old one."""
    rows = [(step, {**values, "lr": 1e-3 * (ratio if step < at else 1.0)}) for step, values in curve(201, 260, lr=1e-3)]
    (check,) = check_log(BEFORE, rows, resume_step=200, lr_ratio=ratio)
    assert check.code == "L1" and "went back by the factor of the rollback" in check.cause
    assert check_log(BEFORE, rows[: at - 201], resume_step=200, lr_ratio=ratio) == []
    assert check_log(BEFORE, rows, resume_step=200, lr_ratio=1.0) != check_log(BEFORE, rows, resume_step=200, lr_ratio=ratio)


def test_a_schedule_that_moves_by_itself_is_not_told() -> None:
    """A warm restart rises by another factor; a steep warm-up by nearly the same one in each step."""
    restart = [(s, {**v, "lr": 5e-4 if s < 230 else 5e-3}) for s, v in curve(201, 260, lr=1e-3)]
    assert check_log(BEFORE, restart, resume_step=200, lr_ratio=0.5) == []
    steep = [(s, {**v, "lr": 1e-9 * 1.5 ** (s - 180)}) for s, v in curve(181, 200, lr=1e-3)]
    after = [(s, {**v, "lr": 0.5e-9 * 1.5 ** (s - 180) * (2 if s > 205 else 1)}) for s, v in curve(201, 230, lr=1e-3)]
    assert check_log(steep, after, resume_step=200, lr_ratio=0.5) == []
