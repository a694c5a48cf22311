"""Kill or fail the real command at every system call, from outside, with strace; without strace use the tests' own disk.

    python -m benchmarks.crash_sweep             all points (some minutes)
    python -m benchmarks.crash_sweep --every 9   a sample
    python -m benchmarks.crash_sweep --patched   the optimizer's file is patched in place, as files of 32 MiB are

One undisturbed run is traced; each (system call, ordinal) that touches the run's own files is a point, reading calls
included. `inject=NAME:…:when=N` counts per call name, so that is how points are named. At each point:

    a loader (highest step; explicit path) must see what was before, or after, or no checkpoints at all;
    the command must not print a traceback; exit 0 must mean that what was asked is done;
    then `chronicle recover` must leave exactly before or exactly after: every name, byte, mode and modification time.

Exit 0 allows one thing: a clean-up after the receipt that failed may leave a hidden workspace beside the checkpoints,
when the command says so. Such points are counted by themselves, and the next command must have removed it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollback.transaction.apply

CODE = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"
PATCHED_BYTES = 2000  # with --patched: optimizer.bin is larger, the scheduler is not
PATCHED_CODE = f"import rollback.transaction.apply; rollback.transaction.apply.PATCHED_BYTES = {PATCHED_BYTES}; {CODE}"
CALLS = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat,mkdir,mkdirat,unlink,unlinkat,rmdir,"
    "close,ftruncate,utimensat,chmod,fchmod,fchmodat,chown,lchown,fchownat,sendfile,copy_file_range,flock,"
    "read,pread64,getdents64,newfstatat,fstat,statfs,access,readlink,lseek,ioctl"
)
READING = frozenset(("read", "pread64", "getdents64", "newfstatat", "fstat", "statfs", "access", "readlink", "lseek"))
KINDS = {
    "SIGKILL": ("signal=KILL", None),  # not at READING: what is on disk then is what it is at the next call that writes
    "ENOSPC": (
        "error=ENOSPC",
        {"openat", "write", "pwrite64", "fsync", "rename", "renameat2", "mkdir", "linkat", "link"},
    ),
    "EIO": (
        "error=EIO",
        {"write", "pwrite64", "fsync", "rename", "renameat2", "close", "unlink", "rmdir", "sendfile", "utimensat"}
        | {"read", "pread64", "getdents64", "newfstatat", "readlink"},
    ),
    "EACCES": ("error=EACCES", {"openat", "rename", "renameat2", "mkdir", "linkat", "link", "unlink", "rmdir"}),
    "EXDEV": ("error=EXDEV", {"rename", "renameat2", "linkat", "link", "copy_file_range"}),
    "EINTR": ("error=EINTR", {"openat", "write", "pwrite64", "fsync", "rename", "renameat2", "close", "flock"}),
}
TIMEOUT_SECONDS = 60
LEFT_OVER = "could not be removed"  # what a command says whose clean-up after the receipt failed
LONG_AGO_NS = 10**18  # September 2001: the times of everything that the template holds


@dataclass(frozen=True, slots=True)
class Point:
    """The `ordinal`-th call of `name` in the command's life."""

    name: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command line on a world; `prepare` brings a fresh copy of the template into the state it starts from."""

    name: str
    words: tuple[str, ...]
    prepare: Callable[[Path], None]


def make_template(top: Path) -> None:
    """Three checkpoints in the seed's layout, written by torch: registered LambdaLR, AdamW of two groups."""
    import torch

    model = torch.nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(1, 21):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        if step in (10, 15, 20):
            state = top / "checkpoints" / f"opt_step-{step}" / "accelerator_state"
            state.mkdir(parents=True)
            torch.save(model.state_dict(), state / "pytorch_model.bin")
            torch.save(optimizer.state_dict(), state / "optimizer.bin")
            torch.save(scheduler.state_dict(), state / "custom_checkpoint_0.pkl")
            torch.save({"step": 0}, state / "random_states_0.pkl")
    for path in [top, *top.rglob("*")]:
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    chronicle(top, "note", "the run began")


