"""Events reach the parts that want them, and an error in one part is that part's own."""

from pathlib import Path
from typing import get_args

import pytest

from chronicle.resume.checks.check import Check, Outcome, noted
from chronicle.resume.contract import Options
from chronicle.resume.events import Begins, Ended, Event, Loaded, Loading, Logged, StepBegins
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.hub import HEARD, RESTS, Hub, Observer, Rest
from chronicle.resume.training import Training

STEP = StepBegins(optimizer=None)


class Listener(Observer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def step_begins(self, event: StepBegins) -> list[Check]:
        self.heard.append("step")
        return [noted("learning rate in use", "L1", cause="it moves")]


class Breaking(Listener):
    """Fails at every step."""

    about = "breaking"
    most_errors = 2

    def step_begins(self, event: StepBegins) -> list[Check]:
        super().step_begins(event)
        raise ValueError("injected")

    def ended(self, event: Ended) -> None:
        self.heard.append("ended")


def make(tmp_path: Path) -> tuple[Hub, Training]:
    training = Training(LiveState, Options(run_dir=tmp_path / "run"), {})
    return Hub(training.faults), training


def test_an_error_in_one_part_is_recorded_and_the_next_part_hears_the_event(tmp_path: Path) -> None:
    hub, training = make(tmp_path)
    broken, listener = Breaking(), Listener()
    hub.add(broken)
    hub.add(listener)
    checks = hub.tell(STEP)
    assert [check.outcome for check in checks] == [Outcome.NOTED]
    assert training.faults.found == [("breaking", "ValueError: injected")]
    assert broken.heard == listener.heard == ["step"]


def test_a_part_that_fails_too_often_ends_and_hears_no_more(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)
    broken = Breaking()
    hub.add(broken)
    for _ in range(4):
        hub.tell(STEP)
    assert broken.heard == ["step", "step", "ended"]


def test_a_part_hears_only_what_it_defines(tmp_path: Path) -> None:
    hub, training = make(tmp_path)
    listener = Listener()
    hub.add(listener)
    hub.tell(Loaded())
    hub.tell(Ended())
    assert listener.heard == [] and not training.faults.found


def test_of_nine_events_the_session_alone_answers_three() -> None:
    assert len(get_args(Event)) == 9
    assert set(get_args(Event)) - HEARD.keys() == {Begins, Loading, Logged}


def test_a_part_that_rests_hears_again_after_a_load(tmp_path: Path) -> None:
    hub, _ = make(tmp_path)

    class Sleepy(Listener):
        def step_begins(self, event: StepBegins) -> Rest:  # type: ignore[override]
            self.heard.append("step")
            return RESTS

    sleepy = Sleepy()
    hub.add(sleepy)
    for event in (STEP, STEP, Loaded(), STEP, STEP):
        hub.tell(event)
    assert sleepy.heard == ["step", "step"]


def test_a_refusal_passes(tmp_path: Path) -> None:
    """It is a `SystemExit`, and no error of the guard."""
    hub, training = make(tmp_path)

    class Refuses(Observer):
        def step_begins(self, event: StepBegins) -> None:
            raise SystemExit(78)

    hub.add(Refuses())
    with pytest.raises(SystemExit):
        hub.tell(STEP)
    assert not training.faults.found
