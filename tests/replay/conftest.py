"""Replays on a disk: files in /dev are no files of a launch, and a replay has a memory disk of its own there."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class OnDisk:
    """In place of pytest's factory, whose directories may lie in memory."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def mktemp(self, name: str) -> Path:
        """A new directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._base))


@pytest.fixture(scope="session")
def tmp_path_factory() -> Iterator[OnDisk]:
    """Where the tests of this folder write."""
    with tempfile.TemporaryDirectory() as name:
        yield OnDisk(Path(name).resolve())


@pytest.fixture
def tmp_path(tmp_path_factory: OnDisk) -> Path:
    """A directory of one test."""
    return tmp_path_factory.mktemp("test")
