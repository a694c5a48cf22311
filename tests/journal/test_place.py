"""A run has an identity: moved it is the same run, copied it is not, and its stored paths follow it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronicle.errors import JournalError, Refusal
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.place import Anchors, Standing, look, read_place
from chronicle.paths import RunPaths

NAMES = st.text("ab@/.-1", max_size=8)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one run that has written an entry about a checkpoint."""
    home = tmp_path / "a"
    (home / "checkpoints" / "opt_step-20").mkdir(parents=True)
    with writer(home) as journal:
        journal.append("checkpoint", step=20, launch=1, data={"path": str(home / "checkpoints" / "opt_step-20")})
    return home


def paths(home: Path) -> RunPaths:
    return RunPaths(home / "logs" / "u")


def writer(home: Path) -> JournalWriter:
    return JournalWriter(paths(home), checkpoints=home / "checkpoints")


def saved_path(home: Path) -> str:
    return str(read_journal(paths(home)).entries[0].data["path"])


def test_no_absolute_path_of_the_run_stands_in_the_journal(project: Path) -> None:
    (line,) = next(paths(project).journal_dir.glob("*.jsonl")).read_text().splitlines()
    assert json.loads(line)["data"]["path"] == "@checkpoints/opt_step-20"
    assert saved_path(project) == str(project / "checkpoints" / "opt_step-20")


def test_a_moved_run_is_the_same_run_and_its_paths_follow(project: Path, tmp_path: Path) -> None:
    """Its directory keeps its inode: nobody is asked."""
    before = read_place(paths(project))
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    project.rename(moved)
    assert look(paths(moved))[1] is Standing.MOVED
    with writer(moved) as journal:
        journal.append("note", title="still here")
    after = read_place(paths(moved))
    assert before is not None and after is not None and after.run_id == before.run_id
    assert saved_path(moved) == str(moved / "checkpoints" / "opt_step-20")
    assert [entry.kind for entry in read_journal(paths(moved)).entries] == ["checkpoint", "run.place", "note"]


def test_a_run_seen_through_a_link_is_the_run(project: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(project)
    with writer(tmp_path / "home") as journal:
        journal.append("note", title="from the login node")
    assert look(paths(project))[1] in (Standing.HERE, Standing.MOVED)
    assert [entry.kind for entry in read_journal(paths(project)).entries][-1] == "note"


def test_a_renamed_run_directory_has_no_foreign_entries(project: Path) -> None:
    (project / "logs" / "u").rename(project / "logs" / "v")
    renamed = RunPaths(project / "logs" / "v")
    with JournalWriter(renamed) as journal:
        journal.append("note", title="called v now")
    assert read_journal(renamed).problems == ()


def test_nothing_is_written_into_a_copy_before_somebody_says_what_it_is(project: Path, tmp_path: Path) -> None:
    """Reading is free; the refusal names both ways on."""
    copy = tmp_path / "b"
    shutil.copytree(project, copy)
    before = contents(copy)
    assert saved_path(copy) == str(copy / "checkpoints" / "opt_step-20")
    with writer(copy) as journal, pytest.raises(Refusal, match="is a copy of run") as refused:
        journal.append("note", title="where am I")
    assert refused.value.exit_code == 3
    assert "--moved" in str(refused.value.remedy) and "--fork-of" in str(refused.value.remedy)
    assert contents(copy) == before


def test_one_inode_number_alone_does_not_make_a_copy_the_run(project: Path, tmp_path: Path) -> None:
    """Small numbers occur on every filesystem: a copy on another one may have the run directory's by chance."""
    copy = tmp_path / "b"
    shutil.copytree(project, copy)
    place = json.loads((paths(project).run_dir / "run.json").read_text())
    by_chance = place | {"inode": paths(copy).run_dir.stat().st_ino}
    (paths(copy).run_dir / "run.json").write_text(json.dumps(by_chance))
    assert look(paths(copy))[1] in (Standing.COPIED, Standing.UNCERTAIN)


def test_a_copy_whose_original_is_gone_is_asked_about_too(project: Path, tmp_path: Path) -> None:
    """Copied, or moved to another filesystem: that cannot be told, so it is not assumed."""
    shutil.copytree(project, tmp_path / "b")
    shutil.rmtree(project)
    assert look(paths(tmp_path / "b"))[1] is Standing.UNCERTAIN
    with writer(tmp_path / "b") as journal, pytest.raises(Refusal):
        journal.append("note")


def test_a_second_checkpoint_root_does_not_bend_the_paths_of_the_first(project: Path) -> None:
    other = project / "more" / "checkpoints"
    other.mkdir(parents=True)
    with JournalWriter(paths(project), checkpoints=other) as journal:
        journal.append("checkpoint", step=30, launch=1, data={"path": str(other / "opt_step-30")})
    found = [entry.data["path"] for entry in read_journal(paths(project)).entries]
    assert found == [str(project / "checkpoints" / "opt_step-20"), str(other / "opt_step-30")]


def test_the_id_survives_the_loss_of_its_file(tmp_path: Path) -> None:
    with JournalWriter(RunPaths(tmp_path / "u")) as journal:
        run_id = journal.place.run_id
        journal.append("run.init", data={"checkpoints": None, "run_id": run_id})
    (tmp_path / "u" / "run.json").unlink()
    with JournalWriter(RunPaths(tmp_path / "u")) as journal:
        assert journal.place.run_id == run_id


@pytest.mark.parametrize("text", ["", "{", "[]", '{"v": 2, "run_id": "x"}', '{"v": 1}'])
def test_a_damaged_identity_is_one_sentence_and_nothing_is_written(project: Path, text: str) -> None:
    before = contents(paths(project).journal_dir)
    (paths(project).run_dir / "run.json").write_text(text)
    with writer(project) as journal, pytest.raises(JournalError, match=r"run\.json"):
        journal.append("note")
    assert contents(paths(project).journal_dir) == before


def test_an_identity_that_cannot_be_read_is_no_empty_place(project: Path) -> None:
    """Seen in a crash sweep: unresolved, an open transaction looked like one that had prepared nothing."""
    (paths(project).run_dir / "run.json").unlink()
    (paths(project).run_dir / "run.json").mkdir()
    with pytest.raises(JournalError, match=r"run\.json"):
        read_journal(paths(project))


@given(st.dictionaries(NAMES, st.one_of(NAMES, st.lists(NAMES), st.integers())))
def test_stored_values_come_back_as_they_were(value: dict[str, object]) -> None:
    """Whatever a text begins with: a note may begin with an `@`."""
    anchors = Anchors(run="/w/a/logs/u", roots=("/w/a/checkpoints", "/data/checkpoints"))
    assert anchors.resolve(json.loads(json.dumps(anchors.store(value)))) == value


@pytest.mark.parametrize("path", ["/w/a/logs/u/contract.json", "/w/a/checkpoints", "/data/abandoned/X/opt_step-1", "/w/b"])
def test_paths_below_an_anchor_follow_it(path: str) -> None:
    before = Anchors(run="/w/a/logs/u", roots=("/w/a/checkpoints", "/data/checkpoints"))
    after = Anchors(run="/mnt/x/logs/u", roots=("/mnt/x/checkpoints", "/data/checkpoints"))
    expected = path.replace("/w/a/", "/mnt/x/") if path.startswith("/w/a/") else path
    assert after.resolve(before.store(path)) == expected


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory and its bytes."""
    found = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}
