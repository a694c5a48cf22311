"""Checkpoints by their real writers, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.checkpoints import CheckpointFactory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    return CheckpointFactory(tmp_path_factory.mktemp("built"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoints directory that a test may change."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder
