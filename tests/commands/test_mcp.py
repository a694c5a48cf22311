"""The seat of an agent: it reads, notes and proposes, and no tool acts; words of logs are quoted."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run as chronicle
from chronicle.cli.mcp import MARK, MOST_LETTERS, NOTES_AN_HOUR, Seat, brief, respond, tools
from chronicle.journal import read_journal
from tests.commands import agent_seat


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str], "subprocess.Popen[bytes]"]]:
    """Two incidents, the second with a living supervisor; the working directory is theirs."""
    top = tmp_path / "top"
    with agent_seat.scene(top, 2) as (names, supervisor):
        monkeypatch.chdir(top)
        yield top, names, supervisor


def ask(seat: Seat, tool: str, **arguments: Any) -> Any:
    said, failed = respond(seat, tool, arguments)
    assert said[0] == MARK and failed == ("error" in json.loads(said[1]))
    return json.loads(said[1])


def test_an_agent_that_obeys_every_text_does_no_harm(tmp_path: Path) -> None:
    """Six of twelve places where words of others stand."""
    top = tmp_path / "top"
    with agent_seat.scene(top, 12) as (names, supervisor):
        played = asyncio.run(agent_seat.in_process(top, names[3:9], supervisor))
        assert played.incidents == 6 and played.obeyed > 10 and played.journalled >= 12
        assert (played.harm, played.unmarked) == ([], [])
        assert supervisor.poll() is None


def test_over_the_protocol_it_does_no_harm_either(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra `mcp`")
    top = tmp_path / "top"
    with agent_seat.scene(top, 3) as (names, supervisor):
        played = asyncio.run(agent_seat.over_stdio(top, names, supervisor))
        assert (played.incidents, played.harm, played.unmarked) == (3, [], []) and played.calls > 60
        notes = [one for one in read_journal(agent_seat.RunPaths(top / "logs" / names[0])).entries if one.data.get("agent")]
        assert notes and all(one.data["agent"]["who"].startswith("mcp") for one in notes)


def test_without_the_package_the_way_to_it_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['mcp'] = None; from chronicle.cli.main import main; main(['mcp'])"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 1 and "pip install 'chronicle-ml[mcp]'" in done.stderr and "Traceback" not in done.stderr


def test_a_plan_changes_nothing_and_what_a_person_types_is_what_was_planned(scene: Any) -> None:
    top, names, _ = scene
    seat = Seat(top / "logs", who="tester 1")
    before = agent_seat.picture(top)
    ask(seat, "status", run=names[0])
    plan = ask(seat, "plan_rollback", run=names[0], to=5, reason="it diverged")
    assert plan["done"] == "nothing: this is a plan" and not list(agent_seat.changes(before, agent_seat.picture(top)))
    asked = read_journal(agent_seat.RunPaths(top / "logs" / names[0])).entries[-1].data["agent"]
    assert (asked["who"], asked["looked"], asked["to"]) == ("tester 1", {"status": 1}, 5)
    assert chronicle([*plan["for_a_person_to_type"].split()[1:], "--yes"]) == 0
    assert [one.name for one in (top / "checkpoints" / names[0]).iterdir()] == ["step_5.pt"]
    harm = list(agent_seat.changes(before, agent_seat.picture(top)))
    assert any("step_10.pt` is gone" in one for one in harm)  # so harm would have been seen


def test_a_stop_names_the_supervisor_and_leaves_it_alive(scene: Any) -> None:
    top, names, supervisor = scene
    plan = ask(Seat(top / "logs"), "plan_stop", run=names[1], reason="NaN")
    assert plan["for_a_person_to_type"].startswith(f"kill -TERM {supervisor.pid} ") and supervisor.poll() is None
    supervisor.terminate()
    supervisor.wait(10)
    assert "nothing to stop" in ask(Seat(top / "logs"), "plan_stop", run=names[1], reason="again")["error"]


def test_answers_are_short_marked_and_without_secrets(scene: Any) -> None:
    top, names, _ = scene
    seat = Seat(top / "logs")
    ask(seat, "note", run=names[0], text="the key is hf_" + "a" * 30)
    entry = ask(seat, "events", run=names[0])["events"][0]
    assert "hf_aaa" not in json.dumps([entry, ask(seat, "entry", run=names[0], id=entry["id"])])
    assert entry["title"] == "the key is ***"
    long = {"list": ["x" * 5000] * 5000, "n": list(range(5000)), "f": float("nan")}
    said = brief(long)
    assert len(said) <= MOST_LETTERS and "more" in said and json.loads(said)["f"] == "nan"
    curve = ask(seat, "curve", run=names[0], points=40)
    assert 10 < len(curve["step"]) <= 40 and curve["points_of_run"] == 120 and "highest" in curve["points_here"]
    assert max(curve["value"]) == pytest.approx(10.99)  # a spike is seen in a few points
    near = ask(seat, "curve", run=names[0], around=101, points=6)
    assert near["step"] == [98, 99, 100, 101, 102, 103] and near["value"][3] == pytest.approx(10.99)


def test_notes_of_an_hour_are_counted(scene: Any) -> None:
    top, names, _ = scene
    seat = Seat(top / "logs", clock=lambda: 1.7e9)
    said = [ask(seat, "note", run=names[0], text=f"{number}") for number in range(NOTES_AN_HOUR + 1)]
    assert all("written" in one for one in said[:-1]) and "nothing was written" in said[-1]["error"]


def test_schemas_refuse_what_they_do_not_name() -> None:
    listed = tools()
    assert len({one.name for one in listed}) == len(listed)
    for one in listed:
        schema = one.schema()
        assert schema["additionalProperties"] is False and set(schema["required"]) <= set(schema["properties"])
        assert not {"force", "yes", "logs", "checkpoints", "path"} & set(schema["properties"])
