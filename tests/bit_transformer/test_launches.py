"""Launches as a person meets them: stop and go on, refusals in one sentence, a rollback carried out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bit_transformer.training.resume import find_resume_point
from tests.bit_transformer.launches import ROOT, TINY, job, read_lines, run_jobs


def _chronicle(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    command = [sys.executable, "-m", "chronicle.cli.main", *arguments]
    return subprocess.run(command, cwd=directory, env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps with a checkpoint every four; rolled back to 8 with LR halved, warm-up, skip and reshuffle; 4 more."""
    root = tmp_path_factory.mktemp("rolled")
    environ = {"CHRONICLE_RUN_DIR": str(root / "logs" / "run"), "CHRONICLE_RUN": "run"}
    settings = ("checkpoint_every=4", "total_steps=24")

    def one(launch: int, stop_at: int) -> dict[str, object]:
        return job(root, *settings, stop_at=stop_at, launch=f"logs/run/launches/{launch:04d}",
                   environ={**environ, "CHRONICLE_LAUNCH": str(launch)})

    run_jobs([one(1, 12)])
    done = _chronicle(root, "rollback", "--run", "run", "--checkpoints", "checkpoints", "--to", "8", "--lr-scale", "0.5",
                      "--warmup", "2", "--skip-batches", "3", "--reshuffle", "--yes")
    assert done.returncode == 0, done.stderr
    run_jobs([one(2, 12)])
    return root


def test_rollback_halves_the_lr_and_warms_up(rolled_back: Path) -> None:
    """Launch 2 starts after step 8 with a half of half the LR, then half, the first launch's value being 0.012."""
    lines = read_lines(rolled_back / "logs/run/launches/0002/metrics.jsonl")
    assert [(line["step"], line["lr"]) for line in lines] == [
        (9, pytest.approx(0.003)), (10, pytest.approx(0.006)), (11, pytest.approx(0.006)), (12, pytest.approx(0.006))]


def test_rollback_skips_and_reshuffles_the_data(rolled_back: Path) -> None:
    """Step 8 reads position 11 of the next generation, for ever: the checkpoint of step 12 remembers it."""
    path = rolled_back / "checkpoints/opt_step-12/accelerator_state/custom_checkpoint_1.pkl"
    data = torch.load(path, weights_only=True)["data"]
    assert data["segments"] == [[0, 0, 0], [8, 11, 1]] and data["position"] == 15
    first, second = (read_lines(rolled_back / f"logs/run/launches/{n:04d}/samples.jsonl") for n in (1, 2))
    assert not {line["digest"] for line in first} & {line["digest"] for line in second}


def test_usage_tells_what_the_restart_cost(rolled_back: Path) -> None:
    """`chronicle data usage` counts 24 skipped windows, and no repeat."""
    usage = json.loads(_chronicle(rolled_back, "data", "usage", "--run", "run", "--json").stdout)
    assert usage["restarts"][0]["skipped"] == 24 and usage["restarts"][0]["reshuffled"]
    assert [source["repeats"] for source in usage["sources"]] == [0, 0]


def test_journal_has_the_last_word_on_where_to_go_on(rolled_back: Path) -> None:
    """After launch 2 saved step 12, `auto` takes that, not the contract's step 8."""
    environ = {"CHRONICLE_RUN_DIR": str(rolled_back / "logs" / "run")}
    point = find_resume_point("auto", rolled_back / "checkpoints", environ)
    assert point.path == rolled_back / "checkpoints/opt_step-12/accelerator_state" and not point.skip_batches


def test_checkpoints_without_a_word_about_them_are_not_guessed(rolled_back: Path) -> None:
    """Outside the journal `auto` refuses and names the ways; `fresh` refuses to write among them."""
    from bit_transformer.errors import CannotResume

    with pytest.raises(CannotResume, match="holds checkpoints of later steps 4, 8, 12"):
        find_resume_point("fresh", rolled_back / "checkpoints", {})
    with pytest.raises(CannotResume, match=r"opt_step-9/accelerator_state` does not exist; steps here: 4, 8, 12"):
        find_resume_point("9", rolled_back / "checkpoints", {})


def test_earlier_checkpoint_with_later_ones_beside_it_is_refused(rolled_back: Path) -> None:
    """Going back without a rollback would overwrite what came later."""
    from bit_transformer.errors import CannotResume

    with pytest.raises(CannotResume, match="holds checkpoints of later steps 12") as raised:
        find_resume_point("8", rolled_back / "checkpoints", {})
    assert "chronicle rollback --to 8" in (raised.value.remedy or "")


