"""Costs of a run written out by hand: every number is checked against the small timeline it follows from.

    launch 1  steps 1..10 at 1 s each, code 1           t =   0 .. 11
    launch 2  from 8: steps 9..20, stopped on a proposal t =  20 .. 40      2 steps of launch 1 redone
    rollback to 12                                       t =  50            8 steps of launch 2 thrown away
    launch 3  from 12: steps 13..20, completed           t =  60 .. 70
"""

from datetime import UTC, datetime, timedelta

import pytest

from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.costs import Cause, compute_costs
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    seconds = 0.0

    def __call__(self):
        return BEGIN + timedelta(seconds=self.seconds)


class Story:
    """Writes a journal at given seconds and keeps the logged steps."""

    def __init__(self, paths):
        self.paths, self.clock, self.series = paths, Clock(), {}
        self.writer = JournalWriter(paths, clock=self.clock)

    def at(self, seconds, kind, **fields):
        self.clock.seconds = seconds
        return self.writer.append(kind, **fields)

    def steps(self, launch, first, last, *, start, each=1.0):
        points = [(step, BEGIN.timestamp() + start + each * (step - first)) for step in range(first, last + 1)]
        self.series[launch] = points
        with MetricsWriter(self.paths.metrics_path(launch)) as log:
            for step, time in points:
                log.write(step, {"loss": 1.0}, time=time)

    def costs(self, **options):
        return compute_costs(read_journal(self.paths).entries, self.series, **options)


@pytest.fixture
def story(tmp_path):
    return Story(RunPaths(tmp_path / "logs" / "demo"))


def tell(story):
    story.at(0, "launch.start", launch=1, data={"start_step": 0})
    story.steps(1, 1, 10, start=1)
    story.at(11, "launch.end", launch=1, data={"exit_code": 1, "last_step": 10, "cause": "crash"})
    story.at(20, "launch.start", launch=2)
    story.at(21, "guard.verdict", launch=2, step=8, data={"verdict": "passed"})
    story.steps(2, 9, 20, start=25)
    story.at(35, "incident", launch=2, step=18, data={"tier": "propose", "onset_step": 15, "id": 1})
    story.at(40, "launch.end", launch=2, data={"exit_code": 143, "last_step": 20, "cause": "proposal"})
    receipt = story.at(50, "rollback.receipt", step=12, data={"step": 12})
    story.at(60, "launch.start", launch=3)
    story.at(61, "launch.step", launch=3, step=12, data={"start_step": 12})
    story.steps(3, 13, 20, start=62)
    story.at(70, "launch.end", launch=3, data={"exit_code": 0, "last_step": 20})
    return receipt


def test_every_number_follows_from_the_timeline(story):
    tell(story)
    found = story.costs(samples_per_step=32)
    assert found.wall_seconds == 70
    # kept: 1..8 of launch 1, 9..12 of launch 2, 13..20 of launch 3; the first point of a log has no duration
    assert found.productive_seconds == pytest.approx(7 + 3 + 7)
    assert found.goodput_fraction == pytest.approx(17 / 70)
    assert [(one.cause, one.from_step, one.to_step, one.steps, one.seconds) for one in found.lost] == [
        (Cause.DELIBERATE, 20, 12, 8, pytest.approx(8.0)),
        (Cause.CRASH, 10, 8, 2, pytest.approx(2.0)),
    ]
    assert (found.repeated_steps, found.repeated_samples, found.recomputed_seconds) == (10, 320, pytest.approx(10.0))
    assert [(one.launch, one.cause, one.recovered_seconds) for one in found.interruptions] == [
        (1, Cause.CRASH, pytest.approx(14.0)),
        (2, Cause.DELIBERATE, pytest.approx(22.0)),
    ]
    assert found.detect_seconds == (pytest.approx(35 - 31),)
    assert found.decide_seconds == (pytest.approx(15.0),)
    assert found.resume_seconds == (pytest.approx(1.0), pytest.approx(5.0), pytest.approx(2.0))
    assert (found.mtbf_seconds, found.mttr_seconds) == (pytest.approx(35.0), pytest.approx(18.0))
    assert found.unverified_restarts == 1
    assert found.checkpoint_tax_fraction is None


