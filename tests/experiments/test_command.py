"""`chronicle experiment …`: what it prints, its exit codes, and what it does not import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter
from experiments.definition import find_study
from experiments.design import plan_study
from experiments.files import StudyPaths
from experiments.runner import register_study, run_study
from tests.experiments.fakes import FakeLauncher


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_names_arms_launches_and_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(["experiment", "plan", "restart-impact", "--profile", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("A-prime", "B-lr", "restart = B − A (main)", "margin ±0.02", "117 launches"):
        assert word in out


def test_plan_as_json_is_the_registered_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert chronicle(["experiment", "plan", "--profile", "ci", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan_hash"] == plan_study(find_study("restart-impact"), "ci").plan_hash
    assert ["A", 1] in data["runs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "no-such-study"], "unknown study `no-such-study`"),
        (["plan", "--profile", "huge"], "unknown profile `huge`"),
        (["plan", "mine.yaml"], "unknown study `mine.yaml`: expected a YAML file or one of restart-impact"),
        (["run", "--profile", "ci", "--only", "B-s9"], "no run `B-s9`"),
        (["report", "nothing-here"], "nothing is registered"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert chronicle(["experiment", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err
    assert not (elsewhere / "logs").exists()


def test_run_tells_done_open_and_stopped(capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    plan = plan_study(find_study("restart-impact"), "ci")
    paths = StudyPaths(elsewhere / "logs" / "restart-impact-ci")
    fate = lambda run, leg: 1 if (run.name, leg.number) == ("B-s1", 2) else 0  # noqa: E731
    run_study(plan, paths, FakeLauncher(paths, fate), only=["start", "A-s0", "B-s1"])
    assert chronicle(["experiment", "run", "--profile", "ci", "--only", "A-s0"]) == 5
    out = capsys.readouterr().out
    assert "2 of 8 runs complete" in out and "stopped B-s1: ended with code 1" in out
    assert "open: A-prime-s0, B-s0, C0-s0, A-s1, C0-s1" in out


def test_a_registered_study_is_not_changed_by_another_margin(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = StudyPaths(elsewhere / "logs" / "restart-impact-ci")
    with JournalWriter(paths.journal) as writer:
        register_study(paths, plan_study(find_study("restart-impact"), "cpu"), writer)
    assert chronicle(["experiment", "run", "--profile", "ci"]) == 2
    assert "registered plan" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "--profile", "cpu"], ["--help"]])
def test_planning_imports_nothing_heavy(words: list[str]) -> None:
    heavy = ("torch", "scipy", "matplotlib", "mlflow", "numpy", "accelerate")
    code = (f"import sys; from chronicle.cli.main import run; run({['experiment', *words]!r}); "
            f"found = [m for m in {heavy!r} if m in sys.modules]; print('heavy:', found, file=sys.stderr)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().endswith("heavy: []")
