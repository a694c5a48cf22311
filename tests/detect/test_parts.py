"""The detector's parts: quantum, onset, LR, stream, calibration."""

import math
import random

import pytest

from rollback.channels import Role, role_of
from rollback.detect.channel import Channel
from rollback.detect.grid import Grid
from rollback.detect.onset import find_onset
from rollback.detect.stream import Stream
from rollback.detect.watches.lr import LrWatch
from rollback.detect.watches.plateau import is_falling


@pytest.mark.parametrize(("size", "quantum"), [(0.01, 0.01), (2**-7, 0.0078), (None, 0.0)])
def test_rounding_is_sensed_by_its_ties(size: float | None, quantum: float) -> None:
    """Two decimals, bf16 behind four printed digits: values repeat, which real numbers never do."""
    rng, grid = random.Random(1), Grid()
    for _ in range(100):
        value = rng.gauss(1.65, 0.008)
        grid.feed(value if size is None else round(round(value / size) * size, 4))
    assert grid.quantum() == pytest.approx(quantum, abs=1e-9 if size is None else 2e-4)


@pytest.mark.parametrize("shape", ["step", "ramp"])
def test_onset_and_bound_enclose_the_truth(shape: str) -> None:
    """The estimate is near and the bound not after it, for both models the likelihood knows."""
    rng = random.Random(2)
    errors, early = [], 0
    for _ in range(40):
        z = [rng.gauss(0, 1) for _ in range(150)]
        for row in range(90, 150):
            z[row] += 2.5 if shape == "step" else 0.08 * (row - 89)
        onset, low = find_onset(z)
        errors.append(abs(onset - 90))
        early += low <= 90
        assert low <= onset
    assert sorted(errors)[36] <= (8 if shape == "step" else 30)
    assert early >= 37


def test_lr_that_disagrees_with_the_ledger_is_said_at_the_first_point() -> None:
    """exp8/9: expected 1.77e-5, found 2.5e-8, on the first logged line."""
    finding = LrWatch().feed(2.5e-8, 1.77e-5)
    assert finding is not None and not finding.ends and "expected 1.77e-05" in finding.sentence


def test_lr_within_one_per_cent_is_as_expected() -> None:
    assert LrWatch().feed(1.775e-5, 1.77e-5) is None


def test_schedules_of_healthy_runs_are_no_mismatch() -> None:
    """Warm-up, cosine, step decay by ten, a constant: none of them is an accident."""
    schedules = {
        "warm-up and cosine": [1e-3 * min(1, s / 200) * (1 + math.cos(math.pi * s / 4_000)) / 2 + 1e-6 for s in range(4_000)],
        "step decay": [1e-2 * 0.1 ** (s // 1_000) for s in range(3_500)],
        "constant": [3e-4] * 2_000,
    }
    for name, schedule in schedules.items():
        watch = LrWatch()
        assert [watch.feed(lr, None) for lr in schedule if lr][1:].count(None) == len(schedule) - 1, name


def test_lr_that_starts_over_is_found_without_any_schedule() -> None:
    """A fresh warm-up in the middle of a run, seen from the run's own past."""
    watch = LrWatch()
    found = [watch.feed(2e-5 * (1 - s / 10_000), None) for s in range(500)]
    assert found == [None] * 500
    finding = watch.feed(2.5e-8, None)
    assert finding is not None and not finding.ends and finding.expected is None


def test_roles_follow_the_names_that_trainers_use() -> None:
    expected = {
        "loss": Role.LOSS, "train/loss": Role.LOSS, "lm loss": Role.LOSS, "loss/cm4": Role.SOURCE,
        "grad_norm": Role.NORM, "train/grad_norm": Role.NORM, "lr": Role.LR, "learning_rate": Role.LR,
        "loss_scale": Role.LOSS_SCALE, "ratio/code": Role.WEIGHT, "eval_loss": Role.IGNORED, "val_loss": Role.IGNORED,
        "netD_loss": Role.OBJECTIVE, "loss_netG": Role.OBJECTIVE, "dis_loss": Role.OBJECTIVE, "errD_real": Role.OBJECTIVE,
        "real_loss": Role.OBJECTIVE, "G_GAN": Role.OBJECTIVE, "cycle_A": Role.OBJECTIVE, "distill_loss": Role.SOURCE,
        "net_loss": Role.SOURCE, "digit_loss": Role.SOURCE,
        "tokens": Role.IGNORED, "iteration_time": Role.IGNORED, "z_loss": Role.OTHER, "lr/expected": Role.LR_EXPECTED,
    }  # fmt: skip
    assert {name: role_of(name) for name in expected} == expected


def test_irregular_intervals_are_one_interval_until_they_change_for_good() -> None:
    stream = Stream()
    steps = [0, 10, 20, 35, 40, 50, 62, 70]
    assert not any(stream.feed(step, None).new_interval for step in steps)
    assert [stream.feed(step, None).new_interval for step in (570, 1_070, 1_570)] == [False, False, True]


def test_wandering_noise_raises_its_own_threshold_and_white_noise_does_not() -> None:
    """Bends of block means show it, and each slow rise that came back by itself."""
    rng, slow, white, red = random.Random(6), 0.0, Channel("white"), Channel("red")
    for row in range(2_048):
        slow = 0.98 * slow + rng.gauss(0, 0.2)
        white.feed(row, row, 100.0 + rng.gauss(0, 1))
        red.feed(row, row, 100.0 + rng.gauss(0, 1) + slow)
    assert white.inflation <= 1.5
    assert red.inflation >= 3.0


def test_falling_is_told_from_flat() -> None:
    rng = random.Random(1)
    assert is_falling([5 - 0.01 * i + rng.gauss(0, 0.02) for i in range(50)])
    assert not is_falling([5 + rng.gauss(0, 0.02) for i in range(50)])
