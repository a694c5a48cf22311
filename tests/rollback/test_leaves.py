"""Every file of a checkpoint is read by name, by content, and without executing anything."""

import json
import math
import pickle
import subprocess
import sys
from array import array
from collections import deque
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollback.checks.leaves import LeafForm, Value, compare_leaves, differ, measure, read_leaves


def read(path: Path, out: Path) -> dict[str, Value]:
    """The leaves of a file, or of a directory, of step 20 that was written below `out`."""
    files = {"": path}
    if path.is_dir():
        files = {str(one.relative_to(path)): one for one in sorted(path.rglob("*")) if one.is_file()}
    return read_leaves(files, 20, {str(out): "{out}"}, out / "unpacked")


def test_each_kind_of_file_gives_named_leaves(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    torch.save({"step": 20, "w": torch.ones(3), "half": torch.ones(3)[::2], "name": "x"}, checkpoint / "state-20.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log": [{"loss": 1.5}], "dir": str(tmp_path / "out")}))
    (checkpoint / "patience.pkl").write_bytes(pickle.dumps({"bad_epochs": 3}))
    save_file({"a": torch.zeros(2)}, checkpoint / "model.safetensors")
    (checkpoint / "config.yaml").write_text(f"out: {tmp_path / 'out'}\nema: {{decay_step: 20}}\n")
    (checkpoint / "chat_template.jinja").write_text("{% for one in messages %}{{ one }}{% endfor %}")
    (checkpoint / "log.jsonl").write_text('{"loss": 1.5}\n{"loss": 1.0}\n')
    found = read(checkpoint, tmp_path / "out")
    assert found["state-N.pt: step"].value == 20 and found["state-N.pt: w"].form is LeafForm.TENSOR
    assert found["trainer_state.json: log.0.loss"].value == 1.5
    assert found["trainer_state.json: dir"].value == "{out}"
    assert found["patience.pkl: bad_epochs"].value == 3
    assert found["model.safetensors: a"].form is LeafForm.TENSOR
    assert str(found["config.yaml"].value).startswith("bytes ") and found["config.yaml: ema.decay_step"].value == 20
    assert {found[name].form for name in ("chat_template.jinja", "log.jsonl")} == {LeafForm.DIGEST}, "no JSON, and read"
    assert found["state-N.pt: half"].form is LeafForm.UNREAD, "elements that are not in one piece are not called equal"


