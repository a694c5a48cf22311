"""Checkpoints by their real writers, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.checkpoints import CheckpointFactory
from tests.rollback.accelerate_runs import make_run
from tests.rollback.lr_cases import COMPUTED


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    return CheckpointFactory(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `checkpoints` hold steps 10, 15 and 20 of a run: to be copied, not changed."""
    top = tmp_path_factory.mktemp("pristine")
    make_run(top / "checkpoints", COMPUTED["cosine"], "registered", (10, 15, 20))
    return top


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoints directory that a test may change."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder
