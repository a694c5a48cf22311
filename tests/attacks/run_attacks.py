"""Opens hostile checkpoints with the commands people use, each in a process of its own, and reports what it cost.

`run_attacks.py DIR [--quick]` writes one JSON line a case: exit codes, what was printed, processor time, peak memory.
Time is in units of what this machine needs, in the same run, to walk over a million opcodes with the standard library.
The canary must not exist afterwards. Hostile state is read; hostile companions of healthy state meet every command that
opens a checkpoint, those that change it too. `--quick` leaves out the second home of each file (a whole checkpoint) and
half of the commands. Memory beyond MEMORY_BYTES and time beyond TIMEOUT_SECONDS end a case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from chronicle.cli import main as commands
from tests.attacks import hostile_files
from tests.attacks.companions import COMPANIONS, healthy
from tests.attacks.pickle_bytes import optimizer, pickled, real, scheduler

MEMORY_BYTES = 1500 * 2**20
MILLION_OPCODES = b")" + b"\x85" * 1_000_000 + b"."
TIMEOUT_SECONDS = 240  # a fuse; what a case really took is measured in processor time


def cases(folder: Path, *, quick: bool) -> Iterator[tuple[str, Path]]:
    """(label, path to inspect) of every hostile checkpoint, written below `folder` one at a time."""
    for number, (label, make) in enumerate(hostile_files.HOSTILE.items()):
        content = make()
        single = folder / f"{number}.pt"
        single.write_bytes(content)
        yield label, single
        single.unlink()
        if quick:
            continue
        state = folder / f"opt_step-{number}" / "accelerator_state"
        state.mkdir(parents=True)
        for name in ("custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"):
            (state / name).write_bytes(content)
        (state / "model.safetensors").write_bytes(hostile_files.safetensors({}))
        yield f"{label}, in a whole checkpoint", state.parent
    for label, content in hostile_files.SAFETENSORS.items():
        yield f"safetensors: {label}", _accelerate(folder, label, {"model.safetensors": content})
    for label, content in hostile_files.METADATA.items():
        path = folder / label
        path.mkdir()
        (path / ".metadata").write_bytes(content)
        (path / "__0_0.distcp").write_bytes(b"PK\x03\x04")
        yield f"dcp: {label}", path
    for label, plant in FILESYSTEM.items():
        path = _accelerate(folder, label, {})
        plant(path)
        yield f"filesystem: {label}", path


def companion_cases(folder: Path) -> Iterator[tuple[str, Path]]:
    """(label, path) of every healthy checkpoint with something hostile beside its state, and of every filesystem trick."""
    for label, plant in COMPANIONS.items():
        path = healthy(folder / label)
        plant(path)
        yield f"companion: {label}", path
    for label, plant in FILESYSTEM.items():
        path = _accelerate(folder, f"{label}, changed", {})
        plant(path)
        yield f"changed: {label}", path


def _accelerate(folder: Path, label: str, files: dict[str, bytes]) -> Path:
    path = folder / label.replace("/", " ") / "opt_step-7"
    path.mkdir(parents=True)
    healthy = {
        "optimizer.bin": hostile_files.torch_zip(pickled(optimizer(lr=real(1e-3)))),
        "scheduler.bin": hostile_files.torch_zip(pickled(scheduler())),
        "random_states_0.pkl": hostile_files.torch_zip(pickled(b"}")),
        "model.safetensors": hostile_files.safetensors({}),
    }
    for name, content in {**healthy, **files}.items():
        (path / name).write_bytes(content)
    return path


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return plant


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def _sparse(path: Path) -> None:
    with open(path, "wb") as f:
        f.truncate(2**40)


def _many_names(path: Path) -> None:
    for number in range(3000):
        (path / f"custom_checkpoint_{number * 7}.pkl").touch()


FILESYSTEM: dict[str, Callable[[Path], object]] = {
    "fifo": _replace("optimizer.bin", os.mkfifo),
    "link to a device": _replace("optimizer.bin", lambda p: p.symlink_to("/dev/zero")),
    "link to itself": _replace("optimizer.bin", lambda p: p.symlink_to(p.name)),
    "link to nothing": _replace("scheduler.bin", lambda p: p.symlink_to("nowhere")),
    "link to the parent": lambda p: (p / "loop").symlink_to(".."),
    "directory as a file": _replace("scheduler.bin", lambda p: p.mkdir()),
    "socket": _replace("scheduler.bin", _socket),
    "terabyte of nothing": _replace("optimizer.bin", _sparse),
    "terabyte of weights": _replace("model.safetensors", _sparse),
    "name with a newline": lambda p: (p / "a\nerror: all is well").touch(),
    "name with escapes": lambda p: (p / "optimizer\x1b[2J.bin").touch(),
    "name that is not UTF-8": lambda p: open(os.fsencode(p) + b"/optimizer\xff\xfe.bin", "w").close(),
    "thousands of names": _many_names,
    "a number of eleven digits": lambda p: [
        (p / name.format(99_999_999_999)).touch() for name in ("custom_checkpoint_{}.pkl", "random_states_{}.pkl")
    ],
    "directories a hundred deep": lambda p: (p / "/".join("d" * 100)).mkdir(parents=True),
    "manifest that leads outside": lambda p: (p / "chronicle-manifest.json").write_text(
        json.dumps({"v": 1, "files": [{"path": "../../../etc/passwd", "size": 1, "sha256": "x", "crc32": "y"}]})
    ),
    "manifest of another shape": lambda p: (p / "chronicle-manifest.json").write_text('{"v": 1, "files": {"a": 1}}'),
    "manifest a million deep": lambda p: (p / "chronicle-manifest.json").write_text("[" * 1_000_000),
    "latest of a megabyte": lambda p: (p / "latest").write_text("x\n" * 500_000),
}  # fmt: skip


def open_it(path: Path, argvs: list[list[str]]) -> dict[str, object]:
    """Run commands on `path` in a child process."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "w") as report:
            json.dump(_in_child(argvs), report)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as report:
        text = report.read()
    _, status, usage = os.wait4(child, 0)
    outcome = json.loads(text) if text else {"codes": [], "printed": "", "broken": f"died with status {status}"}
    seconds = usage.ru_utime + usage.ru_stime
    return {**outcome, "walks": seconds / yardstick(), "memory_mb": usage.ru_maxrss / 1024}


