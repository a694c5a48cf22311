"""What `chronicle inspect` costs: one file of 2 GB, and a ZeRO directory of 512 ranks made by repeating a real rank's file.

Prints processor seconds and peak memory of the whole command, and the ratio to `torch.load`. Files lie in a temporary
directory (`--dir` to choose it) and are removed.

    python -m benchmarks.inspect_speed [--gigabytes 2] [--ranks 512] [--dir DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rollback.files.state_file import read_state_file, write_edited_copy
from tests.builders.checkpoints import CheckpointFactory

MAKE_LARGE = """
import sys, torch
n = int(float(sys.argv[2]) * 2**30 / 4 / 20)
parameters = {f"layer.{i}": torch.empty(n) for i in range(20)}
scheduler = {"base_lrs": [1e-3] * 2, "last_epoch": 30500, "_step_count": 30501, "_last_lr": [9e-4] * 2}
optimizer = {"state": {0: {"step": torch.tensor(30500.0)}}, "param_groups": [{"lr": 9e-4, "params": [0]}]}
torch.save({"module": parameters, "scheduler": scheduler, "optimizer": optimizer, "global_steps": 30500}, sys.argv[1])
"""
LOAD = "import sys, torch; torch.load(sys.argv[1], weights_only=True, mmap=sys.argv[2] == 'mmap')"
INSPECT = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a whole process and its children: processor seconds, peak resident memory of the largest, in MB."""

    seconds: float
    memory_mb: float


def cost_of(code: str, *arguments: str) -> Cost:
    """Run `python -c code arguments` and measure it, children included (the least of four runs)."""
    measure = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True, "
        "stdout=subprocess.DEVNULL); u = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(u.ru_utime + u.ru_stime, u.ru_maxrss / 1024)"
    )
    # An installed command has its byte code at hand; the first of the runs makes it.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "inspect_speed_pycache")
    command = [sys.executable, "-c", measure, code, *arguments]
    found = []
    for _ in range(4):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
        seconds, memory = map(float, done.stdout.split())
        found.append(Cost(seconds=seconds, memory_mb=memory))
    return min(found, key=lambda cost: cost.seconds)


def many_ranks(folder: Path, ranks: int) -> Path:
    """A tag directory of `ranks` ranks: the files of a real two-rank run, repeated; the world size is edited to match."""
    root = CheckpointFactory(folder / "cache").deepspeed(folder / "zero", stage=1, processes=2)
    tag = root / "global_step10"
    part = tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for rank in range(1, ranks):
        shutil.copy(part, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = tag / "mp_rank_00_model_states.pt"
    write_edited_copy(read_state_file(model), {("dp_world_size",): ranks}, tag / "edited")
    os.replace(tag / "edited", model)
    return tag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--dir", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        folder = Path(name)
        tempfile.tempdir = name
        large = folder / "large.pt"
        subprocess.run([sys.executable, "-c", MAKE_LARGE, large, str(chosen.gigabytes)], check=True)
        size = large.stat().st_size / 1e9
        inspect, loaded = cost_of(INSPECT, "inspect", str(large)), cost_of(LOAD, str(large), "mmap")
        whole = cost_of(LOAD, str(large), "whole")
        print(f"one file of {size:.2f} GB, {os.cpu_count()} cores, whole process, least of four")
        for label, cost in (("inspect", inspect), ("torch.load, mmap", loaded), ("torch.load", whole)):
            ratio = cost.seconds / inspect.seconds
            print(f"  {label:<18} {cost.seconds * 1e3:7.0f} ms CPU  {cost.memory_mb:7.0f} MB  {ratio:6.1f} ×")
        large.unlink()
        tag = many_ranks(folder, chosen.ranks)
        many = cost_of(INSPECT, "inspect", str(tag))
        base = cost_of(INSPECT, "--version")
        per_file = (many.seconds - base.seconds) / (chosen.ranks + 1)
        print(f"{chosen.ranks} ranks of ZeRO 1, {sum(f.stat().st_size for f in tag.iterdir()) / 1e6:.1f} MB")
        cost = f"{many.seconds * 1e3:7.0f} ms CPU  {many.memory_mb:7.0f} MB  {per_file * 1e3:.2f} ms a file"
        print(f"  {'inspect':<18} {cost}")


if __name__ == "__main__":
    main()
