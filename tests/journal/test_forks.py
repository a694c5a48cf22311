"""A run that begins from another run's checkpoint: real guards, real checkpoints, and a parent that nobody writes to."""

import io
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from benchmarks.histories.world import RUN, World, digest_of
from chronicle.journal.place import read_place
from chronicle.report.page_data import build_page_data
from chronicle.story.read import read_story
from chronicle.story.series import read_parent, read_series


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
    place = read_place(family.child.paths)
    assert place is not None and place.parent is not None
    assert (place.parent.run_id, place.parent.launch, place.parent.step) == (shown["parent"]["run_id"], 1, 10)
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


@pytest.mark.parametrize("every", [1, 3, 4])
def test_an_unguarded_child_that_logs_every_nth_step_begins_at_its_parents_step(family: Family, every: int) -> None:
    """Its first logged step is a multiple of n: 12, although the parent's checkpoint is of step 10."""
    declare(family)
    family.child.launch(family.checkpoint, 8, guarded=False, log_every=every)
    shown = family.status()
    assert (shown["lineage"][0]["first"], shown["inferred"]) == (11, True)
    assert f"begins from run {RUN}, step 10 of launch 1" in family.child.command("log", "--graph")[1].splitlines()[-1]
    (started,) = json.loads(family.child.command("log", "--json", "--kind", "launch.start")[1])
    assert started["inferred"] is True


def test_an_unguarded_child_that_started_afresh_after_all_owns_its_first_steps(family: Family) -> None:
    declare(family)
    family.child.launch(None, 8, guarded=False, log_every=3)
    assert family.status()["lineage"][0]["first"] <= 3


def test_a_fork_names_the_launch_that_holds_the_step(family: Family) -> None:
    """A later launch was refused, because it loaded nothing: it holds no step."""
    assert not family.parent.launch(None, 3)
    family.parent.fork()
    shown = json.loads(family.parent.command("log", "--json", "--kind", "run.fork")[1])
    assert shown[0]["title"] == f"fork of run {RUN}, step 18 of launch 1"
    assert shown[0]["data"]["parent"]["last_launch"] == 2


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


def test_the_parents_curve_is_drawn_up_to_the_checkpoint_and_the_parent_is_only_read(family: Family) -> None:
    declare(family)
    family.parent.launch("opt_step-15", 3)  # what the parent did later is no part of the child's story
    before = digest_of(family.parent.home)
    family.child.launch(family.checkpoint, 6)
    paths = family.child.paths
    found = read_parent(read_story(paths), paths)
    assert found is not None and found.channels["loss"].steps == list(range(1, 11))
    assert found.words == f"begins from run {RUN}, step 10 of launch 1"
    for words in (("render",), ("report",), ("log", "--graph"), ("status",), ("export",)):
        assert family.child.command(*words)[0] == 0
    page, text = paths.report_html.read_text(), paths.chronicle_md.read_text()
    assert found.words in page and found.words.capitalize() in text
    assert "inferred" not in text and (paths.run_dir / "plots" / "lineage.png").exists()
    data = build_page_data(read_story(paths), read_series(paths, [1]), {}, parent=found)
    assert data["parent"]["curves"]["loss"]["s"] == list(range(1, 11))
    assert digest_of(family.parent.home) == before


def test_a_parent_that_is_not_there_is_one_sentence(family: Family) -> None:
    declare(family)
    family.child.launch(family.checkpoint, 6)
    family.parent.home.rename(family.parent.home.with_name("elsewhere"))
    found = read_parent(read_story(family.child.paths), family.child.paths)
    assert found is not None and not found.channels and "is not here" in found.words
    assert family.child.command("report")[0] == 0 and found.words in family.child.paths.report_html.read_text()
    assert f"begins from run {RUN}, step 10 of launch 1" in family.child.command("log", "--graph")[1]


def test_another_run_in_the_parents_place_is_not_the_parent(family: Family) -> None:
    declare(family)
    family.child.launch(family.checkpoint, 6)
    family.parent.home.rename(family.parent.home.with_name("elsewhere"))
    World(family.parent.home).create()
    found = read_parent(read_story(family.child.paths), family.child.paths)
    assert found is not None and not found.channels


