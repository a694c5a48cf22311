"""NaN that no log shows as NaN: a filter's 0.0, a repeated value, a missing field, skipped steps, a loss scale at its floor."""

import math
import pickle
import random
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType

import pytest

from rollback.detect import Detector, Event, Kind, Tier
from rollback.propose import CandidateCheckpoint, propose

Values = Mapping[str, float]
START, SIZE, EVERY = 200, 260, 10


def healthy(row: int) -> dict[str, float]:
    dice = random.Random(row)
    return {"loss": 2.0 + 2.0 / (1 + row / 20) + dice.gauss(0, 0.02), "grad_norm": 1.0 + dice.gauss(0, 0.05), "lr": 1e-4}


SHOWN = (Kind.NAN, Kind.STANDS_STILL, Kind.LOSS_MISSING, Kind.STEPS_SKIPPED, Kind.LEVEL_SHIFT)


def fold(change: Mapping[str, float | None], *, last: int = SIZE, base: Values = MappingProxyType({})) -> list[Event]:
    """A healthy run whose values are replaced from row `first` to `last`; None leaves one out. Live: what was said by then."""
    detector, said = Detector(), []
    for row in range(SIZE):
        values = {**base, **healthy(row), **(change if START <= row < last else {})}
        said += detector.feed(row * EVERY, {name: value for name, value in values.items() if value is not None})
    return [event for event in said if event.kind in SHOWN and event.channels[:1] != ("grad_norm",)]


