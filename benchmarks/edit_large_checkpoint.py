"""Scaling the LR of a multi-gigabyte checkpoint: plan and apply as library calls, against `torch.load` and `torch.save`.

    python -m benchmarks.edit_large_checkpoint                 2 GB, ratio, bytes written
    python -m benchmarks.edit_large_checkpoint --flat          0.2, 1, 2 and 5 GB: the time does not depend on the size
    python -m benchmarks.edit_large_checkpoint --command       CPU of the whole command as typed, by size, copied and patched
    python -m benchmarks.edit_large_checkpoint --directory D   where the files are made (a real disk, not tmpfs)

Setting: one file with one name, no full checksums, page cache warm for both (each is read once before). Every result is
then loaded by `torch.load` in its four modes and tested by `zipfile.testzip`. The time of the whole command, Python's
start included, is printed beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

GB = 10**9
NUM_TENSORS = 20
REPEATS = 5

ONE_LINER = """
import os, sys, time, torch
began = time.perf_counter()
path = sys.argv[1]
state = torch.load(path, weights_only=False)
scheduler, optimizer = state["lr_scheduler"], state["optimizer"]
scheduler["base_lrs"] = [x * 0.5 for x in scheduler["base_lrs"]]
scheduler["_last_lr"] = [x * 0.5 for x in scheduler["_last_lr"]]
for group in optimizer["param_groups"]:
    group["lr"] *= 0.5
    group["initial_lr"] *= 0.5
torch.save(state, path)
print(time.perf_counter() - began)
with open(path, "rb") as file:
    os.fsync(file.fileno())
