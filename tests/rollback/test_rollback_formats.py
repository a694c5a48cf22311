"""One command for every writer: each LR in each file of each rank is scaled, by the command that a person types.

The checkpoints are made by the real frameworks, in real ranks where there are several.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints, read_state
from rollback.lr.effect import group_lr_leaves, scheduler_lr_leaves
from tests.builders.checkpoints import CheckpointFactory, convert_to_universal, run_script
from tests.rollback.disks import picture

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"), pytest.mark.timeout(900)]

# name -> (builder, options, number of files that hold LRs)
QUICK: dict[str, tuple[str, dict[str, Any], int]] = {
    "dcp": ("framework", {"writer": "dcp"}, 1),
    "dcp, flattened as torchtitan's": ("framework", {"writer": "dcp", "flat": True}, 1),
    "plain": ("framework", {"writer": "plain"}, 1),
    "plain legacy": ("framework", {"writer": "plain", "legacy": True}, 1),
}
SLOW: dict[str, tuple[str, dict[str, Any], int]] = {
    "trainer": ("framework", {"writer": "trainer"}, 2),
    "lightning": ("framework", {"writer": "lightning"}, 1),
    "deepspeed zero1": ("deepspeed", {"stage": 1, "processes": 2}, 3),
    "deepspeed zero3": ("deepspeed", {"stage": 3, "processes": 2}, 4),
    "accelerate deepspeed": ("deepspeed", {"stage": 2, "processes": 2, "accelerate": True}, 3),
    "fsdp2 sharded": ("fsdp", {"processes": 2}, 2),
    "fsdp1 full": ("fsdp", {"processes": 2, "version": 1, "state_dict": "FULL_STATE_DICT"}, 2),
    "fsdp2 full": ("fsdp", {"processes": 2, "state_dict": "FULL_STATE_DICT"}, 2),
    "fsdp2, a file a rank": ("fsdp", {"processes": 2, "per_rank": True}, 3),
    "accelerate ddp": ("accelerate", {"processes": 2, "folder": "opt_step-{step}/accelerator_state"}, 2),
}


def _build(checkpoints: CheckpointFactory, root: Path, builder: str, options: dict[str, Any]) -> None:
    getattr(checkpoints, builder)(root, **options)


def _command(root: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(root.parent / "logs"), "--checkpoints", str(root)])


def _lr_numbers(checkpoint: Checkpoint) -> dict[tuple[Any, ...], float]:
    """Every LR-valued number of the checkpoint by file and key path."""
    state = read_state(checkpoint)
    found: dict[tuple[Any, ...], float] = {}
    for scheduler in state.schedulers:
        found |= {(scheduler.file, *keys): v for keys, v in scheduler_lr_leaves(scheduler.state, scheduler.prefix)}
    for optimizer in state.optimizers:
        found |= {(optimizer.file, *keys): v for keys, v in group_lr_leaves(optimizer)}
    return found


def _halve_and_undo(checkpoints: CheckpointFactory, root: Path, builder: str, options: dict[str, Any]) -> int:
    """Halve every LR of a checkpoint and undo it; returns how many files were edited in between."""
    _build(checkpoints, root, builder, options)
    checkpoint = list_checkpoints(root)[0]
    numbers, before = _lr_numbers(checkpoint), picture(root)
    assert any(value for value in numbers.values())
    assert _command(root, "rollback", "--to", str(checkpoint.step), "--lr-scale", "0.5", "--yes") == 0
    after = _lr_numbers(list_checkpoints(root)[0])
    assert after == {key: value * 0.5 for key, value in numbers.items()}
    changed = [path for path, what in picture(root, times=False).items() if what[2] != before[path][2]]
    assert _command(root, "undo", "--yes") == 0
    assert picture(root) == before
    return len(changed)


@pytest.mark.parametrize("name", QUICK)
def test_every_lr_is_halved_and_comes_back(checkpoints: CheckpointFactory, root: Path, name: str) -> None:
    builder, options, num_files = QUICK[name]
    assert _halve_and_undo(checkpoints, root, builder, options) == num_files


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_dcp_resumes_at_half_the_lr_of_every_group(checkpoints: CheckpointFactory, root: Path, flat: bool) -> None:
    """torch's own loader, into a fresh app with two groups."""
    from tests.builders.framework_runs import DcpApp

    def used() -> list[list[float]]:
        app = DcpApp(flat)
        app.load(root / "step-10")
        return app.train(5)

    checkpoints.framework(root, "dcp", flat=flat)
    control = used()
    assert control[0] == [pytest.approx(9e-4), pytest.approx(4.5e-4)]
    assert _command(root, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert used() == [[lr / 2 for lr in row] for row in control]


def _used(root: Path, script: str, options: dict[str, Any], processes: int = 1) -> Any:
    """What a real resume in fresh processes then uses."""
    run_script(script, [str(root), json.dumps(options)], processes=processes)
    path = root.parent / "used.json"
    used = json.loads(path.read_text())
    path.unlink()
    return used


# name -> (builder, options of the save, further options of the resume, step)
RESUMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp1 sharded": ("fsdp", {"processes": 2, "version": 1}, {}),
    "fsdp2 sharded": ("fsdp", {"processes": 2}, {}),
    "fsdp1 full": ("fsdp", {"processes": 2, "version": 1, "state_dict": "FULL_STATE_DICT"}, {}),
    "fsdp2 full": ("fsdp", {"processes": 2, "state_dict": "FULL_STATE_DICT"}, {}),
    "trainer": ("framework", {"writer": "trainer", "max_steps": 14}, {"resume": "checkpoint-10"}),
    "trainer, polynomial": (
        "framework",
        {
            "writer": "trainer",
            "max_steps": 14,
            "kind": "polynomial",
            "arguments": {"lr_scheduler_kwargs": {"power": 2.0}},
        },
        {"resume": "checkpoint-10"},
    ),
    "trainer deepspeed zero1": (
        "framework",
        {"writer": "trainer", "max_steps": 14, "deepspeed": 1},
        {"resume": "checkpoint-10"},
    ),
    "trainer deepspeed zero2": (
        "framework",
        {"writer": "trainer", "max_steps": 14, "deepspeed": 2, "processes": 2},
        {"resume": "checkpoint-10"},
    ),
}
SCRIPTS = {"fsdp": "fsdp_run.py", "framework": "framework_runs.py", "deepspeed": "deepspeed_run.py"}


