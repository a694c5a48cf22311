"""Which step a save is of: the number in its name, where the file counts it too, whatever its optimizer counts."""

import pickle
from pathlib import Path

from chronicle.rehearse.launches import saved_in


def save(path: Path, step: int, optimizer_steps: int) -> None:
    groups = [{"lr": 0.1, "params": [0]}]
    state = {"optimizer": {"state": {0: {"step": optimizer_steps}}, "param_groups": groups}, "train_state": {"step": step}}
    path.write_bytes(pickle.dumps(state))


def test_a_save_is_of_the_step_in_its_name_though_its_optimizer_began_anew(tmp_path: Path) -> None:
    """Moments that are not loaded count 20 steps in the save of step 30: it was compared with the save of step 20."""
    for step, counted in ((10, 10), (20, 10), (30, 20)):
        save(tmp_path / f"ckpt_{step}.pt", step, counted)
    assert {step: one.path.name for step, one in saved_in(tmp_path).items()} == {
        10: "ckpt_10.pt", 20: "ckpt_20.pt", 30: "ckpt_30.pt",
    }  # fmt: skip


def test_batches_are_the_steps_where_an_optimizer_steps_once_in_several(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / f"ckpt_{step}.pt", step, step // 4)
    assert set(saved_in(tmp_path)) == {10, 20}


def test_a_number_in_a_name_that_the_file_does_not_count_is_no_step(tmp_path: Path) -> None:
    save(tmp_path / "resnet50.pt", 10, 10)
    assert set(saved_in(tmp_path)) == {10}
