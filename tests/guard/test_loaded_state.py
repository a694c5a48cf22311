"""State as it was right after the load, the newest checkpoint, and the far end of a schedule. Pure."""

from dataclasses import replace
from pathlib import Path

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import Outcome
from chronicle.resume.checks.memory import check_loaded, further_checks
from chronicle.resume.checks.run import check_newest
from chronicle.resume.contract import Expectation
from chronicle.resume.journal import fold_history
from chronicle.resume.learning_rate import far_points
from chronicle.resume.memory import Memory, RankDigest, Scheduler
from chronicle.resume.moving import LoadedState

SAVED = Memory(
    step=12,
    frozen="2 of 6 (aa)",
    objects={"Counter 0": "seven"},
    schedulers=(Scheduler(name="LambdaLR", further=((1.0, 0.5),)),),
    ranks=(RankDigest(rank=0, each_buffer={"mean": "m"}),),
)
FACTS = {"mean": "m", "object Counter 0": "seven"}
ENTRY = LoadedState(facts=FACTS, frozen="2 of 6 (aa)", objects_before={"object Counter 0": "new"})


def expected(**accepted: str) -> Expectation:
    return Expectation(basis="manifest", memory=SAVED, accepted=accepted)


def failing(entry: LoadedState, found: Memory, **accepted: str) -> list[str]:
    return [check.name for check in check_loaded(expected(**accepted), entry, found, rank=0) if not check.ok]


@pytest.mark.parametrize(
    ("entry", "found", "names"),
    [
        ({}, {}, []),
        ({"facts": {**FACTS, "mean": "zero"}}, {}, ["buffers"]),
        ({"frozen": "0 of 6 (bb)"}, {}, []),  # the script freezes after the load
        ({}, {"frozen": "0 of 6 (bb)"}, []),  # and thaws by plan, or for half a step
        ({"frozen": "0 of 6 (bb)"}, {"frozen": "0 of 6 (bb)"}, ["frozen parameters"]),
        ({}, {"objects": {"Counter 0": "eight"}}, []),  # it moves when the first batch is drawn
        ({}, {"objects": {"Counter 0": "new"}}, ["state of `Counter 0`"]),
        ({"facts": {**FACTS, "object Counter 0": "six"}}, {}, ["state of `Counter 0`"]),
    ],
)
def test_each_difference_counts_where_it_can_only_be_an_accident(
    entry: dict[str, object], found: dict[str, object], names: list[str]
) -> None:
    assert failing(replace(ENTRY, **entry), replace(SAVED, **found)) == names  # type: ignore[arg-type]


def test_other_frozen_layers_can_be_meant() -> None:
    other = "0 of 6 (bb)"
    assert failing(replace(ENTRY, frozen=other), replace(SAVED, frozen=other), frozen_parameters="second stage") == []


def test_schedule_that_ends_elsewhere_names_the_step_it_departs_at() -> None:
    later = replace(SAVED, schedulers=(Scheduler(name="LambdaLR", further=((1.0, 0.4),)),))
    (check,) = further_checks(expected(), later)
    assert check.expected == f"step +{list(far_points())[1]}: 0.5"
    assert [one.outcome for one in further_checks(expected(schedule="longer run"), later)] == [Outcome.NOTED]
    assert list(further_checks(expected(), SAVED)) == []


def test_newest_checkpoint_is_that_of_the_weights_that_went_on(tmp_path: Path) -> None:
    """A launch that was let go on from 12 leaves 24 behind; what it saves itself counts again."""
    paths = RunPaths(tmp_path / "logs" / "tr")
    roots = {step: tmp_path / f"step-{step}" for step in (12, 24, 18)}
    for root in roots.values():
        root.mkdir()

    def newest() -> list[str]:
        history = fold_history(read_journal(paths).entries)
        return [check.expected for check in check_newest(SAVED, roots[12], history, None)]

    with JournalWriter(paths) as writer:
        for step in (12, 24):
            writer.append("checkpoint", step=step, data={"path": str(roots[step])})
        assert newest() == [f"step 24: {roots[24]}"]
        writer.append("guard.verdict", step=12, data={"verdict": "passed"})
        assert newest() == []
        writer.append("checkpoint", step=18, data={"path": str(roots[18])})
        assert newest() == [f"step 18: {roots[18]}"]
    roots[18].rmdir()  # moved away by a rollback
    assert newest() == []
