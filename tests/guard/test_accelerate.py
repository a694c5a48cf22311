"""The guard around a real Accelerator: healthy resumes pass untouched, wrong ones never take a step."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import MANIFEST_NAME, read_manifest
from tests.guard.training import Launch, start


def first_launch(run_dir: Path, checkpoint: Path, **options: object) -> tuple[Launch, list[float]]:
    """Seven steps, a save, five more: the losses of the five are what a resume must repeat."""
    launch = start(run_dir, **options)  # type: ignore[arg-type]
    launch.train(7)
    launch.save(checkpoint)
    return launch, launch.train(5)


def verdicts(run_dir: Path) -> list[dict[str, object]]:
    return [dict(entry.data) for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]


def failed_names(run_dir: Path) -> list[str]:
    return [check["name"] for check in verdicts(run_dir)[-1]["checks"] if not check["ok"]]  # type: ignore[attr-defined]


def test_healthy_resume_passes_and_continues_bit_for_bit(run_dir: Path, checkpoint: Path) -> None:
    _, expected = first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    assert launch.train(5) == expected
    passed = verdicts(run_dir)[-1]
    assert (passed["verdict"], passed["basis"], passed["verified"]) == ("passed", "manifest", True)
    assert {check["code"] for check in passed["checks"]} >= {"M1", "M2", "M3"}  # type: ignore[attr-defined]


def test_guard_changes_no_loss_in_50_steps_with_saves_between(tmp_path: Path) -> None:
    """With and without the guard: same losses to the last bit, though it simulates LRs and hashes generators."""

    def losses(run_dir: Path | None) -> list[float]:
        launch = start(run_dir)
        out = []
        for part in range(5):
            out += launch.train(10)
            launch.save(tmp_path / str(run_dir is None) / f"step_{part}")
        return out

    assert losses(tmp_path / "logs" / "tr") == losses(None)


def test_manifest_is_sealed_with_digests_and_what_was_in_memory(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    manifest = read_manifest(checkpoint)
    assert manifest is not None and manifest.memory is not None
    assert manifest.digests == "complete"
    assert (manifest.step, manifest.memory["optimizer_steps"]) == (7, [7, 7])
    assert {file.path for file in manifest.files} == {p.name for p in checkpoint.iterdir()} - {MANIFEST_NAME}
    assert len(manifest.memory["next_lrs"]) == 20
    assert manifest.memory["next_lrs"][0] == [manifest.memory["groups"][0]["lr"]]
    entry = next(read_journal(RunPaths(run_dir)).of_kind("checkpoint"))
    assert (entry.step, entry.data["path"]) == (7, str(checkpoint))
    assert entry.data["save_seconds"] > 0  # the launcher's grace and the checkpoint tax are reckoned from it


def test_an_optimizer_without_counters_has_its_steps_counted_over_launches(run_dir: Path, checkpoint: Path) -> None:
    """SGD says nowhere how often it has stepped; a checkpoint without a step could not be found again by `--to N`."""
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=1e-2)}
    _, expected = first_launch(run_dir, checkpoint, **sgd)
    launch = start(run_dir, seed=1, **sgd)  # type: ignore[arg-type]
    launch.accelerator.load_state(str(checkpoint))
    assert launch.train(5) == expected
    launch.save(checkpoint.with_name("second"))
    saved = [entry.step for entry in read_journal(RunPaths(run_dir)).of_kind("checkpoint")]
    began = [entry.step for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")]
    assert (saved, began) == ([7, 12], [0, 7])


def test_manifest_of_a_nested_save_lies_where_checkpoints_are_listed(run_dir: Path, checkpoint: Path) -> None:
    """The seed's layout `opt_step-N/accelerator_state`: the checkpoint is `opt_step-N`."""
    launch = start(run_dir)
    launch.train(7)
    launch.save(checkpoint / "accelerator_state")
    assert (checkpoint / MANIFEST_NAME).is_file()
    assert not (checkpoint / "accelerator_state" / MANIFEST_NAME).exists()
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint / "accelerator_state"))
    launch.train(1)
    assert verdicts(run_dir)[-1]["basis"] == "manifest"


