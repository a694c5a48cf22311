"""The detector's judgement is recorded: a rule that is changed, weakened or removed changes a line of the record."""

from pathlib import Path

import pytest

from tests.detect.recorded import MAKERS, SEEDS, describe, fold

RECORD = Path(__file__).with_name("recorded_events.txt")


def read_record() -> dict[str, list[str]]:
    """Title of each log -> its events."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[title].append(line.strip())
        else:
            title = line
            found[title] = []
    return found


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_events_are_those_of_the_record(maker: object) -> None:
    """If this fails by intention, `python -m tests.detect.recorded` writes the record anew, and its diff is the review."""
    assert callable(maker)
    known = read_record()
    for seed in SEEDS:
        for name, points in maker(seed):
            title = f"{maker.__name__}: {name}, seed {seed}"
            assert [describe(event) for event in fold(points)] == known[title], title


def test_record_holds_most_kinds_of_events_in_every_tier() -> None:
    words = {tuple(event.split()[:2]) for events in read_record().values() for event in events}
    assert {tier for tier, _ in words} == {"notice", "warn", "propose"}
    assert len({kind for _, kind in words}) >= 13
