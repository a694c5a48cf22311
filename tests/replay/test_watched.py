"""What a replay takes from outside is watched, and what nobody recorded keeps it from accusing the hardware."""

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chronicle.launch.launchers import STARTUP_DIR
from chronicle.paths import UNWATCHED
from chronicle.replay.watched import MARK, Then, unrecorded, variables_read
from chronicle.resume.installed import InstalledPackages
from chronicle.resume.launch_facts import changed_facts, read_facts, write_facts

ROOT = Path(__file__).resolve().parents[2]
WATCH = """
import os, sys
from pathlib import Path
from chronicle.replay.watched import watched
code = watched(lambda: os.spawnl(os.P_WAIT, sys.executable, "python", "-c", sys.argv[1], *sys.argv[3:]), Path(sys.argv[2]))
sys.exit(code)
"""
TAKES = """
import ctypes, os, socket, subprocess, sys
libc = ctypes.CDLL(None)
libc.fopen(b"by-c.bin", b"r")
open("own.txt", "w").write("1")
os.rename("own.txt", "mine.txt")
open("mine.txt").read()
subprocess.run(["sh", "-c", "date; cat seen-by-cat.txt"], stdout=subprocess.DEVNULL)
for family, where in ((socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), (socket.AF_UNIX, sys.argv[2])):
    socket.socket(family).connect(where)
libc.shmget(77, 8, 0)
os.path.exists("absent.txt")
os.listdir("names")
os.stat("mine.txt")
os.mkdir("made"), os.stat("made"), os.path.exists("made/absent.txt")
subprocess.run(["sh", "-c", "test -s by-test.txt; cat /proc/loadavg"], stdout=subprocess.DEVNULL)
sys.exit(7)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A port and a socket of this process that anybody may connect to."""
    with socket.socket() as one, socket.socket(socket.AF_UNIX) as two:
        one.bind(("127.0.0.1", 0))
        place = os.path.join("/tmp", f"watched-{os.getpid()}")
        two.bind(place)
        one.listen()
        two.listen()
        yield one.getsockname()[1], place
    os.unlink(place)


def test_all_that_a_process_and_its_children_take_is_seen(tmp_path: Path, server: tuple[int, str]) -> None:
    port, place = server
    for name in ("by-c.bin", "seen-by-cat.txt"):
        (tmp_path / name).write_text("1")
    (tmp_path / "names").mkdir()
    told = tmp_path / "kept/result/told.json"
    told.parent.mkdir(parents=True)
    command = [sys.executable, "-c", WATCH, TAKES, str(told), str(port), place]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    seen = json.loads(told.read_text())
    if seen["why"]:
        pytest.skip(f"no filter of system calls here: {seen['why']}")
    assert {path for path in seen["read"] if path.startswith(str(tmp_path))} == {
        str(tmp_path / "by-c.bin"), str(tmp_path / "seen-by-cat.txt"),
    }  # fmt: skip
    assert set(seen["peers"]) == {f"127.0.0.1:{port}", place}
    assert (seen["programs"], seen["shared"]) == (["date"], True)
    looked = {path: listed for path, listed in seen["looked"].items() if path.startswith(f"{tmp_path}{os.sep}")}
    assert looked == {str(tmp_path / name): name == "names" for name in ("absent.txt", "names", "by-test.txt")}
    assert seen["asked"] == ["`/proc/loadavg` (by a program)"]


ASKS = """
import importlib.metadata, logging, os, random, secrets, shutil, sys, uuid
import psutil
import numpy as np
sys.path.insert(0, os.getcwd())
from library import pid
importlib.metadata.version("numpy")
pid(), uuid.UUID(int=1), random.random(), logging.warning("has the process's id")
for name in sys.argv[1:]:
    {"id": os.getpid, "load": os.getloadavg, "room": lambda: shutil.disk_usage("."), "random": secrets.token_hex,
     "numpy": np.random.default_rng, "memory": psutil.virtual_memory, "read": lambda: open("/proc/meminfo").close(),
     "uptime": lambda: open("/proc/uptime").read(), "used": lambda: __import__("resource").getrusage(0),
     "variable": lambda: os.environ.get("SOME"), "one": lambda: os.getenv("SOME"), "names": lambda: os.listdir("/proc")}[name]()
"""


