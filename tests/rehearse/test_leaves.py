"""Every file of a checkpoint is read by name, by content, and without executing anything."""

import json
import math
import pickle
from pathlib import Path

import torch
from safetensors.torch import save_file

from chronicle.rehearse.leaves import LeafForm, measure, read_leaves


def test_each_kind_of_file_gives_named_leaves(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    torch.save({"step": 20, "w": torch.ones(3), "half": torch.ones(3)[::2], "name": "x"}, checkpoint / "state-20.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log": [{"loss": 1.5}], "dir": str(tmp_path / "out")}))
    (checkpoint / "patience.pkl").write_bytes(pickle.dumps({"bad_epochs": 3}))
    save_file({"a": torch.zeros(2)}, checkpoint / "model.safetensors")
    (checkpoint / "config.yaml").write_text(f"out: {tmp_path / 'out'}\n")
    found = read_leaves(checkpoint, 20, tmp_path / "out")
    assert found["state-N.pt: step"].value == 20 and found["state-N.pt: w"].form is LeafForm.TENSOR
    assert found["trainer_state.json: log.0.loss"].value == 1.5
    assert found["trainer_state.json: dir"].value == "{out}"
    assert found["patience.pkl: bad_epochs"].value == 3
    assert found["model.safetensors: a"].form is LeafForm.TENSOR
    assert str(found["config.yaml"].value).startswith("bytes ")
    assert found["state-N.pt: half"].form is LeafForm.UNREAD, "elements that are not in one piece are not called equal"


def test_paths_of_the_launch_are_no_difference(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        checkpoint = tmp_path / name / "out" / "step-20"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yaml").write_text(f"out: {tmp_path / name / 'out'}\n")
        found.append(read_leaves(checkpoint, 20, tmp_path / name / "out"))
    assert found[0] == found[1]


def test_the_largest_difference_of_two_tensors_is_measured(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        torch.save({"w": torch.ones(1000, dtype=dtype)}, tmp_path / "a.pt")
        torch.save({"w": torch.ones(1000, dtype=dtype).index_fill(0, torch.tensor([700]), 1.5)}, tmp_path / "b.pt")
        one, other = (read_leaves(tmp_path / name, 1, tmp_path)["w"] for name in ("a.pt", "b.pt"))
        assert measure(one, other) == (0.5, 1.0) and measure(one, one)[0] == 0
    torch.save({"w": torch.ones(1000, dtype=torch.int64)}, tmp_path / "c.pt")
    assert math.isinf(measure(one, read_leaves(tmp_path / "c.pt", 1, tmp_path)["w"])[0])
