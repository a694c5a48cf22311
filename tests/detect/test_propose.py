"""Proposals: never after the onset, the ladder one rung at a time, budgets, and the exact line to type."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detector.golden import GOLDEN, Golden, is_right, judge
from rollback.detect import Event, Kind, Status, Tier
from rollback.propose import Action, CandidateCheckpoint, History, PastRollback, propose


def event(onset: int, low: int | None = None, **changes: object) -> Event:
    base = Event(
        id=0, kind=Kind.GRADUAL_DIVERGENCE, tier=Tier.PROPOSE, status=Status.DIVERGING, onset_step=onset,
        onset_low_step=onset if low is None else low, onset_row=onset, onset_low_row=low, alarm_step=onset + 50,
        alarm_row=onset + 50, channels=("loss",),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def grid(first: int, last: int, step: int = 250, **changes: object) -> list[CandidateCheckpoint]:
    return [CandidateCheckpoint(step=s, verified=True, **changes) for s in range(first, last + 1, step)]  # type: ignore[arg-type]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_golden_events_of_the_80b_run(golden: Golden) -> None:
    """The rows of the chronicle, drawn again from its plots: the right checkpoint, and none where none was due."""
    _, proposal = judge(golden, seed=1)
    assert is_right(golden, proposal), proposal
    if golden.action is not None and proposal is not None:
        assert proposal.action is golden.action


@settings(max_examples=200, deadline=None)
@given(
    st.integers(300, 50_000), st.integers(0, 400), st.sampled_from([1, 10, 50, 100, 250, 1000]),
    st.sampled_from([1.0, 3.5, 100.0]),
)
def test_target_lies_before_the_lower_bound(onset: int, doubt: int, spacing: int, interval: float) -> None:
    """Whatever the grid, the interval and the doubt: never at or after the earliest possible onset."""
    low = max(0, onset - doubt)
    proposal = propose([event(onset, low, interval=interval)], grid(0, onset + 1_000, spacing))
    assert proposal is not None
    if proposal.target_step is not None:
        assert proposal.target_step < low
        full = min(low - 50 * interval, onset - max(100 * interval, 2 * doubt))
        assert proposal.target_step <= full or not [s for s in range(0, onset, spacing) if s <= full]


def test_short_run_still_gets_a_target_and_is_told_so() -> None:
    """A demo of 200 steps with checkpoints every 20: the full margin would leave nothing."""
    proposal = propose([event(90, 85)], grid(20, 200, 20))
    assert proposal is not None and proposal.target_step == 80
    assert any("is 10 steps before it" in reason for reason in proposal.reasons)


def test_a_proposal_says_the_rule_that_chose_its_checkpoint() -> None:
    proposal = propose([event(900, 890)], grid(250, 1_000))
    assert proposal is not None and proposal.target_step == 750
    told = "the trouble begins at step 900; 100 steps earlier is step 800; "
    assert told + "the newest sound checkpoint up to there is of step 750" in proposal.reasons


def test_nothing_before_the_onset_is_said_and_not_papered_over() -> None:
    proposal = propose([event(60)], grid(100, 500))
    assert proposal is not None and proposal.target_step is None and proposal.command is None
    assert proposal.reasons[-1] == (
        "no verified checkpoint at or before step 0 (onset 60): the oldest one is of step 100; "
        "look for an older one or restart from scratch"
    )  # the last reason is what a person reads on stderr


def test_what_a_step_back_has_undone_needs_no_rollback() -> None:
    """The run went back to step 800 by itself: the trouble from 1,000 on is not in its weights any more."""
    trouble = event(1_000)
    assert propose([trouble], grid(0, 1_250)) is not None
    back = event(800, kind=Kind.RESTART_REWIND, tier=Tier.NOTICE, status=Status.RECOVERED)
    assert propose([trouble, back], grid(0, 1_250)) is None


def test_unverified_and_unhealthy_checkpoints_are_passed_over() -> None:
    bad = [CandidateCheckpoint(step=1_000, verified=False), CandidateCheckpoint(step=900, verified=True, healthy=False)]
    proposal = propose([event(1_500)], [*bad, *grid(0, 750)])
    assert proposal is not None and proposal.target_step == 750
    assert [other.step for other in proposal.alternatives] == [500, 250]


def test_checkpoint_saved_inside_a_spike_is_passed_over() -> None:
    """The spike went away; the optimizer's moments of that checkpoint remember it."""
    spike = event(740, kind=Kind.INSTANT_SPIKE, tier=Tier.NOTICE, status=Status.RECOVERED, recovered_step=760, cluster=7)
    proposal = propose([spike, event(1_000)], grid(0, 1_000))
    assert proposal is not None and proposal.target_step == 500


