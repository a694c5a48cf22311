"""Planted causes that came in from outside of what a record holds: a clock, a mapped file, a server, a program, a limit.

Each is the plain script of `causes.py` with a few lines otherwise, in the record and in the replay. No record holds them, so
they are unexplained, or not deterministic. Beside them are causes that are no input: state that no checkpoint holds, chance,
and files that changed their form.
"""

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from benchmarks.replay.causes import SMALL, Cause, Later, Training, edit, set_variable
from chronicle.replay.verdict import ReplayVerdict as V

LOSS = "    loss.backward()\n"
BEGIN = "last = int(sys.argv[1])\n"
FORWARD = "    loss = loss_of(model(x), y)\n"


def variant(*pairs: str) -> Training:
    """The plain script with texts replaced."""

    def lay(directory: Path) -> None:
        SMALL.lay(directory)
        edit("train.py", *pairs)(directory, {})

    return replace(SMALL, lay=lay)


SCALE = "    loss = loss * factor\n"
MAPPED = (BEGIN, "mapped = torch.from_file('teacher.bin', size=64)\n" + BEGIN,
          LOSS, "    loss = loss + 1e-3 * (mapped[step % 64] - 1)\n    loss = loss * mapped[3]\n" + LOSS)  # fmt: skip

STAYS = (
    ("a running mean that no checkpoint holds", V.UNEXPLAINED, (
        BEGIN, BEGIN + "mean = 1.0\n", FORWARD,
        FORWARD + "    mean = 0.9 * mean + 0.1 * loss.item()\n    loss = loss / mean\n")),
    ("every seventh call since the start", V.UNEXPLAINED, (
        BEGIN, BEGIN + "calls = 0\n", FORWARD,
        FORWARD + "    calls += 1\n    loss = loss * (1.1 if calls % 7 == 0 else 1)\n")),
    ("noise by a random name", V.RANDOM, (
        BEGIN, BEGIN + "import uuid\n"
        "noise = torch.rand((), generator=torch.Generator().manual_seed(uuid.uuid4().int % 2**31))\n",
        LOSS, "    loss = loss * (1 + 0.01 * noise)\n" + LOSS)),
    ("a thread that is sometimes first", V.RANDOM, (
        BEGIN, BEGIN + "import threading, time\nbeats = [0]\n"
        "def beat():\n    while True:\n        beats[0] += 1\n        time.sleep(0)\n"
        "threading.Thread(target=beat, daemon=True).start()\n",
        LOSS, "    loss = loss * (1 + 1e-3 * (beats[0] % 97))\n" + LOSS)),
    ("own noise that the checkpoint holds", V.REPRODUCED, (
        BEGIN, BEGIN + "own = torch.Generator().manual_seed(step)\n", FORWARD, FORWARD + "    own.manual_seed(step)\n"
        "    loss = loss * (1 + 0.1 * torch.rand((), generator=own))\n")),
)  # fmt: skip


# name, right names, the script, how what comes in is laid, what changes before the replay
Alike = tuple[str, tuple[V, ...], tuple[str, ...], Callable[[Path], None], Later]


def _nothing(directory: Path) -> None:
    pass


def _unchanged(directory: Path, environ: dict[str, str]) -> None:
    pass


def _until(seconds: float) -> Later:
    def later(directory: Path, environ: dict[str, str]) -> None:
        time.sleep(max(0.0, (directory / "train.py").stat().st_mtime + seconds - time.time()))

    return later


def _lay_numbers(name: str) -> Callable[[Path], None]:
    def lay(directory: Path) -> None:
        import torch

        (directory / name).write_bytes(torch.ones(64).numpy().tobytes())

    return lay


def _change_numbers(name: str) -> Later:
    def later(directory: Path, environ: dict[str, str]) -> None:
        import torch

        (directory / name).write_bytes((torch.ones(64) * 1.02).numpy().tobytes())

    return later


def _database(value: float) -> Callable[..., None]:
    def write(directory: Path, environ: object = None) -> None:
        import sqlite3

        with sqlite3.connect(directory / "settings.db") as base:
            base.execute("create table if not exists settings (factor real)")
            base.execute("delete from settings")
            base.execute("insert into settings values (?)", (value,))

    return write


def _text(value: str) -> Callable[..., None]:
    def write(directory: Path, environ: object = None) -> None:
        (directory / "number.txt").write_text(value)

    return write