ASKED = {
    "": [], "id": ["varied: the id of a process"], "load": ["varied: the load of the machine"],
    "room": ["varied: the room on a disk"],
    "random": ["varied: random numbers of the system"], "numpy": ["varied: random numbers of the system"],
    "memory": ["varied: `/proc/meminfo`"], "read": ["varied: `/proc/meminfo`"], "uptime": ["`/proc/uptime`"],
    "used": ["varied: what the process has used"], "variable": ["variable SOME"], "one": ["variable SOME"],
    "names": ["`/proc`"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "told"), ASKED.items())
def test_what_the_script_asks_itself_is_told_and_not_what_libraries_ask(tmp_path: Path, name: str, told: list[str]) -> None:
    (tmp_path / "site-packages/library").mkdir(parents=True)
    (tmp_path / "site-packages/library/__init__.py").write_text("import os\ndef pid():\n    return os.getpid()\n")
    (tmp_path / "site-packages/psutil").mkdir()
    lines = ("import os", "def virtual_memory():", "    os.getpid(), open('/proc/meminfo').close()")
    (tmp_path / "site-packages/psutil/__init__.py").write_text("\n".join(lines))
    (tmp_path / "script.py").write_text(ASKS)
    (tmp_path / "kept/result").mkdir(parents=True)
    seen = tmp_path / "kept/result/seen.json"
    run = "import os; os.execv(os.sys.executable, [os.sys.executable, 'script.py', *os.sys.argv[1:]])"
    own = {"CHRONICLE_RUN_DIR": str(tmp_path), "CHRONICLE_REPLAY": "1",
           "PYTHONPATH": os.pathsep.join(map(str, (STARTUP_DIR, tmp_path / "site-packages", ROOT)))}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WATCH, run, str(seen), *name.split()], cwd=tmp_path, text=True, timeout=90,
                          env={**os.environ, **own}, capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(seen.read_text())
    if found["why"]:
        pytest.skip(f"no filter of system calls here: {found['why']}")
    assert found["asked"] == told
    assert str(tmp_path / "site-packages/library/__init__.py") not in found["looked"]  # an import


LOOKS_AT_SOURCES = """
import inspect, os, sys
from pathlib import Path
import library.inner.deep
from chronicle.resume.launch_facts import write_facts
assert inspect.getmodule(inspect.currentframe()) is sys.modules["__main__"]
assert inspect.getsourcefile(library.inner.deep) == library.inner.deep.__file__
Path("run/launches/0001").mkdir(parents=True, exist_ok=True)
write_facts(Path("run/launches/0001").absolute(), {})
"""