def test_notices_warnings_and_recovered_events_propose_nothing() -> None:
    quiet = [event(500, tier=Tier.NOTICE), event(600, tier=Tier.WARN), event(700, status=Status.RECOVERED)]
    assert propose(quiet, grid(0, 1_000)) is None


def test_event_that_a_rewind_has_undone_proposes_nothing() -> None:
    """A run that went back to step 500 has left the divergence of step 900 behind; one of step 400 it still has."""
    rewind = event(500, kind=Kind.RESTART_REWIND, tier=Tier.NOTICE, status=Status.RECOVERED, id=1, cluster=1)
    assert propose([event(900), rewind], grid(0, 1_000)) is None
    assert propose([event(400), rewind], grid(0, 1_000)) is not None


def test_onset_is_that_of_the_cluster() -> None:
    """exp1: the loud spikes came 150 steps after the small shift that began it all."""
    first = event(14_655, 14_640, tier=Tier.WARN, status=Status.PARTIAL)
    events = [first, event(14_856, id=1), event(20_000, cluster=5, tier=Tier.NOTICE)]
    proposal = propose(events, grid(13_000, 15_500))
    assert proposal is not None and proposal.target_step == 14_500 and proposal.events == (0, 1)


@pytest.mark.parametrize(
    ("rows", "kind", "target"),
    [(2, Kind.INSTANT_SPIKE, 3_750), (3, Kind.INSTANT_SPIKE, 3_500), (90, Kind.DATA_ORDER, 3_750), (0, Kind.DATA_ORDER, 3_750)],
)
def test_one_hard_batch_before_it_is_not_where_a_divergence_began(rows: int, kind: Kind, target: int) -> None:
    """Nor is another order of the data, recovered or not. A spike of three points is: it may be the first of the series."""
    spike = event(3_650, kind=kind, tier=Tier.NOTICE, status=Status.RECOVERED, recovered_row=3_650 + rows)
    spike = spike if rows else replace(spike, status=Status.PARTIAL, recovered_row=None)
    proposal = propose([spike, event(3_870, id=1)], grid(0, 5_000))
    assert proposal is not None and proposal.target_step == target
    assert proposal.events == ((0, 1) if target < 3_750 else (1,))


def test_what_was_told_as_a_divergence_is_still_one_when_the_order_of_the_data_explains_it() -> None:
    proposal = propose([event(3_870, kind=Kind.DATA_ORDER, status=Status.OPEN)], grid(0, 5_000))
    assert proposal is not None and proposal.target_step == 3_750


def test_relapses_climb_the_ladder_to_stop() -> None:
    """Every relapse in the region climbs one rung and goes one checkpoint further back; the last rung has no command."""
    past: tuple[PastRollback, ...] = ()
    actions, targets = [], []
    for _ in range(4):
        proposal = propose([event(5_000)], grid(0, 6_000), History(rollbacks=past))
        assert proposal is not None
        actions.append(proposal.action)
        targets.append(proposal.target_step)
        past += (PastRollback(onset_step=5_000, target_step=proposal.target_step or 0, action=proposal.action),)
    assert actions == [Action.SKIP, Action.LR_75, Action.LR_50, Action.STOP]
    assert targets == [4_750, 4_500, 4_250, 4_000]
    assert proposal.command is None


def test_budgets_are_named_when_they_are_empty() -> None:
    past = tuple(PastRollback(onset_step=o, target_step=o - 250, day=9) for o in (1_000, 20_000, 40_000, 60_000))
    history = History(last_step=91_000, rollbacks=past, day=9, discarded_steps=20_000)
    proposal = propose([event(90_000)], grid(80_000, 91_000), history)
    assert proposal is not None and [text.split(" (")[0] for text in proposal.exhausted] == [
        "4 rollbacks in one day", "19% of all steps discarded",
    ]  # fmt: skip


