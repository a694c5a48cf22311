"""Greedy files, read by the whole command in a process of its own: at most MEMORY_MB, whatever they want."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.companions import healthy
from tests.attacks.greedy_files import GENEROUS, GREEDY, MEMORY_MB
from tests.attacks.pickle_bytes import pickled

MEASURE = (
    "import json, resource, subprocess, sys;"
    "done = subprocess.run([sys.executable, '-c', 'import sys; from chronicle.cli.main import main; main(sys.argv[1:])',"
    " *sys.argv[1:]], capture_output=True, text=True);"
    "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
    "print(json.dumps([done.returncode, done.stdout + done.stderr, used.ru_maxrss / 1024, used.ru_utime + used.ru_stime]))"
)
SAMPLE = {"json of empty lists", "a million dicts", "a million texts", "groups that share their values"}


def run(*argv: str) -> tuple[int, str, float]:
    """(exit code, what was printed, peak memory in MB) of one command."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *argv], capture_output=True, text=True, check=True, timeout=300
    )
    code, printed, memory_mb, seconds = json.loads(done.stdout)
    print(f"{argv[0]}: exit {code}, {memory_mb:.0f} MB, {seconds:.2f} CPU s")
    assert "Traceback" not in printed
    return code, printed, memory_mb


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=[] if label in SAMPLE else pytest.mark.slow) for label in GREEDY]
)
def test_a_greedy_file_takes_little_memory(tmp_path: Path, label: str) -> None:
    checkpoint = healthy(tmp_path)
    name, content = GREEDY[label]()
    (checkpoint / name).write_bytes(content)
    for command in ("inspect", "verify"):
        code, printed, memory_mb = run(command, str(checkpoint))
        assert memory_mb <= MEMORY_MB, f"{command}: {memory_mb:.0f} MB"
        assert code in (0, 1, 3, 5), printed
        assert code in (0, 5) or name in printed, f"{name} is not named: {printed}"


@pytest.mark.slow
@pytest.mark.parametrize("label", list(GENEROUS))
def test_a_large_and_honest_file_is_read(tmp_path: Path, label: str) -> None:
    checkpoint = healthy(tmp_path)
    name, content = GENEROUS[label]()
    (checkpoint / name).write_bytes(content)
    code, printed, memory_mb = run("inspect", str(checkpoint))
    assert code == 0 and "0.0009" in printed, printed
    assert memory_mb <= MEMORY_MB, f"{memory_mb:.0f} MB"


def test_a_hole_in_a_file_earns_no_memory(tmp_path: Path) -> None:
    """What a pickle may build grows with what the file takes on disk, not with the size it claims."""
    checkpoint = healthy(tmp_path)
    with (checkpoint / "optimizer.pt").open("wb") as file:
        file.write(pickled(b"](" + b"]" * 990_000 + b"e"))
        file.truncate(2**40)
    code, printed, memory_mb = run("inspect", str(checkpoint))
    assert code == 1 and "more than 48 MB of memory" in printed.replace("\n", " ")
    assert memory_mb <= MEMORY_MB
