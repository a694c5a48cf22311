"""Replays on a disk: files in /dev are no files of a launch, and a replay has a memory disk of its own there."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a disk, where the other tests may write to memory."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name).resolve()