def test_what_imports_inspect_and_our_own_facts_look_at_is_not_told(tmp_path: Path) -> None:
    deep = tmp_path / "site-packages/library/inner"
    deep.mkdir(parents=True)
    for path in (deep.parent / "__init__.py", deep / "__init__.py", deep / "deep.py"):
        path.write_text("")
    (tmp_path / "script.py").write_text(LOOKS_AT_SOURCES)
    (tmp_path / "kept/result").mkdir(parents=True)
    seen = tmp_path / "kept/result/seen.json"
    own = {"CHRONICLE_RUN_DIR": str(tmp_path / "run"), "CHRONICLE_REPLAY": "1",
           "PYTHONPATH": os.pathsep.join(map(str, (STARTUP_DIR, tmp_path / "site-packages", ROOT)))}  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own
    run = "import os; os.execv(os.sys.executable, [os.sys.executable, 'script.py'])"
    for _ in range(2):  # the second time it is compiled
        done = subprocess.run([sys.executable, "-c", WATCH, run, str(seen)], cwd=tmp_path, text=True, timeout=90,
                              env=environ, capture_output=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
    found = json.loads(seen.read_text())
    if found["why"]:
        pytest.skip(f"no filter of system calls here: {found['why']}")
    assert [path for path in found["looked"] if "/library" in path] == []
    read = [path for path in found["read"] if "/library" in path]
    assert len(read) == 1 and read[0].startswith(str(deep.parent / "__pycache__/__init__.")), "a package is told, its parts not"


VARIES = """
import json, os, pathlib, resource, shutil, sys
found = {"load": os.getloadavg()[0], "room": shutil.disk_usage(".").free, "bits": os.urandom(1)[0]}
found["rss"] = resource.getrusage(0).ru_maxrss
found["file"] = float(pathlib.Path("/proc/loadavg").read_text().split()[0])
found["memory"] = [int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith(("MemTotal", "MemAvailable"))]
found["size"] = int(open("/proc/self/statm", "rb").read().split()[1])
found["ticks"] = int(open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[11])
found["busy"] = int(open("/proc/stat").readline().split()[1])
print(json.dumps(found))
"""


def test_answers_are_as_small_and_as_large_as_they_can_be_in_later_replays(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(VARIES)
    found = {}
    for answers in ("least", "", "most"):
        own = {"CHRONICLE_RUN_DIR": str(tmp_path), "CHRONICLE_REPLAY": "1", "PYTHONPATH": str(STARTUP_DIR)}
        own |= {"CHRONICLE_ANSWERS": answers} if answers else {}
        done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, **own}, capture_output=True,
                              text=True, timeout=60, check=False)  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stderr
        found[answers] = json.loads(done.stdout)
    least, real, most = found.values()
    for name in ("load", "room", "rss", "file", "size", "ticks", "busy"):
        assert least[name] <= real[name] <= most[name] > least[name], name
    assert (least["bits"], most["bits"]) == (0, 255)
    assert least["memory"][0] == real["memory"][0] == most["memory"][0] == most["memory"][1] and least["memory"][1] == 0


def test_the_startup_file_and_the_watch_mean_the_same_marks() -> None:
    text = (STARTUP_DIR / "asks.py").read_text()
    assert f'MARK = "{MARK}"' in text and f"UNWATCHED = {hex(UNWATCHED).replace('x7a7a7a7a', 'x7A7A7A7A')}" in text
    assert str(UNWATCHED) in (STARTUP_DIR / "sitecustomize.py").read_text()


RESOLVES = """
import os, posixpath, sys
sys.path.insert(0, sys.argv[1])
import asks
count, original = [], posixpath.realpath
def counted(filename, **more):
    count.append(filename)
    return original(filename, **more)
posixpath.realpath = asks.resolving(counted)
os.mkdir("real"), os.symlink("real", "link")
names = [os.path.abspath(f"link/{number}.py") for number in range(9)]
scope = {"os": os, "names": names}
exec(compile("found = [os.path.realpath(name) for name in names]", "/somewhere/inspect.py", "exec"), scope)
assert scope["found"] == [original(name) for name in names] and not count, count
assert [os.path.realpath(name) for name in names] == scope["found"] and len(count) == 9, count
"""


def test_files_of_modules_are_resolved_by_directory_for_inspect_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESOLVES, str(STARTUP_DIR)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def looks(path: Path, facts: dict[str, Any], *, begun: float, ended: float | None = None, listed: bool = False) -> str:
    """Why it is not known what somebody who looks at it saw."""
    return Then(facts, begun, ended, [str(path.parent / "run")]).doubt(str(path), listed)


def test_a_name_is_as_it_was_where_its_directory_is_older_or_was_written_down(tmp_path: Path) -> None:
    here, late, early = tmp_path.resolve(), time.time() + 9, time.time() - 9
    file, absent = here / "file.txt", here / "absent.txt"
    file.write_text("1")
    assert looks(file, {}, begun=late) == looks(absent, {}, begun=late) == looks(here, {}, begun=late, listed=True) == ""
    assert "newer than the launch" in looks(file, {}, begun=early)
    assert looks(file, {"files": {str(file): "1"}}, begun=early) == looks(here / "run", {}, begun=early) == ""
    assert "may have been there" in looks(absent, {}, begun=early)
    assert "may have been others" in looks(here, {}, begun=early, listed=True)
    around = {"directory": str(here), "names": ["file.txt"], "changed": here.stat().st_ctime_ns}
    assert looks(absent, {"around": around}, begun=early) == looks(here, {"around": around}, begun=early, listed=True) == ""
    gone = {"around": {**around, "names": ["absent.txt"]}}
    assert "was there when" in looks(absent, gone, begun=early) and looks(here, gone, begun=early, listed=True)
    assert "may have been" in looks(absent, {"around": {**around, "changed": 5}}, begun=early)


