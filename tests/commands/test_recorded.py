"""Nobody named a checkpoints directory: the saves in the journal did."""

from pathlib import Path

import pytest

from chronicle.cli.options import settings_with_checkpoints
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("CHRONICLE_CHECKPOINTS", "CHRONICLE_RUN", "CHRONICLE_LOGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def save(*paths: Path) -> None:
    writer = JournalWriter(RunPaths(Path("logs/demo")))
    for step, path in enumerate(paths, start=1):
        path.mkdir(parents=True, exist_ok=True)
        writer.append("checkpoint", step=step, launch=1, title=path.name, data={"path": str(path)})
    writer.close()


def found() -> Path | None:
    return settings_with_checkpoints(None, None, None).checkpoints_dir


def test_the_directory_of_the_saves_is_used_and_named_as_origin(here: Path) -> None:
    save(here / "ckpts/step-1", here / "ckpts/step-2")
    settings = settings_with_checkpoints(None, None, None)
    assert (settings.checkpoints_dir, settings.origin["checkpoints"]) == (here / "ckpts", "the journal's checkpoints")


def test_recorded_beats_a_directory_that_only_has_the_right_name(here: Path) -> None:
    save(here / "ckpts/step-1")
    (here / "checkpoints").mkdir()
    assert found() == here / "ckpts"
    assert settings_with_checkpoints(None, None, Path("checkpoints")).checkpoints_dir == here / "checkpoints"


def test_several_are_named_and_none_is_chosen(here: Path) -> None:
    save(here / "a/step-1", here / "b/step-2")
    with pytest.raises(UsageProblem, match=r"several in the journal: .*a`, .*b`"):
        settings_with_checkpoints(None, None, None).need_checkpoints()
    (here / "a/step-1").rmdir()
    (here / "a").rmdir()
    assert found() == here / "b"


def test_one_that_is_gone_is_said(here: Path) -> None:
    save(here / "a/step-1")
    (here / "a").rename(here / "elsewhere")
    with pytest.raises(UsageProblem, match=r"recorded in the journal, but gone: .*a`"):
        settings_with_checkpoints(None, None, None).need_checkpoints()


def test_without_a_run_nothing_is_invented(here: Path) -> None:
    assert found() is None
    (here / "checkpoints").mkdir()
    assert found() == here / "checkpoints"
    assert not (here / "logs").exists()
