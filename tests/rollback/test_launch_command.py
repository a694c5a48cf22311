"""Where a command, a shell script, Hydra's configs, an environment or DeepSpeed's "auto" hold the LR of the next launch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from rollback.checkpoint.listing import open_checkpoint, read_state
from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, files_named_by
from rollback.lr.authority import Evidence
from rollback.lr.launch_command import changed_command
from rollback.plan.lr import plan_lr_edits
from rollback.plan.plan import _pointer_edits
from rollback.plan.request import RollbackRequest

HALF = RollbackRequest(step=10, lr_scale=0.5)


@pytest.mark.parametrize(
    ("typed", "after"),
    [
        ("python t.py --lr 1e-3 --steps 5", "python t.py --lr 0.0005 --steps 5"),
        ("python t.py --learning-rate=1e-3", "python t.py --learning-rate=0.0005"),
        ("python t.py ++optim.lr=1e-3 optim=sgd", "python t.py ++optim.lr=0.0005 optim=sgd"),
        ("python t.py --override=optim.lr=1e-3", "python t.py --override=optim.lr=0.0005"),
        ("python t.py --override=lr=1e-3", "python t.py --override=lr=0.0005"),
        ("python t.py SOLVER.BASE_LR 0.02 SOLVER.STEPS 5", "python t.py SOLVER.BASE_LR 0.01 SOLVER.STEPS 5"),
        ("""t.py --optimizer '{"type":"adam","lr": 1e-3}'""", """t.py --optimizer '{"type":"adam","lr": 0.0005}'"""),
        ("env LR=1e-3 python t.py", "env LR=0.0005 python t.py"),
        ("t.py lr=[1e-3,2e-3]", "t.py 'lr=[0.0005,0.001]'"),
    ],
)
def test_every_way_in_which_a_command_names_an_lr(typed: str, after: str) -> None:
    assert shlex.join(changed_command(shlex.split(typed), 0.5).after) == after


@pytest.mark.parametrize(
    "typed",
    ["t.py --lr-scheduler cosine", "t.py --lr_decay_iters 100", "t.py --lr auto", "t.py lr 1e-3", "t.py --lr", "t.py a=b"],
)
def test_what_is_no_lr_is_left_alone(typed: str) -> None:
    assert not changed_command(shlex.split(typed), 0.5).changes


def test_only_files_that_the_command_names_are_the_launchs(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("_BASE_: b.yaml\n")
    (tmp_path / "b.yaml").write_text("lr: 1\n")
    found = files_named_by(["t", "--config-file=a.yaml", "gone.yaml"], tmp_path, "")
    assert [Path(file.path).name for file in found] == ["a.yaml"]


def saved(tmp_path: Path, **more: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "ckpt.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 10, **more}, path)
    return read_state(open_checkpoint(path))


def test_where_a_script_sets_its_lr_is_said_and_not_guessed(tmp_path: Path) -> None:
    code = "opt = AdamW(model.parameters(), lr=1e-3, eps=1e-8)\n"
    evidence = Evidence(argv=("python", "t.py"), files=(ConfigFile("/t.py", code, ""),))
    with pytest.raises(PlanRefused) as caught:
        plan_lr_edits(HALF, saved(tmp_path), None, evidence=evidence)
    assert "multiply it by 0.5 where your script sets it" in (caught.value.remedy or "")
    assert "t.py" not in (caught.value.remedy or "")


def test_what_the_command_does_not_say_is_looked_for_in_its_files(tmp_path: Path) -> None:
    """`--min_lr` alone on the command: the LR itself is in the config."""
    file = ConfigFile("/t.yaml", "optimizer:\n  lr: 1e-3\nmin_lr: 1e-5\n", "")
    evidence = Evidence(argv=("python", "t.py", "t.yaml", "--min_lr", "1e-4"), files=(file,))
    with pytest.raises(PlanRefused) as caught:
        plan_lr_edits(HALF, saved(tmp_path), None, evidence=evidence)
    assert "`--min_lr 1e-4` → `--min_lr 5e-05`" in (caught.value.remedy or "")
    assert "`/t.yaml:optimizer.lr` 0.001 → 0.0005" in (caught.value.remedy or "")
    assert "t.yaml:min_lr" not in (caught.value.remedy or "")


def test_the_lrs_of_a_scheduler_of_an_unknown_class_are_scaled_where_a_person_accepts_it(tmp_path: Path) -> None:
    state = saved(tmp_path, scheduler={
        "last_epoch": 10, "_step_count": 11, "base_lrs": [1e-3], "_last_lr": [1e-3], "max_lr": 2e-3, "min_lr": 1e-5,
        "lr_ratio": 0.3, "warmup_lr_list": [0.1, 0.2], "total_steps": 90})  # fmt: skip
    accepted = RollbackRequest(step=10, lr_scale=0.5, accept_unproved="its class loads all of them")
    edits = {edit.field.removeprefix("scheduler."): edit.after for edit in plan_lr_edits(accepted, state, None).edits}
    assert edits["max_lr"] == 1e-3 and edits["min_lr"] == 5e-6 and edits["warmup_lr_list.1"] == 0.1
    assert "lr_ratio" not in edits and "total_steps" not in edits


DS = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 2e-4, "warmup_num_steps": 5}},
      "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}}}  # fmt: skip


def deepspeed(tmp_path: Path, argv: str, files: tuple[ConfigFile, ...]) -> Any:
    from dataclasses import replace

    state = replace(saved(tmp_path, lr_scheduler={"last_batch_iteration": 9}), config=DS)
    auto = json.loads(json.dumps(DS).replace('"warmup_max_lr": 0.0002', '"warmup_max_lr": "auto"'))
    config = ConfigFile("/ds.json", json.dumps(auto), "")
    return plan_lr_edits(HALF, state, None, config, Evidence(argv=tuple(argv.split()), files=files))


def test_auto_in_a_deepspeed_config_is_the_trainers_own_argument(tmp_path: Path) -> None:
    recipe = ConfigFile("/r.yaml", "learning_rate: 2e-4\n", "")
    with pytest.raises(PlanRefused) as caught:
        deepspeed(tmp_path, "llamafactory-cli train r.yaml", (recipe,))
    assert "`/r.yaml:learning_rate` 0.0002 → 0.0001 (`--lr-in" in (caught.value.remedy or "")
    with pytest.raises(PlanRefused) as caught:
        deepspeed(tmp_path, "deepspeed t.py --learning_rate 2e-4", ())
    assert "`--learning_rate 2e-4` → `--learning_rate 0.0001`" in (caught.value.remedy or "")
    with pytest.raises(PlanRefused, match=r'warmup_max_lr` in `/ds.json` is "auto": the trainer fills in its own') as caught:
        deepspeed(tmp_path, "deepspeed t.py", ())
    assert "give the trainer 0.0001" in (caught.value.remedy or "")


def test_the_pointer_of_mmengine_and_detectron_names_the_checkpoint_with_its_own_folder(tmp_path: Path) -> None:
    torch.save({"step": 20}, tmp_path / "iter_20.pth")
    target = open_checkpoint(tmp_path / "iter_20.pth")
    for before, after in (("/w/iter_60.pth", "/w/iter_20.pth"), ("model_9.pth\n", "iter_20.pth\n")):
        (edit,) = _pointer_edits("iter_20.pth", target, {"last_checkpoint": before})
        assert edit.after == after
    assert _pointer_edits("iter_20.pth", target, {"last_checkpoint": "a folder"}) == ()


def test_an_mmengine_file_has_the_step_of_its_meta(tmp_path: Path) -> None:
    torch.save({"meta": {"iter": 20, "epoch": 1}, "state_dict": {}, "param_schedulers": []}, tmp_path / "iter_20.pth")
    assert read_state(open_checkpoint(tmp_path / "iter_20.pth")).optimizer_step == 20
