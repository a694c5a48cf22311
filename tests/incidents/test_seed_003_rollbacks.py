"""The rollbacks of the 80B chronicle that went wrong, done again: `seed 003_62f7446b71745d57.txt`, exp4 and exp8 to exp11."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import LambdaLR

from chronicle.cli.main import run
from tests.rollback.accelerate_runs import Training, make_run, used_lrs
from tests.rollback.disks import picture

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def schedule(optimizer: Any) -> LambdaLR:
    """Warm-up, then a slow linear decay: the schedule of the run, in small."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 - step / 1000))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    make_run(tmp_path / "checkpoints", schedule, "registered", (250, 300, 350))
    return tmp_path


def chronicle(top: Path, *words: str) -> int:
    places = ["--run", "tr-190", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")]
    return run([*words, *places])


def test_exp10_backup_beside_the_state_is_refused_by_name_and_nothing_changes(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "I left a backup file `custom_checkpoint_0.pkl.orig` and Accelerate … silently didn't load any state"."""
    state = top / "checkpoints" / "opt_step-300" / "accelerator_state"
    shutil.copy(state / "custom_checkpoint_0.pkl", state / "custom_checkpoint_0.pkl.orig")
    before = picture(top)
    assert chronicle(top, "rollback", "--to", "300", "--lr-scale", "0.5", "--yes") == 3
    said = capsys.readouterr().err
    assert "custom_checkpoint_0.pkl.orig" in said and "hint:" in said and "move it out" in said
    seen = {path: value for path, value in picture(top).items() if path.split("/")[0] != "logs"}
    assert seen | {".": before["."]} == before
    assert not list((top / "logs").rglob("*.jsonl"))


def test_exp10_unreadable_stray_is_refused_before_anything_is_read(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal comes from names: a stray next to files that cannot even be parsed is what is reported."""
    state = top / "checkpoints" / "opt_step-300" / "accelerator_state"
    (state / "custom_checkpoint_0.pkl~").write_bytes(b"")
    (state / "optimizer.bin").write_bytes(b"garbage")
    assert chronicle(top, "rollback", "--to", "300", "--yes") == 3
    assert "custom_checkpoint_0.pkl~" in capsys.readouterr().err


def test_exp8_doubling_the_lr_is_one_command(top: Path) -> None:
    control = used_lrs(top / "checkpoints" / "opt_step-250", schedule, "registered", 30)
    assert chronicle(top, "rollback", "--to", "250", "--lr-scale", "2", "--yes") == 0
    doubled = used_lrs(top / "checkpoints" / "opt_step-250", schedule, "registered", 30)
    assert doubled == [tuple(x * 2 for x in row) for row in control]


def test_exp4_and_exp11_halving_again_compounds(top: Path) -> None:
    """ "Lowering the LR by 50% more (the new value is 25% from the original `1/2*1/2`)"."""
    control = used_lrs(top / "checkpoints" / "opt_step-250", schedule, "registered", 30)
    assert chronicle(top, "rollback", "--to", "250", "--lr-scale", "0.5", "--yes") == 0
    training = Training(schedule, "registered")
    training.load(top / "checkpoints" / "opt_step-250")
    training.train(30)
    training.save(top / "checkpoints", 280)
    assert chronicle(top, "rollback", "--to", "280", "--lr-scale", "0.5", "--yes") == 0
    quarter = used_lrs(top / "checkpoints" / "opt_step-280", schedule, "registered", 10)
    fresh = Training(schedule, "registered")
    fresh.load(next((top / "abandoned").glob("*/opt_step-300")))
    assert [row[0] for row in quarter] == [1e-3 * (1 - step / 1000) * 0.25 for step in range(280, 290)]
    assert control[0][0] == 1e-3 * (1 - 250 / 1000)


def test_exp11_one_liner_leaves_the_first_step_unscaled_and_ours_does_not(top: Path) -> None:
    """The seed's own edit: `base_lrs` and `_last_lr` of custom_checkpoint_0.pkl halved, `torch.save` in place."""
    import torch

    checkpoint = top / "checkpoints" / "opt_step-300"
    control = used_lrs(checkpoint, schedule, "registered", 3)
    by_hand = top / "by_hand" / "opt_step-300"
    shutil.copytree(checkpoint, by_hand)
    path = by_hand / "accelerator_state" / "custom_checkpoint_0.pkl"
    state = torch.load(path)
    for key in ("base_lrs", "_last_lr"):
        state[key] = [x * 0.5 for x in state[key]]
    torch.save(state, path)
    first, second, _ = used_lrs(by_hand, schedule, "registered", 3)
    assert first == control[0] and second == tuple(x / 2 for x in control[1])
    assert chronicle(top, "rollback", "--to", "300", "--lr-scale", "0.5", "--yes") == 0
    assert used_lrs(checkpoint, schedule, "registered", 3) == [tuple(x / 2 for x in row) for row in control]


def test_exp8_exp9_exp10_the_checkpoint_of_the_earlier_launch_is_brought_back(
    top: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """exp9 went back to 250 and saved its own 300 with a broken LR; exp10 went back to the 300 of exp8's launch."""
    root = top / "checkpoints"
    good = picture(root / "opt_step-300")
    write_entries(top, [("checkpoint", 8, 250), ("checkpoint", 8, 300), ("checkpoint", 8, 350)])
    assert chronicle(top, "rollback", "--to", "250", "--yes") == 0  # exp9
    broken = Training(schedule, "registered")  # the bug of exp9: nothing loaded, the LR starts anew
    broken.train(50)
    broken.save(root, 300)
    write_entries(top, [("checkpoint", 9, 300)])
    capsys.readouterr()
    assert chronicle(top, "rollback", "--to", "300", "--dry-run") == 0  # a bare step is exp9's own; exp8's is named beside it
    shown = capsys.readouterr()
    assert "step 300 was also abandoned" in shown.out + shown.err and "launch 8" in shown.out + shown.err
    assert chronicle(top, "rollback", "--to", "300@8", "--yes") == 0  # exp10
    assert picture(root / "opt_step-300") == good
    assert [row[0] for row in used_lrs(root / "opt_step-300", schedule, "registered", 1)] == [1e-3 * 0.7]
    receipt = last_entry(top, "rollback.receipt")
    assert receipt["data"]["parent_launch"] == 8 and receipt["step"] == 300
    assert list((top / "abandoned").glob(f"{receipt['data']['intent']}/opt_step-300"))


def test_exp10_repair_of_a_restarted_schedule_by_hand_set_fields(top: Path) -> None:
    """`base_lrs`, `_last_lr`, `last_epoch` and `_step_count` set at once, as the seed did, but in every place."""
    root = top / "checkpoints"
    broken = Training(schedule, "registered")
    broken.train(40)
    shutil.rmtree(root / "opt_step-300")
    broken.save(root, 300)
    words = ["--set", "base_lrs=1.875e-05", "--set", "lr=1.77e-05", "--set", "last_epoch=300"]
    assert chronicle(top, "rollback", "--to", "300", *words, "--yes") == 0
    used = used_lrs(root / "opt_step-300", schedule, "registered", 3)
    assert used[0] == (1.77e-05, 1.77e-05)
    assert used[1] == (1.875e-05 * (1 - 301 / 1000),) * 2


def write_entries(top: Path, entries: list[tuple[str, int, int]]) -> None:
    from chronicle.journal import JournalWriter
    from chronicle.paths import RunPaths

    with JournalWriter(RunPaths(top / "logs" / "tr-190")) as writer:
        for kind, launch, step in entries:
            path = top / "checkpoints" / f"opt_step-{step}" / "accelerator_state"
            writer.append(kind, step=step, launch=launch, data={"path": str(path), "step": step})


def last_entry(top: Path, kind: str) -> dict[str, Any]:
    lines = [
        json.loads(line)
        for path in sorted((top / "logs" / "tr-190" / "journal").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in sorted(lines, key=lambda line: line["id"]) if line["kind"] == kind][-1]
