"""Start the trainer in fresh processes, as a user does; several small runs share one start of torch.

`python launches.py` is the worker: it reads a list of jobs (JSON on the command line) and trains each in turn.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from chronicle.launch.ranks import leave_group

ROOT = Path(__file__).resolve().parents[2]
TINY = ("model.d_model=32", "num_layers=1", "d_ff=32", "window_bytes=8", "batch_size=8", "warmup_steps=3",
        "decay_steps=4", "raise_step=none", "raise_factor=1.0", "eval_windows=8", "checkpoint_every=1000",
        "eval_every=1000", "log_every=1", "summary=false")


def job(directory: Path, *settings: str, resume: str = "auto", stop_at: int | None = None,
        launch: str = "launch", environ: Mapping[str, str] | None = None,
        nan: tuple[int, int] | None = None) -> dict[str, Any]:
    """One launch of the tiny recipe; checkpoints in `directory/checkpoints`, metrics in `directory/<launch>`.

    `nan` plants a loss that is not a number: (rank, step).
    """
    return {"nan": nan, "directory": str(directory), "settings": [*TINY, *settings], "resume": resume, "stop_at": stop_at,
            "launch": launch, "environ": dict(environ or {})}


def run_jobs(jobs: Iterable[Mapping[str, Any]], *, num_processes: int = 1, check: bool = True,
             timeout_seconds: int = 900) -> subprocess.CompletedProcess[str]:
    """Run the jobs one after the other in one set of ranks (torchrun above one process)."""
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes),
                    "--master_port", str(_free_port())]
    command += [__file__, json.dumps(list(jobs))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # ACCELERATE_USE_CPU would turn DeepSpeed off
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except BaseException:
        process.terminate()  # torchrun ends its ranks then; a KILL would leave them
        out, err = process.communicate(timeout=60)
        print(f"ended after {timeout_seconds} s or at a request:\n{out[-3000:]}\n{err[-6000:]}", file=sys.stderr)
        raise
    if check and process.returncode:
        raise AssertionError(f"trainer ended with {process.returncode}:\n{out[-3000:]}\n{err[-6000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(jobs: list[dict[str, Any]]) -> int:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    from bit_transformer.errors import print_error
    from bit_transformer.recipes import find_recipe, with_settings
    from bit_transformer.train import train
    from chronicle.errors import ChronicleError

    try:
        for each in jobs:
            AcceleratorState._reset_state(reset_partial_state=False)
            GradientState._reset_state()
            directory = Path(each["directory"])
            os.environ.update({"CHRONICLE_RUN_DIR": str(directory / "run"), "CHRONICLE_RUN": "run",
                               "CHRONICLE_LAUNCH_DIR": str(directory / each["launch"]), **each["environ"]})
            if each["nan"] and int(os.environ.get("RANK", "0")) == each["nan"][0]:
                _plant_nan(int(each["nan"][1]))
            try:
                train(with_settings(find_recipe("demo"), each["settings"]), directory / "checkpoints", each["resume"],
                      stop_at=each["stop_at"])
            except ChronicleError as problem:
                print_error(problem)
                return problem.exit_code
    finally:
        if dist.is_initialized():  # as the trainer does: ranks that just leave may abort while gloo's threads still run
            leave_group()
    return 0


def _plant_nan(step: int) -> None:
    from bit_transformer import train as module

    calls, original = iter(range(1, 1 << 30)), module.next_symbol_losses

    def losses(*arguments: Any) -> Any:
        found = original(*arguments)
        return found * float("nan") if next(calls) == step else found

    module.next_symbol_losses = losses


if __name__ == "__main__":
    sys.exit(_work(json.loads(sys.argv[1])))
