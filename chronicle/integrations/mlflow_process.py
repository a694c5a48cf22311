"""The process that sends a run to MLflow while a launch runs, and how `chronicle run` starts and stops it.

mlflow is imported in that process only. It sends new data every two seconds until its stdin ends, then once more.
"""

import argparse
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from chronicle.errors import ChronicleError
from chronicle.launch.beside import Beside, start_beside, wait_for_end
from chronicle.paths import RunPaths

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


def start_mlflow_process(
    paths: RunPaths,
    uri: str | None = None,
    *,
    talk: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Beside:
    """Start the process that sends this run to MLflow. Failures are reported in one line and do not raise."""
    if importlib.util.find_spec("mlflow") is None:
        talk("mlflow is not installed: nothing is sent to MLflow (pip install 'chronicle-ml[mlflow]')")
        return Beside()
    words = [sys.executable, "-m", "chronicle.integrations.mlflow_process", "--run-dir", str(paths.run_dir.absolute())]
    words += ["--uri", store_of(uri, paths)]
    later = "send the run later with `chronicle mlflow sync`"
    return start_beside(words, os.environ, what="the mlflow process", later=later, talk=talk)


def feed_until_stdin_ends() -> int:
    """Send new data until stdin ends (the supervisor closed it or has ended), then once more."""
    from chronicle.integrations.mlflow import Projection

    parser = argparse.ArgumentParser(prog="chronicle.integrations.mlflow_process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--uri", required=True)
    options = parser.parse_args()
    over = threading.Event()
    threading.Thread(target=wait_for_end, args=(over, LAST_PASS_SECONDS), daemon=True).start()
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


if __name__ == "__main__":
    try:
        sys.exit(feed_until_stdin_ends())
    except KeyboardInterrupt:
        sys.exit(130)