DISGUISES: dict[str, tuple[Mapping[str, float | None], Mapping[str, float]]] = {
    "0.0 and a gradient norm of NaN": ({"loss": 0.0, "grad_norm": math.nan}, {}),
    "repeated bit for bit": ({"loss": 2.171875, "grad_norm": math.nan}, {}),
    "the field is left out": ({"loss": None, "grad_norm": math.nan}, {}),
}
WARNED: dict[str, tuple[Mapping[str, float | None], Mapping[str, float], str]] = {
    "0.0 and no gradient norm": ({"loss": 0.0, "grad_norm": None}, {}, "exactly 0.0"),
    "the field is left out, and the norm": ({"loss": None, "grad_norm": None}, {}, "missing from lines"),
    "all steps skipped": ({"number of skipped iterations": 10.0}, {"number of skipped iterations": 0.0}, "were skipped"),
    "loss scale at its floor": ({"loss_scale": 1.0}, {"loss_scale": 65536.0}, "from 65536 to its floor of 1"),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_a_disguised_nan_is_proposed_within_three_points(name: str) -> None:
    """90 of 120 steps were NaN in the commonest trainer, and nothing called for a rollback."""
    change, base = DISGUISES[name]
    events = fold(change, base=base)
    assert events and events[0].alarm_row <= START + 3 and events[0].onset_row in (START, START + 1), name
    assert (events[0].kind, events[0].tier) == (Kind.NAN, Tier.PROPOSE)
    checkpoints = [CandidateCheckpoint(step=step, verified=True) for step in range(0, SIZE * EVERY, 100)]
    proposal = propose(events[-1:], checkpoints)
    assert proposal is not None and proposal.target_step is not None
    assert START * EVERY - 1300 < proposal.target_step < START * EVERY and proposal.command is not None


@pytest.mark.parametrize("name", WARNED)
def test_what_is_no_number_by_inference_only_is_a_warning_in_the_words_of_what_was_seen(name: str) -> None:
    """A loss scale of one beside a finite loss and norm was "propose: nan, every gradient overflows"."""
    change, base, words = WARNED[name]
    (event, *_) = events = fold(change, base=base)
    assert event.alarm_row <= START + 3 and event.onset_row in (START, START + 1)
    assert {event.tier for event in events} == {Tier.WARN} and event.kind is not Kind.NAN
    assert words in event.evidence[0]


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("hidden", [0.0, 1.25])
def test_where_the_norm_is_no_number_a_noisy_loss_hides_nan_as_well(norm: float, hidden: float) -> None:
    """A real Trainer with batches of four: the loss varies by a half, zero lies within its noise, and nothing was proposed."""
    detector, said = Detector(), []
    for row in range(120):
        loss = hidden if row >= 60 else abs(random.Random(row).gauss(1.3, 0.5))
        said += detector.feed(row, {"loss": loss, "grad_norm": norm if row >= 60 else 1.0 + row % 7 / 10, "lr": 1e-4})
    found = [event for event in said if event.kind is Kind.NAN and event.tier is Tier.PROPOSE]
    assert found and found[0].onset_row in (60, 61) and found[0].alarm_row <= 63


HEALTHY: dict[str, tuple[Mapping[str, float | None], Mapping[str, float], int]] = {
    "one point without a loss": ({"loss": None}, {}, START + 1),
    "two zeros": ({"loss": 0.0, "grad_norm": math.nan}, {}, START + 2),
    "a constant loss with a live gradient norm": ({"loss": 2.125}, {}, SIZE),
    "some steps skipped": ({"number of skipped iterations": 3.0}, {"number of skipped iterations": 0.0}, SIZE),
    "skipped steps counted from the start": ({"skipped": 17.0}, {"skipped": 17.0}, SIZE),
    "a scale of one from the start": ({"loss_scale": 1.0}, {"loss_scale": 1.0}, SIZE),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_looks_alike_is_not_proposed(name: str) -> None:
    change, base, last = HEALTHY[name]
    assert [event for event in fold(change, base=base, last=last) if event.tier is not Tier.NOTICE] == []


def test_a_loss_that_is_logged_less_often_than_the_lr_is_not_missing() -> None:
    detector = Detector()
    for row in range(600):
        values = healthy(row)
        if row % 5:
            del values["loss"]
        detector.feed(row, values)
    assert all(event.kind not in SHOWN for event in detector.events)


def test_a_loss_that_trains_to_zero_is_no_nan() -> None:
    """Preference training reaches 0.0 as printed with four digits, through smaller and smaller values."""
    detector, dice = Detector(), random.Random(1)
    for row in range(900):
        detector.feed(row, {"loss": round(0.7 * math.exp(-row / 60) * dice.uniform(0.5, 1.5), 4), "lr": 1e-5})
    assert all(event.kind not in SHOWN for event in detector.events)


@pytest.mark.parametrize("earlier", [1, 2])
def test_values_that_repeat_in_a_coarse_log_are_no_nan(earlier: int) -> None:
    """A curve read off a plot holds a pair of equal values here and there, and then five in a row: it was proposed as NaN."""
    detector = Detector()
    for row in range(150):
        twin = row - 1 if row in range(40, 40 + 20 * earlier, 20) else min(row, 90) if row < 95 else row
        detector.feed(row, {"loss": healthy(twin)["loss"]})
    assert all(event.kind not in SHOWN for event in detector.events)


def test_a_repeated_loss_is_told_though_one_repeated_by_chance_before() -> None:
    """Four printed digits repeat once or twice in some thousand points."""
    detector, said = Detector(), []
    for row in range(2010):
        twin = row - 1 if row in (300, 700, 1100, 1500) else min(row, 2000)
        said += detector.feed(row, {"loss": healthy(twin)["loss"]})
    assert [(event.alarm_row, event.tier) for event in said if event.kind is Kind.STANDS_STILL][:1] == [(2003, Tier.WARN)]


def slow_and_coarse(row: int, dice: random.Random, wave: list[float]) -> float:
    """The running mean of a slow series, printed with three digits: in a tenth of the points it does not move."""
    wave[0] = 0.98 * wave[0] + dice.gauss(0.0, 0.004)
    wave[1] = 0.9 * wave[1] + 0.1 * wave[0]
    return round(1.0 + 3.0 / (1 + row / 10) + wave[1], 3)


@pytest.mark.parametrize("stuck", [None, 1500])
def test_a_slow_series_of_few_digits_repeats_by_chance_until_it_is_stuck(stuck: int | None) -> None:
    """Three proposals of NaN in one healthy run of four equal values each; and 42 of 120 stuck losses were not told."""
    detector, dice, wave = Detector(), random.Random(4), [0.0, 0.0]
    values = [slow_and_coarse(row, dice, wave) for row in range(1600)]
    runs = [len(list(same)) for _, same in groupby(values[32:])]
    assert max(runs) >= 4  # three repeats in a row are usual here
    for row in range(1600):
        detector.feed(row, {"loss": values[row if stuck is None else min(row, stuck)]})
    found = [event.alarm_row - (stuck or 0) for event in detector.events if event.kind is Kind.STANDS_STILL]
    assert found == [] if stuck is None else len(found) == 1 and 3 < found[0] < 60


def test_half_a_fold_is_as_good_as_one() -> None:
    change, _ = DISGUISES["0.0 and a gradient norm of NaN"]
    detector = Detector()
    for row in range(SIZE):
        if row == START + 2:
            detector = pickle.loads(pickle.dumps(detector))
        hidden = {name: value for name, value in change.items() if value is not None} if row >= START else {}
        detector.feed(row * EVERY, {**healthy(row), **hidden})
    found = [event for event in detector.events if event.kind is Kind.NAN and event.tier is Tier.PROPOSE]
    assert [event.alarm_row for event in found if event.channels == ("loss",)] == [START + 2]