def _check_resumed(root: Path, script: str, options: dict[str, Any], command_step: str = "10") -> None:
    """inspect, verify, rollback at half the LR, a real resume that uses it, undo to the byte."""
    processes = options.get("processes", 1)
    control = _used(root, script, options, processes)
    before = picture(root)
    checkpoint = next(c for c in list_checkpoints(root) if str(c.step) == command_step)
    assert _command_of("inspect", str(checkpoint.path)) == 0 == _command_of("verify", str(checkpoint.path))
    assert _command(root, "rollback", "--to", command_step, "--lr-scale", "0.5", "--yes") == 0
    used = _used(root, script, options, processes)
    assert _halved(control) == used
    assert _command(root, "undo", "--yes") == 0
    assert picture(root) == before


def _halved(value: Any) -> Any:
    return [_halved(part) for part in value] if isinstance(value, list) else pytest.approx(value / 2, rel=1e-9)


def _command_of(*words: str) -> int:
    return run([*words])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_real_resume_uses_half_the_lr(checkpoints: CheckpointFactory, root: Path, name: str) -> None:
    builder, options, more = RESUMED[name]
    _build(checkpoints, root, builder, options)
    _check_resumed(root, SCRIPTS[builder], {**options, "resume": True, **more})


@pytest.mark.slow
def test_universal_checkpoint_resumes_at_half_the_lr(checkpoints: CheckpointFactory, root: Path) -> None:
    """DeepSpeed's own converter and its own universal load, on another number of ranks than saved it."""
    checkpoints.deepspeed(root, stage=1, processes=2)
    convert_to_universal(root, "global_step10")
    (root / "latest").unlink()
    shutil.rmtree(root / "global_step10")
    _check_resumed(root, "deepspeed_run.py", {"stage": 1, "resume": True, "universal": True})


