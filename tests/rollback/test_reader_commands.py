"""`chronicle inspect`, `diff`, `verify` and `manifest` as people meet them: text, JSON, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.checkpoints import CheckpointFactory

SEED = {"folder": "opt_step-{step}/accelerator_state", "scheduler": "register", "counter": True, "save_at": [5, 10]}


def chronicle(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from chronicle.cli.main import run; c = run(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'mlflow', 'pydantic', 'matplotlib'} & set(sys.modules), 'slow import'; sys.exit(c)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )


@pytest.fixture
def seed_root(checkpoints: CheckpointFactory, root: Path) -> Path:
    return checkpoints.accelerate(root, **SEED)


INSPECTED = """\
opt_step-10  accelerate · step 10 (by its name) · 1 rank · 5 files, {size}

scheduler   accelerator_state/custom_checkpoint_0.pkl  LambdaLR · registered
            last_epoch 10   _step_count 11
            _last_lr   0.0009  0.00045
            base_lrs   0.001  0.0005
optimizer   accelerator_state/optimizer.bin  step 10 · 4 states · exp_avg, exp_avg_sq
            group  lr       initial_lr  weight_decay  betas       eps
            0      0.0009   0.001       0.01          0.9  0.999  1e-08
            1      0.00045  0.0005      0.01          0.9  0.999  1e-08
counters    accelerator_state/custom_checkpoint_1.pkl:samples  30
            accelerator_state/random_states_0.pkl:step         0
