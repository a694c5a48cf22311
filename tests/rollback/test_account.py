"""Everything in a checkpoint is accounted for: read as state, known as none by its content, or named as not read."""

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("name", ["critic.pickle", "critic.optim", "critic", "a/b/c/critic.weights"])
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
    rows = {one.path: (one.reading, one.doubtful) for one in read_state(folder).account}
    assert rows == {
        "trainer.pt": (Reading.STATE, False),
        "notes.pickle": (Reading.NONE, False),
        "picture.pt.png": (Reading.NONE, False),
        "index.bin2": (Reading.UNREAD, False),
        "critic.pt.gz": (Reading.UNREAD, True),
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


def test_values_nested_without_end_are_cut_and_said(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for _ in range(300):
        tree = {"k": tree}
    assert walk_states({"deep": tree}).is_cut and not walk_states(parts()).is_cut
