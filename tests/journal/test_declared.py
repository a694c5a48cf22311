"""`chronicle init --moved`, `--fork-of`, `--from`: what a person may declare, and what is refused as a mistake."""

import os
import shutil
from pathlib import Path

import pytest

from chronicle.cli.main import run
from chronicle.errors import RunCopied
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.place import Standing, look, read_place
from chronicle.launch.launching import LaunchRequest, launch
from chronicle.paths import RunPaths
from tests.journal.test_place import contents, paths, project, writer

__all__ = ["project"]


def init(home: Path, *words: str) -> int:
    logs = ["--run", "u", "--logs", str(home / "logs"), "--checkpoints", str(home / "checkpoints")]
    return run(["init", *words, *logs])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` writes a `chronicle.toml` where it is called."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def copy(project: Path, tmp_path: Path) -> Path:
    shutil.copytree(project, tmp_path / "b")
    return tmp_path / "b"


def test_a_fork_gets_an_id_of_its_own_and_names_its_parent(project: Path, copy: Path) -> None:
    before = contents(project)
    assert init(copy, "--fork-of", str(paths(project).run_dir)) == 0
    one, other = read_place(paths(project)), read_place(paths(copy))
    assert one is not None and other is not None and other.parent is not None
    assert other.run_id != one.run_id == other.parent.run_id
    assert look(paths(copy))[1] is Standing.HERE and contents(project) == before


def test_a_moved_run_keeps_its_id(project: Path, copy: Path) -> None:
    shutil.rmtree(project)
    before = read_place(paths(copy))
    assert init(copy, "--moved") == 0
    after = read_place(paths(copy))
    assert before is not None and after is not None and after.run_id == before.run_id
    assert look(paths(copy))[1] is Standing.HERE
    (entry,) = read_journal(paths(copy)).of_kind("run.place")
    assert entry.data["copied"] is True and entry.data["path"] == str(paths(copy).run_dir)


def test_an_origin_that_is_another_run_is_a_mistake(
    project: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunPaths(tmp_path / "other" / "logs" / "x")
    with JournalWriter(other) as journal:
        journal.append("note", title="another run")
    before = contents(copy)
    assert init(copy, "--fork-of", str(other.run_dir)) == 2
    said = capsys.readouterr().err
    place, origin = read_place(paths(project)), read_place(other)
    assert place is not None and origin is not None and place.run_id in said and origin.run_id in said
    assert f"--fork-of {paths(project).run_dir}" in said and contents(copy) == before


def test_a_run_is_no_fork_of_itself(project: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    assert init(copy, "--fork-of", str(paths(copy).run_dir)) == 2
    assert "own directory" in capsys.readouterr().err and contents(copy) == before


def test_a_run_whose_identity_is_gone_cannot_be_declared(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (paths(copy).run_dir / "run.json").unlink()
    before = contents(copy)
    for words in (("--moved",), ("--fork-of", str(copy / "nowhere"))):
        assert init(copy, *words) == 1
        assert "run.json" in capsys.readouterr().err
    assert contents(copy) == before


def test_only_one_thing_is_declared_at_a_time(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(copy, "--moved", "--fork-of", "x") == 2
    assert "at most one" in capsys.readouterr().err


def test_a_run_that_has_a_journal_does_not_begin_elsewhere(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = project / "checkpoints" / "opt_step-20"
    (source / "accelerator_state").mkdir()
    (source / "accelerator_state" / "random_states_0.pkl").write_bytes(b"")
    (source / "accelerator_state" / "optimizer.bin").write_bytes(b"")
    before = contents(paths(project).run_dir)
    with writer(project):
        assert init(project, "--from", str(source)) == 2
    assert "has a journal already" in capsys.readouterr().err and contents(paths(project).run_dir) == before


@pytest.mark.parametrize("words", [["undo", "--yes"], ["run"], ["run", "--autopilot"], ["recover"], ["note", "hello"]])
def test_every_writing_command_in_a_copy_ends_with_3_and_both_ways(
    project: Path, copy: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also `run`: nothing is started, and not even the lock is written."""
    before = contents(project), contents(copy)
    command = ["--", "touch", str(copy / "started")] if words[0] == "run" else []
    assert run([*words, "--run", "u", "--logs", str(copy / "logs"), *command]) == 3
    said = capsys.readouterr().err
    assert "init --moved" in said and f"init --fork-of {paths(project).run_dir}" in said
    assert (contents(project), contents(copy)) == before


def test_a_launch_in_a_copy_is_refused_before_its_lock_is_written(project: Path, copy: Path) -> None:
    """However it is started: the autopilot starts launches without the command `run`."""
    before = contents(copy)
    request = LaunchRequest(
        command=("true",),
        paths=paths(copy),
        checkpoints_dir=None,
        cwd=copy,
        environ=dict(os.environ),
        grace_seconds=1.0,
    )
    with pytest.raises(RunCopied):
        launch(request)
    assert contents(copy) == before
