"""A training under `chronicle run` as a job of submitit, with its `checkpoint()` protocol.

    executor.update_parameters(slurm_signal_delay_s=120, …)   # longer than --grace
    executor.submit(SupervisedTraining("--run", "tr-190", "--restarts", "100", "--grace", "90", "--", "torchrun", "train.py"))

submitit calls `checkpoint()` in the job when SLURM preempts it or its time ends, and requeues the job with what that returns.
Here the launch is warned (USR1), saves within its grace and ends; the requeued job goes on from the newest verified checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

WAIT_ONLY = os.WEXITED | os.WNOWAIT  # leaves the process to whoever collects it, so a signal handler may wait as well


class SupervisedTraining:
    """A callable for `executor.submit`; `words` are the arguments of `chronicle run`."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the process: submitit writes this object into a file, for the requeued job."""
        return {"words": self.words, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __call__(self) -> int:
        """Train to the end. Raises `RuntimeError` where `chronicle run` ends with another code than 0."""
        self._process = subprocess.Popen([sys.executable, "-m", "chronicle_ml", "run", *self.words])
        os.waitid(os.P_PID, self._process.pid, WAIT_ONLY)
        code = self._process.wait()
        if code != 0:
            raise RuntimeError(f"`chronicle run` ended with {code}: `chronicle status` says why")
        return code

    def checkpoint(self) -> Any:
        """Let the launch save and end; what submitit is to run next. Called by submitit in a signal handler."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            os.waitid(os.P_PID, self._process.pid, WAIT_ONLY)
        return DelayedSubmission(self)
