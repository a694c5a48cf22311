"""Checkpoints by their real writers, made once and copied for each test that changes them.

Each builder runs the writer in its own processes (frameworks keep process-wide state) and caches the result below the
session's temporary directory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILDERS = Path(__file__).parent
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class CheckpointFactory:
    """Builds each kind once below `cache` and hands out copies."""

    cache: Path

    def accelerate(self, target: Path, **options: Any) -> Path:
        """An Accelerate checkpoint in `target`; options as in `accelerate_run.py`."""
        return self._copy("accelerate_run.py", target, options, options.get("processes", 1))

    def deepspeed(self, target: Path, **options: Any) -> Path:
        """A DeepSpeed checkpoint in `target`, raw or under Accelerate; options as in `deepspeed_run.py`."""
        return self._copy("deepspeed_run.py", target, options, options.get("processes", 1))

    def fsdp(self, target: Path, **options: Any) -> Path:
        """An FSDP checkpoint of Accelerate in `target`; options as in `fsdp_run.py`."""
        return self._copy("fsdp_run.py", target, options, options["processes"])

    def framework(self, target: Path, writer: str, **options: Any) -> Path:
        """A checkpoint of "trainer" or "lightning" in `target`, or of "dcp" or "plain" torch, made right here."""
        if writer in ("dcp", "plain"):
            from tests.builders import framework_runs

            target.mkdir(exist_ok=True)
            {"dcp": framework_runs.dcp, "plain": framework_runs.plain}[writer](target, options)
            return target
        return self._copy("framework_runs.py", target, {"writer": writer, **options}, options.get("processes", 1))

    def _copy(self, script: str, target: Path, options: dict[str, Any], processes: int) -> Path:
        key = script + "-" + "-".join(f"{k}={options[k]}" for k in sorted(options)).replace("/", "_")[:150]
        built = self.cache / key
        if not built.exists():
            working = built.with_name(built.name + ".making")
            shutil.rmtree(working, ignore_errors=True)
            working.mkdir(parents=True)
            run_script(script, [str(working), json.dumps(options)], processes=processes)
            working.rename(built)
        shutil.copytree(built, target, dirs_exist_ok=True, symlinks=True)
        return target


def run_script(script: str, arguments: list[str], *, processes: int = 1, environ: dict[str, str] | None = None) -> None:
    """Run a builder script in one process, or in several real ranks through torchrun; raises with its output."""
    command = [sys.executable]
    # DeepSpeed wants a launcher's variables, else it asks for MPI
    if processes > 1 or script.startswith("deepspeed") or '"deepspeed"' in arguments[-1]:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0",
                    "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environ or {})}
    done = subprocess.run(
        [*command, str(BUILDERS / script), *arguments],
        capture_output=True,
        text=True,
        env=variables,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        talk = "\n".join(line for line in done.stderr.splitlines() if "[rank" not in line or "rank0" in line)
        raise RuntimeError(f"{script} failed with {done.returncode}:\n{done.stdout[-1000:]}\n{talk[-4000:]}")


def convert_to_universal(root: Path, tag: str) -> None:
    """DeepSpeed's own converter; clients other than Megatron need the missing state injected."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", tag,
               "--output_folder", f"{tag}_universal", "--inject_missing_state"]  # fmt: skip
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=root, env=variables, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
