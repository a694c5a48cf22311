"""Starts `chronicle run` around real launchers and looks at the processes afterwards, by a mark of its own."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from chronicle.journal import Entry, read_journal
from chronicle.launch.containment import open_group
from chronicle.launch.processes import list_processes, read_environment, read_process
from chronicle.paths import RunPaths

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
BIN = Path(sys.executable).parent
MARK = "LAUNCH_TEST_MARK"
ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCHERS = {
    "python": ([sys.executable], 1),
    "accelerate-1": ([*ACCELERATE, "--num_processes", "1", "--cpu"], 1),
    "accelerate-2": ([*ACCELERATE, "--num_processes", "2", "--multi_gpu"], 2),
    "torchrun": ([str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"], 2),
    "deepspeed": ([str(BIN / "deepspeed"), "--num_gpus", "2", "--no_local_rank", "--master_port", "0"], 2),
}


class Driver:
    """One `chronicle run` in a directory of its own."""

    def __init__(self, directory: Path, run: str = "demo") -> None:
        self.directory = directory
        self.run = run
        self.paths = RunPaths(directory / "logs" / run)
        self.mark = secrets.token_hex(8)
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")}
        self.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.environ["CHRONICLE_MLFLOW_URI"] = "off"  # its feeder outlives a launch by a few seconds, on purpose
        self.process: subprocess.Popen[bytes] | None = None
        self.out = directory / "out.txt"

    def start(self, command: list[str], *options: str, environ: dict[str, str] | None = None) -> int:
        """Start `chronicle run … -- command`; returns the supervisor's pid."""
        words = ["run", "--run", self.run, *options, "--", *command]
        with open(self.out, "ab") as out:
            self.process = subprocess.Popen(
                self.chronicle(*words),
                cwd=self.directory,
                env=self.environ | {MARK: self.mark} | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # a shell that starts the tests in the background ignores INT, and so would everything below it
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return self.process.pid

    def chronicle(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "chronicle.cli.main", *words]

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another `chronicle` command on the same run, to its end."""
        command = self.chronicle(*words, "--run", self.run)
        return subprocess.run(command, cwd=self.directory, env=self.environ, capture_output=True, text=True, timeout=60)

    def start_launcher(self, name: str, mode: str, *options: str) -> list[int]:
        """Start a real launcher around the worker and wait until every rank works; returns all their pids."""
        command, ranks = LAUNCHERS[name]
        if name == "deepspeed":
            command = [*command[:-1], str(free_port())]
        self.start([*command, str(WORKER), str(self.directory), mode], *options)
        ready = [self.directory / f"ready-{rank}.json" for rank in range(ranks)]
        self.until(lambda: all(path.exists() for path in ready), "ranks to work")
        return [pid for path in ready for pid in json.loads(path.read_text())]

    def until(self, condition, what: str, seconds: float = 120.0) -> None:
        """Wait for something that must come; fails with what was printed."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self.process and self.process.poll() is not None and not condition()):
                raise AssertionError(f"waited for {what}; printed:\n{self.out.read_text()[-4000:]}")
            time.sleep(0.02)

    def wait(self, seconds: float = 120.0) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def launcher_pid(self) -> int:
        """The direct child of the supervisor."""
        assert self.process is not None
        children = [one for one in list_processes() if one.parent == self.process.pid]
        return min(children, key=lambda one: one.start_ticks).pid

    def left(self) -> list[str]:
        """Living processes that carry this test's own mark: independent of what is under test."""
        found = []
        for process in list_processes():
            if process.alive and (read_environment(process.pid) or {}).get(MARK) == self.mark:
                found.append(f"{process.pid} {process.name}")
        return found

    def entries(self, kind: str) -> list[Entry]:
        return list(read_journal(self.paths).of_kind(kind))

    def cleanup(self) -> None:
        """Whatever a failed test left, found by the mark."""
        for line in self.left():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass  # it was just ending
        if self.process is not None:
            self.process.wait(10)
        for entry in self.entries("launch.start"):  # of a supervisor that a test has killed
            group = open_group(entry.data.get("cgroup"))
            if group is not None:
                group.remove()


def is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.alive


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