rng         rank 0
data        no position saved
topology    world_size  1
read        2 read as state (6.5 kB), 3 no state (16.3 kB)
"""


def test_inspect_is_one_screen(seed_root: Path) -> None:
    """The whole text: what it shows is a decision."""
    done = chronicle("inspect", seed_root / "opt_step-10", cwd=seed_root)
    assert (done.returncode, done.stderr) == (0, "")
    size = done.stdout.splitlines()[0].rpartition(", ")[2]
    assert done.stdout == INSPECTED.format(size=size)


def test_inspect_by_step_and_as_json(seed_root: Path) -> None:
    where = ("--checkpoints", seed_root, "--run", "r", "--logs", seed_root.parent / "logs")
    done = chronicle("inspect", "5", "--json", *where, cwd=seed_root.parent)
    told = json.loads(done.stdout)
    assert (told["step"], told["format"], told["optimizers"][0]["steps"]) == (5, "accelerate", [5, 5])
    missing = chronicle("inspect", "7", *where, cwd=seed_root.parent)
    assert missing.returncode == 1 and "nearest are 5 and 10" in missing.stderr


def test_diff_names_what_moved_on(seed_root: Path) -> None:
    done = chronicle("diff", seed_root / "opt_step-5", seed_root / "opt_step-10", "--json", cwd=seed_root)
    found = {d["name"]: (d["before"], d["after"]) for d in json.loads(done.stdout)["differences"]}
    assert found["accelerator_state/custom_checkpoint_0.pkl: last_epoch"] == ([5], [10])
    before, after = found["accelerator_state/optimizer.bin: param_groups.*.lr"]
    assert before == [0.00095, 0.000475] and after == pytest.approx([0.0009, 0.00045])
    same = chronicle("diff", seed_root / "opt_step-5", seed_root / "opt_step-5", cwd=seed_root)
    assert re.fullmatch(r"\d+ values are equal\n", same.stdout)


def test_a_changed_element_is_no_equality_of_two_checkpoints(seed_root: Path) -> None:
    """Only numbers were compared before, and two checkpoints with other weights "hold the same numbers"."""
    weights = seed_root / "opt_step-5" / "accelerator_state" / "model.safetensors"
    shutil.copytree(seed_root / "opt_step-5", seed_root / "opt_step-6")
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    shown = chronicle("inspect", seed_root / "opt_step-5", seed_root / "opt_step-6", cwd=seed_root).stdout
    assert shown.startswith("tensors that differ: accelerator_state/model.safetensors: ")


def test_verify_exits_five_and_says_the_way_out(seed_root: Path) -> None:
    assert chronicle("verify", seed_root / "opt_step-10", cwd=seed_root).returncode == 0
    (seed_root / "opt_step-10" / "accelerator_state" / "custom_checkpoint_0.pkl.orig").write_bytes(b"")
    done = chronicle("verify", seed_root / "opt_step-10", cwd=seed_root)
    assert done.returncode == 5
    assert "error F1  accelerator_state/custom_checkpoint_0.pkl.orig: stray" in done.stdout
    assert "hint: move it out of the checkpoint, or let `chronicle verify --quarantine` do it" in done.stdout
    both = chronicle("verify", "--checkpoints", seed_root, "--quick", "--json", cwd=seed_root.parent)
    *checked, folder = json.loads(both.stdout)["checkpoints"]
    assert [(c["step"], c["passes"]) for c in checked] == [(5, True), (10, False)]
    assert [finding["check"] for finding in folder["findings"]] == ["F10"]  # what may be deleted, said of the folder


def test_manifest_is_written_and_then_closes_the_inventory(seed_root: Path) -> None:
    path = seed_root / "opt_step-10"
    assert chronicle("manifest", path, cwd=seed_root).stdout.startswith("written ")
    assert chronicle("verify", path, cwd=seed_root).returncode == 0
    weights = path / "accelerator_state" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    done = chronicle("verify", path, cwd=seed_root)
    assert done.returncode == 5 and "content changed since it was saved" in done.stdout
    assert chronicle("verify", path, "--quick", cwd=seed_root).returncode == 0


def test_inspect_without_a_checkpoint_lists_what_is_there_and_what_was_not_recognised(seed_root: Path) -> None:
    (seed_root / "weights.unknown").write_bytes(bytes(range(256)) * 8)
    for words in (["--checkpoints", seed_root], [seed_root]):
        done = chronicle("inspect", *words, cwd=seed_root.parent)
        assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["opt_step-5", "opt_step-10"], done.stderr
        assert done.stdout.splitlines()[2].startswith("not recognised as checkpoints: `weights.unknown`")
    told = json.loads(chronicle("inspect", seed_root, "--json", cwd=seed_root.parent).stdout)
    assert [one["step"] for one in told["checkpoints"]] == [5, 10] and told["not_recognised"] == ["weights.unknown"]


def test_the_newest_state_under_a_second_name_is_recognised_whatever_its_ending(root: Path) -> None:
    import torch

    state = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).state_dict()
    root.mkdir(exist_ok=True)
    for name in ("step_40.pt", "newest.xyz"):
        torch.save({"optimizer": state, "step": 40}, root / name)
    assert "not recognised" not in chronicle("inspect", root, cwd=root.parent).stdout


def test_two_checkpoints_that_are_files_differ_in_no_file_name(root: Path) -> None:
    import torch

    state = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).state_dict()
    root.mkdir(exist_ok=True)
    for step in (10, 20):
        torch.save({"optimizer": state, "step": step}, root / f"step_{step}.pt")
    shown = chronicle("inspect", root / "step_10.pt", root / "step_20.pt", cwd=root.parent).stdout
    *_, changed, equal = shown.splitlines()
    assert changed.split() == ["step", "10", "20"] and equal.endswith("values are equal")


def test_manifest_of_a_checkpoint_with_strays_is_refused(seed_root: Path) -> None:
    (seed_root / "opt_step-10" / "accelerator_state" / "optimizer.bin.bak").touch()
    done = chronicle("manifest", seed_root / "opt_step-10", cwd=seed_root)
    assert done.returncode == 3 and not (seed_root / "opt_step-10" / "chronicle-manifest.json").exists()


def test_a_name_with_a_line_break_does_not_make_a_line(seed_root: Path) -> None:
    (seed_root / "opt_step-5.orig\nerror: all is well").mkdir()
    (seed_root / "opt_step-10" / "accelerator_state" / "optimizer_1\nerror: all is well.bin").touch()
    done = chronicle("verify", "--all", "--checkpoints", seed_root, "--run", "r", cwd=seed_root.parent)
    assert done.returncode == 5 and "all is well" in done.stdout
    assert not any(line.startswith("error: all is well") for line in done.stdout.splitlines())
    shown = chronicle("inspect", "--files", seed_root / "opt_step-10", cwd=seed_root).stdout
    assert "all is well" in shown and not any(line.startswith("error:") for line in shown.splitlines())
