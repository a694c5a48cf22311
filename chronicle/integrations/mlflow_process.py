"""The process that sends a run to MLflow while a launch runs, and how `chronicle run` starts and stops it.

mlflow is imported in that process only. It sends new data every two seconds until its stdin ends, then once more.
"""

import argparse
import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths

__all__ = ["MLFLOW_OFF", "MlflowProcess", "default_uri", "feed_until_stdin_ends", "start_mlflow_process", "store_of"]

MLFLOW_OFF = "off"  # `mlflow_uri = "off"`, or CHRONICLE_MLFLOW_URI=off: nothing is sent, which is the default
MLFLOW_LOCAL = "local"  # the store of `default_uri`
LAST_PASS_SECONDS = 300
INTERVAL_SECONDS = 2.0
PATIENCE_SECONDS = 60.0


def default_uri(paths: RunPaths) -> str:
    """Return `sqlite:///…/logs/mlflow.db`, in the directory that holds the runs."""
    return f"sqlite:///{(paths.run_dir.parent / 'mlflow.db').absolute()}"


def store_of(uri: str | None, paths: RunPaths) -> str:
    """The store that `mlflow_uri` names: `local`, and nothing, are the default one."""
    return default_uri(paths) if uri in (None, "", MLFLOW_LOCAL) else str(uri)


@dataclass(slots=True)
class MlflowProcess:
    """Handle of the MLflow process; `pid` is None when there is none."""

    pid: int | None = None
    stdin_fd: int | None = None  # closing it tells the process to finish

    def stop(self, timeout_seconds: float = 3.0) -> bool:
        """Tell the process to end after a last pass; return whether it ended in time.

        The process is not killed: MLflow may be creating its tables, and a partial set makes the store unusable. It ends
        by itself, at the latest after LAST_PASS_SECONDS.
        """
        pid, stdin_fd, self.pid, self.stdin_fd = self.pid, self.stdin_fd, None, None
        if pid is None or stdin_fd is None:
            return True
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.close(stdin_fd)
            return True  # it has ended already
        os.close(stdin_fd)
        try:
            ended = select.poll()  # not `select`: it refuses descriptors from 1024 on
            ended.register(process, select.POLLIN)
            return bool(ended.poll(timeout_seconds * 1000))
        finally:
            os.close(process)


def start_mlflow_process(
    paths: RunPaths,
    uri: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    talk: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> MlflowProcess:
    """Start the process that sends this run to MLflow. Failures are reported in one line and do not raise.

    The process is forked twice, so it is not our child: a supervisor that ends or waits for its descendants leaves it
    alone. It ends when our end of its stdin closes, which also happens when we are killed.
    """
    if importlib.util.find_spec("mlflow") is None:
        talk("mlflow is not installed: nothing is sent to MLflow (pip install 'chronicle-ml[mlflow]')")
        return MlflowProcess()
    words = [sys.executable, "-m", "chronicle.integrations.mlflow_process", "--run-dir", str(paths.run_dir.absolute())]
    words += ["--uri", store_of(uri, paths)]
    environment = {**(os.environ if environ is None else environ)}
    told, tell = os.pipe()
    stdin, stdin_fd = os.pipe()

    def leave() -> None:
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.nice(10)

    try:
        between = subprocess.Popen(
            words, stdin=stdin, stdout=subprocess.DEVNULL, env=environment, preexec_fn=leave, start_new_session=True
        )
        between.wait()
        pid = int(os.read(told, 32))
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        os.close(stdin_fd)
        talk(f"cannot start the mlflow process: {problem}; send the run later with `chronicle mlflow sync`")
        return MlflowProcess()
    finally:
        for fd in (told, tell, stdin):
            os.close(fd)
    return MlflowProcess(pid, stdin_fd)


def feed_until_stdin_ends(arguments: list[str] | None = None) -> int:
    """Send new data until stdin ends (the supervisor closed it or has ended), then once more."""
    from chronicle.integrations.mlflow import Projection

    parser = argparse.ArgumentParser(prog="chronicle.integrations.mlflow_process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--uri", required=True)
    options = parser.parse_args(arguments)
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    projection, wait, complained = Projection(RunPaths(options.run_dir), options.uri), INTERVAL_SECONDS, False
    while True:
        last = over.is_set()
        try:
            projection.feed()
            wait = INTERVAL_SECONDS
        except ChronicleError as problem:
            if not complained:
                print(f"chronicle: {problem.message}; {problem.remedy or ''}".rstrip("; "), file=sys.stderr)
                complained = True
            projection.close()
            projection = Projection(RunPaths(options.run_dir), options.uri)
            wait = min(2 * wait, PATIENCE_SECONDS)
        if last:
            return 0
        over.wait(wait)


def _wait_for_end(over: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    signal.alarm(LAST_PASS_SECONDS)
    over.set()


if __name__ == "__main__":
    try:
        sys.exit(feed_until_stdin_ends())
    except KeyboardInterrupt:
        sys.exit(130)
