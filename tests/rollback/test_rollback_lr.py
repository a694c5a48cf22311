"""After `chronicle rollback --lr-scale 0.5` a real trainer uses exactly half the LR, from its first step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chronicle.commands.main import run
from tests.rollback.accelerate_runs import HOW, make_run, used_lrs
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, hugging_face_cases

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