@pytest.mark.parametrize("cause", [Cause.HANG, Cause.PREEMPTED, Cause.OUT_OF_MEMORY, Cause.CRASH])
def test_steps_that_were_done_again_have_the_cause_of_the_end_before(story, cause):
    """All of them were called a crash, beside the true cause of the interruption."""
    story.at(0, "launch.start", launch=1, data={"start_step": 0})
    points = story.steps(1, 1, 10, start=1) or story.series[1]
    story.at(15, "launch.attempt", launch=1, data={"attempt": 1, "cause": cause.value, "began": BEGIN.timestamp() + 15})
    story.steps(1, 7, 12, start=16)
    story.series[1] = [*points, *story.series[1]]
    story.at(30, "launch.end", launch=1, data={"exit_code": 1, "last_step": 12, "cause": cause.value})
    story.at(31, "launch.start", launch=2, data={"start_step": 9})
    story.steps(2, 10, 14, start=32)
    assert [(one.cause, one.steps) for one in story.costs().lost] == [(cause, 3), (cause, 4)]


def test_an_event_that_is_told_twice_was_detected_once(story):
    tell(story)
    story.at(36, "incident", launch=2, step=19, data={"tier": "propose", "onset_step": 15, "id": 1})
    assert len(story.costs().detect_seconds) == 1


def test_unknown_stays_unknown(story):
    """A rollback whose "from" nobody logged did not cost nothing (most of seed 003)."""
    story.at(0, "rollback.receipt", step=1496, data={"step": 1496})
    found = story.costs()
    assert [(one.from_step, one.steps, one.seconds) for one in found.lost] == [(None, None, None)]
    assert (found.repeated_steps, found.recomputed_seconds, found.goodput_fraction) == (None, None, None)


def test_a_run_without_a_journal_costs_unknown_and_not_zero(story):
    found = story.costs()
    assert (found.wall_seconds, found.productive_seconds, found.mtbf_seconds) == (None, None, None)


def test_launch_thrown_away_after_a_rollback_was_a_failed_experiment(story):
    """Seed 003, exp9 and exp10: a branch begun by a rollback and left by the next one."""
    tell(story)
    story.at(80, "rollback.receipt", step=12, data={"step": 12})
    causes = [one.cause for one in story.costs().lost]
    assert causes == [Cause.DELIBERATE, Cause.EXPERIMENT, Cause.CRASH]


def test_a_hardware_event_shortly_before_an_end_is_no_cause_of_it(story):
    """Identity is carried: no clock says that the one explains the other."""
    story.at(0, "launch.start", launch=1, data={"start_step": 0})
    story.at(5, "hardware", data={"serious": True, "xid": 64, "time": (BEGIN + timedelta(seconds=4)).isoformat()})
    story.at(11, "launch.end", launch=1, data={"exit_code": 1, "last_step": 10})
    assert [one.cause for one in story.costs().interruptions] == [Cause.UNKNOWN]


def test_an_undone_rollback_cost_no_steps(story):
    receipt = tell(story)
    story.at(71, "undo.receipt", refs=[receipt.id], data={})
    assert [one.cause for one in story.costs().lost if one.entry == receipt.id] == []


def test_checkpoint_tax_needs_every_save_to_be_timed(story):
    tell(story)
    story.at(71, "checkpoint", step=5, data={"save_seconds": 3.5})
    assert story.costs().checkpoint_tax_fraction == pytest.approx(3.5 / 70)
    story.at(72, "checkpoint", step=6, data={})
    assert story.costs().checkpoint_tax_fraction is None


def test_command_prints_the_table(story, tmp_path, monkeypatch, capsys):
    tell(story)
    monkeypatch.chdir(tmp_path)
    assert chronicle(["costs", "--run", "demo"]) == 0
    shown = capsys.readouterr().out
    assert "productive           17.0 s (goodput 24.3%)" in shown
    assert "  crash: 10 → 8, 2 steps, 2.0 s" in shown
    assert "checkpoint tax       unknown" in shown


def test_a_refused_launch_between_two_others_repeats_nothing_and_hides_nothing(story):
    """The guard writes the LR of step 0 before it refuses: that is no step."""
    story.at(0, "launch.start", launch=1, data={"start_step": 0})
    story.steps(1, 1, 15, start=1)
    story.at(16, "launch.end", launch=1, data={"exit_code": 137, "last_step": 15})
    story.at(20, "launch.start", launch=2)
    story.steps(2, 0, 0, start=21)
    story.at(22, "launch.end", launch=2, data={"exit_code": 78, "last_step": 0})
    assert story.costs().lost == ()
    story.at(30, "launch.start", launch=3)
    story.steps(3, 11, 20, start=31)
    story.at(41, "launch.end", launch=3, data={"exit_code": 0, "last_step": 20})
    assert [(one.from_launch, one.from_step, one.to_step, one.steps) for one in story.costs().lost] == [(1, 15, 10, 5)]