def test_exp9_scheduler_that_was_not_restored_is_refused_at_the_load(
    run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 003 exp9: everything loaded but the scheduler, and the LR warmed up again from zero for hours."""
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1, prepare_scheduler=False)
    before = [p.detach().clone() for p in launch.model.parameters()]
    with pytest.raises(ResumeRefused) as refusal:
        launch.accelerator.load_state(str(checkpoint))
        launch.train(1)
    assert refusal.value.code == 78
    assert "learning rates of the next steps" in failed_names(run_dir)
    assert "was not loaded" in capsys.readouterr().err
    assert len(before) == 4


def test_launch_that_loads_nothing_in_a_run_with_a_past_takes_no_step(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    before = [p.detach().clone() for p in launch.model.parameters()]
    with pytest.raises(ResumeRefused):
        launch.train(1)
    assert all(torch.equal(a, b) for a, b in zip(before, launch.model.parameters(), strict=True))
    assert failed_names(run_dir) == ["resume"]


def test_declared_fresh_start_passes_and_stands_in_the_journal(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    start(run_dir, fresh_start=True).train(1)
    assert verdicts(run_dir)[-1]["fresh_start"] is True
    assert verdicts(run_dir)[-1]["verdict"] == "passed"


def test_fresh_start_can_be_declared_by_the_environment(
    run_dir: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_launch(run_dir, checkpoint)
    monkeypatch.setenv("CHRONICLE_FRESH_START", "1")
    assert len(start(run_dir).train(1)) == 1


def test_first_launch_of_a_run_needs_no_permission(run_dir: Path) -> None:
    start(run_dir).train(1)
    found = verdicts(run_dir)
    run_id = found[0].pop("run_id")
    assert run_id == json.loads((run_dir / "run.json").read_text())["run_id"]
    assert found == [
        {
            "verdict": "passed",
            "moment": "before the first step",
            "mode": "enforce",
            "basis": "fresh",
            "checks": [],  # and no `verified`: nothing was loaded
        }
    ]


def test_load_before_prepare_is_refused(run_dir: Path, checkpoint: Path) -> None:
    """Flow-Factory #172: `load_state` before `prepare` has no effect at all, and says nothing."""
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    parts = [launch.accelerator._models, launch.accelerator._optimizers, launch.accelerator._schedulers]
    prepared = [list(part) for part in parts]
    for part in parts:
        part.clear()
    launch.accelerator.load_state(str(checkpoint))  # it could be for an evaluation
    for part, things in zip(parts, prepared, strict=True):
        part.extend(things)
    with pytest.raises(ResumeRefused):
        launch.train(1)


def test_missing_random_state_is_refused_although_accelerate_skips_it(run_dir: Path, checkpoint: Path) -> None:
    """accelerate #4283: a missing RNG file is one INFO line."""
    first_launch(run_dir, checkpoint)
    (checkpoint / "random_states_0.pkl").unlink()
    with pytest.raises(ResumeRefused):
        start(run_dir, seed=1).accelerator.load_state(str(checkpoint))


@pytest.mark.parametrize("damage", ["moments", "weights", "lr", "steps"])
def test_state_that_changes_between_load_and_first_step_is_refused(
    run_dir: Path, checkpoint: Path, damage: str
) -> None:
    """What a script does after the load is as wrong as a bad load: caught right before the first step."""
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    raw = launch.optimizer.optimizer
    with torch.no_grad():
        if damage == "moments":
            for state in raw.state.values():
                state["exp_avg"].zero_()
        elif damage == "weights":
            next(launch.model.parameters()).mul_(1.01)
        elif damage == "lr":
            raw.param_groups[0]["lr"] *= 0.5
        else:
            for state in raw.state.values():
                state["step"].zero_()
    with pytest.raises(ResumeRefused):
        launch.train(1)
    expected = {
        "moments": "optimizer moments",
        "weights": "weights",
        "lr": "learning rate per group",
        "steps": "optimizer step",
    }
    assert expected[damage] in failed_names(run_dir)


def test_second_optimizer_on_the_same_parameters_is_refused(run_dir: Path, checkpoint: Path) -> None:
    """DeepSpeed #4344's family: the restored optimizer is not the one that is stepped."""
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.optimizer = torch.optim.AdamW(launch.model.parameters(), lr=1e-2)
    with pytest.raises(ResumeRefused):
        launch.train(1)
    assert "optimizer identity" in failed_names(run_dir)


def test_scheduler_on_another_optimizer_object_is_refused(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.scheduler.scheduler.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    with pytest.raises(ResumeRefused):
        launch.train(1)
    assert "scheduler binding" in failed_names(run_dir)


def test_lr_that_leaves_the_plan_after_the_first_step_trips(run_dir: Path, checkpoint: Path) -> None:
    """L1: the files and memory were right, but something sets the LR from the second step on."""
    launch = start(run_dir)
    launch.train(20)
    launch.save(checkpoint.with_name("opt_step-20"))
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint.with_name("opt_step-20")))
    launch.train(3)
    launch.optimizer.param_groups[0]["lr"] *= 0.1
    with pytest.raises(ResumeRefused):
        launch.train(1)
    assert failed_names(run_dir) == ["learning rate in use"]


