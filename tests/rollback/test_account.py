"""Everything in a checkpoint is accounted for: read as state, known as none by its content, or named as not read."""

import base64
import bz2
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollback.api import apply, plan_rollback, undo
from rollback.checkpoint.account import Reading
from rollback.checkpoint.listing import list_checkpoints, list_unrecognised, open_checkpoint, read_state
from rollback.checkpoint.state import walk_states
from rollback.checks.verify import verify_checkpoint
from rollback.errors import PlanRefused, Severity
from rollback.plan.plan import format_plan


def parts(make: Callable[..., Any] = torch.optim.AdamW) -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    optimizer = make(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    return {"m": model.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}


def as_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def nested(value: object, *keys: object) -> object:
    for key in reversed(keys):
        value = {key: value}
    return value


UNREAD = {
    "tuple key": lambda two: {("d",): two},
    "bytes": lambda two: {"d": as_bytes(two)},
    "pickled bytes": lambda two: {"a": {"d": pickle.dumps({"o": {"param_groups": [{"lr": 1.0}], "state": {}}})}},
    "a stream": lambda two: {"d": io.BytesIO(as_bytes(two))},
    "moments alone": lambda two: {"d": {"adam": two["o"]["state"]}},
    "packed bytes": lambda two: {"d": gzip.compress(as_bytes(two))},
    "bytes packed in one block": lambda two: {"d": bz2.compress(as_bytes({**two, "noise": os.urandom(5000)}))},
    "hexadecimal": lambda two: {"d": as_bytes(two).hex()},
    "base64": lambda two: {"d": base64.b64encode(as_bytes(two)).decode()},
    "a letter a byte": lambda two: {"d": pickle.dumps({"o": {"param_groups": [{"lr": 1.0}] * 3}}, 2).decode("latin-1")},
    "JSON text": lambda two: {"d": json.dumps({"text": "of a length" * 9, "deep": [{"s": two["s"]}]})},
    "YAML text": lambda two: {"d": "lr: 1.0\n" * 9 + "  param_groups:\n  - lr: 1.0\n"},
    "Python text": lambda two: {"d": repr({"n": "x" * 90, "s": two["s"]})},
    "packed bytes as numbers": lambda two: {"d": torch.frombuffer(bytearray(gzip.compress(as_bytes(two))), dtype=torch.uint8)},
    "a vector of bytes": lambda two: {"d": torch.frombuffer(bytearray(as_bytes(two)), dtype=torch.uint8).clone()},
    "an array of bytes": lambda two: {"d": np.frombuffer(as_bytes(two), dtype=np.uint8)},
    "small numbers": lambda two: {"d": list(as_bytes(two))},
}


@pytest.mark.parametrize("kind", UNREAD)
def test_an_optimizer_that_no_edit_reaches_is_a_doubt_by_name(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    root.mkdir()
    torch.save({**parts(), **UNREAD[kind](parts()), "step": 3}, root / "step_3.pt")
    with pytest.raises(PlanRefused, match=r"not read: `step_3\.pt:"):
        plan_rollback(root, 3, lr_scale=0.5)
    warned = [f for f in verify_checkpoint(list_checkpoints(root)[0]) if f.severity is Severity.WARN]
    assert [f.check for f in warned if "not read" in f.message]


@pytest.mark.parametrize("keys", [("a", "b", "c", "d", "e", "f", "g", "h"), (1, "x", 2)])
def test_an_optimizer_at_any_depth_is_edited(keys: tuple[object, ...], tmp_path: Path) -> None:
    root = tmp_path / "ck"
    root.mkdir()
    torch.save({**parts(), "deep": nested(parts(torch.optim.SGD), *keys), "step": 3}, root / "step_3.pt")
    apply(plan_rollback(root, 3, lr_scale=0.5))
    found = read_state(open_checkpoint(root / "step_3.pt"))
    lrs = [group["lr"] for optimizer in found.optimizers for group in optimizer.groups]
    assert lrs == [pytest.approx(0.5e-3 * 0.98**3)] * 2


HELD_ALONE = {
    "a random state": lambda: torch.get_rng_state(),
    "an array": lambda: np.arange(500),
    "a long text": lambda: "a sentence about nothing; " * 40,
    "a name": lambda: b"BZh is no archive" * 9,
    "a hash": lambda: "8004" + "0f" * 62,
    "settings": lambda: json.dumps({"width": 8, "lr": 1e-3, "names": ["a"] * 40}),
    "a script": lambda: "for group in optimizer.param_groups:\n    group['lr'] = lr\n" * 9,
    "numbers": lambda: list(range(200)),
}


@pytest.mark.parametrize("kind", HELD_ALONE)
def test_what_holds_no_file_is_no_doubt(kind: str, tmp_path: Path) -> None:
    torch.save({**parts(), "held": HELD_ALONE[kind](), "step": 3}, tmp_path / "step_3.pt")
    assert read_state(tmp_path / "step_3.pt").doubtful == ()


class Kept(NamedTuple):
    step: int
    state: dict[str, Any]
    extra: object


class Made:
    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return Made, (self.state,)


INSIDE = {
    "a named tuple": lambda held: Kept(3, held, None),
    "what an object was made from": lambda held: {"step": 3, "kept": Made(held)},
    "an array of objects": lambda held: {"step": 3, "kept": np.array([held, None], dtype=object)},
}


@pytest.mark.parametrize("kind", INSIDE)
def test_an_optimizer_inside_an_object_is_edited(kind: str, tmp_path: Path) -> None:
    torch.save(INSIDE[kind](parts()), tmp_path / "step_3.pt")
    apply(plan_rollback(tmp_path, 3, lr_scale=0.5))
    (found,) = read_state(open_checkpoint(tmp_path / "step_3.pt")).optimizers
    assert found.groups[0]["lr"] == pytest.approx(0.5e-3 * 0.98**3)


def test_a_schedule_whose_optimizer_was_not_found_is_said(tmp_path: Path) -> None:
    """A script of its own kind keeps an optimizer as a list of tensors: the schedule beside it tells that there is one."""
    other = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.zeros(1)], lr=0.4), 0.9)
    torch.save({**parts(), "q": {"b": [torch.ones(2)], "s": other.state_dict()}, "step": 3}, tmp_path / "step_3.pt")
    said = plan_rollback(tmp_path, 3, lr_scale=0.5).expected.assumed
    assert [text for text in said if "`step_3.pt:q.s` (0.4)" in text]


