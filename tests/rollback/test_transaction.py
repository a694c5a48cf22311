"""A change is made whole and taken back whole: every byte, mode and time."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollback.disk.durable import Attributes, BytePatch, Disk
from rollback.errors import Refused, RollbackError, StoppedPartWay
from rollback.transaction.change import Copy
from rollback.transaction.protocol import Change, Receipt, apply_change, recover_change, undo_change
from rollback.transaction.staging import StagedFile
from tests.rollback.disks import Journal, picture

OLD_NS = 1_600_000_000_123_456_789


def write_bytes(content: bytes) -> Any:
    def write(_source: Path, target: Path, _changed: object) -> None:
        target.write_bytes(content)

    return write


def make_world(top: Path, *, pointer: bool = True) -> Path:
    """A checkpoints root with 500, 750 and 1000, each with weights, scheduler and optimizer; all of it years old."""
    root = top / "work" / "checkpoints"
    for step in (500, 750, 1000):
        inner = root / f"opt_step-{step}" / "accelerator_state"
        inner.mkdir(parents=True)
        (inner / "model.safetensors").write_bytes(b"weights of %d" % step)
        (inner / "model.safetensors").chmod(0o600)
        (inner / "scheduler.bin").write_bytes(b"lr=1.0 at %d" % step)
        (inner / "optimizer.bin").write_bytes(b"group lr=1.0 at %d" % step)
    if pointer:
        (root / "latest").write_text("opt_step-1000")
    (top / "work" / "logs").mkdir()
    age(top / "work")
    return root


def age(top: Path) -> None:
    for number, path in enumerate(sorted(top.rglob("*"), key=lambda p: -len(p.parts))):
        os.utime(path, ns=(OLD_NS + number, OLD_NS + number * 1000), follow_symlinks=False)
    os.utime(top, ns=(OLD_NS, OLD_NS))


HALVED = {
    "accelerator_state/scheduler.bin": b"lr=0.5",
    "accelerator_state/optimizer.bin": b"group lr=0.5, a longer text than before",
}


def change_to(root: Path, step: int, contents: Mapping[str, bytes] = HALVED, **more: Any) -> Change:
    name = f"opt_step-{step}"
    later = [f"opt_step-{n}" for n in (500, 750, 1000) if n > step and (root / f"opt_step-{n}").exists()]
    given: dict[str, Any] = {
        "root": root,
        "entry": name,
        "source": root / name,
        "writers": {path: write_bytes(content) for path, content in contents.items()},
        "abandon": tuple(later),
        "pointers": {"latest": name.encode()} if (root / "latest").exists() else {},
        "contract": (root.parent / "logs" / "contract.json", lambda _: b'{"v":1}'),
        "facts": {"step": step},
    }
    return Change(**(given | more))


def apply(root: Path, change: Change, journal: Journal, disk: Disk | None = None) -> Receipt:
    extra = {} if disk is None else {"disk": disk}
    return apply_change(change, objects_dir=root.parent.parent / "objects", record=journal.record, **extra)


def take_back(root: Path, receipt: Receipt, journal: Journal, disk: Disk | None = None, **more: Any) -> Receipt:
    extra = {} if disk is None else {"disk": disk}
    return undo_change(receipt, objects_dir=root.parent.parent / "objects", record=journal.record, **extra, **more)


def test_edit_abandons_later_checkpoints_and_moves_the_pointer(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500), journal)
    state = root / "opt_step-500" / "accelerator_state"
    assert sorted(os.listdir(root)) == ["latest", "opt_step-500"]
    assert (state / "scheduler.bin").read_bytes() == b"lr=0.5"
    assert (state / "model.safetensors").read_bytes() == b"weights of 500"
    assert (root / "latest").read_text() == "opt_step-500"
    away = root.parent / "abandoned" / receipt.data["intent"]
    assert sorted(os.listdir(away)) == ["opt_step-1000", "opt_step-750"]
    assert json.loads((root.parent / "logs" / "contract.json").read_text()) == {"v": 1}
    assert [kind for _, kind, _ in journal.entries] == ["rollback.intent", "rollback.receipt"]


def test_nothing_of_ours_is_left_where_a_loader_looks(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    names = {path.name for path in (root / "opt_step-500").rglob("*")}
    apply(root, change_to(root, 500), journal)
    assert {path.name for path in (root / "opt_step-500").rglob("*")} == names
    assert sorted(os.listdir(root.parent)) == ["abandoned", "checkpoints", "logs"]


def test_kept_original_lies_outside_the_checkpoint_by_its_digest(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500), journal)
    for file in receipt.data["files"]:
        kept = tmp_path / "objects" / file["before"][:2] / file["before"]
        assert kept.read_bytes().endswith(b"at 500")


def test_edited_files_get_a_new_inode_and_untouched_ones_keep_theirs(tmp_path: Path) -> None:
    """A snapshot made by hard links must not change with the edit."""
    root, journal = make_world(tmp_path), Journal()
    state = root / "opt_step-500" / "accelerator_state"
    snapshot = tmp_path / "snapshot.bin"
    os.link(state / "scheduler.bin", snapshot)
    model = (state / "model.safetensors").stat()
    apply(root, change_to(root, 500), journal)
    assert snapshot.read_bytes() == b"lr=1.0 at 500"
    after = (state / "model.safetensors").stat()
    assert (after.st_ino, after.st_nlink) == (model.st_ino, 1)


def test_modes_and_directory_times_survive_the_edit(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    state = root / "opt_step-500" / "accelerator_state"
    (state / "scheduler.bin").chmod(0o640)
    state.chmod(0o750)
    age(root)
    times = state.stat().st_mtime_ns, (root / "opt_step-500").stat().st_mtime_ns
    apply(root, change_to(root, 500), journal)
    assert oct((state / "scheduler.bin").stat().st_mode & 0o777) == oct(0o640)
    assert oct(state.stat().st_mode & 0o777) == oct(0o750)
    assert (state.stat().st_mtime_ns, (root / "opt_step-500").stat().st_mtime_ns) == times


@pytest.mark.parametrize("contents", [HALVED, {}], ids=["edited", "not edited"])
@pytest.mark.parametrize("pointer", [True, False])
@pytest.mark.parametrize("step", [500, 750, 1000])
def test_undo_restores_every_byte_mode_and_time(
    tmp_path: Path, step: int, pointer: bool, contents: dict[str, bytes]
) -> None:
    root, journal = make_world(tmp_path, pointer=pointer), Journal()
    before = picture(tmp_path / "work")
    receipt = apply(root, change_to(root, step, contents), journal)
    assert picture(tmp_path / "work") != before
    take_back(root, receipt, journal)
    after = picture(tmp_path / "work")
    after["logs"] = before["logs"]  # the journal lives there: its directory's time is no part of the promise
    assert after == before


names = st.text("abcXYZ019._-é ", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.dictionaries(
        st.lists(names, min_size=1, max_size=3).map("/".join),
        st.tuples(st.binary(max_size=40), st.sampled_from([0o400, 0o600, 0o644, 0o755]), st.integers(0, 2**60)),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_undo_after_apply_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[bytes, int, int]], data: st.DataObject
) -> None:
    top = tmp_path_factory.mktemp("world")
    root = top / "work" / "checkpoints"
    written: dict[str, bytes] = {}
    for name, (content, mode, when) in files.items():
        path = root / "opt_step-500" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError):
            continue
        path.chmod(mode)
        os.utime(path, ns=(when, when))
        written[name] = content
    (root / "opt_step-750").mkdir()
    age(top / "work")
    edited = data.draw(st.lists(st.sampled_from(sorted(written)), unique=True)) if written else []
    before = picture(top / "work")
    journal = Journal()
    contents = {name: written[name] + b"!" for name in edited}
    receipt = apply(root, change_to(root, 500, contents, contract=None), journal)
    for name in edited:
        assert (root / "opt_step-500" / name).read_bytes() == written[name] + b"!"
    take_back(root, receipt, journal)
    assert picture(top / "work") == before


def test_abandoned_checkpoint_is_brought_back_and_displaces_its_namesake(tmp_path: Path) -> None:
    """Seed 003, exp8 -> exp9 -> exp10: 30500 exists twice, and the one of the earlier launch is wanted."""
    root, journal = make_world(tmp_path), Journal()
    first = apply(root, change_to(root, 500), journal)
    new = root / "opt_step-750" / "accelerator_state"
    new.mkdir(parents=True)
    for name in ("model.safetensors", "scheduler.bin", "optimizer.bin"):
        (new / name).write_bytes(b"of the second launch")
    before = picture(tmp_path / "work")
    source = root.parent / "abandoned" / first.data["intent"] / "opt_step-750"
    for contents in (HALVED, {}):
        receipt = apply(root, change_to(root, 750, contents, source=source), journal)
        state = root / "opt_step-750" / "accelerator_state"
        assert (state / "model.safetensors").read_bytes() == b"weights of 750"
        expected = b"lr=0.5" if contents else b"lr=1.0 at 750"
        assert (state / "scheduler.bin").read_bytes() == expected
        assert not source.exists()
        displaced = root.parent / "abandoned" / receipt.data["intent"] / "opt_step-750" / "accelerator_state"
        assert (displaced / "model.safetensors").read_bytes() == b"of the second launch"
        take_back(root, receipt, journal)
        seen = picture(tmp_path / "work")
        for changing in ("logs", f"abandoned/{first.data['intent']}", "abandoned"):
            seen[changing] = before[changing]
        assert seen == before


def test_abandoned_checkpoint_comes_back_to_a_free_name(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    first = apply(root, change_to(root, 500), journal)
    source = root.parent / "abandoned" / first.data["intent"] / "opt_step-1000"
    before = picture(tmp_path / "work", times=False)
    for contents in (HALVED, {}):
        receipt = apply(root, change_to(root, 1000, contents, source=source), journal)
        assert (root / "opt_step-1000" / "accelerator_state" / "model.safetensors").read_bytes() == b"weights of 1000"
        assert not source.exists()
        take_back(root, receipt, journal)
        assert picture(tmp_path / "work", times=False) == before


def test_undo_after_a_later_launch_saved_abandons_its_checkpoints_and_overwrites_nothing(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    before = picture(tmp_path / "work", times=False)
    receipt = apply(root, change_to(root, 500), journal)
    for step in (600, 750, 1200):
        (root / f"opt_step-{step}").mkdir()
        (root / f"opt_step-{step}" / "new.bin").write_bytes(b"second launch %d" % step)
    undone = take_back(root, receipt, journal, newer=("opt_step-600", "opt_step-750", "opt_step-1200"))
    seen = picture(tmp_path / "work", times=False)
    away = root.parent / "abandoned" / undone.data["intent"]
    for step in (600, 750, 1200):
        assert (away / f"opt_step-{step}" / "new.bin").read_bytes() == b"second launch %d" % step
    assert {k: v for k, v in seen.items() if not k.startswith("abandoned")} == before


def test_undo_is_refused_when_an_edited_file_was_changed_since(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500), journal)
    (root / "opt_step-500" / "accelerator_state" / "scheduler.bin").write_bytes(b"somebody else")
    before = picture(tmp_path)
    with pytest.raises(Refused, match="was changed after the rollback"):
        take_back(root, receipt, journal)
    assert picture(tmp_path) == before


def test_rollbacks_on_top_of_each_other_are_undone_in_reverse_order(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    pictures, receipts = [picture(tmp_path / "work")], []
    for step, contents in ((750, HALVED), (500, {}), (500, HALVED), (500, {"accelerator_state/scheduler.bin": b"3"})):
        receipts.append(apply(root, change_to(root, step, contents), journal))
        pictures.append(picture(tmp_path / "work"))
    for receipt, before in zip(reversed(receipts), reversed(pictures[:-1]), strict=True):
        take_back(root, receipt, journal)
        seen = picture(tmp_path / "work")
        ours = {name: seen[name] for name in ("logs", "abandoned") if name in seen}  # our own folders' times are not kept
        assert seen == before | ours


def test_undo_is_refused_when_the_checkpoint_is_gone(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500, {}), journal)
    (root / "opt_step-500").rename(tmp_path / "moved")
    with pytest.raises(Refused, match="is gone"):
        take_back(root, receipt, journal)


def test_a_writer_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    before = picture(tmp_path / "work")

    def fail(_source: Path, target: Path, _changed: object) -> None:
        target.write_bytes(b"half")
        raise RollbackError("no")

    change = change_to(root, 500, writers={"accelerator_state/scheduler.bin": fail})
    with pytest.raises(RollbackError, match="no"):
        apply(root, change, journal)
    seen = picture(tmp_path / "work")
    assert seen == before | {"logs": seen["logs"]}
    assert journal.open_intents() == []


def test_a_twin_that_is_not_what_was_planned_is_never_installed(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    before = picture(root)

    def write(source: Path, target: Path, _changed: Sequence[StagedFile]) -> None:
        target.write_bytes(b"lr=0.7")
        raise RollbackError("not what was planned")

    change = replace(change_to(root, 500), writers={"accelerator_state/scheduler.bin": write})
    with pytest.raises(RollbackError, match="not what was planned"):
        apply_change(change, objects_dir=tmp_path / "objects", record=journal.record)
    assert picture(root) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_parent_is_refused_before_anything_changed(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    root.parent.chmod(0o555)
    try:
        with pytest.raises(Refused, match="not writable"):
            apply(root, change_to(root, 500), journal)
    finally:
        root.parent.chmod(0o755)
    assert journal.entries == []


def test_mount_point_is_refused_naming_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, journal = make_world(tmp_path), Journal()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == root)
    with pytest.raises(Refused, match="mount point") as caught:
        apply(root, change_to(root, 500), journal)
    assert "checkpoints" in (caught.value.remedy or "")
    assert journal.entries == []


@pytest.mark.parametrize("where", ["", "opt_step-500", "opt_step-500/accelerator_state"])
def test_a_real_bind_mount_is_refused_before_anything_changed(tmp_path: Path, where: str) -> None:
    """A bind mount of the same filesystem has no device of its own: only the kernel's list tells."""
    root, journal = make_world(tmp_path / "a b"), Journal()
    place = root / where
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", place, place], capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(Refused, match="mount point"):
            apply(root, change_to(root, 500), journal)
    finally:
        subprocess.run(["umount", place], check=True)
    assert journal.entries == []