class Server:
    """Answers every connection with a number."""

    def __init__(self) -> None:
        self.value = 1.0
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen()
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> None:
        """Until the program ends."""
        while True:
            peer, _ = self.socket.accept()
            with peer:
                peer.sendall(str(self.value).encode())


SERVER: list[Server] = []
SHARED: list[SharedMemory] = []


def _lay_server(directory: Path) -> None:
    SERVER[:] = [Server()]
    (directory / "port.txt").write_text(str(SERVER[0].socket.getsockname()[1]))


def _other_answer(directory: Path, environ: dict[str, str]) -> None:
    SERVER[0].value = 1.02


def _lay_shared(directory: Path) -> None:
    SHARED[:] = [SharedMemory(f"outside-{os.getpid()}", create=True, size=8)]
    SHARED[0].buf[0] = 1
    (directory / "memory.txt").write_text(SHARED[0].name)


def _other_shared(directory: Path, environ: dict[str, str]) -> None:
    SHARED[0].buf[0] = 2


def _lay_package(directory: Path) -> None:
    (directory / "env/site-packages/toolkit").mkdir(parents=True)
    (directory / "env/site-packages/toolkit/__init__.py").write_text(
        "import json, os\nFACTOR = json.load(open(os.path.join(os.path.dirname(__file__), 'table.json')))\n"
    )
    (directory / "env/site-packages/toolkit/table.json").write_text("1.0")


LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
PROCESSORS = os.sched_getaffinity(0)


def _lay_limits(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, LIMITS)
    os.sched_setaffinity(0, PROCESSORS)


def _other_limit(directory: Path, environ: dict[str, str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMITS[0] - 64, LIMITS[1]))


def _other_processors(directory: Path, environ: dict[str, str]) -> None:
    os.sched_setaffinity(0, {min(PROCESSORS)})


UNKNOWN = (V.UNEXPLAINED, V.CODE)
ALIKE: tuple[Alike, ...] = (
    ("a budget of seconds since the start", (V.RANDOM, V.UNEXPLAINED), (
        BEGIN, "import time\nbegun = time.time()\n" + BEGIN,
        LOSS, "    time.sleep(0.05)\n    loss = loss * (1.02 if time.time() - begun > 1.7 else 1.0)\n" + LOSS),
        _nothing, _unchanged),
    ("the age of a file by datetime", (V.RANDOM, V.UNEXPLAINED), (
        BEGIN, "from datetime import datetime\nlaid = os.stat('train.py').st_mtime\n" + BEGIN,
        LOSS, "    loss = loss * (1.02 if datetime.now().timestamp() - laid > 45 else 1.0)\n" + LOSS), _nothing, _until(46)),
    ("a file that torch maps", (V.DATA,), MAPPED, _lay_numbers("teacher.bin"), _change_numbers("teacher.bin")),
    ("a file that is read in C", UNKNOWN, (
        BEGIN, "import ctypes\nlibc, numbers = ctypes.CDLL(None), (ctypes.c_float * 4)()\n"
        "libc.fopen.restype = ctypes.c_void_p\n"
        "file = ctypes.c_void_p(libc.fopen(b'numbers.bin', b'rb'))\nlibc.fread(numbers, 4, 4, file)\nlibc.fclose(file)\n"
        "factor = numbers[2]\n" + BEGIN, LOSS, SCALE + LOSS), _lay_numbers("numbers.bin"), _change_numbers("numbers.bin")),
    ("a database", UNKNOWN, (
        BEGIN, "import sqlite3\nfactor = sqlite3.connect('settings.db').execute('select factor from settings').fetchone()[0]\n"
        + BEGIN, LOSS, SCALE + LOSS), _database(1.0), _database(1.02)),
    ("a server on this machine", (V.UNEXPLAINED,), (
        BEGIN, "import socket\npeer = socket.create_connection(('127.0.0.1', int(open('port.txt').read())))\n"
        "factor = float(peer.recv(99))\n" + BEGIN, LOSS, SCALE + LOSS), _lay_server, _other_answer),
    ("what a program prints", UNKNOWN, (
        BEGIN, "import subprocess\nfactor = float(subprocess.check_output(['sh', '-c', 'cat number.txt']))\n" + BEGIN,
        LOSS, SCALE + LOSS), _text("1.0"), _text("1.02")),
    ("the system's random numbers", (V.RANDOM,), (
        BEGIN, "factor = 1 + os.urandom(1)[0] / 4096\n" + BEGIN, LOSS, SCALE + LOSS), _nothing, _unchanged),
    ("sums in the order in which threads end", (V.RANDOM,), (
        BEGIN, "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor, as_completed\n"
        "pool = ThreadPoolExecutor(4)\n" + BEGIN,
        LOSS, "    tasks = [pool.submit(lambda n: [sum(range(20000)), 0.1 * n][1], n) for n in range(8)]\n    order = 0.0\n"
        "    for place, task in enumerate(as_completed(tasks)):\n        order += place * task.result()\n"
        "    loss = loss * (1 + 1e-3 * order)\n" + LOSS), _nothing, _unchanged),
    ("a table inside of a package", UNKNOWN, (
        BEGIN, "sys.path.insert(0, 'env/site-packages')\nimport toolkit\nfactor = toolkit.FACTOR\n" + BEGIN,
        LOSS, SCALE + LOSS),
        _lay_package, edit("env/site-packages/toolkit/table.json", "1.0", "1.02")),
    ("the time zone", (V.CODE,), (
        BEGIN, "import time\nfactor = 1 + time.localtime(86400).tm_hour / 99\n" + BEGIN, LOSS, SCALE + LOSS), _nothing,
        set_variable("TZ", "Asia/Tokyo")),
    ("a limit of the shell", UNKNOWN, (
        BEGIN, "import resource\nfactor = 1 + resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 1e6\n" + BEGIN,
        LOSS, SCALE + LOSS),
        _lay_limits, _other_limit),
    ("the number of processors", UNKNOWN, (
        BEGIN, "factor = 1 + len(os.sched_getaffinity(0)) / 99\n" + BEGIN, LOSS, SCALE + LOSS), _lay_limits, _other_processors),
    ("shared memory of another process", (V.UNEXPLAINED,), (
        BEGIN, "from multiprocessing import shared_memory, resource_tracker\n"
        "block = shared_memory.SharedMemory(open('memory.txt').read())\n"
        "resource_tracker.unregister(block._name, 'shared_memory')\nfactor = 1 + block.buf[0] / 99\n" + BEGIN,
        LOSS, SCALE + LOSS), _lay_shared, _other_shared),
)  # fmt: skip


