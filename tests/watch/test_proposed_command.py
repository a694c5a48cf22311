"""The line at 3 a.m. runs as it is printed: it is cut out of the output and typed into a shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.watch import LiveWatch
from tests.watch.conftest import Stage


def type_in(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a printed line in a shell, where `chronicle` is this tree's, and answer nothing: there is no terminal."""
    root = Path(__file__).parents[2]
    bin_dir = cwd / "bin dir"
    bin_dir.mkdir(exist_ok=True)
    (bin_dir / "chronicle").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m chronicle_ml "$@"\n')
    (bin_dir / "chronicle").chmod(0o755)
    env = os.environ | {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(root)}
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def printed(text: str) -> str:
    """The one line of an output that begins with the command, or holds it behind `type:`."""
    (line,) = [line for line in text.splitlines() if "chronicle rollback" in line]
    return line[line.index("chronicle rollback") :].partition(" (discards")[0]


@pytest.mark.parametrize(
    "way",
    [pytest.param("live", marks=pytest.mark.slow), "propose", pytest.param("spikes of a run", marks=pytest.mark.slow)],
)
def test_the_printed_command_rolls_back(stage: Stage, tmp_path: Path, way: str) -> None:
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    given = f"--logs {shlex.quote(str(stage.paths.run_dir.parent))} --checkpoints {shlex.quote(str(stage.checkpoints))}"
    if way == "live":
        watch = LiveWatch(
            stage.paths, 1, stage.writer, checkpoints_dir=stage.checkpoints, say=stage.said.append,
            options=tuple(shlex.split(given)),
        )  # fmt: skip
        watch.finish()
        text = "\n".join(line for line in stage.said if "type:" in line)
    else:
        asked = f"chronicle propose --run tiny {given}" if way == "propose" else f"chronicle spikes tiny {given}"
        text = type_in(asked, tmp_path).stdout
        assert printed(type_in(f"chronicle watch tiny --once {given}", tmp_path).stdout) == printed(text)
    command = printed(text)
    done = type_in(f"{command} --yes", tmp_path)
    assert done.returncode == 0, (command, done.stderr)
    target = int(command.split("--to ")[1].split()[0].partition("@")[0])
    assert target in [entry.step for entry in read_journal(stage.paths).entries if entry.kind.startswith("rollback")]
    assert not (stage.checkpoints / "opt_step-500").exists() and (stage.checkpoints / f"opt_step-{target}").exists()


def test_the_command_of_a_bare_log_rolls_back(stage: Stage, tmp_path: Path) -> None:
    """`spikes FILE --checkpoints DIR`: a folder with a blank, and no run of that name."""
    folder = tmp_path / "my checkpoints"
    stage.checkpoints.rename(folder)
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    work = tmp_path / "elsewhere"
    work.mkdir()
    metrics = work / "metrics.jsonl"
    metrics.write_bytes(stage.paths.metrics_path(1).read_bytes())
    text = type_in(f"chronicle spikes metrics.jsonl --checkpoints {shlex.quote(str(folder))}", work).stdout
    command = printed(text)
    watched = type_in(f"chronicle watch metrics.jsonl --once --checkpoints {shlex.quote(str(folder))}", work).stdout
    assert printed(watched) == command
    done = type_in(f"{command} --yes", work)
    assert done.returncode == 0, (command, done.stderr, done.stdout)
    assert not (folder / "opt_step-500").exists()


def test_without_a_checkpoint_before_the_onset_it_says_so_with_the_oldest(stage: Stage, tmp_path: Path) -> None:
    with stage.start(1, 0) as log:
        stage.train(log, 1, 560, diverges_at=400)
    for step in (50, 100, 150, 200, 250, 300, 350, 400):
        (stage.checkpoints / f"opt_step-{step}").rename(tmp_path / f"gone-{step}")
    given = f"--logs {shlex.quote(str(stage.paths.run_dir.parent))} --checkpoints {shlex.quote(str(stage.checkpoints))}"
    text = type_in(f"chronicle propose --run tiny {given}", tmp_path).stdout
    assert "chronicle rollback" not in text
    assert "no verified checkpoint" in text and "onset 4" in text and "the oldest one is of step 450" in text