def test_a_save_that_was_cut_is_passed_over_and_does_not_stop_the_next_start(tmp_path: Path) -> None:
    """It has no manifest, which is written last: the newest whole one is loaded, and the cut one may be overwritten."""
    run_jobs([job(tmp_path, "total_steps=8", "checkpoint_every=4")])
    root = tmp_path / "checkpoints"
    newest = find_resume_point("auto", root, {"CHRONICLE_RUN_DIR": str(tmp_path / "run")})
    assert newest.path == root / "opt_step-8/accelerator_state"
    (root / "opt_step-8/chronicle-manifest.json").unlink()
    (root / "opt_step-8/accelerator_state/model.safetensors").write_bytes(b"cut")
    for environ in ({"CHRONICLE_RUN_DIR": str(tmp_path / "run")}, {}, {"CHRONICLE_RESUME_FROM": str(root / "opt_step-4")}):
        assert find_resume_point("auto", root, environ).path == root / "opt_step-4/accelerator_state"


def test_changed_data_is_refused_before_the_first_step(rolled_back: Path) -> None:
    """Another mixture or seed than the checkpoint's: one sentence with the difference, nothing trained."""
    done = run_jobs([job(rolled_back, "data.seed=5", "checkpoint_every=4", "total_steps=24", resume="12",
                         launch="logs/other")], check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "the data plan changed since the checkpoint: seed was 0, is 5" in done.stderr
    assert not (rolled_back / "logs/other/metrics.jsonl").exists()


def test_bad_setting_ends_with_one_sentence() -> None:
    """Exit code 1, no traceback, the field and what was expected."""
    command = [sys.executable, "-m", "bit_transformer.train", "--set", "batch_size=15.5"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "error: batch_size is 15.5, expected a whole number, 1 or more"


def test_sigterm_finishes_the_step_saves_and_ends(tmp_path: Path) -> None:
    """A scheduler's warning: the step in progress is completed, saved with its manifest, and the exit code is 0."""
    command = [sys.executable, "-m", "bit_transformer.train", "--checkpoints", str(tmp_path / "checkpoints"),
               *(part for setting in (*TINY, "total_steps=100000") for part in ("--set", setting))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CHRONICLE_RUN_DIR": str(tmp_path / "run"),
               "CHRONICLE_LAUNCH_DIR": str(tmp_path / "launch")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 20/"):
                process.terminate()
                break
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    stopped = int(rest.strip().splitlines()[-1].removeprefix("stopped on request after step "))
    steps = [line["step"] for line in read_lines(tmp_path / "launch/metrics.jsonl")]
    assert steps == list(range(1, stopped + 1)) and stopped >= 20
    assert (tmp_path / f"checkpoints/opt_step-{stopped}/chronicle-manifest.json").is_file()


def test_non_finite_gradients_stop_both_ranks_and_their_batch_is_on_record(tmp_path: Path) -> None:
    """An LR that blows the weights up: every rank ends, one sentence, and the batch of that step has its digest."""
    done = run_jobs([job(tmp_path, "total_steps=40", "optimizer.lr=1e25", "warmup_steps=0")], num_processes=2, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: gradients of step") == 2 and "NonFiniteGradients" not in done.stderr
    taken = [line["step"] for line in read_lines(tmp_path / "launch/samples.jsonl")]
    logged = [line["step"] for line in read_lines(tmp_path / "launch/metrics.jsonl")]
    assert taken == [*logged, len(taken)] and len(taken) >= 2
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_nan_on_one_rank_of_two_stops_both_at_the_same_step(tmp_path: Path) -> None:
    """Planted on rank 1 at step 5: both say so, both end, the bad step's batch is on record, nothing is saved."""
    done = run_jobs([job(tmp_path, "total_steps=8", nan=(1, 5))], num_processes=2, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: gradients of step 5 are not finite (grad_norm nan)") == 2
    taken = read_lines(tmp_path / "launch/samples.jsonl")
    assert [line["step"] for line in taken] == [1, 2, 3, 4, 5] and len({line["digest"] for line in taken}) == 5
    assert [line["step"] for line in read_lines(tmp_path / "launch/metrics.jsonl")] == [1, 2, 3, 4]
    assert not list((tmp_path / "checkpoints").glob("*"))
