"""After `chronicle rollback --lr-scale 0.5` a real trainer uses exactly half the LR, from its first step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from tests.rollback.accelerate_runs import HOW, make_run, used_lrs
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, build, hugging_face_cases, lrs, train_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ALL = [*COMPUTED, *FUNCTIONS, *hugging_face_cases()]


def _case(name: str) -> Any:
    return (COMPUTED | FUNCTIONS | hugging_face_cases())[name]


def rollback(top: Path, *words: str) -> int:
    places = ["--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")]
    return run(["rollback", *words, *places])


@pytest.mark.parametrize("name", ALL)
def test_first_and_next_twenty_steps_use_exactly_half(name: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_run(root, _case(name), "registered")
    control = used_lrs(root / "opt_step-10", _case(name), "registered")
    assert rollback(tmp_path, "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert used_lrs(root / "opt_step-10", _case(name), "registered") == [tuple(x / 2 for x in row) for row in control]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "name", ["lambda", "cosine_with_floor", "one_cycle", "sequential_before", "chained", "multi_step"]
)
def test_however_the_scheduler_is_kept(name: str, how: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_run(root, _case(name), how)
    control = used_lrs(root / "opt_step-15", _case(name), how)
    before = picture(root)
    assert rollback(tmp_path, "--to", "15", "--lr-scale", "0.5", "--yes") == 0
    assert used_lrs(root / "opt_step-15", _case(name), how) == [tuple(x / 2 for x in row) for row in control]
    assert run(["undo", "--yes", "--run", "r", "--logs", str(tmp_path / "logs")]) == 0
    assert picture(root) == before


@pytest.mark.parametrize("name", [*COMPUTED])
def test_contract_foretells_the_lrs_that_are_then_used(name: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_run(root, _case(name), "registered")
    assert rollback(tmp_path, "--to", "10", "--lr-scale", "0.3", "--yes") == 0
    contract = json.loads((tmp_path / "logs" / "r" / "contract.json").read_text())
    used = used_lrs(root / "opt_step-10", _case(name), "registered", 20)
    assert contract["next_lrs_source"] == "computed"
    assert [tuple(row) for row in contract["next_lrs"]] == used
    assert contract["step"] == 10 and contract["lr_ratio"] == 0.3
    assert [group["lr"] for group in contract["groups"]] == list(used[0])


def test_lambda_without_guard_has_an_unknown_forecast_and_a_proved_ratio(tmp_path: Path) -> None:
    make_run(tmp_path / "checkpoints", _case("lambda"), "registered")
    assert rollback(tmp_path, "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    contract = json.loads((tmp_path / "logs" / "r" / "contract.json").read_text())
    assert (contract["next_lrs"], contract["next_lrs_source"], contract["lr_ratio"]) == (None, "unknown", 0.5)


@pytest.mark.parametrize("name", ["cosine", "lambda", "step"])
def test_lrs_kept_as_tensors_are_found_and_halved(name: str, tmp_path: Path) -> None:
    """A scanner for Python floats would miss them in silence; here they are edited as what they are."""
    import torch

    def case(optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return _case(name)(optimizer)

    root = tmp_path / "checkpoints"
    make_run(root, case, "registered")
    control = used_lrs(root / "opt_step-10", case, "registered")
    before = picture(root)
    assert rollback(tmp_path, "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    used = used_lrs(root / "opt_step-10", case, "registered")
    assert used == [tuple(x / 2 for x in row) for row in control]
    assert run(["undo", "--yes", "--run", "r", "--logs", str(tmp_path / "logs")]) == 0
    assert picture(root) == before


@pytest.mark.parametrize("name", ["cosine", "step"])
def test_lrs_kept_as_numpy_scalars_are_found_and_halved(name: str, tmp_path: Path) -> None:
    """Accelerate itself refuses to load them; scripts that `torch.save` a dict keep them."""
    import numpy as np
    import torch

    model, optimizer, scheduler = build(_case(name))
    for group in optimizer.param_groups:
        group["lr"] = np.float64(group["lr"])
    for _ in range(10):
        train_step(model, optimizer, scheduler)
    root = tmp_path / "checkpoints"
    root.mkdir()
    path = root / "ckpt.pt"
    torch.save({"optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(), "step": 10}, path)
    assert isinstance(torch.load(path, weights_only=False)["lr_scheduler"]["_last_lr"][0], np.float64)
    before = picture(root)
    assert rollback(tmp_path, "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    edited = torch.load(path, weights_only=False)
    assert [float(lr) for lr in edited["lr_scheduler"]["_last_lr"]] == [lr / 2 for lr in lrs(optimizer)]
    assert [float(g["lr"]) for g in edited["optimizer"]["param_groups"]] == [lr / 2 for lr in lrs(optimizer)]
    assert run(["undo", "--yes", "--run", "r", "--logs", str(tmp_path / "logs")]) == 0
    assert picture(root) == before