def environment() -> dict[str, str]:
    keep = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if key in os.environ}
    here = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join([here, keep.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return keep | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def command_line(top: Path, *words: str) -> list[str]:
    lowered = rollback.transaction.apply.PATCHED_BYTES == PATCHED_BYTES
    return [sys.executable, "-c", PATCHED_CODE if lowered else CODE, *arguments(top, *words)]


def arguments(top: Path, *words: str) -> list[str]:
    places = ["--run", "r", "--logs", str(top / "logs")]
    checkpoints = ["--checkpoints", str(top / "checkpoints")] if words[0] in ("rollback", "undo", "recover") else []
    return [*words, *places, *checkpoints]


def chronicle(top: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that nobody disturbs: in this process, it starts faster."""
    from chronicle.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main.run(arguments(top, *words))
    return code, out.getvalue(), err.getvalue()


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment(), timeout=TIMEOUT_SECONDS
    )


ROLLBACK = ("rollback", "--to", "10", "--lr-scale", "0.5", "--yes")


def rolled_back(top: Path) -> None:
    code, _, said = chronicle(top, *ROLLBACK)
    assert code == 0, said


def interrupted(top: Path) -> None:
    """A rollback killed at its second rename in sight: ready, partly moved."""
    done = inject(top, ROLLBACK, Point("renameat2", 3), "signal=KILL")
    assert done.returncode != 0


def unprepared(top: Path) -> None:
    """A rollback killed while it builds the twin: nothing is in sight, `recover` reverts it."""
    done = inject(top, ROLLBACK, Point("linkat", 1), "signal=KILL")
    assert done.returncode != 0


COMMANDS = (
    Command("rollback", ROLLBACK, lambda top: None),
    Command("undo", ("undo", "--yes"), rolled_back),
    Command("recover", ("recover",), interrupted),
    Command("revert", ("recover",), unprepared),
    Command("note", ("note", "Xid 64 on node 7"), lambda top: None),
)


def inject(top: Path, words: Iterable[str], point: Point, how: str) -> subprocess.CompletedProcess[str]:
    trace = [
        "strace",
        "-f",
        "-qq",
        "-e",
        f"trace={point.name}",
        "-e",
        f"inject={point.name}:{how}:when={point.ordinal}",
    ]
    return run([*trace, "-o", os.devnull, *command_line(top, *words)])


def find_points(top: Path, words: Iterable[str], log: Path) -> list[Point]:
    """Every call that touches the world, by name and ordinal: by its path, or by what its descriptor stands for."""
    done = run(["strace", "-f", "-y", "-qq", "-e", f"trace={CALLS}", "-o", str(log), *command_line(top, *words)])
    assert done.returncode == 0, done.stderr
    counts: Counter[str] = Counter()
    points = []
    for line in log.read_text(errors="replace").splitlines():
        found = re.match(r"\d+\s+(\w+)\(", line)
        if found is None:
            continue
        counts[found[1]] += 1
        if f"{top}" in line:
            points.append(Point(found[1], counts[found[1]]))
    return points


def views(top: Path) -> dict[str, Any]:
    """What two kinds of loader take from the root."""
    root = top / "checkpoints"
    if not root.is_dir():
        return {"highest": "no root", "explicit": "no root"}
    steps = sorted(int(m[1]) for p in root.iterdir() if (m := re.fullmatch(r"opt_step-(\d+)", p.name)))
    highest = root / f"opt_step-{steps[-1]}" if steps else root / "none"
    return {"highest": contents(highest), "explicit": contents(root / "opt_step-10")}


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {p.relative_to(checkpoint).as_posix(): p.read_bytes() for p in sorted(checkpoint.rglob("*")) if p.is_file()}


def state(top: Path) -> dict[str, Any]:
    """Everything beside the logs, with modes and times; ids of abandoned folders made alike."""
    found: dict[str, Any] = {}
    for path in sorted(top.rglob("*")):
        relative = path.relative_to(top).as_posix()
        if not relative.startswith("logs"):
            name = re.sub(r"(abandoned|\.chronicle)[/-][0-9A-Z]{26}", r"\1/ID", relative)
            is_old = path.lstat().st_mtime_ns == LONG_AGO_NS
            found[name] = (oct(path.lstat().st_mode), is_old, path.read_bytes() if path.is_file() else None)
    found["contract"] = (top / "logs" / "r" / "contract.json").exists()
    return found


def visible(found: dict[str, Any]) -> dict[str, Any]:
    """Without what a failed clean-up after the receipt may leave: a hidden workspace, and the empty directories that
    abandoned checkpoints came back from."""
    return {
        name: what
        for name, what in found.items()
        if not name.startswith(".chronicle") and name not in ("abandoned", "abandoned/ID")
    }


def is_tried(point: Point, kind: str) -> bool:
    """Whether this kind of failure can happen at this call and tells something."""
    _, names = KINDS[kind]
    return point.name not in READING if names is None else point.name in names


class Sweep:
    """All points of one command, one kind of injection after the other."""

    def __init__(self, command: Command, template: Path, work: Path) -> None:
        self.command, self.template, self.work = command, template, work
        self.start = work / f"{command.name}-start"
        self.copy(template, self.start)
        command.prepare(self.start)
        traced = self.fresh()
        self.before, self.views_before = self.settled(self.fresh()), views(self.start)
        self.points = find_points(traced, command.words, work / "trace.log")
        self.after, self.views_after = state(traced), views(traced)
        self.bad: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def is_patched(self) -> bool:
        """Whether the undisturbed run took the checkpoint out of sight for a patch in place."""
        return "/parked/" in (self.work / "trace.log").read_text(errors="replace")

    def copy(self, source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)
        for path in [*target.rglob("transaction.json"), *target.rglob("run.json")]:
            # inode numbers and paths in an unfinished transaction and in the run's place belong to the original
            path.write_bytes(path.read_bytes().replace(str(source).encode(), str(target).encode()))
        renumber(source, target)

    def fresh(self) -> Path:
        target = self.work / "world"
        self.copy(self.start, target)
        return target

    def settled(self, top: Path) -> Any:
        """The start itself for most commands; for `recover` there is no way back, only the end."""
        return state(top)

    def try_point(self, point: Point, kind: str) -> None:
        how, _ = KINDS[kind]
        top = self.fresh()
        done = inject(top, self.command.words, point, how)
        where = f"{self.command.name} {kind} {point.name}#{point.ordinal} (exit {done.returncode})"
        if "Traceback" in done.stderr:
            self.bad.append(f"{where}: traceback\n{done.stderr[-600:]}")
        seen = views(top)
        for loader, view in seen.items():
            allowed = [self.views_before[loader], self.views_after[loader]]
            if loader == "explicit":
                allowed.append({})  # out of sight; the root and every other checkpoint are not
            if view not in allowed:
                self.bad.append(f"{where}: a loader by {loader} sees neither before nor after")
        left = ""
        if kind != "SIGKILL" and done.returncode == 0 and (found := state(top)) != self.after:
            if visible(found) != visible(self.after):
                self.bad.append(f"{where}: exit 0, yet not what was asked: {difference(found, self.after)[:5]}")
            elif LEFT_OVER not in done.stderr:
                self.bad.append(f"{where}: exit 0, and not a word about {difference(found, self.after)[:5]}")
            left = " (the next command tidied up)"
        self.outcomes[f"{kind}: {self.recovered(top, where)}{left}"] += 1

    def recovered(self, top: Path, where: str) -> str:
        code, _, said = chronicle(top, "recover")
        if code != 0:
            self.bad.append(f"{where}: recover ends with {code}: {said[-300:]}")
            return "not recovered"
        if self.command.name == "note":
            again, _, _ = chronicle(top, "note", "after the crash")
            code, log, _ = chronicle(top, "log", "--json")
            if again or code or "the run began" not in log or "after the crash" not in log:
                self.bad.append(f"{where}: the journal lost an entry or cannot be written")
            return "journal whole"
        seen = state(top)
        if seen == self.after:
            return "after"
        if seen == self.before and self.command.words != ("recover",):
            return "before"
        self.bad.append(f"{where}: after recover neither before nor after: {difference(seen, self.after)[:5]}")
        return "wrong"


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def renumber(source: Path, target: Path) -> None:
    """Write a copy's inode numbers into its unfinished transaction, and into the run's place: else the run is a copy."""
    for run in target.rglob("run.json"):
        place = json.loads(run.read_text())
        place["inode"], place["journal_inode"] = run.parent.stat().st_ino, (run.parent / "journal").stat().st_ino
        run.write_text(json.dumps(place))
    for ready in target.rglob("transaction.json"):
        numbers: dict[int, int] = {}
        for path in [source, *source.rglob("*")]:
            twin = target / path.relative_to(source)
            if os.path.lexists(twin):
                numbers[path.lstat().st_ino] = twin.lstat().st_ino
        record = json.loads(ready.read_text())
        for move in record["moves"]:
            move["inode"] = numbers.get(move["inode"], move["inode"])
        ready.write_text(json.dumps(record))


def sweep(every: int = 1, *, commands: Iterable[Command] = COMMANDS, say: Callable[[str], None] = print) -> list[str]:
    """Run the sweep; returns what went wrong."""
    bad: list[str] = []
    total, began = 0, time.monotonic()
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="chronicle-sweep-", dir=base) as name:
        template = Path(name) / "template"
        template.mkdir()
        make_template(template)
        for command in commands:
            one = Sweep(command, template, Path(name))
            if command.name == "rollback" and rollback.transaction.apply.PATCHED_BYTES == PATCHED_BYTES:
                assert one.is_patched(), "no file was patched in place"
            tried = 0
            for kind in KINDS:
                for point in [point for point in one.points if is_tried(point, kind)][::every]:
                    one.try_point(point, kind)
                    tried += 1
            total += tried
            bad += one.bad
            say(f"{command.name:<9} {len(one.points):4} calls, {tried:4} points: "
                + ", ".join(f"{outcome} {count}" for outcome, count in sorted(one.outcomes.items())))  # fmt: skip
            for line in one.bad:
                say(f"BAD {line}")
    say(f"{total} points in {time.monotonic() - began:.0f} s, {len(bad)} bad")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try only every N-th point")
    parser.add_argument("--command", action="append", help="only this command (repeatable)")
    parser.add_argument("--patched", action="store_true", help="lower the size from which files are patched in place")
    options = parser.parse_args()
    if options.patched:
        rollback.transaction.apply.PATCHED_BYTES = PATCHED_BYTES
    if shutil.which("strace") is None:
        print("strace is not installed (apt install strace): running the sweep inside one process instead")
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", "tests/rollback/test_crash_points.py"]))
    chosen = [c for c in COMMANDS if not options.command or c.name in options.command]
    bad = sweep(options.every, commands=chosen, say=lambda text: print(text, flush=True))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