def test_what_the_launch_made_itself_is_hidden_once_and_no_doubt_then(tmp_path: Path) -> None:
    here, begun = tmp_path.resolve(), time.time() - 9
    for name in ("seen.txt", "others.txt", "run"):
        (here / name).write_text("1")
    (here / "out").mkdir()
    seen = {"looked": {str(here / name): False for name in ("seen.txt", "others.txt", "out", "run", "absent.txt")}, "read": []}
    then = Then({"written": [str(here / "seen.txt")]}, begun, time.time() + 9, [str(here / "run")])
    assert list(then.made_meanwhile(seen, here)) == [str(here / "out"), str(here / "seen.txt")]
    assert then.doubt(str(here / "seen.txt"), False) == then.doubt(str(here / "out/x"), False) == ""
    assert "newer" in then.doubt(str(here / "others.txt"), False)


def test_a_cache_that_a_library_wrote_before_the_first_step_is_the_launchs(tmp_path: Path) -> None:
    """`torch.save` opens its file in C: no record has it. One that changed after the first step stays a doubt."""
    here, begun = tmp_path.resolve(), time.time() - 9
    cache, source = here / "corpus.pt", here / "corpus.py"
    for path in (cache, source):
        path.write_text("1")
    stepped = time.time() + 0.05
    seen = {"looked": {}, "read": [str(cache), str(source)], "peers": [], "programs": [], "shared": False}
    then = Then({"around": {"directory": str(here)}}, begun, stepped + 9, [], stepped)
    assert list(then.made_meanwhile(seen, here)) == [str(cache)]
    assert [str(source) in words for words in unrecorded(seen, then)] == [True]
    time.sleep(0.1)
    cache.write_text("2")
    then = Then({"around": {"directory": str(here)}}, begun, stepped + 9, [], stepped)
    assert list(then.made_meanwhile(seen, here)) == [] and any(str(cache) in words for words in unrecorded(seen, then))
    away = Then({"around": {"directory": str(here / "elsewhere")}}, begun, stepped + 9, [], stepped + 9)
    assert any(str(cache) in words for words in unrecorded(seen, away))


def test_a_directory_that_the_launch_made_is_hidden_as_a_whole_unless_it_leads_to_the_checkpoints(tmp_path: Path) -> None:
    here, begun = tmp_path.resolve(), time.time() - 9
    (here / "out/checkpoints").mkdir(parents=True)
    (here / "cache").mkdir()
    (here / "cache/features.pt").write_text("1")
    (here / "train.py").write_text("1")
    around = {"directory": str(here), "names": ["train.py", "out"], "changed": here.stat().st_ctime_ns}
    then = Then({"around": around}, begun, time.time() + 9, [str(here / "out/checkpoints")])
    seen = {"looked": {str(here / "out"): False, str(here): True}, "read": [str(here / "cache/features.pt")]}
    assert list(then.made_meanwhile(seen, here)) == [str(here / "cache")]
    assert then.doubt(str(here), True) == then.doubt(str(here / "cache/features.pt"), False) == ""
    (here / "more").mkdir()
    assert "may have been others" in then.doubt(str(here), True)


def test_variables_that_a_script_copies_all_together_are_not_its_settings() -> None:
    one = {"asked": ["varied: the id of a process", "variable DROP", "variable SEED"]}
    every = {"asked": [f"variable {number}" for number in range(33)]}
    assert (variables_read(one), variables_read(every), variables_read(None)) == (("DROP", "SEED"), (), ())


