"""No test of the guard inherits the run of the shell it is started from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLES = (
    "CHRONICLE_RUN",
    "CHRONICLE_RUN_DIR",
    "CHRONICLE_LAUNCH",
    "CHRONICLE_GUARD",
    "CHRONICLE_FRESH_START",
    "CHRONICLE_ACCEPT_CHANGE",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "tr"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "opt_step-7"
