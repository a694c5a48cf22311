"""Planted causes that were chosen after the mend of the class that was taken for hardware: input that no record holds.

Half of them are faults of a machine, in scripts that read the clock, start programs, map files and keep caches as healthy
scripts do; half are look-alikes that came in by a clock, a mapped file, a library in C, a server, a program, shared memory, a
limit. Written on 23 November 2026 for the code as it stood then, and committed before it was played. First figures are in
`docs/replay.md`.
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

from benchmarks.replay.causes import Cause, Later, Training, edit, set_variable
from benchmarks.replay.fifth import BEGIN, FORWARD, LOSS, STEP, variant
from benchmarks.replay.fresh import TRAININGS
from benchmarks.replay.planting import fault
from chronicle.replay.verdict import ReplayVerdict as V

SCALE = "    loss = loss * factor\n"
TIMED = (BEGIN, "import datetime, time\nsince, begun = time.time(), time.perf_counter()\n" + BEGIN, FORWARD,
         "    began = time.time()\n" + FORWARD,
         STEP, STEP + "    print(datetime.datetime.now(), time.time() - began, time.time() - since)\n")  # fmt: skip
CACHED = (BEGIN, "if not os.path.exists('order.pt'):\n    torch.save(torch.arange(9), 'order.pt')\n"
          "assert len(torch.load('order.pt')) == 9\n" + BEGIN)  # fmt: skip
STARTS = (BEGIN, "import subprocess, platform\nsubprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True)\n"
          "subprocess.run('uname -a | cat', shell=True, capture_output=True)\nplatform.platform()\n" + BEGIN)  # fmt: skip
MAPPED = (BEGIN, "mapped = torch.from_file('teacher.bin', size=64)\n" + BEGIN,
          LOSS, "    loss = loss + 1e-3 * (mapped[step % 64] - 1)\n    loss = loss * mapped[3]\n" + LOSS)  # fmt: skip
WORKED = ("batch_size=4, sampler=Order()", "batch_size=4, num_workers=2, sampler=Order()")

# name, right name, kind, step, place, what the script does besides, what is planted
FAULTS = (
    ("bit of a gradient, a script that times itself", V.HARDWARE, "one", 34, 5, TIMED, (
        STEP, "    if kind == 'one' and step == at:\n        flip(model[0].weight.grad, 24)\n" + STEP)),
    ("bit of a weight, data by workers", V.HARDWARE, "two", 36, 17, WORKED, (
        FORWARD, "    if kind == 'two' and step == at:\n        flip(model[0].weight, 23)\n" + FORWARD)),
    ("bit of a second moment, programs at the start", V.HARDWARE, "three", 33, 60, STARTS, (
        STEP, "    if kind == 'three' and step == at:\n"
        "        flip(optimizer.state[model[2].weight]['exp_avg_sq'], 25)\n" + STEP)),
    ("an activation, with a cache of its own", V.HARDWARE, "four", 35, 9, CACHED, (
        BEGIN, "def broken(module, inputs, output):\n    if kind == 'four' and step == at:\n        output = output.clone()\n"
        "        output.view(-1)[place] += 2\n    return output\nmodel[1].register_forward_hook(broken)\n" + BEGIN)),
    ("a bias without gradient, with a mapped file", V.HARDWARE, "five", 32, 0, MAPPED, (
        STEP, "    if kind == 'five' and step == at:\n        model[0].bias.grad.zero_()\n" + STEP)),
    ("the lowest bit of a gradient", V.HARDWARE, "six", 31, 11, (), (
        STEP, "    if kind == 'six' and step == at:\n        flip(model[2].weight.grad, 0)\n" + STEP)),
    ("the optimizer's counter", V.HARDWARE, "seven", 35, 0, TIMED, (
        STEP, "    if kind == 'seven' and step == at:\n        optimizer.state[model[2].bias]['step'] += 1\n" + STEP)),
    ("a sign three steps long", V.HARDWARE, "eight", 33, 2, CACHED, (
        STEP, "    if kind == 'eight' and at <= step < at + 3:\n        model[2].bias.grad[place] *= -1\n" + STEP)),
    ("a row of weights twice", V.HARDWARE, "nine", 34, 4, STARTS, (
        FORWARD, "    if kind == 'nine' and step == at:\n        w = model[0].weight.data\n        w[5] = w[4]\n" + FORWARD)),
    ("bit of a copied batch", V.DATA, "ten", 37, 21, (), (
        FORWARD, "    if kind == 'ten' and step == at:\n        x = x.clone()\n        flip(x, 27)\n" + FORWARD)),
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
    SHARED[:] = [SharedMemory(f"sixth-{os.getpid()}", create=True, size=8)]
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


UNKNOWN = (V.NOT_TOLD, V.CODE)
ALIKE: tuple[Alike, ...] = (
    ("a budget of seconds since the start", (V.RANDOM,), (
        BEGIN, "import time\nbegun = time.time()\n" + BEGIN,
        LOSS, "    time.sleep(0.05)\n    loss = loss * (1.02 if time.time() - begun > 1.7 else 1.0)\n" + LOSS),
        _nothing, _unchanged),
    ("the age of a file by datetime", (V.RANDOM, V.NOT_TOLD), (
        BEGIN, "from datetime import datetime\nlaid = os.stat('train.py').st_mtime\n" + BEGIN,
        LOSS, "    loss = loss * (1.02 if datetime.now().timestamp() - laid > 45 else 1.0)\n" + LOSS), _nothing, _until(46)),
    ("a file that torch maps", UNKNOWN, MAPPED, _lay_numbers("teacher.bin"), _change_numbers("teacher.bin")),
    ("a file that is read in C", UNKNOWN, (
        BEGIN, "import ctypes\nlibc, numbers = ctypes.CDLL(None), (ctypes.c_float * 4)()\n"
        "libc.fopen.restype = ctypes.c_void_p\n"
        "file = ctypes.c_void_p(libc.fopen(b'numbers.bin', b'rb'))\nlibc.fread(numbers, 4, 4, file)\nlibc.fclose(file)\n"
        "factor = numbers[2]\n" + BEGIN, LOSS, SCALE + LOSS), _lay_numbers("numbers.bin"), _change_numbers("numbers.bin")),
    ("a database", UNKNOWN, (
        BEGIN, "import sqlite3\nfactor = sqlite3.connect('settings.db').execute('select factor from settings').fetchone()[0]\n"
        + BEGIN, LOSS, SCALE + LOSS), _database(1.0), _database(1.02)),
    ("a server on this machine", (V.NOT_TOLD,), (
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
    ("shared memory of another process", (V.NOT_TOLD,), (
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
    """All of them; steps differ. Two of the faults are on two ranks."""
    for name, expected, kind, step, place, besides, planted in FAULTS:
        laid = _laid((*besides, *planted), _lay_numbers("teacher.bin") if besides is MAPPED else _nothing)
        yield Cause(name=name, expected=expected, fault=fault(kind, step, place), training=laid)
    ranks = TRAININGS["two ranks"]
    for name, words in (
        ("a weight of one rank, two ranks",
         "    if step == at and kind == 'apart' and rank == 1:\n        flip(inner[4].weight, 22)\n"),
        ("momentum of one rank, two ranks", "    if step == at and kind == 'apart' and rank == 0:\n"
         "        flip(optimizer.state[inner[0].weight]['momentum_buffer'], 24)\n"),
    ):  # fmt: skip
        at = "    optimizer.step(); schedule.step()"
        yield Cause(name=name, expected=V.HARDWARE, fault=fault("apart", 24, 3), training=_edited(ranks, at, words + at))
    for name, right, pairs, lay, later in ALIKE:
        training = _laid(pairs, lay)
        yield Cause(name=name, expected=right[0], also=right[-1], later=later, training=training)


def _edited(training: Training, before: str, after: str) -> Training:
    def lay(directory: Path) -> None:
        training.lay(directory)
        edit("train.py", before, after)(directory, {})

    return replace(training, lay=lay)
