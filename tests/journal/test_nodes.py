"""A launch over several nodes: one start, one end, the worst; a node that never ended is named."""

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.costs import Cause, compute_costs, merge_nodes
from chronicle.paths import RunPaths
from chronicle.story import read_story


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "demo")


def write(paths, *rows):
    with JournalWriter(paths) as writer:
        for kind, launch, data in rows:
            writer.append(kind, launch=launch, data=data)
    return read_journal(paths).entries


def ended(host, code):
    return "launch.end", 1, {"host": host, "exit_code": code, "signal": None, "stopped_by": None}


def started(host, launch=1, **more):
    return "launch.start", launch, {"host": host, **more}


@pytest.mark.parametrize("codes, worst", [((0, 1), 1), ((1, 0), 1), ((0, 0), 0), ((3, 1), 3)])
def test_the_first_node_that_failed_is_how_the_launch_ended(paths, codes, worst):
    entries = write(paths, started("a"), started("b"), ended("a", codes[0]), ended("b", codes[1]))
    merged = merge_nodes(entries)
    assert [entry.kind for entry in merged] == ["launch.start", "launch.end"]
    assert merged[1].data["exit_code"] == worst
    launch = read_story(paths).launch(1)
    assert launch.outcome == f"ended with code {worst}"
    assert launch.host == "a"


def test_a_node_that_died_is_named(paths):
    write(paths, started("a"), started("b"), ended("a", 1))
    assert read_story(paths).launch(1).outcome == "ended with code 1, no end recorded on b"


def test_two_nodes_that_fail_are_one_interruption(paths):
    rows = [started("a"), started("b"), ended("a", 1), ended("b", 1), started("a", 2)]
    entries = write(paths, *rows)
    found = compute_costs(entries, {})
    assert [one.cause for one in found.interruptions] == [Cause.UNKNOWN]
    assert len(found.resume_seconds) == 2
