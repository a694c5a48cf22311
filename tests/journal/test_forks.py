"""A run that begins from another run's checkpoint: real guards, real checkpoints, and a parent that nobody writes to."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from benchmarks.histories.world import RUN, World, digest_of


@dataclass
class Family:
    """A parent with 18 steps, the checkpoint of its step 10, and a child; `said` collects what the child's guards say."""

    parent: World
    child: World
    said: io.StringIO

    @property
    def checkpoint(self) -> str:
        return str(self.parent.root / "opt_step-10")

    def status(self) -> dict[str, Any]:
        return json.loads(self.child.command("status", "--json")[1])  # type: ignore[no-any-return]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    parent, child, said = World(tmp_path / "parent"), World(tmp_path / "child"), io.StringIO()
    parent.create()
    parent.launch(None, 18)


    class Tee(io.StringIO):
        def write(self, text: str) -> int:
            said.write(text)
            return super().write(text)

    monkeypatch.setattr("benchmarks.histories.world.io", SimpleNamespace(StringIO=Tee))
    family = Family(parent, child, said)
    child.on_disk[family.checkpoint] = parent.on_disk["opt_step-10"]
    return family


def declare(family: Family) -> None:
    family.child.root.mkdir(parents=True)
    words = ("init", "--run", RUN, "--checkpoints", "checkpoints", "--from", family.checkpoint)
    assert family.child.command(*words)[0] == 0


def test_a_declared_child_begins_at_its_parents_step(family: Family) -> None:
    declare(family)
    shown = family.status()
    assert (shown["step"], shown["launch"], shown["lineage"]) == (10, None, [])
    assert (shown["parent"]["run"], shown["parent"]["launch"], shown["parent"]["step"]) == (RUN, 1, 10)
    before = digest_of(family.parent.home)
    assert family.child.launch(family.checkpoint, 6)
    shown = family.status()
    assert shown["lineage"] == [{"launch": 1, "first": 11, "last": 16, "inferred": False}]
    assert (shown["step"], shown["inferred"], shown["parent"]["launch"]) == (16, False, 1)
    graph = family.child.command("log", "--graph")[1].splitlines()
    assert graph[-1] == f"^  begins from run {RUN}, step 10 of launch 1"
    assert sum("begins from" in line for line in graph) == 1
    assert f"begins from run {RUN}, step 10 of launch 1" in family.child.command("status")[1]
    assert digest_of(family.parent.home) == before


def test_a_guard_recognises_another_runs_checkpoint_and_says_so_once(family: Family) -> None:
    family.child.create()
    assert family.status()["parent"] is None
    assert family.child.launch(family.checkpoint, 6)
    assert family.said.getvalue().count("this checkpoint belongs to run") == 1
    assert f"this checkpoint belongs to run {RUN} (launch 1, step 10)" in family.said.getvalue()
    shown = family.status()
    assert (shown["step"], shown["lineage"][0]["first"], shown["parent"]["step"]) == (16, 11, 10)
    assert "begins from" in family.child.command("log", "--graph")[1].splitlines()[-1]


def test_a_run_says_nothing_about_its_own_checkpoints_nor_a_copy_about_those_copied_with_it(family: Family) -> None:
    family.parent.launch("opt_step-15", 3)
    family.parent.fork()
    family.parent.launch("opt_step-15", 3, on_purpose=True)
    assert "belongs to run" not in family.said.getvalue()
    shown = json.loads(family.parent.command("status", "--json")[1])
    assert shown["parent"] is None and shown["lineage"][0] == {"launch": 1, "first": 1, "last": 15, "inferred": False}


def test_a_child_that_started_afresh_after_all_has_no_parent(family: Family) -> None:
    declare(family)
    family.child.launch(None, 6, on_purpose=True)
    assert family.status()["parent"] is None and family.status()["lineage"][0]["first"] == 1
