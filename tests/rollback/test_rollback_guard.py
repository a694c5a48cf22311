"""Rollback and guard agree: the contract that one writes is what the other finds, and an undone edit is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chronicle
from chronicle.cli.main import run
from rollback.checkpoint.listing import open_checkpoint
from rollback.checks.verify import verify_checkpoint
from rollback.errors import Severity
from tests.rollback.accelerate_runs import Training, make_run, used_lrs
from tests.rollback.disks import picture
from tests.rollback.lr_cases import COMPUTED, FUNCTIONS, hugging_face_cases

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FAMILIES = ["lambda", "hf_cosine", "cosine_with_floor", "one_cycle", "sequential_before", "chained_with_floor"]


def _case(name: str) -> Any:
    return (COMPUTED | FUNCTIONS | hugging_face_cases())[name]


def _command(top: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")])


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHRONICLE_LAUNCH", "1")
    (tmp_path / "logs" / "r").mkdir(parents=True)
    return tmp_path


def _run_dir(top: Path) -> Path:
    return top / "logs" / "r"


@pytest.mark.parametrize("how", ["prepared", "both"])
@pytest.mark.parametrize("name", FAMILIES)
def test_guard_passes_a_rolled_back_checkpoint_at_half_the_lr(guarded: Path, name: str, how: str) -> None:
    root, run_dir = guarded / "checkpoints", _run_dir(guarded)
    make_run(root, _case(name), how, run_dir=run_dir)
    control = used_lrs(root / "opt_step-10", _case(name), how)
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    used = used_lrs(root / "opt_step-10", _case(name), how, run_dir=run_dir)
    assert used == [tuple(x / 2 for x in row) for row in control]


def test_guard_passes_a_registered_scheduler_too(guarded: Path) -> None:
    """The seed's way of keeping it: a custom object, counted in optimizer steps."""
    root, run_dir = guarded / "checkpoints", _run_dir(guarded)
    make_run(root, _case("lambda"), "registered", run_dir=run_dir)
    control = used_lrs(root / "opt_step-10", _case("lambda"), "registered")
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    used = used_lrs(root / "opt_step-10", _case("lambda"), "registered", run_dir=run_dir)
    assert used == [tuple(x / 2 for x in row) for row in control]


def test_lrs_of_a_lambda_are_foretold_from_what_was_recorded_at_save(guarded: Path) -> None:
    make_run(guarded / "checkpoints", _case("lambda"), "registered", run_dir=_run_dir(guarded))
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    contract = json.loads((_run_dir(guarded) / "contract.json").read_text())
    used = used_lrs(guarded / "checkpoints" / "opt_step-10", _case("lambda"), "registered", 20)
    assert contract["next_lrs_source"] == "stored"
    assert [tuple(row) for row in contract["next_lrs"]] == used


def test_edited_checkpoint_still_matches_its_manifest(guarded: Path) -> None:
    make_run(guarded / "checkpoints", _case("lambda"), "both", run_dir=_run_dir(guarded))
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    findings = verify_checkpoint(open_checkpoint(guarded / "checkpoints" / "opt_step-10"), full=True)
    assert [f for f in findings if f.severity is Severity.ERROR] == []


def test_guard_refuses_a_checkpoint_whose_edit_was_taken_back_by_hand(guarded: Path) -> None:
    """The contract promises half; somebody copies the old files back: refused before the first step."""
    root, run_dir = guarded / "checkpoints", _run_dir(guarded)
    make_run(root, _case("lambda"), "registered", run_dir=run_dir)
    kept = {p: p.read_bytes() for p in (root / "opt_step-10").rglob("*") if p.is_file()}
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    for path, content in kept.items():
        path.write_bytes(content)
    training = Training(_case("lambda"), "registered", run_dir)
    with pytest.raises(chronicle.ResumeRefused):
        training.load(root / "opt_step-10")
        training.step()


def test_undo_gives_back_the_manifest_and_the_absence_of_a_contract(guarded: Path) -> None:
    root, run_dir = guarded / "checkpoints", _run_dir(guarded)
    make_run(root, _case("lambda"), "registered", run_dir=run_dir)
    before = picture(root)
    assert _command(guarded, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert _command(guarded, "undo", "--yes") == 0
    assert picture(root) == before
    assert not (run_dir / "contract.json").exists()
    assert used_lrs(root / "opt_step-20", _case("lambda"), "registered", 2, run_dir=run_dir)


@pytest.mark.parametrize(
    "option, own", [("--warmup", "--lr-scale"), ("--skip-batches", "skip_first_batches"), ("--reshuffle", "set_seed")]
)
def test_what_the_trainer_has_not_said_it_does_is_refused_with_its_own_option(
    guarded: Path, option: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the three has to be declared by itself; the warm-up by any guard, so here it is a run without one."""
    others = {"--skip-batches": ("warmup", "reshuffle"), "--reshuffle": ("warmup", "skip")}
    run_dir = None if option == "--warmup" else _run_dir(guarded)
    make_run(guarded / "checkpoints", _case("lambda"), "registered", (10,), run_dir, others.get(option, ()))
    words = [option] if option == "--reshuffle" else [option, "4"]
    before = picture(guarded / "checkpoints")
    assert _command(guarded, "rollback", "--to", "10", *words, "--yes") == 3
    said = capsys.readouterr().err
    assert f"{option} needs runtime support" in said and own in said
    assert picture(guarded / "checkpoints") == before


def test_skip_and_warmup_reach_the_contract_of_a_trainer_that_said_it_carries_them_out(guarded: Path) -> None:
    honours = ("warmup", "skip", "reshuffle")
    make_run(guarded / "checkpoints", _case("lambda"), "registered", run_dir=_run_dir(guarded), honours=honours)
    words = ["--skip-batches", "7", "--reshuffle", "--warmup", "4"]
    assert _command(guarded, "rollback", "--to", "10", *words, "--yes") == 0
    contract = json.loads((_run_dir(guarded) / "contract.json").read_text())
    assert contract["data"] == {"skip_batches": 7, "reshuffle": True} and contract["warmup_steps"] == 4