def test_command_carries_exactly_what_the_rung_asks() -> None:
    one = [event(1_000)]
    neither = propose(one, grid(0, 1_000), History(run="r"))
    first = propose(one, grid(0, 1_000), History(run="r", honours=frozenset({"reshuffle"})))
    skip = propose(one, grid(0, 1_000), History(honours=frozenset({"skip", "reshuffle"})))
    older = propose(one, grid(0, 1_000, honours=frozenset()), History(honours=frozenset({"skip"})))
    raised = propose(one, grid(0, 1_000), History(lr_raised=2.0))
    twins = propose(one, [*grid(0, 750, launch=1), *grid(750, 750, launch=2)], History())
    assert neither and neither.command == "chronicle rollback --to 750 --run r"
    assert any("change it in the trainer" in reason for reason in neither.reasons)
    assert first and first.command == "chronicle rollback --to 750 --reshuffle --run r"
    assert skip and skip.command == "chronicle rollback --to 750 --skip-batches 450"
    assert older and older.command == "chronicle rollback --to 750"  # that one was saved before the run could skip
    assert raised and raised.command == "chronicle rollback --to 750 --lr-scale 0.5"
    assert twins and twins.command is not None and "--to 750@" in twins.command


def test_what_the_checkpoint_cannot_carry_is_for_a_person() -> None:
    """The command is one that `rollback` would not refuse; the change of the LR stands beside it."""
    elsewhere = grid(0, 1_000, lr_elsewhere="no scheduler was saved")
    raised = propose([event(1_000)], elsewhere, History(lr_raised=2.0))
    assert raised and raised.command == "chronicle rollback --to 750" and raised.lr_scale == 0.5
    assert raised.by_hand == "multiply by 0.5 the LR that the next launch is given (no scheduler was saved)"
    mismatch = event(1_000, kind=Kind.LR_MISMATCH, evidence=("LR 2e-4 where 1e-4 was promised",))
    wrong = propose([mismatch], elsewhere, History(lr_expected=1e-4))
    assert wrong and wrong.by_hand.startswith("give the next launch the LR 0.0001") and "--lr" not in (wrong.command or "")
    same = propose([event(1_000)], elsewhere, History())
    assert same and same.by_hand == ""


def test_wrong_lr_is_put_right_before_anything_else() -> None:
    """exp9: no data was bad; a checkpoint saved under the wrong LR carries it, so the target lies before that."""
    wrong = event(30_250, kind=Kind.LR_MISMATCH, evidence=("lr 2.5e-08, expected 1.77e-05",), cluster=1, id=1)
    history = History(lr_expected=1.77e-5)
    proposal = propose([wrong, event(30_880, cluster=0)], grid(29_000, 31_000), history)
    assert proposal is not None and proposal.action is Action.FIX_LR
    assert proposal.target_step == 30_250 and proposal.command == "chronicle rollback --to 30250 --lr 1.77e-05"


def test_the_promised_lr_is_taken_from_the_event_and_the_target_lies_where_it_broke() -> None:
    """`spikes` printed "correct the LR" without saying which; a divergence after it went back by its own margin."""
    wrong = event(401, kind=Kind.LR_MISMATCH, evidence=("lr 0.003, expected 0.0003",), cluster=1, id=1, expected=3e-4)
    proposal = propose([wrong, event(431, 251, cluster=0)], grid(100, 700, 100), History())
    assert proposal is not None and proposal.action is Action.FIX_LR
    assert proposal.command == "chronicle rollback --to 400 --lr 0.0003"


def test_wrong_lr_alone_goes_back_to_where_it_began() -> None:
    """Seen at the first logged step, before any damage: the checkpoint that was loaded is as good as ever."""
    wrong = event(30_250, kind=Kind.LR_MISMATCH, status=Status.OPEN, evidence=("lr 2.5e-08, expected 1.77e-05",))
    proposal = propose([wrong], grid(29_000, 31_000), History(lr_expected=1.77e-5))
    assert proposal is not None and proposal.target_step == 30_250


def test_lr_is_never_raised_and_has_a_floor() -> None:
    past = (PastRollback(onset_step=5_000, target_step=4_750, action=Action.LR_75),)
    proposal = propose([event(5_000)], grid(0, 6_000), History(rollbacks=past, lr_factor=0.15))
    assert proposal is not None and proposal.action is Action.STOP and proposal.lr_scale == 1.0


def test_cost_is_in_steps_and_hours() -> None:
    proposal = propose([event(1_000)], grid(0, 1_000), History(last_step=1_750, seconds_per_step=36.0))
    assert proposal is not None and (proposal.cost_steps, proposal.cost_hours) == (1_000, 10.0)
