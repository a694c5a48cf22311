"""What the guard costs: per training step, per save, per load, and what 16,384 ranks would exchange.

`python -m benchmarks.guard_overhead [--params MILLIONS]`. Times are medians; CPU seconds beside wall seconds, because
the disk and the neighbours are in the wall. The numbers for many ranks are computed from real digests and a real
manifest of that size; no network of that size was at hand.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from chronicle.resume.adapters.hooks import hook_optimizer_steps
from chronicle.resume.checks.memory import check_generators, check_memory
from chronicle.resume.contract import Expectation, Options
from chronicle.resume.fingerprint import LiveState, fingerprint_memory
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.session import GuardSession

NUM_RANKS = 16384


def median_of(work: Callable[[], object], times: int) -> tuple[float, float]:
    """(wall, CPU) seconds, medians."""
    walls, cpus = [], []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def build(millions: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, LiveState]:
    """A stack of linear layers with AdamW state and a schedule."""
    width = 1024
    layers = max(1, round(millions * 1e6 / (width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    live = LiveState(models=(model,), optimizers=(optimizer,), schedulers=(BoundScheduler(scheduler=scheduler),))
    return model, optimizer, live


def measure_save(millions: float) -> None:
    """Fingerprint against writing the same state, with and without fsync."""
    model, optimizer, live = build(millions)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIR")) as folder:
        path = Path(folder) / "state.pt"

        def save(durably: bool) -> None:
            torch.save(state, path)
            if durably:
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

        cached, cached_cpu = median_of(lambda: save(False), 5)
        synced, _ = median_of(lambda: save(True), 5)
    print_wall, print_cpu = median_of(lambda: fingerprint_memory(live), 5)
    num = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"state of {num:.0f}M parameters ({num * 12:.0f} MB with AdamW moments)")
    print(f"  save, page cache        {cached * 1e3:9.1f} ms wall {cached_cpu * 1e3:9.1f} ms CPU")
    print(f"  save, fsynced           {synced * 1e3:9.1f} ms wall")
    print(
        f"  fingerprint of memory   {print_wall * 1e3:9.1f} ms wall {print_cpu * 1e3:9.1f} ms CPU: "
        f"{100 * print_wall / synced:.1f} % of the fsynced, {100 * print_wall / cached:.1f} % of the page-cache save"
    )


def measure_step() -> None:
    """The hook after its first fifty steps, per optimizer step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    live = LiveState(models=(model,), optimizers=(optimizer,))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def thousand() -> None:
        for _ in range(1000):
            optimizer.step()

    thousand()
    bare, _ = median_of(thousand, 15)
    with tempfile.TemporaryDirectory() as folder:
        session = GuardSession(lambda: live, Options(run_dir=Path(folder) / "run"))
        hook_optimizer_steps(session)
        thousand()
        guarded, _ = median_of(thousand, 15)
    cost = (guarded - bare) / 1000
    print(f"guard per step, after the first fifty: {cost * 1e6:.1f} µs = {100 * cost / 0.1:.4f} % of a step of 100 ms")


def measure_ranks() -> None:
    """Message, manifest and comparison for many ranks."""
    _, _, live = build(2)
    memory = fingerprint_memory(live)
    own = memory.ranks[0]
    names = ("python", "numpy", "torch", "cuda:8")
    digests = tuple(
        RankDigest(rank=r, rng=dict.fromkeys(names, f"{r:016x}"), weights=own.weights, moments=f"{r:016x}")
        for r in range(NUM_RANKS)
    )
    message = len(json.dumps(digests[-1].to_json(), separators=(",", ":")))
    large = replace(memory, ranks=digests)
    text = json.dumps(large.to_json(), separators=(",", ":"))
    writing, _ = median_of(lambda: json.dumps(large.to_json(), separators=(",", ":")), 3)
    reading, _ = median_of(lambda: Memory.from_json(json.loads(text)), 3)
    parsed = Memory.from_json(json.loads(text))
    found = replace(memory, ranks=(digests[777],))
    expectation = Expectation(basis="manifest", memory=parsed)
    comparing, _ = median_of(
        lambda: check_memory(expectation, found, rank=777) + check_generators(expectation, found, rank=777), 3
    )
    print(
        f"{NUM_RANKS} ranks: digest of a rank {message} bytes, {message * NUM_RANKS / 1e6:.1f} MB gathered by the main process"
    )
    print(
        f"  memory in the manifest {len(text) / 1e6:.1f} MB: written in {writing * 1e3:.0f} ms, "
        f"read in {reading * 1e3:.0f} ms, compared in {comparing * 1e3:.1f} ms"
    )
    print(f"  report of a refusal: at most 1 KB a rank, {NUM_RANKS / 1024:.0f} MB gathered in one all_gather")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=50.0, help="millions of parameters of the save [50]")
    arguments = parser.parse_args()
    measure_step()
    measure_save(arguments.params)
    measure_ranks()
