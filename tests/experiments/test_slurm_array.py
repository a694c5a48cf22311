"""The array script of a plan, through a real one-node SLURM: the start first, then one task a run, side by side or not."""

import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import read_journal
from chronicle.journal.events import EntryKind
from experiments.command import format_slurm
from experiments.definition import find_study
from experiments.design import plan_study
from experiments.files import StudyPaths
from experiments.runner import read_registered
from tests.experiments.test_stranger import CHAR
from tests.experiments.test_troubles import STUDY
from tests.launch.test_slurm import slurm  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


OURS = STUDY.replace("arms: [base, killed, full, starved]", "arms: [base]")
THEIRS = CHAR.replace("moments, small, again, skipped], once: [exact, rounded]", "moments], once: [exact]")


@pytest.mark.parametrize("definition", [OURS, THEIRS], ids=["bit-transformer", "plain-script"])
def test_an_array_carries_out_the_plan(slurm: dict[str, str], tmp_path: Path, definition: str) -> None:  # noqa: F811
    study = tmp_path / "studied.yaml"
    study.write_text(definition)
    plan = plan_study(find_study(str(study)), "tiny")
    paths = StudyPaths(tmp_path / "logs" / "on-slurm")
    script = tmp_path / "array.sh"
    script.write_text(format_slurm(plan, str(study), paths.study_dir))
    environ = slurm | {"PATH": f"{Path(sys.executable).parent}:{slurm['PATH']}", "OMP_NUM_THREADS": "1"}
    for tasks in ("0", f"1-{len(plan.runs) - 1}"):
        done = subprocess.run(["sbatch", "--wait", f"--array={tasks}", str(script)], env=environ, cwd=tmp_path,
                              capture_output=True, text=True)  # fmt: skip
        said = "".join(path.read_text() for path in tmp_path.glob("on-slurm-*.out"))
        assert done.returncode == 0, done.stderr + said
    registered, history = read_registered(paths)
    assert registered.plan_hash == plan.plan_hash
    assert all(history.is_complete(run) for run in plan.runs)
    legs = [(entry.data["run"], entry.data["leg"]) for entry in read_journal(paths.journal).of_kind(EntryKind.EXPERIMENT_LEG)]
    assert len(legs) == len(set(legs)) == plan.num_launches

