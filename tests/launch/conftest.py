"""A driver for `chronicle run`, and decoys: processes that look like ours and are not."""

import os
import subprocess
import sys

import pytest

from tests.launch.driver import WORKER, Driver


@pytest.fixture
def driver(tmp_path):
    made = Driver(tmp_path)
    yield made
    made.cleanup()


@pytest.fixture
def decoys(tmp_path):
    """The same script under the same name without our token, and one with a token of somebody else."""
    directory = tmp_path / "decoys"
    directory.mkdir()
    plain = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
    made = [
        subprocess.Popen([sys.executable, str(WORKER), str(directory), "save"], env=plain),
        subprocess.Popen(
            [sys.executable, str(WORKER), str(directory), "save"], env=plain | {"CHRONICLE_TOKEN": "0" * 32, "RANK": "7"}
        ),
    ]
    yield made
    for process in made:
        process.terminate()
    for process in made:
        process.wait(20)
