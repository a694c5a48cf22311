"""Two planted faults in a real two-rank training, with nobody at the keyboard; all of it is `make chaos`."""

import itertools

import pytest

from benchmarks.chaos.__main__ import Campaign, causes_of
from benchmarks.chaos.faults import KINDS, Fault, draw

CUT, KILLED = Fault(0, "kill_in_save", 40, 0), Fault(1, "kill_supervisor", 47, 1)


@pytest.mark.slow
@pytest.mark.sample
def test_a_kill_in_a_save_and_a_killed_supervisor_leave_one_training(tmp_path):
    """It is started once, finishes, and every step that was done again is the same to the bit."""
    campaign = Campaign(tmp_path / "run", (CUT, KILLED), 60)
    try:
        played = campaign.play()
        done = campaign.log()
    finally:
        campaign.close()
    assert played["finished"] and len(played["starts"]) == 1, played
    assert sorted(campaign.struck()) == [0, 1]
    causes = [cause.partition(":")[0] for cause in causes_of(campaign.directory)]
    assert causes[:2] == ["crash", "crash"] and causes[2] in ("finished", "ended")
    values = {}
    for one in done:
        assert values.setdefault(one.step, (one.loss, one.rate, one.digest)) == (one.loss, one.rate, one.digest), one
    assert sorted(values) == list(range(1, 61)) and len(done) > 60


def test_faults_are_drawn_of_every_kind_at_steps_that_differ():
    faults = draw(40, 7, 20, (40, 80))
    assert {fault.kind for fault in faults} == set(KINDS) and len(faults) == 40
    assert all(one.step < other.step for one, other in itertools.pairwise(faults))
    assert draw(40, 7, 20, (40, 80)) == faults