def yardstick() -> float:
    """Processor seconds that this machine has needed for the walk: the slowest of all so far, one a second of the run."""
    if not _walks or time.monotonic() - _walks[-1][0] > 1.0:
        begun = time.process_time()
        for _ in pickletools.genops(MILLION_OPCODES):
            pass
        _walks.append((time.monotonic(), time.process_time() - begun))
    return max(seconds for _, seconds in _walks)


def _in_child(argvs: list[list[str]]) -> dict[str, object]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(TIMEOUT_SECONDS)
    printed, broken, codes = io.StringIO(), "", []
    commands._unexpected = lambda problem: _remember(problem)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        codes += [commands.run(argv) for argv in argvs]
    broken = "\n".join(_UNEXPECTED)
    return {"codes": codes, "printed": printed.getvalue()[-2000:], "broken": broken}


def commands_on(path: str) -> list[list[str]]:
    return [["inspect", path], ["verify", path], ["inspect", path, "--json"], ["diff", path, path]]


def all_commands_on(path: Path) -> list[list[str]]:
    """Every command that opens a checkpoint, at the root that `path` lies in; those that change something come last."""
    root = path.parent
    run = ["--run", "r", "--logs", f"{root}-logs"]
    places = [*run, "--checkpoints", str(root)]
    step = path.name.rpartition("-")[2]
    back = ["rollback", "--to", step, "--lr-scale", "0.5"]
    huge = path.is_dir() and any(p.lstat().st_size > 2**32 for p in path.iterdir())
    quick = ["--quick"] if huge else []
    return [
        *(
            ["verify", str(path), *places],
            [*back, "--verify", "quick", "--yes", *places],
            ["verify", "--write", str(path), *quick],
        ),
        *(
            ["note", "begun", *run],
            ["verify", "--all", *places],
            ["inspect", str(path)],
            ["inspect", str(path), str(path)],
        ),
        *(
            [*back, "--dry-run", *places],
            ["verify", "--all", "--quarantine", "--yes", *places],
            [*back, "--yes", *places],
        ),
        *(["undo", "--yes", *places], ["prune", "--yes", *places], ["propose", *places], ["status", *places]),
    ]


_UNEXPECTED: list[str] = []
_walks: list[tuple[float, float]] = []  # when, processor seconds


def _remember(problem: BaseException) -> int:
    _UNEXPECTED.append("".join(traceback.format_exception(problem))[-1500:])
    return 99


def main(folder: Path, *, quick: bool) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for argv in [*commands_on("nothing"), *all_commands_on(folder / "nothing-1")]:  # import the verbs once, here
            commands.run(argv)
    for label, path in cases(folder, quick=quick):
        argvs = commands_on(str(path))[: 2 if quick else 4]
        print(json.dumps({"label": label, "path": str(path), **open_it(path, argvs)}), flush=True)
    for label, path in companion_cases(folder):
        argvs = all_commands_on(path)[: 3 if quick else None]
        print(json.dumps({"label": label, "path": str(path), **open_it(path, argvs)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), quick="--quick" in sys.argv)
