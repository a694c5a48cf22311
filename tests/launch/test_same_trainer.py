"""A run is carried by its name and its checkpoints: a second trainer in one directory is asked for a name."""

from pathlib import Path

import pytest

from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import LaunchStart
from chronicle.launch.admission import ensure_same_trainer
from chronicle.paths import RunPaths
from chronicle.settings import load_settings

FIRST = ("python", "-m", "trainer.train", "--recipe", "demo", "--checkpoints", "one")


def ask(cwd: Path, *words: str, run: str | None = None) -> None:
    settings = load_settings(cwd, {}, run=run)
    ensure_same_trainer(settings, words, cwd, read_journal(settings.paths).entries)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A directory in which one trainer was launched, with checkpoints in `one`."""
    (tmp_path / "one").mkdir()
    with JournalWriter(RunPaths(tmp_path / "logs" / "demo"), checkpoints=tmp_path / "one") as writer:
        writer.write(LaunchStart(argv=FIRST, cwd=str(tmp_path)), launch=1, title="launch 1")
    return tmp_path


def is_asked(where: Path, *words: str, run: str | None = None) -> bool:
    try:
        ask(where, *words, run=run)
    except UsageProblem:
        return True
    return False


@pytest.mark.parametrize("words", [
    ("python", "other.py", "--out", "two"), ("python", "-m", "other.train"),
    (*FIRST[:-1], "two"), (*FIRST[:-2], "--checkpoints=two")])
def test_another_program_or_other_checkpoints_ask_for_a_name(run_dir: Path, words: tuple[str, ...]) -> None:
    """Both would be launches of the only run here, whose curve and checkpoints are another trainer's."""
    with pytest.raises(UsageProblem, match=r"no run is named, and `demo` \(the only run\)"):
        ask(run_dir, *words)
    assert not is_asked(run_dir, *words, run="demo") and not is_asked(run_dir, *words, run="two")


@pytest.mark.parametrize("words", [
    FIRST, ("torchrun", *FIRST[1:], "--lr", "0.1"), ("bash", "train.sh"), ("python", "resume.py", "one/step-20"),
    ("python", "other.py", "--checkpoints", "one"), ("python", "-m", "trainer.train")])
def test_the_same_program_its_checkpoints_and_what_is_not_known_ask_nothing(run_dir: Path, words: tuple[str, ...]) -> None:
    """An unknown launcher, and whoever goes on from the run's checkpoints, are never asked."""
    assert not is_asked(run_dir, *words)


def test_the_first_launch_is_not_asked(tmp_path: Path) -> None:
    """Without a launch there is no other trainer."""
    assert not is_asked(tmp_path, *FIRST)