def test_a_variable_that_no_record_compares_is_a_doubt_where_the_script_reads_it_and_it_is_another() -> None:
    seen = {"why": "", "read": [], "peers": [], "programs": [], "shared": False, "asked": ["variable USER", "variable HOME"]}
    facts = [{"aside": {"USER": digest}} for digest in ("1", "2")]
    (told,) = unrecorded(seen, Then(facts[0], 0.0, None, []), facts[1])
    assert "`USER`" in told
    assert list(unrecorded(seen, Then(facts[0], 0.0, None, []), facts[0])) == []


def words(path: Path, facts: dict[str, Any], *, begun: float, ended: float | None = None, own: Sequence[str] = ()) -> list[str]:
    """What is said of one file that a replay has read."""
    seen = {"why": "", "read": [str(path)], "peers": [], "programs": [], "shared": False}
    return list(unrecorded(seen, Then(facts, begun, ended, own)))


def test_a_file_is_as_it_was_where_it_is_older_or_its_digest_is_known(tmp_path: Path) -> None:
    path = tmp_path / "teacher.bin"
    path.write_text("1")
    now = time.time()
    assert words(path, {}, begun=now + 9) == []
    (told,) = words(path, {}, begun=now - 9)
    assert "newer than the launch" in told and str(path) in told
    for facts in ({"files": {str(path): "1"}}, {"later": [[str(path), 4, "1"]]}):
        assert words(path, facts, begun=now - 9, ended=now + 9) == []
        assert "other times" in words(path, facts, begun=now - 9, ended=now - 5)[0]
    assert words(path, {}, begun=now - 9, own=[str(tmp_path)]) == []
    assert words(tmp_path / "gone.bin", {}, begun=now - 9) == []


def test_a_file_that_the_launch_wrote_itself_may_be_as_new_as_its_end(tmp_path: Path) -> None:
    path = tmp_path / "cache.bin"
    path.write_text("1")
    now = time.time()
    for facts in ({"written": [str(path)]}, {"later": [[str(path), 4, "its own"]]}):
        assert words(path, facts, begun=now - 9, ended=now + 9) == []
        assert len(words(path, facts, begun=now - 9, ended=now - 5)) == 1


def test_what_is_no_file_is_in_no_record(tmp_path: Path) -> None:
    pipe, shared = tmp_path / "pipe", Path(f"/dev/shm/watched-{os.getpid()}")
    os.mkfifo(pipe)
    shared.write_text("1")
    try:
        assert "in no record" in words(pipe, {}, begun=time.time() + 9)[0]
        assert "shared memory" in words(shared, {}, begun=time.time() + 9)[0]
    finally:
        shared.unlink()
    seen = {"why": "", "read": [], "peers": ["10.0.0.9:80"], "programs": ["date"], "shared": True}
    then = Then({}, 0.0, None, [])
    assert len(list(unrecorded(seen, then))) == 3
    assert "not watched" in next(unrecorded(None, then))
    assert "not permitted" in next(unrecorded({"why": "seccomp: not permitted"}, then))


def test_an_installed_file_is_compared_with_what_its_package_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    path = Path(numpy.__file__).with_name("py.typed")
    assert words(path, {}, begun=0.0) == []
    monkeypatch.setattr("chronicle.resume.installed.hashlib.sha256", lambda data: __import__("hashlib").sha1(data))
    assert len(words(path, {}, begun=0.0)) == 1


