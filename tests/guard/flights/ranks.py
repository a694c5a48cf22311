"""Two gloo ranks that train one small model, with a bug in the way they keep their weights equal."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from chronicle.launch.ranks import leave_group
from chronicle.resume.envelope import Breach, BreachKind
from tests.guard.flights.fly import Flight, network

STEPS = 6
CAUSES = ("healthy", "clip", "moved", "unwrapped", "zeroed", "lossy", "nan")


def fly_ranks(cause: str) -> Flight:
    """What the main process told about one cause; all causes are played by the same two ranks, once."""
    record = _played()[cause]
    told = {kind: Breach(kind=BreachKind(kind), step=step, words=words, seen=seen) for kind, step, seen, words in record}
    return Flight(told=told)


@functools.cache
def _played() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.guard.flights.ranks", directory]
        ranks = [
            subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        errors = [rank.communicate(timeout=900)[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("\n".join(errors))
        played: dict[str, list[Any]] = json.loads((Path(directory) / "told.json").read_text())
        return played


def main() -> None:
    """One rank: plays every cause and one healthy training."""
    import torch.distributed as dist

    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    told = {cause: _train(directory / cause, cause, dist.get_rank()) for cause in CAUSES}
    if dist.get_rank() == 0:
        (directory / "told.json").write_text(json.dumps(told))
    dist.barrier()
    leave_group()


def _train(directory: Path, cause: str, rank: int) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    import chronicle

    torch.manual_seed(0)
    plain = network()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = chronicle.attach(directory / "run", model, optimizer)
    torch.manual_seed(rank)
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        _before_forward(cause, number, rank, model)
        inside: Any = plain if cause == "unwrapped" else model
        x = torch.randn(8, 8)
        (inside(x) - x.sum(1, keepdim=True)).square().mean().backward()
        _before_step(cause, number, rank, plain)
        optimizer.step()
    (directory / "checkpoint").mkdir(parents=True, exist_ok=True)
    run.saved(directory / "checkpoint")
    run.session.sealer.finish()
    run.session.envelope.end()
    return [(kind.value, b.step, b.seen, b.words) for kind, b in run.session.envelope.log.told.items()]


def _before_forward(cause: str, number: int, rank: int, model: Any) -> None:
    if cause == "moved" and number == 3:
        model.double()  # as a move to another device and back: new gradient accumulators, without DDP's hooks
        model.float()
    if cause == "zeroed" and number == 3 and rank == 1:
        with torch.no_grad():
            next(model.parameters()).zero_()


def _before_step(cause: str, number: int, rank: int, plain: Any) -> None:
    gradients = [p.grad for p in plain.parameters()]
    if cause == "clip" and rank == 0:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    if cause == "lossy" and number == 3 and rank == 1:
        gradients[0].zero_()
    if cause == "nan" and number == 3 and rank == 1:
        gradients[0].fill_(float("nan"))


if __name__ == "__main__":
    main()