def test_an_unguarded_launch_is_marked_in_the_document_and_on_the_page(family: Family) -> None:
    family.parent.launch("opt_step-10", 4, guarded=False)
    for command in ("render", "report"):
        assert family.parent.command(command)[0] == 0
    paths = family.parent.paths
    assert "The lineage is inferred: no guard recorded what launch 2 loaded." in paths.chronicle_md.read_text()
    assert "| 2 | 10 (inferred) | 14 |" in paths.chronicle_md.read_text()
    assert "launch 1 (inferred)" in paths.report_html.read_text()


def test_a_checkpoint_that_nobody_recorded_is_seen_in_the_runs_directory(tmp_path: Path) -> None:
    """Without a guard nothing tells of a save, but the directory is known and holds one."""
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 11, guarded=False)
    shown = " ".join(world.command("status")[1].split())
    assert "checkpoint step 10 checkpoints/opt_step-10 · saved without the guard; check it: `chronicle verify 10`" in shown
    assert "name their directory" not in shown
    world.root.rename(world.home / "unlisted")
    assert "name their directory with --checkpoints DIR" in " ".join(world.command("status")[1].split())


@pytest.mark.parametrize("how", ["link", "absolute path"])
@pytest.mark.parametrize("parent_is_there", [True, False])
def test_a_fork_that_shares_its_parents_checkpoints_changes_none_of_them(
    tmp_path: Path, how: str, parent_is_there: bool
) -> None:
    """`cp -r` copies a link to a scratch disk, and a settings file that names one, but not what lies there."""
    world, data = World(tmp_path / "project"), tmp_path / "x" / "data"
    world.create()
    world.launch(None, 12)
    data.parent.mkdir()
    world.root.rename(data)
    if how == "link":
        world.root.symlink_to(data)
    else:
        settings = world.home / "chronicle.toml"
        settings.write_text(settings.read_text().replace('"checkpoints"', f'"{data}"'))
    assert world.command("rollback", "--to", "10", "--lr-scale", "0.5", "--yes")[0] == 0
    fork = World(tmp_path / "one" / "deeper" / "fork")
    shutil.copytree(world.home, fork.home, symlinks=True)
    code, said = fork.command("init", "--fork-of", str(world.paths.run_dir), "--run", RUN)
    assert code == 0 and f"`{data}` holds the checkpoints of its parent" in said
    if not parent_is_there:
        world.home.rename(tmp_path / "gone")
    before = digest_of(data)
    for words in (("undo", "--yes"), ("rollback", "--to", "5", "--yes"), ("prune", "--yes"), ("recover",)):
        code, said = fork.command(*words)
        assert code == 3 and "nothing of a parent is changed" in said and "--checkpoints DIR" in said, said
    assert digest_of(data) == before
    assert fork.command("verify", "--all")[0] == 0  # reading is free
    shutil.copytree(data, fork.home / "own")
    own = ("--checkpoints", str(fork.home / "own"))
    assert fork.command("rollback", "--to", "5", "--lr-scale", "0.5", "--yes", *own)[0] == 0
    assert digest_of(data) == before


def test_a_child_that_names_its_parents_directory_changes_nothing_there(family: Family) -> None:
    family.child.root.mkdir(parents=True)
    shared = ("--checkpoints", str(family.parent.root))
    assert family.child.command("init", "--run", RUN, "--from", family.checkpoint, *shared)[0] == 0
    before = digest_of(family.parent.home)
    code, said = family.child.command("rollback", "--to", "10", "--yes", *shared)
    assert code == 3 and "nothing of a parent is changed" in said
    assert digest_of(family.parent.home) == before


@pytest.mark.parametrize("option", ["-al", "-rs"])
def test_a_copy_by_links_gets_files_of_its_own(tmp_path: Path, option: str) -> None:
    """`journal-ends` is appended to: a line of the fork in the parent's file would call the parent's journal damaged."""
    world = World(tmp_path / "project")
    world.create()
    world.launch(None, 12)
    assert world.command("rollback", "--to", "10", "--lr-scale", "0.5", "--yes")[0] == 0
    fork = World(tmp_path / "fork")
    subprocess.run(["cp", option, str(world.home), str(fork.home)], check=True)
    before = digest_of(world.home)
    assert fork.command("init", "--fork-of", str(world.paths.run_dir), "--run", RUN)[0] == 0
    assert fork.command("note", "from the fork")[0] == 0
    if option == "-al":
        assert fork.command("undo", "--yes")[0] == 0
    assert digest_of(world.home) == before
    assert world.command("audit")[0] == 0