def test_files_that_are_mapped_are_among_those_that_a_launch_read(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        place = tmp_path / "logs" / "run" / "launches" / "0001"
        place.mkdir(parents=True)
        write_facts(place, {})
    found = read_facts(place)
    assert found is not None and str(path) in found["files"]
    assert not any(name.endswith(".so") for name in found["files"])


CLOCK = """
import datetime, json, pandas, sys, time
from datetime import date as Date
from later import library
since, began = time.perf_counter(), time.time()
sys._chronicle_clock(7)
print(json.dumps({
    "began": began, "now": time.time(), "moment": datetime.datetime.now().timestamp(), "year": time.localtime().tm_year,
    "day": Date.today().year, "text": time.strftime("%Y"), "elapsed": time.perf_counter() - since,
    "library": library(), "of": pandas.Timestamp(datetime.datetime.utcnow()).year, "zone": str(
        datetime.datetime.now(tz=datetime.timezone.utc).tzinfo), "today": datetime.datetime.today().year,
    "frame": pandas.to_datetime([datetime.datetime.now(), pandas.Timestamp.now()]).year.max().item(),
    "hour": time.localtime(0).tm_year}))
"""


def test_the_script_alone_reads_the_clock_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/later.py").write_text("import time\ndef library():\n    return time.time()\n")
    (tmp_path / "script.py").write_text(CLOCK)
    (tmp_path / "clock.json").write_text(json.dumps({"begin": 1e9, "steps": {"7": 1e9 + 5000}}))
    run = {"CHRONICLE_RUN_DIR": str(tmp_path), "CHRONICLE_LAUNCH_DIR": str(tmp_path)}
    own = {**run, "CHRONICLE_CLOCK": str(tmp_path / "clock.json"),
           "PYTHONPATH": f"{STARTUP_DIR}{os.pathsep}{tmp_path / 'site-packages'}"}  # fmt: skip
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env={**os.environ, **own}, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert 1e9 <= found["began"] < 1e9 + 60 and 1e9 + 5000 <= found["now"] < 1e9 + 5060
    assert abs(found["moment"] - found["now"]) < 5 and (found["year"], found["day"], found["text"]) == (2001, 2001, "2001")
    assert (found["of"], found["zone"], found["today"]) == (2001, "UTC", 2001) and found["frame"] == 2001
    assert 4900 < found["elapsed"] < 5060
    assert abs(found["library"] - time.time()) < 60 and found["hour"] == 1970


def test_a_package_that_was_installed_since_is_a_doubt_and_one_of_the_same_version_is_none(tmp_path: Path) -> None:
    place = tmp_path / "lib/site-packages/extra"
    (place / "__pycache__").mkdir(parents=True)
    (place / "__init__.py").write_text("")
    read = [str(place / "__pycache__/__init__.cpython-311.pyc")]
    seen = {"why": "", "read": read, "peers": [], "programs": [], "shared": False}
    known = {"packages": {"extra": "1.0"}}

    def told(facts: dict[str, Any], begun: float) -> list[str]:
        return list(unrecorded(seen, Then(facts, begun, None, []), known))

    assert told({}, time.time() - 9) == ["package `extra` is newer than the launch"]
    assert told(known, time.time() - 9) == told({}, time.time() + 9) == []


def _install(site: Path, name: str, text: str) -> Path:
    """A package without a version in its code, as an installer leaves it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(text)
    (site / f"{name}-1.0.dist-info/RECORD").write_text(f"{name}/__init__.py,sha256={digest},{len(text)}\n")
    return site / name / "__init__.py"


def test_a_package_whose_files_another_environment_links_is_the_one_of_then(tmp_path: Path) -> None:
    source = _install(tmp_path / "lib/site-packages", "extra", "FACTOR = 2\n")
    time.sleep(0.05)
    begun = time.time()
    time.sleep(0.05)
    os.link(source, tmp_path / "elsewhere.py")
    assert source.stat().st_ctime > begun
    assert list(InstalledPackages().newer_than(begun, [str(source)], {}, {})) == []
    source.write_text("FACTOR = 3\n")
    assert list(InstalledPackages().newer_than(begun, [str(source)], {}, {})) == ["extra"]


def test_a_package_that_was_installed_anew_is_newer_though_it_is_as_it_was_brought(tmp_path: Path) -> None:
    begun = time.time() - 9
    source = _install(tmp_path / "lib/site-packages", "extra", "FACTOR = 2\n")
    assert list(InstalledPackages().newer_than(begun, [str(source)], {}, {})) == ["extra"]


def test_another_version_of_chronicle_is_no_cause(tmp_path: Path) -> None:
    before, after = ({"packages": {"chronicle": version, "torch": "2"}} for version in ("0.1", "0.2"))
    (found,) = changed_facts(before, after)
    assert (found.kind, found.words) == ("recorder", "chronicle: 0.1 → 0.2")