def test_hand_set_lr_is_no_reason_to_refuse(run_dir: Path, checkpoint: Path) -> None:
    """Scripts that set `group["lr"]` before each step (nanoGPT style) resume without a false alarm."""

    def train(launch: Launch, num_steps: int) -> None:
        for _ in range(num_steps):
            for group in launch.optimizer.param_groups:
                group["lr"] = 1e-2 * 0.97**launch.steps
            launch.train(1)

    launch = start(run_dir, scheduler=None)
    checkpoint = checkpoint.with_name("opt_step-30")
    train(launch, 30)
    launch.save(checkpoint)
    train(launch, 1)  # so that the batch after the save is on record
    resumed = start(run_dir, seed=1, scheduler=None)
    resumed.accelerator.load_state(str(checkpoint))
    resumed.steps = 30
    train(resumed, 10)
    assert verdicts(run_dir)[-1]["verdict"] == "passed"


def test_hand_set_lr_that_starts_again_is_refused(run_dir: Path, checkpoint: Path) -> None:
    """The same script with its step counter lost: the LR jumps, though no file and no state is wrong."""
    launch = start(run_dir, scheduler=None)
    checkpoint = checkpoint.with_name("opt_step-30")
    for step in range(30):
        launch.optimizer.param_groups[0]["lr"] = 1e-2 * 0.9**step
        launch.train(1)
    launch.save(checkpoint)
    resumed = start(run_dir, seed=1, scheduler=None)
    resumed.accelerator.load_state(str(checkpoint))
    resumed.optimizer.param_groups[0]["lr"] = 1e-2
    with pytest.raises(ResumeRefused):
        resumed.train(1)


