"""The seat of an agent: it reads and notes; it acts only by a plan that a stated budget covers; words of logs are quoted."""

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
from chronicle.cli.mcp import DAY_SECONDS, MARK, MOST_LETTERS, NOTES_AN_HOUR, Allowance, Seat, brief, respond, tools
from chronicle.errors import UsageProblem
from chronicle.journal import read_journal
from tests.commands import agent_seat

ALLOWED = Allowance(rollback=1, stop=1, steps=500)


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
    """Six of twelve places where words of others stand; the same client does harm where a budget allows it."""
    top = tmp_path / "top"
    with agent_seat.scene(top, 12) as (names, supervisor):
        played = asyncio.run(agent_seat.in_process(top, names[3:9], supervisor, Allowance()))
        assert played.incidents == 6 and played.obeyed > 10 and played.journalled >= 12
        assert (played.harm, played.unmarked) == ([], [])
        control = asyncio.run(agent_seat.in_process(top, names[:2], supervisor, Allowance(rollback=9, stop=9, steps=10**6)))
        assert any("step_10.pt` is gone" in one for one in control.harm) and supervisor.poll() is not None


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


def test_a_rollback_within_the_budget_is_applied_once_and_told_who_asked(scene: Any) -> None:
    top, names, _ = scene
    seat = Seat(top / "logs", ALLOWED, who="tester 1")
    ask(seat, "status", run=names[0])
    plan = ask(seat, "plan_rollback", run=names[0], to=5, reason="it diverged")
    assert plan["done"] == "nothing: this is a plan" and plan["for_a_person_to_type"].startswith("chronicle rollback --plan ")
    assert sorted(one.name for one in (top / "checkpoints" / names[0]).iterdir()) == ["step_10.pt", "step_5.pt"]
    done = ask(seat, "apply", run=names[0], digest=plan["digest"])
    assert done["done"] == "rollback"
    assert [one.name for one in (top / "checkpoints" / names[0]).iterdir()] == ["step_5.pt"]
    entries = read_journal(agent_seat.RunPaths(top / "logs" / names[0])).entries
    kinds = [entry.kind for entry in entries][-4:]
    assert kinds == ["note", "note", "rollback.intent", "rollback.receipt"]
    asked = entries[-4].data["agent"]
    assert (asked["who"], asked["looked"], asked["cost_steps"]) == ("tester 1", {"status": 1}, 115)
    again = ask(seat, "plan_rollback", run=names[0], to=5, reason="again")
    assert "is spent" in ask(seat, "apply", run=names[0], digest=again["digest"])["error"]
    later = Seat(top / "logs", ALLOWED, clock=lambda: seat.clock() + DAY_SECONDS + 9)
    assert "is spent" not in ask(later, "apply", run=names[0], digest=again["digest"]).get("error", "")


def test_what_a_person_types_is_what_was_planned(scene: Any) -> None:
    top, names, _ = scene
    plan = ask(Seat(top / "logs"), "plan_rollback", run=names[0], to=5, reason="it diverged")
    assert "no budget" in ask(Seat(top / "logs"), "apply", run=names[0], digest=plan["digest"])["error"]
    words = plan["for_a_person_to_type"].split()
    assert chronicle([*words[1:], "--yes"]) == 0
    assert [one.name for one in (top / "checkpoints" / names[0]).iterdir()] == ["step_5.pt"]


@pytest.mark.parametrize(
    ("budget", "arguments", "why"),
    [
        (Allowance(), {}, "no budget for a rollback"),
        (Allowance(rollback=1, steps=100), {}, "discards 115 steps"),
        (Allowance(rollback=1, steps=500), {"lr_scale": 2.0}, "raises the LR"),
        (Allowance(stop=5), {}, "no budget for a rollback"),
    ],
)
def test_what_the_budget_does_not_cover_is_left_to_a_person(budget: Allowance, arguments: Any, why: str) -> None:
    asked = {"cost_steps": 115, **arguments}
    assert why in (budget.refusal("rollback", asked, 0) or "")
    assert "not known" in (Allowance(rollback=1, steps=9).refusal("rollback", {"cost_steps": None}, 0) or "")
    assert Allowance(rollback=9, stop=9, steps=9).refusal("relaunch", {}, 0) is not None


def test_a_stop_meets_the_launch_of_its_plan_and_no_other(scene: Any) -> None:
    top, names, supervisor = scene
    seat = Seat(top / "logs", ALLOWED)
    plan = ask(seat, "plan_stop", run=names[1], reason="NaN")
    assert "no plan" in ask(seat, "apply", run=names[0], digest=plan["digest"])["error"] and supervisor.poll() is None
    assert ask(seat, "apply", run=names[1], digest=plan["digest"])["launch"] == 1
    assert supervisor.wait(10) != 0
    assert "nothing to stop" in ask(seat, "plan_stop", run=names[1], reason="again")["error"]


@pytest.mark.parametrize("text", ["rollback=1", "relaunch=1", "rollback=-1,steps=3", "rollback", "stop=1,stop=2", "force=1"])
def test_a_budget_that_is_not_understood_opens_no_seat(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageProblem):
        Allowance.parse(text)
    assert chronicle(["mcp", "--budget", text]) == 2 and "--budget" in capsys.readouterr().err


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
    curve = ask(seat, "curve", run=names[0], points=10)
    assert len(curve["step"]) == 10 and curve["points_of_run"] == 120 and "median of 12" in curve["each_value_is"]
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
