"""Times with their offset, a directory without a run, a no at the prompt, and who will check the next launch."""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronicle.checkpoints import CheckpointVerdict
from chronicle.cli import transaction
from chronicle.cli.options import nearest_runs
from chronicle.errors import Declined
from chronicle.goback import has_guard
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.story.plain import format_when
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.select import select_checkpoint
from rollback.errors import CheckpointNotFound
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli
from tests.rollback.conftest import pristine

__all__ = ["pristine"]


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader an hour or two east of UTC."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    monkeypatch.setenv("CHRONICLE_UTC", "")  # a command sets it for its process
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_people_read_local_times_with_their_offset(berlin: None, tmp_path: Path, chronicle: Cli) -> None:
    assert format_when("2026-11-22T13:05:09.000+00:00") == "2026-11-22 14:05 +01:00"
    assert format_when("2026-05-18T14:25:00+00:00") == "2026-05-18 16:25 +02:00"
    assert format_when("2026-05-18T14:25:00") == "2026-05-18 14:25"  # nobody knows of which zone
    verdict = CheckpointVerdict(entry_id="1", ts="2026-11-22T13:05:09+00:00", stamp="", full=True, passes=True)
    assert verdict.when == "2026-11-22 14:05 +01:00"
    toy_run(tmp_path)
    assert "2026-05-18 16:26 +02:00" in chronicle("log").out
    assert "+00:00" in chronicle("log", "--json").out and "+02:00" not in chronicle("log", "--json").out


def test_a_setting_shows_utc(berlin: None, tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run(tmp_path)
    (tmp_path / "chronicle.toml").write_text("utc = true\n")
    assert "2026-05-18 14:26 +00:00" in chronicle("log").out
    (tmp_path / "chronicle.toml").write_text("utc = 7\n")
    assert "expected true or false" in chronicle("log").err
    (tmp_path / "chronicle.toml").unlink()
    monkeypatch.delenv("CHRONICLE_UTC")
    assert "+02:00" in chronicle("log").out
    monkeypatch.setenv("CHRONICLE_UTC", "1")
    assert "2026-05-18 14:26 +00:00" in chronicle("log").out
    assert "utc" in chronicle("config", "show").out


@pytest.mark.parametrize("verb", ["status", "log", "spikes", "costs", "audit", "propose"])
def test_a_directory_without_a_run_is_an_error_naming_the_nearest(tmp_path: Path, chronicle: Cli, verb: str) -> None:
    toy_run(tmp_path / "work" / "a", "u")
    here = tmp_path / "work" / "b"
    here.mkdir()
    missed = chronicle(verb, cwd=here)
    assert missed.code == 1
    assert "no journal here" in missed.err and "`../a/logs/u`" in missed.err
    assert "--logs ../a/logs --run u" in missed.err
    assert list(here.iterdir()) == []


def test_at_most_three_runs_are_named(tmp_path: Path) -> None:
    for name in "abcde":
        toy_run(tmp_path / "work" / name, "u")
    (tmp_path / "work" / "here").mkdir()
    assert nearest_runs(tmp_path / "work" / "here") == ["../a/logs/u", "../b/logs/u", "../c/logs/u"]


def test_a_step_of_another_launch_is_named() -> None:
    found = [
        Checkpoint(path=Path("c/opt_step-40"), step=40, step_source="name", format="deepspeed", files=(), launch=6)
    ]
    with pytest.raises(CheckpointNotFound, match="step 40 of launch 7: step 40 exists in launch 6") as missed:
        select_checkpoint(found, 40, 7)
    assert missed.value.remedy == "name it: 40@6"


def test_no_at_the_prompt_changes_nothing_and_is_no_error(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_run(tmp_path)

    def declined(*_: Any, **__: Any) -> None:
        raise Declined

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    with pytest.raises(Declined):
        transaction.agree("Apply?", "plan", yes=False)
    monkeypatch.setattr("chronicle.goback.open_run", declined)
    answered = chronicle("undo")
    assert (answered.code, answered.err) == (0, "nothing was changed\n")


@pytest.mark.parametrize(("answer", "code", "kind"), [("m", 0, "run.place"), ("f", 0, "run.fork"), ("n", 0, None)])
def test_a_copy_is_asked_about_on_a_terminal(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, kind: str | None
) -> None:
    """The answer is recorded and the command goes on; without one nothing is written."""
    toy_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run = tmp_path / "b" / "logs" / "toy"
    monkeypatch.chdir(tmp_path / "b")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: answer)
    before = len(read_journal(RunPaths(run)).entries)
    assert chronicle("note", "from here").code == code
    kinds = [entry.kind for entry in read_journal(RunPaths(run)).entries[before:]]
    assert kinds == ([kind, "note"] if kind else [])


def test_plan_names_the_guard_only_where_there_is_one(tmp_path: Path) -> None:
    class Plan:
        has_manifest, source = False, ""

    story = StoryRun(tmp_path)
    story.start(1)
    assert not has_guard(Plan(), read_journal(story.paths))  # type: ignore[arg-type]
    story.add("guard.verdict", launch=1, data={"verdict": "passed", "checks": []})
    assert has_guard(Plan(), read_journal(story.paths))  # type: ignore[arg-type]


def test_run_without_a_guard_is_told_how_to_name_its_checkpoints(tmp_path: Path, chronicle: Cli) -> None:
    story = StoryRun(tmp_path)
    story.start(1)
    story.end(1, 5)
    shown = chronicle("status").out
    assert "without a guard saves are not recorded" in shown and "--checkpoints DIR" in shown
    story.add("guard.verdict", launch=1, data={"verdict": "passed", "checks": []})
    assert "without a guard" not in chronicle("status").out


def test_rollback_without_a_step_names_the_open_proposal(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    shown = chronicle("rollback")
    assert shown.code == 2 and "--to is missing, and no proposal is open" in shown.err
    command = "chronicle rollback --to 5 --lr-scale 0.5"
    run.add("proposal", step=9, title="go back to 5", data={"target_step": 5, "lr_scale": 0.5, "command": command})
    shown = chronicle("rollback")
    assert shown.code == 2 and "the open proposal names step 5" in shown.err and f"`{command}`" in shown.err


def test_a_note_is_read_from_standard_input(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("seen on node 7\nat noon\n"))
    assert chronicle("note", "-").out.strip().endswith("seen on node 7")
    assert chronicle("log", "-n", "1", "--json").json[0]["data"]["text"] == "at noon"


def test_help_is_a_word_too(chronicle: Cli) -> None:
    assert chronicle("help").out == chronicle("--help").out
    assert chronicle("help", "note").out == chronicle("note", "--help").out
