"""What counts as ours: token or recorded pair, same boot, same user. Everything else is left alone."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.admission import ProcessRole, end_orphans, find_alive, list_launches
from chronicle.launch.heartbeat import Heartbeat, write_heartbeat
from chronicle.launch.processes import Process, parse_stat, read_boot_id, read_process, read_variable, send_signal
from chronicle.launch.supervisor import LOADER_NAME
from chronicle.paths import RunPaths

TOKEN = "f" * 32


@pytest.fixture
def sleeper():
    made = []

    def start(token: str | None = None) -> subprocess.Popen:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
        environ |= {"CHRONICLE_TOKEN": token} if token else {}
        made.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "demo")


def test_one_variable_of_a_process_is_found_by_its_whole_name():
    environ = {"XCHRONICLE_TOKEN": "a", "CHRONICLE_TOKEN": "b", "OTHER": "CHRONICLE_TOKEN=c", "CHRONICLE_TOKENS": "d"}
    process = subprocess.Popen(["sleep", "600"], env=environ | {"PATH": os.environ["PATH"]})
    try:
        while "sleep" not in Path(f"/proc/{process.pid}/cmdline").read_text():
            pass  # until exec it has our own environment
        assert read_variable(process.pid, "CHRONICLE_TOKEN") == "b"
        assert read_variable(process.pid, "TOKEN") is None
    finally:
        process.kill()
        process.wait()
    assert read_variable(process.pid, "CHRONICLE_TOKEN") is None


def record_launch(paths, *, token=TOKEN, boot_id=None, pid=2**22 + 1):
    """A launch of this host whose supervisor (a pid that cannot exist) is gone."""
    data = {"host": "h", "token": token, "pid": pid, "start_ticks": 5, "boot_id": boot_id or read_boot_id()}
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data=data)
    return list_launches(read_journal(paths).entries)


def test_orphan_is_found_by_the_token_of_this_journal(paths, sleeper):
    ours, stranger, other_token = sleeper(TOKEN), sleeper(), sleeper("e" * 32)
    launches = record_launch(paths)
    found = find_alive(paths, launches)
    assert [(one.process.pid, one.role, one.how) for one in found] == [(ours.pid, ProcessRole.ORPHAN, "token")]
    assert end_orphans(paths, launches).left == ()
    assert ours.wait(10) == -signal.SIGTERM
    assert stranger.poll() is None and other_token.poll() is None


def test_token_of_another_boot_is_not_ours(paths, sleeper):
    """A token copied from an old machine's journal proves nothing here."""
    sleeper(TOKEN)
    assert find_alive(paths, record_launch(paths, boot_id="another boot")) == []


def test_recorded_pair_finds_a_process_without_readable_token_and_a_reused_pid_is_left_alone(paths, sleeper):
    """A title change overwrites the environment; a pid alone says nothing once it was reused."""
    hidden, reused = sleeper(), sleeper()
    launches = record_launch(paths)
    ticks = read_process(hidden.pid).start_ticks
    pairs = ((hidden.pid, ticks), (reused.pid, read_process(reused.pid).start_ticks - 1))
    beat = Heartbeat(
        host="h", launch=1, pid=2**22 + 1, start_ticks=5, boot_id=read_boot_id(), uid=os.getuid(), time=0.0, processes=pairs
    )
    write_heartbeat(paths.heartbeats_dir, beat)
    assert [(one.process.pid, one.how) for one in find_alive(paths, launches)] == [(hidden.pid, "recorded")]
    end_orphans(paths, launches)
    assert hidden.wait(10) == -signal.SIGTERM
    assert reused.poll() is None


def test_process_of_a_living_supervisor_is_no_orphan(paths, sleeper):
    supervisor, ours = sleeper(), sleeper(TOKEN)
    process = read_process(supervisor.pid)
    data = {"host": "h", "token": TOKEN, "pid": process.pid, "start_ticks": process.start_ticks, "boot_id": read_boot_id()}
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data=data)
    launches = list_launches(read_journal(paths).entries)
    roles = {one.process.pid: one.role for one in find_alive(paths, launches)}
    assert roles == {supervisor.pid: ProcessRole.SUPERVISOR, ours.pid: ProcessRole.SUPERVISED}
    end_orphans(paths, launches)
    assert ours.poll() is None


def test_signal_reaches_the_very_process_or_nobody(sleeper):
    process = sleeper()
    seen = read_process(process.pid)
    reused = Process(**{name: getattr(seen, name) for name in Process.__slots__} | {"start_ticks": seen.start_ticks - 1})
    assert send_signal(reused, signal.SIGKILL) is False
    assert process.poll() is None
    assert send_signal(seen, signal.SIGKILL) is True
    assert process.wait(10) == -signal.SIGKILL


def test_stat_with_brackets_and_spaces_in_the_name_is_read_right():
    fields = " ".join(str(number) for number in range(5, 53))
    process = parse_stat(f"77 (tr) ai) n (er) S 4 {fields}", uid=5)
    assert (process.pid, process.name, process.parent, process.state, process.start_ticks) == (77, "tr) ai) n (er", 4, "S", 22)


# A launcher of one rank. The rank forks two children, one with the name of a DataLoader worker, and is killed; the launcher
# waits until the worker has let go of the pipe that it shares with its rank, as the other ranks of a real launch do.
FORKING_LAUNCHER = """
import os, sys
ends, other = os.pipe(), os.pipe()
os.set_inheritable(ends[1], True), os.set_inheritable(other[1], True)
rank = os.fork()
if rank == 0:
    os.execve(sys.executable, [sys.executable, "-c", '''
import ctypes, os, signal, time
for name, end in ((b"pt_data_worker", %d), (b"writes_a_file", %d)):
    if os.fork() == 0:
        os.close(%d + %d - end)
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
        time.sleep(600)
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGKILL)
''' % (ends[1], other[1], ends[1], other[1])], os.environ | {"RANK": "0", "LOCAL_WORLD_SIZE": "1"})
"""

WAITING = """
os.close(ends[1]), os.close(other[1])
os.waitpid(rank, 0)
import select
gone = select.select([ends[0]], [], [], 15)[0]
kept = not select.select([other[0]], [], [], 0.5)[0]
print("worker gone", bool(gone), "other kept", kept, flush=True)
sys.exit(1)
"""


def test_a_loader_whose_rank_has_died_is_ended_at_once_and_another_orphan_is_not(driver):
    """It holds its rank's connections, and only looks for its parent every five seconds."""
    script = driver.directory / "launcher.py"
    script.write_text(FORKING_LAUNCHER + WAITING)
    driver.start([sys.executable, str(script)], "--grace", "1")
    assert driver.wait() == 1
    assert "worker gone True other kept True" in driver.out.read_text()


def test_the_name_of_a_loader_is_torchs():
    """Read, not imported: the import costs seconds."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    assert f'"{LOADER_NAME}"' in (torch / "utils/data/_utils/worker.py").read_text()
