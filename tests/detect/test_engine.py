"""The detector as a fold: what it says does not depend on when it was stopped, and says the right thing about shapes."""

import json
import math
import pickle
import random
from collections import deque
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detector.generate import generate, healthy
from benchmarks.detector.golden import draw_bloom
from rollback.detect import Detector, Event, Kind, Status, Tier
from rollback.propose import CandidateCheckpoint, propose
from tests.detect.series import fold, fold_curve, noise


def mixed_points() -> list[tuple[int, dict[str, float | None], int]]:
    """Everything at once: descent, spike, restart, missing values, NaN, LR jump, divergence."""
    rng = random.Random(5)
    points: list[tuple[int, dict[str, float | None], int]] = []
    for row in range(1_500):
        step = row if row < 900 else row - 200
        loss = 2.0 + 6.0 / (1 + row / 20) + rng.gauss(0.0, 0.02)
        loss += 1.0 if 500 <= row < 503 else 0.0
        loss += min(3.0, 0.01 * math.expm1((row - 1_100) / 20)) if row >= 1_100 else 0.0
        norm = math.exp(rng.gauss(0.0, 0.2) + (3.0 if row >= 1_080 else 0.0))
        values: dict[str, float | None] = {
            "loss": math.nan if row == 700 else loss, "grad_norm": norm,
            "loss/a": loss + rng.gauss(0.0, 0.02), "lr": 1e-3 if row < 900 else 3e-3,
        }  # fmt: skip
        if row % 7 == 0:
            values["grad_norm"] = None
        points.append((step, values, 1 if row < 900 else 2))
    return points


MIXED = mixed_points()


