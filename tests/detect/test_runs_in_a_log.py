"""What is no divergence: a second run in the same log; and a resume beside its own past."""

import math
import random

import pytest

from rollback.detect import Detector, Event, Kind, Tier


def curve(seed: int, size: int) -> list[float]:
    dice = random.Random(seed)
    return [2.0 + 3.0 / (1 + row / 40) + dice.gauss(0, 0.03) for row in range(size)]


def fold(values: list[float], steps: list[int] | None = None, restart: int | None = None) -> tuple[Event, ...]:
    detector = Detector()
    for row, value in enumerate(values):
        step = 10 * row if steps is None else steps[row]
        detector.feed(step, {"loss": value}, launch=None if restart is None else 1 + (row >= restart))
    detector.finish()
    return detector.events


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_second_run_in_the_log_is_another_run(seed: int) -> None:
    """A healthy run appended to a log was proposed as weights that were lost."""
    size = (300, 900)[seed % 2]
    steps = [10 * row for row in range(size)] * 2
    events = fold(curve(seed, size) + curve(seed + 100, size), steps)
    assert [(event.kind, event.tier) for event in events] == [(Kind.RESTART_REWIND, Tier.NOTICE)]
    assert "another run begins" in events[0].evidence[0]


def test_the_second_run_is_judged_by_itself() -> None:
    second = curve(7, 600)
    second[400] += 1.0
    events = fold(curve(1, 600) + second, [10 * row for row in range(600)] * 2)
    assert [(event.kind, event.onset_row) for event in events][1:] == [(Kind.INSTANT_SPIKE, 1000)]


def test_a_loss_that_was_flat_and_then_rises_is_still_proposed() -> None:
    """A fine-tuning that begins at its level falls no further; its divergence is one all the same."""
    dice = random.Random(4)
    events = fold([2.0 + dice.gauss(0, 0.03) + max(0, row - 400) * 0.01 for row in range(600)])
    assert any(event.tier is Tier.PROPOSE for event in events)


@pytest.mark.parametrize("back", [0, 30, 60])
def test_a_small_bump_after_a_resume_is_seen_at_equal_steps(back: int) -> None:
    """Three times the noise at first, gone after thirty points: no threshold against the level sees it."""
    seen = quiet = 0
    for seed in range(12):
        whole, again = curve(seed, 600), curve(seed + 50, 600)
        steps = list(range(400)) + [400 - back + row for row in range(150)]
        for height in (0.09, 0.0):
            after = [again[400 - back + row] + height * max(0.0, 1 - row / 30) for row in range(150)]
            events = fold(whole[:400] + after, steps, restart=400)
            found = [event for event in events if event.kind is Kind.RESUME_BUMP and event.onset_row == 400]
            seen += bool(found) and height > 0.0
            quiet += not found and height == 0.0
            assert all(event.tier is Tier.NOTICE for event in events)
    assert seen >= 8 and quiet >= 11, (seen, quiet)


def running_means(epochs: int, points: int = 200) -> list[float]:
    """The mean since the epoch began, as many trainers print it: its first values are high and noisy."""
    dice, values, total = random.Random(3), [], 0.0
    for row in range(epochs * points):
        within = row % points
        total = (0.0 if within == 0 else total) + 0.6 + 0.3 * math.exp(-within / 15) + dice.gauss(0, 0.02)
        values.append(total / (within + 1))
    return values


def test_the_saw_tooth_of_epochs_is_known_after_three() -> None:
    """Nine notices and a warning in a log of twelve epochs; a rise that is higher, or stays, is told all the same."""
    teeth = running_means(12)
    told = [event for event in fold(teeth) if event.onset_row]
    assert 1 <= len(told) <= 3 and all(event.tier is Tier.NOTICE for event in told)
    broken = [value + 3.0 * (row >= 2100) for row, value in enumerate(teeth)]
    assert any(event.onset_row in (2000, 2100) and event.tier is Tier.PROPOSE for event in fold(broken))


def test_an_event_that_came_back_does_not_stay_open() -> None:
    """It was closed without a verdict after 600 points."""
    dice = random.Random(9)
    values = [
        2.0 + dice.gauss(0, 0.03) + (0.2 * math.exp(-(row - 600) / 120) if row >= 600 else 0.0) for row in range(2400)
    ]
    assert all(event.status.value != "open" for event in fold(values))


def test_a_changed_order_of_the_data_is_named_and_seldom_proposed() -> None:
    """Every batch of one kind: the noise grows and wanders, and the lower values stand. Without the rule 6 of 12 propose."""
    named = proposed = 0
    for seed in range(12):
        dice, wave, values = random.Random(seed), 0.0, []
        for row in range(3000):
            wave = 0.8 * wave + dice.gauss(0, 0.6)
            values.append(3.0 + dice.gauss(0, 0.03) + (0.06 * max(0.0, wave) if row >= 1500 else 0.0))
        events = fold(values)
        proposed += Tier.PROPOSE in {event.tier for event in events}
        named += any(event.kind is Kind.DATA_ORDER and "order of the data" in event.evidence[0] for event in events)
    assert named >= 6 and proposed <= 3, (named, proposed)


def test_no_event_is_open_when_the_log_has_ended() -> None:
    """One event in sixteen of the labelled curves had no verdict."""
    for after in (1, 3, 9, 20, 100):
        for height in (0.2, 1.0):
            dice = random.Random(after)
            values = [2.0 + dice.gauss(0, 0.03) + (height if row >= 600 else 0.0) for row in range(600 + after)]
            assert [event for event in fold(values) if event.status.value == "open"] == [], (after, height)