def test_paths_of_the_launch_are_no_difference(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        checkpoint = tmp_path / name / "out" / "step-20"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yaml").write_text(f"out: {tmp_path / name / 'out'}\n")
        found.append(read(checkpoint, tmp_path / name / "out"))
    assert found[0] == found[1]


def test_the_largest_difference_of_two_tensors_is_measured(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        torch.save({"w": torch.ones(1000, dtype=dtype)}, tmp_path / "a.pt")
        torch.save({"w": torch.ones(1000, dtype=dtype).index_fill(0, torch.tensor([700]), 1.5)}, tmp_path / "b.pt")
        one, other = (read(tmp_path / name, tmp_path)["w"] for name in ("a.pt", "b.pt"))
        assert measure(one, other) == (0.5, 1.0) and measure(one, one)[0] == 0
    torch.save({"w": torch.ones(1000, dtype=torch.int64)}, tmp_path / "c.pt")
    assert math.isinf(measure(one, read(tmp_path / "c.pt", tmp_path)["w"])[0])


def test_two_checkpoints_differ_by_name_also_in_tensors_and_unread_is_no_equality(tmp_path: Path) -> None:
    """Lists are one difference; a large integer keeps its digits; one element of one tensor is enough."""
    state = {"seed": 2**63 + 1, "lrs": [0.1, 0.2, 0.3], "w": torch.zeros(70_000), "half": torch.ones(3)[::2]}
    torch.save(state, tmp_path / "a.pt")
    state |= {"seed": 2**63 + 2, "lrs": [0.1, 0.3, 0.4], "w": torch.zeros(70_000).index_fill(0, torch.tensor([69_999]), 1e-9)}
    torch.save(state | {"more": True}, tmp_path / "b.pt")
    before, after = (read(tmp_path / name, tmp_path) for name in ("a.pt", "b.pt"))
    found, unread = compare_leaves(before, after)
    assert {one.name: (one.before, one.after, one.num_compared) for one in found} == {
        "seed": ((2**63 + 1,), (2**63 + 2,), 1),
        "lrs.*": ((0.2, 0.3), (0.3, 0.4), 3),
        "w": (("<float32 [70000]>",), ("<float32 [70000]>",), 1),
        "more": ((None,), ("True",), 1),
    }
    assert unread == {"half": "its elements are not in one piece of the file"}
    assert compare_leaves(before, before) == ([], unread)


class Slotted:
    """Has no dictionary."""

    __slots__ = ("q",)

    def __init__(self, q: int) -> None:
        self.q = q


class Made:
    """Is made from what it holds, and has an attribute beside that."""

    def __init__(self, parts: list[object]) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[object, ...]:
        return Made, (self.parts,), {"extra": 9}


class Attributed(dict[str, int]):
    """A dictionary with an attribute."""

    attr = 0


def attributed(k: int) -> Attributed:
    found = Attributed(x=5)
    found.attr = k
    return found


HELD = {
    "slots": Slotted,
    "made": lambda k: Made([{"z": k}]),
    "dict": attributed,
    "set": lambda k: {3, k, 9},
    "frozenset": lambda k: frozenset([k]),
    "deque": lambda k: deque([k], maxlen=3),
    "datetime": lambda k: datetime(2020, 1, k),
    "decimal": Decimal,
    "array": lambda k: array("i", [k]),
    "bytearray": lambda k: bytearray([k]),
    "bytes": lambda k: bytes([k] * 99),
    "generator": np.random.default_rng,
    "legacy generator": np.random.RandomState,
    "range": range,
    "complex": lambda k: complex(k, 1),
    "object array": lambda k: np.array([{"a": k}], dtype=object),
    "sparse": lambda k: torch.eye(3).to_sparse() * k,
    "transposed": lambda k: (torch.ones(4, 4) * k).t()[:2],
    "large": lambda k: 2**70 + k,
    "storage": lambda k: (torch.ones(4) * k).untyped_storage(),
    "nested": lambda k: pickle.dumps({"k": k}),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_an_object_holds_is_compared_or_said(kind: str, tmp_path: Path) -> None:
    """Sets, times, arrays and generators were "an object" that was equal to every other one."""
    found = []
    for place, k in enumerate((1, 1, 2)):  # equal ones are equal, too
        (tmp_path / str(place)).mkdir()
        torch.save({"held": HELD[kind](k), "same": 0}, tmp_path / str(place) / "x.pt")
        found.append(read(tmp_path / str(place) / "x.pt", tmp_path / str(place)))
    assert compare_leaves(found[0], found[1])[0] == []
    differences, unread = compare_leaves(found[0], found[2])
    assert unread == {} or kind in ("object array", "sparse", "storage", "transposed"), "and what can be read is"
    assert all(name.startswith("held") for name in (*unread, *(one.name for one in differences)))
    assert differences or unread


def test_addresses_in_a_plain_pickle_are_no_difference(tmp_path: Path) -> None:
    """A tensor in a plain pickle is a stream that holds the address of its storage."""
    found = []
    for _ in range(2):
        held = torch.ones(5)
        held.note = 1  # type: ignore[attr-defined]
        (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": held, "s": held.untyped_storage()}))
        found.append(read(tmp_path / "x.pkl", tmp_path))
    differences, unread = compare_leaves(*found)
    assert differences == [] and unread


def test_two_keys_of_one_name_are_two_leaves(tmp_path: Path) -> None:
    found = []
    for k in (1, 2):
        torch.save({1: k, "1": 0, "a.b": k, "a": {"b": 0}}, tmp_path / "x.pt")
        found.append(read(tmp_path / "x.pt", tmp_path))
    assert [one.name for one in compare_leaves(*found)[0]] == ["1", "a.b"]


def test_a_set_has_no_order(tmp_path: Path) -> None:
    found = []
    for order in ([1, 8, 16], [16, 8, 1]):
        torch.save(set(order), tmp_path / "x.pt")
        found.append(read(tmp_path / "x.pt", tmp_path))
    assert compare_leaves(*found) == ([], {})


def test_what_a_writer_says_in_the_head_of_a_file_is_compared(tmp_path: Path) -> None:
    for name, images in (("a", "320"), ("b", "160")):
        save_file({"w": torch.ones(2)}, tmp_path / name, metadata={"images": images, "format": "pt"})
        (tmp_path / name).rename(tmp_path / f"{name}.safetensors")
    found, _ = compare_leaves(*(read(tmp_path / f"{name}.safetensors", tmp_path) for name in ("a", "b")))
    assert [(one.name, one.before, one.after) for one in found] == [("images", (320,), (160,))]


SAVE = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(5 * 4 * 3, dtype=torch.float32).reshape(5, 4, 3)
state = {f"axis{axis}": distribute_tensor(whole, mesh, [Shard(axis)]) for axis in range(3)}
state |= {"all": distribute_tensor(whole, mesh, [Replicate()]), "none": torch.ones(0), "scalar": torch.tensor(4.0)}
state |= {"phase": "warm", "progress": {"step": 20, "recent": [1.5, 2.5], "best": None}}
dcp.save({"app": state}, checkpoint_id=sys.argv[1])
"""


@pytest.mark.slow
def test_a_checkpoint_of_dcp_has_the_same_leaves_whatever_ranks_wrote_it(tmp_path: Path) -> None:
    """Plain values are read as values, and a tensor of two ranks is one tensor, along whatever axis it was cut."""
    (tmp_path / "save.py").write_text(SAVE)
    found = []
    for ranks in (1, 2):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        out = tmp_path / f"{ranks}" / "step-20"
        subprocess.run([*words, "save.py", str(out)], cwd=tmp_path, check=True, capture_output=True)
        found.append(read(out, tmp_path))
    assert found[0].keys() == found[1].keys()
    assert compare_leaves(*found) == ([], {})
    assert LeafForm.UNREAD not in {value.form for value in found[1].values()}
    assert not differ(found[1]["app.axis0"], found[1]["app.axis2"]) and not differ(found[1]["app.axis0"], found[1]["app.all"])
    assert [found[1][f"app.{name}"].value for name in ("scalar", "phase", "progress.step", "progress.recent.1")] == [
        4.0, "warm", 20, 2.5,
    ]  # fmt: skip
    assert len(found[1]["app.axis1"].pieces) == 10 and measure(found[0]["app.axis1"], found[1]["app.axis1"]) == (0, 0)