def state_of(value: object) -> object:
    """Every value that a detector holds, in plain containers."""
    if type(value).__module__.startswith("rollback.detect") and not isinstance(value, Enum):
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
        return {name: state_of(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: state_of(part) for key, part in value.items()}
    return [state_of(part) for part in value] if isinstance(value, list | tuple | deque) else repr(value)


def fold_with_stops(stops: set[int]) -> tuple[object, list[str]]:
    """Fold the mixed series, pickled before each of these points; returns state and event stream."""
    detector, stream = Detector(), []
    for row, (step, values, launch) in enumerate(MIXED):
        if row in stops:
            detector = pickle.loads(pickle.dumps(detector))
        stream += [json.dumps(event.to_json()) for event in detector.feed(step, values, launch=launch)]
    return state_of(detector), stream


ONCE = fold_with_stops(set())


@settings(max_examples=12, deadline=None)
@given(st.sets(st.integers(0, len(MIXED) - 1), min_size=1, max_size=6))
def test_folded_with_stops_equals_folded_at_once(stops: set[int]) -> None:
    """Kill and resume at any point: the same events in the same order, and the same state to the last bit."""
    assert fold_with_stops(stops) == ONCE


def test_the_mixed_series_holds_what_the_property_needs() -> None:
    """The stop test proves nothing over a silent series: this one opens, closes and proposes."""
    events = [Event.from_json(json.loads(line)) for line in ONCE[1]]
    kinds = {event.kind for event in events}
    assert {Kind.INSTANT_SPIKE, Kind.NAN, Kind.RESTART_REWIND, Kind.LR_MISMATCH} <= kinds
    assert any(event.tier is Tier.PROPOSE for event in events)


def test_healthy_run_is_silent() -> None:
    """18,000 points of the seed's noise, bf16 as logged: nothing but that it has stopped learning."""
    for curve in generate("healthy", 3, seed=7):
        assert {event.kind for event in fold_curve(curve).events} <= {Kind.PLATEAU}


def test_lone_spike_is_a_recovered_notice() -> None:
    """212 of 216 labelled instant spikes came back by themselves: they are for the journal."""
    (event,) = fold([x + (1.5 if row == 300 else 0.0) for row, x in enumerate(noise(600))])
    assert (event.kind, event.tier, event.status) == (Kind.INSTANT_SPIKE, Tier.NOTICE, Status.RECOVERED)
    assert (event.onset_row, event.alarm_row, event.peak_row) == (300, 300, 300)


def test_small_ramp_is_seen_and_proposed_with_a_bound_before_its_start() -> None:
    """1.4 sigma is what the 80B run's divergences began with; multiples of the loss never see it."""
    for curve in generate("ramp", 3, seed=11):
        (label,) = curve.labels
        (event, *_) = [e for e in fold_curve(curve).events if e.alarm_row >= label.onset_row]
        assert event.onset_low_row is not None and event.onset_low_row <= label.onset_row + 50
        assert event.alarm_row <= label.onset_row + 200


def test_nan_is_an_event_and_missing_is_not() -> None:
    """Golden files write "nan" for "not recorded"; a None must never look like a divergence."""
    assert fold([*noise(200), *[None] * 50, *noise(200, seed=2)]) == ()
    (event,) = fold([*noise(200), *[math.nan] * 5])
    assert (event.kind, event.tier, event.onset_row) == (Kind.NAN, Tier.PROPOSE, 200)


def test_single_nan_warns_and_is_over() -> None:
    """One skipped step is no reason to go back; and it must not poison the baseline behind it."""
    (event,) = fold([*noise(200), math.nan, *noise(300, seed=2)])
    assert (event.kind, event.tier, event.status) == (Kind.NAN, Tier.WARN, Status.RECOVERED)


def test_nan_in_the_first_steps_is_seen_without_any_history() -> None:
    """The real one: a run that exploded inside its first eight steps."""
    (event,) = fold([7.0, 9.0, 400.0, 1e24, *[math.nan] * 4])
    assert event.kind is Kind.NAN and event.onset_row == 4


def test_gradient_norm_alone_never_proposes() -> None:
    """A norm 30 times its usual size for ever, with a calm loss: a warning, not a rollback."""
    rng, detector = random.Random(3), Detector()
    for step, loss in enumerate(noise(1_500)):
        norm = math.exp(rng.gauss(0.0, 0.1)) * (30.0 if step >= 800 else 1.0)
        detector.feed(step, {"loss": loss, "grad_norm": norm})
    assert {event.channels for event in detector.events} == {("grad_norm",)}
    assert {event.tier for event in detector.events} == {Tier.WARN}


def test_partial_recovery_is_not_recovery() -> None:
    """Marin 32B: 1.96, 2.02, 1.975: back under every threshold and permanently worse."""
    before, peak, after = noise(1_000, sigma=0.01), noise(60, level=2.3, sigma=0.01), noise(400, level=2.012, sigma=0.01)
    (event, *_) = fold([*before, *peak, *after])
    assert event.status is Status.PARTIAL and event.recovered_row is None and event.tier is Tier.PROPOSE


def test_bf16_noise_of_one_quantum_has_a_floor() -> None:
    """Most values equal: quartiles a quantum apart or none at all, and two quanta would look like ten sigmas."""
    rng = random.Random(1)
    quanta = (-2, -1, *[0] * 14, 1, 2)
    values = [1.65625 + 0.0078125 * rng.choice(quanta) for _ in range(3_000)]
    assert fold(values) == ()


def test_resume_bump_is_a_notice_of_its_own_class() -> None:
    """Seven restarts with the seed's bumps: nothing is proposed and nothing is called a spike in earnest."""
    for curve in generate("restarts", 2, seed=3):
        events = [e for e in fold_curve(curve).events if "loss" in e.channels]
        assert Kind.RESUME_BUMP in {event.kind for event in events}
        assert Tier.PROPOSE not in {event.tier for event in events}


def test_lost_weights_are_a_reinit() -> None:
    """A restart at the loss of the first step: the checkpoint's weights were not loaded."""
    for curve in generate("reinit", 2, seed=3):
        (label,) = curve.labels
        found = [e for e in fold_curve(curve).events if e.alarm_row == label.onset_row]
        assert [(e.kind, e.tier) for e in found] == [(Kind.REINIT, Tier.PROPOSE)]


def test_rewind_starts_a_segment_and_keeps_the_baseline() -> None:
    """After a rollback steps repeat: rows tell events apart, and the old baseline still judges the first point."""
    detector = Detector()
    losses = noise(1_000)
    for row, loss in enumerate(losses):
        detector.feed(row if row < 700 else row - 300, {"loss": loss})
    (event,) = detector.events
    assert (event.kind, event.onset_row, event.onset_step) == (Kind.RESTART_REWIND, 700, 400)


def test_two_writers_in_one_log_are_named_and_only_one_is_watched() -> None:
    """Two jobs appending to one file: their losses differ by more than any threshold, and neither is diverging."""
    detector, rng = Detector(), random.Random(8)
    for row in range(300):
        detector.feed(1_000 + row, {"loss": 2.0 + rng.gauss(0, 0.02)})
    for row in range(400):
        detector.feed(1_300 + row, {"loss": 2.0 + rng.gauss(0, 0.02)})
        detector.feed(200 + row, {"loss": 4.0 + rng.gauss(0, 0.02)})
    kinds = [event.kind for event in detector.events]
    assert kinds.count(Kind.INTERLEAVED_WRITERS) == 1 and kinds.count(Kind.RESTART_REWIND) <= 1
    assert [e for e in detector.events if e.alarm_row > 340] == []


def test_change_of_the_log_interval_starts_new_baselines() -> None:
    """AlgoPerf on PyTorch: the first 100 steps one by one, then every 500th, two nats lower."""
    detector = Detector()
    for row, x in enumerate(noise(100, level=8.0)):
        detector.feed(row, {"loss": x - 0.02 * row})
    for row, x in enumerate(noise(200, level=4.0)):
        detector.feed(100 + 500 * (row + 1), {"loss": x})
    assert detector.events == ()


def test_only_the_moved_source_is_named() -> None:
    """05-30: the spikes hit cm4 and not pmd."""
    detector, rng = Detector(), random.Random(2)
    for step in range(600):
        extra = 1.0 if 400 <= step < 410 else 0.0
        cm4, pmd = 2.0 + extra + rng.gauss(0, 0.02), 1.0 + rng.gauss(0, 0.02)
        detector.feed(step, {"loss": 0.7 * cm4 + 0.3 * pmd, "loss/cm4": cm4, "loss/pmd": pmd})
    (event,) = [e for e in detector.events if "loss" in e.channels]
    assert event.evidence == ("moved: loss/cm4; not loss/pmd",)


def two_sources(count: int, shares: tuple[float, float], *, worse: float = 0.0, logged: bool = True) -> Detector:
    """A harder and an easier source; from point 500 on the first share, or the losses, are others."""
    detector, rng = Detector(), random.Random(2)
    for step in range(count):
        share, extra = (shares[0], 0.0) if step < 500 else (shares[1], worse)
        hard, easy = 2.0 + extra + rng.gauss(0, 0.01), 1.0 + extra + rng.gauss(0, 0.01)
        values = {"loss": share * hard + (1 - share) * easy, "loss/hard": hard, "loss/easy": easy}
        detector.feed(step, values | ({"ratio/hard": share, "ratio/easy": 1 - share} if logged else {}))
    return detector


@pytest.mark.parametrize("count", [700, 900, 1400])
def test_mixture_that_moves_without_its_sources_is_a_mix_shift(count: int) -> None:
    """More of the harder source: the total rises, nothing got worse, nothing is to be rolled back; and so it stays."""
    (event,) = [e for e in two_sources(count, (0.5, 0.8)).events if "loss" in e.channels]
    assert event.kind is Kind.MIX_SHIFT and event.tier is not Tier.PROPOSE
    assert event.evidence == ("no source moved as far as the total",)


def test_sources_that_got_worse_are_no_mix_shift() -> None:
    """The shares moved a little as well: what rose is the loss of each source."""
    for shares in ((0.5, 0.5), (0.5, 0.55)):
        for logged in (True, False):
            events = [e for e in two_sources(900, shares, worse=0.3, logged=logged).events if "loss" in e.channels]
            assert events and events[0].tier is Tier.PROPOSE
            assert all(event.kind is not Kind.MIX_SHIFT for event in events)


def test_loss_too_good_after_a_restart_warns() -> None:
    """exp6: a reshuffle, and the loss suddenly improves: it is seeing data again."""
    detector = Detector()
    for step, x in enumerate(noise(800)):
        detector.feed(step, {"loss": x}, launch=1)
    for step, x in enumerate(noise(400, seed=9), 800):
        detector.feed(step, {"loss": x - 0.15}, launch=2)
    (event,) = detector.events
    assert event.kind in (Kind.TOO_GOOD, Kind.RESUME_DROP)


def test_run_that_stopped_learning_is_a_plateau_once() -> None:
    """06-04: flat since 15k; said once, not every hundred points."""
    events = fold([*[4.0 - x / 2_000 for x in range(4_000)], *noise(40_000)])
    assert [event.kind for event in events].count(Kind.PLATEAU) == 1


def test_bloom_vector_warns_before_the_loss_peaks_and_recovers() -> None:
    """The norm leads, the loss dips in between: a rule that counts consecutive steps would start over."""
    detector, first_warning = Detector(), None
    for step, values in draw_bloom():
        for event in detector.feed(step, values):
            if event.tier is Tier.WARN and "grad_norm" in event.channels and first_warning is None:
                first_warning = step
    (event,) = detector.events
    assert first_warning is not None and first_warning < 31_219
    assert event.status is Status.RECOVERED and 31_225 <= (event.recovered_step or 0) <= 31_260


def test_finish_judges_what_a_stopped_run_left_open() -> None:
    """A person stopped the run while it diverged: the log ends, the proposal is due."""
    losses = [*noise(800), *[x + 0.0015 * row for row, x in enumerate(noise(50, seed=2))]]
    assert fold(losses)[-1].tier is Tier.NOTICE
    assert fold(losses, finish=True)[-1].tier is Tier.PROPOSE


def test_state_is_bounded() -> None:
    """O(1) a point: the state of 60,000 points is no larger than that of 6,000."""
    rng, detector, sizes = random.Random(1), Detector(), []
    draft = healthy(rng, 6_000)
    for part in range(4):
        for row, loss in enumerate(draft.loss):
            detector.feed(part * 6_000 + row, {"loss": loss})
        sizes.append(len(pickle.dumps(detector)))
    assert sizes[-1] < 1.3 * sizes[0] + 20_000


def test_rollback_in_the_log_ends_the_event_and_restores_the_baseline() -> None:
    """What happened after the step that it went back to was undone: no cluster, no proposal, no false relapse."""
    detector = Detector()
    diverging = [x + min(2.0, max(0.0, 0.02 * (row - 500))) for row, x in enumerate(noise(700))]
    for step, loss in enumerate(diverging):
        detector.feed(step, {"loss": loss}, launch=1)
    assert detector.events[0].tier is Tier.PROPOSE
    seen = len(detector.events)
    for step, loss in enumerate(noise(400, seed=3), 400):
        detector.feed(step, {"loss": loss}, launch=2)
    first, later = detector.events[0], detector.events[seen:]
    assert (first.status, first.recovered_row) == (Status.DIVERGING, None)
    assert {event.kind for event in later} == {Kind.RESTART_REWIND}
    assert propose(detector.events, [CandidateCheckpoint(step=300, verified=True)]) is None


def test_rise_under_a_raised_lr_is_proposed_without_long_proof() -> None:
    """The LR jumped, the loss jumped and stays: 150 points of patience are for spikes without a cause."""
    detector, proposed = Detector(), None
    for step, x in enumerate(noise(600)):
        values = {"loss": x + (0.7 if step >= 302 else 0.0), "lr": 0.01 if step < 301 else 0.03}
        for event in detector.feed(step, values):
            if event.tier is Tier.PROPOSE and proposed is None:
                proposed = step
    assert proposed is not None and proposed < 350


def test_loss_of_exactly_zero_is_no_trouble() -> None:
    """A finished toy, a masked batch: no noise, no level, and nothing may divide by it."""
    assert fold([0.0] * 400) == ()
    assert fold([x * 1e-300 for x in noise(400)], finish=True) == ()


def test_log_written_newest_first_is_no_series_of_restarts() -> None:
    """Some exports begin with the last step."""
    detector = Detector()
    for row, loss in enumerate(noise(400)):
        detector.feed(400 - row, {"loss": loss})
    assert [event.kind for event in detector.events] in ([], [Kind.RESTART_REWIND])


def test_lost_weights_without_a_restart_in_the_log_are_a_reinit_once_they_last() -> None:
    """A CSV knows no launches: back at the loss of the first step, and there it begins to learn again."""
    first = [2.0 + 8.0 / (1 + row / 20) + x for row, x in enumerate(noise(400, level=0.0))]
    (event, *_) = [e for e in fold([*first, *first]) if e.onset_row == 400]
    assert (event.kind, event.tier) == (Kind.REINIT, Tier.PROPOSE)


def test_lower_throughput_that_lasts_is_a_notice_and_one_slow_step_is_nothing() -> None:
    """A node that throttles is for the journal, and evidence for the hardware branch; a save is neither."""
    detector, rng = Detector(), random.Random(4)
    for step, loss in enumerate(noise(1_200)):
        speed = 1_000.0 * math.exp(rng.gauss(0.0, 0.01)) * (0.7 if step >= 800 else 0.2 if step == 400 else 1.0)
        detector.feed(step, {"loss": loss, "tokens_per_second": speed})
    (event,) = detector.events
    assert (event.kind, event.tier, event.channels) == (Kind.LEVEL_SHIFT, Tier.NOTICE, ("tokens_per_second",))
    assert 795 <= (event.onset_row or 0) <= 801


def test_throughput_that_rises_is_no_event() -> None:
    detector, rng = Detector(), random.Random(4)
    for step, loss in enumerate(noise(1_200)):
        speed = 1_000.0 * math.exp(rng.gauss(0.0, 0.01)) * (1.5 if step >= 800 else 1.0)
        detector.feed(step, {"loss": loss, "tokens_per_second": speed})
    assert [event for event in detector.events if event.kind is not Kind.LEVEL_DROP] == []


def test_collapse_of_the_loss_scale_warns_and_single_overflows_do_not() -> None:
    """GLM-130B: the scale fell thirty steps before the loss exploded. One halving now and then is how it works."""
    detector, scale, seen = Detector(), 2.0**32, []
    for step, loss in enumerate(noise(2_000)):
        if step < 16 or step in (600, 1_500) or (1_700 <= step < 1_712 and step % 2):
            scale /= 2
        elif step % 400 == 399:
            scale *= 2
        seen += detector.feed(step, {"loss": loss, "loss_scale": scale})
    (event,) = detector.events
    assert (event.tier, event.status, event.channels) == (Tier.WARN, Status.OPEN, ("loss_scale",))
    assert (event.onset_row, event.alarm_row) == (1_701, 1_707)
    assert "fell from" in event.evidence[0]


def test_slow_rise_is_bounded_as_far_back_as_its_alarm_came_late() -> None:
    """What grows by e-folds spends as long below the noise as above it."""
    rows = range(120)
    growing = [x + 0.001 * math.expm1(row / 15) for row, x in zip(rows, noise(120, seed=5), strict=True)]
    (event, *_) = fold([*noise(900), *growing])
    assert event.onset_row is not None and event.onset_low_row is not None
    assert event.onset_low_row <= event.onset_row - (event.alarm_row - event.onset_row)


def test_wander_of_the_runs_own_size_is_not_proposed() -> None:
    """Slow noise rises by as much as a small ramp, and comes back: it is known by what the run did before."""
    proposals = [e for curve in generate("red", 4, seed=77) for e in fold_curve(curve).events if e.tier is Tier.PROPOSE]
    assert proposals == []


def test_early_descent_is_no_wander() -> None:
    """A run of 600 points that doubles its loss is proposed at once: the steep start was taken for its own wander."""

    def young(seed: int) -> list[float]:
        calm = [0.5 * math.exp(-row / 60) + 0.42 + x - 2.0 for row, x in enumerate(noise(600, seed=seed))]
        return [x + (min(1.2, 0.01 * math.expm1((row - 400) / 15)) if row > 400 else 0.0) for row, x in enumerate(calm)]

    late = [seed for seed in range(40) if not any(e.tier is Tier.PROPOSE for e in fold(young(seed)))]
    assert len(late) <= 1


def test_slow_rise_that_came_back_is_what_the_run_does() -> None:
    """The same rise a second time is no proposal; one three times as high is."""

    def bump(height: float, count: int = 700) -> list[float]:
        return [height * math.exp(-(((row - 150) / 60.0) ** 2)) for row in range(count)]

    tiers = []
    for height in (0.3, 0.9):
        shape = [0.0] * 700 + bump(0.3) + bump(height)
        detector = Detector()
        for step, (rise, x) in enumerate(zip(shape, noise(len(shape), seed=3), strict=True)):
            detector.feed(step, {"loss": x + rise})
        tiers.append([event.tier for event in detector.events if event.onset_step and event.onset_step > 1_300])
    assert Tier.PROPOSE not in tiers[0] and Tier.PROPOSE in tiers[1]


def test_warm_up_repeated_without_a_session_mark_is_warned_of() -> None:
    """The log shows no restart: only the LR falls from one line to the next and climbs again. A stair only falls."""
    ramp = [3e-4 * 0.05 * row for row in range(1, 21)]
    for after, wanted in ((ramp, True), ([3e-5] * 60, False)):
        detector = Detector()
        for step, (loss, lr) in enumerate(zip(noise(600), [*ramp, *([3e-4] * 480), *after, *([after[-1]] * 80)], strict=False)):
            detector.feed(step, {"loss": loss, "lr": lr})
        found = [event for event in detector.events if event.kind is Kind.LR_MISMATCH and event.tier is not Tier.NOTICE]
        assert bool(found) is wanted


def test_high_spike_that_comes_back_is_no_reinit() -> None:
    """Real ones reach the loss of the first step, last fifty points and go: notices or warnings, never proposals."""
    rows = range(900)
    losses = [2.0 + 8.0 / (1 + row / 20) + x for row, x in zip(rows, noise(900, level=0.0), strict=True)]
    losses = [x + 7.0 * math.exp(-(row - 600) / 15) * (row >= 600) for row, x in zip(rows, losses, strict=True)]
    (event, *_) = [e for e in fold(losses) if e.onset_row == 600]
    assert event.kind is Kind.INSTANT_SPIKE and event.status is Status.RECOVERED and event.tier is not Tier.PROPOSE
