"""One launch of `train.py` of a folder, unedited, killed with SIGKILL after so many optimizer steps.

A launch is a fork of a process that has imported the script's libraries already: on two busy cores the imports alone take
longer than four launches.
"""

import contextlib
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["launch"]


def launch(
    folder: Path,
    kill_after: int,
    environment: Mapping[str, str],
    seconds: float,
    modules: Sequence[str],
    entry: str = "",
) -> int | None:
    """Fork this process, in which `modules` are imported first; the exit code, or None when it did not end in time.

    `kill_after` 0 lets the script finish. Output is appended to `output.txt`. `entry` is how a script
    without a line is entered: `startup` by the file that `chronicle run` starts Python with, `fabric` by the entry point that
    Fabric calls.
    """
    for module in modules:
        importlib.import_module(module)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(folder, environment)
        _end_with(kill_after, entry)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # other ranks of a script that forked them
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _become(folder: Path, environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.update(environment)
    os.chdir(folder)
    out = os.open("output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(out, stream)


def _end_with(kill_after: int, entry: str) -> None:
    code = 1
    try:
        _enter(entry)
        _perform(kill_after)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:  # noqa: BLE001 the script's own error is its result
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _run_exit_handlers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(entry: str) -> None:
    if entry == "startup":
        from chronicle.launch.launchers import STARTUP_DIR

        runpy.run_path(str(STARTUP_DIR / "sitecustomize.py"))
    elif entry == "fabric":
        from chronicle.resume.adapters.fabric import callbacks_factory

        callbacks_factory()


def _run_exit_handlers() -> None:
    """What the interpreter would do at its end: threads joined, exit handlers called."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _perform(kill_after: int) -> None:
    sys.argv = ["train.py"]
    sys.path[0:0] = [os.getcwd()]
    if kill_after:
        _kill_after(kill_after)
    runpy.run_path(str(Path.cwd() / "train.py"), run_name="__main__")


def _kill_after(num_steps: int) -> None:
    """Count the steps of every optimizer of this process from the outside, as no edit of the script could change it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = [0]

    def count(*_: object) -> None:
        seen[0] += 1
        if seen[0] == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