def test_warn_lets_pass_and_says_so_in_the_journal(
    run_dir: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_launch(run_dir, checkpoint)
    monkeypatch.setenv("CHRONICLE_GUARD", "warn")
    start(run_dir, seed=1).train(1)
    assert [v["verdict"] for v in verdicts(run_dir)] == ["passed", "warned"]


def test_off_checks_nothing_but_is_journalled(run_dir: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_launch(run_dir, checkpoint)
    monkeypatch.setenv("CHRONICLE_GUARD", "off")
    start(run_dir, seed=1).train(1)
    assert [(v["verdict"], v.get("verified")) for v in verdicts(run_dir)] == [("passed", None), ("off", False)]


def test_stray_directory_is_refused_before_automatic_naming_picks_it(run_dir: Path, tmp_path: Path) -> None:
    """A live directory-level `.orig` bug (accelerate 1.15): `checkpoint_0.orig` is taken as the newest."""
    from accelerate.utils import ProjectConfiguration

    config = {"project_config": ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)}
    launch = start(run_dir, accelerator_options=dict(config))
    launch.train(3)
    launch.accelerator.save_state()
    launch.accelerator.chronicle.sealer.finish()
    (tmp_path / "checkpoints" / "checkpoint_0").rename(tmp_path / "checkpoints" / "checkpoint_0.orig")
    resumed = start(run_dir, seed=1, accelerator_options=dict(config))
    with pytest.raises(ResumeRefused):
        resumed.accelerator.load_state()
    assert failed_names(run_dir)[0] == "stray directory"


def test_broken_journal_never_kills_a_healthy_run(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run directory is a file: nothing can be recorded, training goes on, one line says so."""
    run_dir = tmp_path / "tr"
    run_dir.write_text("not a directory")
    _, expected = first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    assert launch.train(5) == expected
    said = capsys.readouterr().err
    assert said.count("the journal could not be written") == 2  # once a launch


def test_save_into_a_full_disk_goes_on(
    run_dir: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("chronicle.resume.save.write_first_manifest", no_space)
    launch, losses = first_launch(run_dir, checkpoint)
    launch.save(checkpoint)
    assert len(losses) == 5
    assert capsys.readouterr().err.count("manifest could not be written") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own needs root")
@pytest.mark.parametrize("from_the_start", [True, False])
def test_disk_of_the_logs_that_is_really_full_costs_a_healthy_run_nothing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], from_the_start: bool
) -> None:
    """Full from the start, or after the first entries: said once a launch, same losses, and the resume passes."""
    disk = tmp_path / "logs"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        if from_the_start:
            fill(disk)
        _, expected = first_launch(disk / "tr", checkpoint)
        fill(disk)
        launch = start(disk / "tr", seed=1)
        launch.accelerator.load_state(str(checkpoint))
        assert launch.train(5) == expected
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    told = 2 if from_the_start else 1
    assert capsys.readouterr().err.count("the journal could not be written") == told


def fill(disk: Path) -> None:
    """Use up what is left of a small disk."""
    with (disk / "others").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))


def test_known_checkpoint_without_manifest_is_refused(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    (checkpoint / MANIFEST_NAME).unlink()
    with pytest.raises(ResumeRefused):
        start(run_dir, seed=1).accelerator.load_state(str(checkpoint))


def test_checkpoint_from_before_the_guard_is_resumed_but_counts_as_unverified(run_dir: Path, checkpoint: Path) -> None:
    launch = start(None)
    launch.train(7)
    launch.save(checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.train(1)
    assert (verdicts(run_dir)[-1]["verdict"], verdicts(run_dir)[-1]["verified"]) == ("unverified", False)


def test_data_position_that_was_not_restored_is_refused(run_dir: Path, checkpoint: Path) -> None:
    position = {"plan": "ab12", "next": 0}
    launch = start(run_dir, data_state=lambda: dict(position))
    launch.train(7)
    position["next"] = 7
    launch.save(checkpoint)
    position["next"] = 0
    resumed = start(run_dir, seed=1, data_state=lambda: dict(position))
    resumed.accelerator.load_state(str(checkpoint))
    with pytest.raises(ResumeRefused):
        resumed.train(1)
    assert failed_names(run_dir) == ["data position"]
    position["next"] = 7
    healthy = start(run_dir, seed=1, data_state=lambda: dict(position))
    healthy.accelerator.load_state(str(checkpoint))
    healthy.train(1)
    assert verdicts(run_dir)[-1]["verdict"] == "passed"


SCRIPT = """
import sys
from contextlib import suppress
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.guard.training import start
start(Path(sys.argv[2]), seed=1).train(1)
"""


def test_uncaught_refusal_ends_the_process_with_78_and_a_table(run_dir: Path, checkpoint: Path) -> None:
    """No traceback: the table is the last word, and the code tells a scheduler not to requeue."""
    first_launch(run_dir, checkpoint)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, root, str(run_dir)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "resume refused before the first step" in done.stderr
    assert "hint: " in done.stderr


def test_contract_of_a_rollback_overrules_the_manifest(run_dir: Path, checkpoint: Path) -> None:
    """After `--lr-scale 0.5` memory must hold half the LR; the old LR is now the mistake."""
    first_launch(run_dir, checkpoint)
    write_contract(run_dir, checkpoint, ratio=0.5)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    with pytest.raises(ResumeRefused):
        launch.train(1)
    assert "learning rate per group" in failed_names(run_dir)
    halve_lr(checkpoint)
    launch = start(run_dir, seed=1)
    launch.accelerator.load_state(str(checkpoint))
    launch.train(25)
    assert verdicts(run_dir)[-1]["contract"] == "R1"


def test_unmet_contract_binds_the_next_load_to_its_checkpoint(run_dir: Path, checkpoint: Path) -> None:
    launch, _ = first_launch(run_dir, checkpoint)
    later = launch.save(checkpoint.parent / "opt_step-12")
    write_contract(run_dir, checkpoint, ratio=0.5)
    halve_lr(checkpoint)
    with pytest.raises(ResumeRefused):
        start(run_dir, seed=1).accelerator.load_state(str(later))
    assert failed_names(run_dir) == ["checkpoint of the rollback"]
    resumed = start(run_dir, seed=1)
    resumed.accelerator.load_state(str(checkpoint))
    resumed.train(10)
    after = resumed.save(checkpoint.parent / "opt_step-17")
    again = start(run_dir, seed=2)
    again.accelerator.load_state(str(after))
    again.train(1)
    assert verdicts(run_dir)[-1]["basis"] == "manifest"


def test_open_rollback_is_refused(run_dir: Path, checkpoint: Path) -> None:
    from chronicle.journal import JournalWriter

    first_launch(run_dir, checkpoint)
    with JournalWriter(RunPaths(run_dir)) as journal:
        intent = journal.append("rollback.intent", step=7, data={"id": "R1"})
        with pytest.raises(ResumeRefused):
            start(run_dir, seed=1).accelerator.load_state(str(checkpoint))
        journal.append("recover.receipt", data={"intent": intent.id, "outcome": "reverted"})
    start(run_dir, seed=1).accelerator.load_state(str(checkpoint))


def write_contract(run_dir: Path, checkpoint: Path, *, ratio: float) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest is not None and manifest.memory is not None
    memory = manifest.memory
    record = {
        "v": 1,
        "run": run_dir.name,
        "rollback": "R1",
        "checkpoint": str(checkpoint),
        "step": 7,
        "optimizer_step": 7,
        "groups": [{"lr": g["lr"] * ratio, "initial_lr": g["initial_lr"] * ratio} for g in memory["groups"]],  # type: ignore[attr-defined]
        "next_lrs": None,
        "next_lrs_source": "unknown",
        "lr_ratio": ratio,
        "schedulers": [{"file": "scheduler.bin", "last_epoch": 7, "step_count": 8}],
        "data": None,
        "warmup_steps": 0,
        "world_size": 1,
        "accept_change": [],
    }
    (run_dir / "contract.json").write_text(json.dumps(record))


def halve_lr(checkpoint: Path) -> None:
    """What the editor does to a LambdaLR checkpoint, done with torch; the manifest is written anew."""
    from rollback.checkpoint.manifest import write_manifest

    scheduler = torch.load(checkpoint / "scheduler.bin", weights_only=True)
    for key in ("base_lrs", "_last_lr"):
        scheduler[key] = [lr * 0.5 for lr in scheduler[key]]
    torch.save(scheduler, checkpoint / "scheduler.bin")
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    for group in optimizer["param_groups"]:
        group["lr"], group["initial_lr"] = group["lr"] * 0.5, group["initial_lr"] * 0.5
    torch.save(optimizer, checkpoint / "optimizer.bin")
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    write_manifest(checkpoint, step=manifest.step, memory=manifest.memory, run=manifest.run, launch=manifest.launch)


@pytest.mark.parametrize("name", ["contract.json", "manifest"])
def test_damaged_promise_is_refused_not_ignored(run_dir: Path, checkpoint: Path, name: str) -> None:
    """Fails closed: what cannot be read cannot be compared, and state is at stake."""
    first_launch(run_dir, checkpoint)
    damaged = checkpoint / MANIFEST_NAME if name == "manifest" else run_dir / name
    damaged.write_text('{"v": 1, "half')
    with pytest.raises(ResumeRefused):
        start(run_dir, seed=1).accelerator.load_state(str(checkpoint))
    assert "guard" in failed_names(run_dir)


def test_refusal_that_is_swallowed_comes_again_at_the_step(run_dir: Path, checkpoint: Path) -> None:
    first_launch(run_dir, checkpoint)
    launch = start(run_dir, seed=1, prepare_scheduler=False)
    launch.accelerator.load_state(str(checkpoint))
    for _ in range(2):
        with pytest.raises(ResumeRefused):
            launch.train(1)


def test_refusal_is_no_exception_that_a_broad_handler_could_swallow() -> None:
    assert not issubclass(ResumeRefused, Exception)
    assert issubclass(ResumeRefused, SystemExit)
