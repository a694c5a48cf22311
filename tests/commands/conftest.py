"""The `chronicle` fixture: a command line in an empty directory, free of this machine's environment."""

from pathlib import Path

import pytest

from tests.commands.cli import Cli


@pytest.fixture
def chronicle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    for name in ("CHRONICLE_RUN", "CHRONICLE_LOGS", "CHRONICLE_CHECKPOINTS", "FORCE_COLOR", "EDITOR", "VISUAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Cli(capsys, monkeypatch.chdir)