print(time.perf_counter() - began)
"""


def make_checkpoint(path: Path, size_bytes: int) -> None:
    """One `torch.save` of tensors, an optimizer's groups and a real scheduler's state."""
    import torch

    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(10):
        optimizer.zero_grad()
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    count = size_bytes // 4 // NUM_TENSORS
    model = {f"layer.{i}.weight": torch.rand(count) for i in range(NUM_TENSORS)}
    state = {"model": model, "optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict(), "step": 10}
    torch.save(state, path)


def edit(root: Path, path: Path, scale: float) -> float:
    """Seconds for plan and apply through the library, journalling to memory."""
    from rollback.checkpoint.listing import open_checkpoint, read_state
    from rollback.plan.plan import compose_plan
    from rollback.plan.request import RollbackRequest
    from rollback.transaction.apply import apply_plan, read_inputs

    began = time.perf_counter()
    checkpoint = open_checkpoint(path)
    state = read_state(checkpoint)
    assert checkpoint.step is not None
    plan = compose_plan(
        RollbackRequest(step=checkpoint.step, lr_scale=scale),
        checkpoint,
        [checkpoint],
        state,
        run="benchmark",
        root=str(root),
        inputs=read_inputs(checkpoint.folder, [path.name]),
    )
    count = iter(range(10))
    apply_plan(plan, objects_dir=root.parent / "objects", record=lambda kind, data: f"{time.time_ns()}-{next(count)}")
    return time.perf_counter() - began


def bytes_written() -> int:
    """Bytes this process handed to write calls so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def check_loads(path: Path, lr: float) -> None:
    """All four ways of `torch.load`, and the zip's own checksums."""
    import torch

    for mmap in (False, True):
        for weights_only in (False, True):
            state: Any = torch.load(path, mmap=mmap, weights_only=weights_only)
            found = state["optimizer"]["param_groups"][0]["lr"]
            assert abs(found - lr) < 1e-12, (mmap, weights_only, found, lr)
            del state
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def read_once(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def measure(directory: Path, size_bytes: int, *, against_torch: bool, check: bool) -> tuple[float, int]:
    """(best seconds, bytes written) of the edit; prints what it did."""
    root = directory / "checkpoints"
    root.mkdir(parents=True)
    path = root / "ckpt.pt"
    try:
        make_checkpoint(path, size_bytes)
        os.sync()
        read_once(path)
        lr, seconds = 1e-3 * (1 + math.cos(math.pi / 10)) / 2, []  # CosineAnnealingLR, 10 of 100 steps
        for number in range(REPEATS):
            before = bytes_written()
            seconds.append(edit(root, path, 0.5 if number % 2 == 0 else 2.0))
            written = bytes_written() - before
        best = min(seconds)
        print(f"{path.stat().st_size / GB:5.2f} GB  plan + apply {best * 1000:7.1f} ms (best of {REPEATS}, "
              f"all: {', '.join(f'{s * 1000:.0f}' for s in seconds)})  {written} bytes written", flush=True)  # fmt: skip
        if check:
            check_loads(path, lr * 0.5)
            print("         torch.load in four modes and zipfile.testzip accept the result")
        if against_torch:
            compare(directory, root, path, best)
        return best, written
    finally:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        shutil.rmtree(directory / "objects", ignore_errors=True)


def compare(directory: Path, root: Path, path: Path, best: float) -> None:
    """The seed's one-liner, extended to all places, and our command as typed."""
    done = subprocess.run([sys.executable, "-c", ONE_LINER, str(path)], capture_output=True, text=True, check=True)
    seconds, durable_seconds = map(float, done.stdout.split())
    print(f"         torch.load + torch.save {seconds:.2f} s (torch imported before)  ratio {seconds / best:.0f}")
    print(f"         the same, then fsync, as ours does: {durable_seconds:.2f} s  ratio {durable_seconds / best:.0f}")
    words = ["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", "--run", "b"]
    places = ["--logs", str(directory / "logs"), "--checkpoints", str(root)]
    code = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(f"         whole command `chronicle rollback`: {time.perf_counter() - began:.2f} s")


COMMAND = "import sys; from chronicle.cli.main import main; main(sys.argv[1:])"
COPIED = "import rollback.transaction.apply as a; a.PATCHED_BYTES = a.LARGE_BYTES; "  # as before 2026-11-23
SIZES = (100_000, 20_000_000, 100_000_000)


def child_cpu(words: list[str]) -> float:
    """User and system CPU seconds of a program, by what the kernel counted for it."""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(words, stdout=nowhere, stderr=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (words, process.returncode)
    return usage.ru_utime + usage.ru_stime


def measure_command(directory: Path) -> None:
    """A fresh run and a checkpoint of each size, edited by the whole command; the one-liner and Python alone beside it."""
    titles = f"{'as it is':>18}{'always copied':>15}{'one-liner':>11}{'python -c pass':>16}"
    print(f"{'GB':<22}{titles}   CPU s, median of {REPEATS}")
    for size_bytes in SIZES:
        found: dict[str, list[float]] = {"now": [], "copied": [], "torch": [], "python": []}
        for number in range(REPEATS):
            for kind, code in (("now", COMMAND), ("copied", COPIED + COMMAND)):
                top = directory / f"{kind}-{number}"
                path = top / "checkpoints" / "ckpt.pt"
                path.parent.mkdir(parents=True)
                make_checkpoint(path, size_bytes)
                os.sync()
                read_once(path)
                time.sleep(2.1)  # a file that was written just now is hashed again at every use
                words = ["rollback", "--to", "10", "--lr-scale", "0.5", "--yes", "--run", "b"]
                places = ["--logs", str(top / "logs"), "--checkpoints", str(path.parent)]
                found[kind].append(child_cpu([sys.executable, "-c", code, *words, *places]))
                if kind == "now":
                    check_loads(path, 1e-3 * (1 + math.cos(math.pi / 10)) / 4)
                    found["torch"].append(child_cpu([sys.executable, "-c", ONE_LINER, str(path)]))
                shutil.rmtree(top)
            found["python"].append(child_cpu([sys.executable, "-c", "pass"]))
        median = {kind: sorted(times)[len(times) // 2] for kind, times in found.items()}
        columns = f"{median['now']:>18.3f}{median['copied']:>15.3f}{median['torch']:>11.2f}{median['python']:>16.3f}"
        print(f"{size_bytes / GB:<22.4g}{columns}   all now: {', '.join(f'{x:.2f}' for x in sorted(found['now']))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--flat", action="store_true", help="0.2 to 5 GB instead of one size")
    parser.add_argument("--command", action="store_true", help="CPU of the whole command, by size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chronicle-bench-", dir=options.directory) as name:
        directory = Path(name)
        filesystem = subprocess.run(["stat", "-f", "-c", "%T", name], capture_output=True, text=True, check=True)
        print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, filesystem {filesystem.stdout.strip()}")
        if options.command:
            measure_command(directory)
            return
        if not options.flat:
            measure(directory, int(options.gigabytes * GB), against_torch=True, check=True)
            return
        results = [measure(directory, int(g * GB), against_torch=False, check=g == 5.0) for g in (0.2, 1.0, 2.0, 5.0)]
        times, written = zip(*results, strict=True)
        print(f"slowest / fastest {max(times) / min(times):.2f}; bytes written {min(written)} to {max(written)}")


if __name__ == "__main__":
    main()
