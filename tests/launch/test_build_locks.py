"""Locks of builds that torch waits for: whose they are, which are dead, and that no living one is removed."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chronicle.launch import build_locks
from chronicle.launch.build_locks import find_build_locks, remove_dead_lock
from chronicle.launch.stacks import Stand, parse_dump

TORCH = importlib.util.find_spec("torch")
HOLD = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("file_baton", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.FileBaton(sys.argv[2]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""
DUMP = """Thread 0x00007f0000000000 (most recent call first):
  File "/venv/site-packages/torch/utils/file_baton.py", line 49 in wait
  File "/venv/site-packages/torch/utils/cpp_extension.py", line 2400 in _jit_compile
  File "/home/me/train.py", line 12 in <module>
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory of extensions in which no process of another machine or container could build."""
    kind = build_locks._file_system(tmp_path / "x", Path("/proc"))
    monkeypatch.setattr(build_locks, "OF_ONE_MACHINE", frozenset({kind}))
    monkeypatch.setattr(build_locks, "FIRST_PID_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    (tmp_path / "shm_comm").mkdir()
    return tmp_path


def old(path: Path, seconds: float = 3600.0) -> Path:
    """Make it look as if it had been made so long ago."""
    os.utime(path, (time.time() - seconds,) * 2)
    return path


@pytest.mark.skipif(TORCH is None, reason="torch's FileBaton is not here")
def test_the_lock_of_a_living_build_stays_and_that_of_a_killed_one_is_removed(place):
    path = place / "shm_comm" / "lock"
    baton = Path(TORCH.origin).parent / "utils/file_baton.py"
    builder = subprocess.Popen([sys.executable, "-c", HOLD, str(baton), str(path)], stdout=subprocess.PIPE)
    try:
        assert builder.stdout.readline() == b"held\n"
        old(path)
        (lock,) = find_build_locks({"TORCH_EXTENSIONS_DIR": str(place)})
        assert lock.holder == builder.pid and not lock.dead and not lock.remedy
        assert f"process {builder.pid} builds `shm_comm`" in lock.text
        assert not remove_dead_lock(lock) and not remove_dead_lock(lock._replace(holder=None, dead=True)) and path.exists()
    finally:
        builder.kill()
        builder.communicate()
    (lock,) = find_build_locks({"TORCH_EXTENSIONS_DIR": str(place)})
    assert lock.holder is None and lock.dead and "no process holds the build lock" in lock.text and str(path) in lock.remedy
    assert remove_dead_lock(lock) and not path.exists() and not remove_dead_lock(lock)


def test_of_two_that_find_a_dead_lock_none_removes_the_lock_that_was_made_since(place):
    path = place / "shm_comm" / "lock"
    path.touch()
    (lock,) = find_build_locks({"TORCH_EXTENSIONS_DIR": str(old(path).parent.parent)})
    (place / "kept").hardlink_to(path)  # so that its inode is not used again
    path.unlink()
    path.touch()
    assert lock.dead and not remove_dead_lock(lock) and old(path).exists() and not remove_dead_lock(lock) and path.exists()


def test_a_young_lock_is_not_judged(place):
    (place / "shm_comm" / "lock").touch()
    (lock,) = find_build_locks({"TORCH_EXTENSIONS_DIR": str(place)})
    assert not lock.dead and "too young" in lock.text


@pytest.mark.parametrize(
    ("kind", "namespace", "words"),
    [("nfs4", "pid:[4026531836]", "on another machine may"), ("ext4", "pid:[4026532999]", "in another container may"),
     ("", "pid:[4026531836]", "file system: unknown"), ("overlay", "pid:[4026532999]", ""), ("ext4", "pid:[4026531836]", "")],
)  # fmt: skip
def test_what_cannot_be_seen_from_here_is_a_doubt_and_no_death(tmp_path, kind, namespace, words):
    path = tmp_path / "py311_cpu" / "op" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    proc = tmp_path / "proc"
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to(namespace)
    rows = ["21 1 0:4 / / rw - ramfs none rw"] if kind else []
    rows += [f"22 21 0:5 / {tmp_path} rw - {kind} home rw"] if kind else []
    (proc / "self/mountinfo").write_text("\n".join(rows))
    lock = build_locks._judge(old(path), proc)
    assert lock.holder is None and lock.dead is not bool(words) and words in lock.text
    assert remove_dead_lock(lock, proc=proc) is lock.dead


def test_a_process_of_the_owner_that_cannot_be_read_is_a_doubt(place, monkeypatch):
    path = place / "shm_comm" / "lock"
    path.touch()
    monkeypatch.setattr(build_locks, "_holder", lambda *asked: (None, 1))
    (lock,) = find_build_locks({"TORCH_EXTENSIONS_DIR": str(old(path).parent.parent)})
    assert not lock.dead and "one of another user may" in lock.text


def test_the_directory_is_the_one_that_torch_uses(tmp_path):
    for root in (tmp_path / ".cache", tmp_path / "xdg"):
        (root / "torch_extensions/py311_cu128/fused_adam").mkdir(parents=True)
        old_lock = root / "torch_extensions/py311_cu128/fused_adam/lock"
        old_lock.touch()
    assert [one.path.parts[-5] for one in find_build_locks({"HOME": str(tmp_path)})] == [".cache"]
    assert [one.path.parts[-5] for one in find_build_locks({"HOME": "/x", "XDG_CACHE_HOME": str(tmp_path / "xdg")})] == ["xdg"]
    assert find_build_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "absent")}) == []


def test_a_launch_names_the_lock_of_a_killed_build_before_it_starts(tmp_path):
    """Removed where it is certainly dead, else a warning: which of them depends on the machine."""
    path = tmp_path / "extensions/shm_comm/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    old(path)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    done = subprocess.run(
        [sys.executable, "-m", "chronicle.cli.main", "run", "--run", "r", "--", sys.executable, "-c", "print('trained')"],
        cwd=tmp_path, env={**environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and str(path) in done.stderr and "build lock" in done.stderr, done.stderr
    assert path.exists() is ("removed" not in done.stderr)


def test_a_rank_that_waits_for_a_build_is_told_as_such():
    stand = Stand(rank=1, pid=7, stack=parse_dump(DUMP)[0])
    assert stand.words.startswith("waits for another process's build of a torch extension at me/train.py:12")
    building = parse_dump(DUMP.replace("file_baton.py", "x.py"))[0]
    busy = Stand(rank=0, pid=6, idle=False, stack=building)
    assert busy.words.startswith("builds a torch extension, which takes minutes, at")