def _laid(pairs: tuple[str, ...], lay: Callable[[Path], None]) -> Training:
    training = variant(*pairs)

    def both(directory: Path) -> None:
        training.lay(directory)
        lay(directory)

    return replace(training, lay=both)


def causes() -> Iterator[Cause]:
    """All of them."""
    for name, right, pairs, lay, later in ALIKE:
        yield Cause(name=name, expected=right[0], also=right[-1], later=later, training=_laid(pairs, lay))
    for name, expected, pairs in STAYS:
        yield Cause(name=name, expected=expected, training=variant(*pairs))
    by_exec = variant("from objective import loss_of", "exec(open('objective.py').read())")
    changes: list[tuple[str, V, Later, Training]] = [
        ("a file that is run by exec", V.UNEXPLAINED, edit("objective.py", "return helpers", "return 1.01 * helpers"), by_exec),
        ("a module that became a package", V.CODE, _as_a_package, SMALL),
        ("the data behind a link", V.REPRODUCED, _link, SMALL),
        ("a stray file among the checkpoints", V.REPRODUCED, _stray, SMALL),
    ]
    for name, expected, change, training in changes:
        yield Cause(name=name, expected=expected, later=change, training=training)


def _as_a_package(directory: Path, environ: dict[str, str]) -> None:
    (directory / "helpers").mkdir()
    text = (directory / "helpers.py").read_text()
    (directory / "helpers.py").unlink()
    (directory / "helpers/__init__.py").write_text(text.replace("return 1.0", "return 1.02"))


def _link(directory: Path, environ: dict[str, str]) -> None:
    (directory / "real").mkdir()
    (directory / "data.pt").rename(directory / "real/data.pt")
    os.symlink("real/data.pt", directory / "data.pt")


def _stray(directory: Path, environ: dict[str, str]) -> None:
    (directory / "checkpoints/notes.txt").write_text("the good one is 30\n")
    (directory / "checkpoints/step-25.pt.tmp").write_bytes(b"half")
