"""Two launches that write one run are told of each other; a crash leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from chronicle.paths import RunPaths
from chronicle.resume.writers import claim_run, foreign_owner, release_run

HOLDER = textwrap.dedent(
    """
    import os, sys, time
    from pathlib import Path
    from chronicle.paths import RunPaths
    from chronicle.resume.writers import claim_run
    print(repr(claim_run(RunPaths(Path(sys.argv[1])), 7)), flush=True)
    if len(sys.argv) > 2 and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    sys.stdin.read()
    """
)


def hold(run_dir: Path, *more: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", HOLDER, str(run_dir), *more]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "''\n"
    return process


@pytest.fixture
def paths(run_dir: Path) -> Iterator[RunPaths]:
    yield RunPaths(run_dir)
    release_run(RunPaths(run_dir))


def test_a_second_writer_is_told_who_the_first_one_is(paths: RunPaths) -> None:
    other = hold(paths.run_dir)
    try:
        said = claim_run(paths, 8)
        assert f"process {other.pid} on" in said and "launch 7" in said
    finally:
        other.communicate()
    assert claim_run(paths, 8) == ""
    assert claim_run(paths, 8) == "", "this process itself is no stranger"


def test_a_killed_writer_blocks_nobody_even_when_a_worker_of_it_lives_on(paths: RunPaths) -> None:
    other = hold(paths.run_dir, "with a forked worker")
    assert other.stdout is not None
    worker = int(other.stdout.readline())
    other.kill()
    other.wait()
    try:
        assert claim_run(paths, 8) == ""
    finally:
        os.kill(worker, signal.SIGTERM)
        other.communicate()


def test_a_run_that_cannot_be_locked_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    assert claim_run(RunPaths(tmp_path / "file" / "run"), 1) == ""
    assert foreign_owner(tmp_path, {"run_id": "a"}) == ""
