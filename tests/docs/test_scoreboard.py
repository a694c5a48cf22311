"""The scoreboard names every row that differs, and its fixed selections name cases that are there."""

import json
from pathlib import Path

import pytest

from benchmarks.scoreboard import __main__ as board
from benchmarks.scoreboard.sections import ALWAYS_PLANTED, HANGS, SCRIPTS, Section, differences
from benchmarks.scoreboard.stored import PLACE, lay, normalise, pack, stored_runs


def test_a_row_that_changed_came_or_went_is_named_and_a_figure_within_its_tolerance_is_not() -> None:
    before = {"same": 1, "words": "passed", "gone": 2, "CPU ratio": 1.0}
    now = {"same": 1, "words": "missed", "new": 3, "CPU ratio": 1.2}
    assert list(differences(before, now, "guard-cost")) == [
        ("gone", 2, "absent"),
        ("new", "absent", 3),
        ("words", "passed", "missed"),
    ]
    assert [row for row, *_ in differences(before, now, "size")] == ["CPU ratio", "gone", "new", "words"]


def test_a_section_that_fails_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a section that no process knows ends it at once."""
    section = Section(play=dict, limit_seconds=60, meaning="nothing")
    monkeypatch.setitem(board.SECTIONS, "unknown", section)
    _, _, rows, _ = board.play("unknown")
    assert rows == {"section": "could not run: exit 1: KeyError: 'unknown'"}


def test_the_selections_are_cases_that_there_are() -> None:
    """Among the planted bugs are the two that were red when the scoreboard was made."""
    from benchmarks.hangs.__main__ import scenarios
    from benchmarks.planted_bugs.catalogue import causes
    from benchmarks.scripts_of_others.play import list_scripts

    assert set(HANGS) <= {one.name for one in scenarios()}
    assert set(SCRIPTS) <= {one.name for one in list_scripts()}
    assert set(ALWAYS_PLANTED) <= {(one.rig, one.name) for one in causes()}
    assert all(one.path.is_file() for one in list_scripts())


def test_a_stored_run_is_laid_as_it_was_packed_and_is_the_run_itself(tmp_path: Path) -> None:
    """Byte for byte, but for the inode numbers by which a run knows that it is no copy."""
    files = stored_runs()["finished"]
    lay(files, tmp_path / "run")
    again = pack(tmp_path / "run")
    assert {name: text for name, text in again.items() if not name.endswith("run.json")} == {
        name: text for name, text in files.items() if not name.endswith("run.json")
    }
    place = json.loads(again["logs/r/run.json"])
    assert place["inode"] == (tmp_path / "run/logs/r").stat().st_ino
    assert not [text for text in files.values() if "/work/" in text]


def test_what_no_two_machines_share_is_no_part_of_an_output() -> None:
    said = f"{PLACE}/finished/x at 2026-11-28T05:08:01.036+00:00 of 01M8G8V6WC0EYXSKKB160TFR9R by /opt/bin/python3.11, 3.2 GiB "
    assert normalise(said) == "TOP/x at TIME of ID by PYTHON, SIZE"
