"""State files read and edited without torch, compared with what torch itself reads.

Every file here is written by `torch.save` (or `pickle`) and every edited copy is read back by `torch.load` in its
four modes and by `zipfile.testzip`, so that "accepted" means accepted by the loaders people use.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollback.errors import PlanRefused, RollbackError, UnknownFormat, UnreadableFile
from rollback.files.pickle_values import StoredFloat, TensorRef
from rollback.files.state_file import plan_patch, read_state_file, write_edited_copy
from rollback.files.torch_tree import Container, LeafKind, TorchFile
from rollback.files.torch_zip import read_layout
from rollback.lr.effect import FieldEdit
from rollback.transaction.apply import _check_edited


def load_four_ways(path: Path) -> list[Any]:
    return [
        torch.load(path, weights_only=weights_only, mmap=mmap)
        for weights_only, mmap in itertools.product((True, False), repeat=2)
    ]


def scheduler_like() -> dict[str, Any]:
    return {
        "base_lrs": [1e-3, 5e-4],
        "last_epoch": 200,
        "_step_count": 201,
        "_last_lr": [8e-4, 4e-4],
        "verbose": False,
        "name": "é",
        "big": 2**40,
        "minus": -7,
    }


def saved(path: Path, value: object, **options: Any) -> TorchFile:
    torch.save(value, path, **options)
    return read_state_file(path)


def test_tree_equals_what_torch_loads(tmp_path: Path) -> None:
    """Plain values come out as torch would give them: same types, same order, same numbers."""
    value = {**scheduler_like(), "nested": [{"a": (1, 2.5, None, True)}, OrderedDict(x=[])], 3: "int key"}
    file = saved(tmp_path / "s.bin", value)
    assert file.container is Container.ZIP
    assert file.tree == value
    assert list(file.tree) == list(value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read_and_edited(tmp_path: Path, protocol: int) -> None:
    """Frames (protocol 4 and 5) move with a constant that becomes wider."""
    file = saved(tmp_path / "s.bin", scheduler_like(), pickle_protocol=protocol)
    assert file.tree == scheduler_like()
    write_edited_copy(file, {("last_epoch",): 70_000, ("base_lrs", 1): 2.5e-4}, tmp_path / "new.bin")
    expected = {**scheduler_like(), "last_epoch": 70_000, "base_lrs": [1e-3, 2.5e-4]}
    loaded = [torch.load(tmp_path / "new.bin", weights_only=False, mmap=mmap) for mmap in (True, False)]
    assert loaded == [expected, expected]
    assert zipfile.ZipFile(tmp_path / "new.bin").testzip() is None


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles_of_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(scheduler_like(), protocol))
    file = read_state_file(path)
    assert (file.container, file.tree) == (Container.PICKLE, scheduler_like())
    write_edited_copy(file, {("_last_lr", 0): 0.25, ("big",): 5}, tmp_path / "new.pkl")
    new = pickle.loads((tmp_path / "new.pkl").read_bytes())
    assert new == {**scheduler_like(), "_last_lr": [0.25, 4e-4], "big": 5}


def test_tensors_become_descriptions(tmp_path: Path) -> None:
    weight = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    file = saved(tmp_path / "m.pt", {"w": weight.T, "p": torch.nn.Parameter(torch.ones(2))})
    ref = file.get(("w",))
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.shape, ref.stride, ref.numel) == ("bfloat16", (4, 3), (1, 4), 12)
    parameter = file.get(("p",))
    assert isinstance(parameter, TensorRef) and parameter.shape == (2,)


SCALARS: list[Any] = [
    torch.tensor(1497.0),
    torch.tensor(1497.0, dtype=torch.bfloat16),
    torch.tensor(12, dtype=torch.int64),
    torch.tensor(0.5, dtype=torch.float64),
    torch.arange(10.0)[7],
    np.float64(2.5),
    np.float32(2.5),
    np.int64(-3),
]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}-{getattr(s, 'dtype', '')}")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_scalars_of_torch_and_numpy_are_read_and_edited(tmp_path: Path, scalar: Any, legacy: bool) -> None:
    """An LR or a step kept as a 0-dim tensor or a numpy scalar is never missed."""
    file = saved(tmp_path / "s.pt", {"a": 1, "x": scalar}, _use_new_zipfile_serialization=not legacy)
    assert file.get(("x",)) == scalar.item()
    write_edited_copy(file, {("x",): 6}, tmp_path / "new.pt")
    new = torch.load(tmp_path / "new.pt", weights_only=False)
    assert new["x"].item() == 6 and new["x"].dtype == scalar.dtype
    if not legacy:
        assert zipfile.ZipFile(tmp_path / "new.pt").testzip() is None


def test_legacy_stream_keeps_its_tensors_when_a_constant_grows(tmp_path: Path) -> None:
    value = {"n": 1, "w": torch.arange(5.0), "step": torch.tensor(9.0)}
    file = saved(tmp_path / "old.pt", value, _use_new_zipfile_serialization=False)
    assert file.container is Container.LEGACY
    write_edited_copy(file, {("n",): 2**40}, tmp_path / "new.pt")
    new = torch.load(tmp_path / "new.pt", weights_only=True)
    assert new["n"] == 2**40 and torch.equal(new["w"], value["w"]) and new["step"] == 9.0


def test_edited_copy_is_a_new_file_and_the_source_is_untouched(tmp_path: Path) -> None:
    file = saved(tmp_path / "s.bin", scheduler_like())
    os.chmod(file.path, 0o640)
    before = file.path.read_bytes()
    write_edited_copy(file, {("last_epoch",): 100}, tmp_path / "new.bin")
    assert file.path.read_bytes() == before
    assert (tmp_path / "new.bin").stat().st_ino != file.path.stat().st_ino
    assert (tmp_path / "new.bin").stat().st_mode & 0o777 == 0o640
    with pytest.raises(FileExistsError):
        write_edited_copy(file, {("last_epoch",): 100}, tmp_path / "new.bin")


@pytest.mark.parametrize("new_int", [3, 255, 256, 70_000, 2**31, 2**62, -1])
def test_wider_constants_leave_tensors_in_place_and_every_mode_loads(tmp_path: Path, new_int: int) -> None:
    """When data.pkl grows it is written behind the others: no tensor moves, so each keeps its alignment."""
    value = {"n": 7, "w": torch.randn(1000), "v": torch.randn(3), "step": torch.tensor(4.0)}
    file = saved(tmp_path / "s.pt", value)
    write_edited_copy(file, {("n",): new_int}, tmp_path / "new.pt")
    for loaded in load_four_ways(tmp_path / "new.pt"):
        assert loaded["n"] == new_int
        assert torch.equal(loaded["w"], value["w"]) and torch.equal(loaded["v"], value["v"]) and loaded["step"] == 4
    archive = zipfile.ZipFile(tmp_path / "new.pt")
    assert archive.testzip() is None
    new = read_state_file(tmp_path / "new.pt")
    layout = new.segments[0].layout
    assert layout is not None
    old_layout = file.segments[0].layout
    assert old_layout is not None
    moved = [r.name for r, old in zip(layout.records, old_layout.records, strict=True) if r.header_offset != old.header_offset]
    assert [name.rpartition("/")[2] for name in moved] == ([] if new_int in (3, 255) else ["data.pkl"])
    write_edited_copy(new, {("n",): 2**63}, tmp_path / "again.pt")  # and once more, from what was written
    for loaded in load_four_ways(tmp_path / "again.pt"):
        assert loaded["n"] == 2**63 and torch.equal(loaded["w"], value["w"])


def apply(path: Path, patches: Any) -> None:
    with open(path, "r+b") as f:
        for patch in patches:
            f.seek(patch.offset)
            assert f.read(len(patch.old)) == patch.old
            f.seek(patch.offset)
            f.write(patch.new)


def test_patch_changes_only_the_constants_and_their_checksums(tmp_path: Path) -> None:
    value = {"w": torch.randn(5000), "lr": 1e-3, "last_epoch": 39036, "step": torch.tensor(5.0)}
    file = saved(tmp_path / "s.pt", value)
    before = file.path.read_bytes()
    patches = plan_patch(file, {("lr",): 5e-4, ("last_epoch",): 30500, ("step",): 6})
    assert sum(len(patch.new) for patch in patches) < 60
    apply(file.path, patches)
    for loaded in load_four_ways(file.path):
        assert (loaded["lr"], loaded["last_epoch"], loaded["step"].item()) == (5e-4, 30500, 6.0)
        assert torch.equal(loaded["w"], value["w"])
    assert zipfile.ZipFile(file.path).testzip() is None
    assert [p.old for p in plan_patch(read_state_file(file.path), {("lr",): 1e-3})] != []
    with open(file.path, "r+b") as f:
        for patch in patches:
            f.seek(patch.offset)
            f.write(patch.old)
    assert file.path.read_bytes() == before


def test_patch_refuses_what_does_not_fit(tmp_path: Path) -> None:
    file = saved(tmp_path / "s.pt", {"n": 200, "min_lr": 0})
    with pytest.raises(PlanRefused, match="does not fit"):
        plan_patch(file, {("n",): 256})
    with pytest.raises(PlanRefused, match="does not fit"):
        plan_patch(file, {("min_lr",): 0.5})


def test_no_checksums_stay_no_checksums(tmp_path: Path) -> None:
    """`set_crc32_options(False)` writes zeros; an edit must not turn that into one right CRC among wrong ones."""
    torch.serialization.set_crc32_options(False)
    try:
        file = saved(tmp_path / "s.pt", {"lr": 1e-3, "w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    layout = file.segments[0].layout
    assert layout is not None
    if any(record.crc for record in layout.records):
        pytest.skip("this torch writes CRCs even when told not to")
    assert [len(p.new) for p in plan_patch(file, {("lr",): 2e-3})] == [9]
    write_edited_copy(file, {("lr",): 2e-3}, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt")["lr"] == 2e-3


def test_one_number_reached_by_two_names_is_not_edited_by_one(tmp_path: Path) -> None:
    shared = [1e-3]
    file = saved(tmp_path / "s.pt", {"a": shared, "b": shared})
    with pytest.raises(PlanRefused, match="same stored number"):
        plan_patch(file, {("a", 0): 1.0})
    with pytest.raises(PlanRefused, match="the same stored number"):
        plan_patch(file, {("a", 0): 1.0, ("b", 0): 2.0})
    write_edited_copy(file, {("a", 0): 1.0, ("b", 0): 1.0}, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt") == {"a": [1.0], "b": [1.0]}


def test_text_and_missing_fields_are_not_edited(tmp_path: Path) -> None:
    file = saved(tmp_path / "s.pt", {"name": "x", "flag": True})
    with pytest.raises(PlanRefused, match="cannot be edited"):
        plan_patch(file, {("name",): 1})
    with pytest.raises(PlanRefused, match="cannot be edited"):
        plan_patch(file, {("flag",): 1})
    with pytest.raises(UnknownFormat, match=r"no field `lr`.*name, flag"):
        plan_patch(file, {("lr",): 1})


def test_float_fields_stay_floats_and_whole_ints_stay_ints(tmp_path: Path) -> None:
    file = saved(tmp_path / "s.pt", {"lr": 2.0, "min_lr": 4})
    write_edited_copy(file, {("lr",): 1, ("min_lr",): 2.0}, tmp_path / "new.pt")
    new = torch.load(tmp_path / "new.pt")
    assert new == {"lr": 1.0, "min_lr": 2} and isinstance(new["lr"], float) and isinstance(new["min_lr"], int)


def test_leaves_name_every_value_once_per_path(tmp_path: Path) -> None:
    file = saved(tmp_path / "s.pt", {"groups": [{"lr": 0.5, "params": [0, 1]}], "step": torch.tensor(3.0), "n": None})
    found = {leaf.keys: (leaf.value, leaf.kind) for leaf in file.leaves()}
    assert found == {
        ("groups", 0, "lr"): (0.5, LeafKind.FLOAT),
        ("groups", 0, "params", 0): (0, LeafKind.INT),
        ("groups", 0, "params", 1): (1, LeafKind.INT),
        ("step",): (3.0, LeafKind.SCALAR_TENSOR),
        ("n",): (None, LeafKind.NONE),
    }
    assert isinstance(file.get(("groups", 0, "lr")), StoredFloat)


def test_json_is_edited_without_changing_its_layout(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    text = json.dumps({"global_step": 20, "epoch": 1.5, "log": [{"lr": 1e-3}]}, indent=2, sort_keys=True) + "\n"
    path.write_text(text)
    file = read_state_file(path)
    write_edited_copy(file, {("global_step",): 10}, tmp_path / "new.json")
    assert (tmp_path / "new.json").read_text() == text.replace('"global_step": 20', '"global_step": 10')


FOREIGN = {
    "empty": (b"", UnknownFormat, "empty"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n", UnknownFormat, "Git LFS pointer"),
    "text": (b"hello world, no checkpoint", UnknownFormat, "begins with"),
    "gzip": (b"\x1f\x8b" + b"x" * 50, UnknownFormat, "gzip"),
    "zeros": (bytes(4096), UnknownFormat, "zero bytes"),
    "trailing": (pickle.dumps(1) + b"more", UnreadableFile, "follow the end"),
    "json": (b'{"a": ', UnreadableFile, "invalid JSON"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_state_file_is_named(tmp_path: Path, name: str) -> None:
    content, error, message = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        read_state_file(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.99])
def test_truncated_zip_is_refused(tmp_path: Path, kept: float) -> None:
    file = saved(tmp_path / "s.pt", {"w": torch.randn(100)})
    data = file.path.read_bytes()
    file.path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UnreadableFile):
        read_state_file(file.path)


@pytest.mark.parametrize("name", ["../data.pkl", "a/./data.pkl", "/data.pkl", "a//data.pkl", "a\\data.pkl"])
def test_record_names_that_no_writer_makes_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"x")
    with path.open("rb") as file, pytest.raises(UnreadableFile, match="no known writer uses such a name"):
        read_layout(file.fileno(), 0, path.stat().st_size)


def test_an_edited_copy_that_differs_anywhere_else_is_refused(tmp_path: Path) -> None:
    """Read back number by number: the planned one as planned, every other one as before."""
    original, target = saved(tmp_path / "s.pt", scheduler_like()), tmp_path / "edited.pt"
    planned = FieldEdit(file="s.pt", keys=("base_lrs", 0), before=1e-3, after=5e-4)
    write_edited_copy(original, {planned.keys: planned.after}, target)
    _check_edited(original, target, [planned])
    with pytest.raises(RollbackError, match="reads back as"):
        _check_edited(original, target, [replace(planned, after=2.5e-4)])
    target.unlink()
    write_edited_copy(original, {planned.keys: planned.after, ("last_epoch",): 100}, target)
    with pytest.raises(RollbackError, match="it is not part of the plan"):
        _check_edited(original, target, [planned])


def test_renamed_and_rezipped_files_are_read(tmp_path: Path) -> None:
    """A file zipped again is still readable; a compressed pickle cannot be edited in place and says so."""
    file = saved(tmp_path / "s.pt", {"n": 5, "step": torch.tensor(3.0)})
    stored, deflated = tmp_path / "stored.pt", tmp_path / "deflated.pt"
    for path, method in ((stored, zipfile.ZIP_STORED), (deflated, zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(file.path) as old, zipfile.ZipFile(path, "w", method) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info))
    assert read_state_file(stored).tree["n"] == 5  # type: ignore[index]
    write_edited_copy(read_state_file(stored), {("n",): 70_000}, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt")["n"] == 70_000
    assert zipfile.ZipFile(tmp_path / "new.pt").testzip() is None
    assert read_state_file(deflated).get(("n",)) == 5
    with pytest.raises(PlanRefused, match="compressed"):
        write_edited_copy(read_state_file(deflated), {("n",): 70_000}, tmp_path / "never.pt")
    assert not (tmp_path / "never.pt").exists()


def test_rng_states_are_read(tmp_path: Path) -> None:
    """Numpy arrays and a thousand-tuple of ints: the shape of Accelerate's random_states file."""
    rng = {"step": 7, "random_state": (3, tuple(range(625)), None), "numpy": np.random.RandomState(1).get_state(),
           "torch": torch.get_rng_state()}  # fmt: skip
    file = saved(tmp_path / "r.pkl", rng)
    assert file.get(("step",)) == 7
    array = file.get(("numpy", 1))
    assert (array.dtype, array.shape) == ("uint32", (624,))  # type: ignore[attr-defined]
    assert array.content == rng["numpy"][1].tobytes()  # type: ignore[attr-defined, index]


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    saved(tmp_path / "s.pt", {"lr": 1e-3})
    code = (
        "import sys; from rollback.files.state_file import read_state_file as r; assert r(sys.argv[1]).get(('lr',)) == 1e-3;"
        "print(sorted({'torch','numpy','typer','mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "s.pt"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_zip64_file_is_read_and_edited(tmp_path: Path) -> None:
    """A sparse file beyond 4 GiB, made by torch itself: offsets and the directory are 64 bits wide."""
    path = tmp_path / "big.pt"
    buffer = io.BytesIO()
    torch.save({"n": 5, "w": torch.ones(4)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            with new.open(zipfile.ZipInfo(info.filename), "w", force_zip64=True) as f:
                f.write(old.read(info))
    write_edited_copy(read_state_file(path), {("n",): 2**40}, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt")["n"] == 2**40
    assert zipfile.ZipFile(tmp_path / "new.pt").testzip() is None