def test_edited_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    path = root / "opt_step-500" / "accelerator_state" / "scheduler.bin"
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    with pytest.raises(Refused, match="symbolic link"):
        apply(root, change_to(root, 500), journal)


def test_a_pipe_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    os.mkfifo(root / "opt_step-500" / "pipe")
    with pytest.raises(Refused, match="neither a file nor a directory"):
        apply(root, change_to(root, 500), journal)


def test_large_file_is_patched_in_place_and_undone_to_the_byte(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    before = picture(tmp_path / "work")
    path = root / "opt_step-500" / "accelerator_state" / "optimizer.bin"
    inode = path.stat().st_ino
    patches = {"accelerator_state/optimizer.bin": (BytePatch(offset=9, old=b"1.0", new=b"0.5"),)}
    change = change_to(root, 500, {"accelerator_state/scheduler.bin": b"lr=0.5"}, patches=patches)
    receipt = apply(root, change, journal)
    assert path.read_bytes() == b"group lr=0.5 at 500"
    assert (path.stat().st_ino, path.stat().st_nlink) == (inode, 1)
    assert (path.parent / "scheduler.bin").read_bytes() == b"lr=0.5"
    assert sorted(os.listdir(root.parent)) == ["abandoned", "checkpoints", "logs"]
    take_back(root, receipt, journal)
    seen = picture(tmp_path / "work")
    assert seen == before | {"logs": seen["logs"]}


def test_large_file_with_a_second_name_is_refused_before_anything_changed(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    path = root / "opt_step-500" / "accelerator_state" / "optimizer.bin"
    os.link(path, tmp_path / "snapshot.bin")
    before = picture(tmp_path)
    patches = {"accelerator_state/optimizer.bin": (BytePatch(offset=9, old=b"1.0", new=b"0.5"),)}
    with pytest.raises(Refused, match="2 hard links"):
        apply(root, change_to(root, 500, {}, patches=patches), journal)
    assert picture(tmp_path) == before and journal.entries == []


def test_abandoned_checkpoint_with_a_large_file_is_patched_and_goes_back(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    first = apply(root, change_to(root, 500), journal)
    source = root.parent / "abandoned" / first.data["intent"] / "opt_step-750"
    before = picture(tmp_path / "work", times=False)
    patches = {"accelerator_state/optimizer.bin": (BytePatch(offset=9, old=b"1.0", new=b"0.5"),)}
    receipt = apply(root, change_to(root, 750, {}, source=source, patches=patches), journal)
    assert (root / "opt_step-750" / "accelerator_state" / "optimizer.bin").read_bytes() == b"group lr=0.5 at 750"
    take_back(root, receipt, journal)
    assert picture(tmp_path / "work", times=False) == before


class NoExchange(Disk):
    """A filesystem without RENAME_EXCHANGE, such as NFS."""

    def can_exchange(self, directory: Path) -> bool:
        return False

    def exchange(self, one: Path, other: Path) -> None:
        raise AssertionError("exchange on a filesystem that has none")


def test_without_exchange_the_result_and_the_undo_are_the_same(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    before = picture(tmp_path / "work")
    receipt = apply(root, change_to(root, 500), journal, NoExchange())
    assert (root / "opt_step-500" / "accelerator_state" / "scheduler.bin").read_bytes() == b"lr=0.5"
    assert sorted(os.listdir(root.parent)) == ["abandoned", "checkpoints", "logs"]
    take_back(root, receipt, journal, NoExchange())
    seen = picture(tmp_path / "work")
    assert seen == before | {"logs": seen["logs"]}


def test_recover_of_an_intent_that_began_nothing_closes_it(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    intent = journal.record("rollback.intent", {"root": str(root), "entry": "opt_step-500"})
    assert recover_change(intent, journal.entries[0][2], record=journal.record) is None
    assert journal.open_intents() == []


def with_companions(top: Path) -> tuple[Path, Path]:
    """A checkpoints root with a copy of the newest checkpoint, and a config elsewhere that goes with it."""
    root = make_world(top)
    (root / "last.ckpt").write_bytes(b"all of 1000")
    config = top / "work" / "config" / "ds.json"
    config.parent.mkdir()
    config.write_bytes(b'{"lr": 1.0}')
    config.chmod(0o640)
    age(top / "work")
    return root, config


def change_companions(root: Path, config: Path) -> Change:
    copies = {"last.ckpt": Copy(root / "last.ckpt", {"": write_bytes(b"all of 500")})}
    return change_to(root, 500, copies=copies, configs={config: b'{"lr": 0.5}'}, contract=None)


def test_copy_and_config_change_with_the_checkpoint_and_come_back_to_the_byte(tmp_path: Path) -> None:
    (root, config), journal = with_companions(tmp_path), Journal()
    before = picture(tmp_path / "work")
    receipt = apply(root, change_companions(root, config), journal)
    assert (root / "last.ckpt").read_bytes() == b"all of 500"
    assert config.read_bytes() == b'{"lr": 0.5}' and config.stat().st_mode & 0o777 == 0o640
    assert os.listdir(config.parent) == ["ds.json"]
    away = root.parent / "abandoned" / receipt.data["intent"]
    assert (away / "last.ckpt").read_bytes() == b"all of 1000"
    take_back(root, receipt, journal)
    assert picture(tmp_path / "work") == before


def test_copy_that_a_later_launch_overwrote_is_abandoned_by_undo_and_not_lost(tmp_path: Path) -> None:
    (root, config), journal = with_companions(tmp_path), Journal()
    receipt = apply(root, change_companions(root, config), journal)
    (root / "last.ckpt").write_bytes(b"of a later launch")
    undone = take_back(root, receipt, journal)
    assert (root / "last.ckpt").read_bytes() == b"all of 1000"
    away = root.parent / "abandoned" / undone.data["intent"]
    assert (away / "last.ckpt").read_bytes() == b"of a later launch"


def test_config_that_was_changed_after_the_rollback_is_not_overwritten_by_undo(tmp_path: Path) -> None:
    (root, config), journal = with_companions(tmp_path), Journal()
    receipt = apply(root, change_companions(root, config), journal)
    config.write_bytes(b'{"lr": 0.25}')
    after = picture(tmp_path / "work")
    with pytest.raises(Refused, match=r"ds\.json.* was changed after the rollback"):
        take_back(root, receipt, journal)
    assert picture(tmp_path / "work") == after


# --- what the disk or another program does while a transaction runs

PATCHES = {"accelerator_state/optimizer.bin": (BytePatch(offset=9, old=b"1.0", new=b"0.5"),)}


class Meddling(Disk):
    """A disk on which `do` happens once, right after the checkpoint was parked or its twin took its place."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do: Callable[[], object] | None = do

    def exchange(self, one: Path, other: Path) -> None:
        super().exchange(one, other)
        if one.is_dir() and other.name.startswith("opt_step"):  # not the probe for the call
            self.meddle()

    def move(self, source: Path, target: Path) -> None:
        super().move(source, target)
        if target.parent.name == "parked":
            self.meddle()

    def meddle(self) -> None:
        do, self.do = self.do, None
        if do is not None:
            do()


def test_bytes_that_read_back_wrong_give_no_receipt(tmp_path: Path) -> None:
    """The disk returns other bytes than were written: the transaction stops before its receipt."""
    root, journal = make_world(tmp_path), Journal()
    edited = root / "opt_step-500" / "accelerator_state" / "scheduler.bin"
    disk = Meddling(lambda: edited.write_bytes(b"lr=0.7"))
    with pytest.raises(StoppedPartWay, match="reads back with digest"):
        apply(root, change_to(root, 500), journal, disk)
    assert [kind for _, kind, _ in journal.entries] == ["rollback.intent"]


def test_patch_that_does_not_reach_the_disk_gives_no_receipt(tmp_path: Path) -> None:
    class Deaf(Disk):
        def overwrite(self, path: Path, pieces: Iterable[tuple[int, bytes]]) -> None:
            pass

    root, journal = make_world(tmp_path), Journal()
    with pytest.raises(StoppedPartWay, match="does not hold the new bytes after the write"):
        apply(root, change_to(root, 500, {}, patches=PATCHES), journal, Deaf())
    assert [kind for _, kind, _ in journal.entries] == ["rollback.intent"]


def test_foreign_bytes_in_a_file_to_be_patched_are_not_overwritten(tmp_path: Path) -> None:
    """Another program wrote to the file after the plan was made: neither the old bytes nor the new ones are there."""
    root, journal = make_world(tmp_path), Journal()
    hidden = root.parent / ".chronicle-E000" / "parked" / "opt_step-500" / "accelerator_state" / "optimizer.bin"
    foreign = b"group lr=9.9 at 500"
    with pytest.raises(StoppedPartWay, match="unexpected bytes at offset 9"):
        apply(root, change_to(root, 500, {}, patches=PATCHES), journal, Meddling(lambda: hidden.write_bytes(foreign)))
    assert hidden.read_bytes() == foreign and [kind for _, kind, _ in journal.entries] == ["rollback.intent"]
    hidden.write_bytes(b"group lr=1.0 at 500")
    assert recover_change("E000", journal.entries[0][2], record=journal.record) is not None
    assert (root / "opt_step-500" / "accelerator_state" / "optimizer.bin").read_bytes() == b"group lr=0.5 at 500"


def test_undo_refuses_a_patched_file_that_was_written_to_since(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500, {}, patches=PATCHES), journal)
    (root / "opt_step-500" / "accelerator_state" / "optimizer.bin").write_bytes(b"group lr=9.9 at 500")
    with pytest.raises(Refused, match="was changed after the rollback"):
        take_back(root, receipt, journal)
    assert (root / "opt_step-500").is_dir()


def test_error_while_the_checkpoint_is_parked_is_finished_never_reverted(tmp_path: Path) -> None:
    """Nothing is patched yet, but the checkpoint is out of sight: reverting would leave it there. The root stays."""
    root, journal = make_world(tmp_path), Journal()

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(root))

    others = {path.name for path in root.iterdir()} - {"opt_step-500"}
    with pytest.raises(StoppedPartWay):
        apply(root, change_to(root, 500, {}, patches=PATCHES), journal, Meddling(fail))
    assert {path.name for path in root.iterdir()} == others and [k for _, k, _ in journal.entries] == ["rollback.intent"]
    assert recover_change("E000", journal.entries[0][2], record=journal.record) is not None
    assert (root / "opt_step-500" / "accelerator_state" / "optimizer.bin").read_bytes() == b"group lr=0.5 at 500"


@pytest.mark.parametrize("dies", [False, True])
def test_a_save_under_the_name_of_the_parked_checkpoint_goes_aside_and_is_not_lost(dies: bool, tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()

    def save() -> None:
        root.mkdir(exist_ok=True)
        (root / "opt_step-500").mkdir()
        (root / "opt_step-500" / "new.bin").write_bytes(b"saved meanwhile")
        if dies:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(root))

    change = change_to(root, 500, {}, patches=PATCHES)
    if dies:
        with pytest.raises(StoppedPartWay):
            apply(root, change, journal, Meddling(save))
        assert recover_change("E000", journal.entries[0][2], record=journal.record) is not None
    else:
        apply(root, change, journal, Meddling(save))
    assert (root / "opt_step-500" / "accelerator_state" / "optimizer.bin").read_bytes() == b"group lr=0.5 at 500"
    aside = root.parent / "abandoned" / "E000" / "saved-meanwhile-opt_step-500" / "new.bin"
    assert aside.read_bytes() == b"saved meanwhile"


def test_receipt_that_cannot_be_written_after_a_patch_alone_leaves_the_transaction_open(tmp_path: Path) -> None:
    """No move tells that it was begun, the new bytes do: it is finished, never called reverted."""

    class FullJournal(Journal):
        def record(self, kind: str, data: dict[str, Any]) -> str:
            if kind == "rollback.receipt" and not self.full:
                self.full = True
                raise RollbackError("no space left for the receipt")
            return super().record(kind, data)

        full = False

    root, journal = make_world(tmp_path, pointer=False), FullJournal()
    with pytest.raises(StoppedPartWay, match="no space left"):
        apply(root, change_to(root, 1000, {}, patches=PATCHES, contract=None), journal)
    assert [kind for _, kind, _ in journal.entries] == ["rollback.intent"]
    receipt = recover_change("E000", journal.entries[0][2], record=journal.record)
    assert receipt is not None and journal.open_intents() == []
    take_back(root, receipt, journal)
    assert (root / "opt_step-1000" / "accelerator_state" / "optimizer.bin").read_bytes() == b"group lr=1.0 at 1000"


def test_undo_refuses_a_receipt_of_another_version(tmp_path: Path) -> None:
    """A newer program may keep in it what this one would not restore."""
    root, journal = make_world(tmp_path), Journal()
    receipt = apply(root, change_to(root, 500), journal)
    after = picture(tmp_path / "work")
    with pytest.raises(Refused, match="version 2: expected version 1"):
        take_back(root, replace(receipt, data={**receipt.data, "v": 2}), journal)
    assert picture(tmp_path / "work") == after


# ---- extended attributes and ACLs ---------------------------------------------------------------------------------------

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def acl(user: int) -> bytes:
    """An ACL in the kernel's form (linux/posix_acl_xattr.h): the owner and `user` read and write, the group reads."""
    nobody = 0xFFFFFFFF
    entries = ((1, 6, nobody), (2, 6, user), (4, 4, nobody), (0x10, 6, nobody), (0x20, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def extended(top: Path) -> dict[str, dict[str, bytes]]:
    """What every file and directory holds besides its bytes."""
    found = (path for path in sorted(top.rglob("*")) if not path.is_symlink())
    return {str(path.relative_to(top)): {name: os.getxattr(path, name) for name in os.listxattr(path)} for path in found}


def with_extended(root: Path) -> None:
    state = root / "opt_step-500" / "accelerator_state"
    try:
        os.setxattr(root.parent, DEFAULT, acl(4001))  # whatever is made here later inherits this one
    except OSError as problem:
        pytest.skip(f"no ACLs on this filesystem: {problem}")
    os.setxattr(state, DEFAULT, acl(4002))
    os.setxattr(state / "scheduler.bin", ACCESS, acl(4003))
    for path in (state, state / "optimizer.bin", state / "model.safetensors", root / "latest"):
        os.setxattr(path, "user.origin", b"cluster \x00 a")
    age(root.parent)


def test_extended_attributes_and_acls_are_kept_and_come_back(tmp_path: Path) -> None:
    """An edited file is a new inode in a directory with another default ACL: it has the ACL of the old one, no other."""
    root, journal = make_world(tmp_path), Journal()
    with_extended(root)
    before, seen = extended(root), picture(root)
    receipt = apply(root, change_to(root, 500), journal)
    after = extended(root)
    assert after == {path: values for path, values in before.items() if path in after}
    assert after["opt_step-500/accelerator_state/scheduler.bin"].keys() == {ACCESS}
    assert after["opt_step-500/accelerator_state/optimizer.bin"] == {"user.origin": b"cluster \x00 a"}
    take_back(root, receipt, journal)
    assert extended(root) == before and picture(root) == seen


def test_attribute_set_between_a_rollback_and_its_undo_is_taken_back(tmp_path: Path) -> None:
    root, journal = make_world(tmp_path), Journal()
    with_extended(root)
    before = extended(root)
    receipt = apply(root, change_to(root, 500), journal)
    state = root / "opt_step-500" / "accelerator_state"
    os.setxattr(state / "scheduler.bin", "user.later", b"1")
    os.removexattr(state / "scheduler.bin", ACCESS)
    take_back(root, receipt, journal)
    assert extended(root) == before


def test_receipt_without_extended_attributes_leaves_them_alone(tmp_path: Path) -> None:
    """Receipts of older versions hold five numbers: nothing is known of what was set besides them."""
    path = tmp_path / "state"
    path.write_bytes(b"x")
    os.setxattr(path, "user.origin", b"a")
    old = Attributes.from_json([0o600, os.getuid(), os.getgid(), OLD_NS, OLD_NS])
    Disk().set_attributes(path, old)
    assert os.getxattr(path, "user.origin") == b"a" and old.to_json() == [0o600, os.getuid(), os.getgid(), OLD_NS, OLD_NS]


def test_the_record_of_a_transaction_is_the_last_file_of_its_workspace_to_go(tmp_path: Path) -> None:
    """Without it the rest looks like a transaction that never began, and a recovery would revert what is done."""

    class Watching(Disk):
        def point(self, operation: str, path: Path) -> None:
            if operation == "unlink" and path.parts[len(root.parent.parts)].startswith(".chronicle-"):
                removed.append(path.name)

    removed: list[str] = []
    root, journal = make_world(tmp_path), Journal()
    apply(root, change_to(root, 500), journal, Watching())
    assert len(removed) > 1 and removed.index("transaction.json") == len(removed) - 1