@pytest.mark.slow
@pytest.mark.sample
def test_lightnings_last_goes_with_the_checkpoint_that_was_chosen(checkpoints: CheckpointFactory, root: Path) -> None:
    """A trainer that resumes from `last` goes on from the chosen step at the new LR, not from the abandoned one."""
    checkpoints.framework(root, "lightning", steps=20, save_every=10, last=True)
    names = sorted(path.name for path in root.iterdir())
    assert names[0].endswith("step=10.ckpt") and names[1].endswith("step=20.ckpt") and names[2:] == ["last.ckpt"]
    resume = {"writer": "lightning", "steps": 23, "resume": ["last.ckpt", names[0]]}
    control = _used(root, "framework_runs.py", resume)
    assert (control["last.ckpt"]["first"], control[names[0]]["first"]) == (20, 10)
    before = picture(root)
    assert _command(root, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    assert sorted(path.name for path in root.iterdir()) == [names[0], "last.ckpt"]
    assert (root / "last.ckpt").read_bytes() == (root / names[0]).read_bytes()
    assert (root / "last.ckpt").stat().st_ino != (root / names[0]).stat().st_ino  # Lightning overwrites it in place
    used = _used(root, "framework_runs.py", resume)
    halved = [pytest.approx(lr / 2, rel=1e-12) for lr in control[names[0]]["lrs"]]
    assert used == {name: {"first": 10, "lrs": halved} for name in ("last.ckpt", names[0])}
    assert _command(root, "undo", "--yes") == 0
    assert picture(root) == before
    # the copy of the very step: edited too
    assert _command(root, "rollback", "--to", "20", "--lr-scale", "0.5", "--yes") == 0
    assert (root / "last.ckpt").read_bytes() == (root / names[1]).read_bytes()
    assert _command(root, "rollback", "--to", "20", "--lr-scale", "0.5", "--yes") == 0  # and 20 is still one checkpoint
    assert _command(root, "undo", "--yes") == 0 == _command(root, "undo", "--yes")
    assert picture(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_lr_of_every_rank_is_halved_and_comes_back(checkpoints: CheckpointFactory, root: Path, name: str) -> None:
    builder, options, num_files = SLOW[name]
    assert _halve_and_undo(checkpoints, root, builder, options) == num_files


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_deepspeeds_own_scheduler_is_refused_with_the_place_where_its_lr_lives(
    checkpoints: CheckpointFactory, root: Path, scheduler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured: no edit of the checkpoint has any effect; the LR comes from the config of the next launch."""
    checkpoints.deepspeed(root, stage=1, processes=2, scheduler=scheduler)
    before = picture(root)
    assert _command(root, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 3
    said = capsys.readouterr().err
    where = (
        "the training script creates the optimizer"
        if scheduler == "WarmupCosineLR"
        else "config file of the next launch"
    )
    assert where in said and "hint:" in said
    assert picture(root) == before
    assert _command(root, "rollback", "--to", "10", "--yes") == 0  # without an LR there is nothing to refuse


@pytest.mark.slow
def test_latest_is_rewritten_to_the_checkpoint_that_was_chosen(checkpoints: CheckpointFactory, root: Path) -> None:
    """DeepSpeed loads what `latest` names, and without it silently starts from scratch."""
    checkpoints.deepspeed(root, stage=1, processes=2, save_at=[5, 10])
    before = picture(root)
    assert (root / "latest").read_text() == "global_step10"
    assert _command(root, "rollback", "--to", "5", "--lr-scale", "0.5", "--yes") == 0
    assert (root / "latest").read_text() == "global_step5"
    assert not (root / "global_step10").exists()
    assert _command(root, "undo", "--yes") == 0
    assert picture(root) == before