def test_each_of_two_optimizers_is_forecast_by_its_own_schedule(tmp_path: Path) -> None:
    other = parts(lambda weights, lr: torch.optim.SGD(weights, lr=0.4))
    torch.save({"step": 3, "optimizers": [parts()["o"], other["o"]], "s": [parts()["s"], other["s"]]}, tmp_path / "step_3.pt")
    rows = plan_rollback(tmp_path, 3, lr_scale=0.5).expected.next_lrs
    assert rows is not None and rows[1] == pytest.approx((0.5e-3 * 0.98**4, 0.2 * 0.98**4))


def test_two_schedules_of_one_optimizer_are_no_finding(tmp_path: Path) -> None:
    """One is stepped after the other, so only the last one is at the LRs of the optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    made = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    for _ in range(3):
        optimizer.step()
        for one in made:
            one.step()
    saved = {"step": 3, "o": optimizer.state_dict(), "a": made[0].state_dict(), "b": made[1].state_dict()}
    torch.save(saved, tmp_path / "step_3.pt")
    assert [f for f in verify_checkpoint(list_checkpoints(tmp_path)[0]) if f.check == "F5"] == []


def test_an_lr_that_is_not_edited_is_said(tmp_path: Path) -> None:
    torch.save({**parts(), "current_lr": 7e-4, "step": 3}, tmp_path / "step_3.pt")
    said = plan_rollback(tmp_path, 3, lr_scale=0.5).expected.assumed
    assert [text for text in said if text.startswith("`current_lr` 0.0007 stays")]


NAMES = ["critic.pickle", "critic.optim", "critic", "a/b/c/critic.weights", "a/b/c/d/e/f/g/critic"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_name_is_read_by_its_content(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "ck" / "step_3"
    (folder / name).parent.mkdir(parents=True)
    torch.save({**parts(), "step": 3}, folder / "trainer.pt")
    torch.save(parts(), folder / name)
    before = (folder / name).read_bytes()
    apply(plan_rollback(tmp_path / "ck", 3, lr_scale=0.5))
    assert torch.load(folder / name)["o"]["param_groups"][0]["lr"] == pytest.approx(0.5e-3 * 0.98**3)
    undo(tmp_path / "ck")
    assert (folder / name).read_bytes() == before


def test_every_file_is_accounted_for_by_its_content_and_not_by_its_ending(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    folder.mkdir()
    torch.save({**parts(), "step": 3}, folder / "trainer.pt")
    (folder / "notes.pickle").write_text("a note")
    (folder / "picture.pt.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "index.bin2").write_bytes(bytes(range(1, 200)))
    (folder / "critic.pt.gz").write_bytes(gzip.compress(as_bytes(parts())))
    (folder / "critic.yaml").write_text("critic:\n  param_groups:\n  - lr: 1.0\n")
    (folder / "critic.json").write_text(json.dumps({"critic": {"param_groups": [{"lr": 1.0}], "state": [0.5] * 2000}}))
    (folder / "critic.txt").write_bytes(base64.b64encode(as_bytes(parts())))
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    save_file({"exp_avg.w": torch.ones(2)}, folder / "adam.safetensors")
    rows = {one.path: (one.reading, one.doubtful) for one in read_state(folder).account}
    assert rows == {
        "trainer.pt": (Reading.STATE, False),
        "notes.pickle": (Reading.NONE, False),
        "picture.pt.png": (Reading.NONE, False),
        "index.bin2": (Reading.UNREAD, False),
        "critic.pt.gz": (Reading.UNREAD, True),
        "critic.json": (Reading.UNREAD, True),
        "critic.txt": (Reading.UNREAD, True),
        "critic.yaml": (Reading.UNREAD, True),
        "model.safetensors": (Reading.NONE, False),
        "adam.safetensors": (Reading.UNREAD, True),
    }


def test_an_unread_file_that_may_be_anything_is_assumed_to_hold_no_lr(tmp_path: Path) -> None:
    folder = tmp_path / "ck" / "step_3"
    folder.mkdir(parents=True)
    torch.save({**parts(), "step": 3}, folder / "trainer.pt")
    (folder / "index.bin2").write_bytes(bytes(range(1, 200)))
    assert "assumed     not read: `index.bin2`" in format_plan(plan_rollback(tmp_path / "ck", 3, lr_scale=0.5))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_without_a_counter_has_the_step_of_its_name(make: Callable[..., Any], tmp_path: Path) -> None:
    held = parts(torch.optim.SGD)
    torch.save({"m": held["m"], "o": held["o"]}, tmp_path / "net_iter_40_2.pt")
    torch.save({"m": held["m"], "o": held["o"]}, tmp_path / "net.pt")
    assert [(c.path.name, c.step) for c in list_checkpoints(tmp_path)] == [("net_iter_40_2.pt", 40), ("net.pt", None)]


def test_a_link_to_a_later_step_outside_is_moved_and_comes_back(tmp_path: Path) -> None:
    root, store = tmp_path / "ck", tmp_path / "store"
    root.mkdir()
    store.mkdir()
    for step in (10, 20):
        torch.save({**parts(), "step": step}, root / f"step_{step}.pt")
    (root / "step_20.pt").rename(store / "s20.pt")
    (root / "step_20.pt").symlink_to("../store/s20.pt")
    plan = plan_rollback(root, 10)
    assert [later.name for later in plan.abandon] == ["step_20.pt"]
    apply(plan)
    assert [c.step for c in list_checkpoints(root, include_abandoned=False)] == [10]
    undo(root)
    assert (root / "step_20.pt").readlink() == Path("../store/s20.pt")


def test_what_is_no_checkpoint_and_no_text_is_said(tmp_path: Path) -> None:
    torch.save({**parts(), "step": 3}, tmp_path / "step_3.pt")
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "step_6.npz2").write_bytes(b"\x00\x01\x02 binary")
    (tmp_path / "7-save").mkdir()
    (tmp_path / "7-save" / "blob").write_bytes(b"\x00\x01\x02 binary")
    assert list_unrecognised(tmp_path, list_checkpoints(tmp_path)) == ("7-save", "step_6.npz2")


@pytest.mark.parametrize("name", ["state_{}", "training.{}.snapshot", "2026-11-{}_run/ck.pt", "step_{}/state", "it{}/a/s.dat"])
def test_a_save_is_found_by_its_content_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    for step in (10, 20):
        path = root / name.format(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**parts(), "step": step}, path)
        (root / f"note_{step}.txt").write_text("text")
    assert [c.step for c in list_checkpoints(root)] == [10, 20]
    assert list_unrecognised(root, list_checkpoints(root)) == ()


ODD = ["step{}-unsharded/a.pt", "{}k/state.pt", "2026-11-0{}T09:30:00Z/state.pt", "20261{}01_0930.pt"]


@pytest.mark.parametrize("name", ODD)
def test_a_save_of_a_schedule_and_no_counter_has_a_step_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    """A date is no step; a name is that of a copy only where the original lies beside it."""
    for number in (1, 2):
        held = parts(torch.optim.SGD)
        held["s"]["last_epoch"] = number
        path = tmp_path / name.format(number)
        path.parent.mkdir(exist_ok=True)
        torch.save(held, path)
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]


def test_a_save_that_was_cut_is_said(tmp_path: Path) -> None:
    for step in (3, 6):
        torch.save({**parts(), "step": step}, tmp_path / f"step_{step}.pt")
    torch.save(torch.ones(2), tmp_path / "step_9.pt")
    os.truncate(tmp_path / "step_6.pt", 1500)
    listed = list_checkpoints(tmp_path)
    assert [c.path.name for c in listed] == ["step_3.pt"]
    assert list_unrecognised(tmp_path, listed) == ("step_6.pt",)


def test_values_nested_without_end_are_cut_and_said(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for _ in range(300):
        tree = {"k": tree}
    assert walk_states({"deep": tree}).is_cut and not walk_states(parts()).is_cut
